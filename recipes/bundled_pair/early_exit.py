"""The target, tuned so that it can stop early: LayerSkip's fine-tuning.

Reads a corpus folder (prepare.py) and the target's folder (train.py, or the bundled one).
Writes a model folder of the same layout, written again at every measurement, so that a run that is cut short leaves
something; the same command takes it up again.

Every layer can then be an exit: its state, through the final norm and the head, gives a usable next token. `--minutes`
counts processor time of this process, so that a busy machine changes how long it takes and not what comes out. One core
of a CPU sees about 85,000 tokens a minute; a GPU needs minutes for all.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.training import groups, keep, paced, take_up, update
from recipes.bundled_pair.corpus import load_model, load_tokenizer, pick_device, read_documents, save_model, windows
from recipes.bundled_pair.exits import dropout_rates, exit_weights, exits_of_step, losses_by_exit, training_loss
from recipes.bundled_pair.train import autocast, heldout_rows, training_stream
from recipes.common.options import add_flags, new_parser


def save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path, history: list[dict[str, object]]
) -> None:  # fmt: skip
    """The weights as they are now, and the losses so far."""
    save_model(copy.deepcopy(model), tokenizer, out)
    (out / "history.json").write_text(json.dumps(history, indent=1) + "\n")


def measure(model: LlamaForCausalLM, heldout_bt: Tensor, batch: int) -> list[float]:
    with autocast(model.device.type):
        return [round(loss, 4) for loss in losses_by_exit(model, heldout_bt, batch)]


def starts(
    model: LlamaForCausalLM, heldout_bt: Tensor, options: argparse.Namespace, step: int
) -> list[dict[str, object]]:
    """The losses so far: of the run that is taken up, or of the model before its first step."""
    if step:
        kept: list[dict[str, object]] = json.loads((options.out / "history.json").read_text())
        return kept
    return [{"tokens": 0, "heldout": measure(model, heldout_bt, options.batch)}]


def loss_of_step(model: LlamaForCausalLM, x_bt: Tensor, step: int, options: argparse.Namespace) -> Tensor:
    """The loss of one step's exits."""
    layers, device = len(model.model.layers), model.device
    exits = exits_of_step(step, layers, options.rotation)
    weights = dict(zip(exits, exit_weights(exits, layers, options.scale, equal=options.equal), strict=True))
    with autocast(device.type):
        return training_loss(model, x_bt.long().to(device), dropout_rates(layers, options.dropout), weights)


def fit(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream_n: Tensor,
    heldout_bt: Tensor,
    options: argparse.Namespace,
) -> list[dict[str, object]]:
    """Train until tokens or minutes are used up; returns the held-out losses by exit over time."""
    optimizer = torch.optim.AdamW(groups(model), lr=options.rate, betas=(0.9, 0.95), fused=True)
    at = take_up(options.out / "training.safetensors", model, optimizer)
    history = starts(model, heldout_bt, options, at.step)
    print(history[-1], flush=True)
    lessons = islice(windows(len(stream_n), options.length, options.batch, options.seed), at.step, None)
    steps = paced(optimizer, options, warmup=50, clock=time.process_time, at=at)
    for (_, last), index in zip(steps, lessons, strict=False):
        loss = loss_of_step(model, stream_n[index], at.step - 1, options)
        update(model, optimizer, loss)
        if at.step % options.measure_every == 0 or last:
            seen = at.step * options.batch * options.length
            history.append({"tokens": seen, "heldout": measure(model, heldout_bt, options.batch)})
            print(f"{history[-1]}  loss {loss.item():.3f}  {at.minutes:.1f} min of processor time", flush=True)
            save(model, tokenizer, options.out, history)
            keep(options.out / "training.safetensors", model, optimizer, at)
    return history


def tune(options: argparse.Namespace) -> list[dict[str, object]]:
    """Load, train, save; returns the losses over time."""
    torch.manual_seed(options.seed)
    documents, tokenizer = read_documents(options.corpus), load_tokenizer(options.target)
    model = load_model(options.target, pick_device(options.device), torch.float32).train()
    stream_n = training_stream(documents, tokenizer, options.seed)
    return fit(model, tokenizer, stream_n, heldout_rows(documents, tokenizer, options.length), options)


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    add_flags(parser, "corpus", "target", out=Path("build/early_exit"), tokens=20_000_000)
    parser.add_argument("--minutes", type=float, default=60, help="most minutes of processor time (%(default)s)")
    add_flags(parser, measure_every=50)
    parser.add_argument(
        "--rotation", type=int, default=3, help="every which early exit has a loss in a step (%(default)s)"
    )
    parser.add_argument(
        "--scale", type=float, default=0.5, help="weight of an early exit against the last (%(default)s)"
    )
    parser.add_argument(
        "--rising",
        dest="equal",
        action="store_false",
        help="weights that rise with the layer, as in the paper, not equal ones",
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="chance of leaving out the last layer (%(default)s)")
    add_flags(parser, "device", batch=16, length=512, rate=8e-4, seed=2)
    tune(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
