"""One recorded step of one sequence as plain data: the tree, what became of each node, who was asked for what.

In: a StepRecord, what was heard of the budgets. Out: a step in the layout of `bench.replay`. Not here: the run, any
text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from paceline.engine import StepRecord
from paceline.errors import NumericsError
from paceline.tree import PROBE, ROOT, Budget, TokenTree, Verdict, always_go_on
from paceline.verifiers import proposal

Data = dict[str, Any]
LIKELIEST = 3
"""How many of the target's own best tokens are kept where the accepted path ends."""


@dataclass(slots=True)
class Heard:
    """What a controller granted one drafter in one step.

    Attributes:
        nodes, depth: the budget.
        stop: the level before which the controller stopped the drafter, or None.
    """

    nodes: int
    depth: int
    stop: int | None = None

    def to(self, budget: Budget) -> Budget:
        """The same budget, whose `go_on` is heard."""
        if budget.go_on is always_go_on:
            return budget

        def go_on(depth: int, confidence: float, features: object) -> bool:
            if budget.go_on(depth, confidence, features):
                return True
            self.stop = depth
            return False

        return replace(budget, go_on=go_on)


def plain_step(record: StepRecord, index: int, heard: Mapping[int, Heard], words: str) -> tuple[Data, list[Data]]:
    """Sequence `index` of a step, and the tokens that it committed (without their text).

    Args:
        heard: by drafter.
        words: the controller's decision.
    """
    verdict, sequence = record.verdicts[index], record.sequences[index]
    failed = isinstance(verdict, NumericsError)
    stands = Verdict((), (), None) if isinstance(verdict, NumericsError) else verdict
    kept = len(sequence.context.tokens) - record.lengths[index]
    room = sequence.remaining + kept - 1  # levels that the sequence could still use
    log_rv = _log_probabilities(record, index, kept)
    where = places(record.proposed[index], record.trees[index])
    status = _statuses(record.trees[index], stands, kept, failed)
    nodes = _nodes(record.proposed[index], where, status, log_rv)
    own = _own_token(stands, log_rv)
    at = {place: node for node, place in enumerate(where) if place is not None}
    tokens = [_committed(nodes[at[node]]) for node in stands.path]
    tokens += [{"token": own["token"], "source": None, "p": own["p"]}] if own else []
    end_v = log_rv[stands.path[-1] + 1 if stands.path else 0].exp()
    best = torch.topk(end_v, min(LIKELIEST, len(end_v)))
    step = {
        "count": kept,
        "root": record.roots[index],
        "nodes": nodes,
        "next": own,
        "top": [
            {"token": t, "p": rounded(p)} for p, t in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ],
        "drafters": [_drafter(heard.get(i), i, nodes, seconds, room) for i, seconds in enumerate(record.draft_seconds)],
        "words": words,
        "seconds": {name: value for name, value in record.times.to_dict().items() if name != "prefill"},
        "error": str(verdict) if failed else None,
    }
    return step, tokens[:kept]


def places(proposed: TokenTree, chosen: TokenTree) -> list[int | None]:
    """For every node of a tree its index in what selection left of it, or None."""
    at = {key: node for node, key in enumerate(zip(chosen.parents.tolist(), chosen.tokens.tolist(), strict=True))}
    where: list[int | None] = []
    for parent, token in zip(proposed.parents.tolist(), proposed.tokens.tolist(), strict=True):
        above = ROOT if parent < 0 else where[parent]
        where.append(None if above is None else at.get((above, token)))
    return where


def _log_probabilities(record: StepRecord, index: int, kept: int) -> torch.Tensor:
    """(1 + n, v) float32 of the target after the rules, at the root and the scored nodes."""
    sequence, rows_nv = record.sequences[index], record.scores.of(index)
    if not sequence.plain:
        rules = sequence.rules.fork()
        rules.rewind(kept)
        rows_nv = rules.apply(rows_nv, record.trees[index])
    return torch.log_softmax(rows_nv, -1, dtype=torch.float32)


def _statuses(tree: TokenTree, verdict: Verdict, kept: int, failed: bool) -> list[str]:
    """What became of each scored node."""
    place = {node: i for i, node in enumerate(verdict.path)}
    untried, found = _untried(tree, verdict.path), []
    for node, (parent, kind) in enumerate(zip(tree.parents.tolist(), tree.kinds.tolist(), strict=True)):
        if kind == PROBE:
            found.append("probe")
        elif node in place:
            found.append("accepted" if place[node] < kept else "ended")
        elif node in untried:
            found.append("untried")
        else:
            found.append("rejected" if not failed and (parent == ROOT or parent in place) else "unreached")
    return found


def _untried(tree: TokenTree, path: Sequence[int]) -> set[int]:
    """Siblings of accepted nodes whose trials come after the one that stood."""
    found: set[int] = set()
    for node in path:
        order = [trial.node for trial in tree.trials.get(int(tree.parents[node]), ())]
        if node in order:
            first = order.index(node)
            found |= set(order[first + 1 :]) - set(order[: first + 1])
    return found


def _nodes(tree: TokenTree, where: Sequence[int | None], status: Sequence[str], log_rv: torch.Tensor) -> list[Data]:
    columns = (tree.tokens, tree.parents, tree.depths, tree.sources, tree.confidence)
    drawn = _drawn(tree, log_rv[0])
    nodes = []
    for node, (token, parent, depth, source, confidence) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        place = where[node]
        row = 0 if parent < 0 else (above + 1 if (above := where[parent]) is not None else None)
        found: Data = {
            "token": token,
            "parent": parent,
            "depth": depth,
            "source": source,
            "confidence": rounded(confidence),
            "p": None if row is None else rounded(math.exp(float(log_rv[row, token]))),
            "status": "cut" if place is None else status[place],
        }
        if tree.also.get(node):
            found["also"] = list(tree.also[node])
        if node in drawn:
            found["q"] = drawn[node]
        nodes.append(found)
    return nodes


def _drawn(tree: TokenTree, like_v: torch.Tensor) -> dict[int, float | None]:
    """q of the first draw that fell on each node, for sampled drafts."""
    found: dict[int, float | None] = {}
    for trials in tree.trials.values():
        for trial in trials:
            if trial.drawn and trial.node not in found:
                token = int(tree.tokens[trial.node])
                found[trial.node] = rounded(float(proposal(trial, token, like_v)[token]))
    return found


def _own_token(verdict: Verdict, log_rv: torch.Tensor) -> Data | None:
    token = verdict.next_token
    if token is None:
        return None
    row = verdict.path[-1] + 1 if verdict.path else 0
    return {"token": token, "p": rounded(math.exp(float(log_rv[row, token])))}


def _committed(node: Data) -> Data:
    return {"token": node["token"], "source": node["source"], "p": node["p"]}


def _drafter(heard: Heard | None, index: int, nodes: Sequence[Data], seconds: float, room: int) -> Data | None:
    """What one drafter was granted and what came of it; a drafter that took no time was not asked."""
    if heard is None or room < 1 or not seconds:
        return None
    own = [node for node in nodes if node["source"] == index or index in node.get("also", ())]
    return {
        "nodes": heard.nodes,
        "depth": min(heard.depth, room),
        "stop": heard.stop,
        "proposed": len(own),
        "deepest": max((node["depth"] for node in own), default=0),
        "scored": sum(node["status"] not in ("cut", "probe") for node in own),
        "accepted": sum(node["status"] == "accepted" for node in own),
        "seconds": seconds,
    }


def rounded(value: float) -> float | None:
    """Four significant digits; None for what is no number, as JSON wants it."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
