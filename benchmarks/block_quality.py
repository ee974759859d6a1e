"""What compiled passes over a GGUF file's blocks lose against the same file in float32, beside llama.cpp's loss.

usage: block_quality.py FILE... --data FOLDER [--tokens 4000]

Texts are WikiText-2's validation part and HumanEval's solutions (--data), in windows of 500 tokens, every token given.
For each file: divergence of our distribution, and of llama.cpp's, from that of the file's own values in float32
(`quantization="none"`): mean and 99 % in nats, and how often the likeliest token is the same. As a control, a copy of
the file in which one matrix's scales are twice as large must diverge far more.

llama.cpp runs in its own environment: `paceline bench peers install llama.cpp`; without it, its column is left out.
Results: `results/block_quality.json`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import save
from gguf_files import LOGITS, llama_cpp

from paceline.bench.peers import peers_home
from paceline.models import load_runner
from paceline.models.loading import GgufCheckpoint, Tokenizer

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


def llama_logprobs(file: Path, given: Sequence[Sequence[int]], vocab: int) -> Iterator[torch.Tensor]:
    for window in given:
        with tempfile.TemporaryDirectory() as folder:
            llama_cpp(LOGITS, file=str(file), windows=[list(window)], rows=WINDOW, to=folder)
            yield torch.from_numpy(np.load(f"{folder}/0.npy"))[:, :vocab].float().log_softmax(-1)


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


def measured(file: Path, data: Path, tokens: int) -> dict[str, Any]:
    given = windows(Tokenizer.load(file), data, tokens)
    options: dict[str, Any] = {"dtype": "float32", "max_context": 2 * WINDOW}
    exact = list(logprobs(load_runner(file, quantization="none", **options), given))
    found: dict[str, Any] = {"tokens": sum(map(len, given))}
    ours = load_runner(file, max_context=2 * WINDOW)
    assert ours.info.quantization == "blocks"
    found["ours"] = compared(exact, logprobs(ours, given))
    found["int4 and int8"] = compared(exact, logprobs(load_runner(file, quantization="int4", max_context=1000), given))
    if (peers_home() / "llama.cpp").exists():
        try:
            found["llama.cpp"] = compared(exact, llama_logprobs(file, given, exact[0].shape[1]))
        except subprocess.CalledProcessError as error:
            print(f"llama.cpp ended with {error.returncode}: {error.stderr[-500:]}")
    with tempfile.TemporaryDirectory() as folder:
        control = load_runner(damaged(file, Path(folder) / file.name), max_context=2 * WINDOW)
        found["control"] = compared(exact, logprobs(control, given))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4000)
    given = parser.parse_args()
    found = {}
    for file in given.files:
        found[file.stem] = measured(file, given.data, given.tokens)
        print(file.stem, json.dumps(found[file.stem], indent=1), flush=True)
    save("block_quality", {"files": found})


if __name__ == "__main__":
    main()
