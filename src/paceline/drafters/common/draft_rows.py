"""What a draft model's logits mean: rows fitted to the target's vocabulary, shaped by the request's rules, and draws
from them.

Draws have noise of their own, a hash of (seed, root position, number of the draw) that no verifier uses: a token must
not be accepted by the same luck that proposed it.

Axes in this file: r = rows, v = the target's vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import torch

from paceline.errors import DrafterError

if TYPE_CHECKING:
    from paceline.drafters.base import Context

NAN: Final = "the draft model's distribution has NaN; check its checkpoint, and logits_processors of your own"

_SALT: Final = 0xD1B54A32D192ED03
_WEYL: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1


def uniform(seed: int, position: int, draw: int) -> float:
    """A number in [0, 1) that looks random and is a function of its arguments. SplitMix64 (Steele et al., 2014)."""
    state = seed & _MASK
    for key in (_SALT, position, draw):
        state = ((state ^ key) + _WEYL) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def fit_rows(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(r, v) logits over the target's tokens.

    Columns of padded embeddings are cut off, missing ones cannot be drawn.
    """
    width = logits.shape[-1]
    if width == vocab_size:
        return logits
    if width > vocab_size:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, vocab_size - width), value=float("-inf"))


def weights(context: Context, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
    """(r, v) log-weights of the draft under the request's rules, whose softmax is q.

    Args:
        logits: (r, v), fitted; paths: the tokens after the root that lead to each row.
    """
    if context.apply_rules is not None:
        return context.apply_rules(logits, paths)
    return logits.float() if context.temperature <= 0 else logits.float() / context.temperature


def chances_of(weights_rv: torch.Tensor) -> torch.Tensor:
    """(r, v) float32 probabilities of log-weights; nothing but zeros where a row allows no token.

    A row that holds NaN or infinity stays NaN, which `draw_tokens` rejects.
    """
    none_r1 = weights_rv.amax(-1, keepdim=True) == -math.inf
    return torch.softmax(weights_rv, -1, dtype=torch.float32).masked_fill_(none_r1, 0.0)


def rows_before_a_dead_end(weights_rv: torch.Tensor) -> int:
    """How many rows come before the first one that allows no token; all of them where there is none."""
    largest = weights_rv.amax(-1).tolist()
    return next((row for row, value in enumerate(largest) if value == -math.inf), len(largest))


def best_tokens(weights_rv: torch.Tensor, width: int) -> tuple[list[list[int]], list[list[float]]]:
    """The `width` most likely tokens of each row, and their probabilities, most likely first.

    None for a row that allows no token, as those of a reduced vocabulary do where the request's rules ask for a token
    that it lacks.

    Raises:
        DrafterError: NaN or infinity in a row.
    """
    chances_rv = torch.softmax(weights_rv, -1, dtype=torch.float32)
    chances, tokens = (
        chances_rv.max(-1, keepdim=True) if width == 1 else chances_rv.topk(min(width, weights_rv.shape[-1]))
    )
    found_tokens, found_chances = tokens.tolist(), chances.tolist()
    for i, row in enumerate(found_chances):
        if not row[0] > 0.0:
            if not bool((weights_rv[i] == -math.inf).all()):
                raise DrafterError(NAN)
            found_tokens[i], found_chances[i] = [], []
    return found_tokens, [[min(c, 1.0) for c in row] for row in found_chances]


def draw_tokens(row_v: torch.Tensor, removed: Sequence[int], luck: float) -> tuple[int, float] | None:
    """A token from `norm(row with removed set to 0)` by inversion, and its probability in `row`.

    None where nothing is left.

    Raises:
        DrafterError: NaN in the row.
    """
    left_v = row_v
    if removed:
        left_v = row_v.index_fill(0, torch.tensor(removed, device=row_v.device), 0.0)
    heights_v = left_v.cumsum(0, dtype=torch.float64)
    total = heights_v[-1:]
    place = torch.searchsorted(heights_v, luck * total, right=True).minimum(torch.searchsorted(heights_v, total))
    index = place.clamp_(max=len(row_v) - 1)  # NaN has no place among the heights
    token, mass, chance = torch.cat(
        (index.double(), total, row_v.gather(0, index).double())
    ).tolist()  # one wait for the device
    if math.isnan(mass):
        raise DrafterError(NAN)
    return (int(token), min(chance, 1.0)) if mass > 0.0 else None


def draw_for(context: Context, row_v: torch.Tensor, removed: Sequence[int], number: int) -> tuple[int, float] | None:
    """`draw` with the luck of draw `number` of this step."""
    return draw_tokens(row_v, removed, uniform(context.seed, len(context.tokens), number))
