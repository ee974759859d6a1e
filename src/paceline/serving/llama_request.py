"""Bodies of llama-server's own routes. What they have in common with completions goes by the names of those
(`fields.OTHER_NAMES`); what cannot be honoured is rejected with its name (`fields.TABLE`).
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final

from annotated_types import MaxLen
from pydantic import Field

from paceline.serving.api_errors import ApiError
from paceline.serving.field_notes import NOTES
from paceline.serving.fields import LLAMA
from paceline.serving.protocol import MAX_BIASES, QUICK, CompletionRequest, Prompts, Strict, Texts, TokenIds

NOT_HERE: Final = (
    *("echo", "logprobs", "prompt_logprobs", "return_token_ids", "stream_options", "response_format", "request_id"),
)
"""Fields of `/v1/completions` whose answers have another form."""

MAX_EXTRA: Final = 256
"""So many other files may come with an infill."""

Biases = Annotated[list[Annotated[list[Any], Field(min_length=2, max_length=2)]], MaxLen(MAX_BIASES), QUICK]


class LlamaRequest(CompletionRequest):
    """Is the body of `/completion`: -1 for `n_predict` is as many tokens as the context has room for, -1 for `seed`
    draws one, -1 for `id_slot` names none. The answer does not depend on the slot, which must only be there.
    """

    api: ClassVar[str] = LLAMA
    prompt: Prompts | Annotated[list[str | TokenIds], QUICK]  # type: ignore[assignment]
    logit_bias: Annotated[dict[str, float], MaxLen(MAX_BIASES)] | Biases | None = None  # type: ignore[assignment]
    n_probs: Annotated[int, Field(ge=0)] = 0
    id_slot: Annotated[int, Field(ge=-1)] = -1
    return_tokens: bool = False
    timings_per_token: bool = False
    response_fields: Texts | None = None

    def settled(self, most: int, **changes: Any) -> LlamaRequest:
        """Return the same request in the words of completions.

        Args:
            most: tokens that an answer may have.
            changes: other fields.
        Raises:
            ApiError: a field that cannot be honoured.
        """
        for name in NOT_HERE:
            if name in self.model_fields_set:
                raise ApiError(f"{name} is not known here; use /v1/completions", param=name, code="unsupported_field")
        if isinstance(self.logit_bias, list):
            changes["logit_bias"] = _biases(self.logit_bias)
        if self.structured_outputs is not None and "json" in self.structured_outputs:
            changes["structured_outputs"] = {"strict": True, **self.structured_outputs}
        if (notes := NOTES.get()) is not None:
            notes.names["logprobs"] = "n_probs"
        changes |= {
            "max_tokens": most if self.max_tokens in (None, -1) else self.max_tokens,
            "seed": None if self.seed == -1 else self.seed,
            "logprobs": self.n_probs or None,
        }
        return self.model_copy(update=changes)


def _biases(pairs: list[list[Any]]) -> dict[str, float]:
    """Return pairs of a token id and its bias as an object of them.

    Raises:
        ApiError: anything else.
    """
    biases: dict[str, float] = {}
    for token, bias in pairs:
        if type(token) is not int or type(bias) not in (int, float):
            why = f"logit_bias must hold pairs of a token id and a number, got {[token, bias]!r}; -100 forbids a token"
            raise ApiError(why, param="logit_bias")
        biases[str(token)] = float(bias)
    return biases


class ExtraFile(Strict):
    """Is a file beside the one that is filled in."""

    filename: str = "file"
    text: str


class InfillRequest(LlamaRequest):
    """Is the body of `/infill`; `prompt` is the beginning of what is filled in."""

    prompt: str = ""
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[ExtraFile], MaxLen(MAX_EXTRA), QUICK] | None = None
    filename: str = "file"
