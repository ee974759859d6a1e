"""Further training of the module for multi-token prediction in a model's own files.

Its layer is the one that transformers has for the family, with the module's weights. All steps so far run at once, in
turn along the row, since each goes on from what the one before has made (training.mtp_steps says who sees what). What
is written is the module alone, under the names that it has in the model's files, with their config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor, nn

from paceline.checkpoints import PredictionModule, read_config, text_config
from paceline.errors import CapabilityError
from paceline.models.heads import HeadConfig, write_folder
from paceline.training.batches import Batch, TargetView
from paceline.training.layer import RMSNorm
from paceline.training.mtp_steps import StepsTrainer

if TYPE_CHECKING:
    from paceline.llm import LLM

SAME: Final = {"mimo": "qwen2"}
"""Families that transformers lacks, and those whose layers are the same."""

EXPERTS: Final = "mlp.experts."


class StoredNorm(RMSNorm):
    """A norm whose weights are stored as those of the family: w, or w - 1 if `offset`."""

    def __init__(self, weight: Tensor, eps: float, *, offset: bool) -> None:
        super().__init__(len(weight), eps)
        self.offset = float(offset)
        with torch.no_grad():
            self.weight.copy_(weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


class ShippedMtpTrainer(StepsTrainer):
    """Trains the module of a checkpoint.

    Raises:
        CapabilityError: its layers are not one of transformers.
    """

    def __init__(self, config: HeadConfig, rows: Tensor, depths: int, module: PredictionModule) -> None:
        super().__init__(config, rows, depths)
        self._module, self.state_first = module, module.state_first
        spec = module.spec
        self.embed_norm, self.state_norm = (
            StoredNorm(_read(module, part), spec.norm_eps, offset=spec.norm_offset)
            for part in ("embed_norm", "state_norm")
        )
        fc = _read(module, "fc")
        self.fc = nn.Linear(fc.shape[1], fc.shape[0], bias=False)
        with torch.no_grad():
            self.fc.weight.copy_(fc)
        self.model = _layer_of(module)

    def behind(self, x: Tensor, batch: Batch, kept: list[Any]) -> Tensor:
        kept.append(x)
        length, steps = x.shape[1], len(kept)
        mask = torch.zeros(len(x), 1, steps * length, steps * length, device=x.device)
        mask.masked_fill_(~seen(batch.visible(), steps)[:, None], torch.finfo(torch.float32).min)
        positions = torch.cat([batch.positions + step for step in range(steps)], 1)
        states = self.model(
            inputs_embeds=torch.cat(kept, 1), attention_mask=mask, position_ids=positions, use_cache=False
        ).last_hidden_state
        return cast(Tensor, states[:, -length:])

    def write(self, folder: Path, llm: LLM, view: TargetView, facts: Mapping[str, Any]) -> None:
        """The module under its own names, in the target's dtype."""
        parts = self._module.parts
        within = self._module.layers["layers.0.input_layernorm.weight"].removesuffix("input_layernorm.weight")
        tensors: dict[str, Tensor] = {
            f"{within}{name.removeprefix('layers.0.')}": one for name, one in self.model.named_parameters()
        }
        tensors[parts["norm"]] = tensors.pop(f"{within}norm.weight")
        tensors |= {parts[name]: getattr(self, name).weight for name in ("fc", "embed_norm", "state_norm")}
        tensors = {name: one.detach().to(llm.runner.info.dtype) for name, one in tensors.items()}
        for name, buffer in self.model.named_buffers():
            if name.endswith("_bias"):  # by which experts are chosen, in float32
                tensors[f"{within}{name.removeprefix('layers.0.')}"] = buffer
        config = {**read_config(llm.folder), "paceline_mtp": dict(facts)}
        write_folder(folder, config, tensors)


def seen(visible: Tensor, steps: int) -> Tensor:
    """(b, steps * t, steps * t) which inputs of all steps each sees: those of step 0 as far as `visible` (b, t, t), and
    of each later step up to its own the one at its place.
    """
    rows, length = visible.shape[:2]
    whole = torch.zeros(rows, steps, length, steps, length, dtype=torch.bool, device=visible.device)
    alone = torch.eye(length, dtype=torch.bool, device=visible.device)
    for step in range(steps):
        whole[:, step, :, 0] = visible
        for other in range(1, step + 1):
            whole[:, step, :, other] = alone
    return whole.view(rows, steps * length, steps * length)


def _read(module: PredictionModule, part: str) -> Tensor:
    return module.read_part(part, device=torch.device("cpu"), dtype=torch.float32)


def _layer_of(module: PredictionModule) -> nn.Module:
    """The layer and the norm behind it, in float32.

    Raises:
        CapabilityError: they are not those of a model of transformers.
    """
    from transformers import AutoConfig, AutoModel

    spec, where = module.spec, module.checkpoint.folder
    if spec.num_layers != 1:
        raise CapabilityError(f"the module in {where} has {spec.num_layers} layers; only modules of one are trained")
    given = text_config(read_config(where))
    kind, moe = str(given["model_type"]), spec.layers[0].moe
    one = {
        "num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": [] if moe else [0],
        "decoder_sparse_step": 1, "first_k_dense_replace": 0 if moe else 1,
        "mlp_layer_types": ["sparse" if moe else "dense"], "model_type": SAME.get(kind, kind),
    }  # fmt: skip
    model = AutoModel.from_config(AutoConfig.for_model(**{**given, **one}), dtype=torch.float32)
    model.set_input_embeddings(nn.Identity())
    weights = {name: module.checkpoint.tensor(stored).float() for name, stored in module.layers.items()}
    weights = _stacked(weights) | {"norm.weight": _read(module, "norm")}
    if absent := model.load_state_dict(weights, strict=False).missing_keys:
        raise CapabilityError(f"the module in {where} lacks {absent[0]} of transformers, so that it cannot be trained")
    return cast(nn.Module, model)


def _stacked(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same, with experts that are stored one by one in stacks, as transformers has them."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, weight in weights.items():
        stem, mark, rest = name.partition(EXPERTS)
        number, _, kind = rest.partition(".")
        if mark and number.isdecimal():
            experts.setdefault(f"{stem}{mark}{kind.removesuffix('.weight')}", {})[int(number)] = weight
        else:
            found[name] = weight
    stacks = {name: torch.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}
    for name, up in list(stacks.items()):
        if name.endswith(".up_proj"):
            gate = stacks.pop(name.replace(".up_proj", ".gate_proj"))
            stacks[name.replace(".up_proj", ".gate_up_proj")] = torch.cat((gate, up), 1)
            del stacks[name]
    return found | stacks
