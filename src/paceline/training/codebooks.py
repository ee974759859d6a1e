"""Training of codebooks: a target whose layers speak in discrete codes, and the codes.

The codebooks begin with clusters of the target's own states. Then all of the target's layers and all codes learn texts
together, each state replaced by its codes; codes and the states that they stand for are drawn to each other besides,
and codes that never fire are moved to states of the batch. Embedding and head stay as they are. What is written is a
checkpoint of its own, a model in place of the target, with the codebooks beside it.

Source: Codebook Features: Sparse and Discrete Interpretability for Neural Networks (arXiv:2310.17230).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from paceline.checkpoints import read_config
from paceline.codebooks import Books, write_books
from paceline.config import documented, option
from paceline.training.batches import Batch, Document, TargetView, packed
from paceline.training.draft_model import embedding_of, sliced, with_layers, write_checkpoint
from paceline.training.next_token import NextTokenTrainer, decoded, text_loss
from paceline.training.train_config import TextTrainConfig, TrainConfig
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.llm import LLM

DRAWN: Final = 10.0
"""Weight of the distance between states and the codes that stand for them, the mean of all books."""

REVIVED: Final = 50
"""Steps after which codes that have never fired are moved."""

ROUNDS, SEEN = 4, 4096
"""Of k-means before the first step: rounds, and tokens."""


@documented
@dataclass(frozen=True, kw_only=True)
class CodebookConfig(TextTrainConfig):
    """Says how large codebooks are and where they stand, beside what every training takes."""

    codebook_size: int = option(1024, "Of codebooks: codes of each.", low=2, high=1 << 16)
    codes: int = option(8, "Of codebooks: codes that make a state.")
    sites: tuple[str, ...] = option(("attention", "mlp"), "Of codebooks: modules of every layer that have one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("codes", self.codes, 1, self.codebook_size)


class CodebookTrainer(NextTokenTrainer):
    """Trains the target's layers to speak in codes, and the codes.

    Args:
        folder: of the target's checkpoint. layers: how many it has. rows: (v, hidden) of its head.
        size, firing, sites: of `Books`.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    name: ClassVar[str] = "codebooks"
    config_class: ClassVar[type[TrainConfig]] = CodebookConfig
    rate: ClassVar[float] = 1e-4
    drafts: ClassVar[bool] = False
    replaces_target: ClassVar[bool] = True

    def __init__(
        self, folder: Path, layers: int, rows: Tensor, *, size: int, firing: int, sites: tuple[str, ...]
    ) -> None:
        super().__init__(rows, 1)
        self.model, self.embed = sliced(folder, range(layers))
        parts = cast(nn.ModuleList, self.model.layers)
        self.books = Books(parts, rows.shape[1], size=size, firing=firing, sites=sites)
        self.steps = nn.Parameter(torch.zeros(()), requires_grad=False)  # kept with the weights of a stopped run

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[CodebookTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, CodebookConfig)
        info = llm.runner.info
        view = TargetView(llm.runner, None, torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        shape: dict[str, Any] = {"size": config.codebook_size, "firing": config.codes, "sites": config.sites}
        return cls(llm.folder, info.num_layers, view.rows, **shape), view

    @classmethod
    def command(cls, folder: Path, model: str | None) -> str:
        return f"paceline codebooks show {folder} 'Once upon a time'"

    def states(self, batch: Batch) -> Tensor:
        return decoded(self.model, embedding_of(self.embed, batch), batch)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        books = [book for _, book in self.books.items()]
        cross_entropy = text_loss(self.states(batch), self.rows, batch)
        distance = torch.stack([book.distance() for book in books]).mean()
        with torch.no_grad():
            self.steps.add_(1)
            if self.steps % REVIVED == 0:
                for book in books:
                    book.revive(generator)
        return cross_entropy + DRAWN * distance

    @torch.no_grad()
    def prepare(self, view: TargetView, documents: Sequence[Document], length: int, seed: int) -> None:
        """The codes become means of clusters of the target's own states."""
        batch = view.batch(packed(documents, length)[: max(1, SEEN // length)], length)
        with self.books.clustering(ROUNDS, torch.Generator().manual_seed(seed)):
            self.states(batch)

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """A checkpoint like the target's, with its tokenizer, and the codebooks."""
        config = {**read_config(llm.folder), "paceline_codebooks": dict(facts)}
        write_books(folder, self.books)
        write_checkpoint(folder, llm, config, with_layers(llm.folder, self.model))
