"""A target and its draft model on published prompts: plain, `auto` with the draft, with its head cut by counts, and
without a draft; beside llama.cpp, plain and with the same draft at its best length.

usage: draft_pair.py --target FILE --draft FILE --data FOLDER [--sets humaneval,gsm8k,spec-bench,mt-redundant]
                     [--prompts 8] [--tokens 96] [--repeats 1] [--warm-up 2] [--threads 2] [--counts FILE]
                     [--fixed 3,7] [--llama DIR] [--lengths 2,3,4,6,8] [--avx2] [--name draft_pair]

FOLDER holds the sets as `methods.py` names them. Prompts go through the chat template, one by one, at temperature 0; a
second turn follows plain decoding's first answer. All settings decode a prompt before the next one comes, in an order
drawn anew. Tokens must be those of plain decoding, every one of them; otherwise nothing is reported. `--warm-up`
prompts of each set are decoded by every setting before anything is timed: kernels are compiled, prices known.

`--counts` is a file of `paceline count-tokens`; without one the target writes texts first, from prompts of sets that
are not timed (mbpp, gsm8k's training part, self-instruct). `--fixed` adds fixed lengths of the draft with its cut head,
to judge `auto` by. `--llama` is the folder of a `llama-server`, which is asked for the same token ids; `--lengths` are
tried on the warm-up prompts, the fastest is timed. Its tokens are compared with its own plain ones (counted): another
engine rounds differently.

`--avx2` starts again where PyTorch, oneDNN and numba see a processor with AVX2 alone; llama.cpp must be built so
(GGML_NATIVE=OFF, GGML_AVX2=ON, GGML_FMA=ON, GGML_F16C=ON, GGML_BMI2=ON, GGML_AVX512=OFF).

Figures are total times, prompts included, by the wall and by the CPU, and times behind the prompt ("decoding", in which
a draft reads it); ratios paired by prompt, with 95 % bootstrap intervals. Results: `results/NAME.json`, by processor,
after every set.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from socket import socket
from tempfile import TemporaryFile
from time import perf_counter, process_time, sleep
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import psutil
from common import AVX2, estimated, kept, save
from methods import FILES, Piece

from paceline import LLM, SamplingParams
from paceline.drafters.vocab import TokenCounts
from paceline.utils import in_turn, read_prompts

PLAIN, LLAMA, LLAMA_DRAFT = "plain", "llama.cpp plain", "llama.cpp with the draft"
CONTEXT = 4096
COUNTED = {
    "mbpp": ("mbpp/mbpp.jsonl", lambda row: row["text"]),
    "gsm8k": ("gsm8k/train.jsonl.gz", lambda row: row["question"]),
    "self-instruct": ("self-instruct/seed_tasks.jsonl", lambda row: row["instruction"]),
}
"""Prompts that counts are made with, none of which is timed."""

RUNS = count()


@dataclass(frozen=True, slots=True)
class Answer:
    """What a setting made of a piece: tokens, passes of the target, tokens drafted and accepted; CPU seconds, and those
    behind the prompt by the wall.
    """

    tokens: list[int]
    passes: int
    drafted: int
    accepted: int
    cpu: float
    decoding: float


Run = Callable[[Piece, int], Answer]


def params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


def ours(llm: LLM, tokens: int) -> Run:
    """Decodes with one setting; under a name of its own each time, so that no table remembers an earlier answer."""

    def run(piece: Piece, repeat: int) -> Answer:
        prompt: Any = {"prompt_token_ids": piece.ids, "cache_salt": f"run {next(RUNS)}"}
        start = process_time()
        (found,) = llm.generate(prompt, params(tokens))
        cpu = process_time() - start
        found.raise_for_error()
        metrics = found.metrics
        return Answer(
            found.outputs[0].token_ids, metrics.num_steps, metrics.num_draft_tokens, metrics.num_accepted_tokens, cpu,
            metrics.generation_time,
        )  # fmt: skip

    return run


def pieces_of(plain: LLM, data: Path, name: str, conversations: int, tokens: int) -> list[Piece]:
    """The requests of a set, second turns with plain decoding's first answer before them."""
    if not (files := sorted(data.glob(FILES[name]))):
        sys.exit(f"{data} holds no {FILES[name]}; give --data a folder that does, or other --sets")
    made = []
    for one in read_prompts(files[0]).limited(conversations).conversations:
        messages = list(one.history)
        for turn in one.turns:
            messages.append({"role": "user", "content": turn})
            ids = plain.chat_ids(messages)
            output = plain.generate({"prompt_token_ids": ids}, params(tokens))[0].outputs[0]
            messages.append({"role": "assistant", "content": output.text})
            made.append(Piece(name, one.id, ids, output.token_ids))
            progress(f"{name} {one.id}: {len(ids)} tokens of prompt, {len(output.token_ids)} of plain decoding")
    return made


