"""The proof on the user's own model: plain and accelerated decoding, compared at 0 and tested above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline import registry
from paceline.assembly import split_options
from paceline.config import SamplingParams, SpeculativeConfig
from paceline.engine import RequestOutput
from paceline.llm import LLM
from paceline.models import NO_INPUTS, Inputs
from paceline.profiles import DEFAULT
from paceline.verify.sampling_test import SamplingTest, integral_values, uniform_test
from paceline.verify.tokens import (
    APPROXIMATE,
    BIT_EQUAL,
    CLASSES,
    UP_TO_NEAR_TIES,
    Agreement,
    Continue,
    Sampling,
    differences,
    gaps,
    inputs_of,
)

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class VerifyReport:
    """What was found.

    Attributes:
        claimed: exactness class at temperature 0 and above it.
        exactness: the mode it ran in (`LLM.exactness`): in strict mode, tokens must be equal at near ties too.
        prompts: how many were decoded.
        greedy: the comparison at temperature 0; its outputs are the prompts.
        drafted: the same with DRAFTED tokens drafted in every step; None where the configuration fixes their number
            itself.
        drafted_tokens: that were verified in all these comparisons; without one there was nothing to test.
        near_ties, positions: output positions of plain decoding whose two best logits are closer than epsilon, of all.
        temperature: of the tests above 0, or 0.
        seeded: the comparison of outputs with equal seeds above 0; None where it was left out.
        distribution, plain_distribution: the test of the distribution above 0, of accelerated and of plain decoding;
            None where it was left out.
        mean_acceptance_length: of accelerated decoding at temperature 0.
    """

    model: str
    claimed: tuple[str, str]
    dtype: str
    prompts: int = 0
    exactness: str = ""
    greedy: Agreement = field(default_factory=Agreement)
    drafted: Agreement | None = None
    drafted_tokens: int = 0
    near_ties: int = 0
    positions: int = 0
    temperature: float = 0.0
    seeded: Agreement | None = None
    distribution: SamplingTest | None = None
    plain_distribution: SamplingTest | None = None
    mean_acceptance_length: float = 1.0

    @property
    def greedy_holds(self) -> bool:
        """Whether the class claimed at temperature 0 holds; an approximate method claims nothing."""
        return all(_agrees(self.claimed[0], one) for one in (self.greedy, self.drafted) if one is not None)

    @property
    def seeded_holds(self) -> bool:
        """Whether equal seeds give equal tokens, where that is claimed and was tested."""
        return self.seeded is None or _agrees(self.claimed[1], self.seeded)

    @property
    def distribution_holds(self) -> bool:
        """Whether the outputs follow the model's distribution, where that is claimed and was tested."""
        return self.claimed[1] == APPROXIMATE or self.distribution is None or self.distribution.holds

    @property
    def holds(self) -> bool:
        """Whether drafted tokens were verified and every claim holds.

        Without drafts plain decoding was compared with itself.
        """
        return self.drafted_tokens > 0 and self.greedy_holds and self.seeded_holds and self.distribution_holds

    @property
    def conclusion(self) -> str:
        """One sentence that names what was tested and no more."""
        above = f"at temperature {self.temperature:g}"
        checks = [] if self.claimed[0] == APPROXIMATE else [("at temperature 0", self.greedy_holds)]
        if self.seeded is not None and self.claimed[1] in (BIT_EQUAL, UP_TO_NEAR_TIES):
            checks.append((f"for equal seeds {above}", self.seeded_holds))
        if self.distribution is not None and self.claimed[1] != APPROXIMATE:
            checks.append((f"in distribution {above}", self.distribution_holds))
        broken = [name for name, fine in checks if not fine]
        if broken:
            return f"THE CLAIM DOES NOT HOLD {_listed(broken)}"
        if not self.drafted_tokens:
            return "NOTHING WAS DRAFTED, so plain decoding was compared with itself; choose another method or prompts"
        proven = "nothing exact is claimed at temperature 0"
        if checks:
            proven = f"the claim holds {_listed([name for name, _ in checks])}"
        if self.claimed[1] == APPROXIMATE:
            return f"{proven}; nothing exact is claimed above temperature 0"
        return proven if self.distribution is not None else f"{proven}; nothing was tested above temperature 0"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        distributions = {
            name: None if distribution is None else distribution.to_dict()
            for name, distribution in (
                ("distribution", self.distribution),
                ("plain_distribution", self.plain_distribution),
            )
        }
        counts = ("prompts", "drafted_tokens", "near_ties", "positions", "temperature", "mean_acceptance_length")
        plain = ("model", "claimed", "exactness", "dtype", *counts)
        verdicts = ("holds", "greedy_holds", "seeded_holds", "distribution_holds", "conclusion")
        return {name: getattr(self, name) for name in plain} | {
            "greedy": self.greedy.to_dict(),
            "drafted": None if self.drafted is None else self.drafted.to_dict(),
            "seeded": None if self.seeded is None else self.seeded.to_dict(),
            **distributions,
            "tested": {
                "temperature_0": True,
                "equal_seeds": self.seeded is not None,
                "distribution": self.distribution is not None,
            },
            **{name: getattr(self, name) for name in verdicts},
        }


