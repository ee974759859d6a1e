"""What the recipes of trained accelerators share: the model's own answers, the run with its reports.

All weights learn: at 2.4 million parameters, low-rank adapters would save nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer

from lab.diffusion import Item, items
from recipes.bundled_diffusion.answering import Batched, before_end, encoded, fill, text_of
from recipes.bundled_diffusion.lessons import Lesson, read_rows
from recipes.bundled_diffusion.losses import Batch
from recipes.bundled_diffusion.model import TOKENIZER, Net, read_net
from recipes.bundled_diffusion.run import Facts, Loss, Run, begin, set_up
from recipes.common.options import add_flags

WATCHED = ("copy", "reverse", "sort", "insert_index", "remove_index", "replace_index")
"""Tasks of the reports: those queues with one right answer."""


def in_turn(tasks: Sequence[str], *, count: int, seed: int) -> Iterator[Item]:
    """Training items of the tasks, one of each in turn."""
    made = [items(task, split="train", count=count, seed=seed) for task in tasks]
    return (item for row in zip(*made, strict=True) for item in row)


def answers(options: argparse.Namespace) -> None:
    """Let the model answer training prompts by the static baseline; every answer is kept with whether it is right."""
    torch.set_num_threads(options.threads)
    net, tokenizer = read_net(options.model), Tokenizer.from_file(str(TOKENIZER))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    text = options.out.read_text(encoding="utf-8") if options.out.is_file() else ""
    whole = text[: text.rfind("\n") + 1]  # a line that was being written when the run was cut short is made anew
    options.out.write_text(whole, encoding="utf-8")
    left = islice(in_turn(options.tasks, count=options.count, seed=options.seed), whole.count("\n"), None)
    started = time.process_time()
    with options.out.open("a", encoding="utf-8") as file:
        while (asked := list(islice(left, options.batch))) and time.process_time() - started < 60 * options.minutes:
            rows = _answered(net, tokenizer, asked, options)
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            right, minutes = sum(bool(row["right"]) for row in rows), (time.process_time() - started) / 60
            print(f"{right} of {len(rows)} right  {minutes:.1f} min", flush=True)


def _answered(
    net: Net, tokenizer: Tokenizer, asked: Sequence[Item], options: argparse.Namespace
) -> list[dict[str, object]]:
    prompts = encoded(tokenizer, [item.prompt for item in asked])
    static = {"method": "static", "block_length": options.block_length}
    found = [before_end(outcome.canvas) for outcome in fill(Batched(net), prompts, static, length=options.length)]
    return [
        {"task": item.task, "right": item.right(tokenizer.decode(answer)), "prompt": prompt, "answer": answer}
        for item, prompt, answer in zip(asked, prompts, found, strict=True)
    ]


def read_answers(path: Path) -> list[Lesson]:
    """The right answers of a file that `answers` made. Raises SystemExit where there are none."""
    rows = read_rows(path)
    found = [Lesson(row["prompt"], row["answer"]) for row in rows if row["right"]]
    if not found:
        command = f"python -m recipes.bundled_diffusion.dparallel answers --out {path}"
        raise SystemExit(f"no right answers in {path}: run `{command}` first")
    print(f"{len(found)} of {len(rows)} answers are right")
    return found


def watched(net: Net, tokenizer: Tokenizer, options: argparse.Namespace, threshold: float) -> dict[str, float]:
    """Exact match and calls a text of the threshold rule, over WATCHED."""
    asked = [item for task in WATCHED for item in items(task, split="test", count=options.count, seed=options.seed)]
    length = options.lengths[-1]
    method = {
        "method": "threshold",
        "confidence_threshold": threshold,
        "block_length": min(options.block_length, length),
    }
    found = fill(net.denoiser(), encoded(tokenizer, [item.prompt for item in asked]), method, length=length)
    right = [item.right(text_of(one, tokenizer)) for item, one in zip(asked, found, strict=True)]
    return {
        "exact": round(sum(right) / len(asked), 3),
        "calls": round(sum(one.trajectory.calls for one in found) / len(asked), 2),
    }


def start(options: argparse.Namespace) -> Run:
    """A new run from `options.model`, or the one that OUT holds."""
    set_up(options)
    return begin(options, read_net(options.model), warmup=50, decay=0.01)


def train(run: Run, loss: Loss, made: Iterator[Batch]) -> Facts:
    """Go on until minutes or steps are used up; the last report, which says what the threshold rule makes of the
    model.
    """
    seen = partial(watched, run.net, Tokenizer.from_file(str(TOKENIZER)), run.options)
    return run.go(
        run.supervised(loss, made), lambda: {f"threshold {threshold}": seen(threshold) for threshold in (0.9, 0.5)}
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of every run."""
    add_flags(parser, "model", "out", "most_steps", "threads", "seed")
    add_flags(parser, batch=32, minutes=12, count=8, report=3, rate=3e-4)
    parser.add_argument("--block-length", type=int, default=32, help="of training and of reports (%(default)s)")
