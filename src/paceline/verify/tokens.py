"""Are two outputs the same? Where they differ first, whether at a near tie, and what a setting's class allows.

claimed                     at temperature 0, and above it with a seed
bit-equal                   every token equal
bit-equal up to near ties   equal, or different first where both tokens are within rounding of the best (above
                            temperature 0, of the best after the seed's noise)
equal in distribution       other tokens of the same distribution: not compared, no seed is given; `paceline
                            verify` tests the distribution
approximate                 compared and counted; any difference is allowed and the label says so
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from paceline.config import GREEDY_EPSILON
from paceline.engine import RequestOutput
from paceline.models import NO_INPUTS, EncodesInputs, Inputs, Runner
from paceline.sampling import KeyedDraws, draw_seed

if TYPE_CHECKING:
    import torch

CHUNK = 256


Continue = Callable[[list[int]], Sequence[int]]
"""From the first tokens of an output: what plain decoding writes after them; nothing where the output ends with
them.
"""


@dataclass(frozen=True, slots=True)
class Difference:
    """A position at which two outputs differ.

    Attributes:
        position: index into the output.
        plain, fast: the tokens there; None where an output ended before.
        gap: best score minus second best, of the model at that position.
        epsilon: gaps below it count as near ties.
        near_tie: whether both tokens' scores lie within epsilon of the best.
    """

    position: int
    plain: int | None
    fast: int | None
    gap: float
    epsilon: float
    near_tie: bool


@dataclass(slots=True)
class Agreement:
    """Accelerated outputs compared with plain ones.

    Attributes:
        outputs, tokens: how many were compared; tokens are those of the accelerated outputs.
        identical: outputs without a difference.
        differences: output index -> all its differences, for the others; none is looked for after one that is no near
            tie.
    """

    outputs: int = 0
    tokens: int = 0
    identical: int = 0
    differences: dict[int, list[Difference]] = field(default_factory=dict)

    def add(self, tokens: Sequence[int], found: list[Difference]) -> None:
        """Count one more accelerated output and its differences."""
        if found:
            self.differences[self.outputs] = found
        self.identical += not found
        self.outputs += 1
        self.tokens += len(tokens)

    @property
    def near_ties(self) -> int:
        """Differences at near ties, of all outputs."""
        return sum(d.near_tie for found in self.differences.values() for d in found)

    @property
    def wrong(self) -> int:
        """Outputs that differ somewhere else than at a near tie."""
        return sum(not all(d.near_tie for d in found) for found in self.differences.values())

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        rows = [{"output": index, **asdict(d)} for index, found in self.differences.items() for d in found]
        counts = {name: getattr(self, name) for name in ("outputs", "tokens", "identical", "near_ties", "wrong")}
        return counts | {"differences": rows}


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens were chosen above temperature 0, without other rules: enough to score them again with the same noise.

    Attributes:
        seed: of the request. index: of the output in the request.
    """

    temperature: float
    seed: int
    index: int = 0

    def scores(self, row_v: torch.Tensor, position: int) -> torch.Tensor:
        """(v,) float32 perturbed scores, of which sampling takes the best, from float32 logits after `position` tokens
        of text.
        """
        draws = KeyedDraws(draw_seed(self.seed, self.index), position)
        return row_v / self.temperature + draws.noise(0, row_v)


TIE_UNITS = 2.0
"""Units in the last place of the best logit within which two logits count as tied: one of rounding for each of them."""


def epsilon_of(dtype: torch.dtype, top_logit: float, units: float = TIE_UNITS) -> float:
    """What rounding may change of a difference of logits: `units` times dtype's epsilon times the best logit, at least
    1e-3.

    Another engine sums in another order at every layer, not only in a few; compare with it at more units.
    """
    import torch

    return max(1e-3, units * torch.finfo(dtype).eps * abs(top_logit))


def inputs_of(output: RequestOutput) -> Inputs:
    """What was read beside the prompt of an output: the source, where an encoder has read a text."""
    return Inputs(encoder_tokens=output.encoder_prompt_token_ids or ())


