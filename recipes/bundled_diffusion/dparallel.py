"""dParallel: the bundled plain denoiser learns to be certain of many slots at once (certainty-forcing distillation).

Reads a plain model. Writes `answers`: what it writes by the static baseline to training prompts; `train`:
OUT/state.safetensors.

Source: dParallel: Learnable Parallel Decoding for dLLMs (arXiv:2509.26488). Theirs: LoRA of rank 128, AdamW at 2e-5, a
constant rate, 6 epochs over some 92,000 answers that are right. Ours: all weights, a higher rate that falls, as suits a
model this small.

    python -m recipes.bundled_diffusion.dparallel answers --out build/own_answers.jsonl --minutes 10
    python -m recipes.bundled_diffusion.dparallel train --answers build/own_answers.jsonl --out build/dparallel
    python -m recipes.bundled_diffusion.write build/dparallel/state.safetensors build/dparallel-model
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from recipes.bundled_diffusion.distillation import add_options, answers, read_answers, start, train
from recipes.bundled_diffusion.distillation_losses import BETA, CERTAINTY_TEMPERATURE, MASK_RATE, dparallel_loss
from recipes.bundled_diffusion.lessons import batches
from recipes.bundled_diffusion.run import Facts
from recipes.common.options import add_flags, new_parser


def tune(options: argparse.Namespace) -> Facts:
    """Train on the model's own right answers; the last report."""
    lessons = [lesson for path in options.answers for lesson in read_answers(path)]
    loss = partial(
        dparallel_loss,
        block_length=options.block_length,
        beta=options.beta,
        temperature=options.temperature,
        rate=options.mask_rate,
    )
    run = start(options)
    seed = options.seed + run.progress.step
    made = batches(lessons, [], size=options.batch, text_share=0.0, seed=seed, lengths=options.lengths)
    return train(run, loss, made)


def rate(text: str) -> float | None:
    """A share, or None for "any"."""
    return None if text == "any" else float(text)


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    asking = verbs.add_parser("answers", help="let the model answer training prompts")
    add_flags(asking, "model", "out", "tasks", "threads", minutes=10, length=32, block_length=16, batch=64, seed=100)
    asking.add_argument("--count", type=int, default=2000, help="most prompts of each task (%(default)s)")
    learning = verbs.add_parser("train", help="learn from them")
    add_options(learning)
    learning.add_argument("--answers", type=Path, nargs="+", required=True, help="what `answers` wrote")
    learning.add_argument("--beta", type=float, default=BETA, help="weight of the entropy (%(default)s)")
    add_flags(learning, lengths=[16, 32], temperature=CERTAINTY_TEMPERATURE)
    learning.add_argument(
        "--mask-rate", type=rate, default=MASK_RATE, help="of the first view, or `any`: drawn for each text"
    )
    options = parser.parse_args(arguments)
    if options.verb == "answers":
        answers(options)
    else:
        tune(options)


if __name__ == "__main__":
    main()
