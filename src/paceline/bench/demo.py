"""Plain against accelerated decoding of a set of prompts, in turn, timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from paceline.config import SamplingParams
from paceline.engine import RequestOutput
from paceline.llm import BUNDLED, LLM
from paceline.utils import Turn, in_turn, user_cache
from paceline.verify import Difference, differences, plain_from

BUNDLED_TARGET, BUNDLED_DRAFT = BUNDLED / "target", BUNDLED / "draft"

SMOLLM2 = "SmolLM2-135M-Instruct"
"""The real model of the benchmarks; `benchmarks/real_models.py` makes its folder."""

MAKE_SMOLLM2 = "python benchmarks/real_models.py"
REAL_PROMPTS, REAL_TOKENS = 8, 48
"""Of the real model in the demo, so that it takes under a minute and a half on two cores."""


def smollm2_folder() -> Path:
    """Where the real model of the benchmarks lies, if it was made."""
    return user_cache("models") / SMOLLM2


@dataclass(frozen=True, slots=True)
class DemoPrompt:
    """A user message of the bundled set."""

    id: str
    task: str
    prompt: str
    repetitive: bool


@dataclass(slots=True)
class DemoRow:
    """Compares one prompt decoded plainly and accelerated.

    Attributes:
        plain_seconds, fast_seconds: medians of the repeats, prompt processing included.
        tokens: generated.
        mean_acceptance_length: of the accelerated run.
        differences: none where the outputs are identical; at near ties, or the last one elsewhere.
    """

    prompt: DemoPrompt
    tokens: int
    plain_seconds: float
    fast_seconds: float
    steps: int
    accepted: int
    differences: list[Difference]

    @property
    def speedup(self) -> float:
        return self.plain_seconds / self.fast_seconds


@dataclass(slots=True)
class DemoTotal:
    """Rows added up: time of all prompts plain over time of all accelerated.

    Attributes:
        near_ties: differences at near ties.
        wrong: outputs that differ elsewhere than at a near tie.
    """

    name: str
    prompts: int
    tokens: int
    plain_rate: float
    fast_rate: float
    mean_acceptance_length: float
    identical: int
    near_ties: int
    wrong: int

    @property
    def speedup(self) -> float:
        return self.fast_rate / self.plain_rate


def bundled_prompts() -> list[DemoPrompt]:
    """The prompts that ship with the package; the bundled models were not trained on them."""
    text = (files("paceline") / "bundled" / "prompts.jsonl").read_text(encoding="utf-8")
    return [DemoPrompt(**json.loads(line)) for line in text.split("\n") if line.strip()]


def run_demo(
    llm: LLM,
    prompts: Sequence[DemoPrompt],
    *,
    max_tokens: int = 128,
    repeats: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[DemoRow]:
    """Decode every prompt plainly and accelerated in turn, `repeats` times, after one warm-up prompt."""
    plain, params = llm.with_speculative_config(None), SamplingParams(temperature=0.0, max_tokens=max_tokens)
    ids = [_tokens(llm, prompt.prompt) for prompt in prompts]
    runs = {name: partial(_decode, model, params) for name, model in (("plain", plain), ("fast", llm))}
    for run in runs.values():
        run(ids[0], -1)
    turns: list[list[Turn[RequestOutput]]] = [[] for _ in ids]
    for done, turn in enumerate(in_turn(runs, ids, repeats)):
        turns[turn.item].append(turn)
        progress(done + 1, repeats * len(ids))
    rows = []
    for prompt, tokens, mine in zip(prompts, ids, turns, strict=True):
        slow, fast = mine[0].outputs["plain"], mine[0].outputs["fast"]
        outputs = slow.outputs[0].token_ids, fast.outputs[0].token_ids
        rows.append(
            DemoRow(
                prompt,
                tokens=len(outputs[0]),
                plain_seconds=median(turn.seconds["plain"] for turn in mine),
                fast_seconds=median(turn.seconds["fast"] for turn in mine),
                steps=fast.metrics.num_steps,
                accepted=fast.metrics.num_accepted_tokens,
                differences=differences(llm.runner, tokens, *outputs, plain_from(plain, tokens, params)),
            )
        )
    return rows


def _tokens(llm: LLM, message: str) -> list[int]:
    if llm.tokenizer.has_chat_template:
        return llm.chat_ids([{"role": "user", "content": message}])
    return llm.tokenizer.encode(message)


def _decode(llm: LLM, params: SamplingParams, tokens: list[int], repeat: int) -> RequestOutput:
    """Under a name of its own, so that nobody learns from its answer in an earlier repeat."""
    (output,) = llm.generate({"prompt_token_ids": tokens, "cache_salt": f"repeat {repeat}"}, params)
    output.raise_for_error()
    return output


def total(name: str, rows: Iterable[DemoRow]) -> DemoTotal:
    """Add rows up."""
    rows = list(rows)
    tokens = sum(row.tokens for row in rows)
    steps = sum(row.steps for row in rows)
    return DemoTotal(
        name,
        prompts=len(rows),
        tokens=tokens,
        plain_rate=tokens / sum(row.plain_seconds for row in rows),
        fast_rate=tokens / sum(row.fast_seconds for row in rows),
        mean_acceptance_length=1.0 + sum(row.accepted for row in rows) / max(1, steps),
        identical=sum(not row.differences for row in rows),
        near_ties=sum(d.near_tie for row in rows for d in row.differences),
        wrong=sum(not all(d.near_tie for d in row.differences) for row in rows),
    )


def demo_totals(rows: Sequence[DemoRow]) -> list[DemoTotal]:
    """One line per task, one for prompts with repetition, one for all."""
    tasks = sorted({row.prompt.task for row in rows})
    lines = [total(task, [row for row in rows if row.prompt.task == task]) for task in tasks]
    repetitive = [row for row in rows if row.prompt.repetitive]
    lines += [total("with repetition", repetitive)] if repetitive else []
    return [*lines, total("all", rows)]


def demo_dict(rows: Sequence[DemoRow]) -> dict[str, Any]:
    """JSON-ready: totals and rows."""
    lines = [
        {
            "name": t.name,
            "prompts": t.prompts,
            "tokens": t.tokens,
            "plain_tokens_per_second": round(t.plain_rate, 1),
            "tokens_per_second": round(t.fast_rate, 1),
            "speedup": round(t.speedup, 3),
            "mean_acceptance_length": round(t.mean_acceptance_length, 3),
            "identical": t.identical,
            "near_ties": t.near_ties,
            "wrong": t.wrong,
        }
        for t in demo_totals(rows)
    ]
    each = [
        {
            "id": row.prompt.id,
            "tokens": row.tokens,
            "plain_seconds": row.plain_seconds,
            "seconds": row.fast_seconds,
            "identical": not row.differences,
            "near_ties": sum(d.near_tie for d in row.differences),
        }
        for row in rows
    ]
    return {"totals": lines, "prompts": each}
