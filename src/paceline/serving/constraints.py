"""What a request's answer must be: `structured_outputs` of its fields, and which of them that is from."""

from __future__ import annotations

from typing import Any, Final

import llguidance

from paceline.config import ServerConfig
from paceline.grammar import bounded_json
from paceline.serving.call_formats import AllowedCalls
from paceline.serving.grammar_rules import Marks
from paceline.serving.protocol import ApiError, NamedTool, ResponseFormat
from paceline.serving.reasoning import ReasoningFormat
from paceline.serving.tool_grammar import TextSchema, Thoughts, answer_grammar, picked

Json = dict[str, Any]

ANY_OBJECT: Final = {"type": "object"}

CHANNELS: Final = "openai"
"""The format of models whose answers are messages."""

BEGUN: Final = "<|start|>assistant"
"""Where such an answer begins."""


def constrained_by(request: Any) -> str:
    """The field that a request's constraint is from; of several, that of the text."""
    if request.structured_outputs is not None:
        return "structured_outputs"
    wanted = request.response_format
    return "tools" if wanted is None or wanted.type == "text" or _needed(request) else "response_format"


def at_fault(request: Any) -> str:
    """The field of those that a request's constraint is from that a compiler rejected."""
    field = constrained_by(request)
    if field == "response_format" and getattr(request, "tools", None):
        schema = text_schema(request.response_format, strict=False)
        bounded = bounded_json(schema.value, strict=schema.strict) if schema is not None else {}
        error = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(bounded))
        return field if error else "tools"
    return field


def lenient_schema(request: Any) -> Any:
    """The JSON schema that the finished text is checked against, since it was not enforced to the letter; or None."""
    bound = request.structured_outputs or {}
    wanted: ResponseFormat | None = request.response_format
    if wanted is not None and wanted.json_schema is not None:
        bound = {"json": wanted.json_schema.schema_, "strict": wanted.json_schema.strict}
    return None if bound.get("strict") or _needed(request) else bound.get("json")


def text_schema(wanted: ResponseFormat | None, *, strict: bool) -> TextSchema | None:
    """What `response_format` asks for.

    Args:
        strict: a schema that does not say so is.
    Raises:
        ApiError: a schema is missing.
    """
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return TextSchema(ANY_OBJECT, True)
    inner = wanted.json_schema
    if inner is None or inner.schema_ is None:
        raise ApiError("response_format of type json_schema needs json_schema.schema", param="response_format")
    return TextSchema(inner.schema_, strict if inner.strict is None else inner.strict)


def _needed(request: Any) -> bool:
    """Whether the answer must be calls."""
    choice = getattr(request, "tool_choice", None)
    return choice == "required" or isinstance(choice, NamedTool)


class Constraints:
    """Makes them.

    Args:
        format_name: of calls.
        reasoning: how the model thinks.
        thinks: whether it does.
    """

    def __init__(
        self, config: ServerConfig, format_name: str, reasoning: ReasoningFormat, marks: Marks, *, thinks: bool
    ) -> None:
        self._strict, self._marks, self._reasoning = config.strict_schemas, marks, reasoning
        self._format = format_name if reasoning.begin else CHANNELS
        self._thinks = thinks

    def of(self, request: Any, prompt: str = "", *, opened: bool = False) -> Json | None:
        """`structured_outputs` of whatever asks for it.

        Args:
            prompt: the text that a chat goes on from.
            opened: it has begun thoughts.
        Raises:
            ApiError: fields that contradict each other, or what cannot be enforced.
        """
        given, schema = request.structured_outputs, text_schema(request.response_format, strict=self._strict)
        calls = self._calls(request)
        if given is not None and (schema is not None or _needed(request)):
            why = "give one of response_format, structured_outputs and a required tool_choice"
            raise ApiError(why, param="response_format" if schema is not None else "structured_outputs")
        if given is not None:
            return {"strict": self._strict, **given} if "json" in given else given
        if calls is not None and not (calls.needed or schema is not None or _strict(calls)):
            calls = None
        if calls is None and schema is None:
            return None
        thoughts = self._thoughts(request, prompt, opened=opened)
        return self._made(calls, None if calls is not None and calls.needed else schema, prompt, thoughts)

    def _made(
        self, calls: AllowedCalls | None, schema: TextSchema | None, prompt: str, thoughts: Thoughts | None
    ) -> Json | None:
        continued = self._format == CHANNELS and not prompt.endswith(BEGUN)  # which no call can follow
        if continued and not (calls is not None and calls.needed):
            calls = None
        if calls is None and schema is None:
            return None
        if calls is None and schema is not None and thoughts is None and (self._format != CHANNELS or continued):
            plain = schema.value is ANY_OBJECT
            return {"json_object": True} if plain else {"json": schema.value, "strict": schema.strict}
        try:
            return {"grammar": answer_grammar(calls, schema, self._format, marks=self._marks, thoughts=thoughts)}
        except (AttributeError, TypeError, ValueError, RecursionError):
            raise ApiError("the parameters of a function are no JSON schema that is known", param="tools") from None

    def _calls(self, request: Any) -> AllowedCalls | None:
        """Those that a chat may make."""
        choice, tools = getattr(request, "tool_choice", None), getattr(request, "tools", None) or []
        if _needed(request) and not tools:
            raise ApiError("tool_choice needs tools", param="tool_choice")
        if choice == "none" or not tools:
            return None
        only = choice.function.name if isinstance(choice, NamedTool) else None
        many = request.parallel_tool_calls is not False and only is None
        return AllowedCalls(picked(tools, only), needed=_needed(request), many=many, strict=self._strict)

    def _thoughts(self, request: Any, prompt: str, *, opened: bool) -> Thoughts | None:
        """Those that the model may write first."""
        begin, end = self._reasoning.begin, self._reasoning.end
        if opened:
            return Thoughts(begin, end, opened=True)
        fresh = prompt != "" and not request.continue_final_message and not prompt.rstrip().endswith(end or prompt)
        return Thoughts(begin, end) if self._thinks and begin and fresh else None


def _strict(calls: AllowedCalls) -> bool:
    return any(one.strict for one in calls.functions)
