"""What a trained head is: its method, its sizes, and which states of the target it reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import gcd
from typing import Any, Final, Literal, get_args

from paceline.utils import choice, integer, need, reject_unknown

HeadMethod = Literal[
    "medusa",
    "hydra",
    "hydra++",
    "clover",
    "chimera",
    "eagle",
    "fspad",
    "eagle3",
    "dovetail",
    "p_eagle",
    "falcon",
    "longspec",
    "mtp",
    "mlp_speculator",
    "dflash",
    "dspark",
    "ppd",
    "hidden_transfer",
    "lud",
]
HEAD_METHODS: Final[tuple[str, ...]] = get_args(HeadMethod)

BLOCKS: Final = ("dflash", "dspark")
"""Methods with decoder layers that make all drafts in one pass over a block."""

ROWS: Final = ("ppd", "hidden_transfer", "lud")
"""Methods whose guesses are rows of the target's own passes, with its own head."""

WITH_LAYER: Final = (
    *("hydra++", "clover", "chimera", "eagle", "fspad", "eagle3", "dovetail", "p_eagle", "falcon", "longspec", "mtp"),
    *BLOCKS,
)
SINGLE: Final = ("eagle", "fspad", "eagle3", "dovetail", "p_eagle", "falcon", "longspec", "mtp")
"""Methods with decoder layers, and those of them that have one head, which drafts all tokens."""

DEEP: Final = ("dovetail", "p_eagle")
"""Those of SINGLE with any number of decoder layers."""

TAPPED: Final = ("eagle3", "p_eagle")
"""Those of EAGLE that read several layers of the target, as BLOCKS do."""

MARKOV_HEADS: Final = ("vanilla", "gated", "rnn")
"""Kinds of dspark's correction by the tokens drafted before, as `markov_head_type` names them."""

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

