"""Constrained decoding: only tokens after which the text can still be completed are written.

A slot's token is written tentatively; if the canvas cannot become a text of the constraint any more, the token is ruled
out for this slot and all slots that may be written are ranked again, by the clean probability of their best token left.
The slots that a rule chose are tried first, one by one in its order. A token ruled out is made up for by another slot
while that is at least as sure as the least sure slot chosen. After `max_rejections` rejections in a round, or when the
last slots are written, what is missing comes from the shortest text that the canvas can still become. So every round
writes something, and whatever is finished is a text of the constraint. What the model would have written is only
changed where it cannot be completed; the distribution of sampled texts is not the model's conditioned on the
constraint (greedy rejection).

The test counts tokens: see `paceline.grammar.emptiness`. Text after a token that ends it is not asked about; such
tokens are written in all slots after the first of them.

Source: Constrained Decoding of Diffusion LLMs with Context-Free Grammars (arXiv:2508.10111).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.diffusion.base import Check, Setting, Step, TokenText
from paceline.diffusion.canvas import Canvas
from paceline.errors import ConfigError, UnsatisfiableError
from paceline.grammar import (
    CLOSED,
    DEAD,
    MASKED,
    UNFIT,
    Cfg,
    Fillings,
    Grammar,
    Lexicon,
    Table,
    parse_ebnf,
    parse_json_schema,
    parse_regex,
    read_ebnf,
    read_json_schema,
)
from paceline.models import Ints
from paceline.utils import integer, need

ALL = slice(None)
MOST_RANKED = 4096
"""Tokens of a slot that are put in order; most are ruled out by kind, so that few are tested."""


class GrammarCheck(Check):
    """The text is one of a grammar, of a regular expression (as a whole), or a JSON value of a schema.

    Args:
        grammar: in Lark's notation, or the path of a .lark or .ebnf file.
        regex: in Python's notation.
        json_schema: an object, its JSON text or the path of a .json file; see `paceline.grammar.json_schema`.
        grammar_start: rule of whole texts.
        constrained_from: first slot of the text that is constrained, not after a masked one; None is the end of the
            prompt, 0 takes in all of a template.
        max_rejections: tokens ruled out in a round before the rest is taken from the shortest text.
    Attributes:
        checks: canvases tested so far.
        rejections: of them, those that could not be completed.
        completions: tokens taken from a shortest text.
    Raises:
        ConfigError: none or several of the constraints, one that cannot be read, no text of tokens.
        UnsatisfiableError: a constraint that no text meets.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        grammar: str | Path | None = None,
        regex: str | None = None,
        json_schema: Mapping[str, Any] | bool | str | Path | None = None,
        grammar_start: str = "start",
        constrained_from: int | None = None,
        max_rejections: int = 100,
    ) -> None:
        canvas, denoiser = setting.canvas, setting.denoiser
        sources = {"grammar": grammar, "regex": regex, "json_schema": json_schema}
        chosen = [name for name, value in sources.items() if value is not None]
        need(len(chosen) == 1, "a constraint", "be one of grammar, regex and json_schema", chosen or None)
        need(setting.token_text is not None, "a constraint", "come with token_text, the text of each token", None)
        integer("max_rejections", max_rejections, 0)
        self.first = canvas.start if constrained_from is None else constrained_from
        integer("constrained_from", self.first, 0, int(canvas.masked()[0]) if canvas.masked().size else canvas.length)
        self.most, self.endings = max_rejections, setting.end_tokens
        never = frozenset((denoiser.mask_token_id, *self.endings, *denoiser.eos_token_ids))
        key = _source(chosen[0], sources[chosen[0]], grammar_start)
        assert setting.token_text is not None
        self.lexicon = _lexicon(key, setting.token_text, denoiser.vocab_size, never)
        self.kinds = np.where(self.lexicon.row_of == DEAD, UNFIT, self.lexicon.row_of).astype(np.int32)
        self.kinds[list(self.endings)] = CLOSED
        self.kinds[denoiser.mask_token_id] = MASKED
        self.fillings = self._fillings(canvas.length - self.first)
        self.ruled_out: dict[int, NDArray[np.bool_]] = {}
        self.nowhere = np.zeros(
            self.lexicon.steps.shape[0] - UNFIT, np.bool_
        )  # by kind; CLOSED and UNFIT count from the end
        self.nowhere[[UNFIT, MASKED]] = True
        self.checks = self.rejections = self.completions = 0

    def constrain(self, step: Step, chosen: Ints) -> tuple[Ints, Ints]:
        self._look_at(step.canvas)
        round_ = _RoundWriter(self, step, chosen)
        round_.write_chosen()
        round_.write_others()
        round_.complete()
        slots = np.asarray(sorted(round_.written), np.int64)
        return slots, np.asarray([round_.written[slot] for slot in slots.tolist()], np.int64)

    def cuts(self, canvas: Canvas, length: int) -> bool:
        """See `base.Check`: only after an end that is written."""
        return bool(np.isin(canvas.tokens[self.first : length], self.endings).any())

    def allows(self, slot: int, token: int) -> bool:
        """Whether a canvas can be completed with a token at a masked slot; if so the token stays there."""
        self.checks += 1
        kind = int(self.kinds[token])
        self.fillings.put(slot - self.first, kind)
        if self.fillings.possible:
            return True
        self.rejections += 1
        self.fillings.put(slot - self.first, MASKED)
        self.ruled_out.setdefault(slot, self.nowhere.copy())[kind] = True
        return False

    def impossible(self, slot: int, tokens: int | slice = ALL) -> NDArray[np.bool_]:
        """Whether a token, or each of some, is known to be impossible at a slot without a test."""
        known: NDArray[np.bool_] = self.ruled_out.get(slot, self.nowhere)
        return known[self.kinds[tokens]]

    def completion(self) -> dict[int, int]:
        """A token for every masked slot, of the shortest text."""
        tokens = self.fillings.example()
        return {
            self.first + i: self.endings[0] if t is None else t
            for i, t in enumerate(tokens)
            if self.fillings.held[i] == MASKED
        }

    def _fillings(self, length: int) -> Fillings:
        return Fillings(self.lexicon, length, closes=bool(self.endings))

    def _look_at(self, canvas: Canvas) -> None:
        """Take up what the canvas holds now. What is ruled out stays so while slots are only filled."""
        kinds = self.kinds[canvas.tokens[self.first :]]
        if kinds.size != self.fillings.length:  # cut by a stop rule
            self.fillings = self._fillings(kinds.size)
            self.ruled_out.clear()
        if ((self.fillings.held != MASKED) & (kinds != self.fillings.held)).any():  # another draft of this canvas
            self.ruled_out.clear()
        for slot in np.flatnonzero(kinds != self.fillings.held).tolist():
            self.fillings.put(slot, int(kinds[slot]))
        if not self.fillings.possible:
            raise UnsatisfiableError(self._why(kinds))

    def _why(self, kinds: Table) -> str:
        if not self._fillings(kinds.size).possible:
            fit = "exactly " * (not self.endings)
            return (
                f"no text of the constraint fits {fit}{kinds.size} slots with this vocabulary; give the text "
                f"another length"
            )
        gaps = int((kinds == MASKED).sum())
        return (
            f"the text given contradicts the constraint, or its {gaps} masked slots are too few or too many; "
            f"change the template"
        )


