"""Training of prompt tokens (PPD): embeddings behind a text, at which the target is to say what it says further on.
They begin as embeddings of tokens by chance; only they learn (`row_guesses` says what).

Source: Hardware-Aware Parallel Prompt Decoding for memory-efficient acceleration of LLM inference (arXiv:2405.18628).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn

from paceline.config import documented, option
from paceline.training.batches import TargetView
from paceline.training.row_guesses import DEPTHS, RowGuessConfig, RowGuessTrainer, RowsOfPass
from paceline.training.train_config import TrainConfig

if TYPE_CHECKING:
    from paceline.llm import LLM


@documented
@dataclass(frozen=True, kw_only=True)
class PPDConfig(RowGuessConfig):
    """Says how many embeddings a prompt token has."""

    virtual_tokens: int = option(1, "Of ppd: embeddings of a prompt token, whose guesses are averaged.", low=1, high=64)


class PPDTrainer(RowGuessTrainer):
    """Trains prompt tokens; see `RowGuessTrainer`.

    Args:
        virtual_tokens: as of `PPDConfig`.
    """

    name: ClassVar[str] = "ppd"
    config_class: ClassVar[type[TrainConfig]] = PPDConfig
    rate: ClassVar[float] = 1e-2

    def __init__(self, folder: Path, layers: int, rows: Tensor, *, virtual_tokens: int = 1, **sizes: int) -> None:
        super().__init__(folder, layers, rows, **sizes)
        self.copies = virtual_tokens
        chosen = torch.randperm(len(rows))[: self.depths * virtual_tokens].view(self.depths, virtual_tokens)
        self.embeddings = nn.Parameter(self.embed[0](chosen).detach().clone())

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[PPDTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, PPDConfig)
        view, depths = cls.view_of(llm, config), config.depths or DEPTHS
        sizes = {"depths": depths, "anchors": config.anchors, "virtual_tokens": config.virtual_tokens}
        return cls(llm.folder, llm.runner.info.num_layers, view.rows, **sizes), view

    def run(self, model: nn.Module, embedded: Tensor, rows: RowsOfPass, **given: Any) -> Tensor:
        prompts = self.embeddings[rows.depths[rows.tokens :] - 1, rows.copies[rows.tokens :]]
        x = torch.cat((embedded, prompts))
        return cast(Tensor, model(inputs_embeds=x[None], **given).last_hidden_state[0])

    @torch.no_grad()
    def stored(self, llm: LLM) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The embeddings as the target's first layer reads them: with the family's multiplier, where transformers
        applies it later.
        """
        some = torch.arange(min(64, llm.runner.info.vocab_size))
        theirs, ours = self.embed[0].cpu()(some), cast(Any, llm.runner).embed(some.tolist()).float().cpu()
        return {"virtual_tokens": self.copies}, {"prompts": self.embeddings.cpu() * (ours.norm() / theirs.norm())}
