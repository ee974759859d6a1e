"""What a draft on Whisper's own encoder brings beside tables, a prediction, and plain decoding.

usage: encdec_drafts.py --data FOLDER --draft FOLDER [FOLDER...] [--model whisper-base] [--count 8] [--repeats 1]
                        [--threads 1]

The first draft is what `paceline train encdec_draft` has made for MODEL, one of `real_models.py`, from the clips that
`speech_clips.py` writes. Measured on its held-out clips, COUNT of each kind, whose texts, voices and speakers were not
learned. Clips on which the model repeats itself, by Whisper's own measure of it, are left out and counted (`repeated`):
every draft is right there. Each is encoded once; what is timed is the decoder, greedily, with times, one at a time:

plain          no drafts
ngram          copies from the text so far
prediction     drafts what whisper-tiny.en has heard; the seconds that it took to hear it are told apart (`heard`)
encdec_draft   chains of 1, 3 and 5; the same with its matrices rounded (int8), and as many as pay (controller auto)
auto           tables and the rounded encdec_draft together under controller auto
encdec_draft of layers N...
               further drafts, of other layers: in int8, chains and as many as pay; trained for as many steps, they tell
               what a layer is worth

Tokens of whisper-tiny.en are not those of a multilingual model, so that it cannot be a `draft_model`: what is said to
who tries is kept (`draft_model`). Ways that write other texts than plain decoding end the script, and nothing is kept.

Results: `results/encdec_drafts.json`. Needs espeak-ng and `pip install '.[bench,speech]'`.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from common import RESULTS, save
from real_models import model_folder
from speech_clips import Clip, held_out

from paceline import LLM, PacelineError, SamplingParams
from paceline.engine import ReadPrompt
from paceline.models import Inputs
from paceline.speech import LogMel, Thresholds, WhisperRule, WhisperTokens
from paceline.utils import in_turn, speedup, tokens_per_second

LENGTHS = (1, 3, 5)
SMALL = "whisper-tiny.en"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a clip is for the target: its features, and what the small model expects of it, in so many seconds."""

    inputs: Inputs
    expected: list[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class Written:
    """What came of a clip."""

    tokens: tuple[int, ...]
    passes: int
    drafted: int
    accepted: int


class Decoder:
    """Writes clips down by a way of drafting."""

    def __init__(self, llm: LLM, *, predicts: bool = False) -> None:
        self._llm, self._predicts = llm, predicts
        self._tokens = WhisperTokens.load(llm.folder)
        self._params = SamplingParams(temperature=0.0, max_tokens=self._tokens.max_sampled, detokenize=False)

    def __call__(self, heard: Heard, repeat: int = 0) -> Written:
        del repeat
        prompt = self._tokens.prompt(language="en")
        expected = heard.expected if self._predicts else []
        read = ReadPrompt(None, prompt, expected, inputs=heard.inputs, rule=WhisperRule(self._tokens))
        request, backend = self._llm.request(read, self._params)
        backend.run([request])
        output = request.result()
        output.raise_for_error()
        if output.metrics.dropped_drafters:
            sys.exit(f"a drafter was dropped: {output.metrics.dropped_drafters}; no figure is kept")
        metrics = output.metrics
        return Written(
            tuple(output.outputs[0].token_ids), metrics.num_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens
        )


def ways(draft: Path, *others: Path) -> dict[str, Any]:
    """speculative_config by name, of a draft and of others of other layers."""
    own: dict[str, Any] = {"method": "encdec_draft", "model": str(draft)}
    small = {**own, "quantization": "int8"}
    chains = {
        f"encdec_draft {words}{n}": {**one, "controller": "fixed", "num_speculative_tokens": n}
        for words, one in (("", own), ("int8 ", small))
        for n in LENGTHS
    }
    beside = {}
    for other in others:
        config = {"method": "encdec_draft", "model": str(other), "quantization": "int8"}
        name = f"encdec_draft of layers {layers_of(other)}, int8"
        beside |= {f"{name} {n}": {**config, "controller": "fixed", "num_speculative_tokens": n} for n in LENGTHS}
        beside[f"{name} auto"] = {**config, "controller": "auto"}
    return {
        "plain": None,
        "ngram": {"method": "ngram"},
        "prediction": {"method": "prediction"},
        **chains,
        "encdec_draft int8 auto": {**small, "controller": "auto"},
        "auto": {"method": ["prediction", "ngram", small], "controller": "auto"},
        **beside,
    }


def listener(folder: Path, threads: int) -> Callable[[Clip], tuple[str, float]]:
    """The text that the small model hears in a clip, and the seconds that it took."""
    small = LLM(folder, dtype="float32", threads=threads, speculative_config=None)

    def hear(clip: Clip) -> tuple[str, float]:
        start = perf_counter()
        text = small.transcribe(clip.samples).text
        return text, perf_counter() - start

    return hear


def heard_by(target: LLM, small: Callable[[Clip], tuple[str, float]], clip: Clip) -> Heard:
    """A clip's features, and what the small model expects, between the times of its beginning and its end."""
    mel, tokens = LogMel.load(target.folder), WhisperTokens.load(target.folder)
    text, seconds = small(clip)
    ids = target.tokenizer.encode(f" {text.strip()}", add_special_tokens=False)
    features = {"input_features": mel.window(clip.samples)}
    return Heard(Inputs(features=features), [tokens.first_timestamp, *ids], seconds)


def repeats(target: LLM, written: Written) -> bool:
    """Whether Whisper's code would decode a text anew, since the model repeats itself in it."""
    text = target.tokenizer.decode(written.tokens).encode()
    limit = Thresholds().compression_ratio
    return limit is not None and len(text) / len(zlib.compress(text)) > limit


def refusal(target: LLM) -> str:
    """What is said to who takes the small model for a draft model."""
    try:
        target.with_speculative_config({"method": "draft_model", "model": str(model_folder(SMALL))})
    except PacelineError as error:
        return str(error).replace(str(Path.home()), "~")
    return ""


def measured(target: LLM, decoders: Mapping[str, Decoder], clips: Sequence[Heard], repeats: int) -> dict[str, Any]:
    """Figures of every way on clips, which the encoder reads before any of them.

    Raises:
        SystemExit: a way that writes another text.
    """
    runner: Any = target.runner
    held = [runner.open(0, clip.inputs) for clip in clips]
    runner.encode(held)
    turns = list(in_turn(decoders, clips, repeats))
    for cache in held:
        runner.release(cache)
    for turn in turns:
        for name, written in turn.outputs.items():
            if written.tokens != turn.outputs["plain"].tokens:
                sys.exit(f"{name} writes another text than plain decoding; no figure is kept")
    seconds, tokens = _columns(turns, decoders, len(clips), repeats)
    written = [turn.outputs["plain"].tokens for turn in turns[: len(clips)]]
    figures: dict[str, Any] = {"clips": len(clips), "tokens": sum(map(len, written))}
    for name in decoders:
        outputs = [turn.outputs[name] for turn in turns]
        passes = sum(output.passes for output in outputs)
        drafted, accepted = (sum(getattr(output, key) for output in outputs) for key in ("drafted", "accepted"))
        rate, over = tokens_per_second(tokens, seconds[name]), speedup(tokens, seconds["plain"], tokens, seconds[name])
        figures[name] = {
            "tokens_per_pass": sum(len(output.tokens) for output in outputs) / passes,
            "drafted": drafted, "accepted": accepted,
            "tokens_per_second": rate and rate.to_dict(), "over_plain": over and over.to_dict(),
        }  # fmt: skip
    return figures


def layers_of(draft: Path) -> str:
    """Of which layers it was made."""
    config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
    return ",".join(map(str, config["paceline_encdec_draft"]["layers"]))


def trained(draft: Path) -> dict[str, Any]:
    """What its report says."""
    report = json.loads((draft / "report.json").read_text(encoding="utf-8"))
    return {key: report[key] for key in ("tokens_per_pass", "acceptance", "texts", "steps", "minutes")}


def _columns(turns: Sequence[Any], names: Mapping[str, Any], clips: int, repeats: int) -> tuple[dict[str, Any], Any]:
    """Seconds by name, and tokens, each (clips, repeats)."""
    seconds = {name: np.zeros((clips, repeats)) for name in names}
    tokens = np.zeros((clips, repeats))
    for turn in turns:
        tokens[turn.item, turn.repeat] = len(turn.outputs["plain"].tokens)
        for name in names:
            seconds[name][turn.item, turn.repeat] = turn.seconds[name]
    return seconds, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of published data")
    parser.add_argument("--draft", type=Path, nargs="+", required=True, help="folders of what was trained")
    parser.add_argument("--model", default="whisper-base")
    parser.add_argument("--count", type=int, default=8, help="clips of each kind")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    target = LLM(model_folder(given.model), dtype=given.dtype, threads=given.threads, speculative_config=None)
    decoders = {
        name: Decoder(target.with_speculative_config(config), predicts=name in ("prediction", "auto"))
        for name, config in ways(*given.draft).items()
    }
    small = listener(model_folder(SMALL), given.threads)
    result: dict[str, Any] = {
        "model": given.model, "dtype": given.dtype, "threads": given.threads, "repeats": given.repeats,
        "trained": trained(given.draft[0]),
        "trained_beside": {layers_of(one): trained(one) for one in given.draft[1:]},
        "draft_model": refusal(target),
    }  # fmt: skip
    for kind, clips in held_out(given.data, given.count).items():
        heard = [heard_by(target, small, clip) for clip in clips]
        whole = [one for one in heard if not repeats(target, decoders["plain"](one))]
        if not whole:
            sys.exit(f"the model repeats itself on all clips of {kind}; raise --count")
        for decoder in decoders.values():
            decoder(whole[0])
        result[kind] = measured(target, decoders, whole, given.repeats)
        result[kind]["repeated"] = len(heard) - len(whole)
        result[kind]["heard"] = sum(one.seconds for one in whole)
        for name in decoders:
            print(kind, name, json.dumps(result[kind][name]))
    save("encdec_drafts", result, given.folder)


if __name__ == "__main__":
    main()
