"""What a request's answer must be: `structured_outputs` of its fields, and which of them that is from, with the grammar
of an answer in which calls may come, or must.

Calls are the end of an answer: text and thoughts stand before them, as chat templates write them. Marks that begin
calls do so in free text, too, and what follows them there is what may follow. Formats without such a mark are known by
the beginning of a whole call, with the name of one of the functions, at the start of the text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import llguidance

from paceline.config import ServerConfig
from paceline.grammar import bounded_json, spelled
from paceline.serving.api_errors import ApiError
from paceline.serving.chat import harmony
from paceline.serving.chat.base import ANY_OBJECT, AllowedCalls, CallFormat, Opening, TextSchema, ToolFormat
from paceline.serving.chat.grammar_rules import ANY_BLANKS, AS_TEXT, GrammarRules, Marks
from paceline.serving.chat.reasoning import ReasoningFormat
from paceline.serving.protocol import ChatRequest, DecodingRequest, NamedTool, ResponseFormat

Json = dict[str, Any]

BEHIND: Final = r"/[ \n]{1,4}/?"
"""White space may stand behind thoughts."""


def constrained_by(request: DecodingRequest) -> str:
    """Return the field that a request's constraint is from; of several, that of the text."""
    if request.structured_outputs is not None:
        return "structured_outputs"
    wanted = request.response_format
    return "tools" if wanted is None or wanted.type == "text" or _needed(request) else "response_format"


def at_fault(request: DecodingRequest) -> str:
    """Return the field that a compiler rejected, where a request's constraint is from several."""
    field = constrained_by(request)
    if field == "response_format" and isinstance(request, ChatRequest) and request.tools:
        schema = text_schema(request.response_format, strict=False)
        bounded = bounded_json(schema.value, strict=schema.strict) if schema is not None else {}
        error = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_json_schema(bounded))
        return field if error else "tools"
    return field


def lenient_schema(request: DecodingRequest) -> Any:
    """Return the JSON schema that the finished text is checked against, since it was not enforced to the letter; or
    None.
    """
    bound = request.structured_outputs or {}
    wanted = request.response_format
    if wanted is not None and wanted.json_schema is not None:
        bound = {"json": wanted.json_schema.schema_, "strict": wanted.json_schema.strict}
    return None if bound.get("strict") or _needed(request) else bound.get("json")


