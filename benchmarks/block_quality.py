"""What compiled passes over a GGUF file's blocks lose against the same file in float32, beside llama.cpp's loss.

usage: block_quality.py [FILE...] --data FOLDER [--tokens 4000] [--threads 2] [--avx2] [--folder FOLDER]

Texts are WikiText-2's validation part and HumanEval's solutions (--data), in windows of 500 tokens, every token given.
For each file: divergence of our distribution, and of llama.cpp's, from that of the file's own values in float32
(`quantization="none"`): mean and 99 % in nats, and how often the likeliest token is the same. Ours in the file's dtype,
in which logits are rounded too, with everything but the blocks in float32, and so with activations of two bytes;
llama.cpp with its own settings (keys
and values in half precision, all else in float32). As a control, a copy of the file in which one matrix's scales are
twice as large must diverge far more.

FILE is a name of `real_models.py` (default: smollm2 and qwen05) or a path. Results: `results/block_quality.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, keep_to_avx2, kept, save
from real_models import FILES, LlamaCpp, gguf_file, llama_cpp

from paceline.checkpoints import GgufCheckpoint, Tokenizer
from paceline.models import load_runner

PROGRAM = Path(__file__).parent / "llama_logits.cpp"
WINDOW = 500
SCALES = {"Q4_0": (18, (0,)), "Q4_1": (20, (0, 2)), "Q5_0": (22, (0,)), "Q5_1": (24, (0, 2)), "Q8_0": (34, (0,)),
          "Q4_K": (144, (0, 2)), "Q5_K": (176, (0, 2)), "Q6_K": (210, (208,))}  # fmt: skip
"""Of each type the bytes of a block, and where its float16 scales lie."""


def windows(tokenizer: Tokenizer, data: Path, tokens: int) -> list[list[int]]:
    """Half of them of each text."""
    prose = gzip.decompress((data / "wikitext-2" / "valid.txt.gz").read_bytes()).decode()
    lines = (data / "humaneval" / "HumanEval.even.jsonl").read_text(encoding="utf-8").splitlines()
    code = "\n\n".join(row["prompt"] + row["canonical_solution"] for row in map(json.loads, lines))
    count, found = tokens // WINDOW // 2, []
    for text in (prose[: 12 * tokens], code):
        ids = tokenizer.encode(text, add_special_tokens=False)
        found += [ids[WINDOW * i : WINDOW * (i + 1)] for i in range(count)]
    return found


def logprobs(runner: Any, given: Sequence[Sequence[int]]) -> Iterator[torch.Tensor]:
    for window in given:
        cache = runner.open(len(window))
        yield runner.extend([cache], [window], all_logits=True).logits.float().log_softmax(-1)
        runner.release(cache)


def llama_logprobs(
    llama: LlamaCpp, file: Path, given: Sequence[Sequence[int]], vocab: int, threads: int
) -> Iterator[torch.Tensor]:
    """Of llama.cpp, window by window, all of one length.

    Raises:
        SystemExit: its program fails, or has another vocabulary.
    """
    program, window = llama.compiled(PROGRAM), len(given[0])
    with tempfile.NamedTemporaryFile() as tokens:
        tokens.write(np.array(given, np.int32).tobytes())
        tokens.flush()
        command = [str(program), str(file), tokens.name, str(window), str(threads)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in given:
                raw = bytearray(process.stdout.read(window * vocab * 4))
                if len(raw) != window * vocab * 4:
                    sys.exit(f"{program.name} ended early on {file.name}; its lines above say why")
                yield torch.frombuffer(raw, dtype=torch.float32).view(window, vocab).log_softmax(-1)
            if process.stdout.read(1):
                sys.exit(f"{file.name} has more than {vocab} tokens in llama.cpp; its rows cannot be compared")


def compared(exact: Sequence[torch.Tensor], other: Iterator[torch.Tensor]) -> dict[str, float]:
    divergences, same = [], []
    for p, q in zip(exact, other, strict=True):
        divergences.append((p.exp() * (p - q)).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).float())
    values = torch.cat(divergences).double()
    return {"mean": float(values.mean()), "99 %": float(values.quantile(0.99)), "same": float(torch.cat(same).mean())}


def damaged(file: Path, to: Path) -> Path:
    """A copy in which the scales of one matrix are twice as large."""
    kind, _, start, rows = GgufCheckpoint(file).place("layers.1.mlp.down_proj.weight")
    raw = np.fromfile(file, np.uint8)
    size, places = SCALES[kind]
    width = GgufCheckpoint(file).entries["layers.1.mlp.down_proj.weight"].shape[1]
    blocks = raw[start : start + len(rows) * width // (256 if kind.endswith("K") else 32) * size].reshape(-1, size)
    for place in places:
        halves = np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16)
        blocks[:, place : place + 2] = (halves * np.float16(2.0)).view(np.uint8)
    raw.tofile(to)
    return to


def measured(file: Path, given: argparse.Namespace) -> dict[str, Any]:
    texts = windows(Tokenizer.load(file), given.data, given.tokens)
    room, count = 2 * WINDOW, sum(map(len, texts))
    print(f"{file.stem}: {count} tokens", file=sys.stderr, flush=True)
    exact = list(logprobs(load_runner(file, quantization="none", dtype="float32", max_context=room), texts))
    ours = load_runner(file, max_context=room)
    assert ours.info.quantization == "blocks"
    llama = llama_logprobs(llama_cpp(avx2=given.avx2), file, texts, exact[0].shape[1], given.threads)
    found: dict[str, Any] = {"tokens": count, "llama.cpp": compared(exact, llama)}
    found["ours"] = compared(exact, logprobs(ours, texts))
    wide = load_runner(file, dtype="float32", max_context=room)
    found["ours in float32"] = compared(exact, logprobs(wide, texts))
    fine = load_runner(file, dtype="float32", max_context=room, activation_bits=16)
    found["ours in float32, activations of 16 bits"] = compared(exact, logprobs(fine, texts))
    found["int4 and int8"] = compared(exact, logprobs(load_runner(file, quantization="int4", max_context=room), texts))
    with tempfile.TemporaryDirectory() as folder:
        control = load_runner(damaged(file, Path(folder) / file.name), max_context=room)
        found["control"] = compared(exact, logprobs(control, texts))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=["smollm2", "qwen05"], metavar="FILE")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.avx2:
        keep_to_avx2()
    torch.set_num_threads(given.threads)
    for name in given.files:
        file = gguf_file(name) if name in FILES else Path(name)
        result = kept("block_quality", given.folder)
        result[file.stem] = measured(file, given)
        print(file.stem, json.dumps(result[file.stem], indent=1), flush=True)
        save("block_quality", result, given.folder, parts=[file.stem])


if __name__ == "__main__":
    main()