SWITCHES: Final = (
    *("normed", "norm_before_residual", "tie_weights", "scale_input", "causal", "sample_from_anchor"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
"""Fields that are true or false."""

MOST: Final = 64
"""Largest number of heads, layers, taps, or rows of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """One head, as `config.json` holds it.

    Attributes:
        method: what it is.
        hidden_size, vocab_size: of the target.
        draft_vocab_size: tokens that it can draft; fewer than `vocab_size` where its vocabulary is reduced.
        num_heads: tokens ahead that have heads of their own (medusa, hydra, clover, chimera, mlp_speculator); 1 for
            the others.
        num_layers: residual blocks of a head (medusa, hydra, clover, chimera), or decoder layers: 1 for eagle, fspad,
            eagle3, falcon, longspec and mtp, any number for dovetail, p_eagle, dflash and dspark.
        taps: layers of the target whose states it reads, as a runner numbers them: k is the output of layer k counted
            from 0, -1 the embedding, the number of layers the state after the final norm. None given: the last layer's.
            Of hidden_transfer one for each head, never falling, behind which its pseudo state enters.
        normed: where no taps are given, the state after the final norm is read, not the one before it.
        norm_before_residual: of eagle3 and p_eagle: attention is added to the normed state, not to the state itself.
        sliding_window: of longspec: how many tokens before its own a row's self-attention sees.
        mask_token_id: of p_eagle, dflash, dspark and lud: the token that stands for those that are not known yet.
        layer: keys of a Llama's config.json for the decoder layers (`LAYER_KEYS`); empty for methods without one.
        block_size, causal, sample_from_anchor: of dflash and dspark: rows of a block, which begins with the text's last
            token; whether a row sees those before it alone; whether a row predicts the token behind its place, so that
            the first one drafts too, and not that at it. block_size of falcon too: tokens that one pass drafts, whose
            inputs see each other.
        markov_rank, markov_head_type: of dspark: width of its correction by the tokens drafted before, 0 where it has
            none, and its kind (`MARKOV_HEADS`).
        enable_confidence_head, confidence_head_with_markov: of dspark: it says how likely a draft is accepted; it reads
            the correction's embedding of the token before, too.
        inner_size: of mlp_speculator, the width of its states; of fspad, that of its sampler.
        tie_weights, scale_input: of mlp_speculator: all heads share their weights; the target's state is normed first.
        virtual_tokens: of ppd: embeddings of each prompt token, whose guesses are averaged; num_heads prompt tokens,
            of lud placeholders.
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
    sliding_window: int | None = None
    mask_token_id: int | None = None
    layer: Mapping[str, Any] = field(default_factory=dict)
    block_size: int | None = None
    causal: bool = False
    sample_from_anchor: bool = False
    markov_rank: int = 0
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    inner_size: int | None = None
    tie_weights: bool = False
    scale_input: bool = False
    virtual_tokens: int = 1
    target: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        choice("method", self.method, HEAD_METHODS)
        integer("hidden_size", self.hidden_size, 1)
        integer("vocab_size", self.vocab_size, 1)
        integer("draft_vocab_size", self.draft_vocab_size, 1, self.vocab_size)
        single = self.method in SINGLE
        integer("num_heads", self.num_heads, 1, 1 if single else MOST)
        integer("num_layers", self.num_layers, 1, 1 if single and self.method not in DEEP else MOST)
        for name in SWITCHES:
            need(isinstance(getattr(self, name), bool), name, "be true or false", getattr(self, name))
        self._check_taps()
        self._check_layer()
        self._check_window()
        self._check_mask()
        self._check_block()
        if self.method in ("mlp_speculator", "fspad"):
            integer("inner_size", self.inner_size, 1)
        integer("virtual_tokens", self.virtual_tokens, 1, MOST if self.method == "ppd" else 1)
        if self.method in ROWS:
            integer("draft_vocab_size", self.draft_vocab_size, self.vocab_size)
        for name in ("target", "provenance"):
            need(isinstance(getattr(self, name), Mapping), name, "be an object", getattr(self, name))

    def _check_taps(self) -> None:
        need(isinstance(self.taps, tuple), "taps", "be a list of layers", self.taps)
        for tap in self.taps:
            integer("taps", tap, -1)
        if self.method == "hidden_transfer":
            rule = "name a layer for each head, in their order"
            fine = len(self.taps) == self.num_heads and list(self.taps) == sorted(self.taps)
            need(fine, "taps", rule, self.taps)
            return
        several = self.method in (*TAPPED, *BLOCKS)
        needed = len(self.taps) >= 1 if several else len(self.taps) <= 1
        rule = "name the layers whose states are read" if several else "name at most one layer"
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

    def _check_window(self) -> None:
        if self.method == "longspec":
            integer("sliding_window", self.sliding_window, 1)
            need(not self.taps, "taps", "be left out for method 'longspec', which reads keys and values", self.taps)
        else:
            rule = f"be left out for method {self.method!r}"
            need(self.sliding_window is None, "sliding_window", rule, self.sliding_window)

    def _check_mask(self) -> None:
        if self.method in ("p_eagle", "lud"):
            integer("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1)
        elif self.method in BLOCKS:  # which may have one that is a row and no token
            integer("mask_token_id", self.mask_token_id, 0)
        else:
            rule = f"be left out for method {self.method!r}"
            need(self.mask_token_id is None, "mask_token_id", rule, self.mask_token_id)

    def _check_block(self) -> None:
        if self.method == "falcon":
            integer("block_size", self.block_size, 1, MOST)
            return
        if self.method not in BLOCKS:
            need(self.block_size is None, "block_size", f"be left out for method {self.method!r}", self.block_size)
            return
        integer("block_size", self.block_size, 1 if self.sample_from_anchor else 2, MOST)
        integer("markov_rank", self.markov_rank, 0)
        choice("markov_head_type", self.markov_head_type, MARKOV_HEADS)
        if self.method == "dflash":
            need(self.markov_rank == 0, "markov_rank", "be left out for method 'dflash'", self.markov_rank)
            need(not self.enable_confidence_head, "enable_confidence_head", "be left out for method 'dflash'", True)
        fine = self.markov_rank > 0 or not (self.enable_confidence_head and self.confidence_head_with_markov)
        need(fine, "markov_rank", "be 1 or more with confidence_head_with_markov", self.markov_rank)

    @property
    def drafts_of_block(self) -> int:
        """Tokens that a block drafts."""
        rows = self.block_size or 0
        return rows if self.sample_from_anchor else rows - 1

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

    @property
    def regressive_heads(self) -> int:
        """Attention heads of clover's decoder: as many as its layer has, or as of these divide the width of a state."""
        return gcd(self.layer["num_attention_heads"], self.hidden_size)

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


def block_taps(target_layers: int, draft_layers: int) -> tuple[int, ...]:
    """The layers of a target whose outputs dflash reads where none are named: as many as it has layers itself, spread
    from the second to the third last.
    """
    if draft_layers == 1:
        return (target_layers // 2,)
    step = (target_layers - 4) / (draft_layers - 1)
    return tuple(round(1 + i * step) for i in range(draft_layers))
