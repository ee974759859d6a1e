"""When each word is spoken, from the attention of some heads of the decoder to the encoder's positions.

The rows of these heads are normalised, smoothed and averaged; dynamic time warping lays the tokens in order along the
time, and words are made of tokens. Attention comes from a pass over a text that is known: the prompt with
`no_timestamps`, the text tokens, the end.

Source: the word timestamps of openai/whisper (whisper/timing.py), of Robust Speech Recognition via Large-Scale Weak
Supervision (arXiv:2212.04356). What it does beyond that with words at the borders of segments is left out.
Axes in this file: h = heads, n = tokens, t = positions of the encoder, 20 ms each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from paceline.speech.transcript import Word

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Decode = Callable[[Sequence[int]], str]

SECONDS_PER_POSITION: Final = 0.02
FRAMES_PER_POSITION: Final = 2
FILTER_WIDTH: Final = 7
LONGEST_MEDIAN: Final = 0.7
"""Seconds; a word at the end of a sentence lasts at most twice the median, or twice this."""

SENTENCE_ENDS: Final = ".。!！?？"  # noqa: RUF001
PREPENDED: Final = "\"'“¿([{-"
APPENDED: Final = "\"'.。,，!！?？:：”)]}、"  # noqa: RUF001
PUNCTUATION: Final = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
WITHOUT_SPACES: Final = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
UNKNOWN: Final = "\ufffd"
DIAGONAL, DOWN, RIGHT = 0, 1, 2


# ------------------------------------------------------------------------------------------------ tokens in time


def within_audio(weights_hnt: torch.Tensor, frames: int) -> torch.Tensor:
    """Attention to the positions of the audio itself, without what pads the window, each row summing to 1 again.

    Args:
        weights_hnt: (h, n, t) attention, rows summing to 1.
        frames: of audio in the window, of 10 ms.
    """
    cut_hnt = weights_hnt[..., : max(1, frames // FRAMES_PER_POSITION)].float()
    return cut_hnt / cut_hnt.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)


def median_filter(values: torch.Tensor, width: int = FILTER_WIDTH) -> torch.Tensor:
    """Each value's median with its neighbours along the last axis, reflected at the ends.

    Args:
        values: any shape; one with a last axis of no more than width // 2 comes back as it is.
        width: an odd number.
    """
    pad = width // 2
    if values.shape[-1] <= pad:
        return values
    left, right = values[..., 1 : pad + 1].flip(-1), values[..., -pad - 1 : -1].flip(-1)
    padded = torch.cat([left, values, right], dim=-1)
    return padded.unfold(-1, width, 1).sort(-1).values[..., pad]


def token_matrix(weights_hnt: torch.Tensor, width: int = FILTER_WIDTH) -> FloatArray:
    """(n, t) how much each token belongs to each position, from the attention of the alignment heads.

    Args:
        weights_hnt: (h, n, t), as `within_audio` gives it.
    """
    weights_hnt = weights_hnt.float()
    std_h1t, mean_h1t = torch.std_mean(weights_hnt, dim=-2, keepdim=True, correction=0)
    normal_hnt = (weights_hnt - mean_h1t) / std_h1t.clamp_min(torch.finfo(torch.float32).tiny)
    return median_filter(normal_hnt, width).mean(0).double().cpu().numpy()


def warp(cost_nt: FloatArray) -> tuple[IntArray, IntArray]:
    """The cheapest path from the first token and position to the last ones, by dynamic time warping.

    Steps go to the next token, the next position or both. Of equally cheap ways the one that comes from the position
    before is taken, as published; sums are rounded to float32.

    Args:
        cost_nt: (n, t), neither of them 0.
    Returns:
        token and position of each step of the path.
    """
    rows, columns = cost_nt.shape
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0.0
    came = np.full((rows + 1, columns + 1), RIGHT, np.int8)
    came[1:, 0] = DOWN
    for diagonal in range(2, rows + columns + 1):  # cells of one diagonal do not depend on each other
        i = np.arange(max(1, diagonal - columns), min(rows, diagonal - 1) + 1)
        j = diagonal - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        step = np.where((both < down) & (both < right), DIAGONAL, np.where((down < both) & (down < right), DOWN, RIGHT))
        best = np.choose(step, (both, down, right))
        total[i, j] = cost_nt[i - 1, j - 1] + best.astype(np.float64)
        came[i, j] = step
    return _traced(came)


def _traced(came: npt.NDArray[np.int8]) -> tuple[IntArray, IntArray]:
    """Back along the steps by which the last cell was reached."""
    i, j = came.shape[0] - 1, came.shape[1] - 1
    path = []
    while i > 0 or j > 0:
        path.append((i - 1, j - 1))
        step = came[i, j]
        i, j = i - int(step != RIGHT), j - int(step != DOWN)
    tokens, positions = np.array(path[::-1], dtype=np.int64).T
    return tokens, positions


def token_starts(matrix_nt: FloatArray) -> FloatArray:
    """(n,) seconds from the window's beginning at which each row of `token_matrix` begins."""
    tokens, positions = warp(-matrix_nt)
    entered = np.diff(tokens, prepend=-1) > 0
    starts: FloatArray = positions[entered].astype(np.float64) * SECONDS_PER_POSITION
    return starts


