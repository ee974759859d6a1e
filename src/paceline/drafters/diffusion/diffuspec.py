"""DiffuSpec: a diffusion language model drafts many slots at once; a search finds the path that reads well from left to
right.

The likeliest tokens of slots that were predicted side by side need not make a text. A tri-gram model, counted from this
tenant's requests and, where it is named, a file, says how well a token goes after two others. (The paper fits one to
the task's training split.) The path found has no distribution of its own that could be written down: its tokens are
points, exact at every temperature.

The path: a slot's candidates are its likeliest tokens until they hold `mass` of its distribution, at most `most` of
them and none behind an end token; end tokens are always candidates. A beam of paths goes from slot to slot by the sum
of lam log p + (1 - lam) log p_ngram. A path that has ended goes on with end tokens, as a canvas does, each at the
denoiser's price and free of the tri-grams': so paths of different lengths compare (the paper does not say how). The
path is returned up to its end token.

Source: DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding (arXiv:2510.02358).

Axes in this file: k = slots, m = candidates, b = paths of the beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import CountingDrafter
from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_rows import NAN, rows_before_a_dead_end, weights
from paceline.drafters.common.tables import TenantTables
from paceline.drafters.diffusion.base import DenoisedState, DenoisingDrafter
from paceline.drafters.diffusion.trigram_counts import SMALLEST, Longs, Slots, TrigramCounts, chance
from paceline.errors import DrafterError
from paceline.tree import EMPTY_TREE
from paceline.utils import compiled, integer, need, number, part_of_compiled

if TYPE_CHECKING:
    from paceline.tree import TokenTree

Doubles = npt.NDArray[np.float64]
Columns = tuple[Longs, Doubles, Doubles, Longs]
"""The arrays of a `Lattice`."""

Prices = tuple[Slots, int, float]
"""What a path costs: the tri-grams' table, the vocabulary's size, the lattice's weight."""

NONE = -1


