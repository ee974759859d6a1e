"""Training of prompt tokens (PPD): embeddings behind a text, at which the target is to say what it says further on.

The target stays as it is; only the embeddings learn. Prompt token g behind token a, its anchor, learns the target's own
distribution of token a + g + 1, with weight 0.8^(g - 1), at anchors that are drawn anew in each step; all of a packed
row share one pass, whose rows and what they see are those of `masked_rows`, once for each virtual token. The logits of
virtual tokens are averaged, which is the head of their mean state. They begin as embeddings of tokens by chance.

Source: Hardware-Aware Parallel Prompt Decoding for memory-efficient acceleration of LLM inference (arXiv:2405.18628).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn

from paceline.config import documented, option
from paceline.models.heads import HeadConfig, write_head
from paceline.training.batches import PAD, Batch, TargetView
from paceline.training.draft_model import sliced
from paceline.training.heads import Trainer
from paceline.training.masked_rows import MaskedRows
from paceline.training.train_config import TrainConfig

if TYPE_CHECKING:
    from paceline.llm import LLM

DEPTHS: Final = 3
"""Prompt tokens where nobody says how many, the paper's."""

WEIGHT: Final = 0.8
"""Of a prompt token over that of the one before."""


@documented
@dataclass(frozen=True, kw_only=True)
class PPDConfig(TrainConfig):
    """Says how many embeddings a prompt token has, and how many tokens have prompt tokens behind them in a step."""

    virtual_tokens: int = option(1, "Of ppd: embeddings of a prompt token, whose guesses are averaged.", low=1, high=64)
    anchors: int = option(64, "Of ppd: tokens of a row with prompt tokens behind them.", low=1)