def _listed(names: Sequence[str]) -> str:
    """Names as in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def _agrees(claimed: str, found: Agreement) -> bool:
    """Whether a comparison is as its class promises; classes that promise no equal tokens accept all."""
    if claimed == BIT_EQUAL:
        return not found.differences
    return claimed != UP_TO_NEAR_TIES or found.wrong == 0


Progress = Callable[[str, int, int], None]

DRAFTED = 5
"""num_speculative_tokens of the tests that leave no choice to a controller."""


def claimed_class(llm: LLM) -> tuple[str, str]:
    """The weakest exactness class declared by what this LLM uses, at temperature 0 and above.

    What drafters declare holds under an exact verifier, so a verifier weakens it only where it is approximate itself.
    Where a row's bits are proven not to depend on the rows beside it, near ties are decided as in plain decoding: "up
    to near ties" becomes "bit-equal".
    """
    if llm.speculative is None:
        return (BIT_EQUAL, BIT_EQUAL)
    verifier = registry.lookup("verifiers", llm.speculative.acceptance_method).exactness
    drafters = [registry.lookup("drafters", name).exactness for name in llm.drafter_methods]
    weakest = [max((pair[i] for pair in drafters), key=CLASSES.index, default=UP_TO_NEAR_TIES) for i in (0, 1)]
    declared = [APPROXIMATE if verifier[i] == APPROXIMATE else weakest[i] for i in (0, 1)]
    proven = llm.exactness.proven
    greedy, sampled = (BIT_EQUAL if proven and one == UP_TO_NEAR_TIES else one for one in declared)
    return greedy, sampled


def verify(
    llm: LLM,
    prompts: Sequence[Any],
    *,
    max_tokens: int = 64,
    temperature: float = 1.0,
    samples: int = 8,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> VerifyReport:
    """Decode every prompt plainly and accelerated and compare.

    Args:
        llm: with the speculative_config in question; plain decoding runs on the same loaded model.
        samples: outputs per prompt above temperature 0; 0 leaves that part out. Where equal tokens for equal seeds are
            claimed, all have seeds. Otherwise one more per prompt has, and the others have none, so that drafts may be
            drawn; `LLM(seed=...)` makes those repeatable.
        seed: first of the seeds, and of the test's own noise.
        progress: told (stage, done, total).
    """
    plain = llm.with_speculative_config(None)
    dtype = str(llm.runner.info.dtype).removeprefix("torch.")
    busy = drafting(llm)
    report = VerifyReport(llm.runner.info.name, claimed_class(busy or llm), dtype, len(prompts), str(llm.exactness))
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens)
    report.drafted = None if busy is None else Agreement()
    _greedy(llm, busy, plain, prompts, replace(params, temperature=0.0), report=report, progress=progress)
    if not samples or params.greedy:
        return report
    report.temperature = temperature
    _above(busy or llm, plain, prompts, replace(params, n=samples), seed, report=report, progress=progress)
    return report


def drafting(llm: LLM) -> LLM | None:
    """The same methods with DRAFTED tokens drafted in every step.

    None where their number is fixed already, or nothing is drafted. Where a profile says that drafts do not pay, the
    configuration without it is taken.
    """
    speculative = llm.speculative
    if speculative is None and llm.profile is not None:
        speculative = SpeculativeConfig.parse(DEFAULT)
    if speculative is None or speculative.num_speculative_tokens is not None:
        return None
    config, _ = split_options(speculative)
    fixed = replace(config, controller=None, num_speculative_tokens=DRAFTED, disable_by_batch_size=None)
    return llm.with_speculative_config(fixed)


def _greedy(
    llm: LLM,
    busy: LLM | None,
    plain: LLM,
    prompts: Sequence[Any],
    params: SamplingParams,
    *,
    report: VerifyReport,
    progress: Progress,
) -> None:
    """Fill the report's part at temperature 0."""
    steps = accepted = 0
    for index, prompt in enumerate(prompts):
        slow, fast = _one(plain, prompt, params), _one(llm, prompt, params)
        tokens, reference, inputs = slow.prompt_token_ids, slow.outputs[0].token_ids, inputs_of(slow)
        both = [(report.greedy, fast)]
        if busy is not None and report.drafted is not None:
            both.append((report.drafted, _one(busy, prompt, params)))
        for agreement, found in both:
            output, go_on = found.outputs[0].token_ids, plain_from(plain, tokens, params, inputs)
            agreement.add(output, differences(llm.runner, tokens, reference, output, go_on, inputs=inputs))
            report.drafted_tokens += found.metrics.num_draft_tokens
        ties = gaps(llm.runner, tokens, reference, inputs)
        report.positions += len(ties)
        report.near_ties += sum(gap < epsilon for gap, epsilon in ties)
        steps, accepted = steps + fast.metrics.num_steps, accepted + fast.metrics.num_accepted_tokens
        progress("temperature 0", index + 1, len(prompts))
    report.mean_acceptance_length = 1.0 + accepted / steps if steps else 1.0


