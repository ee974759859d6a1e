"""How families of models write what they think, and how their chat templates are asked for more, less or none of it."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any, Final

from paceline.serving.api_errors import ApiError


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Says how a family of models writes thoughts.

    Attributes:
        sign: in the chat templates of such models.
        begin, end: marks around them; "" where an answer consists of messages (`harmony`).
        around: marks around the content, which are no part of it.
    """

    sign: str
    begin: str
    end: str
    around: tuple[str, ...] = ()

    def is_open(self, prompt: str, continued: str = "") -> bool:
        """Tell whether an answer begins inside thoughts, which its prompt has opened.

        Args:
            continued: what the answer goes on with.
        """
        if not self.begin:
            return False
        return prompt.rstrip().endswith(self.begin) or continued.rfind(self.begin) > continued.rfind(self.end)


TAGS: Final = ReasoningFormat("<think>", "<think>", "</think>")
REASONING: Final[Mapping[str, ReasoningFormat]] = {
    "harmony": ReasoningFormat("<|start|>", "", ""),
    "seed": ReasoningFormat("<seed:think>", "<seed:think>", "</seed:think>"),
    "command": ReasoningFormat(
        "<|START_THINKING|>", "<|START_THINKING|>", "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")
    ),
    "gemma": ReasoningFormat("<|channel>thought", "<|channel>thought", "<channel|>"),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
    "mistral": ReasoningFormat("[THINK]", "[THINK]", "[/THINK]"),
    "think": TAGS,
}
"""The formats by name; of those that a template speaks of, the first is meant."""


def reasoning_of(template: str | None) -> ReasoningFormat:
    """Return the format that a chat template speaks of; `<think>` where it speaks of none."""
    for name, form in REASONING.items():
        if template is not None and form.sign in template and (name != "harmony" or "<|message|>" in template):
            return form
    return TAGS


SWITCHES: Final = ("enable_thinking", "thinking")
"""Chat templates switch thoughts on and off by these variables."""

EFFORT, BUDGET = "reasoning_effort", "thinking_budget"
"""Variables for how much is thought: a word, and a number of tokens, of which -1 is any and 0 none."""

HARMONY_EFFORTS: Final = ("low", "medium", "high")


class ThoughtSteering:
    """Says what makes a chat template ask for thoughts as a request wants them, as variables of the template.

    Args:
        template: its text.
        reads: the variables that it reads.
    """

    def __init__(self, template: str, reads: Set[str]) -> None:
        self._reads, self._format = reads, reasoning_of(template)
        self._thinks = self._format.sign in template
        self._switch = next((name for name in SWITCHES if name in reads), None)

    def switched(self, wanted: bool, field: str) -> dict[str, Any]:
        """Ask for thoughts, or for none; nothing is asked for where the model settles it, and that agrees.

        Args:
            field: of the request.
        Raises:
            ApiError: no thoughts are wanted, and there are some in any case.
        """
        if self._switch is not None:
            return {self._switch: wanted}
        if BUDGET in self._reads:
            return {BUDGET: -1 if wanted else 0}
        if not wanted and self._thinks:
            raise ApiError(f"{field}: thinking cannot be switched off by this model's chat template", param=field)
        return {}

    def budgeted(self, tokens: int, field: str) -> dict[str, Any]:
        """Ask for thoughts of so many tokens.

        Raises:
            ApiError: the template cannot say so.
        """
        if BUDGET in self._reads:
            return {BUDGET: tokens}
        raise ApiError(f"{field}: this model's chat template limits no thoughts; leave it out", param=field)

    def effort(self, level: str, field: str = EFFORT) -> dict[str, Any]:
        """Ask for so much thought; a template that can only switch it takes all levels but `none` for thoughts.

        Raises:
            ApiError: the template cannot say so.
        """
        if EFFORT in self._reads:
            if not self._format.begin and level not in HARMONY_EFFORTS:
                why = f"{field} must be one of {', '.join(HARMONY_EFFORTS)} for this model, got {level!r}"
                raise ApiError(why, param=field)
            off = {self._switch: False} if level == "none" and self._switch is not None else {}
            return {EFFORT: level, **off}
        if self._switch is not None or BUDGET in self._reads or level == "none":
            return self.switched(level != "none", field)
        raise ApiError(f"{field} cannot be given to this model's chat template; leave it out", param=field)

    def renamed(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the variables of a request, with the switch under the template's own name."""
        other = next((name for name in SWITCHES if name in variables and name not in self._reads), None)
        if other is None or self._switch is None or self._switch in variables:
            return dict(variables)
        return {self._switch if name == other else name: value for name, value in variables.items()}
