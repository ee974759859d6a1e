"""Typed reading of a checkpoint's `config.json`: single values with the family's defaults, what differs from layer to
layer, and rotary parameters.

Rotary parameters come in the form of transformers 5 (`rope_parameters`) or the older ones: `rope_theta` and
`partial_rotary_factor` beside `rope_scaling`, whose kind may be called `type`, and "su" for longrope. What a kind needs
and lacks is an error; an unknown parameter is an error, since it may change the angles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import LayerSpec, RopeSpec
from paceline.utils import MAX_NUMBER, shortened

MAX_SIZE = 2**31 - 1
MAX_COUNTS = dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts", "first_k_dense_replace"), 10_000)
"""Sizes that are counted out in Python, so that a broken file must not make them endless."""

SIZES = ("head_dim", "num_key_value_heads", "original_max_position_embeddings", "sliding_window")
FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
"""Keys with one kind of value in every family; another kind is a sign of a damaged file, also where the family does not
read it.
"""


class ConfigKeys:
    """`config.json` over a family's defaults. An explicit null stays None; only a missing key takes the default. A
    sliding window of 0 is none where `use_sliding_window` is off, as transformers writes it for Qwen2-MoE.

    Args:
        own: names that keys have in files of this family -> names by which they are asked for; both may be in a file,
            and the own one counts.
    Attributes:
        family: `model_type`, for messages.
    """

    def __init__(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any], family: str, own: Mapping[str, str] = {}
    ) -> None:
        self._values = {**defaults, **config, **{name: config[one] for one, name in own.items() if one in config}}
        self._own = {name: one for one, name in own.items()}
        if self._values.get("use_sliding_window") is False and self._values.get("sliding_window") == 0:
            self._values["sliding_window"] = None
        self._defaults = defaults
        self.family = family

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def known(self, name: str) -> bool:
        """Whether the family reads this key, which is so if it has a default."""
        return name in self._defaults

    def given(self, name: str) -> bool:
        """Whether the key has a value other than null."""
        return self._values.get(name) is not None

    def check(self) -> None:
        """Reject a wrong value of a key that means the same in every family.

        Raises:
            CheckpointError: the first of them.
        """
        for name in SIZES:
            self.optional_size(name)
        for name in FLAGS:
            self.flag(name)

    def size(self, name: str) -> int:
        """A positive integer of a size that models have."""
        value = self._values.get(name)
        if value is None:
            raise CheckpointError(
                f"config.json lacks {self._own.get(name, name)!r}, which models of the family {self.family} need; "
                "repair or download it again"
            )
        most = MAX_COUNTS.get(name, MAX_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(name, f"an integer in 1..{most}")
        return value

    def optional_size(self, name: str) -> int | None:
        """A positive integer, or None for null or nothing."""
        return self.size(name) if self.given(name) else None

    def count(self, name: str) -> int:
        """An integer of 0 or more."""
        value, most = self._values.get(name), MAX_COUNTS.get(name, MAX_SIZE)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.wrong(name, f"an integer in 0..{most}")
        return value

    def number(self, name: str) -> float:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            raise self.wrong(name, "a finite number")
        return float(value)

    def share(self, name: str) -> float:
        """A number in 0..1."""
        if not 0 <= (value := self.number(name)) <= 1:
            raise self.wrong(name, "in 0..1")
        return value

    def positive(self, name: str) -> float:
        """A number above 0."""
        if (value := self.number(name)) <= 0:
            raise self.wrong(name, "above 0")
        return value

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.given(name) else None

    def optional_positive(self, name: str) -> float | None:
        """A number above 0, or None for null or nothing."""
        return self.positive(name) if self.given(name) else None

    def flag(self, name: str) -> bool:
        """True or False; null and nothing are False."""
        value = self._values.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """An object; {} for null or nothing."""
        value = self._values.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return dict(value)

    def items(self, name: str, length: int | None = None) -> list[Any] | None:
        """A list, of `length` entries where that is given; None for null or nothing."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        if length is not None and len(value) != length:
            raise self.wrong(name, f"a list of {length} entries, one per layer")
        return value

    def integers(self, name: str, length: int | None = None) -> list[int] | None:
        """A list of integers of 0 or more, see `items`."""
        value = self.items(name, length)
        if not all(isinstance(item, int) and item >= 0 for item in value or []):
            raise self.wrong(name, "a list of integers")
        return value

    def numbers(self, name: str, length: int) -> list[float] | None:
        """A list of so many finite numbers; None for null or nothing."""
        value = self.items(name, length)
        for item in value or []:
            if isinstance(item, bool) or not isinstance(item, int | float) or not abs(item) <= MAX_NUMBER:
                raise self.wrong(name, f"a list of {length} finite numbers")
        return None if value is None else [float(item) for item in value]

    def only(self, implemented: Mapping[str, tuple[object, ...]]) -> None:
        """Reject keys that have another value than null or one of those that are implemented.

        Raises:
            UnsupportedModelError: the first of them.
        """
        for name, values in implemented.items():
            if self.get(name) not in (None, *values):
                raise UnsupportedModelError(
                    f"{self.family}: {name}={self.get(name)!r} is not implemented in the native decoder"
                )

    def wrong(self, name: str, rule: str) -> CheckpointError:
        """The error for a value of the wrong kind."""
        return CheckpointError(
            f"config.json: {self._own.get(name, name)!r} must be {rule}, got {shortened(self._values.get(name))}; "
            f"repair or download it again"
        )