def text_schema(wanted: ResponseFormat | None, *, strict: bool) -> TextSchema | None:
    """Read what `response_format` asks for; None where it asks for nothing.

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


def _needed(request: DecodingRequest) -> bool:
    """Tell whether the answer must be calls."""
    choice = request.tool_choice if isinstance(request, ChatRequest) else None
    return choice == "required" or isinstance(choice, NamedTool)


class Constraints:
    """Makes the constraint of an answer from the fields of its request.

    Args:
        form: of calls.
        reasoning: how the model thinks.
        thinks: whether it does.
    """

    def __init__(
        self, config: ServerConfig, form: ToolFormat | None, reasoning: ReasoningFormat, marks: Marks, *, thinks: bool
    ) -> None:
        self._strict, self._marks, self._reasoning = config.strict_schemas, marks, reasoning
        self._form = form if reasoning.begin else harmony.HARMONY
        self._thinks = thinks

    def of(self, request: DecodingRequest, prompt: str = "", *, opened: bool = False) -> Json | None:
        """Return the `structured_outputs` that a request's fields amount to; None where its answer is free.

        Args:
            prompt: the text that a chat goes on from.
            opened: it has begun thoughts.
        Raises:
            ApiError: fields that contradict each other, or what cannot be enforced.
        """
        bound, schema = request.structured_outputs, text_schema(request.response_format, strict=self._strict)
        calls = self._calls(request, prompt)
        if bound is not None and (schema is not None or _needed(request)):
            why = "give one of response_format, structured_outputs and a required tool_choice"
            raise ApiError(why, param="response_format" if schema is not None else "structured_outputs")
        if bound is not None:
            return {"strict": self._strict, **bound} if "json" in bound else bound
        if calls is not None and calls.needed:
            schema = None
        elif calls is not None and schema is None and not any(function.strict for function in calls.functions):
            calls = None
        if calls is None and schema is None:
            return None
        thoughts = self._reasoning if opened or self._may_think(request, prompt) else None
        plain = thoughts is None and (self._form is not harmony.HARMONY or self._goes_on(prompt))
        if calls is None and schema is not None and plain:
            anything = schema.value is ANY_OBJECT
            return {"json_object": True} if anything else {"json": schema.value, "strict": schema.strict}
        try:
            return {"grammar": answer_grammar(calls, schema, self._form, self._marks, thoughts=thoughts, opened=opened)}
        except (AttributeError, TypeError, ValueError, RecursionError):
            raise ApiError("the parameters of a function are no JSON schema that is known", param="tools") from None

    def _goes_on(self, prompt: str) -> bool:
        """Tell whether the prompt ends inside a message, which no call can follow."""
        return self._form is harmony.HARMONY and not prompt.endswith(harmony.ANSWER)

    def _calls(self, request: DecodingRequest, prompt: str) -> AllowedCalls | None:
        """Return the calls that a chat may make; None where it may make none."""
        if not isinstance(request, ChatRequest):
            return None
        choice, tools, needed = request.tool_choice, request.tools or [], _needed(request)
        if needed and not tools:
            raise ApiError("tool_choice needs tools", param="tool_choice")
        if choice == "none" or not tools or (self._goes_on(prompt) and not needed):
            return None
        only = choice.function.name if isinstance(choice, NamedTool) else None
        many = request.parallel_tool_calls is not False
        return AllowedCalls.of(tools, only, needed=needed, many=many, strict=self._strict)

    def _may_think(self, request: DecodingRequest, prompt: str) -> bool:
        """Tell whether the model may begin thoughts before it answers."""
        if not (self._thinks and self._reasoning.begin and prompt):
            return False
        if not isinstance(request, ChatRequest) or request.continue_final_message:
            return False
        return not prompt.rstrip().endswith(self._reasoning.end)


def answer_grammar(
    calls: AllowedCalls | None,
    schema: TextSchema | None,
    form: ToolFormat | None,
    marks: Marks = AS_TEXT,
    *,
    thoughts: ReasoningFormat | None = None,
    opened: bool = False,
) -> str:
    """Write the grammar of an answer, which is calls or a text, in llguidance's notation.

    Args:
        calls: None allows none.
        schema: of the text; None leaves it free.
        form: of calls; gpt-oss's is that of the whole answer.
        marks: how the tokenizer writes them.
        thoughts: how those are written that may come before.
        opened: they have begun in the prompt.
    Raises:
        ApiError: parameters that cannot be enforced in this format.
    """
    if form is harmony.HARMONY:
        return harmony.grammar(calls, schema, marks)
    meaning = () if calls is None or form is None else form.meaning
    thinking = () if thoughts is None else (thoughts.begin, thoughts.end)
    rules = GrammarRules(marks, [*meaning, *thinking])
    free = schema is None and not (calls is not None and calls.needed)
    answers = [rules.free] if free else []
    if schema is not None:
        answers.append(rules.json(schema.value, strict=schema.strict))
    if calls is not None and isinstance(form, CallFormat):
        openings = form.openings(rules, replace(calls, beside_json=schema is not None))
        answers += [_opened(rules, opening, free=free) for opening in openings if free or not opening.loose]
    answer = rules.rule(" | ".join(answers))
    return rules.written(answer if thoughts is None else _thinking(rules, answer, thoughts, opened=opened, free=free))


def _opened(rules: GrammarRules, opening: Opening, *, free: bool) -> str:
    """Return the grammar of calls from their beginning on, or from that of the free text before them."""
    if opening.mark:
        return f"{rules.until(opening.mark) if free else rules.mark(opening.mark)} {opening.rest}"
    tag = f"({rules.free if free else ''} {rules.mark(opening.tag)})?" if opening.tag else ""
    if not free:
        return f"{tag} {opening.start} {opening.rest}"
    return f"{tag} {rules.rule(f'/{ANY_BLANKS}{opening.text}/', lazy=True)} {opening.rest}"


def _thinking(rules: GrammarRules, answer: str, thoughts: ReasoningFormat, *, opened: bool, free: bool) -> str:
    """Return the grammar of an answer with the thoughts that may come before it."""
    thought = f"{rules.until(thoughts.end)} {'' if free else BEHIND} {answer}"
    thought = f"({thought} | {rules.free})" if free else thought
    if opened:
        return thought
    begin = rules.mark(thoughts.begin)
    if not rules.silent(thoughts.begin):
        begin = rules.rule(rf"/[ \n]{{0,4}}{spelled(thoughts.begin)}/", lazy=True)
    return f"{answer} | {begin} {thought}"
