"""Sorted fine-tuning: one draft model learns to draft from several of its layers, and which of them serves a target.

The draft is the first layers of the target, or a draft model that is there. With h_e the state behind exit e, normed as
behind the last layer, and W the draft's own head, all exits learn the target's distribution in every batch:

    loss = sum_e CE(target's distribution, softmax(W h_e)), the mean over an answer's tokens

Embedding and head stay as they are. Then thresholds are chosen for the target, on the texts that chose the best state:
a token takes the first exit whose likeliest token has at least its threshold (`drafters.draft_model.s2d`). Of all
thresholds of a grid those are kept that promise the most tokens by a pass's cost, with `a` the share of tokens that are
right and `c` the mean cost of drafting one, by the parameters that are read:

    max over chains of k <= 8:  (1 + a + ... + a^k) / (1 + k c)

The checkpoint holds them by target, so that one draft serves several: `thresholds_only` adds those of another one.

Source: S2D: sorted speculative decoding for more efficient deployment of nested large language models
(arXiv:2407.01955).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from paceline.checkpoints import QUANTIZATION_KEYS, Tokenizer, open_checkpoint, read_config, resolve, same_tokenizer
from paceline.config import documented, option
from paceline.errors import CapabilityError, ConfigError
from paceline.models.heads import DraftExits, usual_exits
from paceline.training.batches import Batch, Document, TargetView, packed
from paceline.training.draft_model import (
    check_layers,
    embedding_of,
    layers_in,
    shortened,
    sliced,
    with_layers,
    write_checkpoint,
)
from paceline.training.judging import chain_length
from paceline.training.next_token import NextTokenTrainer, behind_layers
from paceline.training.train_config import TrainConfig
from paceline.utils import integer, need

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo

GRID: Final = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 2.0)
"""Thresholds that are tried; above 1 nothing leaves there."""

MOST_EXITS: Final = 4
"""Before the last layer."""

LONGEST: Final = 8
"""Drafts of a chain by which thresholds are compared."""

FIRST: Final = 0.9
"""Threshold of every exit before they are chosen."""

AT_ONCE: Final = 1024
"""States whose logits are computed together."""


@documented
@dataclass(frozen=True, kw_only=True)
class S2dConfig(TrainConfig):
    """Says which draft model learns, and where it has exits."""

    draft_model: str | None = option(
        None, "Folder or hub id of a draft model that becomes sorted; the model's first layers by default."
    )
    num_layers: int | None = option(None, "First layers of the model; three eighths of them by default.", low=2)
    exits: tuple[int, ...] | None = option(
        None, "Layers after which a token may leave: 6,9; a half and three quarters of the draft's by default.",
        check=check_layers,
    )  # fmt: skip
    thresholds_only: bool = option(
        False, "Learn nothing: choose the thresholds of --draft-model for one more model, beside those that it has."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.draft_model is not None
        need(given or not self.thresholds_only, "thresholds_only", "come with draft_model", self.thresholds_only)
        need(not given or self.num_layers is None, "num_layers", "be left out with draft_model", self.num_layers)


class Served(NamedTuple):
    """What thresholds promise.

    Attributes:
        thresholds: of each exit but the last.
        acceptance: share of tokens that are right. cost: of drafting one, that of the target's pass being 1.
        gain: tokens by cost, at best.
    """

    thresholds: tuple[float, ...]
    acceptance: float
    cost: float
    gain: float


def served_by(chances: Tensor, thresholds: Sequence[float]) -> Tensor:
    """(n,) int64 which exit serves each token: the first that is sure enough, else the last.

    Args:
        chances: (n, e - 1) of the likeliest token at each exit but the last.
    """
    sure = chances >= chances.new_tensor(thresholds)
    last = torch.ones(len(sure), 1, dtype=torch.bool, device=sure.device)
    return torch.cat((sure, last), 1).int().argmax(1)


def promised(chances: Tensor, right: Tensor, costs: Tensor, thresholds: Sequence[float]) -> Served:
    """What thresholds promise on tokens of a text.

    Args:
        chances: as of `served_by`. right: (n, e) whether each exit's likeliest token is the text's.
        costs: (e,) of drafting a token that leaves at each exit, that of the target's pass being 1.
    """
    served = served_by(chances, thresholds)
    acceptance, cost = right.gather(1, served[:, None]).float().mean().item(), costs[served].mean().item()
    gain = max(chain_length([acceptance] * count) / (1 + count * cost) for count in range(1, LONGEST + 1))
    return Served(tuple(thresholds), acceptance, cost, gain)


def best_thresholds(chances: Tensor, right: Tensor, costs: Tensor) -> Served:
    """The thresholds of `GRID` that promise the most; arguments as of `promised`."""
    tried = (promised(chances, right, costs, each) for each in product(GRID, repeat=chances.shape[1]))
    return max(tried, key=lambda one: one.gain)


class S2dTrainer(NextTokenTrainer):
    """Trains a draft model to draft from several layers, and chooses the thresholds of its exits.

    Args:
        folder: of the checkpoint whose layers learn. layers: of it, ascending. exits: without the last layer.
        rows: (v, hidden) of the target's head, by which it says what is learned. head: (v, d) of the draft's.
        target_size: parameters of the target. depths: as of `NextTokenTrainer`.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    name: ClassVar[str] = "s2d"
    config_class: ClassVar[type[TrainConfig]] = S2dConfig
    rate: ClassVar[float] = 3e-4
    head: Tensor

    def __init__(
        self, folder: Path, layers: Sequence[int], exits: DraftExits, rows: Tensor, head: Tensor, *, target_size: float,
        learns: bool = True, depths: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(rows, depths)
        self.folder, self.made_of, self.exits, self.learns = folder, tuple(layers), exits, learns
        self.model, self.embed = sliced(folder, layers)
        if not isinstance(getattr(self.model, "norm", None), nn.Module):
            raise CapabilityError(f"s2d cannot be trained for {type(self.model).__name__}; train a head instead")
        self.register_buffer("head", head, persistent=False)
        self.thresholds: tuple[float, ...] = (FIRST,) * len(exits.layers)
        self.target_size, self.chosen = target_size, dict[str, float]()

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, S2dConfig)
        if config.num_layers is not None:
            integer("num_layers", config.num_layers, 2, target.num_layers)
        need(len(config.exits or ()) <= MOST_EXITS, "exits", f"be {MOST_EXITS} at most", config.exits)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[S2dTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary.

        Raises:
            ConfigError: a draft model with another tokenizer, exits that it does not have.
            CapabilityError: one that is no causal model of transformers. CheckpointError: nothing to load there.
        """
        assert isinstance(config, S2dConfig)
        info, folder = llm.runner.info, llm.folder
        if config.draft_model is not None:
            folder = resolve(config.draft_model)
            if why := same_tokenizer(llm.tokenizer, Tokenizer.load(folder)):
                raise ConfigError(f"draft_model must have the model's tokenizer, got {config.draft_model!r}: {why}")
        stored = read_config(folder)
        count = layers_in(stored)
        if config.draft_model is None:
            count = config.num_layers or max(2, round(3 * count / 8))
        exits = exits_of(config, DraftExits.of(stored, str(folder)), count)
        view = TargetView(llm.runner, (), torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        head = view.rows if config.draft_model is None else head_of(folder, info.vocab_size).to(view.rows.device)
        trainer = cls(
            folder, range(count), exits, view.rows, head, target_size=info.weight_bytes / info.dtype.itemsize,
            learns=not config.thresholds_only, depths=config.depths,
        )  # fmt: skip
        return trainer, view

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        tokens = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
        targets = self.soft_targets(batch)
        losses = [targets.loss(states[tokens - 1], self.head, tokens) for states in self.at_exits(batch)]
        return torch.stack(losses).sum() / max(1, len(tokens))

    def states(self, batch: Batch) -> Tensor:
        return self.at_exits(batch)[-1].view_as(batch.embedded)

    def head_rows(self) -> Tensor:
        return self.head

    def at_exits(self, batch: Batch) -> list[Tensor]:
        """(b * t, d) normed states behind each exit, the last layer's the last."""
        behind = behind_layers(self.model, embedding_of(self.embed, batch), batch)
        norm = cast(nn.Module, self.model.norm)
        return [norm(behind[layer - 1].flatten(0, 1)) for layer in (*self.exits.layers, len(behind))]

    def likeliest_at_exits(self, states: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(m, e) chances of the likeliest tokens, and these, of states (m, d) behind each exit."""
        found = []
        for each in states:
            logits = [(part @ self.head.T.to(part.dtype)).float() for part in each.split(AT_ONCE)]
            best = [part.softmax(-1).max(-1) for part in logits]
            found.append((torch.cat([one.values for one in best]), torch.cat([one.indices for one in best])))
        chances, tokens = zip(*found, strict=True)
        return torch.stack(chances, 1), torch.stack(tokens, 1)

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """See `Trainer.predict`: each token is the one of the exit that serves it."""
        chances, tokens = self.likeliest_at_exits(self.at_exits(batch))
        drafted = tokens.gather(1, served_by(chances[:, :-1], self.thresholds)[:, None]).squeeze(1)
        for depth in range(self.depths):
            at, _ = batch.learned(depth + 2)
            yield at, drafted[at + depth + 1]

    @torch.no_grad()
    def choose(self, view: TargetView, documents: Sequence[Document], length: int) -> None:
        """See `Trainer.choose`: the thresholds."""
        found = []
        for row in packed(documents, length):
            batch = view.batch([row], length).to(self.rows.device)
            tokens = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
            chances, said = self.likeliest_at_exits([states[tokens - 1] for states in self.at_exits(batch)])
            found.append((chances, said == batch.columns.flatten()[tokens][:, None]))
        chances, right = (torch.cat(part) for part in zip(*found, strict=True))
        best = best_thresholds(chances[:, :-1], right, self.costs().to(chances.device))
        self.thresholds = best.thresholds
        self.chosen = {"acceptance": best.acceptance, "cost": best.cost, "tokens_by_cost": best.gain}

    def costs(self) -> Tensor:
        """(e,) share of the target's parameters that are read for a token which leaves at each exit: the layers up to
        there, and the head at every exit so far.
        """
        layers = sum(parameter.numel() for parameter in cast(nn.Module, self.model.layers).parameters())
        stops = torch.tensor([*self.exits.layers, len(self.made_of)])
        heads = self.head.numel() * torch.arange(1, len(stops) + 1)
        return (stops * (layers / len(self.made_of)) + heads) / self.target_size

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint, with the target's tokenizer and the thresholds by target."""
        stored = {key: value for key, value in read_config(self.folder).items() if key not in QUANTIZATION_KEYS}
        exits = self.exits.chosen_for(facts["target"], self.thresholds)
        config = shortened(stored, self.made_of) | exits.as_json() | {"paceline_draft": {**facts, "exits": self.chosen}}
        write_checkpoint(folder, llm, config, with_layers(self.folder, self.model))

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": "s2d", "model": str(folder)}


def exits_of(config: S2dConfig, stored: DraftExits | None, layers: int) -> DraftExits:
    """Exits of a draft of so many layers, with the thresholds that they keep.

    Raises:
        ConfigError: layers that it does not have; other exits where weights stay.
    """
    chosen = (stored.layers if stored is not None else None) if config.exits is None else config.exits
    if chosen is None:
        chosen = usual_exits(layers)
    need(max(chosen) < layers and min(chosen) > 0, "exits", f"be layers in 1..{layers - 1}", chosen)
    kept = stored is not None and config.thresholds_only and stored.layers == chosen
    return stored if stored is not None and kept else DraftExits(chosen)


def head_of(folder: Path, vocab_size: int) -> Tensor:
    """(v, d) float32 rows of a draft model's head for the target's tokens.

    Raises:
        CapabilityError: none in its files, or fewer.
    """
    stored = open_checkpoint(folder, read_config(folder))
    name = next((one for one in ("lm_head.weight", "model.embed_tokens.weight") if one in stored.entries), None)
    rows = torch.empty(0) if name is None else stored.tensor(name)
    if len(rows) < vocab_size:
        raise CapabilityError(f"{folder} holds no head of {vocab_size} tokens that can be trained; use another one")
    return rows[:vocab_size].float()
