"""What an encoder costs on the CPU: its matrices and attention, compiled and by PyTorch's operators, and all else.

usage: encoder.py [--model whisper-base] [--avx2]

CPU time of one thread, which other programs on the machine change little; the least of several runs in turn.

products   all matrices of six layers of 512 inputs and 2,048 inner ones, as Whisper base, T5 small and Marian have them
           (random numbers), for rows of a short text up to those of half a minute of audio
attention  of one layer, 8 heads of 64 dimensions, alone and with what distances of T5 add
parts      of one pass over 1,500 rows of MODEL (`real_models.py`): its matrices, its attention, all else

What bfloat16 has no fast instruction for is left to the operators, and not measured; numbers are compared before.

Results: `results/encoder.json`, by instructions.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from common import RESULTS, instructions, keep_to_avx2, kept, save
from real_models import model_folder
from speech_errors import KINDS, opened
from torch.nn import functional as F

from paceline.models.cpu import MatrixProduct, Pages, TwoSidedAttention
from paceline.models.layers import make_linear
from paceline.models.passes import attention_agrees, products_agree

ROWS, LAYERS, REPEATS, ENOUGH = (8, 20, 64, 128, 512, 1500), 6, 7, 200
MATRICES = ((1536, 512), (512, 512), (2048, 512), (512, 2048))
HEADS, SIZE = 8, 64
Product = Callable[[torch.Tensor], torch.Tensor]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def least(runs: Mapping[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of CPU time of each, in turn: REPEATS times, or as often as takes ENOUGH milliseconds."""
    found, spent, turns = dict.fromkeys(runs, float("inf")), 0.0, 0
    while turns < REPEATS or spent < ENOUGH:
        for name, run in runs.items():
            start = thread_time()
            run()
            took = 1e3 * (thread_time() - start)
            found[name], spent = min(found[name], took), spent + took
        turns += 1
    return found


def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if float((ours - theirs).float().norm()) > NEAR[ours.dtype] * float(theirs.float().norm()):
        raise SystemExit("compiled numbers are not those of the operators; nothing is timed")


def products(dtype: torch.dtype) -> dict[str, Any]:
    """Rows -> who -> milliseconds."""
    made: dict[str, list[Product]] = {"compiled": [], "operators": []}
    pages = Pages()
    for _ in range(LAYERS):
        for outputs, inputs in MATRICES:
            weight, bias = (torch.randn(*shape).to(dtype) for shape in ((outputs, inputs), (outputs,)))
            made["compiled"].append(MatrixProduct(weight, None, bias, pages=pages))
            made["operators"].append(make_linear(weight, bias))
    found: dict[str, Any] = {}
    for rows in ROWS:
        x = {inputs: torch.randn(rows, inputs).to(dtype) for _, inputs in MATRICES}

        def run(maps: list[Product], x: dict[int, torch.Tensor] = x) -> list[torch.Tensor]:
            given = LAYERS * [x[inputs] for _, inputs in MATRICES]
            return [one(rows) for one, rows in zip(maps, given, strict=True)]

        for ours, theirs in zip(run(made["compiled"]), run(made["operators"]), strict=True):
            check(ours, theirs)
        found[str(rows)] = least({who: lambda maps=maps, run=run: run(maps) for who, maps in made.items()})
    return found


def attention(dtype: torch.dtype) -> dict[str, Any]:
    """Rows, alone or with biases -> who -> milliseconds."""
    ours, found = TwoSidedAttention(HEADS, HEADS, SIZE, SIZE**-0.5, dtype), dict[str, Any]()

    def by_operators(qkv: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        parts = (part.transpose(0, 1)[None] for part in qkv.split(HEADS, 1))
        out = F.scaled_dot_product_attention(*parts, mask, scale=SIZE**-0.5)
        return out[0].transpose(0, 1).reshape(len(qkv), HEADS * SIZE)

    for rows in ROWS:
        qkv, biases = torch.randn(rows, 3 * HEADS, SIZE).to(dtype), torch.randn(HEADS, 2 * rows - 1).to(dtype)
        index = torch.arange(rows)
        mask = biases[:, index[None] - index[:, None] + rows - 1][None]
        for name, mine, other in (("alone", None, None), ("biases", biases, mask)):
            check(ours(qkv, mine), by_operators(qkv, other))
            runs = {
                "compiled": lambda qkv=qkv, mine=mine: ours(qkv, mine),
                "operators": lambda qkv=qkv, other=other: by_operators(qkv, other),
            }
            found.setdefault(str(rows), {})[name] = least(runs)
    return found


@contextmanager
def timed(kind: type, seconds: list[float]) -> Iterator[None]:
    """Adds the CPU time of calls of a class's objects."""
    call = kind.__call__

    def measured(*given: Any) -> Any:
        start = thread_time()
        result = call(*given)
        seconds[0] += thread_time() - start
        return result

    kind.__call__ = measured  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__call__ = call  # type: ignore[method-assign]


def parts(model: str, kind: str) -> dict[str, float]:
    """Milliseconds of each part of a pass, of the quickest of several."""
    runner: Any = opened(model_folder(model), kind).runner
    features, best = torch.randn(runner.source.convolutions[0].inputs, 3000), {"all": float("inf")}
    for _ in range(REPEATS):
        of_products, of_attention = [0.0], [0.0]
        with timed(MatrixProduct, of_products), timed(TwoSidedAttention, of_attention), torch.inference_mode():
            start = thread_time()
            runner.encoder.read([features], runner.native.arena)
            everything = thread_time() - start
        if 1e3 * everything < best["all"]:
            inside = {"matrices": of_products[0], "attention": of_attention[0]}
            inside["else"] = everything - sum(inside.values())
            best = {"all": 1e3 * everything} | {name: 1e3 * one for name, one in inside.items()}
    return best


def show(found: dict[str, Any]) -> None:
    for what in ("products", "attention"):
        for dtype, by_rows in found[what].items():
            for rows, cell in by_rows.items():
                cells = {"": cell} if "compiled" in cell else cell
                for name, times in cells.items():
                    share = times["compiled"] / times["operators"]
                    print(f"{what} {dtype} {rows} {name}: {times['compiled']:.3f} ms, {share:.2f} of operators")
    for kind, cell in found["parts"].items():
        print(kind, ", ".join(f"{name} {time:.0f} ms" for name, time in cell.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="whisper-base", choices=("whisper-base", "whisper-tiny.en"))
    parser.add_argument("--avx2", action="store_true")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.avx2:
        keep_to_avx2()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16)}
    with torch.inference_mode():
        found: dict[str, Any] = {
            "products": {name: products(dtype) for name, dtype in dtypes.items() if products_agree(dtype)},
            "attention": {name: attention(dtype) for name, dtype in dtypes.items() if attention_agrees(dtype)},
        }
    found["parts"] = {kind: parts(given.model, kind) for kind in KINDS}
    show(found)
    save("encoder", kept("encoder", given.folder) | {instructions(): found}, given.folder, parts=[instructions()])


if __name__ == "__main__":
    main()
