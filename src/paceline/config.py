"""Configuration: keyword-only and checked at the edge; every layer behind it may trust it.

The names are vLLM's. Defaults that depend on a checkpoint are `llm`'s, and the methods themselves the `registry`'s.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from enum import Enum
from typing import Any, Final, Literal

from paceline.errors import ConfigError
from paceline.utils import (
    TINY,
    choice,
    clear_calls,
    integer,
    items,
    json_value,
    need,
    number,
    reject_unknown,
    strings,
    tokens,
)

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

MAX_N = 128
MAX_LOGPROBS = 128
ALL_LOGPROBS = -1
DTYPES = ("auto", "float32", "bfloat16", "float16")
EXACTNESS = ("auto", "strict")
QUANTIZATIONS: Mapping[str, Literal["int8", "int4"]] = {
    "int8": "int8", "int8_weight_only": "int8", "int8wo": "int8", "int4": "int4", "int4_weight_only": "int4",
    "int4wo": "int4"
}  # fmt: skip
"""What a user may write -> what it is; the longer names are torchao's."""

NOT_QUANTIZED = "none"
"""Keeps the values of weights, also where the file is quantised."""


class RequestOutputKind(Enum):
    """What the chunks of a stream hold as `output`: all so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


LogitsProcessor = Callable[..., Any]
"""(output token ids, logits) or (prompt token ids, output token ids, logits) -> logits, as in vLLM's V0; or a
`LogitsProcessor` of transformers.
"""


ELSEWHERE: Final = {
    "max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "min_new_tokens": "min_tokens",
    "num_return_sequences": "n",
    "do_sample": "temperature",
    "eos_token_id": "stop_token_ids",
    "stop_strings": "stop",
    "suppress_tokens": "logit_bias",
    "sequence_bias": "logit_bias",
    "no_repeat_ngram_size": "logits_processors=[NoRepeatNGramLogitsProcessor(...)]",
    "num_beams": "beam search is not available",
    "use_beam_search": "beam search is not available",
    "best_of": "n outputs are returned as they are drawn",
    "guided_decoding": "grammars are available for diffusion language models only",
    "structured_outputs": "grammars are available for diffusion language models only",
    "spaces_between_special_tokens": "texts are decoded as the tokenizer does it",
}
"""Parameters of transformers, and those of vLLM that are missing -> ours, or what is to be said."""


@clear_calls(example="temperature=0", meant=ELSEWHERE)
@dataclass(kw_only=True)
class SamplingParams:
    """How tokens are chosen, with vLLM's names, ranges and defaults.

    Every parameter is honoured under every drafter: the rules are applied at each node of a draft tree along the node's
    own path, before verification. `temperature` below 1e-5 is greedy. Logprobs are those of the model before any rule
    (vLLM's `raw_logprobs`). An attribute may be set, and is checked; requests that were given before do not change.

    Attributes:
        n: outputs per prompt.
        temperature, top_p, top_k, min_p: `top_k` 0 or -1 means all tokens.
        presence_penalty, frequency_penalty: in -2..2, over generated tokens.
        repetition_penalty: above 0, over prompt and generated tokens.
        logit_bias: token id -> bias in -100..100.
        allowed_token_ids: the only tokens that may be generated, end tokens not excepted; None allows all.
        bad_words: words that must not be generated.
        logits_processors: functions that change the logits before all other rules: `(output_token_ids, logits)` or
            `(prompt_token_ids, output_token_ids, logits)` -> logits, one row at a time, or processors of transformers.
            They are asked along each path of a draft too, so they must depend on their arguments alone.
        seed: same seed, same tokens; None draws one.
        stop, stop_token_ids: end the output; a stop string is cut off unless `include_stop_str_in_output`.
        max_tokens, min_tokens: limits of generated tokens; None means up to the context.
        logprobs, prompt_logprobs: number of most likely tokens to report besides the chosen one; -1 is all, None none.
        truncate_prompt_tokens: use this many tokens of the prompt's end; -1 uses what leaves room for `max_tokens`.
        ignore_eos: go on after an end token.
        detokenize, skip_special_tokens: how `text` is made.
        output_kind: what chunks of `stream` hold; `generate` and `chat` return whole outputs whatever it is.

    Raises:
        ConfigError: a value outside its range, or a contradiction.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    logits_processors: Sequence[LogitsProcessor] = ()
    seed: int | None = None
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_limits()
        self.stop = strings("stop", self.stop)
        self.bad_words = strings("bad_words", self.bad_words)
        self.stop_token_ids = tokens("stop_token_ids", self.stop_token_ids)
        self.logit_bias = self._bias()
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = tokens("allowed_token_ids", self.allowed_token_ids)
            need(len(self.allowed_token_ids) > 0, "allowed_token_ids", "not be empty", self.allowed_token_ids)
        self.logits_processors = self._processors()
        kind = self.output_kind
        need(isinstance(kind, RequestOutputKind), "output_kind", "be a RequestOutputKind", kind)
        need(self.detokenize or not self.stop, "stop", "be empty when detokenize is False", self.stop)
        vars(self)["_built"] = True

    def __setattr__(self, name: str, value: object) -> None:
        if "_built" in vars(self):
            given = {one.name: getattr(self, one.name) for one in fields(self)}
            value = getattr(SamplingParams.from_dict({**given, name: value}), name)
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        integer("n", self.n, 1, MAX_N)
        number("temperature", self.temperature, 0.0, math.inf, "be 0 (greedy) or positive")
        number("top_p", self.top_p, 0.0, 1.0, "be above 0 and at most 1", open_low=True)
        integer("top_k", self.top_k, -1)
        number("min_p", self.min_p, 0.0, 1.0, "be in 0..1")
        number("presence_penalty", self.presence_penalty, -2.0, 2.0, "be in -2..2")
        number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "be in -2..2")
        number("repetition_penalty", self.repetition_penalty, TINY, math.inf, f"be {TINY:g} or more")

    def _check_limits(self) -> None:
        integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            integer("max_tokens", self.max_tokens, 1)
            need(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"be at most max_tokens={self.max_tokens}",
                self.min_tokens,
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                whole = isinstance(value, int) and not isinstance(value, bool)
                fine = whole and (value == ALL_LOGPROBS or 0 <= value <= MAX_LOGPROBS)
                need(fine, name, f"be an integer in 0..{MAX_LOGPROBS}, or -1 for all tokens", value)
        if (kept := self.truncate_prompt_tokens) is not None:
            fine = isinstance(kept, int) and not isinstance(kept, bool) and (kept == -1 or kept > 0)
            need(fine, "truncate_prompt_tokens", "be an integer of 1 or more, or -1", kept)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)
        for name in ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens"):
            need(isinstance(getattr(self, name), bool), name, "be True or False", getattr(self, name))

    def _processors(self) -> tuple[LogitsProcessor, ...]:
        found = items("logits_processors", self.logits_processors, "be a list of functions")
        for one in found:
            processor_form(one)
        return found

    def _bias(self) -> dict[int, float] | None:
        if self.logit_bias is None:
            return None
        need(isinstance(self.logit_bias, Mapping), "logit_bias", "map token ids to numbers", self.logit_bias)
        bias: dict[int, float] = {}
        for key, value in self.logit_bias.items():
            token = int(key) if isinstance(key, str) and key.isdecimal() and len(key) < 20 else key
            integer("logit_bias token id", token, 0)
            number(f"logit_bias[{key}]", value, -100.0, 100.0, "be in -100..100")
            need(
                token not in bias,
                "logit_bias",
                f"have each token id once, and {token} occurs twice",
                self.logit_bias,
            )
            bias[token] = float(value)
        return bias or None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with this seed."""
        return replace(self, seed=seed)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; unknown keys are rejected with an error that names them."""
        need(isinstance(given, Mapping), "SamplingParams.from_dict", "get a dict", given)
        reject_unknown("SamplingParams", given, [f.name for f in fields(cls)], meant=ELSEWHERE)
        return cls(**given)