FULL: str = "full_attention"
SLIDING: str = "sliding_attention"

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
    sparse = sparse_layers(keys, count) if mixture else [False] * count
    window = keys.optional_size("sliding_window") if SLIDING in types else None
    layers = []
    for kind, rotates, moe in zip(types, rotated, sparse, strict=True):
        rope = (kind if rope_by_type else "default") if rotates else None
        layers.append(LayerSpec(rope=rope, window=window if kind == SLIDING else None, moe=moe))
    return tuple(layers)


def _types(keys: ConfigKeys, windows: Windows, count: int) -> list[str]:
    derived = [SLIDING if _slides(keys, windows, i) else FULL for i in range(count)]
    declared: list[Any] | None = keys.items("layer_types", count)
    if declared is None:
        return derived
    if unknown := [kind for kind in declared if kind not in (FULL, SLIDING)]:
        raise UnsupportedModelError(f"{keys.family}: layers of type {unknown[0]!r} are not implemented")
    if windows != "types" and declared != derived:
        raise UnsupportedModelError(
            f"{keys.family}: layer_types that differ from what sliding_window says are not implemented"
        )
    return declared if _may_slide(keys) else [FULL] * count


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
    pattern = keys.get("sliding_window_pattern")
    if isinstance(pattern, str):
        return _slides_in_letters(keys, pattern, layer)
    return bool((layer + 1) % keys.size("sliding_window_pattern"))


def _slides_in_letters(keys: ConfigKeys, pattern: str, layer: int) -> bool:
    """The same of a pattern in letters, "LLLG": local and global, from the first layer on; the last one is global."""
    if not pattern or set(pattern) - {"L", "G"}:
        raise keys.wrong("sliding_window_pattern", "an integer or letters L and G")
    return pattern[layer % len(pattern)] == "L" and layer + 1 < keys.size("num_hidden_layers")


def _rotated(keys: ConfigKeys, count: int) -> list[bool]:
    """Which layers have a rotary embedding; a 0 in `no_rope_layers` means none."""
    if not keys.known("no_rope_layer_interval"):
        return [True] * count
    declared = keys.integers("no_rope_layers", None if count < keys.size("num_hidden_layers") else count)
    if declared is not None:
        return [bool(value) for value in declared[:count]]
    interval = keys.size("no_rope_layer_interval")
    return [(layer + 1) % interval != 0 for layer in range(count)]


