"""Fields that clients send beside those that a request here is made of: values that ask for nothing are taken, other
names of what is known are understood, and what changes the answer is rejected with its name and a reason, or ignored
where the operator has chosen that (`ServerConfig.lenient_fields`).

The documentation is made from `TABLE` and `OTHER_NAMES`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from paceline.serving.field_notes import NOTES, Notes
from paceline.utils import same

Json = dict[str, Any]

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "chat", "completions", "responses", "messages"
LLAMA: Final = "llama-server"
OPENAI: Final = (CHAT, COMPLETIONS, RESPONSES)
DRAWN: Final = (CHAT, COMPLETIONS, LLAMA)
ALL: Final = (*OPENAI, MESSAGES, LLAMA)

MOST_LETTERS: Final = 64
"""So many letters of a field's name that nobody knows are told in messages."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Says which values ask for nothing, where they are not a few.

    Attributes:
        words: which they are.
        holds: says it of a value and of the body that it is in.
    """

    words: str
    holds: Callable[[Any, Json], bool]


Neutral = tuple[Any, ...] | Rule


@dataclass(frozen=True, slots=True)
class Group:
    """Describes fields that are alike, and why other values of them cannot be honoured.

    Attributes:
        apis: whose requests may hold them.
        fields: name -> the values beside null that ask for nothing.
        why: of other values, why they cannot be honoured, or what to do instead.
        ignorable: by `lenient_fields`. Not what the model is to read, or what the answer is to be.
        code: of the error, for programs.
    """

    apis: tuple[str, ...]
    fields: Mapping[str, Neutral]
    why: str
    ignorable: bool = True
    code: str = "unsupported_field"


def _counts(value: Any, _: Json) -> bool:
    """Tell whether a value is a whole number as llama-server takes it, where -1 is a word of its own."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= -1


def _no_penalty(value: Any, body: Json) -> bool:
    penalties = [body.get(name) for name in ("presence_penalty", "frequency_penalty")]
    none = all(not penalty for penalty in penalties) and body.get("repetition_penalty") in (None, 1)
    return same(value, -1) or (none and _counts(value, body))


def _keeps_all(value: Any, _: Json) -> bool:
    """Tell whether edits of the context take nothing out of it."""
    kept = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
    edits = value.get("edits") or [] if isinstance(value, dict) and value.keys() <= {"edits"} else None
    return isinstance(edits, list) and all(edit in kept for edit in edits)


ANY: Final = Rule("any", lambda _, __: True)
TEXT: Final = Rule("any text", lambda value, _: isinstance(value, str))
SWITCH: Final = Rule("true, false", lambda value, _: isinstance(value, bool))
NUMBER: Final = Rule("any number", lambda value, _: isinstance(value, int | float) and not isinstance(value, bool))
COUNT: Final = Rule("an integer of -1 or more", _counts)
AS_N: Final = Rule("equal to n", lambda value, body: same(value, body.get("n") or 1))
NO_PENALTY: Final = Rule("-1, or without penalties an integer of -1 or more", _no_penalty)
NO_PREWARM: Final = Rule(
    "any without prewarm", lambda value, _: isinstance(value, dict) and not value.get("prewarm", False)
)
KEEPS_ALL: Final = Rule("no edits, or those that keep all thoughts", _keeps_all)

RULES: Final = "this rule of sampling is not built"
EXTRAS: Final = "the answer has no such part"

WHOLE: Final = "give the whole conversation in messages"

