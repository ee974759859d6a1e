"""Decoding methods of diffusion language models on tasks with exact answers: score, calls, slots, time, length,
information.

Every line decodes the same held-out prompts into canvases of the same length. Calls and scores do not depend on the
machine and are taken on all prompts; seconds are taken on some of them, where all lines take turns on every prompt. A
line that claims to be lossless must write the baseline's canvas on every prompt, or it gets no speed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from lab.diffusion.lines import DiffusionLine
from lab.diffusion.tasks import TASKS, Item, items
from paceline.checkpoints import Tokenizer
from paceline.diffusion import (
    BitsToRounds,
    Canvas,
    CanvasMethod,
    ConfiguredMethod,
    FinishedCanvas,
    Status,
    TokenText,
    decode,
    global_ar,
    local_ar,
    order_of,
)
from paceline.errors import PacelineError
from paceline.models import Denoiser
from paceline.utils import FloatArray, bootstrap, in_turn, integer, need, repeated, speedup, speedup_total, wilson

Progress = Callable[[str, int, int], None]
Table = Sequence[Sequence[float]] | FloatArray
"""Seconds by prompt and repeat."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One text.

    Attributes:
        task: its name.
        right: whether the answer is right.
        tokens: before the end of the text.
        filled: slots written, those after the end included.
        calls: passes of the model.
        slots: computed in them.
        rounds: that wrote something.
        nats: of the text along its path.
        local, global_: AR-ness of its order, Local@1 and Global@1.
        output: the canvas after the prompt.
    """

    task: str
    right: bool
    tokens: int
    filled: int
    calls: int
    slots: int
    rounds: int
    nats: float
    local: float
    global_: float
    output: tuple[int, ...]


def summarize_samples(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Any]:
    """A line's figures; `baseline` is the static baseline on the same prompts."""
    n, calls, rounds = len(samples), sum(s.calls for s in samples), sum(s.rounds for s in samples)
    tokens = sum(s.tokens for s in samples)
    return {
        "score": _share(samples),
        "determined": _share([s for s in samples if TASKS[s.task].determined]),
        "choice": _share([s for s in samples if not TASKS[s.task].determined]),
        "difference": difference(samples, baseline),
        "calls": calls / n,
        "fewer_calls": sum(s.calls for s in baseline) / calls,
        "slots_computed": sum(s.slots for s in samples) / n,
        "tokens_per_call": tokens / calls,
        "filled_per_call": sum(s.filled for s in samples) / calls,
        "length": tokens / n,
        "nats_per_round": sum(s.nats for s in samples) / max(1, rounds),
        "local_at_1": sum(s.local for s in samples) / n,
        "global_at_1": sum(s.global_ for s in samples) / n,
        "tasks": {
            task: _raw([s for s in samples if s.task == task]) for task in dict.fromkeys(s.task for s in samples)
        },
    }


def _share(samples: Sequence[Sample]) -> dict[str, Any] | None:
    return wilson(sum(s.right for s in samples), len(samples)) if samples else None


def _raw(samples: Sequence[Sample]) -> dict[str, Any]:
    """Of one task: the share of right answers, and prompt by prompt a digit for right, calls, tokens."""
    return {
        "score": sum(s.right for s in samples) / len(samples),
        "right": "".join(str(int(s.right)) for s in samples),
        "calls": " ".join(str(s.calls) for s in samples),
        "tokens": " ".join(str(s.tokens) for s in samples),
    }


def difference(samples: Sequence[Sample], baseline: Sequence[Sample]) -> dict[str, Any] | None:
    """Score less the baseline's, on the same prompts, with its 95 % bootstrap interval."""
    apart = np.array(
        [[float(ours.right) - float(theirs.right)] for ours, theirs in zip(samples, baseline, strict=True)]
    )
    found = bootstrap([apart], lambda values: np.asarray(values.mean((-2, -1))))
    return None if found is None else found.to_dict()


