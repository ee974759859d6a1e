"""vLLM's `speculative_config` dialect: which methods draft, with which options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Final

from paceline.config.declared import REQUIRED, check_options, documented, option
from paceline.config.learning import LearnConfig
from paceline.errors import ConfigError
from paceline.utils import (
    clear_calls,
    integer,
    json_value,
    need,
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

MTP_NAMES: Final = frozenset(
    """bailing_hybrid_mtp deepseek_mtp ernie_mtp exaone4_5_mtp exaone_moe_mtp glm4_moe_lite_mtp glm4_moe_mtp glm_ocr_mtp
    hy_v3_mtp longcat_flash_mtp mimo_mtp mimo_v2_mtp minimax_m3_mtp nemotron_h_mtp pangu_ultra_moe_mtp qwen3_5_mtp
    qwen3_next_mtp step3p5_mtp""".split()  # noqa: SIM905 (see above)
)
"""vLLM's names of method "mtp" for one family of models each."""

OTHER_NAMES: Final = {
    **dict.fromkeys(MTP_NAMES, "mtp"),
    "peagle": "p_eagle",
    "DFLASH": "dflash",
    "DSPARK": "dspark",
}
"""Names of vLLM, SGLang and the `speculators` package -> our method."""

NAMED: Final = 8
"""Most options, and most keys of all methods, that a message names where none is close."""

CLOSE: Final = 0.7
"""Least similarity (difflib's ratio) of what is offered instead."""

MOST_TOKENS: Final = 1024
"""Most drafted tokens of a step that a configuration may ask for."""

RULE_OPTIONS: Final = {
    "posterior_threshold": "typical_acceptance_sampler",
    "posterior_alpha": "typical_acceptance_sampler",
    "fly_window_size": "fly",
    "fly_entropy_threshold": "fly",
    **dict.fromkeys(
        ("relaxed_topk", "relaxed_delta", "begin_thinking_phase_token", "end_thinking_phase_token"), "relaxed_thinking"
    ),
    **dict.fromkeys(("reflective_alpha", "reflective_prompt", "reflective_context"), "reflective"),
    "unit_threshold": "lexical_units",
    "judge_model": "judge",
    "judge_threshold": "judge",
    "speculative_accept_threshold_single": "accept_thresholds",
    "speculative_accept_threshold_acc": "accept_thresholds",
}
"""Keys that are options of one rule of acceptance -> that rule."""

REJECTION_METHODS: Final = {"block": "block_verification", "fly": "fly"}
"""vLLM's `rejection_sample_method` -> our `acceptance_method`; its default is ours, too."""

RELAXED_SWITCH: Final = "use_relaxed_acceptance_for_thinking"
"""TensorRT-LLM's key that chooses "relaxed_thinking"."""

SHARED = ("acceptance_method", *RULE_OPTIONS, "controller", "disable_by_batch_size", "learn")
"""Keys that apply to all methods of a configuration, and are given beside a list of them."""


def _check_method(name: str, value: object) -> None:
    parts = value if isinstance(value, tuple) else ()
    fine = isinstance(value, str | tuple) and all(isinstance(part, SpeculativeConfig) for part in parts)
    need(fine, name, "be a name or a tuple of SpeculativeConfigs", value)


def _check_text(name: str, value: object, *, rule: str) -> None:
    need(isinstance(value, str) and value != "", name, rule, value)


def _check_model(name: str, value: object) -> None:
    _check_text(f"speculative_config {name}", value, rule="be a folder or hub id")


def _check_learn(name: str, value: object) -> None:
    need(isinstance(value, LearnConfig), name, "be a LearnConfig", value)


def _check_prompt(name: str, value: object) -> None:
    fine = value is None or (isinstance(value, str) and value != "")
    if not fine and isinstance(value, list | tuple):
        fine = len(value) > 0 and all(type(token) is int and token >= 0 for token in value)
    need(fine, f"speculative_config {name}", "be a text or token ids, not empty", value)


def _check_controller(name: str, value: object) -> None:
    _check_text(f"speculative_config {name}", value, rule="be a name from `paceline methods`")


