"""What rounding costs Whisper: the loss of known texts and word errors, in each kind of weights.

usage: speech_errors.py --data FOLDER [--model whisper-base whisper-tiny.en] [--digits DRAWS]

Digits spoken by people (`whisper_check.py`, six draws of each speaker) and sentences of espeak-ng in three voices at
two speeds. Each is read by the encoder of each kind, and by the decoder of the same. Beside these there
is a control: float32, the encoder's states rounded to three bits of the largest number of each row.

`--digits` takes so many draws, and no sentences; beside float32 and int8 then int8 of the encoder alone and of the
decoder alone.

loss    of the text that was spoken, natural logarithm, mean over its tokens, then over recordings
errors  word error rate, by jiwer, of greedy decoding without times, cut at half again as many tokens as were spoken
right   recordings understood to the word
paired  recordings with more and with fewer wrong words than float32, and the chance of so large a sum of differences,
        or a larger one, if each had either sign with equal chance: of all signs, not of a sample

Results: `results/speech_errors.json`, with `--digits` `results/speech_digits.json`. Needs
`pip install '.[bench,speech]'`, and espeak-ng for sentences.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jiwer
import torch
from common import RESULTS, save
from real_models import model_folder
from whisper_check import in_words, recordings, spoken

from paceline import LLM
from paceline.models import Inputs
from paceline.speech import LogMel, WhisperTokens, load_audio
from paceline.tree import EMPTY_TREE

TEXT = (
    "The ships came back to the harbour in the evening, and everybody went down to look at them. Nobody had expected "
    "that the weather would change so quickly after the long summer. The captain said that they had seen no land for "
    "nine days, and that the water had been short. In the morning they will unload the cargo and count what is left."
)
KINDS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8 and bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
}
ALONE = ("int8 encoder", "int8 decoder")
"""Kinds that are int8 in part, else float32."""
DRAWS, SPARE = 6, 8
VOICES, SPEEDS = ("en-us", "en-gb", "en-us+f3"), ("150", "190")
TEXTS = (
    TEXT,
    "She sells seashells by the shore, and the price of a dozen is four dollars and twenty cents.",
    "Please call me back tomorrow at half past seven, because the meeting on Monday is on the second floor now.",
    "The quick brown fox jumps over the lazy dog while seven wizards box with a large quartz sphere.",
    "Rain is expected in the north this afternoon, with strong winds along the coast and little sun.",
)
CONTROL, LEVELS = "control", 3


@dataclass(frozen=True, slots=True)
class Recording:
    """What was spoken, and the audio."""

    kind: str
    text: str
    audio: Any


def digits(data: Path, draws: int) -> Iterator[Recording]:
    for words, audio in spoken(recordings(data), draws):
        yield Recording("digits", words, audio)


def sentences() -> Iterator[Recording]:
    for text in TEXTS:
        for voice in VOICES:
            for speed in SPEEDS:
                command = ["espeak-ng", "--stdout", "-v", voice, "-s", speed, text]
                sound = subprocess.run(command, capture_output=True, check=True).stdout
                yield Recording("sentences", text, load_audio(sound))


def rounded(states: torch.Tensor) -> torch.Tensor:
    """Rows with few different numbers."""
    step = states.abs().amax(-1, keepdim=True) / LEVELS
    return (states / step).round() * step


def opened(folder: Path, kind: str) -> LLM:
    return LLM(folder, speculative_config=None, threads=1, **KINDS[kind])


class Listener:
    """A model of one kind, the encoder's states rounded where it is the control."""

    def __init__(self, folder: Path, kind: str) -> None:
        decoder = "int8" if kind == "int8 decoder" else "float32"
        llm = opened(folder, kind if kind in KINDS else decoder)
        self._runner: Any = llm.runner
        if kind in ALONE:
            other: Any = opened(folder, "float32" if kind == "int8 decoder" else "int8")
            self._runner.encoder = other.runner.encoder
        self._mel, self._ids, self._tokenizer = LogMel.load(folder), WhisperTokens.load(folder), llm.tokenizer
        no_times = self._ids.first_timestamp - 1
        self._prompt = [*self._ids.prompt(language="en" if self._ids.multilingual else None), no_times]
        if kind == CONTROL:
            run = self._runner.encoder.run
            self._runner.encoder.run = lambda sources: [rounded(states) for states in run(sources)]

    def hear(self, recording: Recording) -> tuple[float, str]:
        """The loss of the text, and what is understood, in words."""
        runner = self._runner
        cache = runner.open(0, Inputs(features={"input_features": self._mel.window(recording.audio)}))
        runner.encode([cache])
        tokens = self._tokenizer.encode(f" {recording.text}", add_special_tokens=False)
        beside = runner.fork(cache)
        logits = runner.extend([beside], [[*self._prompt, *tokens]], all_logits=True).logits.float()
        runner.release(beside)
        chances = logits.log_softmax(-1)[len(self._prompt) - 1 : -1]
        loss = -float(chances.gather(1, torch.tensor(tokens)[:, None]).mean())
        found = self._decoded(cache, len(tokens) * 3 // 2 + SPARE)
        runner.release(cache)
        return loss, in_words(self._tokenizer.decode([token for token in found if token < self._ids.end]))

    def _decoded(self, cache: Any, most: int) -> list[int]:
        scores, found = self._runner.extend([cache], [self._prompt]), list[int]()
        while len(found) < most and (token := int(scores.logits[-1].argmax())) != self._ids.end:
            found.append(token)
            scores = self._runner.score([cache], [token], [EMPTY_TREE])
            self._runner.commit([cache], [[]])
        return found


def chance(differences: list[int]) -> float:
    """Of the absolute sum of some numbers, or a larger one, where each has either sign with equal chance."""
    sums = Counter({0: 1})
    for size in map(abs, differences):
        added: Counter[int] = Counter()
        for total, count in sums.items():
            added[total + size] += count
            added[total - size] += count
        sums = added
    reached = abs(sum(differences))
    return sum(count for total, count in sums.items() if abs(total) >= reached) / 2 ** len(differences)


def paired(wrong: list[int], exact: list[int]) -> dict[str, Any]:
    """Wrong words of each recording against those of float32."""
    differences = [one - other for one, other in zip(wrong, exact, strict=True)]
    more, fewer = (sum(sign * one > 0 for one in differences) for sign in (1, -1))
    return {"more": more, "fewer": fewer, "chance": chance(differences)}


def wrong_words(said: str, heard: str) -> int:
    words = jiwer.process_words(said, heard)
    return words.substitutions + words.deletions + words.insertions


def measured(listener: Listener, audios: list[Recording]) -> dict[str, Any]:
    """Kind of recording -> loss, errors, how many are right, and wrong words of each."""
    heard = [listener.hear(one) for one in audios]
    found: dict[str, Any] = {}
    for kind in dict.fromkeys(one.kind for one in audios):
        of_kind = [(in_words(one.text), *result) for one, result in zip(audios, heard, strict=True) if one.kind == kind]
        said, losses, words = map(list, zip(*of_kind, strict=True))
        wrong = [wrong_words(*pair) for pair in zip(said, words, strict=True)]
        found[kind] = {
            "recordings": len(said), "loss": sum(losses) / len(said), "errors": jiwer.wer(said, words),
            "right": sum(one == other for one, other in zip(said, words, strict=True)), "wrong": wrong,
        }  # fmt: skip
    return found


def with_pairs(by_kind: dict[str, Any]) -> dict[str, Any]:
    """The same, recordings compared with float32's in place of their wrong words."""
    exact = {kind: cell["wrong"] for kind, cell in by_kind["float32"].items()}
    for cells in by_kind.values():
        for kind, cell in cells.items():
            cell["paired"] = paired(cell.pop("wrong"), exact[kind])
    return by_kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of published data")
    parser.add_argument("--model", nargs="+", default=["whisper-base"], choices=("whisper-base", "whisper-tiny.en"))
    parser.add_argument("--digits", type=int, metavar="DRAWS", help="of each speaker; no sentences")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    audios, kinds = list(digits(given.data, given.digits or DRAWS)), (*KINDS, CONTROL)
    if given.digits:
        kinds = ("float32", "int8", *ALONE, CONTROL)
    else:
        audios += sentences()
    result: dict[str, Any] = {}
    for name in given.model:
        by_kind = {}
        for kind in kinds:
            by_kind[kind] = measured(Listener(model_folder(name), kind), audios)
            print(name, kind, by_kind[kind], flush=True)
        result[name] = with_pairs(by_kind)
        print(json.dumps(result[name], indent=1))
    save("speech_digits" if given.digits else "speech_errors", result, given.folder)


if __name__ == "__main__":
    main()
