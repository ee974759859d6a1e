"""Plain against accelerated decoding of tasks as people have them, in turn, timed and compared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from statistics import median
from typing import Any

from paceline.config import SamplingParams, StructuredOutputsParams
from paceline.engine import RequestOutput
from paceline.llm import LLM
from paceline.utils import Turn, in_turn
from paceline.verify import Difference, differences, inputs_of, plain_from


@dataclass(frozen=True, slots=True)
class DemoTask:
    """A user's message, and what he knows of the answer.

    Attributes:
        kind: of the task, which the table has a line for.
        prediction: the answer will mostly be this text; "" where nothing is known.
        schema: the answer must be JSON of this schema, if any.
        again: the message was answered once before, by the same model for the same user.
    """

    id: str
    kind: str
    prompt: str
    prediction: str = ""
    schema: dict[str, Any] | None = None
    again: bool = False


@dataclass(slots=True)
class DemoRow:
    """One task, decoded both ways.

    Attributes:
        plain_seconds, fast_seconds: medians of the repeats, prompt processing included.
        tokens: generated.
        steps, accepted: passes of the accelerated run, and drafts that were accepted in them.
        differences: none where the outputs are identical; at near ties, or the last one elsewhere.
    """

    task: DemoTask
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
    """Rows added up: time of all tasks plain over time of all accelerated.

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


def demo_tasks() -> list[DemoTask]:
    """The tasks of `paceline demo`: chat, code, rewriting a given text, JSON records, questions asked again."""
    text = (files("paceline") / "bundled" / "demo.jsonl").read_text(encoding="utf-8")
    return [DemoTask(**json.loads(line)) for line in text.split("\n") if line.strip()]


def run_demo(
    llm: LLM,
    tasks: Sequence[DemoTask],
    *,
    max_tokens: int = 96,
    repeats: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[DemoRow]:
    """Decode every task plainly and accelerated in turn, `repeats` times, after one warm-up.

    Args:
        llm: accelerated as the user would; its plain twin shares the weights.
        progress: called with the runs that are done and their number.
    """
    plain = llm.with_speculative_config(None)
    runs = {name: partial(_decode, one, max_tokens) for name, one in (("plain", plain), ("fast", llm))}
    earlier = [(task, repeat) for task in tasks if task.again for repeat in range(repeats)]
    for run in runs.values():
        run(tasks[0], -1)
        for task, repeat in earlier:
            run(task, repeat)
    turns: list[list[Turn[RequestOutput]]] = [[] for _ in tasks]
    for done, turn in enumerate(in_turn(runs, tasks, repeats)):
        turns[turn.item].append(turn)
        progress(done + 1, repeats * len(tasks))
    return [_row(llm, plain, max_tokens, task, mine) for task, mine in zip(tasks, turns, strict=True)]


def _row(llm: LLM, plain: LLM, max_tokens: int, task: DemoTask, turns: Sequence[Turn[RequestOutput]]) -> DemoRow:
    slow, fast = turns[0].outputs["plain"], turns[0].outputs["fast"]
    outputs = slow.outputs[0].token_ids, fast.outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    ids, inputs = slow.prompt_token_ids, inputs_of(slow)
    go_on = plain_from(plain, ids, params, inputs)

    def as_it_was(kept: list[int]) -> list[int]:
        """A text that continues a prompt does not continue its JSON, so that nothing is compared behind a near tie."""
        return list(outputs[1][len(kept) :])

    afterwards = go_on if task.schema is None else as_it_was
    return DemoRow(
        task,
        tokens=len(outputs[0]),
        plain_seconds=median(turn.seconds["plain"] for turn in turns),
        fast_seconds=median(turn.seconds["fast"] for turn in turns),
        steps=fast.metrics.num_steps,
        accepted=fast.metrics.num_accepted_tokens,
        differences=differences(llm.runner, ids, *outputs, afterwards, inputs=inputs),
    )


def _tokens(llm: LLM, message: str) -> list[int]:
    if llm.tokenizer.has_chat_template:
        return llm.chat_ids([{"role": "user", "content": message}])
    return llm.tokenizer.encode(message)


def _decode(llm: LLM, max_tokens: int, task: DemoTask, repeat: int) -> RequestOutput:
    """Under a user's name of its own, so that nobody learns from its answer in an earlier repeat or of another task."""
    prompt: dict[str, Any] = {"prompt_token_ids": _tokens(llm, task.prompt), "cache_salt": f"{task.id}, {repeat}"}
    if task.prediction and llm.drafter_methods:  # plain decoding has no use for it, and would say so
        prompt["prediction"] = task.prediction
    structured = None if task.schema is None else StructuredOutputsParams(json=task.schema)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs=structured)
    (output,) = llm.generate(prompt, params)
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
    """One line a kind of task, in the order of the tasks, and one for all."""
    kinds = dict.fromkeys(row.task.kind for row in rows)
    return [*(total(kind, [row for row in rows if row.task.kind == kind]) for kind in kinds), total("all", rows)]


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
            "id": row.task.id,
            "tokens": row.tokens,
            "plain_seconds": row.plain_seconds,
            "seconds": row.fast_seconds,
            "identical": not row.differences,
            "near_ties": sum(d.near_tie for d in row.differences),
        }
        for row in rows
    ]
    return {"totals": lines, "prompts": each}
