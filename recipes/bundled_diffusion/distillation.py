"""What the recipes of trained accelerators share: the model they start from, its own answers, the run with its reports.

In:  a model folder or a training state, lessons, a loss. Out: OUT/state.safetensors, from which write.py makes a folder;
OUT/history.json; for `answers` a JSON-lines file. Not here: losses (distillation_losses.py), what is particular to a method
(dparallel.py, cd4lm.py), the measurement (benchmarks/accelerators.py).

All weights learn: at 2.4 million parameters, low-rank adapters would save nothing. Minutes are of processor time, so that a run
does not end early on a busy machine; the same command goes on where a run was cut short.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch
from evaluate import fitting
from lessons import Lesson, batch_of
from losses import Batch
from model import Net, read_state
from tokenizers import Tokenizer
from torch import nn
from train import Progress, groups, keep, learning_rate, take_up

from paceline.bench.parallel_tasks import Item, items
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.loop import Outcome, decode
from paceline.diffusion.methods import Recipe
from paceline.models.checkpoint import Checkpoint
from paceline.models.denoiser import Denoiser
from paceline.models.denoiser_layouts import LAYOUTS, denoiser_spec, layout_name
from paceline.models.denoiser_load import end_tokens, mask_token_id
from paceline.models.denoiser_weights import load_denoiser_weights
from paceline.models.hub import read_config

BUNDLED = Path(__file__).parents[2] / "src" / "paceline" / "bundled" / "diffusion"
WATCHED = ("copy", "reverse", "sort", "insert_index", "remove_index", "replace_index")
"""Tasks of the reports: those queues with one right answer."""
Loss = Callable[["Tuning", Batch, torch.Generator], torch.Tensor]


def starting_net(path: Path) -> Net:
    """The trainable form of a model folder (LLaDA's or SDAR's layout), or of a training state."""
    if path.is_file():
        return read_state(path)
    config = read_config(path)
    spec = denoiser_spec(config, mask_token_id=mask_token_id(path, config), eos_token_ids=end_tokens(path, config))
    net, names = Net(spec), LAYOUTS[str(layout_name(config))].names
    net.load_state_dict(load_denoiser_weights(Checkpoint(path), spec, names, device=torch.device("cpu"), dtype=torch.float32))
    return net


def decoded(denoiser: Denoiser, prompts: Sequence[list[int]], *, length: int, method: Mapping[str, object]) -> list[Outcome]:
    """Canvases of at least `length` slots, decoded."""
    mask, ends = denoiser.mask_token_id, denoiser.eos_token_ids
    canvases = [Canvas.of(ids, fitting(denoiser, len(ids), length), mask_token_id=mask, eos_token_ids=ends) for ids in prompts]
    return decode(canvases, denoiser, [Recipe(method).parts(denoiser, canvas) for canvas in canvases])


def before_end(output: list[int], ends: Sequence[int]) -> list[int]:
    """The tokens before the end of a text."""
    return output[: next((i for i, token in enumerate(output) if token in ends), len(output))]


def in_turn(tasks: Sequence[str], *, count: int, seed: int) -> Iterator[Item]:
    """Training items of the tasks, one of each in turn."""
    made = [items(task, split="train", count=count, seed=seed) for task in tasks]
    return (item for row in zip(*made, strict=True) for item in row)


@torch.no_grad()
def static_answers(net: Net, prompts: Sequence[list[int]], *, length: int, block_length: int) -> list[list[int]]:
    """What the static baseline writes: in block after block, the slot the model is surest of first; all texts in one pass.

    Returns:
        The `length` tokens of each text.
    """
    batch = batch_of([(Lesson(prompt, []), length) for prompt in prompts])
    masked, seen = batch.answer, (batch.slots < batch.length[:, None])[:, None, None, :]
    block = torch.div(batch.slots - batch.start[:, None], block_length, rounding_mode="floor")
    ids, rows = batch.ids.masked_fill(masked, net.spec.mask_token_id), torch.arange(len(prompts))
    for step in range(length):
        open_ = masked & (block == step // block_length)
        logits = net(ids, batch.slots, seen, open_)
        logits[:, net.spec.mask_token_id] = -torch.inf
        confidence, tokens = logits.softmax(-1).max(-1)
        best = torch.full(ids.shape, -1.0, dtype=confidence.dtype).masked_scatter(open_, confidence).argmax(1)
        ids[rows, best] = torch.zeros_like(ids).masked_scatter(open_, tokens)[rows, best]
        masked[rows, best] = False
    return [row[len(prompt) : len(prompt) + length].tolist() for row, prompt in zip(ids, prompts, strict=True)]


def answers(options: argparse.Namespace) -> None:
    """Let the model answer training prompts by the static baseline; every answer is kept with whether it is right."""
    torch.set_num_threads(options.threads)
    net, tokenizer = starting_net(options.model), Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
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


def _answered(net: Net, tokenizer: Tokenizer, asked: Sequence[Item], options: argparse.Namespace) -> list[dict[str, object]]:
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([item.prompt for item in asked])]
    found = static_answers(net, prompts, length=options.length, block_length=options.block_length)
    cut = [before_end(output, net.spec.eos_token_ids) for output in found]
    return [
        {"task": item.task, "right": item.right(tokenizer.decode(answer)), "prompt": prompt, "answer": answer}
        for item, prompt, answer in zip(asked, prompts, cut, strict=True)
    ]


def read_answers(path: Path) -> list[Lesson]:
    """The right answers of a file that `answers` made. Raises SystemExit where there are none."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    found = [Lesson(row["prompt"], row["answer"]) for row in rows if row["right"]]
    if not found:
        raise SystemExit(f"no right answers in {path}: run `python dparallel.py answers --out {path}` first")
    print(f"{len(found)} of {len(rows)} answers are right")
    return found


