"""What a finished or streaming request looks like, its counters included; shaped as vLLM's results and metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from paceline.config import RequestOutputKind
from paceline.errors import PacelineError
from paceline.sampling import Logprob
from paceline.tree import PROBE, TokenTree, lone_source


@dataclass(slots=True)
class DrafterMetrics:
    """One drafter's share: nodes it proposed that were verified, and those of them that were accepted and kept."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class RequestMetrics:
    """Counts and times of one request, its outputs together.

    Attributes:
        num_steps: decoding steps of its outputs, summed: where n outputs are scored in one pass of the target, it
            counts n times. Reading the prompt does not count; of a search, the passes over its branches do.
        num_drafts: those of the steps with a tree that was not empty.
        num_draft_tokens: verified nodes, whatever became of them; probes, which are no drafts, do not count.
        num_accepted_tokens: accepted nodes whose tokens are in the output; what a stop or a limit cut off does not
            count.
        num_accepted_tokens_per_pos: those by depth, from depth 1.
        num_departures: those that an exact rule with the same draws would not have taken; 0 under exact rules. Of a
            search that lets a second model write, all tokens of that one, which nobody has judged.
        num_generation_tokens, num_prompt_tokens: text sizes.
        drafters: name -> counts; a node that several drafters proposed counts for the first of them.
        dropped_drafters: name -> why a drafter was dropped for this request.
        time_to_first_token, generation_time: seconds since arrival, and from the first step to the end; what the
            controller takes to plan and to measure is in both.
        arrival_time, scheduled_time, first_step_time: clock readings (`time.perf_counter`): queued, begun to read
            the prompt, done with that.
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_departures: int = 0
    drafters: dict[str, DrafterMetrics] = field(default_factory=dict)
    dropped_drafters: dict[str, str] = field(default_factory=dict)
    time_to_first_token: float | None = None
    generation_time: float = 0.0
    arrival_time: float = 0.0
    scheduled_time: float | None = None
    first_step_time: float | None = None

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / steps: tokens that a pass of the target adds to an output; 1 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted nodes per verified node; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second from the first step to the end."""
        return self.num_generation_tokens / self.generation_time if self.generation_time else 0.0

    def add_step(self, tree: TokenTree, path: Sequence[int], names: Sequence[str]) -> None:
        """Count one step of one output.

        Args:
            tree: what was verified.
            path: its accepted nodes as far as the output kept their tokens.
            names: the drafters' names by source index.
        """
        self.num_steps += 1
        nodes = len(tree.tokens)
        if not nodes:
            return
        self.num_drafts += 1
        self.num_accepted_tokens += len(path)
        per_pos, accepted = self.num_accepted_tokens_per_pos, len(path)
        if accepted > len(per_pos):
            per_pos.extend([0] * (accepted - len(per_pos)))
        for depth in range(accepted):
            per_pos[depth] += 1
        if (only := lone_source(tree)) >= 0:
            self.num_draft_tokens += nodes
            drafter = self.drafter(names[only])
            drafter.num_draft_tokens += nodes
            drafter.num_accepted_tokens += accepted
            return
        sources = tree.sources.tolist()
        for source, kind in zip(sources, tree.kinds.tolist(), strict=True):
            drafter = self.drafter(names[source])
            if kind != PROBE:
                self.num_draft_tokens += 1
                drafter.num_draft_tokens += 1
        for node in path:
            self.drafter(names[sources[node]]).num_accepted_tokens += 1

    def drafter(self, name: str) -> DrafterMetrics:
        """The counts of one drafter, made on first use."""
        counts = self.drafters.get(name)
        if counts is None:
            counts = self.drafters[name] = DrafterMetrics()
        return counts

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_generation_tokens": self.num_generation_tokens,
            "num_steps": self.num_steps,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(self.num_accepted_tokens_per_pos),
            "num_departures": self.num_departures,
            "mean_acceptance_length": round(self.mean_acceptance_length, 4),
            "acceptance_rate": round(self.acceptance_rate, 4),
            "drafters": {
                name: {"num_draft_tokens": d.num_draft_tokens, "num_accepted_tokens": d.num_accepted_tokens}
                for name, d in self.drafters.items()
            },
            "dropped_drafters": dict(self.dropped_drafters),
            "time_to_first_token": self.time_to_first_token,
            "generation_time": self.generation_time,
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class CompletionOutput:
    """One output of a request.

    Attributes:
        index: 0..n-1.
        text: detokenised output, cut at stop strings.
        token_ids: committed tokens, end and stop tokens included.
        cumulative_logprob: sum of the chosen tokens' raw logprobs, where `logprobs` was given.
        logprobs: per token: token id -> Logprob.
        finish_reason: "stop", "length", "abort" (cancelled), "error" (see `error`), or None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for an end token or a limit.
        error: one line, for finish_reason "error"; what was produced before it is kept.
        score: by which a search has chosen it; then `cumulative_logprob` is the sum of the tokens' logprobs as the
            sampling parameters shape them.
        reasoning: text of the thoughts before it, without the text that ends them; None where `think` asks for none.
        reasoning_token_ids: their tokens; `token_ids` are the answer's alone.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    score: float | None = None
    reasoning: str | None = None
    reasoning_token_ids: list[int] = field(default_factory=list)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """All outputs of one request.

    Attributes:
        prompt: the prompt's text, of a conversation as its template renders it; None where token ids were given.
        prompt_logprobs: one entry per prompt token, the first None.
        metrics: steps, drafted and accepted tokens, times; outputs of one request together.
        num_cached_tokens: prompt tokens whose keys and values were taken over from earlier requests; None without a
            prefix cache.
        search: of a search, its `paceline.search.SearchTree`.
        encoder_prompt_token_ids: what the encoder of an encoder-decoder model has read, where that is text.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    search: Any | None = None
    encoder_prompt_token_ids: list[int] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that were read, an encoder's included."""
        return len(self.prompt_token_ids) + len(self.encoder_prompt_token_ids or ())

    @property
    def retrieval(self) -> Any | None:
        """What retrieving took (`paceline.search.RetrievalReport`), of a request with `retrieval`."""
        return None if self.search is None else self.search.retrieval

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
        """The first output as one flat JSON-ready object.

        Text, token_ids, finish_reason, stop_reason, metrics (and error).
        """
        first = self.outputs[0]
        data: dict[str, Any] = {
            "text": first.text,
            "token_ids": first.token_ids,
            "finish_reason": first.finish_reason,
            "stop_reason": first.stop_reason,
            "metrics": self.metrics.to_dict(),
        }
        if first.logprobs is not None:
            data["cumulative_logprob"] = first.cumulative_logprob
            data["logprobs"] = [_plain(entry) for entry in first.logprobs]
        if first.reasoning is not None:
            data |= {"reasoning": first.reasoning, "reasoning_token_ids": first.reasoning_token_ids}
        if self.prompt_logprobs is not None:
            data["prompt_logprobs"] = [None if entry is None else _plain(entry) for entry in self.prompt_logprobs]
        if len(self.outputs) > 1:
            data["outputs"] = [
                {"index": o.index, "text": o.text, "token_ids": o.token_ids, "finish_reason": o.finish_reason}
                | ({} if o.score is None else {"score": o.score})
                | ({} if o.reasoning is None else {"reasoning": o.reasoning})
                for o in self.outputs
            ]
        if self.search is not None:
            data |= {"score": first.score, "search": self.search.to_dict()}
        return data | ({"error": first.error} if first.error else {})