def progress(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)


def counts_of(given: argparse.Namespace) -> Path:
    """The file of counts, made if none was given, by the command that users have."""
    if given.counts is not None:
        return Path(given.counts)
    prompts, output = given.folder / f"{given.name}.prompts.jsonl", given.folder / f"{given.name}.counts.json"
    lines = []
    for file, text in COUNTED.values():
        path = given.data / file
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
            rows = [json.loads(line) for line in stream]
        step = max(1, len(rows) // given.count_prompts)
        lines += [json.dumps({"prompt": text(row)}) for row in rows[::step][: given.count_prompts]]
    prompts.write_text("\n".join(lines) + "\n")
    words = [
        "-m",
        "paceline",
        "count-tokens",
        "--model",
        given.target,
        "--prompts",
        prompts,
        "--chat",
        "--output",
        output,
    ]
    words += ["--max-tokens", given.count_tokens, "--temperature", 0, "--threads", given.threads, "-s", "null"]
    progress(f"counting tokens: python {' '.join(map(str, words))}")
    subprocess.run([sys.executable, *map(str, words)], check=True, stdout=sys.stderr)
    prompts.unlink()
    return output


# llama.cpp


@dataclass(frozen=True, slots=True)
class Server:
    """A running llama-server."""

    process: psutil.Process
    port: int

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"http://127.0.0.1:{self.port}{path}", data, {"Content-Type": "application/json"})
        with urlopen(request, timeout=600) as answer:
            return json.loads(answer.read())

    def cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def run(self, tokens: int) -> Run:
        """Decodes as `ours` does."""

        def run(piece: Piece, repeat: int) -> Answer:
            body = {"prompt": piece.ids, "n_predict": tokens, "temperature": 0, "top_k": 1, "samplers": ["top_k"]}
            start = self.cpu()
            found = self.ask("/completion", {**body, "cache_prompt": False, "return_tokens": True})
            times, ids = found["timings"], found["tokens"]
            drafted, accepted = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
            cpu = self.cpu() - start
            return Answer(ids, len(ids) - accepted, drafted, accepted, cpu, 1e-3 * times["predicted_ms"])

        return run


def free_port() -> int:
    with socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@contextmanager
def llama(given: argparse.Namespace, length: int | None) -> Iterator[Server]:
    """A server of the target, with the draft at some length or without it; ended behind the block."""
    port = free_port()
    words = [given.llama / "llama-server", "-m", given.target, "--port", port, "-np", 1, "-c", CONTEXT, "-ngl", 0]
    words += ["-t", given.threads, "-tb", given.threads, "--no-webui"]
    if length is not None:
        words += ["-md", given.draft, "--spec-type", "draft-simple", "--spec-draft-n-max", length, "-ngld", 0]
        words += ["-td", given.threads, "-tbd", given.threads]
    log = TemporaryFile("w+")  # noqa: SIM115 - closed below
    process = subprocess.Popen([str(word) for word in words], stdout=log, stderr=log)
    server = Server(psutil.Process(process.pid), port)
    try:
        end = perf_counter() + 300
        while process.poll() is None and perf_counter() < end:
            try:
                server.ask("/health")
                break
            except OSError:
                sleep(0.2)
        else:
            log.seek(0)
            sys.exit(f"llama-server did not start: {' '.join(map(str, words))}\n{log.read()[-1000:]}")
        yield server
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def best_length(given: argparse.Namespace, pieces: Sequence[Piece]) -> tuple[int, dict[int, float]]:
    """The length with which llama.cpp is fastest, and seconds of all of them, on these pieces."""
    seconds = {}
    for length in map(int, given.lengths.split(",")):
        with llama(given, length) as server:
            run = server.run(given.tokens)
            run(pieces[0], 0)
            start = perf_counter()
            drafted = sum(run(piece, 0).drafted for piece in pieces)
            seconds[length] = perf_counter() - start
        if not drafted:
            sys.exit("llama-server drafted nothing with the draft model; check that it knows --spec-type draft-simple")
        progress(f"llama.cpp, {length} drafted tokens: {seconds[length]:.1f} s")
    return min(seconds, key=lambda one: seconds[one]), seconds


