"""Tree policies by name: checked options that start one growing tree per sequence and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.dyspec import DySpecDraft, DySpecPoints, ThresholdDraft
from paceline.drafters.growth.levels import WIDTH, Eagle2Draft, GreedyDraft, StaticDraft, TreeDraft
from paceline.drafters.growth.sampled import BeamDraft, BranchingDraft, ChainsDraft, branching_factors
from paceline.tree import PRIOR, Shape, best_shapes, from_paths, parse_paths
from paceline.utils import need, number

if TYPE_CHECKING:
    from paceline.drafters.common.draft_state import DraftState
    from paceline.tree import Budget

MAX_WIDTH: Final = 64

PolicyName = Literal[
    "levels", "dyspec", "dyspec_threshold", "eagle2", "static", "ppd", "rsd_c", "rsd_s", "spectr", "greedy_draft"
]

SAMPLED: Final[dict[str, type[Growth]]] = {
    "rsd_c": BranchingDraft,
    "rsd_s": BeamDraft,
    "spectr": ChainsDraft,
    "greedy_draft": GreedyDraft,
}
"""Policies that say how tokens are drawn; where tokens are chosen by rank, they grow as "levels" does."""

DRAFTS: Final = 3
"""Their `tree_width` by default."""

WIDTHS: Final = " (with tree_policy 'rsd_c' also a list of them, one per level)"


@dataclass(frozen=True, slots=True)
class TreePolicy:
    """How trees grow.

    Attributes:
        name: one of POLICIES, or "chain".
        points: always chooses tokens by rank, above temperature 0 as well.
        width: children of a node and nodes expanded on a level; threshold: least v (None: 1 / nodes); shape: of static
        trees.
        factors: of "rsd_c": children of a node by level, which end with the last of them; none where every level has
        `width`.
    """

    name: str
    points: bool = False
    width: int = 1
    threshold: float | None = None
    shape: Shape | None = None
    factors: tuple[int, ...] = ()

    def start(self, state: DraftState, budget: Budget, depth: int, *, drawn: bool) -> Growth:
        """An empty tree that will grow within a budget of at least one node and level."""
        return POLICIES[self.name](self, state, budget, self._levels(depth), drawn)

    def _levels(self, depth: int) -> int:
        return min(depth, len(self.factors)) if self.factors else depth


def tree_policy(
    name: str | None, *, width: int | Sequence[int] | None, threshold: float | None, paths: object
) -> TreePolicy:
    """The policy that the options name; without a name, static trees where `paths` are given, else levels, or chains of
    width 1.

    Raises:
        ConfigError: an unknown name, a value outside its range, an option that the policy does not have.
    """
    need(
        name is None or (isinstance(name, str) and name in POLICIES),
        "tree_policy",
        f"be one of {', '.join(POLICIES)}",
        name,
    )
    width, factors = _widths(name, width)
    name = name or ("static" if paths is not None else "levels")
    need(
        width is None or name in ("levels", "eagle2", *SAMPLED),
        "tree_width",
        f"be left out with tree_policy {name!r}",
        width,
    )
    need(
        threshold is None or name == "dyspec_threshold",
        "tree_threshold",
        f"be left out with tree_policy {name!r}",
        threshold,
    )
    need(
        (paths is not None) == (name == "static"),
        "speculative_token_tree",
        'be given with tree_policy "static", and with no other',
        paths,
    )
    if name == "levels":
        return TreePolicy("chain" if width in (None, 1) else name, width=width or 1)
    if name in SAMPLED:
        return TreePolicy(name, width=width or DRAFTS, factors=factors)
    if name == "eagle2":
        return TreePolicy(name, points=True, width=width or WIDTH)
    if name == "static":
        return TreePolicy(name, points=True, shape=from_paths(parse_paths(paths, max_rank=MAX_WIDTH - 1)))
    if threshold is not None:
        number("tree_threshold", threshold, 0.0, 1.0, "be above 0 and at most 1", open_low=True)
    return TreePolicy(name, points=name == "ppd", threshold=threshold)


def _widths(name: str | None, given: object) -> tuple[int | None, tuple[int, ...]]:
    """(children of a node, the same by level where a list was given): of levels that differ, the largest."""
    factors = branching_factors(given, MAX_WIDTH) if name == "rsd_c" else ()
    width = max(factors) if factors else given
    fine = width is None or (isinstance(width, int) and not isinstance(width, bool) and 1 <= width <= MAX_WIDTH)
    listed = name == "rsd_c" or isinstance(width, list | tuple)
    need(fine, "tree_width", f"be an integer in 1..{MAX_WIDTH}{WIDTHS if listed else ''}", width)
    return cast("int | None", width), factors


def _levels(policy: TreePolicy, state: DraftState, budget: Budget, depth: int, drawn: bool) -> Growth:
    return TreeDraft(state, budget.nodes, depth, budget.go_on, drawn, width=policy.width)


def _sampled(policy: TreePolicy, state: DraftState, budget: Budget, depth: int, drawn: bool) -> Growth:
    if not drawn:
        return _levels(policy, state, budget, depth, drawn)
    form: Any = SAMPLED[policy.name]
    more = {"factors": policy.factors} if policy.factors else {}
    return form(state, budget.nodes, depth, budget.go_on, drawn, width=policy.width, **more)  # type: ignore[no-any-return]


def _dyspec(policy: TreePolicy, state: DraftState, budget: Budget, depth: int, drawn: bool) -> Growth:
    form = DySpecDraft if drawn else DySpecPoints
    return form(state, budget.nodes, depth, budget.go_on, drawn)


def _threshold(policy: TreePolicy, state: DraftState, budget: Budget, depth: int, drawn: bool) -> Growth:
    return ThresholdDraft(state, budget.nodes, depth, budget.go_on, drawn, threshold=_least(policy, budget))


def _least(policy: TreePolicy, budget: Budget) -> float:
    return 1.0 / budget.nodes if policy.threshold is None else policy.threshold


def _eagle2(policy: TreePolicy, state: DraftState, budget: Budget, depth: int, drawn: bool) -> Growth:
    return Eagle2Draft(state, budget.nodes, depth, budget.go_on, width=policy.width)


def _static(policy: TreePolicy, state: DraftState, budget: Budget, depth: int, drawn: bool) -> Growth:
    return StaticDraft(state, budget.nodes, depth, budget.go_on, shape=_shape_of(policy, budget))


def _shape_of(policy: TreePolicy, budget: Budget) -> Shape:
    """A given shape, or (ppd) the controller's, or what is best before anything was learned."""
    return policy.shape or budget.shape or _unlearned(budget.nodes)


@lru_cache(maxsize=64)
def _unlearned(nodes: int) -> Shape:
    return best_shapes(PRIOR, nodes)


POLICIES: Final[dict[str, Callable[[TreePolicy, Any, Any, int, bool], Growth]]] = {
    "levels": _levels,
    "dyspec": _dyspec,
    "dyspec_threshold": _threshold,
    "eagle2": _eagle2,
    "static": _static,
    "ppd": _static,
    **dict.fromkeys(SAMPLED, _sampled),
}