TABLE: Final = (
    Group(
        OPENAI,
        {
            "service_tier": TEXT,
            "prompt_cache_retention": TEXT,
            "prompt_cache_options": NO_PREWARM,
            "session_id": TEXT,
        },
        "every request is served alike, and every prefix is cached",
    ),
    Group(DRAWN, {"store": SWITCH}, "chats and completions are never stored"),
    Group((CHAT,), {"verbosity": ("medium",)}, "how much is said the model settles itself"),
    Group((CHAT,), {"modalities": (["text"], []), "audio": ()}, "answers are texts"),
    Group(OPENAI, {"moderation": ()}, "nothing is moderated here"),
    Group((CHAT,), {"web_search_options": ()}, "this server runs no tools"),
    Group(
        (CHAT,),
        {"functions": ([],), "function_call": ("none", "auto")},
        "give tools and tool_choice, which have replaced it",
        ignorable=False,
    ),
    Group((CHAT,), {"top_logprobs": (0,)}, "others go with logprobs"),
    Group((CHAT,), {"max_tokens": (-1,), "max_completion_tokens": (-1,)}, "other numbers are a limit"),
    Group(OPENAI, {"logit_bias": ([],)}, "give an object"),
    Group((COMPLETIONS,), {"suffix": ("",)}, "texts are continued at their end", ignorable=False),
    Group(DRAWN, {"best_of": AS_N}, "outputs are returned as they are drawn"),
    Group(
        DRAWN,
        {"use_beam_search": (False,), "num_beams": (1,), "length_penalty": (1.0,), "early_stopping": (False,)},
        'give search, as {"method": "beam", "beam_width": 4}',
    ),
    Group(
        DRAWN,
        {"retrieval": ()},
        "this server has no index; retrieve in Python, with LLM.generate(..., retrieval=...)",
        ignorable=False,
    ),
    Group(
        OPENAI,
        {"detokenize": (True,), "spaces_between_special_tokens": (True,)},
        "texts are decoded as the tokenizer does it",
    ),
    Group((CHAT,), {"echo": (False,)}, "give continue_final_message"),
    Group((CHAT,), {"add_special_tokens": (False,)}, "the chat template writes them"),
    Group((CHAT,), {"documents": ([],)}, "give them in messages", ignorable=False),
    Group(
        (CHAT,),
        {"chat_template": ()},
        "the server has one; its operator may replace it with --chat-template",
        ignorable=False,
    ),
    Group((COMPLETIONS,), {"prompt_embeds": ()}, "give prompt", ignorable=False),
    Group((COMPLETIONS,), {"encoder_prompt": ()}, "give a prompt, which is the source", ignorable=False),
    Group(OPENAI, {"mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}, "prompts are texts"),
    Group(
        OPENAI,
        {"kv_transfer_params": ({},), "ec_transfer_params": ({},), "vllm_xargs": ({},), "logits_processors": ([],)},
        "no plugin reads it",
    ),
    Group(
        DRAWN,
        {
            "return_tokens_as_token_ids": (False,),
            "return_token_offsets": (False,),
            "return_prompt_text": (False,),
            "logprob_token_ids": (),
            "return_tokens": (False,),
            "return_progress": (False,),
            "timings_per_token": (False,),
            "post_sampling_probs": (False,),
            "n_probs": (0,),
            "response_fields": ([],),
        },
        f"{EXTRAS}; give return_token_ids, logprobs or prompt_logprobs",
    ),
    Group(
        DRAWN,
        {
            "return_mm_kwargs": SWITCH,
            "routed_experts_prompt_start": NUMBER,
            "cache_prompt": SWITCH,
            "slot_id": COUNT,
            "n_keep": NUMBER,
            "n_discard": NUMBER,
            "n_cache_reuse": NUMBER,
            "sse_ping_interval": NUMBER,
            "keep_alive": ANY,
            "guided_decoding_backend": TEXT,
            "parse_tool_calls": (True,),
        },
        "the answer does not depend on it",
    ),
    Group((CHAT, COMPLETIONS), {"id_slot": COUNT}, "the answer does not depend on it"),
    Group((LLAMA,), {"id_slot": (-1,)}, "another one must be the number of a slot"),
    Group(DRAWN, {"guided_whitespace_pattern": ()}, "give structured_outputs with its whitespace_pattern"),
    Group(
        DRAWN,
        {"steering": ()},
        "it would let clients choose models to load; use it in Python or with paceline generate",
        ignorable=False,
    ),
    Group(DRAWN, {"repetition_detection": (), "watermarking": (False,)}, "this is not built"),
    Group(DRAWN, {"stream_interval": (1,)}, "each event comes when its tokens do"),
    Group(DRAWN, {"truncation_side": ("left",)}, "truncate_prompt_tokens keeps the end of a prompt"),
    Group(
        (CHAT,),
        {"reasoning_format": ("auto", "deepseek"), "reasoning_in_content": (False,), "include_reasoning": (True,)},
        "thoughts come as reasoning_content",
    ),
    Group(
        (CHAT, MESSAGES),
        {"reasoning_budget": (-1,), "thinking_budget_tokens": (-1,), "thinking_token_budget": (-1,)},
        "how long the model thinks it settles itself",
    ),
    Group(
        DRAWN,
        {
            "typical_p": (1.0,),
            "typ_p": (1.0,),
            "tfs_z": (1.0,),
            "top_a": (0.0,),
            "top_n_sigma": (-1.0, 0.0),
            "min_keep": (0,),
            "mirostat": (0,),
            "dynatemp_range": (0.0,),
            "xtc_probability": (0.0,),
            "dry_multiplier": (0.0,),
            "no_repeat_ngram_size": (0,),
            "samplers": ("", []),
        },
        RULES,
    ),
    Group(
        DRAWN,
        {
            "mirostat_tau": NUMBER,
            "mirostat_eta": NUMBER,
            "dynatemp_exponent": NUMBER,
            "xtc_threshold": NUMBER,
            "dry_base": NUMBER,
            "dry_allowed_length": NUMBER,
            "dry_penalty_last_n": NUMBER,
            "dry_sequence_breakers": ANY,
        },
        "numbers of rules that are switched off",
    ),
    Group(DRAWN, {"repeat_last_n": NO_PENALTY}, "penalties count the whole text"),
    Group(DRAWN, {"penalize_nl": (False,)}, RULES),
    Group(DRAWN, {"n_indent": (0,), "t_max_prompt_ms": (0, -1), "t_max_predict_ms": (0, -1)}, "this is not built"),
    Group(DRAWN, {"lora": ([],)}, "an adapter is loaded with the server, by --lora"),
    Group(DRAWN, {"options": ({},), "extra_body": ({},)}, "give what is in it beside the other fields"),
    Group(DRAWN, {"num_ctx": ()}, "the operator sets it with --max-model-len"),
    Group(DRAWN, {"max_length": ()}, "give max_tokens, which counts new tokens alone"),
    Group(
        DRAWN,
        {"do_sample": (), "transforms": ([],), "plugins": ([],), "models": ([],), "provider": ({},)},
        "this server has no such choice",
    ),
    Group((RESPONSES,), {"background_options": ({}, {"completion_window": "soonest"})}, "it begins at once"),
    Group((RESPONSES,), {"max_tool_calls": NUMBER}, "it counts tools that a server runs, and this one runs none"),
    Group((RESPONSES,), {"context_management": ([],)}, "nothing is taken out of the context"),
    Group((RESPONSES,), {"image": ANY, "access_programs": ({},)}, "only a hosted service has it"),
    Group((RESPONSES,), {"conversation": (), "prompt": ()}, "give the items in input", ignorable=False),
    Group(
        (MESSAGES,),
        {
            "service_tier": TEXT,
            "speed": TEXT,
            "user_profile_id": TEXT,
            "workspace_id": TEXT,
            "anthropic_version": TEXT,
            "anthropic_beta": ANY,
            "betas": ANY,
            "diagnostics": ({}, {"previous_message_id": None}),
            "inference_geo": ("global",),
            "billing_policy": ({"type": "billing_policy"}, {"type": "billing_policy", "bill_to": "self"}),
            "fallback_credit_token": (),
            "fallbacks": ("default", []),
        },
        "only a hosted service has it",
    ),
    Group((MESSAGES,), {"context_management": KEEPS_ALL}, "nothing is taken out of the context"),
    Group((MESSAGES,), {"container": (), "mcp_servers": ([],)}, "this server runs no tools"),
    Group((MESSAGES,), {"thread": ()}, WHOLE, ignorable=False, code="thread_unsupported_request"),
    Group((MESSAGES,), {"compaction": ()}, WHOLE, ignorable=False),
)
"""Fields that are taken where they ask for nothing. Some are fields of requests too, which take other values."""


@dataclass(frozen=True, slots=True)
class OtherName:
    """Says which field is meant by a name that others have for it.

    Attributes:
        to: its name here; with a dot, a key of that field.
        neutral: values beside null that ask for nothing.
        needs: what else must be so, and how it is said.
    """

    apis: tuple[str, ...]
    to: str
    neutral: tuple[Any, ...] = ()
    needs: Rule | None = None


WHOLE_TEXT: Final = Rule("with repeat_last_n -1", lambda _, body: same(body.get("repeat_last_n"), -1))

OTHER_NAMES: Final[Mapping[str, OtherName]] = {
    **{
        f"guided_{key}": OtherName(DRAWN, f"structured_outputs.{key}") for key in ("json", "regex", "choice", "grammar")
    },
    "guided_json_object": OtherName(DRAWN, "structured_outputs.json_object", (False,)),
    "structural_tag": OtherName(DRAWN, "structured_outputs.structural_tag"),
    "grammar": OtherName(DRAWN, "structured_outputs.grammar", ("",)),
    "json_schema": OtherName(DRAWN, "structured_outputs.json"),
    "n_predict": OtherName(DRAWN, "max_tokens"),
    "max_new_tokens": OtherName(DRAWN, "max_tokens"),
    "n_cmpl": OtherName(DRAWN, "n"),
    "repeat_penalty": OtherName(DRAWN, "repetition_penalty", (1.0,), WHOLE_TEXT),
    "output_format": OtherName((MESSAGES,), "output_config.format"),
}
"""Names of vLLM's older versions, of llama-server, of transformers, and of Anthropic's beta."""

INSIDE: Final[Mapping[str, str]] = {
    "messages.function_call": "send tool_calls",
    "messages.audio": "contents are texts",
    "messages.prefix": "give continue_final_message",
    "messages.partial": "give continue_final_message",
    "messages.images": "contents are texts",
    "messages.thinking_blocks": "send reasoning_content",
    "messages.reasoning_details": "send reasoning_content",
    "tools.custom": "only functions are called",
    "tools.function.defer_loading": "tools are not searched",
    "tools.defer_loading": "tools are not searched",
    "tools.input_examples": "put them into the description",
    "tools.output_schema": "put it into the description",
    "tools.async": "calls are answered in turn",
    "tools.allowed_callers": "only the model calls",
    "tool_choice.allowed_tools": "give the tools that may be called",
    "response_format.value": "give json_schema",
    "stream_options.include_obfuscation": "events are not padded",
    "reasoning.summary": "thoughts come whole",
    "reasoning.generate_summary": "thoughts come whole",
    "reasoning.context": "the chat template settles it",
    "reasoning.mode": "the model settles it",
    "output_config.task_budget": "max_tokens limits the whole output",
    "thinking.display": "thoughts come whole",
}
"""Keys inside other fields -> why they are rejected."""


class FieldError(Exception):
    """Raised where a field cannot be honoured.

    Args:
        param: its name.
        code: for programs.
    """

    def __init__(self, message: str, param: str, code: str = "unsupported_field") -> None:
        super().__init__(message)
        self.param, self.code = param, code


def _rows() -> dict[str, dict[str, tuple[Neutral, Group]]]:
    rows: dict[str, dict[str, tuple[Neutral, Group]]] = {api: {} for api in ALL}
    for group in TABLE:
        for api in group.apis:
            rows[api] |= {name: (neutral, group) for name, neutral in group.fields.items()}
    return rows


ROWS: Final = _rows()
"""The table by API and field."""


def settle(api: str, body: Json, known: Collection[str]) -> None:
    """Take out of a body what asks for nothing, so that what a request is made of is left.

    Args:
        api: whose it is; "" has nothing in the table.
        known: the request's own fields.
    Raises:
        FieldError: a field that changes the answer and cannot be honoured.
    """
    notes, rows = NOTES.get() or Notes(), ROWS.get(api, {})
    _rename(api, body, known, notes)
    for name in list(body):
        row = rows.get(name)
        idle = body[name] is None or (row is not None and _neutral(body[name], body, row[0]))
        if name in known and (row is None or not idle):
            continue
        if not idle:
            if not notes.lenient or (row is not None and not row[1].ignorable):
                raise FieldError(_refusal(name, row, known), name, *([] if row is None else [row[1].code]))
            notes.ignore(name)
        del body[name]


def _neutral(value: Any, body: Json, neutral: Neutral) -> bool:
    return neutral.holds(value, body) if isinstance(neutral, Rule) else any(same(value, idle) for idle in neutral)


def _refusal(name: str, row: tuple[Neutral, Group] | None, known: Collection[str]) -> str:
    if row is None:
        near = difflib.get_close_matches(name[:MOST_LETTERS], known, 1, 0.8)
        told = name if len(name) <= MOST_LETTERS else f"{name[:MOST_LETTERS]}..."
        return f"{told} is not known here; {f'did you mean {near[0]}?' if near else 'leave it out'}"
    neutral, group = row
    taken = _words(neutral)
    return f"{name} {f'must be {taken}' if taken else 'is not supported'} ({group.why}); leave it out"


def _rename(api: str, body: Json, known: Collection[str], notes: Notes) -> None:
    """Put what goes by another name to its place.

    Raises:
        FieldError: both names are given, or it does not mean quite the same.
    """
    if api != MESSAGES:
        _rename_thoughts(body)
    _rename_format(api, body, notes)
    for name, other in OTHER_NAMES.items():
        to, _, key = other.to.partition(".")
        if name not in body or api not in other.apis or name in known or to not in known:
            continue
        value = body.pop(name)
        if value is None or _neutral(value, body, other.neutral):
            continue
        if other.needs is not None and not other.needs.holds(value, body):
            if notes.lenient:
                notes.ignore(name)
                continue
            why = f"{name} must be {_words(other.neutral)}, or come {other.needs.words}"
            raise FieldError(f"{why}; {other.to} is the same over the whole text", name)
        here = body.get(to)
        if here is not None and (not key or not isinstance(here, dict) or key in here):
            raise FieldError(f"give {name} or {other.to}, not both", name)
        body[to] = {**(here or {}), key: value} if key else value
        notes.names[to] = name


def _rename_thoughts(body: Json) -> None:
    """Put thoughts in messages, which vLLM calls `reasoning`, under our name; of both, ours counts."""
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and "reasoning" in message:
            thoughts = message.pop("reasoning")
            message.setdefault("reasoning_content", thoughts)


def _rename_format(api: str, body: Json, notes: Notes) -> None:
    """Read `response_format` as llama-server and vLLM have it: an object with its schema, a structural tag."""
    form = body.get("response_format")
    if api not in DRAWN or not isinstance(form, dict):
        return
    if form.get("type") == "json_object" and isinstance(schema := form.get("schema"), dict):
        rest = {name: value for name, value in form.items() if name != "schema"}
        body["response_format"] = rest | {"type": "json_schema", "json_schema": {"schema": schema}}
    elif form.get("type") == "structural_tag" and body.get("structured_outputs") is None:
        del body["response_format"]
        tag = {name: value for name, value in form.items() if name != "type"}
        body["structured_outputs"] = {"structural_tag": tag}
        notes.names["structured_outputs"] = "response_format"


def _words(neutral: Neutral) -> str:
    """Write values as JSON has them; none is an empty text."""
    if isinstance(neutral, Rule):
        return neutral.words
    return " or ".join(json.dumps(value) for value in neutral)


def field_table() -> Iterator[tuple[list[str], tuple[str, ...], str, str]]:
    """Yield what the documentation tells of fields that are alike: names, APIs, values that are taken, what others
    become.
    """
    for group in TABLE:
        alike: dict[str, list[str]] = {}
        for name, neutral in group.fields.items():
            alike.setdefault(_words(neutral), []).append(name)
        for taken, names in alike.items():
            yield names, group.apis, taken, group.why
    for name, other in OTHER_NAMES.items():
        needs = f", {other.needs.words}" if other.needs is not None else ""
        yield [name], other.apis, _words(other.neutral), f"understood as {other.to}{needs}"