def timing_figures(baseline: Table, seconds: Table) -> dict[str, Any]:
    """Seconds of a text, from those of prompts x repeats.

    Returns:
        The mean over prompts of the median over repeats; the ratio of the totals and the median of the ratios, baseline
        over line, with their intervals; all seconds.
    """
    theirs, ours = np.array(baseline), np.array(seconds)
    total = speedup_total(np.ones_like(theirs), theirs, np.ones_like(ours), ours)
    middle = speedup(np.ones_like(theirs), theirs, np.ones_like(ours), ours)
    return {
        "seconds": float(np.median(ours, axis=1).mean()),
        "over_static": None if total is None else total.to_dict(),
        "median_over_static": None if middle is None else middle.to_dict(),
        "raw": {"static": _rows(theirs), "line": _rows(ours)},
    }


def _rows(values: FloatArray) -> list[str]:
    """A line of seconds for each prompt, one for each repeat."""
    return [" ".join(f"{value:.5f}" for value in row) for row in values]


EXACT = ("float32", "float64")
"""Numbers in which lossless lines are lossless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionOptions:
    """How a benchmark runs.

    Attributes:
        tasks: names in `TASKS`.
        count: held-out prompts of each task.
        timed: prompts that are timed, taken from the tasks in turn; 0 times nothing.
        repeats: timed runs of each.
        length: slots of the text; in a block-causal model as many more as fill its last block.
        block_length: of methods whose config names none; None is the model's own, or the whole text.
        seed: of prompts and of what a method draws.
    Raises:
        ConfigError: an unknown task, a number out of range.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    count: int = 1
    timed: int = 2
    repeats: int = 2
    length: int = 32
    block_length: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for task in self.tasks:
            need(task in TASKS, "--task", f"be one of {', '.join(TASKS)}", task)
        for name, low in (("count", 1), ("timed", 0), ("repeats", 1), ("length", 1), ("seed", 0)):
            integer(f"--{name}", getattr(self, name), low)
        if self.block_length is not None:
            integer("--block-length", self.block_length, 1)
        most = self.count * len(self.tasks)
        need(self.timed <= most, "--timed", f"be at most the number of prompts ({most})", self.timed)


class DiffusionBench:
    """A model and the prompts it is measured on.

    Attributes:
        asked: held-out items, task by task.
        to_time: those of them that are timed.
    """

    def __init__(
        self,
        denoiser: Denoiser,
        tokenizer: Tokenizer,
        options: DiffusionOptions,
        *,
        dtype: str,
        token_text: TokenText | None = None,
    ) -> None:
        self.denoiser, self.tokenizer, self.options, self.dtype = denoiser, tokenizer, options, dtype
        self.token_text = token_text
        made = {task: items(task, split="test", count=options.count, seed=options.seed) for task in options.tasks}
        self.asked = [item for found in made.values() for item in found]
        self.to_time = [found[number] for number in range(options.count) for found in made.values()][: options.timed]

    def canvas(self, prompt: str) -> Canvas:
        """An empty text after a prompt."""
        ids = self.tokenizer.encode(prompt)
        block = self.denoiser.block_length if self.denoiser.attention == "block" else None
        more = -(len(ids) + self.options.length) % block if block else 0
        ends = self.denoiser.eos_token_ids
        return Canvas.of(ids, self.options.length + more, mask_token_id=self.denoiser.mask_token_id, eos_token_ids=ends)

    def decode(self, recipe: ConfiguredMethod, prompt: str) -> FinishedCanvas:
        """A text.

        Raises:
            PacelineError: what stopped it.
        """
        return self.decode_with_parts(recipe, prompt)[0]

    def decode_with_parts(self, recipe: ConfiguredMethod, prompt: str) -> tuple[FinishedCanvas, CanvasMethod]:
        """The same, with the parts that wrote it, which hold counts of their own."""
        canvas = self.canvas(prompt)
        parts = recipe.parts(self.denoiser, canvas, seed=self.options.seed, token_text=self.token_text)
        [outcome] = decode([canvas], self.denoiser, [parts])
        if outcome.error is not None:
            raise outcome.error
        return outcome, parts

    def written(self, outcome: FinishedCanvas) -> list[int]:
        """The tokens of a text before its end."""
        output = outcome.canvas.output
        return output[
            : next((i for i, token in enumerate(output) if token in self.denoiser.eos_token_ids), len(output))
        ]

    def sample(self, recipe: ConfiguredMethod, item: Item) -> Sample:
        """One text, judged."""
        outcome = self.decode(recipe, item.prompt)
        trajectory, ids = outcome.trajectory, self.written(outcome)
        bits, order = BitsToRounds.of(trajectory), order_of(trajectory)
        filled = int((outcome.canvas.status == Status.COMMITTED).sum())
        local = local_ar(order) if order.size > 1 else 1.0
        made = (
            bool(item.right(self.tokenizer.decode(ids))),
            len(ids),
            filled,
            trajectory.calls,
            trajectory.slots_computed,
        )
        return Sample(item.task, *made, bits.rounds, bits.nats, local, global_ar(order), tuple(outcome.canvas.output))


