"""A generation step by step, as plain data that json.dumps takes: what `paceline explain` shows.

In: an LLM, a prompt. Out: the layout below. Not here: sentences about it (`bench.advice`), the page (`bench.explain`).

    format, version     "paceline-replay", 1
    paceline            version of the package
    model               name, family, dtype, device
    methods, controller names
    sampling            temperature, and what differs from the defaults
    prompt              text, tokens (their number)
    drafters            names by source index
    output              text, token_ids, finish_reason, stop_reason, error (or null), metrics (as
    RequestMetrics.to_dict) prefill_seconds     of the prompt record_seconds      that recording took between the steps;
    in no other figure here but those of `metrics` texts               token id (as a string) -> its text alone, for
    every id below tokens              per generated token: token, text (what it adds to the output; "" inside a
    character), source (index into
                        drafters, null is the target's own), step, p
    steps               per scoring pass of the target:
        start, count      generated tokens before it, and those that it added
        root              the last token before it
        nodes             the tree as proposed, parents first: token, parent (-1 is the root), depth, source, confidence
        (the
                          drafter's own chance), p (the target's, after the sampling rules; null where it was not
                          computed), status, and where they apply: also (further drafters), q (chance of a sampled
                          draft), missed (cut, though the output went on exactly so)
        next, top         the target's own token after the accepted path with its p (or null), and its three likeliest
        there drafters          per drafter: null if it was not asked, else nodes and depth (its budget), stop (the
        level at which the
                          controller stopped it, or null), proposed, deepest, scored, accepted (numbers of nodes),
                          seconds
        words             the controller's decision
        seconds           by draft, score, verify, commit, other
        error             why the target's row was no distribution, or null

A node's status: "accepted"; "ended" (stands, but the output ended before it); "rejected" (its parent stands, the target
chose otherwise); "untried" (a draw that stood came before it); "unreached" (below a rejected one); "cut" (by selection,
not scored); "probe" (an extra input of the drafter).
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline import __version__
from paceline.bench.explain.step import Heard, plain_step
from paceline.config import SamplingParams
from paceline.controllers import Plan
from paceline.engine import IncrementalDetokenizer, Prompt, RequestOutput, StepRecord, StreamChunk, watching
from paceline.llm import BUNDLED, LLM
from paceline.models import ModelInfo
from paceline.tree import Budget
from paceline.utils import need

Data = dict[str, Any]


class _Listening:
    """A controller's stand-in: passes everything on, and remembers the budgets and stops of the plan."""

    def __init__(self, controller: Any) -> None:
        self.controller = controller
        self.heard: dict[tuple[int, int], Heard] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.controller, name)

    def plan(self, signals: Any) -> Plan:
        """The controller's plan, its budgets overheard."""
        self.heard = {}
        plan: Plan = self.controller.plan(signals)
        return replace(
            plan, budgets=[[self._hear(i, j, one) for j, one in enumerate(row)] for i, row in enumerate(plan.budgets)]
        )

    def _hear(self, index: int, drafter: int, budget: Budget) -> Budget:
        if budget.nodes < 1 or budget.depth < 1:
            return budget
        heard = self.heard[index, drafter] = Heard(budget.nodes, budget.depth)
        return heard.to(budget)


def check(params: SamplingParams) -> None:
    """Refuse what a replay cannot show.

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
        self._names: list[str] = list(llm.engine.parts.crew.names)
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
            ConfigError: more than one output, or parameters that do not fit the model. PromptError: as `LLM.stream`.
        """
        check(params)
        self._params, engine = params, self.llm.engine
        stream, before = self.llm.stream(prompt, params), engine.times.prefill
        with _listened(engine) as ear, watching(engine, lambda record: self._watch(record, ear)):
            try:
                for chunk in stream:
                    self.output = chunk.output
                    self._prefill = engine.times.prefill - before
                    yield chunk
            finally:
                stream.close()

    def _watch(self, record: StepRecord, ear: _Listening) -> None:
        start = perf_counter()
        for i, sequence in enumerate(record.sequences):
            made = self._made.setdefault(sequence.request.id, _Made([], []))
            heard = {drafter: one for (at, drafter), one in ear.heard.items() if at == i}
            step, tokens = plain_step(record, i, heard, str(ear.explain(i)))
            step["start"] = len(made.tokens)
            made.tokens += [token | {"step": len(made.steps)} for token in tokens]
            made.steps.append(step)
        for one in ear.heard.values():
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
        made, first = self._own, output.outputs[0]
        _mark_missed(made.steps, first.token_ids)
        text = self._add_texts(made.tokens, output)
        return {
            "format": "paceline-replay",
            "version": 1,
            "paceline": __version__,
            "model": _model(self.llm.runner.info),
            "methods": list(self.llm.drafter_methods),
            "controller": str(self.llm.engine.parts.controller.name),
            "sampling": _sampling(self._params),
            "prompt": {
                "text": output.prompt
                if output.prompt is not None
                else self.llm.tokenizer.decode(output.prompt_token_ids, False),
                "tokens": len(output.prompt_token_ids),
            },
            "drafters": _distinct(self._names),
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
def _listened(engine: Any) -> Iterator[_Listening]:
    """The engine's controller is heard inside the block."""
    parts = engine.parts
    ear = _Listening(parts.controller)
    engine.parts = replace(parts, controller=ear)
    try:
        yield ear
    finally:
        engine.parts = parts


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
    """What is said of the target: a hub id as it is, of a folder its own name only."""
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
