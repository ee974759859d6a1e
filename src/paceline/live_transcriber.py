"""Captions of audio that is still coming: its last seconds are transcribed again whenever some more has come, drafted
from the transcript before, and the words that do not change any more are told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Final

import numpy as np

from paceline.errors import ConfigError, PromptError
from paceline.speech import SAMPLE_RATE, LiveCaptions, Samples, Segment, Word
from paceline.utils import number, shortened

if TYPE_CHECKING:
    from paceline.transcriber import Transcriber, TranscriptionParams

LEAST_NEW: Final = 0.5
"""Seconds of audio that must have come since the last transcript."""


class LiveTranscriber:
    """Transcribes audio as it comes.

    Args:
        params: of each transcript; words are timed in any case, a window is decoded once, since it will be decoded
            again anyway, and the text before the audio is that of the captions.
        drafts: each transcript is drafted from the one before, which leaves the words as they are.
        longest: seconds of audio that are transcribed again and again, see `LiveCaptions`.

    Attributes:
        updates: transcripts so far.
    """

    def __init__(
        self, transcriber: Transcriber, params: TranscriptionParams, *, drafts: bool = True, longest: float = 15.0
    ) -> None:
        transcriber.check(params)
        self._transcriber, self._drafts = transcriber, drafts
        self._captions = LiveCaptions(longest=longest)
        self._params = replace(params, words=True, temperature=params.temperatures[:1], pieces=1)
        self._prompt, self._before, self._new = params.prompt, list[Segment](), 0
        self.updates, self._ended = 0, False

    @property
    def stable(self) -> Sequence[Word]:
        """All words that are final."""
        return self._captions.stable

    @property
    def rest(self) -> list[Word]:
        """Words that may still change."""
        return self._captions.rest

    @property
    def new_seconds(self) -> float:
        """Of audio since the last transcript."""
        return self._new / SAMPLE_RATE

    def feed(self, samples: Samples) -> None:
        """More audio has come.

        Args:
            samples: (n,) finite floating-point numbers, mono at 16 kHz.
        Raises:
            PromptError: something else.
            ConfigError: the audio has ended.
        """
        if self._ended:
            raise ConfigError("these captions have ended; make new ones with LLM.captions")
        fine = isinstance(samples, np.ndarray) and samples.ndim == 1 and samples.dtype.kind == "f"
        if not fine or not np.isfinite(samples).all():
            raise PromptError(
                f"samples must be a NumPy array (n,) of finite floating-point numbers, got {shortened(samples)}"
            )
        self._captions.feed(samples)
        self._new += len(samples)

    def update(self) -> list[Word]:
        """Transcribe what has come; the words that are final with it."""
        if not self._new:
            return []
        captions, offset, self._new = self._captions, self._captions.offset, 0
        params = replace(self._params, prompt=captions.prompt or self._prompt)
        draft = [segment.moved(-offset) for segment in self._before] if self._drafts else []
        heard = self._transcriber.hear(captions.samples, params, draft)
        self.updates += 1
        if heard.segments and self._params.language is None:
            self._params = replace(self._params, language=heard.language)
        self._before = [segment.moved(offset) for segment in heard.segments]
        return captions.update(heard.words, [segment.end for segment in heard.segments])

    def finish(self) -> list[Word]:
        """The audio has ended: the words that are left; a second call has none."""
        if self._ended:
            return []
        self._ended = True
        return [*self.update(), *self._captions.finish()]


class Pace:
    """Keeps work to a share of the time: so long as it took, so long it rests, and more where the share is smaller.

    Args:
        share: of the time, above 0; 1 rests never.

    Attributes:
        busy: seconds of work so far.
    Raises:
        ConfigError: no such share.
    """

    def __init__(self, share: float) -> None:
        number("cpu_share", share, 0.0, 1.0, "be a number above 0 and up to 1", open_low=True)
        self._share, self._next = share, 0.0
        self.busy = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        """In this block work is done."""
        begun = monotonic()
        try:
            yield
        finally:
            now = monotonic()
            self.busy += now - begun
            self._next = now + (now - begun) * (1 / self._share - 1)

    @property
    def wait(self) -> float:
        """Seconds until the next work may begin; 0 or less: now."""
        return self._next - monotonic()
