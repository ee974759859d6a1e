"""A static tree as one HTML page: the drawing that replays have, the raced sizes, and the chances behind them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from paceline.explain import embedded, rendered

if TYPE_CHECKING:
    from paceline.tune.static_trees import StaticTree, TreeTuning

TREE_MARK: Final = '<meta name="generator" content="paceline tune --tree">'
"""Stands in every page, so that one may be told from a file that is something else."""

ROOT: Final = "root"
"""Key of the text before the tree, beside ranks, which are the keys of its nodes."""


class PageTable(NamedTuple):
    """A table of texts, as the page shows it."""

    head: Sequence[str]
    rows: list[Sequence[str]]


def tree_html(tuning: TreeTuning) -> str:
    """The page. It takes a theme from its address (`?theme=dark`, `?theme=light`), else from the system."""
    from markupsafe import Markup

    race = tuning.tuning
    return rendered(
        Path(__file__).with_name("static_tree.html"),
        TREE_MARK,
        title="Static tree",
        setup=f"{tuning.drafter['method']} for {race.model}, {race.dtype} on {race.device}, {race.threads} threads",
        sizes=_sizes(tuning),
        chances=_chances(tuning),
        config=json.dumps(tuning.speculative_config),
        data=Markup(embedded(_step(tuning.best, tuning.chances))),
    )


def _step(tree: StaticTree, chances: list[list[float]]) -> dict[str, Any]:
    """The tree as a step of a replay whose tokens are ranks."""
    columns = tree.shape.parents_n.tolist(), tree.shape.ranks_n.tolist(), tree.shape.depths_n.tolist()
    nodes = [
        {
            "token": rank, "parent": parent, "depth": depth, "source": 0, "status": "scored",
            "p": chances[depth - 1][rank], "confidence": reach,
        }
        for parent, rank, depth, reach in zip(*columns, tree.shape.reach_n.tolist(), strict=True)
    ]  # fmt: skip
    return {"root": ROOT, "nodes": nodes, "next": None, "drafters": [None]}


def _sizes(tuning: TreeTuning) -> PageTable:
    head = (
        "nodes", "levels", "tokens a pass, expected", "found", "times plain decoding, expected", "found", "paired runs"
    )  # fmt: skip
    rows: list[Sequence[str]] = [
        (str(len(tree.shape)), str(tree.levels), f"{tree.expected_tokens:.2f}", _figure(tree.tokens_per_pass),
         f"{tree.expected_gain:.2f}", _figure(tree.gain), str(tree.pairs))
        for tree in tuning.trees
    ]  # fmt: skip
    return PageTable(head, rows)


def _chances(tuning: TreeTuning) -> PageTable:
    rows: list[Sequence[str]] = [
        (str(depth), *(f"{chance:.3f}" for chance in row)) for depth, row in enumerate(tuning.chances, start=1)
    ]
    return PageTable(("level", *(f"rank {rank}" for rank in range(len(tuning.chances[0])))), rows)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
