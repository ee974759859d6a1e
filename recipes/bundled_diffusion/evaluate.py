"""How good a denoiser is: exact match on the test split of the tasks, under static decoding of one slot a round.

In:  a model folder (write.py), or a NativeDenoiser. Out: a share of right answers for each task. Not here: other methods
(`paceline bench diffusion`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from paceline.bench.parallel_tasks import TASKS, Item, items
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.loop import decode
from paceline.diffusion.methods import Recipe
from paceline.models.denoiser import Denoiser


def written(denoiser: Denoiser, tokenizer: Tokenizer, prompts: list[str], *, length: int, method: dict[str, Any]) -> list[str]:
    """The text of each canvas up to its end token."""
    encoded = [encoding.ids for encoding in tokenizer.encode_batch(prompts)]
    mask, ends = denoiser.mask_token_id, denoiser.eos_token_ids
    canvases = [Canvas.of(ids, fitting(denoiser, len(ids), length), mask_token_id=mask, eos_token_ids=ends) for ids in encoded]
    outcomes = decode(canvases, denoiser, [Recipe(method).parts(denoiser, canvas) for canvas in canvases])
    outputs = [outcome.canvas.output for outcome in outcomes]
    cut = [output[: next((i for i, token in enumerate(output) if token in ends), len(output))] for output in outputs]
    return [tokenizer.decode(ids) for ids in cut]


def fitting(denoiser: Denoiser, prompt: int, length: int) -> int:
    """At least `length` slots after the prompt, so that the last block is whole."""
    return length if denoiser.block_length is None else length + -(prompt + length) % denoiser.block_length


def exact_match(
    denoiser: Denoiser,
    tokenizer: Tokenizer,
    *,
    count: int,
    length: int = 24,
    method: dict[str, Any] | None = None,
    seed: int = 0,
    tasks: Sequence[str] = tuple(TASKS),
) -> dict[str, float]:
    """Share of right answers of each task, on `count` test items."""
    scores = {}
    for task in tasks:
        asked: list[Item] = items(task, split="test", count=count, seed=seed)
        texts = written(denoiser, tokenizer, [item.prompt for item in asked], length=length, method=method or {"method": "static"})
        scores[task] = round(sum(item.right(text) for item, text in zip(asked, texts, strict=True)) / count, 3)
    return scores


def main(arguments: list[str] | None = None) -> None:
    from paceline.models.denoiser_load import load_denoiser

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=100, help="test items of each task (%(default)s)")
    parser.add_argument("--length", type=int, default=32, help="slots of the canvas after the prompt (%(default)s)")
    parser.add_argument("--method", type=json.loads, default={"method": "static"}, help="as JSON (%(default)s)")
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    scores = exact_match(load_denoiser(options.model), tokenizer, count=options.count, length=options.length, method=options.method)
    print(json.dumps(scores | {"mean": round(sum(scores.values()) / len(scores), 3)}, indent=1))


if __name__ == "__main__":
    main()
