"""Modules for multi-token prediction added to tiny checkpoints under published names, and what transformers makes of
their layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from models.checkpoints import (
    SIZES,
    Tensors,
    load_json,
    load_tensors,
    perturb,
    qwen_moe_keys,
    save_json,
    save_tensors,
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one kind of files names a module.

    Attributes:
        layers: what the names of its layers begin with, by their number. parts: of fc and of the norms of embeddings,
            of states and behind the layers, the names.
        alone: changes to the target's configuration that leave a model of the module's layers alone.
        model_type: of that model, where transformers lacks the target's. keys: tensors as files name them.
        config: further keys of the target's config.json. state_first: of fc.
    """

    layers: Callable[[int], str]
    parts: Sequence[str]
    alone: Mapping[str, Any]
    model_type: str | None = None
    keys: Callable[[Tensors], Tensors] = lambda tensors: tensors
    config: Mapping[str, Any] = field(default_factory=dict)
    state_first: bool = False


def _nemotron_keys(tensors: Tensors) -> Tensors:
    """One tensor an expert."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        stem, mark, kind = name.rpartition(".experts.")
        if mark:
            out |= {f"{stem}.experts.{i}.{kind}.weight": one.contiguous() for i, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return out


ONE = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
MIMO = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
DEEPSEEK = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
LAYOUTS: dict[str, Layout] = {
    "qwen3_5_text": Layout(
        layers=lambda index: f"mtp.layers.{index}.", parts=QWEN, config={"mtp_num_hidden_layers": 1},
        alone=ONE,
    ),
    "qwen3_next": Layout(
        layers=lambda index: f"mtp.layers.{index}.", parts=QWEN, keys=qwen_moe_keys,
        alone={**ONE, "mlp_only_layers": []},
    ),
    "mimo": Layout(
        layers=lambda index: f"model.mtp_layers.{index}.",
        parts=[f"model.mtp_layers.0.{name}" for name in MIMO], model_type="qwen2", alone=ONE, state_first=True,
        config={"num_nextn_predict_layers": 1},
    ),
    "nemotron_h-moe": Layout(
        layers=lambda index: f"mtp.layers.{index}.", keys=_nemotron_keys,
        parts=["mtp.layers.0.eh_proj", "mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm"],
        alone={"num_hidden_layers": 2, "layers_block_type": ["full_attention", "moe"]},
        config={"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
    ),
    **{
        name: Layout(
            layers=lambda index: f"model.layers.{SIZES['num_hidden_layers'] + index}.", keys=qwen_moe_keys,
            parts=[f"model.layers.{SIZES['num_hidden_layers']}.{part}" for part in DEEPSEEK],
            alone={**ONE, "mlp_layer_types": ["sparse"], "first_k_dense_replace": 0},
            config={"num_nextn_predict_layers": 1},
        )
        for name in ("deepseek_v3", "glm4_moe")
    },
}  # fmt: skip
"""By the checkpoint case of the target."""


class Module:
    """A module's layers as a model of transformers, and its other parts.

    Args:
        target: the target's model. layout: of its case. seed: of all weights.
    """

    def __init__(self, target: Any, layout: Layout, seed: int = 1) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        self.layout, given = layout, {**target.config.to_dict(), **layout.alone}
        kind = layout.model_type or given["model_type"]
        config = AutoConfig.for_model(kind, **{key: value for key, value in given.items() if key != "model_type"})
        self.model = perturb(AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval(), seed)
        self.embedding = target.get_input_embeddings().weight.detach().float()
        self.model.lm_head.weight.data = target.lm_head.weight.detach().float()
        generator, d = torch.Generator().manual_seed(seed), config.hidden_size
        self.fc = torch.randn(d, 2 * d, generator=generator) / d**0.5
        self.embed_norm, self.state_norm = (0.3 * torch.randn(d, generator=generator) + self._one for _ in range(2))

    @property
    def _one(self) -> float:
        """What stands for a norm that only divides."""
        return 0.0 if self.model.config.model_type.startswith("qwen3_") else 1.0

    def tensors(self) -> Tensors:
        """Its tensors as files name them."""
        layout, found = (
            self.layout,
            dict(zip(self.layout.parts[:3], (self.fc, self.embed_norm, self.state_norm), strict=True)),
        )
        for name, value in self.model.state_dict().items():
            if (layer := re.match(r"model\.layers\.(\d+)\.(.+)", name)) is not None:
                found[f"{layout.layers(int(layer[1]))}{layer[2]}"] = value
            elif re.fullmatch(r"model\.norm(_f)?\.weight", name):
                found[layout.parts[3]] = value
        whole = {f"{name}.weight" if name in layout.parts else name: value for name, value in found.items()}
        return {name: value.clone() for name, value in layout.keys(whole).items()}

    def inputs(self, tokens: Sequence[int], states: torch.Tensor, *, swapped: bool = False) -> torch.Tensor:
        """(n, d) what the layers read of tokens and states (n, d); `swapped`: with the halves of fc exchanged."""
        config = self.model.config
        eps = config.rms_norm_eps if hasattr(config, "rms_norm_eps") else config.layer_norm_epsilon
        halves = [
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + 1.0 - self._one)
            for x, weight in ((self.embedding[list(tokens)], self.embed_norm), (states, self.state_norm))
        ]
        return torch.cat(halves[::-1] if self.layout.state_first != swapped else halves, 1) @ self.fc.T

    @torch.no_grad()
    def after(
        self, tokens: list[int], states: torch.Tensor, drafted: Sequence[int] = (), *, swapped: bool = False
    ) -> torch.Tensor:
        """(v,) logits behind drafted tokens, of one pass over everything for each of them.

        Args:
            tokens, states: 1 .. n of a text, and the target's states (n, d) of 0 .. n - 1.
        """
        made = self._behind(self.inputs(tokens, states, swapped=swapped))
        for token in drafted:
            tokens, states = [*tokens, token], torch.cat((states, made))
            made = self._behind(self.inputs(tokens, states, swapped=swapped))
        logits: torch.Tensor = self.model.lm_head(made)[0]
        return logits

    def _behind(self, x: torch.Tensor) -> torch.Tensor:
        """(1, d) the normed state behind the last of inputs (n, d)."""
        made: torch.Tensor = self.model.model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0, -1:]
        return made


def add_module(folder: Path, target: Any, layout: Layout, seed: int = 1) -> Module:
    """Put a module into the files of a target, of which `target` is the model of transformers."""
    module = Module(target, layout, seed)
    save_tensors(folder / "model.safetensors", load_tensors(folder) | module.tensors())
    save_json(folder / "config.json", load_json(folder / "config.json") | dict(layout.config))
    return module
