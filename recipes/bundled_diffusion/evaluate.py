"""How good a denoiser is: exact match on the test split of the tasks, under static decoding of one slot a round.

Reads a model folder (write.py). Writes a share of right answers for each task on the screen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lab.diffusion import TASKS, Item, items
from paceline.models import Denoiser
from recipes.bundled_diffusion.answering import encoded, fill, text_of
from recipes.common.options import add_flags, new_parser


def written(
    denoiser: Denoiser, tokenizer: Tokenizer, prompts: list[str], *, length: int, method: dict[str, Any]
) -> list[str]:
    """The text of each canvas up to its end token."""
    outcomes = fill(denoiser, encoded(tokenizer, prompts), method, length=length)
    return [text_of(outcome, tokenizer) for outcome in outcomes]


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
        texts = written(
            denoiser, tokenizer, [item.prompt for item in asked], length=length, method=method or {"method": "static"}
        )
        scores[task] = round(sum(item.right(text) for item, text in zip(asked, texts, strict=True)) / count, 3)
    return scores


def main(arguments: list[str] | None = None) -> None:
    from paceline.models import load_denoiser

    parser = new_parser(__doc__)
    parser.add_argument("model", type=Path)
    add_flags(parser, count=100, length=32, method={"method": "static"})
    options = parser.parse_args(arguments)
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    scores = exact_match(
        load_denoiser(options.model), tokenizer, count=options.count, length=options.length, method=options.method
    )
    print(json.dumps(scores | {"mean": round(sum(scores.values()) / len(scores), 3)}, indent=1))


if __name__ == "__main__":
    main()