# Figures


def measure(
    runs: Mapping[str, Run], pieces: Sequence[Piece], repeats: int
) -> dict[str, list[list[tuple[float, Answer]]]]:
    """Setting -> piece -> repeat: wall seconds, and what was made.

    Raises:
        SystemExit: tokens of a setting of ours that are not those of plain decoding.
    """
    found: dict[str, list[list[tuple[float, Answer]]]] = {name: [[] for _ in pieces] for name in runs}
    for turn in in_turn(runs, pieces, repeats):
        piece = pieces[turn.item]
        for name, answer in turn.outputs.items():
            if not name.startswith("llama.cpp") and answer.tokens != piece.answer:
                at = next(
                    (i for i, (a, b) in enumerate(zip(answer.tokens, piece.answer, strict=False)) if a != b),
                    min(len(answer.tokens), len(piece.answer)),
                )
                sys.exit(
                    f"{name!r} differs from plain decoding at token {at} of {piece.set} {piece.conversation}, nothing "
                    f"is reported: {answer.tokens[at : at + 4]} instead of {piece.answer[at : at + 4]}"
                )
            found[name][turn.item].append((turn.seconds[name], answer))
        rates = ", ".join(f"{name} {len(one.tokens) / turn.seconds[name]:.1f}" for name, one in turn.outputs.items())
        progress(f"{piece.set} {piece.conversation}, {turn.item + 1}/{len(pieces)}: {rates} tokens/s")
    return found


def summary(found: Mapping[str, list[list[tuple[float, Answer]]]]) -> dict[str, Any]:
    """Setting -> tokens/s by the wall and by the CPU, over plain decoding, over llama.cpp's plain, tokens a pass."""

    def per_token(name: str, clock: Callable[[tuple[float, Answer]], float]) -> np.ndarray[Any, Any]:
        return np.array([min(clock(one) for one in rows) / len(rows[0][1].tokens) for rows in found[name]])

    def over(base: str, name: str, clock: Callable[[tuple[float, Answer]], float]) -> dict[str, float]:
        tokens = np.array([len(rows[0][1].tokens) for rows in found[PLAIN]])
        slow, fast = per_token(base, clock) * tokens, per_token(name, clock) * tokens
        return estimated([slow[:, None], fast[:, None]], lambda s, f: s.sum((-2, -1)) / f.sum((-2, -1)))

    clocks: dict[str, Callable[[tuple[float, Answer]], float]] = {
        "wall": lambda one: one[0],
        "CPU": lambda one: one[1].cpu,
        "decoding": lambda one: one[1].decoding,
    }
    result: dict[str, Any] = {}
    for name, rows in found.items():
        every = [answer for pieces in rows for _, answer in pieces]
        made, row = sum(len(one.tokens) for one in every), dict[str, Any]()
        for clock, read in clocks.items():
            row[f"tokens per second ({clock})"] = made / sum(read(one) for pieces in rows for one in pieces)
            row[f"over {PLAIN} ({clock})"] = over(PLAIN, name, read)
            if LLAMA in found:
                row[f"over {LLAMA} ({clock})"] = over(LLAMA, name, read)
        row["tokens per pass"] = made / sum(one.passes for one in every)
        row["accepted"] = sum(one.accepted for one in every) / max(1, sum(one.drafted for one in every))
        base = LLAMA if name == LLAMA_DRAFT else PLAIN
        same = [
            a.tokens == b.tokens
            for x, y in zip(rows, found[base], strict=True)
            for (_, a), (_, b) in zip(x, y, strict=True)
        ]
        row[f"identical to {base}"] = sum(same) / len(same)
        result[name] = row
    return result