@dataclass(slots=True)
class Tuning:
    """A run in progress.

    Attributes:
        loss: of the run itself, a batch, and a generator for its masks.
        history: reports so far.
    """

    net: Net
    optimizer: torch.optim.Optimizer
    loss: Loss
    options: argparse.Namespace
    progress: Progress
    history: list[dict[str, object]] = field(default_factory=list)

    @property
    def done(self) -> float:
        """The share of the run that is over."""
        return float(max(self.progress.minutes / self.options.minutes, self.progress.step / self.options.most_steps))

    def step(self, batch: Batch, generator: torch.Generator) -> float:
        """One update; the rate falls as the run goes on."""
        started = time.process_time()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.done, self.progress.step, self.options.rate, warmup=50)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(self, batch, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.minutes += (time.process_time() - started) / 60
        return float(loss.item())

    def keep(self) -> None:
        keep(self.options.out / "state.safetensors", self.net, self.optimizer, self.progress)

    def report(self, tokenizer: Tokenizer) -> None:
        """Exact match and calls of the threshold rule on a few test items."""
        facts: dict[str, object] = {"step": self.progress.step, "minutes": round(self.progress.minutes, 1)}
        for threshold in (0.9, 0.5):
            facts[f"threshold {threshold}"] = watched(self.net.denoiser(), tokenizer, self.options, threshold)
        self.history.append(facts)
        (self.options.out / "history.json").write_text(json.dumps(self.history, indent=1))
        print(json.dumps(facts), flush=True)


def watched(denoiser: Denoiser, tokenizer: Tokenizer, options: argparse.Namespace, threshold: float) -> dict[str, float]:
    """Exact match and calls a text, over WATCHED."""
    asked = [item for task in WATCHED for item in items(task, split="test", count=options.count, seed=options.seed)]
    length = options.lengths[-1]
    method = {"method": "threshold", "confidence_threshold": threshold, "block_length": min(options.block_length, length)}
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([item.prompt for item in asked])]
    found = decoded(denoiser, prompts, length=length, method=method)
    right = [
        item.right(tokenizer.decode(before_end(one.canvas.output, denoiser.eos_token_ids)))
        for item, one in zip(asked, found, strict=True)
    ]
    return {"exact": round(sum(right) / len(asked), 3), "calls": round(sum(one.trajectory.calls for one in found) / len(asked), 2)}


def begin(options: argparse.Namespace, loss: Loss) -> Tuning:
    """A new run, or the one that OUT holds."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    net = starting_net(options.model)
    optimizer = torch.optim.AdamW(groups(net, 0.01), lr=options.rate, betas=(0.9, 0.98), fused=True)
    options.out.mkdir(parents=True, exist_ok=True)
    history = options.out / "history.json"
    run = Tuning(net, optimizer, loss, options, take_up(options.out / "state.safetensors", net, optimizer))
    if run.progress.step and history.is_file():
        run.history = json.loads(history.read_text())
    print(f"{sum(p.numel() for p in net.parameters()):,} parameters, from step {run.progress.step}", flush=True)
    return run


def train(run: Tuning, made: Iterator[Batch]) -> dict[str, object]:
    """Go on until minutes or steps are used up; returns the last report."""
    options, tokenizer = run.options, Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    generator = torch.Generator().manual_seed(options.seed + run.progress.step)
    kept = reported = time.perf_counter()
    if not run.history:
        run.report(tokenizer)
    while run.done < 1:
        value = run.step(next(made), generator)
        if run.progress.step % 50 == 0:
            print(f"step {run.progress.step}  loss {value:.4f}  {run.progress.minutes:.1f} min", flush=True)
        if time.perf_counter() - kept > 60:
            run.keep()
            kept = time.perf_counter()
        if time.perf_counter() - reported > 60 * options.report or run.done >= 1:
            run.report(tokenizer)
            reported = time.perf_counter()
    run.keep()
    return run.history[-1]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of every run."""
    parser.add_argument("--model", type=Path, default=BUNDLED, help="a plain model's folder or training state (the bundled one)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12, help="minutes of processor time (%(default)s)")
    parser.add_argument("--most-steps", type=int, default=1_000_000, help="steps to train for at most (%(default)s)")
    parser.add_argument("--count", type=int, default=8, help="test items of each task in a report (%(default)s)")
    parser.add_argument("--report", type=float, default=3, help="minutes between reports (%(default)s)")
    parser.add_argument("--block-length", type=int, default=32, help="of training and of reports (%(default)s)")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
