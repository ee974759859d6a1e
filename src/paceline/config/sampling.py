"""How tokens are chosen, with vLLM's names: SamplingParams, and what an output must be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final, Literal

from paceline.config.canvas import ThinkParams, canvas_pieces
from paceline.config.declared import check_options, documented, option
from paceline.errors import ConfigError
from paceline.utils import (
    TINY,
    clear_calls,
    integer,
    items,
    json_value,
    need,
    number,
    reject_unknown,
    shortened,
    strings,
    tokens,
)

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy, as in vLLM."""

MAX_N = 128
MAX_LOGPROBS = 128
ALL_LOGPROBS = -1


class RequestOutputKind(Enum):
    """What the chunks of a stream hold as `output`: all so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


LogitsProcessor = Callable[..., Any]
"""(output token ids, logits) or (prompt token ids, output token ids, logits) -> logits, as in vLLM's V0; or a
`LogitsProcessor` of transformers.
"""


BEAMS: Final = "give search='beam' to generate"
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
    "guidance_scale": 'steering={"method": "cfg", "guidance_scale": ...}',
    "negative_prompt_ids": 'steering={"method": "cfg", "negative_prompt": ...}',
    "dola_layers": 'steering={"method": "dola", "layers": ...}',
    "no_repeat_ngram_size": "logits_processors=[NoRepeatNGramLogitsProcessor(...)]",
    **dict.fromkeys(("num_beams", "use_beam_search", "length_penalty", "early_stopping"), BEAMS),
    "best_of": "n outputs are returned as they are drawn",
    "guided_decoding": "structured_outputs",
    "response_format": 'structured_outputs={"json": ...}',
    "stop_sequences": "stop",
    "guided_json": 'structured_outputs={"json": ...}',
    "guided_regex": 'structured_outputs={"regex": ...}',
    "guided_choice": 'structured_outputs={"choice": ...}',
    "guided_grammar": 'structured_outputs={"grammar": ...}',
    "spaces_between_special_tokens": "texts are decoded as the tokenizer does it",
    "extra_args": "no plugin reads them; give logits_processors",
    "thinking_token_budget": "max_tokens limits the whole output",
}
"""Parameters of transformers, and those of vLLM that are missing -> ours, or what is to be said."""


CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Fields of `StructuredOutputsParams` of which one is given."""


@documented
@clear_calls(example='json={"type": "object"}')
@dataclass(frozen=True, kw_only=True, repr=False)
class StructuredOutputsParams:
    """What the whole output must be, with vLLM's names; exactly one of the first six is given.

    Raises:
        ConfigError: none or several of the first six, or a value of another type.
    """

    json: Any = option(
        None, "The output is JSON that satisfies this schema; @FILE reads a file.", flag="json_schema", metavar="JSON",
        doc="A JSON schema as dict or text, or a pydantic model.",
    )  # fmt: skip
    regex: str | None = option(
        None, "The output matches this regular expression.", metavar="REGEX",
        doc="A regular expression in the syntax of Rust's `regex`, matched by the whole output.",
    )  # fmt: skip
    choice: Sequence[str] | None = option(None, doc="Texts, one of which is the output.")
    grammar: str | None = option(
        None, "The output follows this grammar, in Lark's notation or GBNF; @FILE reads a file.",
        doc="In Lark's notation, or in GBNF (EBNF of llama.cpp); any way to cut the text into terminals counts.",
    )  # fmt: skip
    json_object: bool | None = option(
        None, doc="True for any JSON object.",
        check=lambda name, value: need(value in (True,), f"structured_outputs {name}", "be True or left out", value),
    )  # fmt: skip
    structural_tag: Any = option(
        None,
        doc='vLLM\'s {"structures": [{"begin", "schema", "end"}, ...], "triggers": [...]}: free text in which what '
        "stands between a begin and its end follows the schema.",
    )
    disable_any_whitespace: bool = option(False, doc="Of JSON: one blank behind commas and colons and none elsewhere.")
    whitespace_pattern: str | None = option(
        None,
        doc="Of JSON: a regular expression of the blanks that may stand between its parts; None is one blank, or a "
        "line break and 32 blanks or 8 tabs at most.",
    )
    strict: bool = option(
        True,
        doc="Reject a schema with keywords that cannot be enforced; else they are ignored, so that the output may "
        "violate them.",
    )

    def __repr__(self) -> str:
        changed = (
            (field.name, getattr(self, field.name))
            for field in fields(self)
            if getattr(self, field.name) != field.default
        )
        return f"StructuredOutputsParams({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def __post_init__(self) -> None:
        if isinstance(self.json, type) and hasattr(self.json, "model_json_schema"):
            vars(self)["json"] = self.json.model_json_schema()
        constraints = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        names = ", ".join(CONSTRAINTS)
        need(
            len(constraints) == 1,
            "structured_outputs",
            f"hold exactly one of {names}",
            " and ".join(constraints) or "none",
        )
        for name in ("json", "structural_tag"):
            if isinstance(value := getattr(self, name), str):
                vars(self)[name] = json_value(f"structured_outputs {name}", value)
            fine = value is None or isinstance(getattr(self, name), Mapping | bool)
            need(fine, f"structured_outputs {name}", "be a dict or JSON text of one", value)
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            fine = value is None or (isinstance(value, str) and value != "")
            need(fine, f"structured_outputs {name}", "be a text that is not empty", value)
        if self.choice is not None:
            vars(self)["choice"] = texts = strings("structured_outputs choice", self.choice)
            need(len(texts) > 0 and "" not in texts, "structured_outputs choice", "hold texts, none empty", self.choice)
        check_options(self)
        spaced = self.whitespace_pattern is not None and self.disable_any_whitespace
        need(not spaced, "whitespace_pattern", "be left out with disable_any_whitespace", self.whitespace_pattern)

    @classmethod
    def parse(cls, value: object) -> StructuredOutputsParams | None:
        """From a dict; None and parameters stay as they are."""
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"structured_outputs must be StructuredOutputsParams or a dict, got {shortened(value)}")
        reject_unknown("structured_outputs", value, [field.name for field in fields(cls)])
        return cls(**value)


IDLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "num_beams": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "extra_args": ({},),
    "guided_decoding": (),
    "skip_reading_prefix_cache": (False,),
    "flat_logprobs": (False,),
    "skip_clone": (False, True),
    "repetition_detection": (),
    "thinking_token_budget": (),
}
"""Parameters of vLLM and transformers that are left out -> the values beside None under which they ask for nothing."""


def _check_logprobs(name: str, value: object) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    fine = whole and (value == ALL_LOGPROBS or 0 <= value <= MAX_LOGPROBS)  # type: ignore[operator]
    need(fine, name, f"be an integer in 0..{MAX_LOGPROBS}, or -1 for all tokens", value)


def _check_kept(name: str, value: object) -> None:
    fine = isinstance(value, int) and not isinstance(value, bool) and (value == -1 or value > 0)
    need(fine, name, "be an integer of 1 or more, or -1", value)


def _check_skipped(name: str, value: object) -> None:
    need(value is not None, name, "be True, False or a list of token ids", value)


def _check_kind(name: str, value: object) -> None:
    need(isinstance(value, RequestOutputKind), name, "be a RequestOutputKind", value)


@documented
@clear_calls(example="temperature=0", meant=ELSEWHERE, neutral=IDLE)
@dataclass(kw_only=True)
class SamplingParams:
    """How tokens are chosen, with vLLM's names, ranges and defaults.

    Every parameter is honoured under every drafter: the rules are applied at each node of a draft tree along the node's
    own path, before verification. `temperature` below 1e-5 is greedy. Logprobs are those of the model before any rule
    (vLLM's `raw_logprobs`). An attribute may be set, and is checked; requests that were given before do not change.

    Raises:
        ConfigError: a value outside its range, or a contradiction.
    """

    n: int = option(1, "Outputs per prompt.", low=1, high=MAX_N)
    temperature: float = option(
        1.0, "0 is greedy. Default: the checkpoint's generation_config.json, else 0.", low=0.0,
        rule="be 0 (greedy) or positive", doc="0 is greedy; higher ones draw less likely tokens more often.",
    )  # fmt: skip
    top_p: float = option(
        1.0, "Keep the most likely tokens whose probabilities sum to this.", low=0.0, high=1.0,
        rule="be above 0 and at most 1", open_low=True,
    )  # fmt: skip
    top_k: int = option(
        0, "Keep this many most likely tokens; 0 keeps all.", low=-1,
        doc="Keep this many most likely tokens; 0 or -1 keeps all.",
    )  # fmt: skip
    min_p: float = option(
        0.0, "Keep tokens at least this likely relative to the most likely one.", low=0.0, high=1.0, rule="be in 0..1"
    )
    presence_penalty: float = option(
        0.0, "Subtracted from tokens that were generated before.", low=-2.0, high=2.0, rule="be in -2..2",
        doc="In -2..2, subtracted from tokens that were generated before.",
    )  # fmt: skip
    frequency_penalty: float = option(
        0.0, "Subtracted once per earlier occurrence.", low=-2.0, high=2.0, rule="be in -2..2",
        doc="In -2..2, subtracted once per earlier occurrence among generated tokens.",
    )  # fmt: skip
    repetition_penalty: float = option(
        1.0, "Divides the logits of tokens seen in prompt or output.", low=TINY, rule=f"be {TINY:g} or more",
        doc="Above 0; divides the logits of tokens seen in prompt or output.",
    )  # fmt: skip
    logit_bias: Mapping[int, float] | None = option(
        None, 'JSON object of token id -> bias, as {"5": -100}.', metavar="JSON",
        doc="Token id -> bias in -100..100.",
    )  # fmt: skip
    allowed_token_ids: Sequence[int] | None = option(
        None, "Token id that may be generated, and no others; may be repeated.",
        doc="The only tokens that may be generated, end tokens not excepted; None allows all.",
    )  # fmt: skip
    bad_words: Sequence[str] = option(
        (), "A word that must not be generated; may be repeated.", doc="Words that must not be generated."
    )
    logits_processors: Sequence[LogitsProcessor] = option(
        (), doc="Functions that change the logits before all other rules: `(output_token_ids, logits)` or "
        "`(prompt_token_ids, output_token_ids, logits)` -> logits, one row at a time, or processors of transformers. "
        "They are asked along each path of a draft too, so they must depend on their arguments alone.",
    )  # fmt: skip
    structured_outputs: StructuredOutputsParams | None = option(
        None, doc="A JSON schema, regular expression, list of choices or grammar that the output follows, as "
        "`StructuredOutputsParams` or a dict of them; all tokens that lead out of it are forbidden.",
    )  # fmt: skip
    steering: Mapping[str, Any] | None = option(
        None, 'Change the distribution by a method, as dola, or JSON, as {"method": "cfg", "guidance_scale": 1.5}.',
        metavar="METHOD",
        doc="A method that changes the model's distribution before all other rules, by earlier layers, another prompt "
        "or a second model: its name, or a dict (or its JSON) with its options, as "
        '{"method": "cfg", "guidance_scale": 1.5}.',
    )  # fmt: skip
    canvas: Sequence[str | int | Sequence[int]] | None = option(
        None, 'Of diffusion models: text given in the answer, as ["The answer is ", 5]; numbers are slots to fill.',
        metavar="JSON",
        doc="Of a diffusion language model: what stands where in its answer, a list of texts (or lists of token ids) "
        'and numbers of slots to fill, as ["The answer is ", 5]. Slots behind it are filled, up to `max_tokens`.',
    )  # fmt: skip
    think: ThinkParams | Mapping[str, Any] | int | None = option(
        None, 'Of diffusion models: most tokens of thoughts before the answer, or JSON, as {"max_tokens": 256}.',
        metavar="JSON",
        doc="Of a diffusion language model: thoughts before the answer, as `ThinkParams`, a dict of them, or the most "
        "tokens that they may have.",
    )  # fmt: skip
    seed: int | None = option(
        None, "Same seed, same text.", low=-(2**63), high=2**63 - 1, doc="Same seed, same tokens; None draws one."
    )
    stop: Sequence[str] | str = option(
        (), "Text that ends the output; may be repeated.",
        doc="Texts that end the output; one is cut off unless `include_stop_str_in_output`.",
    )  # fmt: skip
    stop_token_ids: Sequence[int] = option(
        (), "Token id that ends the output; may be repeated.", doc="Token ids that end the output."
    )
    include_stop_str_in_output: bool = option(False, "Keep the stop string in the text.")
    max_tokens: int | None = option(
        16, "Maximum number of new tokens. Default: the checkpoint's, else 256.", low=1,
        doc="Maximum number of generated tokens; None means up to the context.",
    )  # fmt: skip
    min_tokens: int = option(0, "Minimum number of new tokens.", low=0)
    logprobs: int | None = option(
        None, "Report this many of the most likely tokens per position, -1 all (with --json).", check=_check_logprobs,
        doc="Number of most likely tokens to report besides the chosen one; -1 is all, None none.",
    )  # fmt: skip
    prompt_logprobs: int | None = option(None, "The same for the prompt's tokens.", check=_check_logprobs)
    truncate_prompt_tokens: int | None = option(
        None, "Use this many tokens of the prompt's end; -1: what leaves room for --max-tokens.", check=_check_kept,
        doc="Use this many tokens of the prompt's end; -1 uses what leaves room for `max_tokens`.",
    )  # fmt: skip
    ignore_eos: bool = option(False, "Continue after an end token.")
    detokenize: bool = option(True, doc="Whether `text` is made.")
    skip_special_tokens: bool | Collection[int] = option(
        True, doc="Make `text` without special tokens, or without those of a list of ids.", check=_check_skipped
    )
    output_kind: RequestOutputKind = option(
        RequestOutputKind.CUMULATIVE, check=_check_kind,
        doc="What chunks of `stream` hold; `generate` and `chat` return whole outputs whatever it is.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_tokens is not None:
            rule = f"be at most max_tokens={self.max_tokens}"
            need(self.min_tokens <= self.max_tokens, "min_tokens", rule, self.min_tokens)
        self.stop = strings("stop", self.stop)
        self.bad_words = strings("bad_words", self.bad_words)
        self.stop_token_ids = tokens("stop_token_ids", self.stop_token_ids)
        if not isinstance(skipped := self.skip_special_tokens, bool):
            self.skip_special_tokens = frozenset(tokens("skip_special_tokens", skipped))
        self.logit_bias = self._bias()
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = tokens("allowed_token_ids", self.allowed_token_ids)
            need(len(self.allowed_token_ids) > 0, "allowed_token_ids", "not be empty", self.allowed_token_ids)
        self.logits_processors = self._processors()
        self.structured_outputs = StructuredOutputsParams.parse(self.structured_outputs)
        self.steering = _steering(self.steering)
        self.canvas, self.think = canvas_pieces(self.canvas), ThinkParams.parse(self.think)
        ends = self.structured_outputs is None or not self.ignore_eos
        need(ends, "ignore_eos", "be False with structured_outputs, whose end is an end token", self.ignore_eos)
        need(self.detokenize or not self.stop, "stop", "be empty when detokenize is False", self.stop)
        vars(self)["_built"] = True

    def __setattr__(self, name: str, value: object) -> None:
        if "_built" in vars(self):
            values = {field.name: getattr(self, field.name) for field in fields(self)}
            value = getattr(SamplingParams.from_dict({**values, name: value}), name)
        object.__setattr__(self, name, value)

    def _processors(self) -> tuple[LogitsProcessor, ...]:
        processors = items("logits_processors", self.logits_processors, "be a list of functions")
        for processor in processors:
            processor_form(processor)
        return processors

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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from a mapping; unknown keys are rejected with an error that names them."""
        need(isinstance(values, Mapping), "SamplingParams.from_dict", "get a dict", values)
        reject_unknown("SamplingParams", values, [f.name for f in fields(cls)], meant=ELSEWHERE)
        return cls(**values)


def _steering(value: object) -> dict[str, Any] | None:
    """A method of steering and its options, which the method itself checks."""
    if value is None:
        return None
    read = value
    if isinstance(value, str):
        read = json_value("steering", value) if value.lstrip().startswith("{") else {"method": value}
    rule = 'be the name of a method, or a dict as {"method": "cfg", "guidance_scale": 1.5}'
    need(isinstance(read, Mapping) and isinstance(read.get("method"), str), "steering", rule, value)
    return dict(read)  # type: ignore[call-overload,no-any-return]  # a mapping, just checked


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
    by_place = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    needed = sum(parameter.default is parameter.empty for parameter in by_place)
    need(needed in (2, 3), "logits_processors", rule, processor)
    return "output" if needed == 2 else "prompt and output"
