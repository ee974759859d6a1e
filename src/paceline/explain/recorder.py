"""A generation step by step, as plain data that json.dumps takes: what `paceline explain` shows.

    format, version     "paceline-replay", 1
    paceline            version of the package
    model               name, family, dtype, device
    methods, controller names
    refused             whether drafts are, since the model takes every token in a pass of its own
    sampling            temperature, and what differs from the defaults
    prompt              text, tokens (their number)
    drafters            names by source index
    learning            name of a drafter that learns from requests -> which of its versions drafts, in words
    output              text, token_ids, finish_reason, stop_reason, error (or null), metrics (as
                        RequestMetrics.to_dict)
    prefill_seconds     of the prompt
    record_seconds      that recording took between the steps; in no other figure here but those of `metrics`
    texts               token id (as a string) -> its text alone, for every id below
    tokens              per generated token: token, text (what it adds to the output; "" inside a character), source
                        (index into drafters, null is the target's own), step, p
    steps               per scoring pass of the target:
        start, count      generated tokens before it, and those that it added
        root              the last token before it
        nodes             the tree as proposed, parents first: token, parent (-1 is the root), depth, source, confidence
                          (the drafter's own chance), p (the target's, after the sampling rules; null where it was not
                          computed), status, and where they apply: also (further drafters), q (chance of a sampled
                          draft), missed (cut, though the output continued exactly so)
        next, top         the target's own token after the accepted path with its p (or null), and its three likeliest
                          there
        drafters          per drafter: null if it was not used, else nodes and depth (its budget), stop (the level at
                          which the controller stopped it, or null), proposed, deepest, scored, accepted (numbers of
                          nodes), seconds
        words             the controller's decision
        seconds           by draft, score, verify, commit, other (see engine.record.TimeSplit)
        error             why the target's row was no distribution, or null

A node's status: "accepted"; "ended" (accepted, but the output ended before it); "rejected" (its parent was accepted,
the target chose otherwise); "untried" (an accepted draw came before it); "unreached" (below a rejected one); "cut" (by
selection, not scored); "probe" (an extra input of the drafter).
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paceline.config import SamplingParams
from paceline.controllers import Plan
from paceline.engine import IncrementalDetokenizer, Prompt, RequestOutput, StepRecord, StreamChunk, watching
from paceline.errors import NumericsError
from paceline.llm import BUNDLED, LLM
from paceline.models import ModelInfo
from paceline.tree import PROBE, ROOT, Budget, TokenTree, Verdict, always_go_on
from paceline.utils import need
from paceline.verifiers import proposal
from paceline.version import __version__

Data = dict[str, Any]
LIKELIEST = 3
"""How many of the target's own best tokens are kept where the accepted path ends."""


@dataclass(slots=True)
class _Recorded:
    """What a controller granted one drafter in one step.

    Attributes:
        nodes, depth: the budget.
        stop: the level before which the controller stopped the drafter, or None.
    """

    nodes: int
    depth: int
    stop: int | None = None

    def to(self, budget: Budget) -> Budget:
        """The same budget, whose `go_on` is recorded."""
        if budget.go_on is always_go_on:
            return budget

        def go_on(depth: int, confidence: float, features: object) -> bool:
            if budget.go_on(depth, confidence, features):
                return True
            self.stop = depth
            return False

        return replace(budget, go_on=go_on)


