"""An audio cut into pieces that are transcribed side by side, and their transcripts joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from paceline.speech.audio import SAMPLE_RATE, Samples
from paceline.speech.transcript import Transcript

SEARCHED: Final = 3.0
"""Seconds on both sides of a cut in which the quietest place is looked for."""

BLOCKS_PER_SECOND: Final = 20
"""Loudness is taken of blocks so short."""


def cut_pieces(samples: Samples, count: int) -> list[Samples]:
    """An audio cut into at most so many pieces of about the same length, each cut in the quietest place near it."""
    cuts = [_quietest(samples, len(samples) * number // count) for number in range(1, count)]
    borders = [0, *sorted({cut for cut in cuts if 0 < cut < len(samples)}), len(samples)]
    return [samples[low:high] for low, high in pairwise(borders)]


def _quietest(samples: Samples, near: int) -> int:
    """The middle of the quietest block around a sample."""
    step, reach = SAMPLE_RATE // BLOCKS_PER_SECOND, int(SEARCHED * SAMPLE_RATE)
    low = max(0, near - reach)
    count = (min(len(samples), near + reach) - low) // step
    if count < 1:
        return near
    blocks = samples[low : low + count * step].reshape(count, step)
    return int(low + (np.square(blocks).mean(1).argmin() + 0.5) * step)


def join_pieces(pieces: Sequence[Samples], transcripts: Sequence[Transcript]) -> Transcript:
    """The transcripts of pieces, in order, as that of the whole, with times of the whole."""
    if len(transcripts) == 1:
        return transcripts[0]
    starts = np.cumsum([0, *(len(piece) for piece in pieces[:-1])]) / SAMPLE_RATE
    moved = tuple(
        segment.moved(float(start))
        for start, transcript in zip(starts, transcripts, strict=True)
        for segment in transcript.segments
    )
    return replace(transcripts[0], duration=sum(transcript.duration for transcript in transcripts), segments=moved)
