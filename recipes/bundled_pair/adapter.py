"""An adapter that makes an early exit speak like the whole target: Kangaroo's, by distillation.

Reads a corpus folder (prepare.py) and the target's folder (train.py, or the bundled one), which is not changed.
Writes an adapter folder in the published layout: config.json, and one layer of attention with two norms in safetensors.

The adapter reads the exit layer's states of the whole text; its output goes through the target's head. It learns the
distribution that the target itself gives at the same position. It begins as the plain early exit: its
attention adds nothing, its norm is the target's.

Source: Kangaroo: lossless self-speculative decoding via double early exiting (arXiv:2404.18911), section 3.1.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRMSNorm

from paceline.training import groups, paced, update
from recipes.bundled_pair.corpus import load_model, load_tokenizer, pick_device, read_documents, windows
from recipes.bundled_pair.exits import states_by_layer
from recipes.bundled_pair.train import autocast, heldout_rows, training_stream
from recipes.common.options import add_flags, new_parser

# Axes in this file: b = batch, t = window, h = width, v = vocabulary.


class Layer(nn.Module):
    """Attention behind a norm, added to its input."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = LlamaAttention(config, layer_idx=0)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, state_bth: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        added: Tensor = self.self_attn(
            self.input_layernorm(state_bth), position_embeddings=rotations, attention_mask=None
        )[0]
        return state_bth + added


class Adapter(nn.Module):
    """One layer and a norm; as attention has the target's shape, so has its cache."""

    def __init__(self, target: LlamaForCausalLM) -> None:
        super().__init__()
        layer = Layer(target.config)
        self.layers = nn.ModuleList([layer])
        self.norm = LlamaRMSNorm(target.config.hidden_size, target.config.rms_norm_eps)
        with torch.no_grad():
            self.norm.weight.copy_(target.model.norm.weight)
            layer.self_attn.o_proj.weight.zero_()

    def forward(self, state_bth: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """(b, t, h) states that the target's head reads."""
        spoken: Tensor = self.norm(self.layers[0](state_bth, rotations))
        return spoken


def logits_of(target: LlamaForCausalLM, adapter: Adapter, x_bt: Tensor, exit_layer: int) -> tuple[Tensor, Tensor]:
    """(b, t, v) float32 logits of the adapter and of the target."""
    with torch.no_grad():
        states = list(states_by_layer(target, x_bt))
        wanted_btv = target.lm_head(target.model.norm(states[-1])).float()
        rotations = target.model.rotary_emb(states[0], torch.arange(x_bt.shape[1], device=x_bt.device)[None])
    return target.lm_head(adapter(states[exit_layer - 1], rotations)).float(), wanted_btv


@torch.no_grad()
def agreement(target: LlamaForCausalLM, adapter: Adapter, rows_bt: Tensor, options: argparse.Namespace) -> float:
    """Share of held-out positions where the adapter's likeliest token is the target's."""
    right = 0
    for part in rows_bt.split(options.batch):
        with autocast(target.device.type):
            found_btv, wanted_btv = logits_of(target, adapter, part.to(target.device), options.exit_layer)
        right += int((found_btv.argmax(-1) == wanted_btv.argmax(-1)).sum())
    return right / rows_bt.numel()


def save(adapter: Adapter, config: LlamaConfig, out: Path) -> None:
    """Write the adapter in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    own = LlamaConfig.from_dict({**config.to_dict(), "num_hidden_layers": 1, "architectures": ["LlamaForCausalLM"]})
    own.save_pretrained(out)
    save_file(
        {name: value.detach().cpu().bfloat16().contiguous() for name, value in adapter.state_dict().items()},
        out / WEIGHTS,
    )
    (out / WEIGHTS).chmod(0o644)


WEIGHTS = "model.safetensors"


def fit(
    target: LlamaForCausalLM, stream_n: Tensor, heldout_bt: Tensor, options: argparse.Namespace
) -> tuple[Adapter, list[float]]:
    """Train until tokens or minutes are used up; the adapter, and its agreement at first and in the end."""
    adapter = Adapter(target).to(target.device)
    optimizer = torch.optim.AdamW(groups(adapter), lr=options.rate, betas=(0.9, 0.95), fused=True)
    found = [agreement(target, adapter, heldout_bt, options)]
    lessons = windows(len(stream_n), options.length, options.batch, options.seed)
    steps = paced(optimizer, options, warmup=20, clock=time.process_time)
    for (at, _), index in zip(steps, lessons, strict=False):
        with autocast(target.device.type):
            found_btv, wanted_btv = logits_of(
                target, adapter, stream_n[index].long().to(target.device), options.exit_layer
            )
        loss = F.cross_entropy(found_btv.flatten(0, 1), wanted_btv.flatten(0, 1).softmax(-1))
        update(adapter, optimizer, loss, 0.5)
        if at.step % 50 == 1:
            print(f"step {at.step}  loss {loss.item():.3f}", flush=True)
    return adapter, [*found, agreement(target, adapter, heldout_bt, options)]


def train(options: argparse.Namespace) -> list[float]:
    """Load, train, save; the held-out agreement with the target at first and in the end."""
    torch.manual_seed(options.seed)
    documents, tokenizer = read_documents(options.corpus), load_tokenizer(options.target)
    target = load_model(options.target, pick_device(options.device), torch.float32).requires_grad_(False)
    layers = len(target.model.layers)
    if not 1 <= options.exit_layer < layers:
        raise SystemExit(
            f"--exit-layer must lie in 1..{layers - 1}, the target's layers but the last, got {options.exit_layer}"
        )
    stream_n, heldout_bt = (
        training_stream(documents, tokenizer, options.seed),
        heldout_rows(documents, tokenizer, options.length),
    )
    adapter, found = fit(target, stream_n, heldout_bt, options)
    save(adapter, target.config, options.out)
    print(f"agreement with the target: {found[0]:.1%} without training, {found[1]:.1%} now", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    add_flags(parser, "corpus", "target", out=Path("build/adapter"))
    parser.add_argument("--exit-layer", type=int, default=2, help="layers that run before the adapter (%(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="most minutes of processor time (%(default)s)")
    add_flags(parser, "device", tokens=4_000_000, batch=8, length=256, rate=2e-3, seed=3)
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
