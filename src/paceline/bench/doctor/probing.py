"""Short measurements for the doctor: what a pass costs, and a probe of every drafter.

In: a loaded LLM. Out: checks_facts.Probe. Not here: judgement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from paceline import registry
from paceline.bench.doctor.facts import DraftedToken, ProbeFacts
from paceline.config import SamplingParams
from paceline.controllers import Controller, Plan, Signal
from paceline.engine import Probe as PassTimer
from paceline.engine import StepRecord, watching
from paceline.llm import LLM
from paceline.models import Runner
from paceline.tree import NO_BUDGET, Budget, Verdict

TOKENS = 50
"""Of each probe, on each prompt."""

DEPTH = 4
"""num_speculative_tokens of the probes."""

CONTEXT = 64


class OnlyOne(Controller):
    """A controller that lets one drafter draft a fixed number of tokens, and the others nothing.

    Args:
        drafter: its number. drafters: how many there are.
        tokens: nodes and levels.
    """

    name = "probe"

    def __init__(self, drafter: int, drafters: int, tokens: int = DEPTH) -> None:
        self.drafter, self.drafters, self.tokens = drafter, drafters, tokens

    def plan(self, signals: Sequence[Signal]) -> Plan:
        """All for the one."""
        budgets = [
            Budget(self.tokens, self.tokens) if drafter == self.drafter else NO_BUDGET
            for drafter in range(self.drafters)
        ]
        return Plan([budgets] * len(signals))


def pass_seconds(runner: Runner, threads: Sequence[int]) -> dict[int, float]:
    """Number of threads -> least seconds of one pass over one row; PyTorch's number is given back."""
    import torch

    before, found = torch.get_num_threads(), {}
    try:
        for number in threads:
            torch.set_num_threads(number)
            (found[number],) = PassTimer(runner)([1], CONTEXT)
    finally:
        torch.set_num_threads(before)
    return found


Progress = Callable[[str, int, int], None]


def probe(
    llm: LLM, prompts: Sequence[Any], *, tokens: int = TOKENS, progress: Progress = lambda stage, done, total: None
) -> list[ProbeFacts]:
    """One probe per drafter of a configuration: greedy, ends of texts ignored.

    Args:
        llm: with the configuration in question.
        prompts: as for `LLM.generate`, one after the other.
        progress: told (stage, done, total).
    """
    timer = PassTimer(llm.runner)
    rows = min(DEPTH + 1, llm.runner.info.max_context // 4)
    seconds = dict(zip((1, rows), timer((1, rows), CONTEXT), strict=True))
    crew = llm.engine.parts.crew
    found = []
    for number, method in enumerate(llm.drafter_methods):
        progress("probing drafters", number, len(llm.drafter_methods))
        one = llm.with_speculative_config(llm.speculative)
        one.engine.parts = replace(one.engine.parts, controller=OnlyOne(number, len(crew.names)))
        records, dropped = _decode(one, prompts, tokens)
        drafter, kind = crew.drafters[number], registry.lookup("drafters", method).kind
        spent = [r.draft_seconds[number] / tree.max_depth for r in records for tree in r.proposed if len(tree)]
        found.append(
            ProbeFacts(
                drafter=crew.names[number],
                kind=kind,
                taps=tuple(drafter.taps),
                guesses=[guess for record in records for guess in guesses(record, llm.tokenizer.token_text)],
                draft_seconds=median(spent[1:] or spent) if spent else 0.0,
                target_seconds=seconds,
                dropped=dropped,
            )
        )
    progress("probing drafters", len(found), len(found))
    return found


def _decode(llm: LLM, prompts: Sequence[Any], tokens: int) -> tuple[list[StepRecord], str]:
    records: list[StepRecord] = []
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    dropped = ""
    with watching(llm.engine, records.append):
        for prompt in prompts:
            (output,) = llm.generate(prompt, params)
            output.raise_for_error()
            dropped = dropped or next(iter(output.metrics.dropped_drafters.values()), "")
    return records, dropped


def guesses(record: StepRecord, text: Any) -> list[DraftedToken]:
    """What was guessed on the path that the target took, as far as there were guesses, for every sequence of a step.

    Args:
        text: token id -> its text.
    """
    found = []
    for tree, verdict in zip(record.trees, record.verdicts, strict=True):
        if not isinstance(verdict, Verdict) or not len(tree):
            continue
        tokens, parents, confidence = tree.tokens.tolist(), tree.parents.tolist(), tree.confidence.tolist()
        for position, target in enumerate(verdict.tokens, 1):
            parent = verdict.path[position - 2] if position > 1 else -1
            children = [node for node, above in enumerate(parents) if above == parent]
            if not children:
                break
            hit = position <= len(verdict.path)
            first = children[0]
            found.append(DraftedToken(position, tokens[first], target, hit, confidence[first], text(target)))
    return found
