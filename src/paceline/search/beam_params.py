"""Beam search by vLLM's names: what goes into `LLM.beam_search`, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.config import SamplingParams
from paceline.utils import integer

if TYPE_CHECKING:
    from paceline.engine import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """vLLM's class of this name.

    Attributes:
        beam_width: texts side by side, all of which are returned. max_tokens: of each.
        ignore_eos: go on behind end tokens. temperature: of the probabilities that are summed; 0 is 1.
        length_penalty: a text's score is the sum over its length to this power.
        include_stop_str_in_output: as in `SamplingParams`.
    Raises:
        ConfigError: a value outside its range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        integer("beam_width", self.beam_width, 1, 256)
        self.sampling_params()

    def sampling_params(self) -> SamplingParams:
        return SamplingParams(
            n=self.beam_width, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos, temperature=self.temperature,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )  # fmt: skip

    def search(self) -> dict[str, Any]:
        """The same as the argument `search` of `LLM.generate`."""
        return {"method": "beam", "beam_width": self.beam_width, "length_penalty": self.length_penalty}


@dataclass(slots=True)
class BeamSearchSequence:
    """One text.

    Attributes:
        tokens: of the prompt and the text. cum_logprob: sum of the text's log-probabilities. text: without the prompt.
    """

    tokens: list[int]
    cum_logprob: float
    text: str
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The texts of one prompt, best first."""

    sequences: list[BeamSearchSequence]

    @classmethod
    def of(cls, result: RequestOutput) -> BeamSearchOutput:
        """From a result of `LLM.generate`.

        Raises:
            PacelineError: it has ended with an error.
        """
        result.raise_for_error()
        return cls(
            [
                BeamSearchSequence(
                    [*result.prompt_token_ids, *output.token_ids], output.cumulative_logprob or 0.0, output.text,
                    output.finish_reason, output.stop_reason,
                )
                for output in result.outputs
            ]
        )  # fmt: skip