def _above(
    llm: LLM,
    plain: LLM,
    prompts: Sequence[Any],
    params: SamplingParams,
    seed: int,
    *,
    report: VerifyReport,
    progress: Progress,
) -> None:
    """Fill the report's part above temperature 0, with params.n outputs per prompt."""
    points = report.claimed[1] in (BIT_EQUAL, UP_TO_NEAR_TIES)
    ours, theirs = _Values(llm, params, seed), _Values(plain, params, seed)
    if report.claimed[1] != APPROXIMATE:
        each = [replace(params, n=1, seed=seed + i) for i in range(params.n if points else 1)]
        report.seeded = Agreement()
        for index, prompt in enumerate(prompts):
            fast, slow = _seeded(llm, plain, prompt, each, report.seeded)
            report.drafted_tokens += sum(one.metrics.num_draft_tokens for one in fast)
            if points:
                ours.add(fast)
                theirs.add(slow)
            progress("equal seeds", index + 1, len(prompts))
    if not points:
        report.drafted_tokens += ours.sample(prompts, partial(progress, "sampling"))
        theirs.sample(prompts, partial(progress, "plain sampling"))
    report.distribution, report.plain_distribution = ours.test(), theirs.test()


def _seeded(
    llm: LLM, plain: LLM, prompt: Any, each: Sequence[SamplingParams], agreement: Agreement
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Decode one prompt with several seeds, accelerated and plainly, and compare seed by seed."""
    fast, slow = (one.generate([prompt] * len(each), list(each)) for one in (llm, plain))
    for ours, theirs, params in zip(fast, slow, each, strict=True):
        ours.raise_for_error()
        theirs.raise_for_error()
        tokens, output, inputs = theirs.prompt_token_ids, ours.outputs[0].token_ids, inputs_of(theirs)
        sampling = Sampling(params.temperature, params.seed or 0)
        go_on = plain_from(plain, tokens, params, inputs)
        reference = theirs.outputs[0].token_ids
        agreement.add(
            output, differences(llm.runner, tokens, reference, output, go_on, sampling=sampling, inputs=inputs)
        )
    return fast, slow


def plain_from(plain: LLM, prompt: Sequence[int], params: SamplingParams, inputs: Inputs = NO_INPUTS) -> Continue:
    """How plain decoding of a request goes on from the first tokens of its output.

    The noise of a seed is keyed by the position in the text, so those tokens may be in the prompt. That is not so for
    penalties, min_tokens and the like, which are not meant here.
    """

    def go_on(kept: list[int]) -> list[int]:
        limit = plain.runner.info.max_context - len(prompt)
        room = min(limit, params.max_tokens or limit) - len(kept)
        if room <= 0 or kept[-1] in plain.defaults.eos_ids:
            return []
        found = _one(plain, {"prompt_token_ids": [*prompt, *kept], "inputs": inputs}, replace(params, max_tokens=room))
        return list(found.outputs[0].token_ids)

    return go_on


def _one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (found,) = llm.generate(prompt, params)
    found.raise_for_error()
    return found


class _Values:
    """Conditional integral values of sampled outputs, collected for the test of the distribution."""

    def __init__(self, llm: LLM, params: SamplingParams, seed: int) -> None:
        import torch

        self.llm, self.params, self.noise = llm, params, torch.Generator().manual_seed(seed)
        self.parts: list[torch.Tensor] = []

    def add(self, found: Sequence[RequestOutput]) -> None:
        for one in found:
            for output in one.outputs:
                texts = one.prompt_token_ids, output.token_ids
                self.parts.append(
                    integral_values(self.llm.runner, *texts, self.params.temperature, self.noise, inputs=inputs_of(one))
                )

    def sample(self, prompts: Sequence[Any], progress: Callable[[int, int], None]) -> int:
        """Decode outputs without seeds of their own, add them, and return how many drafted tokens were verified."""
        drafted_tokens = 0
        for index, prompt in enumerate(prompts):
            found = _one(self.llm, prompt, self.params)
            drafted_tokens += found.metrics.num_draft_tokens
            self.add([found])
            progress(index + 1, len(prompts))
        return drafted_tokens

    def test(self) -> SamplingTest:
        import torch

        return uniform_test(torch.cat(self.parts))
