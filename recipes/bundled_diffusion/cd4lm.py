"""CD4LM: the bundled plain denoiser learns to say with few visible slots what it says with many (DSCD), for decoding
with CAD.

Reads a plain model, which is the frozen teacher and the student's start; training items. Writes OUT/state.safetensors.

A denoiser need not know what to say of a slot that it sees; this is measured before anything is learned, and where it
does not copy such a slot, the teacher's word there is the token itself (`--visible auto`).

Source: CD4LM, https://github.com/yihao-liang/CDLM. Theirs: AdamW at 5e-6, 200 steps of warm-up, batches of 64, 10
epochs of GSM8K. Ours: a higher rate that falls, as suits a model this small; answers are followed by end tokens to
the end of the canvas, which are learned, since decoding writes them.

    python -m recipes.bundled_diffusion.cd4lm --out build/cd4lm
    python -m recipes.bundled_diffusion.write build/cd4lm/state.safetensors build/cd4lm-model
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import cast

import torch
from tokenizers import Tokenizer
from torch import Tensor

from recipes.bundled_diffusion.distillation import add_options, start, train
from recipes.bundled_diffusion.distillation_losses import (
    CONSISTENCY_TEMPERATURE,
    Visible,
    consistency_weight,
    copied,
    dscd_loss,
)
from recipes.bundled_diffusion.lessons import batches, task_lessons
from recipes.bundled_diffusion.losses import Batch
from recipes.bundled_diffusion.model import TOKENIZER, Net, read_net
from recipes.bundled_diffusion.run import Facts
from recipes.common.options import add_flags, new_parser

ENOUGH = 0.99
"""A teacher that copies a smaller share of the slots it sees is not asked about them."""


def choose_visible(wanted: str, copies: float) -> Visible:
    """What counts as the teacher's word on slots that it sees; "auto" goes by the share that it copies."""
    if wanted == "auto":
        return "teacher" if copies >= ENOUGH else "data"
    return cast(Visible, wanted)


def lessons_of(options: argparse.Namespace, seed: int) -> Iterator[Batch]:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    found = task_lessons(tokenizer, split="train", count=options.items, seed=options.seed, names=options.tasks)
    return batches(found, [], size=options.batch, text_share=0.0, seed=seed, lengths=options.lengths)


def tune(options: argparse.Namespace) -> Facts:
    """Train on training items; the last report."""
    run, teacher = start(options), read_net(options.model).requires_grad_(False).eval()
    copies = copied(teacher, next(lessons_of(options, options.seed)), torch.Generator().manual_seed(options.seed))
    visible = choose_visible(options.visible, copies)
    print(f"the teacher copies {copies:.1%} of the slots that it sees; its word on them: {visible}", flush=True)

    def loss(net: Net, batch: Batch, generator: torch.Generator) -> Tensor:
        weight = consistency_weight(run.done)
        return dscd_loss(
            net, teacher, batch, generator, weight=weight, temperature=options.temperature, visible=visible
        )

    return train(run, loss, lessons_of(options, options.seed + run.progress.step))


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    add_options(parser)
    add_flags(parser, "tasks", items=4000, lengths=[24, 32], temperature=CONSISTENCY_TEMPERATURE)
    parser.add_argument(
        "--visible", choices=["auto", "teacher", "data", "skip"], default="auto", help="on slots that the teacher sees"
    )
    tune(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
