"""Live captions: words of a growing audio that do not change any more.

The audio so far, less what is done with, is transcribed again whenever some more has come. Words on which the last
transcripts agree are stable; they are shown and never taken back.

Source: Turning Whisper into Real-Time Transcription System (arXiv:2307.14743), LocalAgreement-n, and its code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt

from paceline.speech.transcript import Word
from paceline.utils import integer, number

Samples = npt.NDArray[np.float32]

EARLIER: Final = 0.1
"""Seconds before the end of the stable words from which on new words count."""

NEAR: Final = 1.0
"""Seconds from there in which stable words may be repeated."""

MOST_REPEATED: Final = 5
MOST_SECONDS: Final = 30.0
"""A window of Whisper's: no audio is kept that is longer."""


class LocalAgreement:
    """The words on which the last transcripts of a growing audio agree.

    Args:
        agree: how many transcripts must agree; 1 takes every word at once.

    Attributes:
        stable: words that are final, all of them.

    Raises:
        ConfigError: agree below 1.
    """

    def __init__(self, agree: int = 2) -> None:
        integer("agree", agree, 1, 100)
        self.stable: list[Word] = []
        self._earlier: deque[list[Word]] = deque(maxlen=agree - 1)
        self._needed = agree - 1
        self._rest: list[Word] = []

    @property
    def rest(self) -> list[Word]:
        """Words of the last transcript that are not stable yet; a good draft of the next one."""
        return list(self._rest)

    @property
    def until(self) -> float:
        """Seconds at which the stable words end; 0 without any."""
        return self.stable[-1].end if self.stable else 0.0

    def add(self, words: Sequence[Word], *, seen_from: float = 0.0) -> list[Word]:
        """Take the next transcript; the words that are stable with it.

        Args:
            words: with times of the whole audio.
            seen_from: seconds at which the audio that was transcribed begins; stable words before are not repeated.
        """
        new = [_behind(word, self.until) for word in words if word.start > self.until - EARLIER]
        new = self._without_repeated(new, seen_from)
        count = _agreed([*self._earlier, new]) if len(self._earlier) == self._needed else 0
        found, self._rest = new[:count], new[count:]
        for earlier in self._earlier:
            del earlier[:count]
        self._earlier.append(list(self._rest))
        self.stable += found
        return found

    def _without_repeated(self, new: list[Word], seen_from: float) -> list[Word]:
        """Words without those at their beginning that repeat the last stable ones."""
        heard = [word.text for word in self.stable if word.end > seen_from][-MOST_REPEATED:]
        if not new or abs(new[0].start - self.until) >= NEAR:
            return new
        texts = [word.text for word in new]
        counts = range(1, min(len(heard), len(texts)) + 1)
        return new[next((count for count in counts if heard[-count:] == texts[:count]), 0) :]

    def finish(self) -> list[Word]:
        """The audio has ended, or is cut: the rest is stable, too."""
        found, self._rest = self._rest, []
        self._earlier.clear()
        self.stable += found
        return found


def _behind(word: Word, until: float) -> Word:
    """The word, begun no earlier than the one before has ended, whatever another transcript said of its time."""
    return replace(word, start=max(word.start, until), end=max(word.end, until))


def _agreed(hypotheses: Sequence[Sequence[Word]]) -> int:
    """How many words all begin with."""
    for count, words in enumerate(zip(*hypotheses, strict=False)):
        if len({word.text for word in words}) > 1:
            return count
    return min(map(len, hypotheses))


class LiveCaptions:
    """Captions of audio that is still coming: what to transcribe next, and the words that are stable.

    Whoever transcribes calls `feed` with new samples and, about once a second, transcribes `samples` with `prompt` as
    the text before and calls `update` with what came out; at the end `finish`.

    Args:
        longest: seconds of audio from which on what is done with is cut off.
        agree: see `LocalAgreement`.
        prompt_characters: of the text before the audio that `prompt` keeps.
        sample_rate: of the samples.

    Attributes:
        samples: mono audio that is to be transcribed.
        offset: seconds of the whole audio at which it begins.

    Raises:
        ConfigError: a number out of its range.
    """

    def __init__(
        self, *, longest: float = 15.0, agree: int = 2, prompt_characters: int = 200, sample_rate: int = 16_000
    ) -> None:
        number("longest", longest, 1.0, MOST_SECONDS, f"be a number of seconds in 1..{MOST_SECONDS:g}")
        integer("prompt_characters", prompt_characters, 0)
        integer("sample_rate", sample_rate, 1)
        self._longest, self._prompt_characters, self._rate = longest, prompt_characters, sample_rate
        self._agreement = LocalAgreement(agree)
        self._cut = 0  # samples that were cut off
        self.samples: Samples = np.zeros(0, np.float32)

    @property
    def offset(self) -> float:
        return self._cut / self._rate

    @property
    def seconds(self) -> float:
        """How long `samples` are."""
        return len(self.samples) / self._rate

    @property
    def stable(self) -> Sequence[Word]:
        """All words that are final."""
        return tuple(self._agreement.stable)

    @property
    def rest(self) -> list[Word]:
        """Words that may still change."""
        return self._agreement.rest

    @property
    def prompt(self) -> str:
        """The last stable words that end before `samples` begin, as many as come to `prompt_characters`."""
        kept: list[str] = []
        length = 0
        for word in reversed(self._agreement.stable):
            if word.end <= self.offset:
                if length >= self._prompt_characters:
                    break
                kept.append(word.text)
                length += len(word.text)
        return "".join(reversed(kept))

    def feed(self, samples: Samples) -> None:
        """More audio has come."""
        self.samples = np.concatenate([self.samples, samples.astype(np.float32, copy=False)])

    def update(self, words: Sequence[Word], segment_ends: Sequence[float] = ()) -> list[Word]:
        """Take a transcript of `samples`; the words that are stable with it.

        Args:
            words: with times from the beginning of `samples`.
            segment_ends: seconds at which its segments end, the last of which may not be complete.
        """
        moved = [replace(word, start=word.start + self.offset, end=word.end + self.offset) for word in words]
        found = self._agreement.add(moved, seen_from=self.offset)
        if self.seconds > self._longest:
            self._cut_at(max((end for end in self._whole(segment_ends)), default=self.offset))
        if self.seconds > MOST_SECONDS:
            found += self._forced()
        return found

    def _whole(self, segment_ends: Sequence[float]) -> list[float]:
        """Ends of complete segments all of whose words are stable."""
        ends = [end + self.offset for end in segment_ends[:-1]]
        return [end for end in ends if end <= self._agreement.until]

    def _forced(self) -> list[Word]:
        """Where nothing could be cut for a whole window, leave out stable words' audio, or silence but its last second.

        Words that would be cut without being stable become so; the published method lets the audio grow.
        """
        end = self.offset + self.seconds
        least = end - MOST_SECONDS
        found = [] if self._agreement.until > least else self._agreement.finish()
        until = self._agreement.until
        self._cut_at(max(until, least) if until > self.offset else end - NEAR)
        return found

    def _cut_at(self, second: float) -> None:
        """Leave out the audio before a second of the whole audio."""
        count = min(max(0, round((second - self.offset) * self._rate)), len(self.samples))
        self.samples = self.samples[count:]
        self._cut += count

    def finish(self) -> list[Word]:
        """The audio has ended: the words that are left, which are stable now."""
        return self._agreement.finish()
