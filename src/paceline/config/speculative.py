"""vLLM's `speculative_config` dialect: which methods draft, with which options."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final

from paceline.errors import ConfigError
from paceline.utils import (
    clear_calls,
    integer,
    json_value,
    need,
    number,
    reject_unknown,
    same,
    say_ignored,
    strings,
)

VLLM_KEYS = frozenset(
    """attention_backend code_revision disable_eagle_block_drop disable_logprobs disable_mqa_scorer
    disable_padded_drafter_batch draft_load_config draft_model_config draft_parallel_config draft_sample_method
    draft_tensor_parallel_size dspark_draft_topk enable_adaptive_verification enforce_eager
    index_share_for_mtp_iteration kv_cache_dtype max_model_len moe_backend num_speculative_tokens_per_batch_size
    parallel_drafting prompt_lookup_max prompt_lookup_min quantization rejection_sample_method revision
    speculative_token_tree suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_max_tree_depth suffix_decoding_min_token_prob synthetic_acceptance_length
    synthetic_acceptance_rate synthetic_acceptance_rates target_model_config target_parallel_config
    tensor_parallel_size use_heterogeneous_vocab use_local_argmax_reduction""".split()  # noqa: SIM905 (a list would take a line for each)
)
"""vLLM's other keys. None says there that a key is not given, so it says the same here, whether the key is known or
not.
"""

IDLE_KEYS: Final[Mapping[str, tuple[Any, ...] | None]] = {
    **dict.fromkeys(
        """attention_backend disable_logprobs disable_mqa_scorer disable_padded_drafter_batch draft_load_config
        enforce_eager max_model_len moe_backend use_local_argmax_reduction""".split()  # noqa: SIM905 (see above)
    ),
    "draft_tensor_parallel_size": (1,),
    "tensor_parallel_size": (1,),
    "parallel_drafting": (False,),
    "use_heterogeneous_vocab": (False,),
    "rejection_sample_method": ("strict", "standard"),
    "kv_cache_dtype": ("auto",),
}
"""vLLM's keys that are left out with a warning -> the values under which they ask for nothing; None is any."""

MEANT_KEYS: Final = {
    **dict.fromkeys(("speculative_model", "assistant_model", "draft_model"), "model"),
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
    "prompt_lookup_num_tokens": "num_speculative_tokens",
    "num_assistant_tokens": "num_speculative_tokens",
}
"""Keys of transformers, and those that vLLM once had -> ours."""

NAMED: Final = 8
"""Most options, and most keys of all methods, that a message names where none is close."""

CLOSE: Final = 0.7
"""Least similarity (difflib's ratio) of what is offered instead."""

MOST_TOKENS: Final = 1024
"""Most drafted tokens of a step that a configuration may ask for."""

SHARED = ("acceptance_method", "posterior_threshold", "posterior_alpha", "controller", "disable_by_batch_size")
"""Keys that apply to all methods of a configuration, and are given beside a list of them."""