def plain_step(
    record: StepRecord, index: int, recorded: Mapping[int, _Recorded], words: str
) -> tuple[Data, list[Data]]:
    """Sequence `index` of a step, and the tokens that it committed (without their text).

    Args:
        recorded: by drafter.
        words: the controller's decision.
    """
    verdict, sequence = record.verdicts[index], record.sequences[index]
    failed = isinstance(verdict, NumericsError)
    judged = Verdict((), (), None) if isinstance(verdict, NumericsError) else verdict
    kept = len(sequence.context.tokens) - record.lengths[index]
    room = sequence.remaining + kept - 1  # levels that the sequence could still use
    log_rv = _log_probabilities(record, index, kept)
    where = places(record.proposed[index], record.trees[index])
    status = _statuses(record.trees[index], judged, kept, failed)
    nodes = _nodes(record.proposed[index], where, status, log_rv)
    own = _own_token(judged, log_rv)
    at = {place: node for node, place in enumerate(where) if place is not None}
    tokens = [_committed(nodes[at[node]]) for node in judged.path]
    tokens += [{"token": own["token"], "source": None, "p": own["p"]}] if own else []
    end_v = log_rv[judged.path[-1] + 1 if judged.path else 0].exp()
    best = torch.topk(end_v, min(LIKELIEST, len(end_v)))
    step = {
        "count": kept,
        "root": record.roots[index],
        "nodes": nodes,
        "next": own,
        "top": [
            {"token": t, "p": rounded(p)} for p, t in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ],
        "drafters": [
            _drafter(recorded.get(i), i, nodes, seconds, room) for i, seconds in enumerate(record.draft_seconds)
        ],
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
    untried, found = untried_siblings(tree, verdict.path), []
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


def untried_siblings(tree: TokenTree, path: Sequence[int]) -> set[int]:
    """Siblings of accepted nodes whose trials come after the accepted one."""
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


def _drafter(recorded: _Recorded | None, index: int, nodes: Sequence[Data], seconds: float, room: int) -> Data | None:
    """What one drafter was granted and what came of it; a drafter that took no time was not used."""
    if recorded is None or room < 1 or not seconds:
        return None
    own = [node for node in nodes if node["source"] == index or index in node.get("also", ())]
    return {
        "nodes": recorded.nodes,
        "depth": min(recorded.depth, room),
        "stop": recorded.stop,
        "proposed": len(own),
        "deepest": max((node["depth"] for node in own), default=0),
        "scored": sum(node["status"] not in ("cut", "probe") for node in own),
        "accepted": sum(node["status"] == "accepted" for node in own),
        "seconds": seconds,
    }


def rounded(value: float) -> float | None:
    """Four significant digits; None for what is no number, as JSON wants it."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


class _RecordingController:
    """A controller's stand-in: passes everything on, and remembers the budgets and stops of the plan."""

    def __init__(self, controller: Any) -> None:
        self.controller = controller
        self.recorded: dict[tuple[int, int], _Recorded] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.controller, name)

    def plan(self, signals: Any) -> Plan:
        """The controller's plan, with its budgets recorded."""
        self.recorded = {}
        plan: Plan = self.controller.plan(signals)
        return replace(
            plan,
            budgets=[
                [self._record_budget(i, j, one) for j, one in enumerate(row)] for i, row in enumerate(plan.budgets)
            ],
        )

    def _record_budget(self, index: int, drafter: int, budget: Budget) -> Budget:
        if budget.nodes < 1 or budget.depth < 1:
            return budget
        recorded = self.recorded[index, drafter] = _Recorded(budget.nodes, budget.depth)
        return recorded.to(budget)


def check(params: SamplingParams) -> None:
    """Reject what a replay cannot show.

    Raises:
        ConfigError: more than one output.
    """
    need(params.n == 1, "n", "be 1 in a replay, which follows one output", params.n)


@dataclass(slots=True)
class _Made:
    """Steps of one output and the tokens that they committed."""

    steps: list[Data]
    tokens: list[Data]


