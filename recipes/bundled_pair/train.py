"""The target: a small Llama trained from scratch by next-token prediction.

Reads a corpus folder (prepare.py).
Writes a model folder: the weights with the best held-out loss.

The defaults make the bundled target's shape (6.0 million parameters) in about an hour on two CPU cores; on a GPU in
minutes.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paceline.training import groups, paced, update
from recipes.bundled_pair.corpus import (
    Document,
    encode,
    join,
    llama_config,
    load_tokenizer,
    pick_device,
    read_documents,
    save_model,
    shuffled,
    windows,
)
from recipes.common.options import add_flags, new_parser

REPEAT = {"math": 2, "mbpp": 3, "sql": 2, "instruct": 3}  # passes over the small sets for one over the others


@dataclass(slots=True)
class Best:
    """The weights with the lowest held-out loss so far, and for how many measurements that is so."""

    loss: float = float("inf")
    weights: dict[str, Tensor] = field(default_factory=dict)
    stale: int = 0

    def offer(self, loss: float, model: nn.Module) -> None:
        self.stale += 1
        if loss < self.loss:
            self.loss, self.stale = loss, 0
            self.weights = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def training_stream(documents: list[Document], tokenizer: PreTrainedTokenizerFast, seed: int) -> Tensor:
    texts = [d.text for d in documents if not d.heldout for _ in range(REPEAT.get(d.source, 1))]
    return join(encode(tokenizer, [texts[i] for i in shuffled(len(texts), seed)]))


def heldout_rows(documents: list[Document], tokenizer: PreTrainedTokenizerFast, length: int, most: int = 64) -> Tensor:
    """(at most `most`, length) ids of held-out documents, end to end."""
    ids = join(encode(tokenizer, [d.text for d in documents if d.heldout]))
    if len(ids) < length:
        raise SystemExit(f"the corpus holds out only {len(ids)} tokens, fewer than --length {length}; lower --length")
    return ids[: len(ids) // length * length].view(-1, length)[:most].long()


def autocast(device: str) -> AbstractContextManager[None]:
    return torch.autocast(device, torch.bfloat16)


def loss_on(model: LlamaForCausalLM, x_bt: Tensor) -> Tensor:
    """Mean next-token loss of a batch; logits in float32."""
    with autocast(x_bt.device.type):
        logits_btv = model(input_ids=x_bt, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits_btv.float().flatten(0, 1), x_bt[:, 1:].flatten())


@torch.no_grad()
def measure(model: LlamaForCausalLM, rows_bt: Tensor, batch: int) -> float:
    parts = [loss_on(model, part.to(model.device)).item() * len(part) for part in rows_bt.split(batch)]
    return sum(parts) / len(rows_bt)


def fit(model: LlamaForCausalLM, stream_n: Tensor, heldout_bt: Tensor, options: argparse.Namespace) -> Best:
    """Train until tokens or minutes are used up, or the held-out loss has not fallen for --patience measurements."""
    device = str(model.device)
    optimizer = torch.optim.AdamW(groups(model), lr=options.rate, betas=(0.9, 0.95), fused=True)
    forward = torch.compile(model) if options.compile else model
    best, lessons = Best(), windows(len(stream_n), options.length, options.batch, options.seed)
    for (at, last), index in zip(paced(optimizer, options, warmup=100), lessons, strict=False):
        loss = loss_on(forward, stream_n[index].long().to(device))
        update(model, optimizer, loss)
        if at.step % options.measure_every == 0 or last:
            best.offer(measure(model, heldout_bt, options.batch), model)
            seen = at.step * options.batch * options.length
            said = f"step {at.step}  tokens {seen}  loss {loss.item():.3f}  best held-out {best.loss:.3f}"
            print(f"{said}  {at.minutes:.1f} min", flush=True)
            if best.stale >= options.patience:
                break
    model.load_state_dict(best.weights)
    return best


def train(options: argparse.Namespace) -> float:
    """Train and save; returns the best held-out loss."""
    torch.manual_seed(options.seed)
    documents, tokenizer = read_documents(options.corpus), load_tokenizer(options.corpus)
    stream_n = training_stream(documents, tokenizer, options.seed)
    heldout_bt = heldout_rows(documents, tokenizer, options.length)
    config = llama_config(
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.kv_heads,
        mlp=options.mlp,
        tied=True,
    )
    model = LlamaForCausalLM(config).to(pick_device(options.device))
    print(f"{model.num_parameters():,} parameters, {len(stream_n):,} tokens a pass", flush=True)
    best = fit(model, stream_n, heldout_bt, options)
    save_model(model, tokenizer, options.out)
    return best.loss


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    add_flags(parser, "corpus", out=Path("build/target"), width=256)
    parser.add_argument("--layers", type=int, default=6)
    add_flags(parser, heads=4, kv_heads=2, mlp=704, tokens=40_000_000, minutes=55, measure_every=100)
    parser.add_argument(
        "--patience", type=int, default=5, help="measurements without a better one before stopping (%(default)s)"
    )
    add_flags(parser, batch=16, length=512, rate=2e-3)
    parser.add_argument("--compile", action="store_true", help="torch.compile; faster, needs a C++ compiler")
    add_flags(parser, "device", seed=0)
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
