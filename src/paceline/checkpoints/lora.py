"""LoRA adapters as PEFT writes them, merged into the weights of their base model as these are read.

A folder holds `adapter_config.json` and `adapter_model.safetensors`: for an adapted matrix the factors `lora_A` (r, in)
and `lora_B` (out, r), whose product times `lora_alpha / r` is added to it; whole tensors that were trained beside them
(`modules_to_save`, biases) take the place of the model's own. Sums are made in float32 and rounded once, and quantised
only then. Variants of LoRA that compute something else are rejected with an error that names them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.checkpoints.checkpoint import Checkpoint, read_header, some
from paceline.checkpoints.tokenizer import read_json
from paceline.checkpoints.unfinished import refuse_unfinished
from paceline.checkpoints.weights import PREFIX
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.utils import replacing, shortened

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
OUTER = "base_model.model."
FACTOR = re.compile(r"^(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.weight)?$")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

OTHER: Mapping[str, str] = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "a bias beside lora_B",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "layer_replication": "replicated layers",
    "target_parameters": "factors for parameters of modules",
    "trainable_token_indices": "single trained rows of the embedding",
    "velora_config": "VeLoRA",
}
"""Keys that, where they are set, make something else of an adapter, and what that is called."""

READ = frozenset({
    "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "use_rslora", "bias", "fan_in_fan_out",
    "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save",
    "ensure_weight_tying", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "megatron_core", "qalora_group_size", "runtime_config",
})  # fmt: skip
"""Keys that are read, that the tensors say too, or that speak of training alone."""

PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "lora_ga")
"""Values of `init_lora_weights` that leave the base model as it is; others train against a changed one."""


@dataclass(frozen=True, slots=True)
class _Factors:
    """Stored names of an adapted matrix's factors, and whether they are those of an embedding, which is transposed."""

    a: str
    b: str
    embedding: bool = False


@dataclass(slots=True)
class _Adapter:
    """The contents of a folder; names are those of the model's tensors without prefix."""

    folder: Path
    config: Mapping[str, Any]
    factors: dict[str, _Factors] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)


class AdaptedCheckpoint(Checkpoint):
    """The tensors of a base model with an adapter merged in; see `Checkpoint`.

    Args:
        base: the model, from safetensors or GGUF.
        tied: its head is its embedding.
    Raises:
        CheckpointError: no adapter, a damaged one, or one of another model.
        UnsupportedModelError: something other than plain LoRA.
    """

    def __init__(self, base: Checkpoint, folder: Path, *, tied: bool) -> None:
        self.base, self.folder = base, base.folder
        self._adapter = adapter = _read(folder)
        self._stored = StoredAdapter(folder)
        self.entries = dict(base.entries)
        self._names = {PREFIX.sub("", name): name for name in base.entries}
        if HEAD in adapter.whole and HEAD not in self._names:
            self._names[HEAD] = HEAD
            self.entries[HEAD] = self._stored.entries[adapter.whole[HEAD]]
        self._own = {stored: name for name, stored in self._names.items()}
        self._check(tied)

    def _check(self, tied: bool) -> None:
        adapter = self._adapter
        changed = adapter.factors.keys() | adapter.whole.keys()
        if unknown := sorted(changed - self._names.keys()):
            raise CheckpointError(
                f"{adapter.folder} adapts {some(unknown)}, which {self.base.folder} does not hold; use its base model"
            )
        if tied and changed & {EMBEDDING, HEAD} and HEAD not in adapter.whole:
            raise UnsupportedModelError(
                f"{adapter.folder} adapts the embedding or the head of a model that uses one tensor for both, which "
                f"has no one meaning; merge it with peft (merge_and_unload) and load the result"
            )
        for name in changed:
            if (shape := self._shape(name)) != (wanted := self.entries[self._names[name]].shape):
                raise CheckpointError(
                    f"{adapter.folder} adapts {name} of shape {shape}, but {self.base.folder} holds {wanted}; use its "
                    f"base model"
                )

    def _shape(self, name: str) -> tuple[int, ...]:
        """The shape that the adapter has for a tensor."""
        entries = self._stored.entries
        if name in self._adapter.whole:
            return entries[self._adapter.whole[name]].shape
        factors = self._adapter.factors[name]
        a, b = entries[factors.a].shape, entries[factors.b].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
            raise CheckpointError(f"{self._adapter.folder}: factors of {name} have shapes {a} and {b}; save it again")
        outputs, inputs = b[0], a[1]
        return (inputs, outputs) if factors.embedding else (outputs, inputs)

    @property
    def kind(self) -> str | None:
        """That of the base model."""
        return self.base.kind

    def dtype(self) -> torch.dtype:
        """That of the base model."""
        return self.base.dtype()

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor with what the adapter changes in it; see `Checkpoint.tensor`."""
        adapter, target = self._adapter, self._own[name]
        if target in adapter.whole:
            return self._stored.tensor(adapter.whole[target])
        tensor = self.base.tensor(name)
        factors = adapter.factors.get(target)
        return tensor if factors is None else tensor.float() + self._change(target, factors)

    def fill(self, name: str, out: torch.Tensor) -> None:
        """See `Checkpoint.fill`."""
        target = self._own[name]
        if target in self._adapter.whole or target in self._adapter.factors:
            out.copy_(self.tensor(name))
        else:
            self.base.fill(name, out)

    def _change(self, name: str, factors: _Factors) -> torch.Tensor:
        a, b = (self._stored.tensor(factor).float() for factor in (factors.a, factors.b))
        change = b @ a * _scale(self._adapter.config, name, len(a))
        return change.T if factors.embedding else change


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds a LoRA adapter as PEFT writes it."""
    return (Path(folder) / CONFIG).is_file()


