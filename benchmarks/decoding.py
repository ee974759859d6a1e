"""What the scripts that decode share: the model of `--model`, prompts, decoding in groups, agreement with plain
decoding.

`--model` is `smollm2` (the default: SmolLM2-135M-Instruct, made by `real_models.py`), `bundled` (the pair of the demo,
6M parameters), `291m` (random weights of that size, for costs that do not depend on content) or a folder. SmolLM2's
package holds no smaller model, so that its draft model, where a script needs one, is an int4 copy of itself.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from common import random_llama
from methods import FILES
from real_models import WEIGHTS, smollm2

from paceline import LLM, SamplingParams
from paceline.bench import BUNDLED_DRAFT, BUNDLED_TARGET, bundled_prompts
from paceline.utils import read_prompts
from paceline.verify import TIE_UNITS, first_difference

Ids = list[int]
RUNS = count()


@dataclass(frozen=True, slots=True)
class Model:
    """What a script decodes with.

    Attributes:
        name: for the names of result files.
        folder: of the checkpoint.
        weights: in words, for tables.
        draft: speculative_config of a draft model for it, without a length.
    """

    name: str
    folder: Path
    weights: str
    draft: dict[str, Any] = field(default_factory=lambda: {"method": "quantized_copy", "quantization": "int4"})

    @property
    def tokenizer(self) -> Path:
        """Folder of its tokenizer: the bundled one for random weights."""
        return self.folder if (self.folder / "tokenizer.json").exists() else BUNDLED_TARGET

    def open(self, **options: Any) -> LLM:
        """The model without drafts, and without keeping prefixes unless `options` say so."""
        folder = None if self.name == "bundled" else self.folder
        return LLM(
            folder,
            **{"tokenizer": self.tokenizer, "speculative_config": None, "enable_prefix_caching": False} | options,
        )


def add_model(parser: argparse.ArgumentParser, default: str = "smollm2") -> None:
    """The flag `--model`."""
    parser.add_argument(
        "--model", default=default, metavar="MODEL", help="smollm2, bundled, 291m or a folder (%(default)s)"
    )


def model_of(name: str) -> Model:
    """The model of that name, made if it is not there yet.

    Raises:
        SystemExit: no such name, and no checkpoint there.
    """
    if name == "smollm2":
        return Model(name, smollm2(), WEIGHTS)
    if name == "bundled":
        draft = {"method": "draft_model", "model": str(BUNDLED_DRAFT)}
        return Model(name, BUNDLED_TARGET, "the bundled model, 6M parameters, bfloat16", draft)
    if name == "291m":
        folder = random_llama(Path(tempfile.gettempdir()) / "paceline-291m")
        return Model(name, folder, "Llama of 291M parameters, random weights, bfloat16")
    folder = Path(name)
    if not (folder / "config.json").exists():
        raise SystemExit(f"--model must be smollm2, bundled, 291m or the folder of a checkpoint, got {name!r}")
    return Model(folder.resolve().name, folder, folder.resolve().name)


def prompts_of(llm: LLM, requests: int) -> list[Ids]:
    """So many of the shipped prompts as token ids, in an order that mixes the tasks, from the first again if there are
    too few.
    """
    messages = [prompt.prompt for prompt in bundled_prompts()]
    return [asked(llm, messages[5 * i % len(messages)]) for i in range(requests)]


def published(llm: LLM, data: Path, name: str, requests: int, longest: int = 512) -> list[Ids]:
    """First turns of a published set, spread over its file, as token ids.

    Raises:
        SystemExit: the folder `data` does not hold the set.
    """
    if not (files := sorted(data.glob(FILES[name]))):
        raise SystemExit(f"{data} holds no {FILES[name]}; give --data a folder that does")
    found = [asked(llm, one.turns[0]) for one in read_prompts(files[0]).conversations]
    found = [ids for ids in found if len(ids) <= longest]
    return found[:: max(1, len(found) // requests)][:requests]


def asked(llm: LLM, message: str) -> Ids:
    """A user's message as token ids, through the chat template where there is one."""
    if llm.tokenizer.has_chat_template:
        return llm.chat_ids([{"role": "user", "content": message}])
    return llm.tokenizer.encode(message)


def run(llm: LLM, prompts: list[Ids], params: SamplingParams | list[SamplingParams]) -> list[Any]:
    """The results of one call; under a name of its own each time, so that no drafter profits from its earlier
    answers.
    """
    turn = f"run {next(RUNS)}"
    found = llm.generate([{"prompt_token_ids": ids, "cache_salt": turn} for ids in prompts], params)
    for one in found:
        one.raise_for_error()
    return found


def decode(llm: LLM, prompts: list[Ids], params: SamplingParams) -> list[Ids]:
    """The tokens of one call."""
    return [one.outputs[0].token_ids for one in run(llm, prompts, params)]


def counted(found: list[Any]) -> dict[str, float]:
    """What was drafted and accepted for results of `run`."""
    drafted, accepted, steps = (
        sum(getattr(one.metrics, key) for one in found)
        for key in ("num_draft_tokens", "num_accepted_tokens", "num_steps")
    )
    return {
        "drafted": drafted,
        "accepted": accepted,
        "steps": steps,
        "tokens_per_pass": 1 + accepted / max(steps, 1),
        "drafted_per_pass": drafted / max(steps, 1),
    }


def differs(plain: LLM, units: float = TIE_UNITS) -> Callable[[Ids, Ids, Ids], str | None]:
    """For `time_in_turn`: outputs of one prompt may differ first at a near tie only."""

    def found(prompt: Ids, base: Ids, other: Ids) -> str | None:
        where = first_difference(plain.runner, prompt, base, other, units)
        return None if where is None or where.near_tie else str(where)

    return found


def must_agree(
    plain: LLM, prompts: list[Ids], a: list[Ids], b: list[Ids], *, units: float = TIE_UNITS, what: str = ""
) -> dict[str, int]:
    """Equal, or first different at a near tie; anything else ends the benchmark.

    Args:
        units: of tolerance (`paceline.verify.tokens`). what: is compared, for the message.
    """
    differences = [first_difference(plain.runner, p, x, y, units) for p, x, y in zip(prompts, a, b, strict=True)]
    wrong = [d for d in differences if d is not None and not d.near_tie]
    if wrong:
        raise SystemExit(f"{what or 'outputs'}: outputs differ outside near ties, nothing is timed: {wrong[:3]}")
    return {"prompts": len(prompts), "identical": sum(d is None for d in differences)}
