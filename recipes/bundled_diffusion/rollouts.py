"""Texts that a model in training writes itself, with the state in which every token was written.

The rules are the package's own; only passes and draws are made for all canvases together, which is several times faster
than one by one for a small model on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from lab.diffusion import Item
from paceline.diffusion import Canvas, ConfiguredMethod, FinishedCanvas, Predictions, Round
from recipes.bundled_diffusion.answering import Batched, encoded, masked_logits, padded, text_of
from recipes.bundled_diffusion.model import EOS, Net


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Finished canvases side by side, the completions of a prompt next to each other.

    Attributes:
        ids: (b, n) int64, end tokens beyond a canvas.
        start: (b,) first slot after the prompt.
        length: (b,) slots of the canvas.
        born: (b, n) int64, the round in which a slot was written; -1 at prompts and padding.
        log_p: (b, n) log-probability noted by the rollout when the slot was written, clean (before temperature); 0
            elsewhere.
        reward: (b,) 1 for a right answer, else 0.
        calls: (b,) passes of the model.
    """

    ids: Tensor
    start: Tensor
    length: Tensor
    born: Tensor
    log_p: Tensor
    reward: Tensor
    calls: Tensor

    @property
    def written(self) -> Tensor:
        """(b, n) slots that the model wrote."""
        return self.born >= 0

    @property
    def rounds(self) -> Tensor:
        """(b,) rounds of writing."""
        return self.born.max(1).values + 1

    @property
    def text(self) -> Tensor:
        """(b, n) written slots up to the first end token, that one included."""
        ends = self.written & (self.ids == EOS)
        return self.written & (ends.long().cumsum(1) - ends.long() == 0)

    def state(self, round_: int, mask: int) -> Tensor:
        """(b, n) the canvases as they stood before round `round_`; finished ones as they are."""
        return self.ids.masked_fill(self.born >= round_, mask)

    def take(self, chosen: Tensor) -> Rollouts:
        """Some of them."""
        return Rollouts(*(getattr(self, one.name)[chosen] for one in fields(self)))


Reward = Callable[[Item, str], float]


def exactness(item: Item, text: str) -> float:
    """1 for a right answer."""
    return float(item.right(text))


def gathered(outcomes: Sequence[FinishedCanvas], rewards: Sequence[float]) -> Rollouts:
    """Outcomes as one batch."""
    canvases = [outcome.canvas for outcome in outcomes]
    n = max(canvas.length for canvas in canvases)

    def side_by_side(rows: Sequence[Any], empty: float) -> Tensor:
        return torch.stack([F.pad(torch.from_numpy(row), (0, n - row.size), value=empty) for row in rows])

    return Rollouts(
        side_by_side([canvas.tokens for canvas in canvases], EOS),
        torch.tensor([canvas.start for canvas in canvases]),
        torch.tensor([canvas.length for canvas in canvases]),
        side_by_side([canvas.born for canvas in canvases], -1),
        side_by_side([canvas.confidence for canvas in canvases], torch.nan).log().nan_to_num(nan=0.0),
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([outcome.trajectory.calls for outcome in outcomes]),
    )


def draw(p: Tensor, generator: torch.Generator) -> Tensor:
    """(rows,) tokens from probabilities (rows, v), by inversion in float64: one number a row, where Gumbel noise takes
    v.
    """
    reached = p.cumsum(-1, dtype=torch.float64)
    u = torch.rand(len(p), 1, dtype=torch.float64, generator=generator) * reached[:, -1:]
    return torch.searchsorted(reached, u, right=True)[:, 0]


def drawn(logits: Tensor, temperature: float, generator: torch.Generator) -> Predictions:
    """What `Predictions.of` says, with tokens drawn as above; row i counts as slot i."""
    p = logits.softmax(-1)
    tokens = draw(p if temperature == 1 else (logits / temperature).softmax(-1), generator)
    pair, order = p.topk(2, dim=-1)
    gap = logits.gather(1, order)
    return Predictions(
        slots=np.arange(len(logits)),
        tokens=tokens.numpy(),
        confidence=p.gather(1, tokens[:, None])[:, 0].double().numpy(),
        entropy=torch.special.entr(p).sum(-1).double().numpy(),
        margin=(pair[:, 0] - pair[:, 1]).double().numpy(),
        gap=(gap[:, 0] - gap[:, 1]).double().numpy(),
        logits=logits,
    )


def split_predictions(
    net: Net, canvases: Sequence[Canvas], temperature: float, generator: torch.Generator
) -> list[Predictions]:
    """The model's word on the masked slots of each canvas, with tokens drawn; one pass."""
    ids, length = padded([canvas.tokens for canvas in canvases])
    every = drawn(masked_logits(net, ids, length, ids == net.spec.mask_token_id), temperature, generator)
    found, low = [], 0
    for canvas in canvases:
        slots = canvas.masked()
        found.append(replace(every.at(np.arange(low, low + slots.size)), slots=slots))
        low += slots.size
    return found


@torch.no_grad()
def sampled(
    net: Net,
    prompts: Sequence[Sequence[int]],
    method: dict[str, Any],
    *,
    length: int,
    temperature: float,
    generator: torch.Generator,
) -> list[FinishedCanvas]:
    """Fill a canvas after each prompt with tokens drawn at a temperature, all canvases side by side.

    Raises:
        SystemExit: a method with a cache or a verification, whose passes are not plain.
    """
    recipe, denoiser = ConfiguredMethod(method), Batched(net)
    if recipe.names["cache"] != "none" or recipe.names["verification"] != "none":
        raise SystemExit(f"method {recipe.name!r} has a cache or a verification; rollouts need plain passes")
    mask = net.spec.mask_token_id
    outcomes = [FinishedCanvas(Canvas.of(ids, length, mask_token_id=mask, eos_token_ids=(EOS,))) for ids in prompts]
    rules = [recipe.parts(denoiser, outcome.canvas).transition for outcome in outcomes]
    live = list(range(len(outcomes)))
    while live := [i for i in live if not rules[i].finished(outcomes[i].canvas)]:
        for i, predictions in zip(
            live, split_predictions(net, [outcomes[i].canvas for i in live], temperature, generator), strict=True
        ):
            after, trajectory = rules[i](outcomes[i].canvas, predictions), outcomes[i].trajectory
            trajectory.rounds += Round.between(outcomes[i].canvas, after)
            trajectory.calls += 1
            outcomes[i].canvas = after
    return outcomes


def roll_out(
    net: Net,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    *,
    group: int,
    method: dict[str, Any],
    length: int,
    temperature: float,
    generator: torch.Generator,
    reward: Reward = exactness,
) -> Rollouts:
    """`group` completions of each item, next to each other."""
    asked = [item for item in items for _ in range(group)]
    prompts = encoded(tokenizer, [item.prompt for item in asked])
    outcomes = sampled(net, prompts, method, length=length, temperature=temperature, generator=generator)
    return gathered(
        outcomes, [reward(item, text_of(outcome, tokenizer)) for item, outcome in zip(asked, outcomes, strict=True)]
    )