def write_adapter(
    folder: Path, factors: Mapping[str, tuple[torch.Tensor, torch.Tensor]], *, alpha: float, base: str
) -> None:
    """Write an adapter as PEFT does.

    Args:
        factors: module, as `model.layers.0.self_attn.q_proj` -> (r, in) and (out, r), r the same for all.
        alpha: their product counts alpha / r times. base: folder or hub id of the model that is adapted.
    """
    (rank,) = {len(a) for a, _ in factors.values()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in factors}),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {
        f"{OUTER}{name}.lora_{side}.weight": factor.detach().contiguous().cpu()
        for name, pair in factors.items()
        for side, factor in zip("AB", pair, strict=True)
    }
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / CONFIG) as fresh:  # in its place behind the weights
        fresh.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        with replacing(folder / WEIGHTS) as weights:
            save_file(tensors, weights, {"format": "pt"})
            shutil.copymode(fresh, weights)  # safetensors lets the owner alone read it


class StoredAdapter(Checkpoint):
    """The tensors in an adapter's file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries = read_header(folder / WEIGHTS)
        self._open: dict[Path, Any] = {}


def _read(folder: Path) -> _Adapter:
    if not folder.is_dir():
        raise CheckpointError(
            f"no folder {str(folder)!r}; adapters are not downloaded, give the folder that PEFT wrote"
        )
    refuse_unfinished(folder)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"no LoRA adapter in {folder}: {CONFIG} is missing; give the folder that PEFT wrote")
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder} holds no {WEIGHTS}; pickled adapters are not read, save it as safetensors")
    config = read_json(folder / CONFIG)
    _check_config(folder, config)
    adapter, sides = _Adapter(folder, config), dict[str, dict[str, str]]()
    for stored in read_header(folder / WEIGHTS):
        name = PREFIX.sub("", stored.removeprefix(OUTER).replace(".base_layer.", ".").replace(".modules_to_save.", "."))
        if (match := FACTOR.match(name)) is not None:
            sides.setdefault(f"{match['module']}.weight", {})[match["side"]] = stored
        elif "lora_" in stored:
            raise UnsupportedModelError(f"{folder}: {stored} belongs to a variant of LoRA that is not supported")
        else:
            adapter.whole[name] = stored
    if lone := sorted(target for target, pair in sides.items() if len(pair) < 2):
        raise CheckpointError(f"{folder} holds one factor only of {some(lone)}; save the adapter again")
    for target, pair in sides.items():
        adapter.factors[target] = _Factors(pair["A"], pair["B"], "lora_embedding_" in pair["A"])
        adapter.whole.pop(target, None)  # PEFT saves the base of an adapted embedding too
    _check_targets(adapter)
    return adapter


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    if str(config.get("peft_type")).upper() != "LORA":
        raise UnsupportedModelError(f"{folder} is an adapter of type {config.get('peft_type')!r}; only LoRA is merged")
    start = config.get("init_lora_weights", True)
    named = [OTHER.get(key, f"{key}={shortened(value)}") for key, value in config.items() if value and key not in READ]
    if start not in PLAIN_STARTS:
        named.append(f"init_lora_weights={start!r}")
    if named:
        raise UnsupportedModelError(
            f"{folder} is a LoRA adapter with {named[0]}, which is not supported; merge it with peft (merge_and_unload)"
        )
    for key in ("r", "lora_alpha"):
        value = config.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
            raise CheckpointError(f"{folder}/{CONFIG}: {key!r} must be a number above 0, got {shortened(value)}")
    for pattern, value in _patterns(folder, config).items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"{folder}/{CONFIG}: alpha_pattern of {pattern!r} must be a number")


def _patterns(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Scales of single modules by regular expressions of their names."""
    alphas = config.get("alpha_pattern") or {}
    if not isinstance(alphas, Mapping):
        raise CheckpointError(f"{folder}/{CONFIG}: 'alpha_pattern' must be an object, got {shortened(alphas)}")
    try:
        for pattern in alphas:
            re.compile(pattern)
    except re.error as error:
        raise CheckpointError(f"{folder}/{CONFIG}: alpha_pattern: {pattern!r} is no pattern ({error})") from error
    return alphas


def _check_targets(adapter: _Adapter) -> None:
    """Every module that the configuration lists is adapted."""
    listed = adapter.config.get("target_modules")
    missing = []
    for name in listed if isinstance(listed, list) else []:
        base = PREFIX.sub("", str(name))
        if not any(target == f"{base}.weight" or target.endswith(f".{base}.weight") for target in adapter.factors):
            missing.append(str(name))
    if missing or not adapter.factors:
        what = some(sorted(missing)) if missing else "any module"
        raise CheckpointError(f"{adapter.folder} holds no factors for {what}; save the adapter again")


def _scale(config: Mapping[str, Any], name: str, rank: int) -> float:
    """The factor on an adapted matrix's change. (`fan_in_fan_out` counts for modules that no family here has.)"""
    module, alpha = name.removesuffix(".weight"), float(config["lora_alpha"])
    for pattern, value in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = float(value)
            break
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