def text_starts(weights_hnt: torch.Tensor, prompt_length: int, frames: int) -> FloatArray:
    """When each token of a text begins, and last when the text ends, in seconds from the window's beginning.

    Args:
        weights_hnt: (h, n, t) attention of the alignment heads in a pass over prompt, text and end.
        prompt_length: tokens of the prompt, `no_timestamps` included. A token begins where the one before it looks.
        frames: of audio in the window, of 10 ms.
    Returns:
        n - prompt_length numbers: one for each token of the text, and one for the end.
    """
    matrix_nt = token_matrix(within_audio(weights_hnt, frames))
    return token_starts(matrix_nt[prompt_length - 1 : -1])


# ------------------------------------------------------------------------------------------------ words of tokens


@dataclass(slots=True)
class _Timed:
    """A word while it is put together."""

    text: str
    count: int
    start: float
    end: float
    probability: float


def split_words(tokens: Sequence[int], decode: Decode, language: str) -> list[tuple[str, int]]:
    """The words of a text, each with how many tokens it has.

    Args:
        tokens: of text alone.
        decode: tokens -> text, with U+FFFD for what is half a character.
        language: its code; some do not write spaces, and each character is a word.
    """
    parts = _characters(tokens, decode)
    if language in WITHOUT_SPACES:
        return parts
    words: list[tuple[str, int]] = []
    for text, count in parts:
        if not words or text.startswith(" ") or text.strip() in PUNCTUATION:
            words.append((text, count))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + count)
    return words


def _characters(tokens: Sequence[int], decode: Decode) -> list[tuple[str, int]]:
    """The smallest groups of tokens that are whole characters."""
    whole, found, begin, length = decode(tokens), [], 0, 0
    for end in range(1, len(tokens) + 1):
        text = decode(tokens[begin:end])
        place = length + text.find(UNKNOWN)
        if UNKNOWN not in text or place >= len(whole) or whole[place] == UNKNOWN:
            found.append((text, end - begin))
            begin, length = end, length + len(text)
    return found


def timed_words(
    segments: Sequence[Sequence[int]],
    starts: Sequence[float] | FloatArray,
    probabilities: Sequence[float] | FloatArray,
    decode: Decode,
    *,
    language: str,
    offset: float = 0.0,
) -> list[tuple[Word, ...]]:
    """The words of each segment of a window with their times.

    Args:
        segments: text tokens of each, n altogether, without times.
        starts: n + 1 seconds, of `text_starts`.
        probabilities: n, of each token among the text tokens.
        decode, language: see `split_words`.
        offset: seconds at which the window begins.
    """
    tokens = [token for segment in segments for token in segment]
    if not tokens:
        return [() for _ in segments]
    timed = _timed(tokens, starts, probabilities, split_words(tokens, decode, language))
    _shorten(timed)
    _join_punctuation(timed)
    return _by_segment(timed, [len(segment) for segment in segments], offset)


def _timed(
    tokens: Sequence[int],
    starts: Sequence[float] | FloatArray,
    probabilities: Sequence[float] | FloatArray,
    words: Sequence[tuple[str, int]],
) -> list[_Timed]:
    timed, begin = [], 0
    for text, count in words:
        end = begin + count
        chance = float(np.mean(probabilities[begin:end]))
        timed.append(_Timed(text, count, float(starts[begin]), float(starts[end]), chance))
        begin = end
    return timed


def _shorten(words: Sequence[_Timed]) -> None:
    """Signs that end a sentence, and words after them, last no longer than twice the median: the pause is between."""
    lengths = [word.end - word.start for word in words if word.end > word.start]
    if not lengths:
        return
    most = 2 * min(LONGEST_MEDIAN, float(np.median(lengths)))
    for before, word in pairwise(words):
        if word.end - word.start > most:
            if word.text in SENTENCE_ENDS:
                word.end = word.start + most
            elif before.text in SENTENCE_ENDS:
                word.start = word.end - most


def _join_punctuation(words: Sequence[_Timed]) -> None:
    """Opening signs join the word after them, others the word before; what has joined is left without text."""
    after = len(words) - 1
    for place in range(len(words) - 2, -1, -1):
        sign, word = words[place], words[after]
        if sign.text.startswith(" ") and sign.text.strip() in PREPENDED:
            word.text, word.count, sign.text, sign.count = sign.text + word.text, sign.count + word.count, "", 0
        else:
            after = place
    before = 0
    for place in range(1, len(words)):
        word, sign = words[before], words[place]
        if not word.text.endswith(" ") and sign.text in APPENDED:
            word.text, word.count, sign.text, sign.count = word.text + sign.text, word.count + sign.count, "", 0
        else:
            before = place


def _by_segment(words: Sequence[_Timed], counts: Sequence[int], offset: float) -> list[tuple[Word, ...]]:
    """Words are those of the segment in which they begin."""
    found: list[list[Word]] = [[] for _ in counts]
    ends = np.cumsum(counts)
    begin = 0
    for word in words:
        segment = int(np.searchsorted(ends, begin, side="right"))
        if word.text:
            start, end = (round(offset + time, 2) for time in (word.start, word.end))
            found[segment].append(Word(word.text, start, end, word.probability))
        begin += word.count
    return [tuple(segment) for segment in found]
