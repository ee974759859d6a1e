"""Tree policies by name: checked options that start one growing tree per sequence and step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Literal, cast, get_args

from paceline.drafters.growth.base import Growth
from paceline.drafters.growth.dyspec import DySpecDraft, DySpecPoints, ThresholdDraft
from paceline.drafters.growth.levels import EAGLE2_WIDTH, Eagle2Draft, GreedyDraft, StaticDraft, TreeDraft
from paceline.drafters.growth.sampled import BeamDraft, BranchingDraft, ChainsDraft
from paceline.tree import PRIOR, Shape, best_shapes, from_paths, parse_paths
from paceline.utils import need, number

if TYPE_CHECKING:
    from paceline.drafters.growth.base import HasContext
    from paceline.tree import Budget

MAX_WIDTH: Final = 64

PolicyName = Literal[
    "levels", "dyspec", "dyspec_threshold", "eagle2", "static", "ppd", "rsd_c", "rsd_s", "spectr", "greedy_draft"
]
POLICIES: Final[tuple[str, ...]] = get_args(PolicyName)

SAMPLED: Final[Mapping[str, Any]] = {
    "rsd_c": BranchingDraft,
    "rsd_s": BeamDraft,
    "spectr": ChainsDraft,
    "greedy_draft": GreedyDraft,
}
"""Policies that say how tokens are drawn; where tokens are chosen by rank, they grow as "levels" does."""

SAMPLED_WIDTH: Final = 3
"""Their `tree_width` by default."""


@dataclass(frozen=True, slots=True)
class TreePolicy:
    """Says how trees grow, and starts them.

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

    def start(self, state: HasContext, budget: Budget, depth: int, *, drawn: bool) -> Growth:
        """An empty tree that will grow within a budget of at least one node and level."""
        levels = min(depth, len(self.factors)) if self.factors else depth
        limits = state, budget.nodes, levels, budget.go_on
        if self.name == "dyspec":
            return (DySpecDraft if drawn else DySpecPoints)(*limits, drawn)
        if self.name == "dyspec_threshold":
            least = 1.0 / budget.nodes if self.threshold is None else self.threshold
            return ThresholdDraft(*limits, drawn, threshold=least)
        if self.name == "eagle2":
            return Eagle2Draft(*limits, width=self.width)
        if self.name in ("static", "ppd"):  # the given shape, the controller's, or the best before anything was learned
            return StaticDraft(*limits, shape=self.shape or budget.shape or _unlearned(budget.nodes, levels))
        kind: Any = SAMPLED.get(self.name, TreeDraft) if drawn else TreeDraft
        more = {"factors": self.factors} if kind is BranchingDraft else {}
        growth: Growth = kind(*limits, drawn, width=self.width, **more)
        return growth


def tree_policy(
    name: str | None, *, width: int | Sequence[int] | None, threshold: float | None, paths: object
) -> TreePolicy:
    """Make the policy that the options name.

    Without a name, static trees where `paths` are given, else levels, or chains of width 1.

    Raises:
        ConfigError: an unknown name, a value outside its range, an option that the policy does not have.
    """
    known = name is None or (isinstance(name, str) and name in POLICIES)
    need(known, "tree_policy", f"be one of {', '.join(POLICIES)}", name)
    factors = _factors(width) if name == "rsd_c" else ()
    most = max(factors) if factors else _width(name, width)
    name = name or ("static" if paths is not None else "levels")
    left_out = f"be left out with tree_policy {name!r}"
    need(most is None or name in ("levels", "eagle2", *SAMPLED), "tree_width", left_out, most)
    need(threshold is None or name == "dyspec_threshold", "tree_threshold", left_out, threshold)
    rule = 'be given with tree_policy "static", and with no other'
    need((paths is not None) == (name == "static"), "speculative_token_tree", rule, paths)
    if threshold is not None:
        number("tree_threshold", threshold, 0.0, 1.0, "be above 0 and at most 1", open_low=True)
    if name == "levels":
        return TreePolicy("chain" if most in (None, 1) else name, width=most or 1)
    if name in SAMPLED:
        return TreePolicy(name, width=most or SAMPLED_WIDTH, factors=factors)
    if name == "eagle2":
        return TreePolicy(name, points=True, width=most or EAGLE2_WIDTH)
    if name == "static":
        return TreePolicy(name, points=True, shape=from_paths(parse_paths(paths, max_rank=MAX_WIDTH - 1)))
    return TreePolicy(name, points=name == "ppd", threshold=threshold)


def _width(name: str | None, width: object) -> int | None:
    """Children of a node, where one number was given."""
    fine = width is None or (isinstance(width, int) and not isinstance(width, bool) and 1 <= width <= MAX_WIDTH)
    listed = name == "rsd_c" or isinstance(width, list | tuple)
    more = " (with tree_policy 'rsd_c' also a list of them, one per level)" if listed else ""
    need(fine, "tree_width", f"be an integer in 1..{MAX_WIDTH}{more}", width)
    return cast("int | None", width)


def _factors(widths: object) -> tuple[int, ...]:
    """Children of a node by level, where a list was given."""
    if isinstance(widths, str) or not isinstance(widths, Sequence):
        return ()
    whole = all(isinstance(width, int) and not isinstance(width, bool) and 1 <= width <= MAX_WIDTH for width in widths)
    rule = f"be a list of 1..{MAX_WIDTH} integers in 1..{MAX_WIDTH}, one per level"
    need(whole and 1 <= len(widths) <= MAX_WIDTH, "tree_width", rule, widths)
    return tuple(widths)


@lru_cache(maxsize=64)
def _unlearned(nodes: int, depth: int) -> Shape:
    return best_shapes(PRIOR, nodes, max_depth=depth)
