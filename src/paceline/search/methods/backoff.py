"""Backing off from what is denied: where a label or pattern appears, the text is taken back and goes on otherwise.

Vulnerability-constrained decoding bans labels that a model was taught to put on insecure lines, so that it writes other
lines. Here anything that can be recognised in the text so far is denied in this way, also labels that stand behind the
line they mean. Source: the constrained decoding of smart contracts (arXiv:2309.09826).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from paceline.errors import ConfigError
from paceline.search.base import Search, Steps, mean_logprob
from paceline.search.branch import Branch, Found
from paceline.search.named import named
from paceline.utils import choice, integer, strings

INDENT: Final = " \t"


class BackOff(Search):
    """Decodes token by token, and never returns what is denied: where it appears, the text is taken back to a clean
    point, and the token that led on from there is banned there.

    A line whose beginning was tried `attempts` times is given up, and the line before it is begun otherwise. After
    `rewinds` in all, the text ends at the last clean point. It runs without drafts, as all searches do; texts above
    temperature 0 are not samples of the model given that nothing is denied, which would take back the whole text.

    Args:
        denied: a regular expression, or several, which must not match within the text behind the prompt. Labels that
            are special tokens are only seen with `skip_special_tokens=False`.
        deny: of the text so far, whether it is denied, a callable or "module:function"; then its last line with any
            characters is taken back.
        back_to: "line": the beginning of the line in which the match begins; "match": where the match begins, which
            bans a label and no more.
        attempts: at one point. rewinds: in all.
    Raises:
        ConfigError: a value outside its range, or no regular expression.
    """

    name = "backoff"
    one_text = True

    def __init__(
        self,
        denied: str | Sequence[str] = (),
        deny: Callable[[str], Any] | str | None = None,
        back_to: str = "line",
        attempts: int = 8,
        rewinds: int = 64,
    ) -> None:
        super().__init__()
        choice("back_to", back_to, ("line", "match"))
        integer("attempts", attempts, 1, 1024)
        integer("rewinds", rewinds, 0, 100_000)
        self.patterns = [_compiled(pattern) for pattern in strings("denied", denied)]
        self.deny = None if deny is None else named("deny", deny)
        self.back_to, self.attempts, self.rewinds = back_to, attempts, rewinds
        self._sizes: dict[Branch, int] = {}  # characters of each text
        self._bans: dict[Branch, list[int]] = {}

    def steps(self, root: Branch) -> Steps[None]:
        here, asked, left = root, None, self.rewinds
        self._sizes[root] = 0
        while not here.ended:
            if here is not asked:
                self.alive, asked = [here], here
                logprobs = (yield [here]).logprobs[0]
            child = self._child(here, logprobs)
            at = None if child is None else self.denied_at(child.written())
            if child is not None and at is None:
                here = child
                continue
            clean = self._line_before(here) if child is None else self._clean_point(child, child.written(), at or 0)
            if left == 0 or (child is None and clean is here):
                here = clean
                break
            left -= 1
            here = self._banned(clean, here if child is None else child)
        self.alive, self.found = [], [Found(here, mean_logprob(here))] if here.length else []

    def _child(self, here: Branch, logprobs: torch.Tensor) -> Branch | None:
        """The text one allowed token longer; None where there was no such, or enough were tried."""
        bans = self._bans.get(here, [])
        allowed = logprobs.index_fill(0, torch.tensor(bans, dtype=torch.int64), float("-inf"))
        if len(bans) >= self.attempts or not bool(allowed.isfinite().any()):
            return None
        token = here.draw(allowed, 0)
        child = here.child(token, float(logprobs[token]))
        self._sizes[child] = len(child.written())
        return child

    def denied_at(self, text: str) -> int | None:
        """Where what is denied begins in a text; None where nothing is."""
        places = [match.start() for pattern in self.patterns if (match := pattern.search(text))]
        if self.deny is not None and self.deny(text):
            places.append(max(0, len(text.rstrip()) - 1))
        return min(places, default=None)

    def _clean_point(self, branch: Branch, text: str, at: int) -> Branch:
        """The longest text before a branch that ends before `at`, or before its line and the indentation of that."""
        start = at if self.back_to == "match" else text.rfind("\n", 0, at) + 1
        while start < at and text[start] in INDENT:
            start += 1
        return next(
            ancestor for ancestor in branch.ancestors() if ancestor is not branch and self._sizes[ancestor] <= start
        )

    def _line_before(self, here: Branch) -> Branch:
        """Where the line before a clean point begins; the point itself where there is none."""
        if here.parent is None:
            return here
        text = here.written()
        return self._clean_point(here, text, max(0, len(text.rstrip()) - 1))

    def _banned(self, clean: Branch, end: Branch) -> Branch:
        """The clean point, where the token that led to `end` is no longer allowed."""
        first = next(ancestor for ancestor in end.ancestors() if ancestor.parent is clean)
        self._bans.setdefault(clean, []).append(first.token)
        return clean


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"denied must hold regular expressions, got {pattern!r}: {error}") from None