def _plain(entry: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token): {"logprob": value.logprob, "rank": value.rank, "decoded_token": value.decoded_token}
        for token, value in entry.items()
    }


@dataclass(frozen=True, slots=True)
class StreamChunk:
    """What one step added to one output.

    Attributes:
        index: which output of the request.
        segments: new text in order, each piece with the name of the drafter that drafted it, or None for the target's
            own.
        token_ids: new tokens.
        finish_reason: set on the last chunk of an output.
        output: the whole request so far (live object), or what `SamplingParams.output_kind` asks for.
        reasoning: new text of the thoughts before the output.
    """

    index: int
    segments: tuple[tuple[str, str | None], ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    output: RequestOutput
    reasoning: str = ""

    @property
    def text(self) -> str:
        """The new text."""
        return "".join(text for text, _ in self.segments)


def taken(inbox: deque[StreamChunk]) -> list[StreamChunk]:
    """The chunks of an inbox, which another thread may be filling, oldest first; they leave it."""
    chunks = list[StreamChunk]()
    while inbox:
        chunks.append(inbox.popleft())
    return chunks


class OutputAssembly:
    """A request put together from its chunks: what had come by then, whatever the engine has done since.

    Args:
        kind: what `add` returns.
    """

    def __init__(self, kind: RequestOutputKind) -> None:
        self._kind, self._seen = kind, dict[int, CompletionOutput]()

    def add(self, chunk: StreamChunk) -> RequestOutput | None:
        """What a reader gets for a chunk; None where it waits for the end."""
        for output in chunk.output.outputs:
            logprobs: list[dict[int, Logprob]] | None = None if output.logprobs is None else []
            self._seen.setdefault(output.index, CompletionOutput(output.index, logprobs=logprobs))
        whole, live = self._seen[chunk.index], chunk.output.outputs[chunk.index]
        start = len(whole.token_ids)
        whole.token_ids = [*whole.token_ids, *chunk.token_ids]
        whole.text += chunk.text
        if live.reasoning is not None:
            whole.reasoning = (whole.reasoning or "") + chunk.reasoning
        new = [] if live.logprobs is None else live.logprobs[start : len(whole.token_ids)]
        if live.logprobs is not None:
            whole.logprobs = [*(whole.logprobs or ()), *new]
            more = sum(entry[token].logprob for entry, token in zip(new, chunk.token_ids, strict=True))
            whole.cumulative_logprob = (whole.cumulative_logprob or 0.0) + more
        if chunk.finish_reason is not None:
            whole.text, whole.finish_reason = live.text, chunk.finish_reason
            whole.stop_reason, whole.error, whole.score = live.stop_reason, live.error, live.score
            if live.score is not None:
                whole.cumulative_logprob = live.cumulative_logprob
            whole.reasoning_token_ids = live.reasoning_token_ids
        every = list(self._seen.values())
        if self._kind is RequestOutputKind.FINAL_ONLY and not all(output.finished() for output in every):
            return None
        if self._kind is RequestOutputKind.DELTA:
            logprobs = None if live.logprobs is None else []
            nothing: dict[str, Any] = {"text": "", "token_ids": [], "logprobs": logprobs, "reasoning": None}
            parts = [replace(output, **nothing, reasoning_token_ids=[]) for output in every]
            part = parts[list(self._seen).index(chunk.index)]
            part.text, part.token_ids = chunk.text, list(chunk.token_ids)
            part.logprobs = None if live.logprobs is None else new
            part.reasoning = chunk.reasoning if live.reasoning is not None else None
            return replace(chunk.output, outputs=parts)
        return replace(chunk.output, outputs=[replace(output) for output in every])


def shaped(chunks: Generator[StreamChunk], kind: RequestOutputKind) -> Generator[StreamChunk]:
    """The chunks of a request with `output` as it is wanted.

    DELTA: the outputs hold what is new, which is in one of them. FINAL_ONLY: one chunk for each output, at its end,
    with all of its text.
    """
    if kind is RequestOutputKind.DELTA:
        return _deltas(chunks)
    return _finals(chunks) if kind is RequestOutputKind.FINAL_ONLY else chunks


def _deltas(chunks: Generator[StreamChunk]) -> Generator[StreamChunk]:
    assembly = OutputAssembly(RequestOutputKind.DELTA)
    with closing(chunks):
        for chunk in chunks:
            yield replace(chunk, output=assembly.add(chunk) or chunk.output)


def _finals(chunks: Generator[StreamChunk]) -> Generator[StreamChunk]:
    gathered: dict[int, list[StreamChunk]] = {}
    with closing(chunks):
        for chunk in chunks:
            mine = gathered.setdefault(chunk.index, [])
            mine.append(chunk)
            if chunk.finish_reason is not None:
                segments = tuple(segment for part in mine for segment in part.segments)
                yield replace(
                    chunk,
                    segments=segments,
                    token_ids=tuple(token for part in mine for token in part.token_ids),
                    reasoning="".join(part.reasoning for part in mine),
                )