def rescore(
    runner: Runner, tokens: Sequence[int], inputs: Inputs = NO_INPUTS, *, prompt_length: int = 0
) -> torch.Tensor:
    """(t, v) float32 logits after each of the given tokens, from one fresh prefill.

    Args:
        prompt_length: tokens of the prompt, behind which some runners leave out a part of their passes.
        inputs: what the text has beside its tokens; the logits of an encoder-decoder model depend on its source.
    """
    import torch

    cache = runner.open(prompt_length, inputs)
    try:
        if inputs and isinstance(runner, EncodesInputs) and runner.rows_to_encode(cache):
            runner.encode([cache])
        parts = [
            runner.extend([cache], [list(tokens[start : start + CHUNK])], all_logits=True).logits.float()
            for start in range(0, len(tokens), CHUNK)
        ]
        return torch.cat(parts)
    finally:
        runner.release(cache)


def gaps(
    runner: Runner, prompt: Sequence[int], output: Sequence[int], inputs: Inputs = NO_INPUTS
) -> list[tuple[float, float]]:
    """Per output token: the gap between the two best logits there, and the epsilon of a near tie."""
    logits = rescore(runner, [*prompt, *output][:-1], inputs, prompt_length=len(prompt))[len(prompt) - 1 :]
    best = logits.topk(2, dim=-1).values
    return [(first - second, epsilon_of(runner.info.dtype, first, TIE_UNITS)) for first, second in best.tolist()]


def first_difference(
    runner: Runner,
    prompt: Sequence[int],
    plain: Sequence[int],
    fast: Sequence[int],
    units: float = TIE_UNITS,
    *,
    sampling: Sampling | None = None,
    inputs: Inputs = NO_INPUTS,
) -> Difference | None:
    """The first difference of two outputs of one prompt with these inputs, or None; without `sampling`, of outputs at
    temperature 0.
    """
    if list(plain) == list(fast):
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(plain, fast, strict=False)) if a != b), min(len(plain), len(fast))
    )
    here = [tokens[position] if position < len(tokens) else None for tokens in (plain, fast)]
    row_v = rescore(runner, [*prompt, *plain[:position]], inputs, prompt_length=len(prompt))[-1]
    largest = max([float(row_v.max()), *(abs(float(row_v[token])) for token in here if token is not None)], key=abs)
    epsilon = epsilon_of(runner.info.dtype, largest, units)
    if sampling is not None:
        row_v, epsilon = sampling.scores(row_v, len(prompt) + position), epsilon / min(1.0, sampling.temperature)
    best, second = row_v.topk(2).values.tolist()
    near_tie = all(token is not None and best - float(row_v[token]) < epsilon for token in here)
    return Difference(position, here[0], here[1], best - second, epsilon, near_tie)


def differences(
    runner: Runner,
    prompt: Sequence[int],
    plain: Sequence[int],
    fast: Sequence[int],
    go_on: Continue,
    *,
    sampling: Sampling | None = None,
    inputs: Inputs = NO_INPUTS,
) -> list[Difference]:
    """All differences of an accelerated output.

    After a near tie, from what plain decoding makes of the text up to there.

    Args:
        go_on: plain decoding of the same request from the first tokens of its output.
        sampling: seed and temperature of both outputs; None for temperature 0.
        inputs: what their prompt has beside its tokens.
    Returns:
        Differences by position; the last one may be no near tie, and nothing is compared after it.
    """
    found: list[Difference] = []
    reference = list(plain)
    compared = partial(first_difference, runner, prompt, fast=fast, sampling=sampling, inputs=inputs)
    while (difference := compared(plain=reference)) is not None:
        found.append(difference)
        if not difference.near_tie:
            break
        kept = list(fast[: difference.position + 1])
        reference = [*kept, *go_on(kept)]
    return found