class _RoundWriter:
    """Writing of one round."""

    def __init__(self, check: GrammarCheck, step: Step, chosen: Ints) -> None:
        self.check, self.step, self.left = check, step, check.most
        pool = np.union1d(step.eligible, chosen)
        self.rows = dict(zip(pool.tolist(), rows := step.predictions.rows(pool), strict=True))
        self.chosen, self.all = _ranked(step, chosen), chosen.size == step.canvas.masked().size
        self.sure = dict(zip(pool.tolist(), step.predictions.confidence[rows].tolist(), strict=True))
        self.token = dict(zip(pool.tolist(), step.predictions.tokens[rows].tolist(), strict=True))
        self.least = min(self.sure[slot] for slot in self.chosen)
        self.others: dict[int, Iterator[tuple[float, int]]] = {}
        self.heap = [(-self.sure[slot], slot) for slot in sorted(set(pool.tolist()) - set(self.chosen))]
        heapq.heapify(self.heap)
        self.written: dict[int, int] = {}
        self.closed = step.canvas.length

    def write_chosen(self) -> None:
        """Try what the commit rule chose."""
        for slot in self.chosen:
            self._try(slot)

    def write_others(self) -> None:
        """Make up for what was ruled out."""
        while self.heap and self.left > 0 and len(self.written) < len(self.chosen):
            sure, slot = heapq.heappop(self.heap)
            if self.written and not self.all and -sure < self.least:
                break
            self._try(slot)

    def complete(self) -> None:
        """Write what has to be written and is not, and the slots after the end."""
        for slot in self.token:
            if slot > self.closed and slot not in self.written:
                self._put(slot, self.written[self.closed])
        missing = (
            [slot for slot in self.chosen if slot not in self.written] if self.all else self.chosen[: not self.written]
        )
        if missing:
            text = self.check.completion()
            for slot in missing:
                self._put(slot, text[slot])
            self.check.completions += len(missing)

    def _try(self, slot: int) -> None:
        token = self.token[slot]
        if slot > self.closed:
            return
        known = self.check.impossible(slot, token)
        if not known and self.check.allows(slot, token):
            self.written[slot] = token
            if token in self.check.endings:
                self.closed = slot
            return
        self.left -= not known
        if slot not in self.others:
            self.others[slot] = self._others(slot, token)
        if (option := next(self.others[slot], None)) is not None:
            self.sure[slot], self.token[slot] = option
            heapq.heappush(self.heap, (-option[0], slot))

    def _others(self, slot: int, first: int) -> Iterator[tuple[float, int]]:
        """(probability, token) of the slot's tokens that are not ruled out, the best first."""
        row = self.step.predictions.logits[int(self.rows[slot])].double().cpu().numpy()
        p = np.exp(row - row.max())
        tokens = np.flatnonzero(~self.check.impossible(slot) & (p > 0))
        if tokens.size > MOST_RANKED:
            tokens = np.sort(tokens[np.argpartition(-p[tokens], MOST_RANKED)[:MOST_RANKED]])
        tokens = tokens[np.argsort(-p[tokens], kind="stable")]
        for token, sure in zip(tokens.tolist(), (p[tokens] / p.sum()).tolist(), strict=True):
            if token != first and not self.check.impossible(slot, token):
                yield sure, token

    def _put(self, slot: int, token: int) -> None:
        self.written[slot] = token
        self.check.fillings.put(slot - self.check.first, int(self.check.kinds[token]))


