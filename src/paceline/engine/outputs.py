"""What a finished or streaming request looks like; shaped as vLLM's results.

In: nothing. Out: records. Not here: how they are filled (`engine.sequence`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from paceline.engine.metrics import RequestMetrics
from paceline.errors import PacelineError
from paceline.sampling import Logprob

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        index: 0..n-1.
        text: detokenised output, cut at stop strings.
        token_ids: committed tokens, end and stop tokens included.
        cumulative_logprob: sum of the chosen tokens' raw logprobs, where `logprobs` was asked for.
        logprobs: per token: token id -> Logprob.
        finish_reason: "stop", "length", "abort" (cancelled), "error" (see `error`), or None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for an end token or a limit.
        error: one line, for finish_reason "error"; what was produced before it is kept.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one request.

    Attributes:
        prompt: the prompt's text, or None where token ids were given.
        prompt_logprobs: one entry per prompt token, the first None.
        metrics: steps, drafted and accepted tokens, times; outputs of one request together.
        num_cached_tokens: prompt tokens whose keys and values were taken over from earlier requests; None without a
        prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished() for output in self.outputs)

    def raise_for_error(self) -> None:
        """Raise what ended an output early, for callers that cannot use half a result.

        Raises:
            PacelineError: an output has the finish reason "error".
        """
        for output in self.outputs:
            if output.error is not None:
                raise PacelineError(output.error)

    def to_dict(self) -> dict[str, Any]:
        """The first output as one flat JSON-ready object: text, token_ids, finish_reason, stop_reason, metrics (and
        error).
        """
        first = self.outputs[0]
        found: dict[str, Any] = {
            "text": first.text,
            "token_ids": first.token_ids,
            "finish_reason": first.finish_reason,
            "stop_reason": first.stop_reason,
            "metrics": self.metrics.to_dict(),
        }
        if first.logprobs is not None:
            found["cumulative_logprob"] = first.cumulative_logprob
            found["logprobs"] = [_plain(entry) for entry in first.logprobs]
        if self.prompt_logprobs is not None:
            found["prompt_logprobs"] = [None if entry is None else _plain(entry) for entry in self.prompt_logprobs]
        if len(self.outputs) > 1:
            found["outputs"] = [
                {"index": o.index, "text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason}
                for o in self.outputs
            ]
        return found | ({"error": first.error} if first.error else {})


def _plain(entry: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token): {"logprob": one.logprob, "rank": one.rank, "decoded_token": one.decoded_token}
        for token, one in entry.items()
    }


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one step added to one output.

    Attributes:
        index: which output of the request.
        segments: new text in order, each piece with the name of the drafter whose guess it was, or None for the
        target's own.
        token_ids: new tokens.
        finish_reason: set on the last chunk of an output.
        output: the whole request so far (live object).
    """

    index: int
    segments: tuple[tuple[str, str | None], ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    output: RequestOutput

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(text for text, _ in self.segments)
