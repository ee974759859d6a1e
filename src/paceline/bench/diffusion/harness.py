"""Decoding methods of diffusion language models on tasks with exact answers: score, calls, slots, time, length,
information.

In: a denoiser with its tokenizer, `Line`s. Out: a JSON-ready document. Not here: which methods
(`bench.diffusion_lines`), what is made of the record (`bench.diffusion_summary`), tables and plots
(`bench.diffusion_report`, `bench.diffusion_plot`).

Every line decodes the same held-out prompts into canvases of the same length. Calls and scores do not depend on the
machine and are taken on all prompts; seconds are taken on some of them, the static baseline between every two lines, so
that a ratio is always of two runs made next to each other. A line that claims to be lossless must write the baseline's
canvas on every prompt, or it gets no speed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from paceline.bench.diffusion.intervals import Sample, summarize_samples, timed
from paceline.bench.diffusion.lines import DiffusionLine
from paceline.bench.diffusion.tasks import TASKS, Item, items
from paceline.diffusion import (
    BitsToRounds,
    Canvas,
    Outcome,
    Parts,
    Recipe,
    Status,
    TokenText,
    decode,
    global_ar,
    local_ar,
    order_of,
)
from paceline.errors import PacelineError
from paceline.models.denoiser import Denoiser
from paceline.models.loading import Tokenizer
from paceline.utils import integer, need

Progress = Callable[[str, int, int], None]
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
    count: int = 20
    timed: int = 13
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

    def decode(self, recipe: Recipe, prompt: str) -> tuple[Outcome, float]:
        """A text and the seconds it took, from its empty canvas on.

        Raises:
            PacelineError: what stopped it.
        """
        return self.decode_with_parts(recipe, prompt)[:2]

    def decode_with_parts(self, recipe: Recipe, prompt: str) -> tuple[Outcome, float, Parts]:
        """The same, with the parts that wrote it, which hold counts of their own."""
        canvas = self.canvas(prompt)
        started = perf_counter()
        parts = recipe.parts(self.denoiser, canvas, seed=self.options.seed, token_text=self.token_text)
        [outcome] = decode([canvas], self.denoiser, [parts])
        seconds = perf_counter() - started
        if outcome.error is not None:
            raise outcome.error
        return outcome, seconds, parts

    def written(self, outcome: Outcome) -> list[int]:
        """The tokens of a text before its end."""
        output = outcome.canvas.output
        return output[
            : next((i for i, token in enumerate(output) if token in self.denoiser.eos_token_ids), len(output))
        ]

    def sample(self, recipe: Recipe, item: Item) -> Sample:
        """One text, judged."""
        outcome, _ = self.decode(recipe, item.prompt)
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


def score_methods(bench: DiffusionBench, lines: Sequence[DiffusionLine], progress: Progress) -> dict[str, Any]:
    """Everything that no clock decides, of every line on all prompts.

    Args:
        lines: the first is the baseline.
    Returns:
        The document, with `lines` by name and `failed` with reasons.
    """
    found: dict[str, Any] = {
        "model": facts(bench),
        "options": asdict(bench.options),
        "baseline": lines[0].name,
        "failed": [],
    }
    made: dict[str, dict[str, Any]] = {}
    known: dict[str, list[Sample]] = {}
    baseline = known[_key(lines[0].recipe)] = _all(bench, lines[0].recipe, lines[0].name, progress)
    for line in lines:
        try:
            samples = known.get(_key(line.recipe)) or _all(bench, line.recipe, line.name, progress)
            same = _identical(bench, line, samples, known, progress)
        except PacelineError as error:
            found["failed"].append({"name": line.name, "reason": str(error)})
            continue
        made[line.name] = {
            "config": dict(line.config),
            "family": line.family,
            "identical": same,
            **summarize_samples(samples, baseline),
        }
        if not trusted(made[line.name]):
            made[line.name]["fewer_calls"] = None
    return found | {"lines": made}


def _all(bench: DiffusionBench, recipe: Recipe, name: str, progress: Progress) -> list[Sample]:
    samples = []
    for number, item in enumerate(bench.asked):
        progress(name, number, len(bench.asked))
        samples.append(bench.sample(recipe, item))
    return samples


def _key(recipe: Recipe) -> str:
    """Equal for recipes that do the same."""
    return repr(
        (sorted(recipe.names.items()), recipe.modifiers, sorted(recipe.options.items(), key=str), recipe.temperature)
    )


def _identical(
    bench: DiffusionBench,
    line: DiffusionLine,
    samples: Sequence[Sample],
    known: dict[str, list[Sample]],
    progress: Progress,
) -> dict[str, Any] | None:
    """Of a line that claims to be lossless: prompts on which it writes its reference's canvas."""
    if line.reference is None:
        return None
    key = _key(line.reference)
    if key not in known:
        known[key] = _all(bench, line.reference, f"{line.name}, reference", progress)
    same = sum(ours.output == theirs.output for ours, theirs in zip(samples, known[key], strict=True))
    return {"same": same, "prompts": len(samples), "dtype": bench.dtype, "exact": bench.dtype in EXACT}


def trusted(line: dict[str, Any]) -> bool:
    """Whether a line keeps what it claims: lossless on every prompt, or no such claim."""
    same = line["identical"]
    return same is None or same["same"] == same["prompts"]


def time_methods(
    bench: DiffusionBench, lines: Sequence[DiffusionLine], progress: Progress
) -> dict[str, dict[str, Any]]:
    """Seconds of every line, by name, prompt by prompt: the baseline runs next to each, between two, in an order that
    rotates.

    Args:
        lines: the first is the baseline.
    Returns:
        For each line seconds of a text, how many times faster than the baseline, and all seconds.
    """
    raw: dict[str, tuple[list[list[float]], list[list[float]]]] = {
        line.name: ([[] for _ in bench.to_time], [[] for _ in bench.to_time]) for line in lines
    }
    if not bench.to_time:
        return {}
    for line in lines:
        bench.decode(line.recipe, bench.to_time[0].prompt)
    turns = bench.options.repeats * len(bench.to_time)
    for turn in range(turns):
        progress("timing", turn, turns)
        number, first = turn % len(bench.to_time), turn % len(lines)
        _turn(bench, [*lines[first:], *lines[:first]], lines[0], number, raw)
    return {name: timed(*seconds) for name, seconds in raw.items()}


def _turn(
    bench: DiffusionBench,
    lines: Sequence[DiffusionLine],
    baseline: DiffusionLine,
    number: int,
    raw: dict[str, tuple[list[list[float]], list[list[float]]]],
) -> None:
    """One prompt by every line: a line, the baseline, a line, and so on by twos."""
    prompt = bench.to_time[number].prompt
    for low in range(0, len(lines), 2):
        before, after = lines[low], lines[low + 1 : low + 2]
        raw[before.name][1][number].append(bench.decode(before.recipe, prompt)[1])
        seconds = bench.decode(baseline.recipe, prompt)[1]
        for line in (before, *after):
            raw[line.name][0][number].append(seconds)
        for line in after:
            raw[line.name][1][number].append(bench.decode(line.recipe, prompt)[1])


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
