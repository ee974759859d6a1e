"""The bundled denoisers: a plain masked one, or a block-causal one, trained from scratch on tasks and text.

Reads a corpus folder (python -m recipes.bundled_pair.prepare), the bundled target's tokenizer.
Writes what run.py writes; its reports say held-out bounds and exact match over time.

The defaults make the bundled shape (2.4 million parameters) in about an hour of one CPU core. The same command goes on
where a run was cut short; time is counted by the clock.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer

from lab.diffusion import TASKS
from recipes.bundled_diffusion.evaluate import exact_match
from recipes.bundled_diffusion.lessons import batches, documents, task_lessons
from recipes.bundled_diffusion.losses import Batch, block_loss, plain_loss
from recipes.bundled_diffusion.model import HEADS, TOKENIZER, Net, make_spec, read_state, take_over
from recipes.bundled_diffusion.run import Facts, Loss, begin, set_up
from recipes.common.options import add_flags, new_parser


@torch.no_grad()
def bound(net: Net, loss: Loss, rows: Sequence[Batch]) -> float:
    """Mean loss of batches under fixed masks."""
    generator = torch.Generator().manual_seed(0)
    return sum(loss(net, batch, generator).item() for batch in rows) / len(rows)


def held_out(options: argparse.Namespace, tokenizer: Tokenizer) -> dict[str, list[Batch]]:
    """A few batches of test tasks, and of held-out text."""
    tasks = task_lessons(tokenizer, split="test", count=24, seed=options.seed)
    random.Random(0).shuffle(tasks)
    texts = documents(options.corpus, tokenizer, heldout=True)
    makers = {
        "tasks": batches(tasks, [], size=options.batch, text_share=0.0, seed=1),
        "text": batches(tasks, texts, size=options.batch, text_share=1.0, seed=1),
    }
    return {name: [next(maker) for _ in range(4)] for name, maker in makers.items()}


def training(options: argparse.Namespace, tokenizer: Tokenizer, seed: int) -> Iterator[Batch]:
    tasks = task_lessons(tokenizer, split="train", count=options.items, seed=seed)
    texts = documents(options.corpus, tokenizer, heldout=False)
    return batches(tasks, texts, size=options.batch, text_share=options.text, seed=seed, lengths=options.lengths)


def train(options: argparse.Namespace) -> Facts:
    """Train until minutes or steps are used up; the last report."""
    set_up(options)
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    loss = plain_loss if options.kind == "plain" else block_loss
    net = Net(make_spec(options.kind, width=options.width, layers=options.layers, heads=HEADS, mlp=options.mlp))
    run = begin(options, net, warmup=200, decay=0.05, clock=time.perf_counter)
    rows, lessons = held_out(options, tokenizer), training(options, tokenizer, options.seed + run.progress.step)
    if options.start and not run.progress.step:
        take_over(net, read_state(options.start), next(lessons).ids)

    def measured() -> Facts:
        bounds: Facts = {name: round(bound(net, loss, group), 4) for name, group in rows.items()}
        return bounds | {"exact": exact_match(net.denoiser(), tokenizer, count=options.count, tasks=options.exact)}

    return run.go(run.supervised(loss, lessons), measured)


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("kind", choices=["plain", "block"])
    parser.add_argument(
        "--start", type=Path, help="state.safetensors of a plain model that a block-causal one goes on from"
    )
    parser.add_argument("--width", type=int, default=128, help="of the model (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the model (%(default)s)")
    parser.add_argument("--mlp", type=int, default=384, help="width of the MLP (%(default)s)")
    parser.add_argument("--text", type=float, default=0.25, help="share of text windows in a batch (%(default)s)")
    parser.add_argument("--minutes", type=float, default=55, help="minutes to train for, by the clock (%(default)s)")
    parser.add_argument("--exact", nargs="+", default=list(TASKS), choices=TASKS, help="tasks of a report (all)")
    add_flags(parser, "corpus", "out", "most_steps", "threads", "seed", items=12000, lengths=[16, 16, 24, 32])
    add_flags(parser, count=12, report=6, batch=64, rate=2e-3)
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
