"""Errors of the library are told in the words of a request: with the field at fault, under the name that it came by."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from paceline.config import SamplingParams
from paceline.errors import PacelineError, PromptError
from paceline.serving.api_errors import ApiError
from paceline.serving.chat import at_fault
from paceline.serving.protocol import ChatRequest, CompletionRequest, DecodingRequest, TemplateRequest, TokenizeRequest

FIELD: Final = re.compile(r"^([a-z_]+)\b")
"""The word that a message begins with, which is a field's name in most of them."""

OF_SOURCES: Final = {"an encoder_prompt": "a prompt", "the source has": "the prompt, which is the source, has"}
"""What the library says of the source of an encoder-decoder model -> what a completion says."""

QUOTED: Final = re.compile(r"'([a-z_]+)'")


def named(error: PacelineError, request: DecodingRequest | TokenizeRequest) -> ApiError:
    """Return an error of the library as the answer to a request.

    Its `param` is the field that the text begins with, or else quotes first; where there is none and the prompt is at
    fault, the field of the prompt.
    """
    text = str(error)
    if isinstance(request, CompletionRequest):
        for library, ours in OF_SOURCES.items():
            text = text.replace(library, ours)
    words = (match[1] for pattern in (FIELD, QUOTED) if (match := pattern.search(text)) is not None)
    param = next((word for word in words if word in type(request).model_fields), None)
    if param is None and isinstance(error, PromptError):
        param = prompt_field(request)
    names = names_in(request)
    if param == "structured_outputs" and not isinstance(request, TokenizeRequest):
        names["structured_outputs"] = at_fault(request)
    return ApiError(text, param=param).renamed(names)


def prompt_field(request: DecodingRequest | TokenizeRequest) -> str:
    """Return the field that a request's prompt is in."""
    if isinstance(request, CompletionRequest) or (isinstance(request, TokenizeRequest) and request.prompt is not None):
        return "prompt"
    return "messages"


def names_in(request: DecodingRequest | TokenizeRequest) -> dict[str, str]:
    """Return the fields that a request holds under another name than `SamplingParams` has for them, with that name."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return {"max_tokens": "max_completion_tokens"}
    return {}


def rejected_field(error: str, request: TemplateRequest) -> str:
    """Return the field that the error of a chat template is about. What it quotes may be a role, and no field."""
    first = FIELD.match(error)
    if first is not None and first[1] in type(request).model_fields:
        return first[1]
    if "tools" in request.model_fields_set and error.startswith("the chat template does not know 'tools'"):
        return "tools"
    names = request.chat_template_kwargs or {}
    return "chat_template_kwargs" if any(repr(name) in error for name in names) else "messages"


def check_variables(variables: Mapping[str, object], known: frozenset[str], request: TemplateRequest) -> None:
    """Reject sampling parameters among what a request gives its chat template, which would not become parameters.

    Args:
        variables: of the request; those that are None count as left out.
        known: what the template reads.
    Raises:
        ApiError: there is one; the message names the field of the request for it, if it has one.
    """
    for name, value in variables.items():
        if value is None or name in known or name not in SamplingParams.__dataclass_fields__:
            continue
        do = f"give the field {name}" if name in type(request).model_fields else "leave it out"
        why = f"{name!r} is a sampling parameter, and not a name that the chat template uses; {do}"
        raise ApiError(why, param="chat_template_kwargs")
