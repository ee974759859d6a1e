"""What differs from layer to layer in a `config.json`: windows, positions, mixtures of experts.

In: ConfigKeys and the family's rule for windows. Out: LayerSpecs. Not here: everything that all layers share
    (models.loading.families).
"""

from __future__ import annotations

from typing import Any, Literal

from paceline.errors import UnsupportedModelError
from paceline.models.loading.config_keys import ConfigKeys
from paceline.models.spec import LayerSpec

FULL, SLIDING = "full_attention", "sliding_attention"

Windows = Literal["none", "all", "types"]


def layer_specs(keys: ConfigKeys, windows: Windows, *, rope_by_type: bool, mixture: bool) -> tuple[LayerSpec, ...]:
    """One LayerSpec per layer.

    Args:
        windows: "none"; "all" layers slide if `sliding_window` is set; "types": as `layer_types`, or the older keys,
        say.
        rope_by_type: the rotary table is named by the layer's type.
        mixture: the family has mixtures of experts; which layers, the file says.
    Raises:
        UnsupportedModelError: a layer type that is not implemented.
        CheckpointError: a list that is too short or of the wrong kind.
    """
    count = keys.size("num_hidden_layers")
    types = _types(keys, windows, count)
    rotated = _rotated(keys, count)
    sparse = _sparse(keys, count) if mixture else [False] * count
    window = keys.optional_size("sliding_window") if SLIDING in types else None
    layers = []
    for kind, rotates, moe in zip(types, rotated, sparse, strict=True):
        rope = (kind if rope_by_type else "default") if rotates else None
        layers.append(LayerSpec(rope=rope, window=window if kind == SLIDING else None, moe=moe))
    return tuple(layers)


def _types(keys: ConfigKeys, windows: Windows, count: int) -> list[str]:
    derived = [SLIDING if _slides(keys, windows, i) else FULL for i in range(count)]
    given: list[Any] | None = keys.items("layer_types", count)
    if given is None:
        return derived
    if unknown := [kind for kind in given if kind not in (FULL, SLIDING)]:
        raise UnsupportedModelError(f"{keys.family}: layers of type {unknown[0]!r} are not implemented")
    if windows != "types" and given != derived:
        raise UnsupportedModelError(
            f"{keys.family}: layer_types that differ from what sliding_window says are not implemented"
        )
    return given if _may_slide(keys) else [FULL] * count


def _may_slide(keys: ConfigKeys) -> bool:
    """Families with a switch for sliding windows slide only when it is on."""
    return keys.flag("use_sliding_window") if keys.known("use_sliding_window") else True


def _slides(keys: ConfigKeys, windows: Windows, layer: int) -> bool:
    """Whether a layer slides according to the older keys."""
    if windows == "none" or not keys.given("sliding_window") or not _may_slide(keys):
        return False
    if windows == "all":
        return True
    if keys.known("no_rope_layer_interval"):
        return not _rotated(keys, layer + 1)[layer]
    if keys.known("max_window_layers"):
        return layer >= keys.count("max_window_layers")
    return bool((layer + 1) % keys.size("sliding_window_pattern"))


def _rotated(keys: ConfigKeys, count: int) -> list[bool]:
    """Which layers have a rotary embedding; a 0 in `no_rope_layers` means none."""
    if not keys.known("no_rope_layer_interval"):
        return [True] * count
    given = keys.integers("no_rope_layers", None if count < keys.size("num_hidden_layers") else count)
    if given is not None:
        return [bool(value) for value in given[:count]]
    interval = keys.size("no_rope_layer_interval")
    return [(layer + 1) % interval != 0 for layer in range(count)]


def _sparse(keys: ConfigKeys, count: int) -> list[bool]:
    """Which layers are mixtures of experts."""
    dense, step = keys.integers("mlp_only_layers") or [], keys.size("decoder_sparse_step")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(count)]
