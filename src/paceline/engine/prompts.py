"""What a caller may pass as a prompt, read into one record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from paceline.config import ALL_DRAFTS, DraftChoice, SamplingParams
from paceline.drafters import NO_TENANT
from paceline.errors import ConfigError, PromptError
from paceline.models import NO_INPUTS, Inputs
from paceline.sampling import LogitRule
from paceline.utils import need, reject_unknown, shortened

Prompt = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "prediction", "cache_salt", "speculative_config")
OF_SOURCE = ("encoder_prompt", "decoder_prompt")
"""Further keys for encoder-decoder models."""

OF_OTHER_INPUT = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "prompt_embeds")
MEANT = {
    "input_ids": "prompt_token_ids",
    "attention_mask": "prompts of a batch are given as a list, without padding",
    "messages": "conversations go to chat",
    **dict.fromkeys(OF_OTHER_INPUT, "models read texts and token ids here"),
    **dict.fromkeys(OF_SOURCE, "this model has no encoder"),
}
"""Keys of vLLM and transformers -> ours, or a sentence."""

INPUTS = "inputs"
"""Key under which callers that make `models.Inputs` pass them; users give none."""

MAX_SALT = 256


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """One prompt as the engine takes it.

    Attributes:
        text: where it was given as text, or beside the ids.
        tokens: its ids, not yet checked against a vocabulary.
        prediction: ids of what the caller expects the output to be; may be empty.
        tenant: whose caches and tables it may use.
        drafts: what it takes of the drafts that the engine has.
        inputs: what it has beside its tokens.
        rule: what its output keeps to, beside its sampling parameters; None for nothing else.
    """

    text: str | None
    tokens: list[int]
    prediction: list[int]
    tenant: str = NO_TENANT
    drafts: DraftChoice = ALL_DRAFTS
    inputs: Inputs = NO_INPUTS
    rule: LogitRule | None = None


@dataclass(frozen=True, slots=True)
class SourceReader:
    """How prompts of an encoder-decoder model are read.

    Attributes:
        reads: what its encoder reads (`EncoderSpec.reads`).
        encode: text of a source -> ids, end token included.
        start: tokens that every text of the decoder begins with.
    """

    reads: str
    encode: Callable[[str], list[int]]
    start: tuple[int, ...]

    def read(self, prompt: Prompt, encode: Callable[..., list[int]]) -> ReadPrompt:
        """Read one prompt: a source alone, also under `prompt` or `prompt_token_ids`, or a dict with one under
        `encoder_prompt`, and what the output begins with under `prompt` (vLLM's `decoder_prompt`) or
        `prompt_token_ids`; with the other keys of `read_prompt`.

        Raises:
            PromptError: something else, or a source that is no text for a model that reads texts.
        """
        given: dict[str, Any] = dict(prompt) if isinstance(prompt, Mapping) else {"encoder_prompt": prompt}
        if not {*OF_SOURCE, INPUTS}.intersection(given):
            given["encoder_prompt"] = {key: given.pop(key) for key in ("prompt", "prompt_token_ids") if key in given}
        source, text = given.pop("encoder_prompt", None), given.pop("decoder_prompt", given.pop("prompt", None))
        if isinstance(text, Mapping):
            given, text = {**text, **given}, text.get("prompt")
        _check_keys(given, (*OF_SOURCE, *KEYS))
        inputs = given.get(INPUTS)
        if source is not None:
            inputs = self._inputs(source)
        tokens = [*self.start, *(encode(text, add_special_tokens=False) if isinstance(text, str) else [])]
        if given.get("prompt_token_ids") is not None:
            tokens = ids(given["prompt_token_ids"], "prompt_token_ids")
            tokens = tokens if tokens[:1] == list(self.start[:1]) else [*self.start, *tokens]
        if not tokens:
            raise PromptError(
                "this checkpoint does not say what its texts begin with (decoder_start_token_id); give prompt_token_ids"
            )
        rest = {key: given[key] for key in given if key not in {"prompt", "prompt_token_ids", INPUTS}}
        read = read_prompt({**rest, "prompt_token_ids": tokens, INPUTS: inputs or NO_INPUTS}, encode)
        return replace(read, text=text if isinstance(text, str) else None)

    def _inputs(self, source: object) -> Inputs:
        if self.reads != "encoder_tokens":
            raise PromptError(
                f"the encoder of this model reads {self.reads}, no text; transcribe audio, or give `models.Inputs`"
            )
        if isinstance(source, Mapping):
            source = source.get("prompt_token_ids") or source.get("prompt")
        return Inputs(encoder_tokens=self.encode(source) if isinstance(source, str) else ids(source, "encoder_prompt"))


def read_prompt(prompt: Prompt, encode: Callable[..., list[int]], source: SourceReader | None = None) -> ReadPrompt:
    """Read one prompt: a text, token ids, or a dict.

    A dict holds a text under `prompt` or ids under `prompt_token_ids` (or both, where these are the ids of that text),
    and, if wanted, `prediction` (a text, ids or OpenAI's `{"type": "content", "content": ...}`: what the output is
    expected to be), `cache_salt` (vLLM's name: only requests with the same one share caches and learned tables) and
    `speculative_config` (which of the engine's methods draft for it, and how many tokens: `config.DraftChoice.parse`).

    Args:
        encode: text -> ids, with an argument `add_special_tokens`.
        source: of an encoder-decoder model.
    Raises:
        PromptError: something else, or a dict with an unknown key.
    """
    if source is not None:
        return source.read(prompt, encode)
    if not isinstance(prompt, Mapping):
        if isinstance(prompt, str):
            return ReadPrompt(prompt, encode(prompt), [])
        return ReadPrompt(None, ids(prompt), [])
    _check_keys(prompt, KEYS)
    text, tokens = _main(prompt, encode)
    drafts = DraftChoice.parse(prompt["speculative_config"]) if "speculative_config" in prompt else ALL_DRAFTS
    prediction, tenant = read_prediction(prompt.get("prediction"), encode), read_tenant(prompt.get("cache_salt"))
    return ReadPrompt(text, tokens, prediction, tenant, drafts, prompt.get(INPUTS, NO_INPUTS))


def _check_keys(prompt: Mapping[str, Any], known: Sequence[str]) -> None:
    """Reject keys that are not known; those of other inputs may be None, and callers may give `Inputs`."""
    unasked = {key for key in prompt if key in OF_OTHER_INPUT and prompt[key] is None}
    if isinstance(prompt.get(INPUTS), Inputs):
        unasked.add(INPUTS)
    try:
        reject_unknown("a prompt dict", [key for key in prompt if key not in unasked], known, meant=MEANT)
    except ConfigError as error:
        raise PromptError(str(error)) from None


def _main(prompt: Mapping[str, Any], encode: Callable[..., list[int]]) -> tuple[str | None, list[int]]:
    text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if token_ids is not None and text is None:
        return None, ids(token_ids, "prompt_token_ids")
    if token_ids is not None and isinstance(text, str):
        tokens = ids(token_ids, "prompt_token_ids")
        if tokens != encode(text) and tokens != encode(text, add_special_tokens=False):
            raise PromptError(
                f"a prompt dict has both 'prompt' and 'prompt_token_ids', and {shortened(tokens, 60)} are not the "
                f"token ids of {shortened(text, 60)}; give one of them"
            )
        return text, tokens
    if not isinstance(text, str):
        raise PromptError(
            f"a prompt dict needs a text under 'prompt' or a list under 'prompt_token_ids', got "
            f"{shortened(dict(prompt))}"
        )
    return text, encode(text)


def read_prediction(prediction: object, encode: Callable[..., list[int]]) -> list[int]:
    """Token ids of what the output is expected to be; none where nothing is.

    Args:
        prediction, encode: as in `read_prompt`.
    Raises:
        PromptError: something else.
    """
    if isinstance(prediction, Mapping):
        prediction = _content(prediction)
    if prediction is None:
        return []
    if isinstance(prediction, str):
        return encode(prediction, add_special_tokens=False)
    tokens = ids(prediction, "prediction", "a text, a list of token ids or {'type': 'content', 'content': TEXT}")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise PromptError(f"prediction token ids must be integers of 0 or more, got {shortened(token)}")
    return tokens


def _content(prediction: Mapping[str, Any]) -> object:
    """What OpenAI's form of a prediction holds: a text, or parts of one, which are joined."""
    got = shortened(dict(prediction))
    wrong = PromptError(f"prediction must be {{'type': 'content', 'content': TEXT}}, got {got}")
    content = prediction.get("content")
    if (
        prediction.keys() - {"type", "content"}
        or prediction.get("type", "content") != "content"
        or not isinstance(content, str | list)
    ):
        raise wrong
    if isinstance(content, str):
        return content
    parts = [part if isinstance(part, Mapping) else {} for part in content]
    if not parts or not all(part.get("type", "text") == "text" and isinstance(part.get("text"), str) for part in parts):
        raise wrong
    return "".join(part["text"] for part in parts)


def read_tenant(salt: object) -> str:
    """The tenant that a `cache_salt` stands for.

    Raises:
        PromptError: it is no text, or too long.
    """
    if salt is None:
        return NO_TENANT
    if not isinstance(salt, str) or not 1 <= len(salt) <= MAX_SALT:
        raise PromptError(f"cache_salt must be a text of 1..{MAX_SALT} characters, got {shortened(salt)}")
    return salt


def ids(prompt: object, name: str = "a prompt", rule: str = "") -> list[int]:
    """Token ids as plain integers; what is no integer stays, for `check_prompt` to reject.

    Args:
        name: of what they are, for messages.
        rule: what else it may be.
    Raises:
        PromptError: not a list or array.
    """
    prompt = plain(prompt)
    if isinstance(prompt, str | bytes | bytearray | Mapping | Set) or not isinstance(prompt, Iterable):
        rule = rule or (
            "a string, a list of token ids or a dict of those" if name == "a prompt" else "a list of token ids"
        )
        raise PromptError(f"{name} must be {rule}, got {shortened(prompt)}")
    return [index(token) if hasattr(token, "__index__") and not isinstance(token, bool) else token for token in prompt]


def plain(value: object) -> object:
    """Arrays of NumPy and tensors of PyTorch (or their scalars) as lists (or numbers); all else as it is.

    Raises:
        PromptError: they do not hold integers.
    """
    if not (hasattr(value, "tolist") and hasattr(value, "dtype")):
        return value
    if any(kind in str(value.dtype) for kind in ("float", "bool", "complex")):
        raise PromptError(f"an array of token ids must hold integers, got {value.dtype}; convert it, or pass lists")
    return value.tolist()


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list: a flat list of integers is one prompt, the rows of a 2-D array are one each.

    Raises:
        PromptError: something else, or none at all.
    """
    prompts = plain(prompts)  # type: ignore[assignment]  # arrays become lists
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | Set) or not isinstance(prompts, Iterable):
        raise PromptError(
            f"prompts must be a string, a list of token ids, a dict or a list of those, got {shortened(prompts)}"
        )
    items = [plain(item) for item in prompts]
    if items and all(hasattr(item, "__index__") for item in items):
        return [items]  # type: ignore[list-item]  # just checked: token ids
    if not items:
        raise PromptError("no prompts were given; pass a string, a list of token ids, or a list of those")
    return items  # type: ignore[return-value]  # not token ids, so prompts


def one_prompt(prompt: Prompt) -> Prompt:
    """The prompt of a stream, which is one.

    Raises:
        PromptError: a list of prompts.
    """
    prompt = plain(prompt)  # type: ignore[assignment]  # arrays become lists
    if isinstance(prompt, list | tuple) and any(
        isinstance(plain(item), str | list | tuple | Mapping) for item in prompt
    ):
        raise PromptError(
            f"stream takes one prompt, got a list of {len(prompt)}; use generate for lists, or stream each of them"
        )
    return prompt


def truncated(tokens: list[int], params: SamplingParams, max_context: int) -> list[int]:
    """The end of a prompt that `truncate_prompt_tokens` leaves."""
    kept = params.truncate_prompt_tokens
    if kept is None:
        return tokens
    return tokens[-(kept if kept > 0 else max(1, max_context - (params.max_tokens or 1))) :]


def params_for(params: SamplingParams | Sequence[SamplingParams], number: int) -> list[SamplingParams]:
    """Sampling parameters of each prompt: one for all, or one each.

    Raises:
        ConfigError: something else, or another number of them.
    """
    if isinstance(params, SamplingParams):
        return [params] * number
    fine = isinstance(params, Sequence) and all(isinstance(each, SamplingParams) for each in params)
    need(fine, "sampling_params", "be SamplingParams, or a list of them", params)
    need(len(params) == number, "sampling_params", f"be one for all or one per prompt ({number})", len(params))
    return list(params)
