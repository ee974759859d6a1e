"""From window to window: segments of a window's tokens, where the next one begins, what it is told of the text before.

Audio is read in windows of 30 s, 3,000 frames of 10 ms; a time token is a step of two frames.

Source: Robust Speech Recognition via Large-Scale Weak Supervision (arXiv:2212.04356), section 3.8, and its code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from paceline.speech.fallback import Attempt
from paceline.speech.transcript import FRAMES_PER_SECOND, Segment
from paceline.speech.whisper_tokens import WhisperTokens

WINDOW_FRAMES: Final = 3000
FRAMES_PER_STEP: Final = 2
UNCERTAIN: Final = 0.5
"""Above this temperature a text is not told to the next window."""

Piece = tuple[int, int, tuple[int, ...]]
"""First frame and last frame within the window, and the tokens between, times included."""


def split_window(sampled: Sequence[int], tokens: WhisperTokens, window_frames: int) -> tuple[list[Piece], int]:
    """Cut a window's tokens where two times meet, and say how far the window has been understood.

    What begins behind the last pair of times and does not end in this window is left out; the next window begins there.

    Args:
        sampled: text and times, without the end.
        window_frames: frames of audio in the window, 3,000 or what is left of it.
    Returns:
        the pieces, and the frames to go on by: at least 1.
    """
    first = tokens.first_timestamp
    is_time = [token >= first for token in sampled]
    cuts = [place for place in range(1, len(sampled)) if is_time[place - 1] and is_time[place]]
    if not cuts:
        latest = next((token for token in reversed(sampled) if token >= first), first)
        end = (latest - first) * FRAMES_PER_STEP if latest > first else window_frames
        return [(0, end, tuple(sampled))], window_frames
    ends_in_one = is_time[-2:] == [False, True]
    if ends_in_one:  # no speech after it
        cuts.append(len(sampled))
    pieces = []
    for low, high in zip([0, *cuts], cuts, strict=False):
        begin, end = ((sampled[place] - first) * FRAMES_PER_STEP for place in (low, high - 1))
        pieces.append((begin, end, tuple(sampled[low:high])))
    return pieces, window_frames if ends_in_one else pieces[-1][1] or window_frames


def window_segments(
    attempt: Attempt, tokens: WhisperTokens, decode: Callable[[Sequence[int]], str], seek: int, window_frames: int
) -> tuple[list[Segment], int]:
    """The segments of a window in seconds of the whole audio, and the frames to go on by.

    Segments without text, or that last no time, are left out.

    Args:
        decode: text tokens -> text.
        seek: first frame of the window.
    """
    pieces, step = split_window(attempt.tokens, tokens, window_frames)
    segments = [
        Segment(
            start=(seek + begin) / FRAMES_PER_SECOND,
            end=(seek + end) / FRAMES_PER_SECOND,
            text=decode([token for token in sampled if token < tokens.end]),
            tokens=sampled,
            seek=seek,
            temperature=attempt.temperature,
            avg_logprob=attempt.avg_logprob,
            compression_ratio=attempt.compression_ratio,
            no_speech_prob=attempt.no_speech_prob,
        )
        for begin, end, sampled in pieces
    ]
    return [segment for segment in segments if segment.start != segment.end and segment.text.strip()], step


def expected_tokens(draft: Sequence[Segment], tokens: WhisperTokens, seek: int) -> list[int]:
    """Tokens of the segments that a window is expected to hold, with times from its beginning.

    Args:
        draft: with times from the beginning of the audio.
        seek: first frame of the window.
    """
    first, last = tokens.first_timestamp, WINDOW_FRAMES // FRAMES_PER_STEP
    found: list[int] = []
    for segment in draft:
        frame = round(segment.start * FRAMES_PER_SECOND) - seek
        if 0 <= frame < WINDOW_FRAMES:
            moved = (segment.seek - seek) // FRAMES_PER_STEP
            found += [
                token if token < first else first + min(max(token - first + moved, 0), last) for token in segment.tokens
            ]
    return found


class PreviousText:
    """What a window is told of the text before it.

    Args:
        initial: tokens of a text that the user gives, such as names to be expected.
        kept: windows are told of those before them; without, the first is told of `initial`, and the others of nothing.

    Attributes:
        tokens: for `WhisperTokens.prompt`.
    """

    def __init__(self, initial: Sequence[int] = (), *, kept: bool = True) -> None:
        self.tokens = list(initial)
        self._kept = kept

    def add(self, segments: Sequence[Segment], temperature: float) -> None:
        """Those of one window, and the highest temperature at which it was tried."""
        if not self._kept or temperature > UNCERTAIN:
            self.tokens = []
        else:
            self.tokens += [token for segment in segments for token in segment.tokens]
