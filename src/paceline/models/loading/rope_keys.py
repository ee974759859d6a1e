"""Rotary parameters of a `config.json`, in the form of transformers 5 (`rope_parameters`) or the older ones, as a
RopeSpec.

In: ConfigKeys. Out: RopeSpec. Not here: angles (models.decoder.rope), which layer uses which table
(models.loading.families).

Older files have `rope_theta` and `partial_rotary_factor` beside `rope_scaling`, whose kind may be called `type`, and
"su" for longrope. What a kind needs and lacks is an error; a parameter that is not known refuses the model, since it
may change the angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models.loading.config_keys import ConfigKeys
from paceline.models.spec import RopeSpec
from paceline.utils import shortened

NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Kinds, and the parameters that have no default."""

OPTIONAL = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
NUMBERS = (*OPTIONAL, "low_freq_factor", "high_freq_factor")
TINY, HUGE = 1e-6, 1e12
LEAST = {
    "factor": TINY,
    "original_max_position_embeddings": 2,
    "beta_fast": TINY,
    "beta_slow": TINY,
    "attention_factor": TINY,
}
"""Least value of a parameter that is divided by, or whose logarithm is taken; 0 for the others. None is above HUGE."""

LISTS = ("short_factor", "long_factor")
KNOWN = (*NUMBERS, *LISTS, "truncate")
APART = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")
"""Keys that are read elsewhere, or say nothing about the angles."""


def rope_spec(keys: ConfigKeys, head_dim: int) -> RopeSpec:
    """The one rotary table of a model.

    Raises:
        CheckpointError: a parameter is missing or of the wrong kind.
        UnsupportedModelError: a kind or parameter that is not implemented.
    """
    scaling, parameters = keys.mapping("rope_scaling"), keys.mapping("rope_parameters")
    given = scaling or parameters
    if any(isinstance(value, Mapping) for value in given.values()):
        raise UnsupportedModelError(
            f"{keys.family}: rope_parameters for each layer type are not implemented for this family"
        )
    return make_spec(keys, given, head_dim, theta=keys.number("rope_theta"))


def local_and_global(keys: ConfigKeys, head_dim: int) -> dict[str, RopeSpec]:
    """The tables of Gemma 3 by layer type; older files scale the global one only.

    Raises:
        CheckpointError, UnsupportedModelError: see `rope_spec`.
    """
    given = keys.mapping("rope_parameters")
    if given and not given.keys() & {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"{keys.family}: rope_parameters need full_attention and sliding_attention, got {sorted(given)}"
        )
    own = ConfigKeys(given, {}, keys.family)
    whole = {**own.mapping("full_attention"), **keys.mapping("rope_scaling")}
    sliding = own.mapping("sliding_attention")
    return {
        "full_attention": make_spec(keys, whole, head_dim, theta=keys.number("rope_theta")),
        "sliding_attention": make_spec(keys, sliding, head_dim, theta=keys.number("rope_local_base_freq")),
    }


def make_spec(keys: ConfigKeys, given: Mapping[str, Any], head_dim: int, *, theta: float) -> RopeSpec:
    """One table from one set of parameters; `theta` is used where they name none."""
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind == "su" or (keys.family == "phi3" and kind == "yarn"):
        kind = "longrope"
    if kind not in NEEDED:
        raise UnsupportedModelError(
            f"{keys.family}: rope type {kind!r} is not implemented; known are {', '.join(NEEDED)}"
        )
    unknown = [key for key, value in given.items() if key not in (*KNOWN, *APART) and value is not None]
    if unknown:
        raise UnsupportedModelError(f"{keys.family}: rope parameter {unknown[0]!r} is not implemented")
    base = theta if given.get("rope_theta") is None else given["rope_theta"]
    if not _in_range(base, 1.0) or base == 1:
        raise CheckpointError(
            f"config.json: rope_theta must be a number above 1 and at most {HUGE:g}, got {shortened(base)}; "
            "repair or download it again"
        )
    dims = _dims(keys, given, head_dim)
    scaling = _scaling(keys, kind, given, dims) if kind != "default" else {}
    return RopeSpec(
        theta=float(base), dims=dims, kind=kind, scaling=scaling, max_position=keys.size("max_position_embeddings")
    )


def _dims(keys: ConfigKeys, given: Mapping[str, Any], head_dim: int) -> int:
    part = given.get("partial_rotary_factor")
    if part is None:
        part = keys.optional_number("partial_rotary_factor")
    if part is not None and not (_in_range(part, 0.0) and 0 < part <= 1):
        got = shortened(part)
        raise CheckpointError(
            f"config.json: partial_rotary_factor must lie in 0..1, got {got}; repair or download it again"
        )
    dims = int(head_dim * (1.0 if part is None else part))
    if dims < 2 or dims % 2:
        raise CheckpointError(
            f"config.json: {dims} rotated dimensions of each head, but they come in pairs; check head_dim"
        )
    return dims


def _scaling(keys: ConfigKeys, kind: str, given: Mapping[str, Any], dims: int) -> dict[str, object]:
    scaling: dict[str, object] = {key: given[key] for key in KNOWN if given.get(key) is not None}
    if kind in {"yarn", "longrope", "llama3"}:
        outside = keys.optional_size("original_max_position_embeddings")
        if outside is not None:
            scaling["original_max_position_embeddings"] = outside
        if kind == "yarn" and not scaling.keys() & {"factor", "original_max_position_embeddings"}:
            raise CheckpointError(
                "config.json: rope type 'yarn' needs 'factor' (or the length before); repair or download it again"
            )
        scaling.setdefault("original_max_position_embeddings", keys.size("max_position_embeddings"))
    for key in NEEDED[kind]:
        if key not in scaling:
            raise CheckpointError(f"config.json: rope type {kind!r} needs {key!r}; repair or download it again")
    for key in NUMBERS:
        least = LEAST.get(key, 0.0)
        if key in scaling and not _in_range(scaling[key], least):
            got = shortened(scaling[key])
            raise CheckpointError(
                f"config.json: rope parameter {key!r} must be a number of {least:g} or more, got {got}"
            )
    for key in LISTS if kind == "longrope" else ():
        values = scaling[key]
        if not isinstance(values, list) or len(values) != dims // 2 or not all(_in_range(v, TINY) for v in values):
            raise CheckpointError(f"config.json: rope parameter {key!r} must be a list of {dims // 2} positive numbers")
    _check_shape(kind, scaling)
    return scaling


def _check_shape(kind: str, scaling: Mapping[str, Any]) -> None:
    """Refuse what is a number by itself but not beside the others."""
    low, high = scaling.get("low_freq_factor", 0), scaling.get("high_freq_factor", 0)
    if kind == "llama3" and low >= high:
        raise CheckpointError(
            f"config.json: rope parameter 'high_freq_factor' must be above low_freq_factor={low}, got {high}"
        )
    if not isinstance(truncate := scaling.get("truncate", True), bool):
        raise CheckpointError(
            f"config.json: rope parameter 'truncate' must be true or false, got {shortened(truncate)}"
        )


def _in_range(value: object, least: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= HUGE