class PPDTrainer(Trainer):
    """Trains prompt tokens.

    Args:
        folder: of the target's checkpoint. layers: how many it has. rows: (v, hidden) of its head, for all tokens.
        depths: prompt tokens. virtual_tokens, anchors: as of `PPDConfig`.
    Raises:
        CapabilityError: a checkpoint whose layers are not those of a causal model of Hugging Face.
    """

    name: ClassVar[str] = "ppd"
    config_class: ClassVar[type[TrainConfig]] = PPDConfig
    rate: ClassVar[float] = 1e-2

    def __init__(
        self,
        folder: Path,
        layers: int,
        rows: Tensor,
        *,
        depths: int = DEPTHS,
        virtual_tokens: int = 1,
        anchors: int = 64,
    ) -> None:
        super().__init__(rows)
        model, self.embed = sliced(folder, range(layers))
        self.model = (model.requires_grad_(False).eval(),)  # in a tuple: no part of what is trained and kept
        self.depths, self.anchors = depths, anchors
        table = cast(Any, self.embed[0]).weight
        chosen = torch.randperm(len(rows))[: depths * virtual_tokens].view(depths, virtual_tokens)
        self.embeddings = nn.Parameter(self.embed[0](chosen.to(table.device)).detach().clone())

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[PPDTrainer, TargetView]:
        """See `Trainer.init`; it learns the whole vocabulary."""
        assert isinstance(config, PPDConfig)
        info = llm.runner.info
        view = TargetView(llm.runner, (), torch.arange(info.vocab_size), keep_bytes=config.feature_cache_bytes)
        sizes = {"virtual_tokens": config.virtual_tokens, "anchors": config.anchors}
        return cls(llm.folder, info.num_layers, view.rows, depths=config.depths or DEPTHS, **sizes), view

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        targets, total = self.soft_targets(batch), self.rows.new_zeros(())
        first = _marked(batch, 1)
        rank = torch.rand(batch.tokens.shape, generator=generator).to(first.device)
        order = torch.where(first, rank, 2.0).argsort(1).argsort(1)
        kept = [_marked(batch, depth) & (order < self.anchors) for depth in range(1, self.depths + 1)]
        for depth, (at, states) in enumerate(self.states(batch, kept), start=1):
            losses = targets.loss(states, self.rows, at + depth + 1)
            total = total + WEIGHT ** (depth - 1) * losses / max(1, len(at))
        return total

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for at, states in self.states(batch, [_marked(batch, depth) for depth in range(1, self.depths + 1)]):
            yield at, self.logits(states).argmax(-1)

    def states(self, batch: Batch, kept: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Flat places (m,) of the anchors (b, t) bool of each prompt token, and (m, hidden) what the target makes of it
        there, the mean of its virtual tokens.
        """
        found: list[list[Tensor]] = [[] for _ in kept]
        for i in range(len(batch.tokens)):
            rows = MaskedRows.of((batch.documents[i] != PAD).nonzero().squeeze(1), [one[i] for one in kept])
            own = self._pass(batch, i, rows)
            for part, states in zip(found, own.split([int(one[i].sum()) for one in kept]), strict=True):
                part.append(states)
        places = [one.flatten().nonzero().squeeze(1) for one in kept]
        return [(at, torch.cat(parts)) for at, parts in zip(places, found, strict=True)]

    def _pass(self, batch: Batch, i: int, rows: MaskedRows) -> Tensor:
        """(m, hidden) mean states of the prompt tokens of a pass over packed row i, those of each depth together."""
        device, copies = batch.tokens.device, self.embeddings.shape[1]
        tokens = int((rows.depths == 0).sum())
        prompts = range(tokens, len(rows.depths))
        order = torch.tensor([*range(tokens), *(list(prompts) * copies)])
        copy = torch.tensor([-1] * tokens + [number for number in range(copies) for _ in prompts])
        seen = rows.visible(batch.documents[i].cpu())[order][:, order]
        seen &= (copy[None] < 0) | (copy[:, None] == copy[None])
        depths, anchors = rows.depths[order].to(device), rows.anchors[order].to(device)
        of_prompts = self.embeddings[depths[tokens:] - 1, copy[tokens:].to(device)]
        model, embed = (part.to(device) for part in (self.model[0], self.embed[0]))
        x = torch.cat((embed(batch.tokens[i][anchors[:tokens]]), of_prompts))
        mask = torch.zeros(seen.shape, device=device).masked_fill(~seen.to(device), torch.finfo(torch.float32).min)
        places = batch.positions[i][anchors] + depths
        read = model(inputs_embeds=x[None], attention_mask=mask[None, None], position_ids=places[None], use_cache=False)
        states = read.last_hidden_state[0, tokens:]
        return cast(Tensor, states.unflatten(0, (copies, len(prompts))).mean(0))

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """The embeddings in the format of `paceline.models.heads`, as the target's first layer reads them."""
        info, some = llm.runner.info, torch.arange(min(64, llm.runner.info.vocab_size))
        with torch.no_grad():
            theirs = self.embed[0].cpu()(some)
            ours = cast(Any, llm.runner).embed(some.tolist()).float().cpu()
            scale = ours.norm() / theirs.norm()  # the family's multiplier, where transformers applies it behind
        config = HeadConfig(
            method="ppd",
            hidden_size=info.hidden_size,
            vocab_size=info.vocab_size,
            draft_vocab_size=info.vocab_size,
            num_heads=self.depths,
            virtual_tokens=self.embeddings.shape[1],
            target=facts["target"],
            provenance=facts,
        )
        write_head(folder, config, {"prompts": (self.embeddings.detach().cpu() * scale).to(info.dtype)})

    def speculative_config(self, folder: Path) -> dict[str, Any]:
        return {"method": "ppd", "model": str(folder)}


def _marked(batch: Batch, depth: int) -> Tensor:
    """(b, t) bool: where prompt token `depth` behind a token learns a token of an answer."""
    marked = torch.zeros(batch.tokens.numel(), dtype=torch.bool, device=batch.tokens.device)
    marked[batch.learned(depth + 1)[0]] = True
    return marked.view(batch.tokens.shape)
