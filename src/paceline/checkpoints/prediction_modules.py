"""Modules for multi-token prediction in the files of the model that they were trained with.

A module reads the model's state of a token and the embedding of the next one, each normed, makes one state of both
(`fc`), and has a decoder layer of the model's kind and a norm of its own behind it. Embedding and head are the model's.
Where its tensors lie, for a model of n layers, after the prefix that all names may have:

    layout          fc              norm of embeddings      of states           behind              layers (from K = 0)
    Qwen            mtp.fc          mtp.pre_fc_norm_...     mtp.pre_fc_norm_... mtp.norm            mtp.layers.K
    DeepSeek, GLM   eh_proj         enorm                   hnorm               shared_head.norm    layers.(n + K)
    MiMo            input_proj      token_layernorm         hidden_layernorm    final_layernorm     mtp_layers.K
    Nemotron-H      eh_proj         enorm                   hnorm               final_layernorm     mtp.layers.K

All but Qwen's lie within the layers. `fc` reads [embedding; state], MiMo's [state; embedding]. Nemotron-H's layers are
attention or experts alone, by a pattern of their own. Some files hold several modules, one for each token ahead; the
first is read.

Sources: DeepSeek-V3 Technical Report (arXiv:2412.19437), MiMo (arXiv:2505.07608), the files of these models.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from paceline.checkpoints.checkpoint import Checkpoint
from paceline.checkpoints.families import spec_from_config, text_config
from paceline.checkpoints.gguf_file import is_gguf
from paceline.checkpoints.hub import read_config
from paceline.checkpoints.quantized_formats import open_checkpoint
from paceline.checkpoints.weights import PREFIX, load_weights
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import LayerSpec, ModelSpec

PARTS: Final = ("fc", "embed_norm", "state_norm", "norm")
"""What a module has beside its layers."""


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Where one kind of files keeps modules.

    Attributes:
        layers: what the names of their layers begin with, {} being the layer's number; "layers.{}." counts on behind
            the model's own layers.
        fc, embed_norm, state_norm, norm: the other parts, in a layer or, with a dot before them, outside of all.
        state_first: the state is the first half of what `fc` reads.
    """

    layers: str
    fc: str
    embed_norm: str
    state_norm: str
    norm: str
    state_first: bool = False


