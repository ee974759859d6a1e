"""How often a draft is accepted under each rule of verification, against the most that any exact rule could accept.

Acceptance is the chance that the next token is among the drafts of one place, worked out from p and q, not counted.
Only recursive rejection without replacement is sampled where the drafts are too many to go through: the first drafts
are drawn as they fail, the chance of the last is exact. Tokens per pass take places to be alike and independent.

Sources: arXiv:2211.17192, 2402.14160, 2310.15141, 2502.18779, 2401.10774, 2403.10444. Axes: t = places, v = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.bench.acceptance.optimum import greedy_draft_acceptance, optimal_acceptance
from paceline.errors import ConfigError, NumericsError
from paceline.utils import need

if TYPE_CHECKING:
    from paceline.models import Runner

Array = npt.NDArray[np.float64]
Rule = Callable[[Array, Array, int], float]

WITH: Final = "optimum with replacement"
WITHOUT: Final = "optimum without replacement"
BLOCK: Final = "block_verification (chain)"
ENUMERATED: Final = 5000
"""Most sequences of failed drafts that are gone through; beyond, SAMPLES are drawn."""

SAMPLES: Final = 64
CHAINS: Final = 4000
"""Chains drawn to see how many tokens block verification accepts."""

EPSILON: Final = 0.09
DELTA: Final = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Holds what each rule of verification accepts, by drafts and by nodes.

    Attributes:
        positions: places that the means are over.
        drafts: numbers of drafts at one position; acceptance: rule -> chance that one of them is accepted, for each.
        budgets: nodes of a tree; tokens: rule -> tokens per pass, the target's own included, of the best tree whose
            places all have one of the numbers of drafts.
    """

    positions: int
    drafts: tuple[int, ...]
    acceptance: dict[str, list[float]]
    budgets: tuple[int, ...]
    tokens: dict[str, list[float]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def with_replacement(p: Array, q: Array, drafts: int) -> float:
    """Compute what recursive rejection accepts of independent drafts."""
    r, failed = p, 1.0
    for _ in range(drafts):
        failed *= 1.0 - float(np.minimum(r, q).sum())
        r = _left(r, q)
    return 1.0 - failed


def without_replacement(p: Array, q: Array, drafts: int) -> float:
    """Recursive rejection of drafts drawn without replacement; see the module for when it is sampled."""
    return 1.0 - float(failures(p, q, drafts, np.random.default_rng(0)).mean())


def failures(p: Array, q: Array, drafts: int, rng: np.random.Generator) -> Array:
    """Chance that no draft without replacement is accepted: (1,) exact, or (SAMPLES,) values whose mean it is."""
    if math.prod([int(np.count_nonzero(q))] * (drafts - 1)) <= ENUMERATED:
        return np.array([_all_fail(p, q, drafts)])
    return np.array([_sampled_fail(p, q, drafts, rng) for _ in range(SAMPLES)])


def _all_fail(r: Array, q: Array, drafts: int) -> float:
    """Chance that none of the drafts from q is accepted, when r is left of the target."""
    if drafts == 1:
        return max(1.0 - float(np.minimum(r, q).sum()), 0.0)
    after, failing = _left(r, q), np.maximum(q - r, 0.0)
    return sum(
        (float(failing[x]) * _all_fail(after, _removed(q, x), drafts - 1) for x in np.flatnonzero(failing).tolist()),
        0.0,
    )


def _sampled_fail(r: Array, q: Array, drafts: int, rng: np.random.Generator) -> float:
    failed = 1.0
    for left in range(drafts, 0, -1):
        failing = np.maximum(q - r, 0.0)
        failed *= (mass := float(failing.sum()))
        if left == 1 or not mass > 0.0:
            break
        token = int(rng.choice(len(q), p=failing / mass))
        r, q = _left(r, q), _removed(q, token)
    return failed


def _left(r: Array, q: Array) -> Array:
    rest = np.maximum(r - q, 0.0)
    mass = rest.sum()
    return np.asarray(rest / mass) if mass > 0 else r


def _removed(q: Array, token: int) -> Array:
    rest = q.copy()
    rest[token] = 0.0
    mass = rest.sum()
    return np.asarray(rest / mass) if mass > 0 else rest


def k_seq(p: Array, q: Array, drafts: int) -> float:
    """Compute what SpecTr's rule accepts with its best gamma."""
    import torch

    from paceline.verifiers import plan_k_seq

    return plan_k_seq(torch.from_numpy(p), torch.from_numpy(q), drafts).accepted


def likeliest(p: Array, q: Array, drafts: int) -> float:
    """The likeliest tokens of q as points."""
    return float(p[np.argsort(-q, kind="stable")[:drafts]].sum())


def typical(p: Array, q: Array, drafts: int) -> float:
    """Medusa's rule on independent drafts, at its usual thresholds; not exact, and under no bound."""
    entropy = -float((p[p > 0] * np.log(p[p > 0])).sum())
    stands = float(q[p > min(EPSILON, DELTA * math.exp(-entropy))].sum())
    return 1.0 - (1.0 - min(stands, 1.0)) ** drafts


RULES: Final[Mapping[str, Rule]] = {
    "rejection_sampler, with replacement": with_replacement,
    "rejection_sampler, without replacement": without_replacement,
    "k_seq": k_seq,
    "greedy_draft_sampling": greedy_draft_acceptance,
    "likeliest tokens as points": likeliest,
    "typical_acceptance_sampler (approximate)": typical,
    WITH: lambda p, q, drafts: optimal_acceptance(p, q, drafts, replacement=True),
    WITHOUT: lambda p, q, drafts: optimal_acceptance(p, q, drafts, replacement=False),
}
"""Name -> chance that one of the drafts is accepted, from (v,) p, (v,) q and their number."""


def analyze_acceptance(p_tv: Array, q_tv: Array, drafts: Sequence[int], budgets: Sequence[int]) -> Analysis:
    """Compute what every rule accepts, on average over all places.

    Args:
        p_tv, q_tv: (t, v) probabilities of target and drafter.
    Raises:
        ConfigError: rows that are no probabilities, or of different shapes.
    """
    p_tv, q_tv = probabilities("p", p_tv), probabilities("q", q_tv)
    if p_tv.shape != q_tv.shape:
        (a, b), (c, d) = p_tv.shape, q_tv.shape
        raise ConfigError(f"p and q must have as many rows of as many probabilities, got {a} of {b} and {c} of {d}")
    rows = list(zip(p_tv, q_tv, strict=True))
    acceptance = {
        name: [fmean(rule(p, q, number) for p, q in rows) for number in drafts] for name, rule in RULES.items()
    }
    single = fmean(float(np.minimum(p, q).sum()) for p, q in rows)
    tokens = {
        name: [tokens_within(dict(zip(drafts, shares, strict=True)), nodes) for nodes in budgets]
        for name, shares in acceptance.items()
    }
    tokens["one chain, token by token"] = [tokens_within({1: single}, nodes) for nodes in budgets]
    tokens[BLOCK] = block_tokens(p_tv, q_tv, budgets)
    return Analysis(
        positions=len(rows), drafts=tuple(drafts), acceptance=acceptance, budgets=tuple(budgets), tokens=tokens
    )


def probabilities(name: str, value: Any) -> Array:
    """(t, v) rows that sum to 1, from one row or several.

    Raises:
        ConfigError: something else.
    """
    rows = np.atleast_2d(np.asarray(value, np.float64))
    if rows.ndim != 2 or not rows.size:
        got = "no numbers" if not rows.size else f"lists within lists, {rows.ndim} deep"
        raise ConfigError(f"{name} must be one row of probabilities, or a list of rows, got {got}")
    sums = rows.sum(1)
    wrong = rows[~(np.isfinite(rows) & (rows >= 0))]
    need(not wrong.size, name, "hold probabilities of 0 or more", float(wrong[0]) if wrong.size else None)
    need(bool((abs(sums - 1.0) < 1e-3).all()), name, "have rows that sum to 1", float(sums[abs(sums - 1.0).argmax()]))
    return np.asarray(rows / sums[:, None])


def tokens_within(acceptance: Mapping[int, float], nodes: int) -> float:
    """Tokens per pass of the best tree of at most `nodes` nodes, every inner node with the same number of drafts."""
    best = 1.0
    for drafts, chance in acceptance.items():
        used = depth = 0
        while used + drafts ** (depth + 1) <= nodes:
            depth += 1
            used += drafts**depth
        best = max(best, sum(chance**level for level in range(depth + 1)))
    return best


def block_tokens(p_tv: Array, q_tv: Array, budgets: Sequence[int]) -> list[float]:
    """Tokens per pass of block verification for chains of these lengths, from chains drawn over random places."""
    rng = np.random.default_rng(0)
    places = rng.integers(len(p_tv), size=(CHAINS, max(budgets)))
    ratios = np.empty(places.shape)
    for place in range(len(p_tv)):
        where = places == place
        tokens = rng.choice(q_tv.shape[1], size=int(where.sum()), p=q_tv[place])
        ratios[where] = p_tv[place, tokens] / q_tv[place, tokens]
    reach, reached = np.ones(CHAINS), [1.0]
    for ratio in ratios.T:
        reach = np.minimum(1.0, reach * ratio)
        reached.append(float(reach.mean()))
    return [sum(reached[: length + 1]) for length in budgets]


def rows_of(runner: Runner, tokens: Sequence[int], positions: int, temperature: float, vocab_size: int) -> Array:
    """(t, v) a model's probabilities of the next token after each of the last `positions` tokens of a text.

    Args:
        vocab_size: of the target; columns beyond are cut, missing ones are 0.
    Raises:
        NumericsError: a row of logits from which nothing can be drawn.
    """
    import torch

    from paceline.verifiers import bad_row

    cache = runner.open()
    try:
        logits = runner.extend([cache], [list(tokens)], all_logits=True).logits[-positions:].double()
    finally:
        runner.release(cache)
    logits = logits[:, :vocab_size]
    for largest in logits.amax(-1).tolist():
        if not math.isfinite(largest):
            raise NumericsError(f"{runner.info.name}: {bad_row(largest, 0)}")
    logits = torch.nn.functional.pad(logits, (0, vocab_size - logits.shape[1]), value=float("-inf"))
    return np.asarray(torch.softmax(logits / temperature, -1).cpu().numpy())


REJECTION_WITH: Final = "rejection_sampler, with replacement"
REJECTION_WITHOUT: Final = "rejection_sampler, without replacement"
BOUNDS: Final[Mapping[str, str]] = {REJECTION_WITH: WITH, "k_seq": WITH, REJECTION_WITHOUT: WITHOUT, WITH: WITHOUT}
"""Rule -> what it cannot pass. Greedy drafts and points are not drawn in these ways; the relaxed rule has no bound."""

ROUNDING: Final = 1e-7
SIGMAS: Final = 4.0
"""Standard errors by which a sampled mean may be beyond its bound."""


def violations(acceptance: Mapping[str, Array], errors: Mapping[str, Array] | None = None) -> list[str]:
    """Contradictions, if these are the acceptance rates of one number of drafts.

    Args:
        acceptance: rule -> (t,) chance that a draft is accepted.
        errors: rule -> (t,) standard errors, of those that were sampled; these are judged by their mean, others at
            every place.
    """
    errors = errors or {}
    broken = [_beyond(rule, bound, acceptance, errors) for rule, bound in BOUNDS.items() if rule in acceptance]
    weaker = {"k_seq, as a share of the optimum": (1.0 - 1.0 / math.e) * acceptance[WITH], "k_seq": acceptance["k_seq"]}
    broken.append(_beyond("k_seq, as a share of the optimum", "k_seq", weaker, {}))
    means = {REJECTION_WITH: acceptance[REJECTION_WITH].mean(keepdims=True)}
    means[REJECTION_WITHOUT] = acceptance[REJECTION_WITHOUT].mean(keepdims=True) + SIGMAS * _error(
        errors.get(REJECTION_WITHOUT)
    )
    broken.append(_beyond(REJECTION_WITH, REJECTION_WITHOUT, means, {}))
    return [text for text in broken if text]


def _error(of_t: Array | None) -> float:
    """Standard error of the mean over places."""
    return 0.0 if of_t is None else float(np.sqrt(np.square(of_t).sum()) / len(of_t))


def _beyond(rule: str, bound: str, acceptance: Mapping[str, Array], errors: Mapping[str, Array]) -> str:
    """A sentence where a rule is beyond its bound, else nothing."""
    excess_t = acceptance[rule] - acceptance[bound]
    margin = ROUNDING
    if rule in errors and errors[rule].any():
        excess_t, margin = excess_t.mean(keepdims=True), ROUNDING + SIGMAS * _error(errors[rule])
    worst = int(excess_t.argmax())
    if not excess_t[worst] > margin:
        return ""
    where = f"at place {worst}" if len(excess_t) > 1 else "in the mean"
    return f"{rule} is above {bound} by {excess_t[worst]:.3g} {where}"