def text_seconds(bench: DiffusionBench, line: DiffusionLine) -> float:
    """Of one text, after one to warm up."""
    return repeated(lambda: bench.decode(line.recipe, bench.asked[0].prompt), 1)[0]


def texts_to_score(bench: DiffusionBench, lines: Sequence[DiffusionLine]) -> int:
    """Texts that `score_methods` decodes."""
    recipes = {_key(recipe) for line in lines for recipe in (line.recipe, line.reference) if recipe is not None}
    return len(recipes) * len(bench.asked)


def texts_to_time(bench: DiffusionBench, lines: Sequence[DiffusionLine]) -> int:
    """Texts that `time_methods` decodes: one of every line to warm up, and one in every turn."""
    turns = bench.options.repeats * len(bench.to_time)
    return (turns + 1) * len(lines) if turns else 0


def score_methods(
    bench: DiffusionBench,
    lines: Sequence[DiffusionLine],
    progress: Progress,
    done: Callable[[str, dict[str, Any]], None] = lambda name, line: None,
) -> dict[str, Any]:
    """Everything that no clock decides, of every line on all prompts.

    Args:
        lines: the first is the baseline.
        progress: told how many texts are done, of those of all lines.
        done: told every line as soon as it is there.
    Returns:
        The document, with `lines` by name and `failed` with reasons; `interrupted` after Ctrl-C, with the lines that
        were done before.
    """
    found: dict[str, Any] = {
        "model": facts(bench),
        "options": asdict(bench.options),
        "baseline": lines[0].name,
        "failed": [],
        "interrupted": False,
        "lines": {},
    }
    texts = _Texts(bench, texts_to_score(bench, lines), progress)
    try:
        for line in lines:
            _score(bench, line, lines[0], texts, found)
            if line.name in found["lines"]:
                done(line.name, found["lines"][line.name])
    except KeyboardInterrupt:
        found["interrupted"] = True
    return found


def _score(
    bench: DiffusionBench, line: DiffusionLine, baseline: DiffusionLine, texts: _Texts, found: dict[str, Any]
) -> None:
    """Put one line into the document; what the baseline raises is raised, for nothing can be compared without it."""
    try:
        samples = texts.of(line.recipe, line.name)
        same = _identical(bench, line, samples, texts)
    except PacelineError as error:
        if line is baseline:
            raise
        found["failed"].append({"name": line.name, "reason": str(error)})
        return
    made = {
        "config": dict(line.config),
        "family": line.family,
        "identical": same,
        **summarize_samples(samples, texts.of(baseline.recipe, baseline.name)),
    }
    if not trusted(made):
        made["fewer_calls"] = None
    found["lines"][line.name] = made