def sparse_layers(keys: ConfigKeys, count: int) -> list[bool]:
    """Which layers are mixtures of experts: as `mlp_layer_types` says, or older keys."""
    if (kinds := keys.items("mlp_layer_types", count)) is not None:
        if unknown := [kind for kind in kinds if kind not in ("dense", "sparse")]:
            raise UnsupportedModelError(f"{keys.family}: MLPs of type {unknown[0]!r} are not implemented")
        return [kind == "sparse" for kind in kinds]
    dense, step = keys.integers("mlp_only_layers") or [], keys.size("decoder_sparse_step")
    first = keys.count("first_k_dense_replace")
    return [layer >= first and layer not in dense and (layer + 1) % step == 0 for layer in range(count)]


ROPE_NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "factors": ("factors",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Kinds, and the parameters that have no default."""

ROPE_OPTIONAL = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
ROPE_NUMBERS = (*ROPE_OPTIONAL, "low_freq_factor", "high_freq_factor")
TINY, HUGE = 1e-6, 1e12
ROPE_MINIMA = {
    "factor": TINY,
    "original_max_position_embeddings": 2,
    "beta_fast": TINY,
    "beta_slow": TINY,
    "attention_factor": TINY,
}
"""Least value of a parameter that is divided by, or whose logarithm is taken; 0 for the others. None is above HUGE."""

ROPE_LISTS = ("short_factor", "long_factor", "factors")
ROPE_PARAMETERS = (*ROPE_NUMBERS, *ROPE_LISTS, "truncate")
ROPE_READ_ELSEWHERE = (
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"),
    *("max_position_embeddings", "llama_4_scaling_beta", "alpha"),
)
ROPE_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""Keys that are read elsewhere, or say nothing about the angles of text."""


def rope_spec(keys: ConfigKeys, head_dim: int) -> RopeSpec:
    """The one rotary table of a model.

    Raises:
        CheckpointError: a parameter is missing or of the wrong kind.
        UnsupportedModelError: a kind or parameter that is not implemented.
    """
    scaling, parameters = keys.mapping("rope_scaling"), keys.mapping("rope_parameters")
    parameters_read = scaling or parameters
    if any(isinstance(value, Mapping) for value in parameters_read.values()):
        raise UnsupportedModelError(
            f"{keys.family}: rope_parameters for each layer type are not implemented for this family"
        )
    return _make_rope(keys, parameters_read, head_dim, theta=keys.number("rope_theta"))


def local_and_global(keys: ConfigKeys, head_dim: int) -> dict[str, RopeSpec]:
    """The tables of Gemma 3 and OLMo 3 by layer type; older files scale the global one only.

    Raises:
        CheckpointError, UnsupportedModelError: see `rope_spec`.
    """
    by_kind = keys.mapping("rope_parameters")
    if by_kind and not by_kind.keys() & {"full_attention", "sliding_attention"}:
        raise UnsupportedModelError(
            f"{keys.family}: rope_parameters need full_attention and sliding_attention, got {sorted(by_kind)}"
        )
    own_keys = ConfigKeys(by_kind, {}, keys.family)
    whole = {**own_keys.mapping("full_attention"), **keys.mapping("rope_scaling")}
    sliding = own_keys.mapping("sliding_attention")
    local = "rope_local_base_freq" if keys.given("rope_local_base_freq") else "rope_theta"
    return {
        "full_attention": _make_rope(keys, whole, head_dim, theta=keys.number("rope_theta")),
        "sliding_attention": _make_rope(keys, sliding, head_dim, theta=keys.number(local)),
    }


def _make_rope(keys: ConfigKeys, parameters: Mapping[str, Any], head_dim: int, *, theta: float) -> RopeSpec:
    """One table from one set of parameters; `theta` is used where they name none."""
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    if kind == "su" or (keys.family == "phi3" and kind == "yarn"):
        kind = "longrope"
    if kind not in ROPE_NEEDED:
        raise UnsupportedModelError(
            f"{keys.family}: rope type {kind!r} is not implemented; known are {', '.join(ROPE_NEEDED)}"
        )
    unknown = [
        key
        for key, value in parameters.items()
        if key not in (*ROPE_PARAMETERS, *ROPE_READ_ELSEWHERE, *ROPE_OF_IMAGES) and value is not None
    ]
    if unknown:
        raise UnsupportedModelError(f"{keys.family}: rope parameter {unknown[0]!r} is not implemented")
    base = theta if parameters.get("rope_theta") is None else parameters["rope_theta"]
    if not _in_range(base, 1.0) or base == 1:
        raise CheckpointError(
            f"config.json: rope_theta must be a number above 1 and at most {HUGE:g}, got {shortened(base)}; "
            "repair or download it again"
        )
    dims, own = _dims(keys, parameters, head_dim), ConfigKeys(parameters, {}, keys.family)
    if kind == "dynamic" and own.given("alpha"):  # of Hunyuan, which stretches wavelengths once, whatever the length
        kind, base = "default", base * own.positive("alpha") ** (dims / max(1, dims - 2))
    scaling = _scaling(keys, kind, parameters, dims) if kind != "default" else {}
    return RopeSpec(
        theta=float(base),
        dims=dims,
        kind=kind,
        scaling=scaling,
        max_position=keys.size("max_position_embeddings"),
        growth=_growth(own),
    )


def _growth(parameters: ConfigKeys) -> tuple[float, int] | None:
    """See `RopeSpec.growth`."""
    rate = parameters.optional_number("llama_4_scaling_beta")
    return None if not rate else (rate, parameters.size("original_max_position_embeddings"))


def _dims(keys: ConfigKeys, parameters: Mapping[str, Any], head_dim: int) -> int:
    part = parameters.get("partial_rotary_factor")
    if part is None:
        part = keys.optional_number("partial_rotary_factor")
    if part is None and keys.known("rotary_dim") and keys.given("rotary_dim"):
        part = keys.size("rotary_dim") / head_dim
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


def _scaling(keys: ConfigKeys, kind: str, parameters: Mapping[str, Any], dims: int) -> dict[str, object]:
    scaling: dict[str, object] = {key: parameters[key] for key in ROPE_PARAMETERS if parameters.get(key) is not None}
    if kind in {"yarn", "longrope", "llama3"}:
        outside = keys.optional_size("original_max_position_embeddings")
        if outside is not None:
            scaling["original_max_position_embeddings"] = outside
        if kind == "yarn" and not scaling.keys() & {"factor", "original_max_position_embeddings"}:
            raise CheckpointError(
                "config.json: rope type 'yarn' needs 'factor' (or the length before); repair or download it again"
            )
        scaling.setdefault("original_max_position_embeddings", keys.size("max_position_embeddings"))
    for key in ROPE_NEEDED[kind]:
        if key not in scaling:
            raise CheckpointError(f"config.json: rope type {kind!r} needs {key!r}; repair or download it again")
    for key in ROPE_NUMBERS:
        least = ROPE_MINIMA.get(key, 0.0)
        if key in scaling and not _in_range(scaling[key], least):
            got = shortened(scaling[key])
            raise CheckpointError(
                f"config.json: rope parameter {key!r} must be a number of {least:g} or more, got {got}"
            )
    for key in (name for name in ROPE_LISTS if name in ROPE_NEEDED[kind]):
        values = scaling[key]
        if not isinstance(values, list) or len(values) != dims // 2 or not all(_in_range(v, TINY) for v in values):
            raise CheckpointError(f"config.json: rope parameter {key!r} must be a list of {dims // 2} positive numbers")
    _check_shape(kind, scaling)
    return scaling


def _check_shape(kind: str, scaling: Mapping[str, Any]) -> None:
    """Reject what is a number by itself but does not fit the others."""
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