@clear_calls(example='method="ngram"')
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """vLLM's `speculative_config` dialect.

    Attributes:
        method: "auto", a name from `paceline methods`, "module:Class", or a list of those (or of nested dicts), whose
            trees are merged.
        num_speculative_tokens: most nodes of a draft tree; None lets the controller decide.
        model: draft model of `draft_model`.
        acceptance_method: "rejection_sampler", "block_verification", "k_seq", "greedy_draft_sampling" (all exact),
            "typical_acceptance_sampler" (approximate), the name of one of another package, or "module:Class".
        posterior_threshold, posterior_alpha: of typical acceptance.
        controller: a policy from `paceline methods` ("auto", "fixed", "heuristic", ...); None is "fixed" where
            num_speculative_tokens is given, else "auto".
        disable_by_batch_size: no drafts at or above this number of running sequences.
        options: all other keys, for the constructors of the drafter (`prompt_lookup_max`, ...) and of the controller
            (`threshold`, ...); one that neither knows is rejected, and one that both know too.
    """

    method: str | tuple[SpeculativeConfig, ...] = "auto"
    num_speculative_tokens: int | None = None
    model: str | None = None
    acceptance_method: str = "rejection_sampler"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    controller: str | None = None
    disable_by_batch_size: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None:
            integer("num_speculative_tokens", self.num_speculative_tokens, 0, MOST_TOKENS)
        if self.disable_by_batch_size is not None:
            integer("disable_by_batch_size", self.disable_by_batch_size, 1)
        rule, verifier = "be a verifier of `paceline methods` or module:Class", self.acceptance_method
        need(isinstance(verifier, str) and verifier != "", "acceptance_method", rule, verifier)
        parts = self.method if isinstance(self.method, tuple) else ()
        fine = isinstance(self.method, str | tuple) and all(isinstance(one, SpeculativeConfig) for one in parts)
        need(fine, "method", "be a name or a tuple of SpeculativeConfigs", self.method)
        need(isinstance(self.options, Mapping), "options", "be a dict", self.options)
        number("posterior_threshold", self.posterior_threshold, 0.0, 1.0, "be in 0..1")
        number("posterior_alpha", self.posterior_alpha, 0.0, math.inf, "be 0 or more")
        for name, rule in (("model", "be a folder or hub id"), ("controller", "be a name from `paceline methods`")):
            value = getattr(self, name)
            need(value is None or (isinstance(value, str) and value != ""), f"speculative_config {name}", rule, value)

    @classmethod
    def general_keys(cls) -> list[str]:
        """Keys that may be given beside every method."""
        return [f.name for f in fields(cls) if f.name != "options"]

    @classmethod
    def parse(cls, given: GivenConfig) -> SpeculativeConfig | None:
        """From a dict, the name of a method, a list of methods, JSON text of these, or None (plain decoding).

        Raises:
            ConfigError: text that is not JSON, or a value outside its range.
        """
        whole: Any = _written(given) if isinstance(given, str) else given
        if whole is None or isinstance(whole, SpeculativeConfig):
            return whole
        if isinstance(whole, str | list | tuple):
            whole = {"method": whole}
        rule = "be a dict, the name of a method, a list of methods, JSON or None"
        need(isinstance(whole, Mapping), "speculative_config", rule, whole)
        idle = {key: value for key, value in whole.items() if _is_idle(key, value)}
        say_ignored(idle)
        whole = {key: value for key, value in whole.items() if key not in idle}
        by_model = any(same(whole.get("model"), one) for one in ("ngram", "[ngram]"))  # as vLLM has it
        if by_model and whole.get("method") is None:
            whole = {key: value for key, value in whole.items() if key != "model"} | {"method": "ngram"}
        own = set(cls.general_keys())
        given = {key: value for key, value in whole.items() if value is not None or key not in own | VLLM_KEYS}
        known = {key: value for key, value in given.items() if key in own}
        method = known.get("method", "draft_model" if isinstance(known.get("model"), str) else "auto")
        need(isinstance(method, str | list | tuple) and method != "", "method", "be a name or a list of names", method)
        if not isinstance(method, str):
            need(len(method) > 0, "method", "not be an empty list", method)
            method = tuple(cls._nested(item, given) for item in method)
        known["method"] = method
        if str(known.get("acceptance_method")) != "typical_acceptance_sampler":
            for key in ("posterior_threshold", "posterior_alpha"):
                need(
                    key not in given,
                    key,
                    'be given together with "acceptance_method": "typical_acceptance_sampler"',
                    known.get(key),
                )
        return cls(**known, options={key: value for key, value in given.items() if key not in own})

    @classmethod
    def _nested(cls, item: object, outer: Mapping[str, Any]) -> SpeculativeConfig:
        """One entry of a list of methods: a name, which takes the outer keys that it knows, or a dict of its own."""
        if isinstance(item, str):
            item = {"method": item} | ({"model": outer["model"]} if item == "draft_model" and "model" in outer else {})
        need(isinstance(item, Mapping), "each entry of method", "be a name or a dict", item)
        for key in SHARED:
            need(key not in item, key, "be given beside the list of methods, since it applies to all of them", item)  # type: ignore[operator]
        nested = cls.parse(item)  # type: ignore[arg-type]
        if nested is None or not isinstance(nested.method, str) or nested.method == "auto":
            raise ConfigError(f"each entry of a list of methods must be one method, and not 'auto', got {item!r}")
        return nested


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """What one request takes of the drafts that its engine has.

    Attributes:
        methods: names of those that draft for it; None is all of them, none is plain decoding.
        most: most drafted tokens of a step; None leaves it to the engine.
    """

    methods: tuple[str, ...] | None = None
    most: int | None = None

    @classmethod
    def parse(cls, given: object) -> DraftChoice:
        """From a dict with `method` and `num_speculative_tokens`, a name, a list of names, or None (plain decoding).

        Raises:
            ConfigError: anything else. What loads or builds something is chosen for the engine, not for a request.
        """
        if given is None or isinstance(given, str | list | tuple):
            given = {"method": "none" if given is None else given}
        name = "speculative_config"
        need(isinstance(given, Mapping), name, "be a dict, the name of a method, a list of names or None", given)
        assert isinstance(given, Mapping)
        reject_unknown("speculative_config of a request", given, ("method", "num_speculative_tokens"))
        most, method = given.get("num_speculative_tokens"), given.get("method")
        if most is not None:
            integer("speculative_config num_speculative_tokens", most, 0, MOST_TOKENS)
        rule = "be the name of a method, or a list of names"
        need(method is None or isinstance(method, str | list | tuple), f"{name} method", rule, method)
        names = strings(f"{name} method", method or "auto")
        if most == 0 or names == ("none",):
            return cls(())
        return cls(None if names == ("auto",) else names, most)


