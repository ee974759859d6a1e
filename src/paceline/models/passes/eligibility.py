"""Whether a model runs in compiled passes on this machine: wherever they cover it and their self-test gives the right
numbers, in every process anew, by no timing. The user may switch them off.

numba is imported only where a model could use it.
"""

from __future__ import annotations

import functools
import logging
from typing import Final

import torch

from paceline.checkpoints import Form
from paceline.models.mixer_spec import (
    DeltaSpec,
    GatedMemorySpec,
    KimiDeltaSpec,
    LightNetSpec,
    Mamba2Spec,
    MambaSpec,
    MixerSpec,
    ShortConvSpec,
    SimpleUnitSpec,
)
from paceline.models.spec import ModelSpec
from paceline.utils import switched_on

SWITCH: Final = "PACELINE_COMPILED"
"""Environment variable: 0, off, no or false has PyTorch's operators run every model."""

STRIP, LANES = 64, 16
"""Outputs of a strip, which what is projected before a mixer is divided at, and numbers of a vector."""

MAX_INPUTS = 2**16
"""Integer sums of more products could leave int32."""

log = logging.getLogger("paceline")


def unsupported(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """What compiled passes lack for a model, or None."""
    ropes = {layer.rope for layer in spec.layers if layer.rope is not None}
    even = spec.hidden_size % 32 == spec.head_dim % 32 == 0 and all(size % 8 == 0 for size in spec.inner_sizes)
    whole = even and all((spec.ropes[key].width or spec.ropes[key].dims) % 32 == 0 for key in ropes)
    if (latent := spec.latent) is not None:
        whole &= latent.rank % 64 == latent.value % 64 == latent.rope % 32 == latent.nope % 32 == 0
        whole &= (latent.query_rank or 0) % 32 == 0
    reasons = {
        "the device is not the CPU": device.type == "cpu",
        "layers that read keys or states of other layers": not spec.shares_across_layers,
        "mixers of such kinds and sizes": _mixers_fit(spec),
        "differential attention": not spec.differential,
        "states between layers in another dtype": not spec.wide_sums,
        f"dtype {dtype}": dtype in {torch.float32, torch.bfloat16},
        "a negative attention scale": spec.scale > 0,
        "sizes that do not fill vectors": whole,
        "mixtures of experts beside attention": spec.moe is None or not spec.parallel,
        "soft caps beside attention sinks": spec.attention_softcap is None or not spec.attention_sinks,
    }
    return next((reason for reason, fine in reasons.items() if not fine), None)


def _mixers_fit(spec: ModelSpec) -> bool:
    """Whether all mixers fill vectors, and what they give is added to the residual stream as it is."""
    mixers = [layer.mixer for layer in spec.layers if layer.mixer is not None]
    fine = not spec.parallel and spec.norm_placement in {"pre", "residual"}
    return not mixers or (fine and all(_fills_vectors(mixer) for mixer in mixers))


def _fills_vectors(mixer: MixerSpec) -> bool:
    shape = mixer.state
    wide = all(size % LANES == 0 for size in (shape.channels, shape.key_dim, shape.value_dim))
    match mixer:
        case Mamba2Spec():
            whole = wide and mixer.inner // mixer.norm_groups % 32 == mixer.inner % STRIP == 0
        case DeltaSpec():
            whole = wide and mixer.value_dim % 32 == mixer.state.channels % STRIP == 0
        case ShortConvSpec():
            whole = mixer.channels % STRIP == 0
        case KimiDeltaSpec():
            whole = mixer.head_dim % 32 == mixer.inner % STRIP == 0
        case LightNetSpec():
            whole = wide and mixer.keys % STRIP == mixer.values % STRIP == mixer.rank % LANES == 0
        case MambaSpec():
            whole = mixer.channels % STRIP == mixer.state_dim % LANES == mixer.rank % LANES == 0
        case SimpleUnitSpec():
            whole = mixer.width % LANES == 0
        case GatedMemorySpec():
            whole = False
    return whole


def lacks(spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, quantization: Form | None = None) -> str | None:
    """What hinders the model from running in compiled passes here, or None; `quantization`: of its weights."""
    longest = max(spec.hidden_size, spec.attended_size, *spec.inner_sizes)
    if quantization and longest > MAX_INPUTS:
        return f"rows of more than {MAX_INPUTS} numbers"
    if (reason := unsupported(spec, dtype, device)) is not None:
        return reason
    return machine_lacks(dtype, quantization) if switched_on(SWITCH, "compiled passes") else f"{SWITCH} is off"


def fits(spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, quantization: Form | None = None) -> bool:
    """Whether the model runs in compiled passes here."""
    reason = lacks(spec, dtype, device, quantization=quantization)
    if reason is not None:
        log.debug("%s model: PyTorch runs it, compiled passes do not cover: %s", spec.family, reason)
    return reason is None


@functools.cache
def machine_lacks(dtype: torch.dtype, quantization: Form | None = None) -> str | None:
    """What this machine lacks for compiled passes in a dtype, or None."""
    try:
        from paceline.models.cpu.processor import features
        from paceline.models.cpu.threads import find_team
        from paceline.models.passes.self_test import agrees
    except (ImportError, OSError, AttributeError) as reason:  # a broken installation shows as any of them
        return f"numba cannot be imported ({reason})"
    if not (features().get("fma") or features().get("neon")):
        return "fused multiply-add"
    if find_team() is None and torch.get_num_threads() > 1:
        return "an OpenMP runtime with GNU entry points"
    if not agrees(dtype, quantization=quantization):
        return "right results in the self-test"
    return None