def processor_form(processor: LogitsProcessor) -> Literal["output", "prompt and output", "transformers"]:
    """What a logits processor is called with.

    Raises:
        ConfigError: nothing that is known.
    """
    origins = {base.__module__.split(".")[0] for base in type(processor).__mro__ if base.__name__ == "LogitsProcessor"}
    if "transformers" in origins:
        return "transformers"
    rule = (
        "hold functions (output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits) that return logits"
    )
    need(callable(processor) and not isinstance(processor, type) and not origins, "logits_processors", rule, processor)
    try:
        parameters = inspect.signature(processor).parameters.values()
    except (TypeError, ValueError):  # one that is not written in Python
        return "output"
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = sum(one.default is one.empty for one in by_place)
    need(needed in (2, 3), "logits_processors", rule, processor)
    return "output" if needed == 2 else "prompt and output"


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

NAMED: Final = 8
"""Most options, and most keys of all methods, that a message names where none is close."""

CLOSE: Final = 0.7
"""Least similarity (difflib's ratio) of what is offered instead."""

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
            integer("num_speculative_tokens", self.num_speculative_tokens, 0, 1024)
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


GivenConfig = Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | str | SpeculativeConfig | None
"""What a user may give as a `speculative_config`."""


def _written(text: str) -> Any:
    """What a text means as `speculative_config`: JSON, or the bare name of a method.

    Raises:
        ConfigError: text that begins as JSON and is none.
    """
    word = text.strip()
    if word.lower() == "none":
        return None
    return word if word and word[0] not in '{["' and word != "null" else json_value("speculative_config", text)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine.

    Attributes:
        dtype, device: "auto" takes the checkpoint's dtype, and CUDA where there is one.
        max_model_len: longest sequence; None takes the checkpoint's.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most prompt tokens in one prefill chunk.
        enable_prefix_caching: keep keys and values of ended requests and take them over where a prompt begins with the
            same tokens; without effect where the model's runner cannot share blocks.
        kv_cache_memory_bytes: most bytes of keys and values; None takes a share of the free memory. Requests that do
            not fit wait.
        speculative_memory_bytes: most bytes that speculation may take beside the weights: draft trees of all running
            sequences (keys, values, logits) and the caches of draft models. Trees are cut to what fits; None sets no
            limit.
        threads: of PyTorch on the CPU; None leaves PyTorch's setting.
        seed: base for requests that have none of their own.
        exactness: "strict": tokens have the bits of plain decoding under every drafter and in every batch, proven by a
            self-test at start, or the model is rejected; "auto": the fastest form, which is strict too where that costs
            nothing.
        quantization: "int8" or "int4" rounds the weights of the linear layers when they are loaded, those of the head
            to int8; "none" leaves them, and so does None but for GGUF files (models.load).
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    speculative_memory_bytes: int | None = None
    threads: int | None = None
    seed: int | None = None
    exactness: str = "auto"
    quantization: str | None = None

    def __post_init__(self) -> None:
        choice("quantization", self.quantization, (NOT_QUANTIZED, *QUANTIZATIONS), optional=True)
        choice("dtype", self.dtype, DTYPES)
        choice("exactness", self.exactness, EXACTNESS)
        kind = self.device.split(":")[0] if isinstance(self.device, str) else None
        need(kind in ("auto", "cpu", "cuda"), "device", "be auto, cpu, cuda or cuda:N", self.device)
        if self.max_model_len is not None:
            integer("max_model_len", self.max_model_len, 2)
        integer("max_num_seqs", self.max_num_seqs, 1, 1024)
        integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 65536)
        need(
            isinstance(self.enable_prefix_caching, bool),
            "enable_prefix_caching",
            "be True or False",
            self.enable_prefix_caching,
        )
        for name in ("kv_cache_memory_bytes", "speculative_memory_bytes"):
            if (size := getattr(self, name)) is not None:
                integer(name, size, 1)
        if self.threads is not None:
            integer("threads", self.threads, 1, 1024)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)