@clear_calls(example='method="ngram"')
@documented
@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """vLLM's `speculative_config` dialect: which methods draft, what verifies, how much is drafted.

    Raises:
        ConfigError: a value outside its range.
    """

    method: str | tuple[SpeculativeConfig, ...] = option(
        "auto", check=_check_method,
        doc='"auto", a name from `paceline methods`, "module:Class", or a list of those (or of nested dicts), whose '
        "trees are merged.",
    )  # fmt: skip
    num_speculative_tokens: int | None = option(
        None, doc="Most nodes of a draft tree; None lets the controller decide.", low=0, high=MOST_TOKENS
    )
    model: str | None = option(None, doc="Draft model of `draft_model`.", check=_check_model)
    acceptance_method: str = option(
        "rejection_sampler", check=partial(_check_text, rule="be a verifier of `paceline methods` or module:Class"),
        doc='"rejection_sampler", "block_verification", "k_seq", "greedy_draft_sampling" (all exact), '
        '"typical_acceptance_sampler", "fly", "relaxed_thinking", "accept_thresholds", "reflective", "lexical_units", '
        '"judge" (approximate), the name of one of another package, or "module:Class".',
    )  # fmt: skip
    posterior_threshold: float = option(0.09, doc="Of typical acceptance.", low=0.0, high=1.0, rule="be in 0..1")
    posterior_alpha: float = option(0.3, doc="Of typical acceptance.", low=0.0, rule="be 0 or more")
    fly_window_size: int = option(6, doc="Of fly: drafts that must be accepted behind one that is kept.", low=1)
    fly_entropy_threshold: float = option(
        0.3, doc="Of fly: entropy of the three likeliest tokens, in nats, from which a draft may be kept.", low=0.0,
        rule="be 0 or more",
    )  # fmt: skip
    relaxed_topk: int = option(1, doc="Of relaxed_thinking: how many of the likeliest tokens are accepted.", low=1)
    relaxed_delta: float = option(
        0.0, doc="Of relaxed_thinking: by how much less likely than the likeliest they may be.", low=0.0, high=1.0,
        rule="be in 0..1",
    )  # fmt: skip
    begin_thinking_phase_token: int = option(128798, doc="Of relaxed_thinking: id of the token before thoughts.", low=0)
    end_thinking_phase_token: int = option(128799, doc="Of relaxed_thinking: id of the token behind them.", low=0)
    speculative_accept_threshold_single: float = option(
        1.0, doc="Of accept_thresholds: from which probability on a draft is always accepted.", low=0.0, high=1.0,
        rule="be in 0..1",
    )  # fmt: skip
    speculative_accept_threshold_acc: float = option(
        1.0, doc="Of accept_thresholds: what drafts' summed probability is divided by.", low=0.0, high=1.0,
        rule="be in 0..1",
    )  # fmt: skip
    reflective_alpha: float = option(
        0.3, doc="Of reflective: share of what the target says where it is asked to check drafts.", low=0.0, high=1.0,
        rule="be in 0..1",
    )  # fmt: skip
    reflective_prompt: str | Sequence[int] | None = option(
        None, check=_check_prompt,
        doc="Of reflective: text or token ids that ask to check; None is a short English one.",
    )  # fmt: skip
    reflective_context: int = option(
        8, doc="Of reflective: tokens of the text's end, repeated before the drafts' second copy.", low=0, high=4096
    )
    unit_threshold: float = option(
        0.9, doc="Of lexical_units: probability where it was guessed from which a draft stands unverified.", low=0.0,
        rule="be 0 or more",
    )  # fmt: skip
    judge_model: str | None = option(
        None, check=_check_model, doc="Of judge: folder or hub id of the head that says whether a token is good."
    )
    judge_threshold: float = option(
        0.5, doc="Of judge: chance from which on a rejected draft is kept.", low=0.0, high=1.0, rule="be in 0..1"
    )
    controller: str | None = option(
        None, check=_check_controller,
        doc='A policy from `paceline methods` ("auto", "fixed", "heuristic", ...); None is "fixed" where '
        'num_speculative_tokens is given, else "auto".',
    )  # fmt: skip
    disable_by_batch_size: int | None = option(
        None, doc="No drafts at or above this number of running sequences.", low=1
    )
    learn: LearnConfig | None = option(
        None, check=_check_learn,
        doc="Drafters with a draft model or a head learn from the requests: True, or a dict with settings of "
        "`LearnConfig`.",
    )  # fmt: skip
    options: Mapping[str, Any] = option(
        REQUIRED, factory=dict, check=lambda name, value: need(isinstance(value, Mapping), name, "be a dict", value),
        doc="All other keys, for the constructors of the drafter (`prompt_lookup_max`, ...) and of the controller "
        "(`threshold`, ...); one that neither knows is rejected, and one that both know too.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)

    def without_learning(self) -> SpeculativeConfig:
        """The same drafters, which learn nothing: for engines beside the one that serves."""
        return self if self.learn is None else replace(self, learn=None)

    @classmethod
    def general_keys(cls) -> list[str]:
        """Keys that may be given beside every method."""
        return [f.name for f in fields(cls) if f.name != "options"]

    @classmethod
    def parse(cls, config: GivenConfig) -> SpeculativeConfig | None:
        """From a dict, the name of a method, a list of methods, JSON text of these, or None (plain decoding).

        Raises:
            ConfigError: text that is not JSON, or a value outside its range.
        """
        whole: Any = _written(config) if isinstance(config, str) else config
        if whole is None or isinstance(whole, SpeculativeConfig):
            return whole
        if isinstance(whole, str | list | tuple):
            whole = {"method": whole}
        rule = "be a dict, the name of a method, a list of methods, JSON or None"
        need(isinstance(whole, Mapping), "speculative_config", rule, whole)
        idle = {key: value for key, value in whole.items() if _is_idle(key, value)}
        say_ignored(idle)
        whole = {key: value for key, value in whole.items() if key not in idle}
        by_model = any(same(whole.get("model"), marker) for marker in ("ngram", "[ngram]"))  # as vLLM has it
        if by_model and whole.get("method") is None:
            whole = {key: value for key, value in whole.items() if key != "model"} | {"method": "ngram"}
        general = set(cls.general_keys())
        settings = {key: value for key, value in whole.items() if value is not None or key not in general | VLLM_KEYS}
        settings = _with_rule_of_others(settings)
        known = {key: value for key, value in settings.items() if key in general}
        method = known.get("method", "draft_model" if isinstance(known.get("model"), str) else "auto")
        need(isinstance(method, str | list | tuple) and method != "", "method", "be a name or a list of names", method)
        method = _meant(method)
        if not isinstance(method, str):
            need(len(method) > 0, "method", "not be an empty list", method)
            method = tuple(cls._nested(item, settings) for item in method)
        known["method"] = method
        if "learn" in known:
            known["learn"] = LearnConfig.parse(known["learn"])
        _check_rule_options(known)
        return cls(**known, options={key: value for key, value in settings.items() if key not in general})

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
    def parse(cls, value: object) -> DraftChoice:
        """From a dict with `method` and `num_speculative_tokens`, a name, a list of names, or None (plain decoding).

        Raises:
            ConfigError: anything else. What loads or builds something is chosen for the engine, not for a request.
        """
        if value is None or isinstance(value, str | list | tuple):
            value = {"method": "none" if value is None else value}
        name = "speculative_config"
        need(isinstance(value, Mapping), name, "be a dict, the name of a method, a list of names or None", value)
        assert isinstance(value, Mapping)
        reject_unknown("speculative_config of a request", value, ("method", "num_speculative_tokens"))
        most, method = value.get("num_speculative_tokens"), value.get("method")
        if most is not None:
            integer("speculative_config num_speculative_tokens", most, 0, MOST_TOKENS)
        rule = "be the name of a method, or a list of names"
        need(method is None or isinstance(method, str | list | tuple), f"{name} method", rule, method)
        names = tuple(map(_meant, strings(f"{name} method", method or "auto")))
        if most == 0 or names == ("none",):
            return cls(())
        return cls(None if names == ("auto",) else names, most)


ALL_DRAFTS: Final = DraftChoice()

GivenConfig = Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | str | SpeculativeConfig | None
"""What a user may give as a `speculative_config`."""


def _with_rule_of_others(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same keys, with those by which vLLM and TensorRT-LLM choose a rule as our `acceptance_method`.

    Raises:
        ConfigError: a value that they do not have or that is not built, or two keys that choose a rule.
    """
    found, chosen = dict(settings), dict[str, str]()
    if (key := "rejection_sample_method") in found:
        method, known = found.pop(key), ["standard", *REJECTION_METHODS]
        need(method in known, key, f"be one of {', '.join(known)}", method)
        chosen[key] = REJECTION_METHODS[method]
    if (relaxed := found.pop(RELAXED_SWITCH, None)) is not None:
        need(isinstance(relaxed, bool), RELAXED_SWITCH, "be True or False", relaxed)
        if relaxed:
            chosen[RELAXED_SWITCH] = "relaxed_thinking"
    for key, rule in chosen.items():
        other = found.setdefault("acceptance_method", rule)
        need(other == rule, key, f"be left out beside acceptance_method {other!r}", settings[key])
    return found


def _check_rule_options(known: Mapping[str, Any]) -> None:
    """Reject options of another rule than the one that is chosen, and a window of fly that no draft can fill.

    Raises:
        ConfigError: one of them, by its name.
    """
    chosen = str(known.get("acceptance_method"))
    for key, rule in RULE_OPTIONS.items():
        need(
            key not in known or chosen == rule,
            key,
            f'be given together with "acceptance_method": "{rule}"',
            known.get(key),
        )
    most, window = known.get("num_speculative_tokens"), known.get("fly_window_size", 6)
    if chosen == "fly" and isinstance(most, int) and isinstance(window, int) and most:
        need(window < most, "fly_window_size", f"be below num_speculative_tokens, {most}", window)


def _is_idle(key: str, value: object) -> bool:
    """Whether a key of vLLM asks for nothing here."""
    if key not in IDLE_KEYS or value is None:
        return False
    values = IDLE_KEYS[key]
    return values is None or any(same(value, allowed) for allowed in values)


def _meant(method: Any) -> Any:
    """A method, by our name where it has another one."""
    return OTHER_NAMES.get(method, method) if isinstance(method, str) else method


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


def reject_unknown_keys(kind: str, keys: Iterable[str], options: Sequence[str], general: Sequence[str]) -> None:
    """Reject those of `keys` that are no options, all together.

    Args:
        kind: what lacks it, for the message.
        options: of the method, and of the controller where they may be given there.
        general: keys that may be given beside every method.
    Raises:
        ConfigError: with the closest of all these keys; where none is close, with the first of them.
    """
    unknown = [key for key in keys if key not in options]
    if not unknown:
        return
    rest = [key for key in general if key not in unknown and key not in options]
    close = {key: near(key, [*options, *rest]) for key in unknown}
    hints = {key: f"did you mean {' or '.join(names)}?" if names else "" for key, names in close.items()}
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