LAYOUTS: Final = (
    MtpLayout("mtp.layers.{}.", ".mtp.fc", ".mtp.pre_fc_norm_embedding", ".mtp.pre_fc_norm_hidden", ".mtp.norm"),
    MtpLayout("mtp.layers.{}.", "eh_proj", "enorm", "hnorm", "final_layernorm"),
    MtpLayout("layers.{}.", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
    MtpLayout(
        "mtp_layers.{}.", "input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm", state_first=True
    ),
)


@dataclass(frozen=True, slots=True)
class PredictionModule:
    """One module, as it lies in a checkpoint.

    Attributes:
        checkpoint: that holds it. spec: of a model that has the module's layers, and no norm behind them.
        parts: of PARTS -> the names that they are stored by. layers: names as of a model's own layers -> stored ones.
        state_first: as of `MtpLayout`.
    """

    checkpoint: Checkpoint
    spec: ModelSpec
    parts: Mapping[str, str]
    layers: Mapping[str, str]
    state_first: bool

    def head_share(self, vocab_size: int) -> float:
        """The head's share of the numbers that a drafted token reads, where it drafts so many tokens."""
        d, moe, read = self.spec.hidden_size, self.spec.moe, 0.0
        for name, stored in self.layers.items():
            share = moe.top_k / moe.experts if moe is not None and ".experts." in name else 1.0
            read += share * math.prod(self.checkpoint.entries[stored].shape)
        return vocab_size * d / (vocab_size * d + 2 * d * d + read)

    def read_part(self, part: str, *, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """`fc` (d, 2d), or a norm (d,)."""
        return self.checkpoint.tensor(self.parts[part]).to(device, dtype)

    def read_layers(self, *, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The canonical weights of its layers; embedding and head are not among them.

        Raises:
            CheckpointError, UnsupportedModelError: as `load_weights`.
        """
        layers = _LayersAlone(self.checkpoint, self.layers)
        return load_weights(layers, self.spec, device=device, dtype=dtype, lacking=("embed.weight", "head.weight"))


class _LayersAlone(Checkpoint):
    """A checkpoint that holds a module's layers alone.

    Args:
        names: by which they are asked for -> stored names.
    """

    def __init__(self, base: Checkpoint, names: Mapping[str, str]) -> None:
        self.folder, self._base, self._names = base.folder, base, names
        self.entries = {name: base.entries[stored] for name, stored in names.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        return self._base.tensor(self._names[name])

    def is_readable(self, name: str) -> bool:
        """See `Checkpoint`."""
        return self._base.is_readable(self._names[name])


def prediction_module(folder: Path) -> PredictionModule | None:
    """The first module in the files of a model; None where they hold none.

    Raises:
        CheckpointError: files that are not whole, or no checkpoint.
        UnsupportedModelError: a module of a model that does not run natively, with layers that are not implemented, or
            of weights in a format that is not read.
    """
    if is_gguf(folder):
        return None
    whole = read_config(folder)
    checkpoint, config = open_checkpoint(folder, whole), text_config(whole)
    names = {PREFIX.sub("", stored): stored for stored in checkpoint.entries}
    own = config.get("num_hidden_layers")
    for layout in LAYOUTS:
        first = own if layout.layers == "layers.{}." and isinstance(own, int) else 0
        fc = f"{layout.fc}.weight"
        if (fc[1:] if fc.startswith(".") else layout.layers.format(first) + fc) in names:
            return _found(checkpoint, config, layout, names, first)
    return None


def _found(
    checkpoint: Checkpoint, config: Mapping[str, Any], layout: MtpLayout, names: Mapping[str, str], first: int
) -> PredictionModule:
    """The module of a layout, whose layers count from `first`."""
    parts, by_layer = _sorted_out(layout, names, first)
    spec = _module_spec(config, by_layer.get(0, {}))
    layers = {
        f"layers.{index}.{rest}": stored
        for index in range(spec.num_layers)
        for rest, stored in by_layer.get(index, {}).items()
    }
    _check(checkpoint, spec.hidden_size, parts, layers.values())
    return PredictionModule(checkpoint, spec, parts, layers, layout.state_first)


def _sorted_out(
    layout: MtpLayout, names: Mapping[str, str], first: int
) -> tuple[dict[str, str], dict[int, dict[str, str]]]:
    """The parts of the first module, and by layer the names within it and the stored ones of all else.

    Embedding and head, which are the model's once more, are left out.
    """
    kind = re.compile(re.escape(layout.layers).replace(r"\{\}", r"(\d+)") + "(.+)")
    part_of = {f"{getattr(layout, part)}.weight": part for part in PARTS}
    parts: dict[str, tuple[int, str]] = {}
    by_layer: dict[int, dict[str, str]] = {}
    for name, stored in names.items():
        found = kind.fullmatch(name)
        index, rest = (0, f".{name}") if found is None else (int(found[1]) - first, found[2])
        if index < 0:
            continue
        if (part := part_of.get(rest)) is not None:
            parts[part] = min(parts.get(part, (index, stored)), (index, stored))
        elif found is not None and not rest.startswith(("embed_tokens.", "shared_head.head.")):
            by_layer.setdefault(index, {})[rest] = stored
    return {part: stored for part, (_, stored) in parts.items()}, by_layer


def _check(checkpoint: Checkpoint, d: int, parts: Mapping[str, str], layers: Iterable[str]) -> None:
    """Reject parts that are missing or of another shape, and tensors that are no plain floats."""
    for part in PARTS:
        if part not in parts:
            raise CheckpointError(
                f"{checkpoint.folder} holds a prediction module without its {part}; download it again"
            )
        wanted, shape = (d, 2 * d) if part == "fc" else (d,), checkpoint.entries[parts[part]].shape
        if shape != wanted:
            raise CheckpointError(
                f"{checkpoint.folder}: {parts[part]} must have shape {wanted}, got {shape}; download it again"
            )
    for stored in (*parts.values(), *layers):
        if not checkpoint.is_readable(stored):
            raise UnsupportedModelError(
                f"{checkpoint.folder}: {stored} of a prediction module is stored as "
                f"{checkpoint.entries[stored].dtype}; such quantised weights are not "
                "supported, use a float checkpoint"
            )


def _module_spec(config: Mapping[str, Any], first: Mapping[str, str]) -> ModelSpec:
    """The shape of a module's layers; `first`: the tensors of the first one."""
    spec = spec_from_config(config)
    if spec.family == "nemotron_h":
        spec = _patterned(config)
        layers = spec.layers[1:]
    else:
        layers = _last_like(spec, first)
    if config.get("mtp_use_dedicated_embeddings"):
        raise UnsupportedModelError(
            f"{spec.family}: a prediction module with an embedding of its own is not implemented"
        )
    if any(layer.mixer is not None for layer in layers):
        raise UnsupportedModelError(f"{spec.family}: a prediction module with a mixer is not implemented")
    return replace(spec, layers=layers, tied=False, stored_rows=None, final_norm=False)


def _last_like(spec: ModelSpec, first: Mapping[str, str]) -> tuple[LayerSpec, ...]:
    """A layer like the model's last one with attention; a mixture where its tensors are one."""
    last = next((layer for layer in reversed(spec.layers) if layer.attention and layer.mlp), None)
    if last is None:
        raise UnsupportedModelError(f"{spec.family}: a prediction module of a model without attention")
    sparse = any(name.startswith(("mlp.gate.", "mlp.experts.")) for name in first)
    return (replace(last, moe=sparse),)


def _patterned(config: Mapping[str, Any]) -> ModelSpec:
    """Nemotron-H with the module's layers behind a first one with a mixer, without which there is no such model.

    They are attention and then experts where nothing else is said.
    """
    kinds = config.get("mtp_layers_block_type")
    if config.get("mtp_hybrid_override_pattern") is None and isinstance(kinds, list):
        said: dict[str, Any] = {"hybrid_override_pattern": None, "layers_block_type": ["mamba", *kinds]}
        return spec_from_config({**config, **said, "num_hidden_layers": 1 + len(kinds)})
    pattern = f"M{config.get('mtp_hybrid_override_pattern') or '*E'}"
    return spec_from_config({**config, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)})