@dataclass(frozen=True, slots=True)
class Lattice:
    """Holds the candidates of each slot, pruned.

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
    """Prune each slot to its likeliest candidates.

    Args:
        weights_kv: (k, v) log-weights, each of which allows a token. mass: in 0..1. most: tokens of a slot, 1 or more.
            ends: end tokens below v.
    Raises:
        DrafterError: NaN.
    """
    log_kv = weights_kv.double().log_softmax(-1)
    values, columns = log_kv.topk(min(most, log_kv.shape[-1]))
    log_p, tokens, last = values.cpu().numpy(), columns.cpu().numpy(), np.array(ends, np.int64)
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


@part_of_compiled
def among(ends: Longs, token: int) -> bool:
    """Whether a token is an end token; they are few."""
    for end in ends:  # noqa: SIM110  # numba compiles no generators
        if end == token:
            return True
    return False


@part_of_compiled
def put(score: float, link: tuple[int, int], scores: Doubles, links: Longs, count: int) -> int:
    """Insert into a list of the best, kept in order; of equal ones the first stays before. Returns its new length."""
    room = len(scores)
    position = count
    while position > 0 and scores[position - 1] < score:
        position -= 1
    if position >= room:
        return count
    count = min(count + 1, room)
    for i in range(count - 1, position, -1):
        scores[i], links[i, 0], links[i, 1] = scores[i - 1], links[i - 1, 0], links[i - 1, 1]
    scores[position], links[position, 0], links[position, 1] = score, link[0], link[1]
    return count


@part_of_compiled
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
    pairs[0, 0], pairs[0, 1] = pair[0], pair[1]
    length = 1
    for slot in range(steps):
        fresh = np.full(beam, -np.inf)
        count = widen(lattice, slot, prices, (scores, pairs, over, length), (fresh, links[slot]))
        last, stopped = pairs.copy(), over.copy()
        for b in range(count):
            parent, token = links[slot, b, 0], links[slot, b, 1]
            pairs[b, 0], pairs[b, 1], over[b] = last[parent, 0], last[parent, 1], stopped[parent]
            if token != NONE:
                pairs[b, 0], pairs[b, 1] = last[parent, 1], token
                over[b] = among(lattice[3], token)
        scores, length = fresh, count
    b = 0
    for slot in range(steps - 1, -1, -1):
        path[slot] = links[slot, b, 1]
        b = links[slot, b, 0]


MOST_SLOTS: Final = 2**26
MOST_BEAM: Final = 64


class CountedState(DenoisedState):
    """A sequence, and how many of its tokens were counted."""

    __slots__ = ("done",)

    def __init__(self, context: Context, done: int = 0) -> None:
        super().__init__(context)
        self.done = done


class DiffuSpecDrafter(CountingDrafter[CountedState], DenoisingDrafter[CountedState]):
    """Drafts with one pass of a diffusion language model and a path search.

    Args:
        model: folder or hub id of a diffusion language model with the target's tokenizer.
        draft_max_length: most tokens of a draft.
        num_speculative_tokens: most tokens to draft, within `draft_max_length`; None leaves it to that.
        path_weight: weight of the diffusion model against the tri-grams, 0..1; the paper's lambda.
        candidate_mass: a slot's candidates hold so much of its distribution, 0..1; the paper's tau.
        max_candidates: most candidates of a slot, besides end tokens.
        path_beam: paths that the search keeps.
        ngram_file: a text that the tri-grams of every tenant are counted from before any request.
        ngram_slots: slots of a tenant's table of tri-grams, rounded up to a power of two; 12 bytes each.
        tables: folder in which tables are kept between runs.
        shared_tables: one table for all tenants.
        draft_masks: fewest masks behind the text, for a denoiser with full attention.
        draft_context: most tokens of the text that a pass sees; None is what the denoiser has room for.
        draft_device: where the denoiser runs: "cpu", "cuda" or "cuda:N"; None is the target's.
    Raises:
        ConfigError: a value outside its range, no denoiser.
        DrafterError: another tokenizer, a file that cannot be read, tables that do not fit or are damaged.
        UnsupportedModelError: a checkpoint of another kind.
    """

    name = "diffuspec"
    shares_state = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_max_length: int = 30,
        num_speculative_tokens: int | None = None,
        path_weight: float = 0.5,
        candidate_mass: float = 0.8,
        max_candidates: int = 15,
        path_beam: int = 3,
        ngram_file: str | None = None,
        ngram_slots: int = 2**18,
        tables: str | None = None,
        shared_tables: bool = False,
        draft_masks: int = 20,
        draft_context: int | None = None,
        draft_device: str | None = None,
    ) -> None:
        number("path_weight", path_weight, 0.0, 1.0, "be in 0..1")
        number("candidate_mass", candidate_mass, 0.0, 1.0, "be in 0..1")
        integer("max_candidates", max_candidates, 1)
        integer("path_beam", path_beam, 1, MOST_BEAM)
        integer("ngram_slots", ngram_slots, SMALLEST, MOST_SLOTS)
        super().__init__(
            args,
            model=model,
            num_speculative_tokens=num_speculative_tokens,
            draft_max_length=draft_max_length,
            draft_masks=draft_masks,
            draft_context=draft_context,
            draft_device=draft_device,
        )
        self.path_weight, self.path_beam = float(path_weight), path_beam
        self.candidate_mass, self.max_candidates = float(candidate_mass), max_candidates
        first = _tokens_of(ngram_file, args)
        new = partial(_counts, 1 << (ngram_slots - 1).bit_length(), args.vocab_size, first)
        self.tables: TenantTables[TrigramCounts] = TenantTables(
            "diffuspec", args, new, folder=tables, shared=shared_tables
        )
        self._compile()

    def _state(self, context: Context) -> CountedState:
        state = CountedState(context)
        self._catch_up(state)
        return state

    def fork(self, state: CountedState, context: Context) -> CountedState:
        return CountedState(context, state.done)

    def _catch_up(self, state: CountedState) -> TrigramCounts:
        """Count what the text has got since the last time."""
        counts, text = self.tables.of(state.context.tenant), state.context.tokens
        if state.done < len(text):
            counts.learn(text, state.done)
            state.done = len(text)
        return counts

    def _tree(self, state: CountedState, logits: torch.Tensor) -> TokenTree:
        context, counts = state.context, self._catch_up(state)
        weights_kv = weights(context, logits, [[]] * len(logits))
        weights_kv = weights_kv[: rows_before_a_dead_end(weights_kv)]
        if not len(weights_kv):
            return EMPTY_TREE
        lattice = lattice_of(weights_kv, mass=self.candidate_mass, most=self.max_candidates, ends=self.ends)
        path = best_path(lattice, counts, context.tokens[-2:], lam=self.path_weight, beam=self.path_beam)
        chances = torch.softmax(weights_kv[: len(path)], -1, dtype=torch.float32)
        drafted = torch.tensor(path, device=chances.device)[:, None]
        return chain_tree(path, chances.gather(1, drafted)[:, 0].tolist(), self.index)

    def _compile(self) -> None:
        """Compile, or read what was compiled, before the first request."""
        counts = TrigramCounts(SMALLEST, self.vocab_size)
        counts.learn([0, 0, 0])
        lattice = lattice_of(torch.zeros(1, self.vocab_size), mass=0.0, most=1, ends=())
        best_path(lattice, counts, [0], lam=0.5, beam=1)


def _counts(slots: int, vocab_size: int, first: Sequence[int]) -> TrigramCounts:
    counts = TrigramCounts(slots, vocab_size)
    counts.learn(first)
    return counts


def _tokens_of(file: str | None, args: DrafterArgs) -> list[int]:
    """Of a text file.

    Raises:
        ConfigError: no name of a file.
        DrafterError: it cannot be read as text.
    """
    need(file is None or (isinstance(file, str) and file != ""), "ngram_file", "be the name of a text file", file)
    if file is None:
        return []
    assert args.models is not None
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DrafterError(f"ngram_file {file!r} cannot be read as UTF-8 text ({error}); name a text file") from None
    return [token for token in args.models.tokenizer.encode(text, add_special_tokens=False) if token < args.vocab_size]
