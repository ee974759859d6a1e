"""The model card of a bundled denoiser, with figures measured now.

Reads a model folder (write.py), the run's history.json. Writes FOLDER/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from tokenizers import Tokenizer

from lab.diffusion import TASKS, items
from paceline.models import load_denoiser
from paceline.models.runners import NativeDenoiser
from recipes.bundled_diffusion.answering import encoded, fill
from recipes.bundled_diffusion.evaluate import exact_match, written
from recipes.common.options import add_flags, new_parser

TEMPLATE = Path(__file__).with_name("card_template.md")
PROMPTS = ("<|user|>\nTom has 5 apples", "<|user|>\nWrite SQL: ")
KINDS = {
    "full": ("plain masked", "LLaDA (`model_type` llada): full attention", "diffusion"),
    "block": (
        "block-causal",
        "SDAR (`model_type` sdar): full attention within blocks, causal between them",
        "block_diffusion",
    ),
}
SETS = (
    ("generated tasks", "most", "Apache-2.0", "`lab.diffusion.tasks`, train split"),
    ("GSM8K", "windows of train", "MIT", "Cobbe et al. 2021, openai/grade-school-math"),
    (
        "Advising text-to-SQL",
        "windows of train and dev",
        "CC BY 4.0",
        "Finegan-Dollak et al. 2018, jkkummerfeld/text2sql-data",
    ),
)


def samples(model: NativeDenoiser, tokenizer: Tokenizer, length: int = 48) -> list[str]:
    """Continuations of PROMPTS, one slot a round, the likeliest token each time."""
    outcomes = fill(model, encoded(tokenizer, PROMPTS), {"method": "random", "temperature": 0.5}, length=length)
    outputs = [tokenizer.decode(outcome.canvas.output, skip_special_tokens=False) for outcome in outcomes]
    return [prompt + output for prompt, output in zip(PROMPTS, outputs, strict=True)]


def table(scores: dict[str, float]) -> str:
    rows = [
        f"| {task} | {'one' if TASKS[task].determined else 'several'} | {score:.0%} |" for task, score in scores.items()
    ]
    return "\n".join(["| task | right answers | exact match |", "|---|---|---|", *rows])


def licences() -> str:
    rows = ["| " + " | ".join(row) + " |" for row in SETS]
    return "\n".join(["| set | used | licence | attribution |", "|---|---|---|---|", *rows])


def card(folder: Path, history: list[dict[str, Any]], count: int, tasks: Sequence[str]) -> str:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = load_denoiser(folder, dtype="float32")
    spec, last = model.spec.model, history[-1]
    kind, layout, name = KINDS[model.attention]
    shape = (
        f"{spec.num_layers} layers, {spec.hidden_size} wide, {spec.num_heads} heads, MLP "
        f"{spec.intermediate_size}, untied"
    )
    shape += "" if model.block_length is None else f", blocks of {model.block_length} slots"
    example = items("insert_index", split="test", count=1)[0].prompt
    return TEMPLATE.read_text(encoding="utf-8").format(
        kind=kind,
        layout=layout,
        name=name,
        shape=shape,
        count=count,
        millions=sum(value.numel() for value in load_file(folder / "model.safetensors").values()) / 1e6,
        size=(folder / "model.safetensors").stat().st_size / 1e6,
        mask=model.mask_token_id,
        longest=model.max_length,
        steps=last["step"],
        minutes=last["minutes"],
        tasks=last["tasks"],
        text=last["text"],
        scores=table(exact_match(model, tokenizer, count=count, tasks=tasks)),
        example=example,
        answer=written(model, tokenizer, [example], length=24, method={"method": "static"})[0],
        drawn="\n\n".join("    " + text.replace("\n", "\n    ") for text in samples(model, tokenizer)),
        licences=licences(),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--history", type=Path, required=True, help="OUT/history.json of train.py")
    add_flags(parser, "tasks", count=50)
    options = parser.parse_args(arguments)
    text = card(options.model, json.loads(options.history.read_text()), options.count, options.tasks)
    (options.model / "README.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