def _ranked(step: Step, chosen: Ints) -> list[int]:
    """Slots that a rule chose, best first; those that a stop rule added come after."""
    known = [int(slot) for slot in step.ranked if slot in set(chosen.tolist())]
    return known + [int(slot) for slot in chosen if int(slot) not in set(known)]


Source = tuple[str, str, str, str]
"""A constraint as texts: its kind, itself, its start, the folder of its imports."""


def _source(kind: str, value: Any, start: str) -> Source:
    if kind == "regex":
        need(isinstance(value, str), "regex", "be a string", value)
        return kind, value, start, ""
    if kind == "grammar":
        need(isinstance(value, str | Path), "grammar", "be a text or a path", value)
        text, folder = read_ebnf(value)
        return kind, text, start, str(folder or "")
    need(isinstance(value, str | Path | bool | Mapping), "json_schema", "be an object, a text or a path", value)
    try:
        return kind, json.dumps(read_json_schema(value)), start, ""
    except (TypeError, ValueError) as error:
        raise ConfigError(f"json_schema is not JSON: {error}") from None


def _parsed(source: Source) -> Grammar:
    kind, text, start, folder = source
    if kind == "regex":
        return Grammar({"regex": parse_regex(text)}, "regex")
    if kind == "grammar":
        return parse_ebnf(text, start, Path(folder) if folder else None)
    return parse_json_schema(json.loads(text))


@lru_cache(maxsize=8)
def _lexicon(source: Source, token_text: TokenText, vocab_size: int, never: frozenset[int]) -> Lexicon:
    """Tables of a constraint and a vocabulary, made once for all canvases."""
    cfg = Cfg.of(_parsed(source))
    return Lexicon.of(cfg, [None if token in never else token_text(token) for token in range(vocab_size)])
