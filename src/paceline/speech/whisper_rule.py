"""Whisper's decoding rules as one rule on logits along every path of a tree.

In this order, each a function of the tokens sampled so far:
    1. a blank and the end cannot come first;
    2. suppressed ids never come;
    3. with times: they come in pairs around text and never decrease, the first is an early one, and where all times
       together are more likely than every single text token, a time comes.

What depends on ids alone is `forbidden_ranges`; the last rule looks at the row, too.

Source: Robust Speech Recognition via Large-Scale Weak Supervision (arXiv:2212.04356), as its code decodes.
Axes in this file: r = rows, v = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Self

import torch

from paceline.sampling import LogitRule, Paths
from paceline.speech.whisper_tokens import WhisperTokens

EVERY: Final = 1 << 31
"""Beyond all ids."""


class WhisperRule(LogitRule):
    """What a Whisper model may say next.

    Args:
        tokens: the checkpoint's special ids.
        timestamps: times are sampled among the text; the prompt then ends without `no_timestamps`.
    """

    name = "Whisper's rules"
    needs_paths = True

    def __init__(self, tokens: WhisperTokens, *, timestamps: bool = True) -> None:
        self._tokens, self._timestamps = tokens, timestamps
        self._sampled: list[int] = []
        self._suppressed = frozenset(tokens.suppressed)
        self._always = {torch.device("cpu"): torch.tensor(tokens.suppressed, dtype=torch.int64)}

    def apply(self, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
        rows_rv.index_fill_(1, self._always_on(rows_rv.device), -math.inf)
        for row_v, path in zip(rows_rv, paths, strict=True):
            for low, high in self._ranges([*generated, *path]):
                row_v[low:high] = -math.inf
            if self._timestamps:
                self._prefer_times(row_v)

    def _prefer_times(self, row_v: torch.Tensor) -> None:
        """One row alone, so that it does not depend on those beside it; without waiting for a device."""
        first = self._tokens.first_timestamp
        times_are_likelier = row_v[first:].logsumexp(0) > row_v[:first].amax()
        if row_v.device.type != "cpu":
            row_v[:first].masked_fill_(times_are_likelier, -math.inf)
        elif times_are_likelier:  # which is seldom, and cheaper to ask than to mask
            row_v[:first] = -math.inf

    def _always_on(self, device: torch.device) -> torch.Tensor:
        if device not in self._always:
            self._always[device] = self._always[torch.device("cpu")].to(device)
        return self._always[device]

    def _ranges(self, sampled: Sequence[int]) -> list[tuple[int, int]]:
        ranges = forbidden_ranges(sampled, self._tokens) if self._timestamps else []
        return ranges if sampled else ranges + [(token, token + 1) for token in self._tokens.suppressed_at_begin]

    def advance(self, tokens: Sequence[int]) -> None:
        self._sampled.extend(tokens)

    def rewind(self, tokens: Sequence[int]) -> None:
        del self._sampled[len(self._sampled) - len(tokens) :]

    def fork(self) -> Self:
        twin = type(self)(self._tokens, timestamps=self._timestamps)
        twin._always, twin._sampled = self._always, list(self._sampled)
        return twin

    def allowed(self, path: Sequence[int]) -> int:
        sampled = list(self._sampled)
        for count, token in enumerate(path):
            if token in self._suppressed or any(low <= token < high for low, high in self._ranges(sampled)):
                return count
            sampled.append(token)
        return len(path)


def forbidden_ranges(sampled: Sequence[int], tokens: WhisperTokens) -> list[tuple[int, int]]:
    """Half-open ranges of ids that cannot follow by the rules of times, whatever their logits.

    Args:
        sampled: text and time tokens of this window so far, without the prompt.
    """
    first = tokens.first_timestamp
    if not sampled:
        return [(0, first), (first + tokens.max_initial + 1, EVERY)]
    ranges = [(tokens.no_timestamps, first)]
    ends_in_time = sampled[-1] >= first
    ends_text = ends_in_time and len(sampled) > 1 and sampled[-2] < first
    if ends_text:
        ranges.append((0, tokens.end))  # the next segment's beginning, or the end
    elif ends_in_time:
        ranges.append((first, EVERY))  # text
    latest = next((token for token in reversed(sampled) if token >= first), None)
    if latest is not None:
        ranges.append((first, latest if ends_text else latest + 1))  # no segment is empty or goes back
    return ranges
