"""LUD: the target learns to predict whole lexical units, from placeholders behind their first token's place.

A lexical unit is a maximal run of tokens of an answer, each of which the model as it is gives a probability of at least
alpha, given all before it; a token that it is less sure of is a unit of its own. Units end with what one pass can
predict, k tokens. Behind a text up to a unit's beginning stand k - 1 placeholders, at the next positions:

    text up to token a, then placeholder g = 1 .. k - 1 at position a + g, which sees the text and those before it
    token a says token a + 1, placeholder g says token a + g + 1, as far as the unit goes              (r, v)
    loss: cross-entropy of these tokens, the mean over all of them

All units of a text share a pass (`row_guesses`, `masked_rows`). Low-rank changes of the layers are learned; embedding
and head stay as they are, that of the placeholder too. What is written is a model in place of the target, which says
other things than it here and there, in its folder `head` the placeholder's embedding, which drafts with it
(drafters.heads.lud), and in `adapter` the changes alone, for `LLM(lora=...)`.

A draft counts as right where the trained model still says the same as the text.

The paper has alpha, beta and k that are not known to us. Our own besides: every token of an answer is learned from its
text as well, inside units too, so that the model stays one that decodes token by token; the placeholder is an id that
is no token.

Source: Decoding at the speed of thought: harnessing parallel decoding of lexical units for LLMs (arXiv:2405.15208).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from paceline.checkpoints import read_config, write_adapter
from paceline.config import documented, option
from paceline.training.batches import PAD, Batch, TargetView
from paceline.training.draft_model import with_layers, write_checkpoint
from paceline.training.layer_skip import NEVER
from paceline.training.lora import AdapterConfig, Adapting
from paceline.training.masked_rows import MaskedRows
from paceline.training.medusa2 import HEAD
from paceline.training.next_token import losses_of
from paceline.training.p_eagle import unused_token
from paceline.training.row_guesses import DEPTHS, RowGuessConfig, RowGuessTrainer, RowsOfPass, learned
from paceline.training.train_config import TrainConfig
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo

ADAPTER: Final = "adapter"
"""Folder of the changes, in that of the model."""


@documented
@dataclass(frozen=True, kw_only=True)
class LudConfig(AdapterConfig, RowGuessConfig):
    """Says what a lexical unit is, and what stands for its tokens."""

    unit_threshold: float = option(
        0.9, "Probability from which on tokens make a unit.", low=0.0, high=1.0, rule="be above 0 and at most 1",
        open_low=True,
    )  # fmt: skip
    placeholder_token_id: int | None = option(
        None, "Of the model's vocabulary, what stands for tokens to come; one that texts hardly hold by default.", low=0
    )


class LudTrainer(Adapting, RowGuessTrainer):
    """Fine-tunes the target; see `RowGuessTrainer`.

    Args:
        placeholder: the token that stands for those to come. unit_threshold: as of `LudConfig`.
        adapter: as of `Adapting.adapt`.
    """

    name: ClassVar[str] = "lud"
    config_class: ClassVar[type[TrainConfig]] = LudConfig
    rate: ClassVar[float] = 5e-4
    replaces_target: ClassVar[bool] = True

    def __init__(
        self, folder: Path, layers: int, rows: Tensor, *, placeholder: int, unit_threshold: float,
        adapter: Mapping[str, Any], **sizes: int,
    ) -> None:  # fmt: skip
        super().__init__(folder, layers, rows, **sizes)
        self.placeholder, self.unit_threshold = placeholder, unit_threshold
        self.adapt(self.model[0], **adapter)

    @classmethod
    def check(cls, target: ModelInfo, config: TrainConfig) -> None:
        assert isinstance(config, LudConfig)
        if config.placeholder_token_id is not None:
            integer("placeholder_token_id", config.placeholder_token_id, 0, target.vocab_size - 1)

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[LudTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, LudConfig)
        view, given = cls.view_of(llm, config), config.placeholder_token_id
        trainer = cls(
            llm.folder,
            llm.runner.info.num_layers,
            view.rows,
            depths=config.depths or DEPTHS,
            anchors=config.anchors,
            placeholder=unused_token(llm) if given is None else given,
            unit_threshold=config.unit_threshold,
            adapter={"modules": config.target_modules, "rank": config.rank, "alpha": config.alpha},
        )
        return trainer, view

    def run(self, model: nn.Module, embedded: Tensor, rows: RowsOfPass, **given: Any) -> Tensor:
        token = torch.tensor([self.placeholder], device=embedded.device)
        more = self.embed[0](token).expand(len(rows.depths) - rows.tokens, -1)
        return cast(Tensor, model(inputs_embeds=torch.cat((embedded, more))[None], **given).last_hidden_state[0])

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        ahead, total, count = batch.ahead(batch.columns + 1, 1) - 1, self.rows.new_zeros(()), 0
        kept = self.chosen(self.units(batch), generator)
        for i in range(len(batch.tokens)):
            rows = self.rows_of(batch, i, kept)
            anchors, depths = rows.anchors, rows.depths
            places = (anchors + depths).clamp(max=batch.tokens.shape[1] - 1)
            wanted = ahead[i][places]
            known = wanted >= 0
            total = total + losses_of(self.ran(batch, i, rows)[known], self.rows, wanted[known])
            count += int(known.sum())
        return total / max(1, count)

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        kept = [learned(batch, depth) for depth in range(1, self.depths + 1)]
        said = torch.full(batch.tokens.shape, NEVER, device=batch.tokens.device)
        found: list[list[Tensor]] = [[] for _ in kept]
        for i in range(len(batch.tokens)):
            rows = self.rows_of(batch, i, kept)
            best = torch.cat([self.logits(part).argmax(-1) for part in self.ran(batch, i, rows).split(1024)])
            said[i, rows.anchors[: rows.tokens]] = best[: rows.tokens]
            for own, part in zip(found, best[rows.tokens :].split([int(one[i].sum()) for one in kept]), strict=True):
                own.append(part)
        for depth, (places, parts) in enumerate(zip(kept, found, strict=True), start=1):
            at, drafted = places.flatten().nonzero().squeeze(1), torch.cat(parts)
            yield at, torch.where(drafted == said.flatten()[at + depth], drafted, NEVER)

    def rows_of(self, batch: Batch, i: int, kept: Sequence[Tensor]) -> RowsOfPass:
        """Those of a pass over packed row i, with placeholders of each depth behind anchors (b, t) bool."""
        masked = MaskedRows.of((batch.documents[i] != PAD).nonzero().squeeze(1), [one[i] for one in kept])
        return RowsOfPass.of(masked, batch.documents[i], self.copies)

    @torch.no_grad()
    def units(self, batch: Batch) -> Tensor:
        """(b, t) int64 place of each token in its lexical unit, from 0; -1 where it is not learned."""
        at = (batch.columns.flatten() >= 0).nonzero().squeeze(1)
        before, wanted = batch.final.flatten(0, 1)[at - 1], batch.columns.flatten()[at]
        sure = torch.zeros(batch.tokens.numel(), dtype=torch.bool, device=at.device)
        sure[at] = torch.cat([
            self.logits(states).float().softmax(-1).gather(1, tokens[:, None])[:, 0] >= self.unit_threshold
            for states, tokens in zip(before.split(512), wanted.split(512), strict=True)
        ]) if len(at) else sure[at]  # fmt: skip
        return units_of(sure.view(batch.tokens.shape), batch.columns >= 0, batch.documents, self.depths + 1)

    def chosen(self, units: Tensor, generator: torch.Generator) -> list[Tensor]:
        """(b, t) bool by depth: tokens before units that reach so far, at most `anchors` of each row, drawn anew."""
        rank, first = torch.rand(units.shape, generator=generator).to(units.device), _before(units, 1)
        order = torch.where(first, rank, 2.0).argsort(1).argsort(1)
        return [_before(units, depth) & (order < self.anchors) for depth in range(1, self.depths + 1)]

    def stored(self, llm: LLM) -> tuple[dict[str, Any], dict[str, Tensor]]:
        embedding = cast(Any, llm.runner).embed([self.placeholder])[0]
        return {"mask_token_id": self.placeholder}, {"placeholder": embedding}

    @torch.no_grad()
    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """A checkpoint like the target's, with its tokenizer; the placeholder and the adapter in folders in it."""
        named = {**facts["target"], "name": folder.name}
        super().write(folder / HEAD, llm, view, {**facts, "target": named})
        write_adapter(folder / ADAPTER, self.factors(), alpha=self.alpha, base=llm.runner.info.name)
        tensors = with_layers(llm.folder, self.model[0])
        for name, (a, b) in self.factors().items():
            tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() + self.scale * (b @ a).cpu()
        write_checkpoint(folder, llm, {**read_config(llm.folder), "paceline_lud": dict(facts)}, tensors)

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": "lud", "model": str(folder / HEAD)}


def units_of(sure: Tensor, among: Tensor, documents: Tensor, longest: int) -> Tensor:
    """(b, t) int64 place of each token in its lexical unit, from 0; -1 where there is none.

    Args:
        sure: (b, t) bool, of which tokens the model is sure. among: (b, t) bool, which have units.
        documents: (b, t). longest: most tokens of a unit.
    """
    places = torch.full(sure.shape, -1, device=sure.device)
    for at in range(sure.shape[1]):
        place = torch.zeros_like(places[:, at])
        if at:
            goes_on = sure[:, at] & sure[:, at - 1] & (documents[:, at] == documents[:, at - 1])
            before = places[:, at - 1]
            place = torch.where(goes_on & (before >= 0) & (before + 1 < longest), before + 1, place)
        places[:, at] = torch.where(among[:, at], place, -1)
    return places


def _before(units: Tensor, depth: int) -> Tensor:
    """(b, t) bool: tokens behind which a unit begins that has a token `depth` places behind its first."""
    ahead, steps = torch.zeros_like(units, dtype=torch.bool), depth + 1
    ahead[:, : units.shape[1] - steps] = units[:, steps:] == depth
    return ahead