def near(key: object, known: Iterable[str]) -> list[str]:
    """Known keys that this one may have been meant to be, the closest first; upper case does not count."""
    return get_close_matches(str(key).lower(), list(dict.fromkeys(known)), n=2, cutoff=CLOSE)


def reject_unknown_keys(kind: str, given: Iterable[str], options: Sequence[str], general: Sequence[str]) -> None:
    """Reject the first of `given` that is no option.

    Args:
        kind: what lacks it, for the message.
        options: of the method, and of the controller where they may be given there.
        general: keys that may be given beside every method.
    Raises:
        ConfigError: with the closest of all these keys; where none is close, with the first of them.
    """
    for key in given:
        if key not in options:
            rest = [one for one in general if one != key and one not in options]
            close = near(key, [*options, *rest])
            known = f"known are {_some(sorted(options)) or 'no options'}; with every method also {_some(rest)}"
            hint = f"did you mean {' or '.join(close)}?" if close else known
            raise ConfigError(f"{kind} does not know {key!r}; {hint}")


def _some(names: Sequence[str]) -> str:
    """All names where they are few, else the first, how many more there are, and where they are listed."""
    if len(names) <= NAMED:
        return ", ".join(names)
    return f"{', '.join(names[:NAMED])} and {len(names) - NAMED} more (listed in the documentation)"
