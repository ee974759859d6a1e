"""The proof on the user's own model: plain and accelerated decoding of the same prompts, compared at 0 and tested above it.

In: a loaded LLM and prompts. Out: a Report that says whether the claimed exactness class holds. Not here: printing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from paceline import registry
from paceline.bench.compare import Difference, first_difference, gaps
from paceline.bench.law import LawTest, integral_values, uniform_test
from paceline.config import SamplingParams
from paceline.llm import LLM

APPROXIMATE = "approximate"
Progress = Callable[[str, int, int], None]


@dataclass(slots=True)
class Report:
    """What was found.

    Attributes:
        claimed: exactness class at temperature 0 and above it.
        prompts, tokens: how much was decoded at temperature 0.
        identical: prompts whose outputs are equal.
        differences: prompt index -> first difference, for the others.
        near_ties, positions: output positions whose two best logits are closer than epsilon, of all.
        temperature, law: the test above 0, for accelerated decoding; `plain_law` is the same test of plain decoding.
        mean_acceptance_length: of accelerated decoding at temperature 0.
    """

    model: str
    claimed: tuple[str, str]
    dtype: str
    prompts: int = 0
    tokens: int = 0
    identical: int = 0
    differences: dict[int, Difference] = field(default_factory=dict)
    near_ties: int = 0
    positions: int = 0
    temperature: float = 1.0
    law: LawTest | None = None
    plain_law: LawTest | None = None
    mean_acceptance_length: float = 1.0

    @property
    def greedy_holds(self) -> bool:
        """Equal, or different first at a near tie; an approximate method claims nothing."""
        return self.claimed[0] == APPROXIMATE or all(difference.near_tie for difference in self.differences.values())

    @property
    def law_holds(self) -> bool:
        return self.claimed[1] == APPROXIMATE or self.law is None or self.law.holds

    @property
    def holds(self) -> bool:
        return self.greedy_holds and self.law_holds

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        found = asdict(self)
        found["differences"] = [
            {"prompt": index, **asdict(difference), "near_tie": difference.near_tie}
            for index, difference in self.differences.items()
        ]
        return found | {"holds": self.holds, "greedy_holds": self.greedy_holds, "law_holds": self.law_holds}


def claimed_class(llm: LLM) -> tuple[str, str]:
    """The weakest exactness class declared by what this LLM uses, at temperature 0 and above."""
    config = llm.speculative
    if config is None:
        return ("bit-equal", "bit-equal")
    order = ("bit-equal", "bit-equal up to near ties", "equal in law", APPROXIMATE)
    entries = [registry.lookup("drafters", name) for name in llm.drafter_methods]
    entries.append(registry.lookup("verifiers", config.acceptance_method))
    pairs = [entry.exactness for entry in entries]
    return (max((p[0] for p in pairs), key=order.index), max((p[1] for p in pairs), key=order.index))


def verify(
    llm: LLM,
    prompts: Sequence[Any],
    *,
    max_tokens: int = 64,
    temperature: float = 1.0,
    samples: int = 8,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> Report:
    """Decode every prompt plainly and accelerated and compare.

    Args:
        llm: with the speculative_config in question; plain decoding runs on the same loaded model.
        samples: outputs per prompt above temperature 0; 0 leaves that part out. They have no seeds of their own, so that drafts may
            be sampled; `LLM(seed=...)` makes them repeatable.
        seed: of the test's own noise.
        progress: told (stage, done, total).
    """
    plain = llm.with_speculative_config(None)
    report = Report(
        llm.runner.info.name, claimed_class(llm), str(llm.runner.info.dtype).removeprefix("torch."), prompts=len(prompts)
    )
    report.temperature = temperature
    _greedy(llm, plain, prompts, SamplingParams(temperature=0.0, max_tokens=max_tokens), report=report, progress=progress)
    if samples and temperature > 0:
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, n=samples)
        report.law = _law(llm, prompts, params, seed, partial(progress, "sampling"))
        report.plain_law = _law(plain, prompts, params, seed, partial(progress, "plain sampling"))
    return report


def _greedy(llm: LLM, plain: LLM, prompts: Sequence[Any], params: SamplingParams, *, report: Report, progress: Progress) -> None:
    """Fill the report's part at temperature 0."""
    steps = accepted = 0
    for index, prompt in enumerate(prompts):
        (slow,), (fast,) = plain.generate(prompt, params), llm.generate(prompt, params)
        for one in (slow, fast):
            one.raise_for_error()
        output = slow.outputs[0].token_ids
        difference = first_difference(llm.runner, slow.prompt_token_ids, output, fast.outputs[0].token_ids)
        report.tokens += len(output)
        report.identical += difference is None
        if difference is not None:
            report.differences[index] = difference
        found = gaps(llm.runner, slow.prompt_token_ids, output)
        report.positions += len(found)
        report.near_ties += sum(gap < epsilon for gap, epsilon in found)
        steps, accepted = steps + fast.metrics.num_steps, accepted + fast.metrics.num_accepted_tokens
        progress("temperature 0", index + 1, len(prompts))
    report.mean_acceptance_length = 1.0 + accepted / steps if steps else 1.0


def _law(llm: LLM, prompts: Sequence[Any], params: SamplingParams, seed: int, progress: Callable[[int, int], None]) -> LawTest:
    import torch

    noise, values = torch.Generator().manual_seed(seed), []
    for index, prompt in enumerate(prompts):
        (found,) = llm.generate(prompt, params)
        found.raise_for_error()
        for output in found.outputs:
            values.append(integral_values(llm.runner, found.prompt_token_ids, output.token_ids, params.temperature, noise))
        progress(index + 1, len(prompts))
    return uniform_test(torch.cat(values))
