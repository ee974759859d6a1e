"""The trainable form of the bundled denoisers: the transformer of `paceline.models.runners.denoiser` in batches, with
gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, cast

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from paceline.checkpoints import DENOISER_FAMILIES, Checkpoint, denoiser_spec, family_name, read_config
from paceline.models import (
    DenoiserSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
    end_tokens,
    load_denoiser_weights,
    mask_token_id,
)
from paceline.models.layers import wide_rotation
from paceline.models.runners import NativeDenoiser
from recipes.common.options import BUNDLED

EOS, MASK, VOCAB_SIZE = 3, 6144, 6145  # the bundled target's tokenizer, and a mask token after it
MAX_LENGTH = 512
HEADS = 4  # of every bundled shape
TOKENIZER = BUNDLED / "target" / "tokenizer.json"  # diffusion models have a mask token besides, which no text holds


def make_spec(
    kind: Literal["plain", "block"],
    *,
    width: int,
    layers: int,
    heads: int,
    mlp: int,
    block_length: int = 8,
    vocab_size: int = VOCAB_SIZE,
) -> DenoiserSpec:
    """The shape of a bundled model: LLaDA's for the plain one, SDAR's (norms on queries and keys) for the block-causal
    one.
    """
    model = ModelSpec(
        family="llada" if kind == "plain" else "sdar",
        vocab_size=vocab_size,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        intermediate_size=mlp,
        layers=(LayerSpec(),) * layers,
        ropes={"default": RopeSpec(theta=10000.0, dims=width // heads, max_position=MAX_LENGTH)},
        max_context=MAX_LENGTH,
        dtype="bfloat16",
        norm_eps=1e-5 if kind == "plain" else 1e-6,
        qk_norm=None if kind == "plain" else "head",
    )
    return DenoiserSpec(
        model=model,
        mask_token_id=vocab_size - 1,
        eos_token_ids=(EOS,),
        block_length=None if kind == "plain" else block_length,
    )


class Layer(nn.Module):
    """One pre-norm block; norms of queries and keys only where the shape has them."""

    q_norm: nn.RMSNorm
    k_norm: nn.RMSNorm

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        width, self.heads = model.hidden_size, model.num_heads
        self.attn_norm, self.mlp_norm = (nn.RMSNorm(width, eps=model.norm_eps) for _ in range(2))
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * model.intermediate_size, bias=False)
        self.down = nn.Linear(model.intermediate_size, width, bias=False)
        if model.qk_norm:
            self.q_norm, self.k_norm = (nn.RMSNorm(model.head_dim, eps=model.norm_eps) for _ in range(2))

    def forward(self, x_btd: Tensor, by: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        heads = self.qkv(self.attn_norm(x_btd)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.unbind(-3)
        if hasattr(self, "q_norm"):
            q, k = (norm(x.to(norm.weight.dtype)) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        q, k = _rotated(q, by), _rotated(k, by)
        x_btd = x_btd + self.o(_attend(q, k, v.to(q.dtype), mask))
        gate, up = self.gate_up(self.mlp_norm(x_btd)).chunk(2, -1)
        found: Tensor = x_btd + self.down(F.silu(gate) * up)
        return found


Layers = Iterable[Layer]  # what an nn.ModuleList of them is, which has no type for it


def _attend(q_bthd: Tensor, k_bthd: Tensor, v_bthd: Tensor, mask: Tensor | None) -> Tensor:
    """(b, t, h * d); written out, which is several times faster than the fused kernel on many short texts."""
    with torch.autocast(q_bthd.device.type, enabled=False):
        q, k, v = (x.transpose(1, 2) for x in (q_bthd * q_bthd.shape[-1] ** -0.5, k_bthd, v_bthd))
        scores = q @ k.transpose(-1, -2)
        if mask is not None:
            scores = torch.where(mask, scores, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


def _rotated(heads: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = by
    first, second = heads.chunk(2, -1)
    return heads * cos + torch.cat((-second, first), -1) * sin


class Net(nn.Module):
    """A denoiser that learns; its `state_dict` has the canonical names."""

    def __init__(self, spec: DenoiserSpec) -> None:
        super().__init__()
        model = spec.model
        self.spec = spec
        self.embed = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(Layer(model) for _ in range(model.num_layers))
        self.final_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                scale = (2 * model.num_layers) ** -0.5 if name.endswith(("o.weight", "down.weight")) else 1.0
                std = {"embed.weight": 1.0, "head.weight": 0.02}.get(name, scale * model.hidden_size**-0.5)
                nn.init.normal_(weight, std=std)

    def states(self, ids_bt: Tensor, positions_bt: Tensor, mask: Tensor | None) -> Tensor:
        """Normed states (b, t, d); `mask` (b, 1, t or 1, t) is True where a row sees a key."""
        rope = self.spec.model.ropes["default"]
        cos, sin = wide_rotation(rope, positions_bt.flatten(), torch.float32)
        by = (cos.view(*positions_bt.shape, 1, -1), sin.view(*positions_bt.shape, 1, -1))
        return self.run_layers(self.embed(ids_bt), by, mask)

    def run_layers(self, x_btd: Tensor, by: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """All layers and the last norm; the part that is worth compiling."""
        for layer in self.layers:
            x_btd = layer(x_btd, by, mask)
        normed: Tensor = self.final_norm(x_btd)
        return normed

    def forward(self, ids_bt: Tensor, positions_bt: Tensor, mask: Tensor | None, rows_bt: Tensor) -> Tensor:
        """Logits (rows, v) where `rows_bt` is True; that of the mask token is left as it is."""
        logits: Tensor = self.head(self.states(ids_bt, positions_bt, mask)[rows_bt])
        return logits

    @torch.no_grad()
    def denoiser(self, dtype: torch.dtype = torch.float32) -> NativeDenoiser:
        """The runner with the weights as they stand."""
        return NativeDenoiser(
            self.spec, {name: value.detach().clone().to(dtype) for name, value in self.state_dict().items()}
        )


def read_net(path: Path) -> Net:
    """The trainable form of a model folder (LLaDA's or SDAR's layout), or of a training state, in float32."""
    if path.is_file():
        return read_state(path)
    config = read_config(path)
    spec = denoiser_spec(config, mask_token_id=mask_token_id(path, config), eos_token_ids=end_tokens(path, config))
    net, names = Net(spec), DENOISER_FAMILIES[str(family_name(config))].names
    net.load_state_dict(
        load_denoiser_weights(Checkpoint(path), spec, names, device=torch.device("cpu"), dtype=torch.float32)
    )
    return net


def read_state(path: Path) -> Net:
    """The model of a training state (`paceline.training.keep`), its shape read off its tensors."""
    found = {name.removeprefix("model."): value for name, value in load_file(path).items() if name.startswith("model.")}
    heads = HEADS
    block = "layers.0.q_norm.weight" in found
    if block:
        heads = found["embed.weight"].shape[1] // found["layers.0.q_norm.weight"].shape[0]
    net = Net(
        make_spec(
            "block" if block else "plain",
            width=found["embed.weight"].shape[1],
            layers=1 + max(int(name.split(".")[1]) for name in found if name.startswith("layers.")),
            heads=heads,
            mlp=found["layers.0.down.weight"].shape[1],
            vocab_size=found["embed.weight"].shape[0],
        )
    )
    net.load_state_dict(found)
    return net


@torch.no_grad()
def take_over(net: Net, plain: Net, ids_bt: Tensor) -> None:
    """Start a block-causal model from a plain one; norms of queries and keys get the size that these have on
    `ids_bt`.
    """
    net.load_state_dict(plain.state_dict(), strict=False)
    sizes: list[Tensor] = []
    hooks = [
        layer.qkv.register_forward_hook(lambda _, __, out: sizes.append(out)) for layer in cast(Layers, plain.layers)
    ]
    plain.states(ids_bt, torch.arange(ids_bt.shape[1]).expand_as(ids_bt), None)
    for hook in hooks:
        hook.remove()
    for layer, out in zip(cast(Layers, net.layers), sizes, strict=True):
        q, k, _ = out.unflatten(-1, (3, layer.heads, -1)).unbind(-3)
        layer.q_norm.weight.fill_(q.pow(2).mean().sqrt())
        layer.k_norm.weight.fill_(k.pow(2).mean().sqrt())