ALL_DRAFTS: Final = DraftChoice()

GivenConfig = Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | str | SpeculativeConfig | None
"""What a user may give as a `speculative_config`."""


def _is_idle(key: str, value: object) -> bool:
    """Whether a key of vLLM asks for nothing here."""
    if key not in IDLE_KEYS or value is None:
        return False
    values = IDLE_KEYS[key]
    return values is None or any(same(value, one) for one in values)


def _written(text: str) -> Any:
    """What a text means as `speculative_config`: JSON, or the bare name of a method.

    Raises:
        ConfigError: text that begins as JSON and is none.
    """
    word = text.strip()
    if word.lower() == "none":
        return None
    return word if word and word[0] not in '{["' and word != "null" else json_value("speculative_config", text)


def near(key: object, known: Sequence[str]) -> list[str]:
    """Known keys that this one may have been meant to be, the closest first; upper case does not count."""
    if MEANT_KEYS.get(str(key)) in known:
        return [MEANT_KEYS[str(key)]]
    return get_close_matches(str(key).lower(), list(dict.fromkeys(known)), n=2, cutoff=CLOSE)


def reject_unknown_keys(kind: str, given: Iterable[str], options: Sequence[str], general: Sequence[str]) -> None:
    """Reject those of `given` that are no options, all together.

    Args:
        kind: what lacks it, for the message.
        options: of the method, and of the controller where they may be given there.
        general: keys that may be given beside every method.
    Raises:
        ConfigError: with the closest of all these keys; where none is close, with the first of them.
    """
    unknown = [key for key in given if key not in options]
    if not unknown:
        return
    rest = [one for one in general if one not in unknown and one not in options]
    close = {key: near(key, [*options, *rest]) for key in unknown}
    hints = {key: f"did you mean {' or '.join(found)}?" if found else "" for key, found in close.items()}
    known = f"known are {_some(sorted(options)) or 'no options'}; with every method also {_some(rest)}"
    if len(unknown) == 1:
        raise ConfigError(f"{kind} does not know {unknown[0]!r}; {hints[unknown[0]] or known}")
    names = ", ".join(f"{key!r} ({hint})" if hint else repr(key) for key, hint in hints.items())
    raise ConfigError(f"{kind} does not know {names}" + ("" if all(hints.values()) else f"; {known}"))


def _some(names: Sequence[str]) -> str:
    """All names where they are few, else the first, how many more there are, and where they are listed."""
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more (listed in the documentation)"
