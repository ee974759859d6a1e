"""What a trained head is: its method, its sizes, and which states of the target it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, get_args

from paceline.utils import choice, integer, need, reject_unknown

HeadMethod = Literal["medusa", "hydra", "hydra++", "eagle", "eagle3", "p_eagle", "mtp", "mlp_speculator"]
HEAD_METHODS: Final[tuple[str, ...]] = get_args(HeadMethod)

WITH_LAYER: Final = ("hydra++", "eagle", "eagle3", "p_eagle", "mtp")
SINGLE: Final = ("eagle", "eagle3", "p_eagle", "mtp")
"""Methods with a decoder layer, and those of them that have one head, which drafts all tokens."""

TAPPED: Final = ("eagle3", "p_eagle")
"""Methods that read several layers of the target."""

LAYER_KEYS: Final = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "hidden_act",
)
"""Keys of `HeadConfig.layer`, as in the config.json of a Llama."""

NEEDED_KEYS: Final = ("num_attention_heads", "intermediate_size", "max_position_embeddings")

MOST: Final = 64
"""Largest number of heads, layers or taps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """One head, as `config.json` holds it.

    Attributes:
        method: what it is.
        hidden_size, vocab_size: of the target.
        draft_vocab_size: tokens that it can draft; fewer than `vocab_size` where its vocabulary is reduced.
        num_heads: tokens ahead that have heads of their own (medusa, hydra, mlp_speculator); 1 for eagle, eagle3,
            p_eagle and mtp.
        num_layers: residual blocks of a head (medusa, hydra), or decoder layers: any number for p_eagle, 1 for eagle,
            eagle3 and mtp.
        taps: layers of the target whose states it reads, as a runner numbers them: k is the output of layer k counted
            from 0, -1 the embedding, the number of layers the state after the final norm. None given: the last layer's.
        normed: where no taps are given, the state after the final norm is read, not the one before it.
        norm_before_residual: of eagle3 and p_eagle: attention is added to the normed state, not to the state itself.
        mask_token_id: of p_eagle: the token of the target's vocabulary that stands for those that are not known yet.
        layer: keys of a Llama's config.json for the decoder layers (`LAYER_KEYS`); empty for methods without one.
        inner_size, tie_weights, scale_input: of mlp_speculator: width of its states; all heads share their weights; the
            target's state is normed first.
        target: `name`, `fingerprint` (`ModelInfo.fingerprint`) and `tokenizer` (its fingerprint) of the model that it
            was trained for, where known.
        provenance: how it was trained; for people.
    Raises:
        ConfigError: a value outside its range, an unknown key of `layer`, or one that is missing.
    """

    method: HeadMethod
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_heads: int = 1
    num_layers: int = 1
    taps: tuple[int, ...] = ()
    normed: bool = True
    norm_before_residual: bool = False
    mask_token_id: int | None = None
    layer: Mapping[str, Any] = field(default_factory=dict)
    inner_size: int | None = None
    tie_weights: bool = False
    scale_input: bool = False
    target: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice("method", self.method, HEAD_METHODS)
        integer("hidden_size", self.hidden_size, 1)
        integer("vocab_size", self.vocab_size, 1)
        integer("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)
        single = self.method in SINGLE
        integer("num_heads", self.num_heads, 1, 1 if single else MOST)
        integer("num_layers", self.num_layers, 1, 1 if single and self.method != "p_eagle" else MOST)
        for name in ("normed", "norm_before_residual", "tie_weights", "scale_input"):
            need(isinstance(getattr(self, name), bool), name, "be true or false", getattr(self, name))
        self._check_taps()
        self._check_layer()
        self._check_mask()
        if self.method == "mlp_speculator":
            integer("inner_size", self.inner_size, 1)
        for name in ("target", "provenance"):
            need(isinstance(getattr(self, name), Mapping), name, "be an object", getattr(self, name))

    def _check_taps(self) -> None:
        need(isinstance(self.taps, tuple), "taps", "be a list of layers", self.taps)
        for tap in self.taps:
            integer("taps", tap, -1)
        tapped = self.method in TAPPED
        needed = len(self.taps) >= 1 if tapped else len(self.taps) <= 1
        rule = "name the layers whose states are read" if tapped else "name at most one layer"
        need(needed and len(self.taps) <= MOST, "taps", f"{rule} for method {self.method!r}", self.taps)

    def _check_layer(self) -> None:
        need(isinstance(self.layer, Mapping), "layer", "be an object", self.layer)
        if self.method not in WITH_LAYER:
            need(not self.layer, "layer", f"be left out for method {self.method!r}", self.layer)
            return
        reject_unknown("layer", self.layer, LAYER_KEYS)
        absent = [key for key in NEEDED_KEYS if key not in self.layer]
        need(not absent, "layer", f"have {', '.join(absent)}", dict(self.layer))
        for key in ("num_attention_heads", "num_key_value_heads", "head_dim", *NEEDED_KEYS[1:]):
            if self.layer.get(key) is not None:
                integer(f"layer.{key}", self.layer[key], 1)
        whole = self.layer["num_attention_heads"] % self.kv_heads == 0
        need(whole, "layer.num_key_value_heads", "divide num_attention_heads", self.kv_heads)

    def _check_mask(self) -> None:
        if self.method == "p_eagle":
            integer("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
        else:
            rule = f"be left out for method {self.method!r}"
            need(self.mask_token_id is None, "mask_token_id", rule, self.mask_token_id)

    @property
    def kv_heads(self) -> int:
        """Key-value heads of the decoder layer."""
        count: int = self.layer.get("num_key_value_heads") or self.layer["num_attention_heads"]
        return count

    @property
    def head_dim(self) -> int:
        """Dimensions of an attention head of the decoder layer."""
        size: int = self.layer.get("head_dim") or self.hidden_size // self.layer["num_attention_heads"]
        return size

    def taps_in(self, num_layers: int) -> tuple[int, ...]:
        """The layers of a target of so many layers whose states are read."""
        return self.taps or (num_layers if self.normed else num_layers - 1,)

    def as_json(self) -> dict[str, Any]:
        """What `config.json` holds under "paceline_head"."""
        return asdict(self) | {"taps": list(self.taps)}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> HeadConfig:
        """The inverse of `as_json`.

        Raises:
            ConfigError: an unknown key, one that is missing, or a value as above.
        """
        names = [field.name for field in fields(cls)]
        reject_unknown("paceline_head", stored, names)
        absent = [name for name in names[:4] if name not in stored]
        need(not absent, "paceline_head", f"have {', '.join(absent)}", dict(stored))
        taps = stored.get("taps", [])
        return cls(**{**stored, "taps": tuple(taps) if isinstance(taps, list) else taps})