class Recorder:
    """Records one generation.

    Args:
        llm: whose engine is watched while `run` runs; other requests of the same engine are served but not recorded.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.output: RequestOutput | None = None
        self._params = SamplingParams()
        self._made: dict[str, _Made] = {}
        self._names: list[str] = list(llm.engine.parts.drafter_set.names)
        self._prefill = self._recording = 0.0

    @property
    def steps(self) -> int:
        """Steps recorded so far."""
        return len(self._own.steps)

    @property
    def _own(self) -> _Made:
        return _Made([], []) if self.output is None else self._made.get(self.output.request_id, _Made([], []))

    def run(self, prompt: Prompt, params: SamplingParams) -> Generator[StreamChunk]:
        """Decode one prompt and yield what each step adds; close it to end early (`data` then gives what there is).

        Raises:
            ConfigError: more than one output, or parameters that do not fit the model.
            PromptError: as `LLM.stream`.
        """
        check(params)
        self._params, engine = params, self.llm.engine
        stream, before = self.llm.stream(prompt, params), engine.times.prefill
        with (
            _recording_controller(engine) as recording,
            watching(engine, lambda record: self._watch(record, recording)),
        ):
            try:
                for chunk in stream:
                    self.output = chunk.output
                    self._prefill = engine.times.prefill - before
                    yield chunk
            finally:
                stream.close()

    def _watch(self, record: StepRecord, recording: _RecordingController) -> None:
        start = perf_counter()
        for i, sequence in enumerate(record.sequences):
            made = self._made.setdefault(sequence.request.id, _Made([], []))
            recorded = {drafter: one for (at, drafter), one in recording.recorded.items() if at == i}
            step, tokens = plain_step(record, i, recorded, str(recording.explain(i)))
            step["start"] = len(made.tokens)
            made.tokens += [token | {"step": len(made.steps)} for token in tokens]
            made.steps.append(step)
        for one in recording.recorded.values():
            one.stop = None
        self._recording += perf_counter() - start

    def data(self) -> Data:
        """The layout of this module's docstring.

        Raises:
            RuntimeError: nothing has been recorded yet.
        """
        output = self.output
        if output is None:
            raise RuntimeError("nothing has been recorded; run() comes first")
        made, first, prompt = self._own, output.outputs[0], output.prompt
        if prompt is None:
            prompt = self.llm.tokenizer.decode(output.prompt_token_ids, False)
        _mark_missed(made.steps, first.token_ids)
        text = self._add_texts(made.tokens, output)
        return {
            "format": "paceline-replay",
            "version": 1,
            "paceline": __version__,
            "model": _model(self.llm.runner.info),
            "methods": list(self.llm.drafter_methods),
            "refused": not self.llm.runner.capabilities.drafts,
            "controller": str(self.llm.engine.parts.controller.name),
            "sampling": _sampling(self._params),
            "prompt": {"text": prompt, "tokens": len(output.prompt_token_ids)},
            "drafters": _distinct(self._names),
            "learning": {one.drafter: one.words for one in self.llm.engine.parts.drafter_set.learning()},
            "output": {
                "text": text,
                "token_ids": list(first.token_ids),
                "finish_reason": first.finish_reason,
                "stop_reason": first.stop_reason,
                "error": first.error,
                "metrics": output.metrics.to_dict(),
            },
            "prefill_seconds": self._prefill,
            "record_seconds": self._recording,
            "texts": self._texts(made),
            "tokens": made.tokens,
            "steps": made.steps,
        }

    def _add_texts(self, tokens: list[Data], output: RequestOutput) -> str:
        """Give every token the text that it added to the output; returns the whole text."""
        words = IncrementalDetokenizer(
            self.llm.tokenizer, output.prompt_token_ids, skip_special_tokens=self._params.skip_special_tokens
        )
        for token in tokens:
            token["text"] = words.push((token["token"],))
        if tokens:
            tokens[-1]["text"] += words.finish()
        if not self._params.detokenize:
            return words.text
        left = len(output.outputs[0].text)
        for token in tokens:  # what a stop string took away
            token["text"] = token["text"][:left]
            left -= len(token["text"])
        return output.outputs[0].text

    def _texts(self, made: _Made) -> dict[str, str]:
        ids = {token["token"] for token in made.tokens}
        for step in made.steps:
            ids |= {step["root"], *(node["token"] for node in step["nodes"]), *(one["token"] for one in step["top"])}
            ids |= {step["next"]["token"]} if step["next"] else set()
        return {str(token): self.llm.tokenizer.token_text(token) for token in sorted(ids)}


@contextmanager
def _recording_controller(engine: Any) -> Iterator[_RecordingController]:
    """The engine's controller is recorded inside the block."""
    controller = engine.parts.controller
    recording = _RecordingController(controller)
    engine.use_controller(recording)
    try:
        yield recording
    finally:
        engine.use_controller(controller)


def _mark_missed(steps: list[Data], token_ids: list[int]) -> None:
    """Mark the nodes that selection cut although the output went on exactly so."""
    for step in steps:
        right: list[bool] = []
        for node in step["nodes"]:
            at = step["start"] + node["depth"] - 1
            same = at < len(token_ids) and token_ids[at] == node["token"]
            right.append(same and (node["parent"] < 0 or right[node["parent"]]))
            if node["status"] == "cut" and right[-1]:
                node["missed"] = True


def _sampling(params: SamplingParams) -> Data:
    """The temperature, and what is not as by default; JSON-ready."""
    found: Data = {"temperature": params.temperature, "max_tokens": params.max_tokens}
    for field in fields(params):
        value = getattr(params, field.name)
        if field.name not in found and value != field.default:
            found[field.name] = list(value) if isinstance(value, tuple) else value
    return found


def _model(info: ModelInfo) -> Data:
    """How the target is named: a hub id as it is, a folder by its own name only."""
    path = Path(info.name)
    name = f"bundled {path.name}" if path.parent == BUNDLED else path.name if path.exists() else info.name
    return {
        "name": name,
        "family": info.family,
        "dtype": str(info.dtype).removeprefix("torch."),
        "device": str(info.device),
    }


def _distinct(names: list[str]) -> list[str]:
    """Names with a number where one comes again."""
    return [name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}" for i, name in enumerate(names)]