CLASSES = ("bit-equal", "bit-equal up to near ties", "equal in distribution", "approximate")
BIT_EQUAL, UP_TO_NEAR_TIES, IN_DISTRIBUTION, APPROXIMATE = CLASSES
LABELS = {
    BIT_EQUAL: "tokens compared, all must be equal",
    UP_TO_NEAR_TIES: "tokens compared, near ties allowed",
    IN_DISTRIBUTION: "equal in distribution: tokens differ by nature and are not compared",
    APPROXIMATE: "approximate by its own claim: differences are allowed",
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two outputs of one prompt.

    Attributes:
        seed: of the request, for temperatures above 0.
    """

    prompt: str
    turn: int
    repeat: int
    prompt_ids: Sequence[int]
    base: Sequence[int]
    other: Sequence[int]
    seed: int = 0


@dataclass(slots=True)
class Equality:
    """What the comparison found; `to_dict` is its entry in the document."""

    claimed: str
    compared: int = 0
    identical: int = 0
    near_ties: int = 0
    differences: list[dict[str, Any]] = field(default_factory=list)

    @property
    def different(self) -> int:
        """Outputs that differ first elsewhere than at a near tie."""
        return self.compared - self.identical - self.near_ties

    @property
    def allowed(self) -> bool:
        """Whether all differences stay within the claim."""
        if self.claimed in (IN_DISTRIBUTION, APPROXIMATE):
            return True
        return not self.different and (self.claimed != BIT_EQUAL or not self.near_ties)

    @property
    def reason(self) -> str | None:
        """Why speeds must not be compared, naming the first difference."""
        if self.allowed:
            return None
        first = next(d for d in self.differences if self.claimed == BIT_EQUAL or not d["near_tie"])
        count = self.different + (self.near_ties if self.claimed == BIT_EQUAL else 0)
        where = f"prompt {first['prompt']!r}, turn {first['turn'] + 1}, token {first['position']}"
        tokens = f"{first['baseline_token']} against {first['token']}, {first['gap']:.3g} from the best"
        return (
            f"{count} of {self.compared} outputs differ beyond the claim {self.claimed!r}, first at {where} ({tokens})"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        mode = {IN_DISTRIBUTION: "distribution", APPROXIMATE: "approximate"}.get(self.claimed, "tokens")
        return {
            "mode": mode,
            "compared": self.compared,
            "identical": self.identical,
            "near_ties": self.near_ties,
            "different": self.different,
            "allowed": self.allowed,
            "label": LABELS.get(self.claimed, self.claimed),
            "differences": self.differences,
        }


def baseline_pairs(outputs: int) -> dict[str, Any]:
    """The entry of the baseline itself."""
    counts = {"compared": outputs, "identical": outputs, "near_ties": 0, "different": 0}
    return {"mode": "baseline", **counts, "allowed": True, "label": "what others are compared with", "differences": []}


def compare_pairs(
    runner: Runner, pairs: Iterable[Pair], claimed: str, temperature: float, units: float = TIE_UNITS
) -> Equality:
    """Compare outputs; each distinct pair is judged once.

    Args:
        claimed: exactness class at this temperature.
        units: of rounding that a near tie may be wide (see `epsilon_of`); more for another engine.
    """
    found = Equality(claimed)
    if claimed == IN_DISTRIBUTION:
        return found
    known: dict[tuple[Any, ...], Difference | None] = {}
    for pair in pairs:
        key = (tuple(pair.prompt_ids), tuple(pair.base), tuple(pair.other), pair.seed)
        if key not in known:
            known[key] = difference(runner, pair, temperature, units)
        one = known[key]
        found.compared += 1
        if one is None:
            found.identical += 1
            continue
        found.near_ties += one.near_tie
        found.differences.append(
            {
                "prompt": pair.prompt,
                "turn": pair.turn,
                "repeat": pair.repeat,
                "position": one.position,
                "baseline_token": one.plain,
                "token": one.fast,
                "gap": one.gap,
                "epsilon": one.epsilon,
                "near_tie": one.near_tie,
            }
        )
    return found


def difference(runner: Runner, pair: Pair, temperature: float, units: float = TIE_UNITS) -> Difference | None:
    """The first difference of two outputs, or None.

    Above temperature 0, near ties are those of logits with the seed's noise.
    """
    sampling = None if temperature < GREEDY_EPSILON else Sampling(temperature, pair.seed)
    return first_difference(runner, pair.prompt_ids, pair.base, pair.other, units, sampling=sampling)
