"""Texts that a model in training writes itself, with the state in which every token was written.

In:  a Net, items of the tasks, a decoding method as `paceline.diffusion.methods` knows it. Out: Rollouts (canvases, rewards).
Not here: what is learned from them (grpo.py, coupled_grpo.py, cj_grpo.py, learn2pd.py).

The rules are the package's own; only passes and draws are made for all canvases together, which is several times faster than one by
one for a small model on a CPU. `fill` is the package's loop, with one such pass (`Batched`) for all canvases of a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from model import EOS, Net
from tokenizers import Tokenizer
from torch import Tensor

from paceline.bench.parallel_tasks import Item
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.loop import Outcome, decode
from paceline.diffusion.methods import Recipe
from paceline.diffusion.predictions import Predictions
from paceline.diffusion.trajectory import Round
from paceline.models.checkpoint import Checkpoint
from paceline.models.denoiser import Call, Denoiser
from paceline.models.denoiser_layouts import LAYOUTS, denoiser_spec
from paceline.models.denoiser_load import end_tokens, mask_token_id
from paceline.models.denoiser_weights import load_denoiser_weights
from paceline.models.hub import read_config

BUNDLED = Path(__file__).parents[2] / "src" / "paceline" / "bundled" / "diffusion"


def read_model(folder: Path) -> Net:
    """The trainable form of a plain model folder (write.py) in float32."""
    config = read_config(folder)
    spec = denoiser_spec(config, mask_token_id=mask_token_id(folder, config), eos_token_ids=end_tokens(folder, config))
    net = Net(spec)
    weights = load_denoiser_weights(
        Checkpoint(folder), spec, LAYOUTS["llada"].names, device=torch.device("cpu"), dtype=torch.float32
    )
    net.load_state_dict(dict(weights))
    return net


def masked_logits(net: Net, ids_bn: Tensor, length_b: Tensor, rows_bn: Tensor) -> Tensor:
    """Logits (rows, v) where `rows_bn` is True, the mask token's at -inf, as in decoding."""
    slots = torch.arange(ids_bn.shape[1]).expand_as(ids_bn)
    states = net.states(ids_bn, slots, (slots < length_b[:, None])[:, None, None, :])[rows_bn]
    with torch.autocast("cpu", enabled=False):  # what is left of bfloat16 logits would be too coarse for ratios
        logits: Tensor = net.head(states.to(net.head.weight.dtype))
    logits[:, net.spec.mask_token_id] = -torch.inf
    return logits


class Batched:
    """A Net as a `Denoiser` that computes whole canvases of a pass together, padded to the longest.

    Args:
        rows: "masked" computes logits of masked slots only, the others are NaN, as rows are that a layout gives no logits; "all"
            computes all of them, for rules that look at written slots.
    """

    attention: Literal["full", "block"] = "full"
    block_length: int | None = None
    needs_left = False

    def __init__(self, net: Net, rows: Literal["masked", "all"] = "masked") -> None:
        self.net, self.rows, model = net, rows, net.spec.model
        self.vocab_size, self.mask_token_id = model.vocab_size, net.spec.mask_token_id
        self.eos_token_ids: tuple[int, ...] = (EOS,)
        self.max_length = model.max_context

    def new_cache(self, length: int) -> Any:
        """Refused."""
        raise NotImplementedError("caches are for decoding, not for rollouts; choose a method without one")

    @torch.no_grad()
    def forward(self, calls: Sequence[Call]) -> list[Tensor]:
        """See `Denoiser.forward`; calls compute whole canvases."""
        length = torch.tensor([call.ids.size for call in calls])
        ids = torch.full((len(calls), int(length.max())), EOS)
        for row, call in zip(ids, calls, strict=True):
            row[: call.ids.size] = torch.from_numpy(call.ids)
        inside = torch.arange(ids.shape[1]) < length[:, None]
        rows = inside & (ids == self.mask_token_id) if self.rows == "masked" else inside
        found = masked_logits(self.net, ids, length, rows).split(rows.sum(1).tolist())
        outputs = []
        for logits, row, size in zip(found, rows, length.tolist(), strict=True):
            output = logits.new_full((size, self.vocab_size), torch.nan)
            output[row[:size]] = logits
            outputs.append(output)
        return outputs


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Finished canvases side by side, the completions of a prompt next to each other.

    Attributes:
        ids: (b, n) int64, end tokens beyond a canvas.
        start: (b,) first slot after the prompt.
        length: (b,) slots of the canvas.
        born: (b, n) int64, the round in which a slot was written; -1 at prompts and padding.
        log_p: (b, n) log-probability noted by the rollout when the slot was written, clean (before temperature); 0 elsewhere.
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


def text_of(outcome: Outcome, tokenizer: Tokenizer) -> str:
    """What a canvas says up to its first end token."""
    output = outcome.canvas.output
    return str(tokenizer.decode(output[: output.index(EOS)] if EOS in output else output))


def fill(denoiser: Denoiser, prompts: Sequence[Sequence[int]], method: dict[str, Any], *, length: int) -> list[Outcome]:
    """Decode a canvas of `length` slots after each prompt. Raises the error of the first canvas that failed."""
    mask, ends = denoiser.mask_token_id, denoiser.eos_token_ids
    canvases = [Canvas.of(ids, length, mask_token_id=mask, eos_token_ids=ends) for ids in prompts]
    outcomes = decode(canvases, denoiser, [Recipe(method).parts(denoiser, canvas) for canvas in canvases])
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return outcomes


def gathered(outcomes: Sequence[Outcome], rewards: Sequence[float]) -> Rollouts:
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
    """(rows,) tokens from probabilities (rows, v), by inversion in float64: one number a row, where Gumbel noise takes v."""
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


def split_predictions(net: Net, canvases: Sequence[Canvas], temperature: float, generator: torch.Generator) -> list[Predictions]:
    """The model's word on the masked slots of each canvas, with tokens drawn; one pass."""
    length = torch.tensor([canvas.length for canvas in canvases])
    ids = torch.full((len(canvases), int(length.max())), EOS)
    for row, canvas in zip(ids, canvases, strict=True):
        row[: canvas.length] = torch.from_numpy(canvas.tokens)
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
) -> list[Outcome]:
    """Fill a canvas after each prompt with tokens drawn at a temperature, all canvases side by side.

    Raises:
        SystemExit: a method with a cache or a verification, whose passes are not plain.
    """
    recipe, denoiser = Recipe(method), Batched(net)
    if recipe.names["cache"] != "none" or recipe.names["verification"] != "none":
        raise SystemExit(f"method {recipe.name!r} has a cache or a verification; rollouts need plain passes")
    mask = net.spec.mask_token_id
    outcomes = [Outcome(Canvas.of(ids, length, mask_token_id=mask, eos_token_ids=(EOS,))) for ids in prompts]
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
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([item.prompt for item in asked])]
    outcomes = sampled(net, prompts, method, length=length, temperature=temperature, generator=generator)
    return gathered(outcomes, [reward(item, text_of(outcome, tokenizer)) for item, outcome in zip(asked, outcomes, strict=True)])