def show(title: str, table: Mapping[str, Any]) -> None:
    print(title)
    for name, row in table.items():
        gain, cpu, decoding = (row[f"over {PLAIN} ({clock})"] for clock in ("wall", "CPU", "decoding"))
        print(
            f"  {name:32s} {row['tokens per second (wall)']:6.1f} tokens/s, {gain['value']:.2f} of plain "
            f"({gain['low']:.2f} to {gain['high']:.2f}; CPU {cpu['value']:.2f}, decoding {decoding['value']:.2f}), "
            f"{row['tokens per pass']:.2f} tokens a pass, {row['accepted']:.2f} of the drafted accepted",
            flush=True,
        )


def settings_of(given: argparse.Namespace, counts: Path) -> dict[str, Any]:
    draft, cut = str(given.draft), {"model": str(given.draft), "draft_vocab_file": str(counts)}
    fixed = {
        f"draft {n}, cut head": {"method": "draft_model", **cut, "num_speculative_tokens": int(n)}
        for n in given.fixed.split(",")
        if n
    }
    return {
        PLAIN: None,
        "auto with the draft": {"method": "auto", "model": draft, "draft_vocab_size": "all"},
        "auto with the draft, cut head": {"method": "auto", **cut},
        "auto without a draft": {"method": "auto"},
        **fixed,
    }


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sets", default="humaneval,gsm8k,spec-bench,mt-redundant")
    parser.add_argument("--prompts", type=int, default=8, help="conversations of a set (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--count-prompts", type=int, default=32, help="of each set that is counted (%(default)s)")
    parser.add_argument("--count-tokens", type=int, default=192, help="of each text that is counted (%(default)s)")
    parser.add_argument("--fixed", default="", help="lengths of the draft with its cut head, as 3,7")
    parser.add_argument("--llama", type=Path, help="folder of llama-server")
    parser.add_argument("--lengths", default="2,3,4,6,8", help="that llama.cpp's draft tries (%(default)s)")
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--name", default="draft_pair")
    return parser.parse_args()


def without_folders(text: str) -> str:
    """A text with the names of files in place of their paths."""
    return re.sub(r"(?:/[^/\s,]+)+/", "", text)


def as_avx2() -> None:
    """Start again under the switch, unless this process runs under it."""
    if any(os.environ.get(key) != value for key, value in AVX2.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | AVX2)
    from paceline.models.cpu import features

    if features().get("avx512f"):
        sys.exit("the switch to AVX2 did not take hold")


def main() -> None:
    given = parsed()
    if given.avx2:
        as_avx2()
    given.folder.mkdir(exist_ok=True)
    counts = counts_of(given)
    part = "AVX2 alone" if given.avx2 else "all instructions"
    settings = settings_of(given, counts)
    plain = LLM(given.target, speculative_config=None, threads=given.threads, enable_prefix_caching=False)
    llms = {
        name: plain if config is None else plain.with_speculative_config(config) for name, config in settings.items()
    }
    runs = {name: ours(llm, given.tokens) for name, llm in llms.items()}
    head = next(one.note for one in llms["auto with the draft, cut head"].engine.parts.drafter_set.drafters if one.note)
    progress(head)
    made = TokenCounts.load(counts)
    result = kept(given.name, given.folder)
    tables: dict[str, Any] = {}
    result[part] = {
        "target": given.target.name, "draft": given.draft.name, "head": without_folders(head),
        "counted": {"texts": made.texts, "tokens": made.tokens, "origin": without_folders(made.origin)},
        "tokens": given.tokens, "repeats": given.repeats, "sets": tables,
    }  # fmt: skip
    with ExitStack() as stack:
        for name in given.sets.split(","):
            pieces = pieces_of(plain, given.data, name, given.prompts, given.tokens)
            warm = pieces[: given.warm_up]
            if given.llama is not None and LLAMA not in runs:
                runs[LLAMA] = stack.enter_context(llama(given, None)).run(given.tokens)
                length, tried = best_length(given, warm or pieces[:1])
                runs[LLAMA_DRAFT] = stack.enter_context(llama(given, length)).run(given.tokens)
                result[part]["llama.cpp's draft"] = {"length": length, "seconds by length": tried}
            for setting, run in runs.items():
                for piece in warm:
                    run(piece, 0)
                progress(f"{setting} is warm")
            tables[name] = summary(measure(runs, pieces, given.repeats))
            show(f"{name}, {len(pieces)} requests", tables[name])
            save(given.name, result, given.folder, parts=[part])


if __name__ == "__main__":
    main()
