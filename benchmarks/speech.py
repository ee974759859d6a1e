"""Speech to text beside CTranslate2, whisper.cpp and transformers, on one window of known text and on spoken digits.

usage: speech.py --data FOLDER [--ctranslate2 PYTHON] [--whispercpp PYTHON] [--model whisper-base] [--threads 1]
                 [--repeats 5] [--avx2]

MODEL is one of `real_models.py`. Each engine in turn, after a round that does not count, on a clip of espeak-ng
(about 25 s of a text that is known); medians of the repeats:

encode    seconds from features to what the decoder attends to
decode    seconds of the tokens, and tokens per second; greedy, with times; ours is the whole request of the engine
limit     tokens per second if a step only read its matrices, at the speed of reading an array of their size here
errors    word error rate, by jiwer, of the clip and of digits spoken by people (`whisper_check.py`, four draws of each
          speaker); of ours and of transformers in float32. A text that repeats itself is cut at twice the words that
          were spoken. The control: of the digits against those of the next recording
captions  the clip as it grows by a second at a time: each time all that is there is transcribed, the text so far is
          the draft; seconds of all, passes of the decoder and tokens a pass

Ours runs in float32, bfloat16, int8 (its matrices; all else in float32), and int8 with all else in bfloat16.
PYTHON is that of an environment with `ctranslate2`, which gets the file that the packages hold, float16, as float32
and int8, or with `pywhispercpp`, which gets files that are written here (`whispercpp_files.py`), of float16 and q8_0;
without it the engine is left out. Wheels of pywhispercpp are for AVX2; `pip install --no-binary pywhispercpp
pywhispercpp` compiles it for the processor at hand (on Zen 4 its encoder takes longer then). What it was compiled for
is kept. transformers' assisted decoding needs a draft model of the same vocabulary, and tiny.en has another: there is
none to compare with.

`--avx2` keeps ours, transformers and CTranslate2 to AVX2 alone, and leaves errors out, which do not depend on it.

Results: `results/speech.json`, of AVX2 `results/speech_avx2.json`. Needs espeak-ng and `pip install '.[bench,speech]'`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import jiwer
import numpy as np
import torch
from common import RESULTS, keep_to_avx2, reading_limit, save
from real_models import FOLDERS, model_folder, unpack
from speech_errors import KINDS, TEXT
from transformers import WhisperForConditionalGeneration
from whisper_check import in_words, recordings, spoken
from whispercpp_files import FILE_KINDS, write_whispercpp

from paceline import LLM
from paceline.checkpoints import Tokenizer
from paceline.models import Inputs
from paceline.speech import LogMel, WhisperTokens, load_audio
from paceline.transcriber import Transcriber, TranscriptionParams
from paceline.utils import user_cache

DRAWS = 4
ENGLISH = TranscriptionParams(language="en", temperature=[0.0])
Run = Callable[[Any], dict[str, Any]]
Ask = Callable[[Any, Path], dict[str, Any]]
"""What a process is asked about an audio; the folder is for its files."""


def clip() -> np.ndarray[Any, np.dtype[np.float32]]:
    """The text, spoken."""
    sound = subprocess.run(["espeak-ng", "--stdout", TEXT], capture_output=True, check=True).stdout
    return load_audio(sound)


@dataclass(frozen=True, slots=True)
class Ours:
    """A transcriber, what times one window, and bytes that a step of the decoder reads."""

    transcriber: Transcriber
    run: Run
    step_bytes: int


def ours(folder: Path, kind: str, threads: int) -> Ours:
    llm = LLM(folder, speculative_config=None, threads=threads, **KINDS[kind])
    transcriber, mel = Transcriber(llm), LogMel.load(folder)

    def run(audio: Any) -> dict[str, Any]:
        inputs = Inputs(features={"input_features": mel.window(audio)})
        runner: Any = llm.runner
        start = perf_counter()
        cache = runner.open(0, inputs)
        runner.encode([cache])
        encoded = perf_counter()
        before = transcriber.cost.tokens
        text = transcriber.transcribe([audio], ENGLISH)[0].text
        found = {"encode": encoded - start, "decode": perf_counter() - encoded, "text": text}
        runner.release(cache)
        return found | {"tokens": transcriber.cost.tokens - before}

    return Ours(transcriber, run, llm.runner.info.weight_bytes)


def by_transformers(folder: Path) -> Run:
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    mel, tokenizer = LogMel.load(folder), LLM(folder, speculative_config=None).tokenizer

    @torch.inference_mode()
    def run(audio: Any) -> dict[str, Any]:
        features = torch.from_numpy(mel.window(audio))[None]
        start = perf_counter()
        states = model.model.encoder(features)
        encoded = perf_counter()
        language = {"language": "en", "task": "transcribe"} if model.generation_config.is_multilingual else {}
        tokens = model.generate(encoder_outputs=states, return_timestamps=True, **language)[0].tolist()
        seconds = {"encode": encoded - start, "decode": perf_counter() - encoded}
        return seconds | {"text": tokenizer.decode(tokens), "tokens": len(tokens)}

    return run


@contextmanager
def in_process(command: list[str], ids: WhisperTokens, tokenizer: Tokenizer, ask: Ask) -> Iterator[Run]:
    """An engine in a process of its own, which answers lines of JSON; its first line tells its version."""
    with tempfile.TemporaryDirectory() as work:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        about = json.loads(stdout.readline())

        def run(audio: Any) -> dict[str, Any]:
            stdin.write(json.dumps(ask(audio, Path(work))) + "\n")
            stdin.flush()
            found = json.loads(stdout.readline())
            text = tokenizer.decode([token for token in found["tokens"] if token < ids.end])
            return found | {"text": text, "tokens": len(found["tokens"]), "about": about}

        try:
            yield run
        finally:
            stdin.close()
            process.wait()


@contextmanager
def by_ctranslate2(python: str, name: str, kind: str, threads: int) -> Iterator[Run]:
    """CTranslate2, which takes our features."""
    folder, ids = model_folder(name), WhisperTokens.load(model_folder(name))
    mel, tokenizer = LogMel.load(folder), Tokenizer.load(folder)

    def ask(audio: Any, work: Path) -> dict[str, Any]:
        np.save(work / "features.npy", mel.window(audio))
        prompt = ids.prompt(language="en" if ids.multilingual else None)
        return {"features": f"{work}/features.npy", "prompt": prompt}

    peer = Path(__file__).with_name("ctranslate2_peer.py")
    with in_process([python, str(peer), str(original(name)), kind, str(threads)], ids, tokenizer, ask) as run:
        yield run


@contextmanager
def by_whispercpp(python: str, name: str, kind: str, threads: int) -> Iterator[Run]:
    """whisper.cpp, which takes samples."""
    folder, ids = model_folder(name), WhisperTokens.load(model_folder(name))

    def ask(audio: Any, work: Path) -> dict[str, Any]:
        np.save(work / "samples.npy", audio)
        return {"samples": f"{work}/samples.npy", "language": "en"}

    peer = Path(__file__).with_name("whispercpp_peer.py")
    with tempfile.TemporaryDirectory() as work:
        file = Path(work) / f"{kind}.bin"
        write_whispercpp(folder, file, kind)
        with in_process([python, str(peer), str(file), str(threads)], ids, Tokenizer.load(folder), ask) as run:
            yield run


def original(name: str) -> Path:
    """The folder of the packages' own files, with the list of words that CTranslate2 wants."""
    folder = user_cache("models") / f"{name}-ctranslate2"
    if not (folder / "vocabulary.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        unpack(FOLDERS[name], folder, name)
        read = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        words = {number: word for word, number in read["model"]["vocab"].items()}
        words |= {token["id"]: token["content"] for token in read["added_tokens"]}
        size = json.loads((model_folder(name) / "config.json").read_text())["vocab_size"]
        listed = [words.get(number, f"<|{number}|>") for number in range(size)]
        (folder / "vocabulary.json").write_text(json.dumps(listed), encoding="utf-8")
    return folder


def captions(transcriber: Transcriber, audio: Any) -> dict[str, Any]:
    """The clip as it grows by a second at a time."""
    before, draft, start = transcriber.cost, (), perf_counter()
    for end in range(16_000, len(audio) + 16_000, 16_000):
        heard = transcriber.hear(audio[:end], ENGLISH, draft)
        draft = heard.segments
    seconds, cost = perf_counter() - start, transcriber.cost
    tokens, passes = cost.tokens - before.tokens, cost.passes - before.passes
    same = heard.text == transcriber.transcribe([audio], ENGLISH)[0].text
    if not same:
        sys.exit("captions give another text than the same audio at once; no figure is kept")
    return {"seconds": seconds, "tokens": tokens, "passes": passes, "tokens_per_pass": tokens / passes}


def errors(run: Run, data: list[tuple[str, Any]], audio: Any) -> dict[str, float]:
    said, heard = [words for words, _ in data], []
    for words, sound in data:
        heard.append(" ".join(in_words(run(sound)["text"]).split()[: 2 * len(words.split())]))
    return {
        "digits": jiwer.wer(said, heard),
        "clip": jiwer.wer(in_words(TEXT), in_words(run(audio)["text"])),
        "control": jiwer.wer([*said[1:], said[0]], heard),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    encode, decode = (median(run[name] for run in runs) for name in ("encode", "decode"))
    tokens = runs[0]["tokens"]
    return {
        "encode": encode, "decode": decode, "tokens": tokens, "tokens_per_second": tokens / decode,
        "text": runs[0]["text"], "clip_error": jiwer.wer(in_words(TEXT), in_words(runs[0]["text"])),
        **runs[0].get("about", {}),
    }  # fmt: skip


def alternated(runs: Mapping[str, Run], audio: Any, repeats: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            one = run(audio)
            if turn:
                found[name].append(one)
    return {name: summary(many) for name, many in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of published data")
    parser.add_argument("--ctranslate2", metavar="PYTHON")
    parser.add_argument("--whispercpp", metavar="PYTHON")
    parser.add_argument("--model", default="whisper-base", choices=("whisper-base", "whisper-tiny.en"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.avx2:
        os.environ["CT2_FORCE_CPU_ISA"] = "AVX2"  # of CTranslate2
        keep_to_avx2()
    torch.set_num_threads(given.threads)
    folder, audio, data = model_folder(given.model), clip(), spoken(recordings(given.data), DRAWS)
    made = {kind: ours(folder, kind, given.threads) for kind in KINDS}
    runs = {f"ours {kind}": one.run for kind, one in made.items()} | {"transformers float32": by_transformers(folder)}
    result: dict[str, Any] = {"model": given.model, "threads": given.threads, "seconds_of_audio": len(audio) / 16_000}
    with ExitStack() as stack:
        for kind in ("float32", "int8") if given.ctranslate2 else ():
            peer = by_ctranslate2(given.ctranslate2, given.model, kind, given.threads)
            runs[f"CTranslate2 {kind}"] = stack.enter_context(peer)
        for kind in FILE_KINDS if given.whispercpp else ():
            peer = by_whispercpp(given.whispercpp, given.model, kind, given.threads)
            runs[f"whisper.cpp {kind}"] = stack.enter_context(peer)
        result["engines"] = alternated(runs, audio, given.repeats)
    for kind, one in made.items():
        size = one.step_bytes
        result["engines"][f"ours {kind}"] |= {
            "limit": reading_limit(size, given.threads) / size,
            "captions": captions(one.transcriber, audio),
        }
    for name, run in ({} if given.avx2 else runs).items():
        if name.startswith(("ours", "transformers")):
            result["engines"][name]["errors"] = errors(run, data, audio)
    for name, one in result["engines"].items():
        print(name, json.dumps({key: value for key, value in one.items() if key != "text"}))
    save("speech_avx2" if given.avx2 else "speech", result, given.folder)


if __name__ == "__main__":
    main()
