"""Modules for multi-token prediction: a decoder layer over the target's states that shares its embedding and head.

A module lies in the target's own files (checkpoints.prediction_modules), with a layer of the target's kind, or in files
of its own (`paceline train mtp`), with a layer of Llama's or Qwen3's form. It reads the target's state after the final
norm and the embedding of the next token, each normed, and drafts from the state behind its own norm. For more tokens
than one it goes on from that state, in the same layer and cache: SGLang and llama.cpp do so too; vLLM goes on from the
state before the norm in DeepSeek's and GLM's modules, and reads zeros in the place of the first token's embedding.
Such differences change what is drafted, never what is written.

Sources: DeepSeek-V3 Technical Report (arXiv:2412.19437), FastMTP (arXiv:2509.18362).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from paceline.checkpoints import BLOCKS, Form, PredictionModule, prediction_module, quantize, resolve
from paceline.errors import CheckpointError
from paceline.models.base import Runner
from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.head_files import KEY, read_head, stored_config
from paceline.models.heads.shared_rows import embedding_of, head_of
from paceline.models.layers.linear import Map, make_linear, make_norm
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.feature_head import FeatureHead, HeadParts, LayerInputs, own_head_rows
from paceline.models.runners.native import NativeRunner
from paceline.models.runners.state_layer import UNUSED, layer_runner, layer_spec, state_layer

Kept = Callable[[float], Sequence[int] | None]
"""Of a module of a checkpoint, the ascending ids of the tokens that it drafts, None for all, by the head's share of
what a drafted token reads.
"""


def load_mtp_head(
    model: str | Path, target: Runner, *, tokenizer: Callable[[], str] = str, kept: Kept = lambda share: None
) -> FeatureHead:
    """The module in a folder or of a hub id: the target's own checkpoint, another one like it, or a trained head.

    Args:
        tokenizer: gives the fingerprint of the target's tokenizer, "" where it is not known.
        kept: what a module of a checkpoint drafts; a trained head says so itself.
    Raises:
        CheckpointError: there is none, it is not whole, or it is for another model.
        UnsupportedModelError: its layers, or a target, that are not implemented.
        CapabilityError: a target that cannot give embeddings or its head.
    """
    folder, name = resolve(model), str(model)
    if folder.is_dir() and KEY in stored_config(folder):
        config, weights = read_head(folder, target.info, tokenizer=tokenizer)
        if config.method != "mtp":
            raise CheckpointError(f"the head {name} is of method {config.method!r}, not 'mtp'; name that one")
        return FeatureHead(_trained_parts(config, weights, target, name=name))
    module = prediction_module(folder)
    if module is None:
        raise CheckpointError(
            f"{name} holds no module for multi-token prediction; use a model that has one, or name one of "
            "`paceline train mtp` as model"
        )
    return FeatureHead(_module_parts(module, target, kept, name=name))


class _MtpInputs:
    """fc([norm(embedding); norm(state)]), or with the halves the other way round."""

    def __init__(self, fc: Map, embed_norm: Map, state_norm: Map, *, state_first: bool) -> None:
        self._fc, self._embed_norm, self._state_norm = fc, embed_norm, state_norm
        self._state_first = state_first

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor) -> LayerInputs:
        halves = (self._embed_norm(embedded), self._state_norm(states))
        return LayerInputs(self._fc(torch.cat(halves[::-1] if self._state_first else halves, 1)))


def _trained_parts(config: HeadConfig, weights: Weights, target: Runner, *, name: str) -> HeadParts:
    """A module in files of its own; `weights` by the names of `tensors_of`."""
    tokens = weights.pop("draft_to_target", None)
    embed = embedding_of(weights.pop("embed.weight", None), target, name)
    rows = own_head_rows(weights, target, tokens, name=name)
    spec = layer_spec(config, weights, "layers.0.", UNUSED if rows is None else config.draft_vocab_size)
    fc = make_linear(weights.pop("fc.weight"), weights.pop("fc.bias", None), row_invariant=False)
    embed_norm, state_norm = (
        make_norm(weights.pop(f"{part}_norm.weight"), spec.norm_eps) for part in ("embed", "state")
    )
    return HeadParts(
        taps=config.taps_in(target.info.num_layers), embed=embed, tokens=tokens,
        inputs=_MtpInputs(fc, embed_norm, state_norm, state_first=False),
        next_states=make_norm(weights["norm.weight"], spec.norm_eps),
        to_logits=_head_of_normed(target, name) if rows is None else None,
        layer=state_layer(spec, weights, target.info, name=name, prefix="layers.0.", head=rows),
    )  # fmt: skip


def _module_parts(module: PredictionModule, target: Runner, kept: Kept, *, name: str) -> HeadParts:
    """A module of a checkpoint like the target's; its layers are rounded as the target's, what is before them is not.

    Raises:
        CheckpointError: states of another size.
    """
    info, spec = target.info, module.spec
    if spec.hidden_size != info.hidden_size:
        raise CheckpointError(
            f"the prediction module of {name} is for hidden_size {spec.hidden_size}, but {info.name} has "
            f"{info.hidden_size}; use that of the same model"
        )
    ids = kept(module.head_share(info.vocab_size))
    tokens = None if ids is None else torch.tensor(ids, device=info.device)
    rows = own_head_rows({}, target, tokens, name=name)
    fc = make_linear(module.read_part("fc", device=info.device, dtype=info.dtype), row_invariant=False)
    embed_norm, state_norm, norm = (
        make_norm(module.read_part(part, device=info.device, dtype=info.dtype), spec.norm_eps, offset=spec.norm_offset)
        for part in ("embed_norm", "state_norm", "norm")
    )
    return HeadParts(
        taps=(info.num_layers,), embed=embedding_of(None, target, name), next_states=norm, tokens=tokens,
        inputs=_MtpInputs(fc, embed_norm, state_norm, state_first=module.state_first),
        to_logits=_head_of_normed(target, name) if rows is None else None, layer=_layers(module, target, rows, name),
    )  # fmt: skip


def _layers(module: PredictionModule, target: Runner, rows: torch.Tensor | None, name: str) -> NativeRunner:
    """A module's layers, with the norm and so many rows (n, hidden) of a head, or with a head that never runs, and an
    embedding that never does.
    """
    info, spec = target.info, replace(module.spec, logit_multiplier=1.0, logit_softcap=None)
    weights = module.read_layers(device=info.device, dtype=info.dtype)
    unused = torch.ones(UNUSED, spec.hidden_size, device=info.device, dtype=info.dtype)
    weights |= {"embed.weight": unused, "head.weight": unused.clone() if rows is None else rows}
    if rows is not None:
        weights["final_norm.weight"] = module.read_part("norm", device=info.device, dtype=info.dtype)
    spec = replace(spec, vocab_size=len(weights["head.weight"]), final_norm=rows is not None)
    if info.quantization is not None and info.quantization != BLOCKS:
        weights = quantize(weights, spec, cast(Form, info.quantization))
    return layer_runner(spec, weights, info, name=name)


def _head_of_normed(target: Runner, name: str) -> Map:
    """The target's head on states that were normed."""
    head = head_of(target, name).head
    return lambda states: head(states, norm=False)
