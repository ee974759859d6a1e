"""The best left-to-right path through a lattice of tokens, each slot's own candidates judged by a tri-gram model too.

In: log-weights of slots that were predicted side by side, a `TrigramCounts`. Out: one path. Not here: the pass that
gave the weights (`denoising`), what is counted (`diffuspec`).

A slot's candidates are its likeliest tokens until they hold `mass` of its distribution, at most `most` of them and none
behind an end token; end tokens are always candidates. A beam of paths goes from slot to slot by the sum of lam log p +
(1 - lam) log p_ngram. A path that has ended goes on with end tokens, as a canvas does, each at the denoiser's price and
free of the tri-grams': so paths of different lengths compare (the paper does not say how). The path is returned up to
its end token.

Source: causal-consistency path search of DiffuSpec (arXiv:2510.02358).

Axes in this file: k = slots, m = candidates, b = paths of the beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paceline.drafters.common.draft_rows import NAN
from paceline.drafters.diffusion.trigram_counts import Longs, Slots, TrigramCounts, chance
from paceline.errors import DrafterError
from paceline.utils import compiled

if TYPE_CHECKING:
    import torch

Doubles = npt.NDArray[np.float64]
Columns = tuple[Longs, Doubles, Doubles, Longs]
"""The arrays of a `Lattice`."""

Prices = tuple[Slots, int, float]
"""What a path costs: the tri-grams' table, the vocabulary's size, the lattice's weight."""

NONE = -1


@dataclass(frozen=True, slots=True)
class Lattice:
    """Candidates of each slot.

    Attributes:
        tokens: (k, m) int64, likeliest first, end tokens that mass left out behind them; NONE where there are fewer.
        log_p: (k, m) float64, -inf where there is no token.
        ended: (k,) float64 log-probability of the likeliest end token, -inf without any.
        ends: (e,) int64 end tokens.
    """

    tokens: Longs
    log_p: Doubles
    ended: Doubles
    ends: Longs


def lattice_of(weights_kv: torch.Tensor, *, mass: float, most: int, ends: Sequence[int]) -> Lattice:
    """Prune each slot.

    Args:
        weights_kv: (k, v) log-weights. mass: in 0..1. most: tokens of a slot, 1 or more. ends: end tokens below v.
    Raises:
        DrafterError: NaN, or nothing that can be drafted.
    """
    log_kv = weights_kv.double().log_softmax(-1)
    values, found = log_kv.topk(min(most, log_kv.shape[-1]))
    log_p, tokens, last = values.cpu().numpy(), found.cpu().numpy(), np.array(ends, np.int64)
    if not (log_p[:, 0] > -np.inf).all():
        raise DrafterError(NAN)
    end_log_p = log_kv[:, list(ends)].cpu().numpy()
    p, is_end = np.exp(log_p), np.isin(tokens, last)
    kept = (np.cumsum(p, 1) - p < mass) & (p > 0) & (np.cumsum(is_end, 1) - is_end == 0)
    kept[:, 0] = True
    missing = np.array([[(tokens[i][kept[i]] != end).all() for end in ends] for i in range(len(tokens))], np.bool_)
    missing = missing.reshape(end_log_p.shape) & (end_log_p > -np.inf)
    here = np.concatenate([kept, missing], 1)
    all_tokens = np.concatenate([tokens, np.broadcast_to(last, end_log_p.shape)], 1)
    all_log_p = np.concatenate([log_p, end_log_p], 1)
    ended = end_log_p.max(1, initial=-np.inf)
    return Lattice(np.where(here, all_tokens, NONE), np.where(here, all_log_p, -np.inf), ended, last)


def best_path(lattice: Lattice, counts: TrigramCounts, before: Sequence[int], *, lam: float, beam: int) -> list[int]:
    """Tokens of the best path, its first end token the last of them.

    Args:
        before: the text's last tokens, of which two count. lam: weight of the lattice in 0..1. beam: paths kept, 1 or
        more.
    """
    pair = np.full(2, NONE, np.int64)
    if before:
        pair[-len(before[-2:]) :] = before[-2:]
    path = np.full(len(lattice.tokens), NONE, np.int64)
    columns = (lattice.tokens, lattice.log_p, lattice.ended, lattice.ends)
    search(columns, (counts.slots, counts.vocab_size, lam), pair, beam, path)
    return [int(token) for token in path if token != NONE]


@compiled
def among(ends: Longs, token: int) -> bool:
    """Whether a token is an end token; they are few."""
    for one in ends:  # noqa: SIM110  # numba compiles no generators
        if one == token:
            return True
    return False


@compiled
def put(score: float, link: tuple[int, int], scores: Doubles, links: Longs, count: int) -> int:
    """Insert into a list of the best, kept in order; of equal ones the first stays before. Returns its new length."""
    room = len(scores)
    place = count
    while place > 0 and scores[place - 1] < score:
        place -= 1
    if place >= room:
        return count
    count = min(count + 1, room)
    for i in range(count - 1, place, -1):
        scores[i], links[i] = scores[i - 1], links[i - 1]
    scores[place], links[place] = score, link
    return count


@compiled
def widen(
    lattice: Columns, slot: int, prices: Prices, old: tuple[Doubles, Longs, Longs, int], new: tuple[Doubles, Longs]
) -> int:
    """The best continuations of the beam `old` (scores, last pairs, ended, length) by one slot; how many there are.

    `new` gets scores (b,) and links (b, 2): the path that is continued, the token, NONE where it has ended.
    """
    tokens, log_p, ended, _ = lattice
    slots, vocab_size, lam = prices
    before, pairs, over, length = old
    count = 0
    for b in range(length):
        if over[b]:
            count = put(before[b] + (lam * ended[slot] if lam > 0.0 else 0.0), (b, NONE), new[0], new[1], count)
            continue
        for m in range(tokens.shape[1]):
            token = tokens[slot, m]
            if token == NONE:
                continue
            score = before[b] + (lam * log_p[slot, m] if lam > 0.0 else 0.0)
            if lam < 1.0:
                score += (1.0 - lam) * np.log(chance(slots, pairs[b, 0], pairs[b, 1], token, vocab_size))
            count = put(score, (b, token), new[0], new[1], count)
    return count


@compiled
def search(lattice: Columns, prices: Prices, pair: Longs, beam: int, path: Longs) -> None:
    """Fill `path` (k,) with the best path, NONE behind its end."""
    steps = len(path)
    scores, pairs, over = np.zeros(beam), np.empty((beam, 2), np.int64), np.zeros(beam, np.int64)
    links = np.full((steps, beam, 2), NONE, np.int64)
    pairs[0] = pair
    length = 1
    for slot in range(steps):
        fresh = np.full(beam, -np.inf)
        count = widen(lattice, slot, prices, (scores, pairs, over, length), (fresh, links[slot]))
        last, stopped = pairs.copy(), over.copy()
        for b in range(count):
            parent, token = links[slot, b]
            pairs[b], over[b] = last[parent], stopped[parent]
            if token != NONE:
                pairs[b, 0], pairs[b, 1] = last[parent, 1], token
                over[b] = among(lattice[3], token)
        scores, length = fresh, count
    b = 0
    for slot in range(steps - 1, -1, -1):
        path[slot] = links[slot, b, 1]
        b = links[slot, b, 0]