class _Texts:
    """The texts of recipes on all prompts; those that do the same are decoded once."""

    def __init__(self, bench: DiffusionBench, total: int, progress: Progress) -> None:
        self.bench, self.total, self.progress = bench, total, progress
        self.known: dict[str, list[Sample]] = {}

    def of(self, recipe: ConfiguredMethod, name: str) -> list[Sample]:
        if (key := _key(recipe)) not in self.known:
            before, samples = sum(map(len, self.known.values())), []
            for number, item in enumerate(self.bench.asked):
                self.progress(name, before + number, self.total)
                samples.append(self.bench.sample(recipe, item))
            self.known[key] = samples
        return self.known[key]


def _key(recipe: ConfiguredMethod) -> str:
    """Equal for recipes that do the same."""
    return repr(
        (sorted(recipe.names.items()), recipe.modifiers, sorted(recipe.options.items(), key=str), recipe.temperature)
    )


def _identical(
    bench: DiffusionBench,
    line: DiffusionLine,
    samples: Sequence[Sample],
    texts: _Texts,
) -> dict[str, Any] | None:
    """Of a line that claims to be lossless: prompts on which it writes its reference's canvas."""
    if line.reference is None:
        return None
    expected = texts.of(line.reference, f"{line.name}, reference")
    same = sum(ours.output == theirs.output for ours, theirs in zip(samples, expected, strict=True))
    return {"same": same, "prompts": len(samples), "dtype": bench.dtype, "exact": bench.dtype in EXACT}


def trusted(line: dict[str, Any]) -> bool:
    """Whether a line keeps what it claims: lossless on every prompt, or no such claim."""
    same = line["identical"]
    return same is None or same["same"] == same["prompts"]


def time_methods(
    bench: DiffusionBench, lines: Sequence[DiffusionLine], progress: Progress
) -> tuple[dict[str, dict[str, Any]], bool]:
    """Seconds of every line, by name, prompt by prompt, in turn.

    Args:
        lines: the first is the baseline.
    Returns:
        For each line seconds of a text, how many times faster than the baseline, and all seconds; and whether
        Ctrl-C ended it. Then they are those of the repeats that were finished, or in the first one of the prompts that
        were.
    """
    total, finished = bench.options.repeats * len(bench.to_time), 0
    seconds: dict[str, list[list[float]]] = {line.name: [[] for _ in bench.to_time] for line in lines}
    runs = {line.name: partial(_decode, bench, line) for line in lines}
    try:
        for line in lines if total else ():
            _decode(bench, line, bench.to_time[0], 0)
        for turn in in_turn(runs, bench.to_time, bench.options.repeats):
            for name, taken in turn.seconds.items():
                seconds[name][turn.item].append(taken)
            finished += 1
            progress("timing", finished, total)
    except KeyboardInterrupt:
        pass  # what was finished is counted
    repeats = finished // max(1, len(bench.to_time))
    prompts = len(bench.to_time) if repeats else finished
    cut = {name: [row[: max(1, repeats)] for row in rows[:prompts]] for name, rows in seconds.items()}
    figures = {name: timing_figures(cut[lines[0].name], own) for name, own in cut.items()} if prompts else {}
    return figures, finished < total


def _decode(bench: DiffusionBench, line: DiffusionLine, item: Item, _repeat: int) -> FinishedCanvas:
    return bench.decode(line.recipe, item.prompt)


def facts(bench: DiffusionBench) -> dict[str, Any]:
    """Of the model."""
    model = bench.denoiser
    return {
        "attention": model.attention,
        "block_length": model.block_length,
        "vocab_size": model.vocab_size,
        "dtype": bench.dtype,
    }


def with_method_times(document: dict[str, Any], measured: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The document with seconds; a line that does not keep its claim gets none."""
    lines = {
        name: line | {"times": measured.get(name) if trusted(line) else None}
        for name, line in document["lines"].items()
    }
    return document | {"lines": lines}


def broken_methods(document: dict[str, Any]) -> list[str]:
    """Lines that failed, or do not keep their claim."""
    return [one["name"] for one in document["failed"]] + [
        name for name, line in document["lines"].items() if not trusted(line)
    ]
