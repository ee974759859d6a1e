"""Outputs of the engine become answers of OpenAI's API: whole, or as the events of a stream."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.checkpoints import TokenBytes
from paceline.engine import CompletionOutput, RequestOutput, StreamChunk
from paceline.llm import LLM
from paceline.sampling import Logprob
from paceline.search import SearchTree
from paceline.serving.chat import Reader
from paceline.serving.jobs import JobFactory, PromptJob
from paceline.serving.protocol import ChatRequest, CompletionRequest
from paceline.serving.token_texts import PREFIX, Offsets, offsets_in, token_bytes_of, written

Json = dict[str, Any]


def usage_of(outputs: Sequence[RequestOutput], *, hidden: bool = False) -> Json:
    """Count the tokens of a request as OpenAI's `usage` has them, with the drafted and accepted ones of each drafter
    beside.

    Args:
        outputs: of the request's prompts.
        hidden: what was decoded is not shown, and does not count.
    """
    completions = [completion for output in outputs for completion in output.outputs]
    prompt = sum(output.num_prompt_tokens for output in outputs)
    thoughts = sum(len(completion.reasoning_token_ids) for completion in completions)
    answer_tokens = 0 if hidden else thoughts + sum(len(completion.token_ids) for completion in completions)
    speculative, searches = _drafts_in(outputs), [output.search for output in outputs if output.search is not None]
    predicted = speculative["drafters"].get("prediction", {"num_draft_tokens": 0, "num_accepted_tokens": 0})
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer_tokens,
        "total_tokens": prompt + answer_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": predicted["num_accepted_tokens"],
            "rejected_prediction_tokens": predicted["num_draft_tokens"] - predicted["num_accepted_tokens"],
            "reasoning_tokens": thoughts,
        },
        "speculative": speculative,
        **({"search": _searched(searches)} if searches else {}),
    }


def _searched(searches: Sequence[SearchTree]) -> Json:
    """Sum up what searches have computed."""
    return {
        "num_tokens": sum(one.num_tokens for one in searches),
        "num_passes": sum(one.num_passes for one in searches),
        "budget_spent": any(one.budget_spent for one in searches),
    }


def _drafts_in(outputs: Sequence[RequestOutput]) -> Json:
    """Sum up the drafted and accepted tokens, of all drafters and of each."""
    drafters: dict[str, dict[str, int]] = {}
    for output in outputs:
        for name, share in output.metrics.drafters.items():
            counts = drafters.setdefault(name, {"num_draft_tokens": 0, "num_accepted_tokens": 0})
            counts["num_draft_tokens"] += share.num_draft_tokens
            counts["num_accepted_tokens"] += share.num_accepted_tokens
    return {
        "num_draft_tokens": sum(output.metrics.num_draft_tokens for output in outputs),
        "num_accepted_tokens": sum(output.metrics.num_accepted_tokens for output in outputs),
        "drafters": drafters,
    }


def reason_of(reason: str | None) -> str | None:
    """Return OpenAI's word for a finish reason: what was aborted has stopped."""
    return "stop" if reason == "abort" else reason


def score_of(output: CompletionOutput) -> Json:
    """Return the field that tells by what a search has chosen an output."""
    return {} if output.score is None else {"score": output.score}


@dataclass(slots=True)
class AnswerFrame:
    """Holds what the answer and all events of a request have in common: id, kind, time and model.

    Args:
        kind: the name of the object, as OpenAI has it.
        client_id: the client's own id, or None.
    """

    kind: str
    model: str
    client_id: str | None
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.kind.startswith('chat') else 'cmpl'}-{self.client_id or secrets.token_hex(16)}"

    def frame(self, choices: list[Json], **more: Any) -> Json:
        """Return an answer or an event with these choices, and whatever else it has."""
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }


class CompletionAnswer:
    """Turns what the engine decodes into the events, or the whole answer, of a completions request."""

    nothing: Final[Json] = {"text": "", "logprobs": None, "finish_reason": None}

    def __init__(self, request: CompletionRequest, jobs: Sequence[PromptJob], model: str, llm: LLM) -> None:
        self.request, self.jobs, self._llm = request, jobs, llm
        self.answer = AnswerFrame("text_completion", model, request.request_id)
        self._bytes = token_bytes_of(llm.tokenizer)
        self._seen: dict[tuple[int, int], int] = {}
        self._offsets: dict[tuple[int, int], Offsets] = {}

    def event(self, number: int, chunk: StreamChunk) -> Json:
        """Return the event that tells what a chunk adds to an output of job `number`."""
        which, job = (number, chunk.index), self.jobs[number]
        index = number * job.params.n + chunk.index
        start = self._seen.get(which, 0)
        self._seen[which] = stop = start + len(chunk.token_ids)
        live = chunk.output.outputs[chunk.index]
        logprobs = None
        if live.logprobs is not None:
            offsets = self._offsets.setdefault(which, self._counted(job)).of(chunk.token_ids)
            logprobs = _old_logprobs(chunk.token_ids, live.logprobs[start:stop], offsets, self._bytes)
        choice = {
            "index": index,
            "text": chunk.text,
            "logprobs": logprobs,
            "finish_reason": reason_of(chunk.finish_reason),
            "stop_reason": live.stop_reason if chunk.finish_reason else None,
            **(score_of(live) if chunk.finish_reason else {}),
        }
        if chunk.reasoning:
            choice["reasoning_content"] = chunk.reasoning
        if self.request.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return self.answer.frame([choice])

    def text(self, output: CompletionOutput) -> str | None:
        """Return what an output says."""
        return output.text

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole answer, with the choices of all prompts in their order."""
        choices = [
            self._choice(job, output, completion, number * job.params.n + completion.index)
            for number, (job, output) in enumerate(zip(self.jobs, outputs, strict=True))
            for completion in output.outputs
        ]
        return self.answer.frame(choices, usage=usage_of(outputs, hidden=self.jobs[0].hidden))

    def _counted(self, job: PromptJob, start: int = 0) -> Offsets:
        return Offsets(self._bytes, skip_special_tokens=job.params.skip_special_tokens, start=start)

    def _choice(self, job: PromptJob, output: RequestOutput, completion: CompletionOutput, index: int) -> Json:
        """Return the choice of one output, with the prompt before it where that is echoed."""
        text = "" if job.hidden else completion.text
        ids = [] if job.hidden else completion.token_ids
        logprobs = None
        if completion.logprobs is not None:
            offsets = self._counted(job, len(job.shown) if self.request.echo else 0).of(ids)
            logprobs = _old_logprobs(ids, completion.logprobs[: len(ids)], offsets, self._bytes)
            if self.request.echo:
                prompt, entries = output.prompt_token_ids, output.prompt_logprobs or []
                offsets = offsets_in(job.shown, prompt, self._bytes)
                before = _old_logprobs(prompt, entries, offsets, self._bytes)
                logprobs = {key: before[key] + logprobs[key] for key in before}
        choice: Json = {
            "index": index,
            "text": (job.shown if self.request.echo else "") + text,
            "logprobs": logprobs,
            "finish_reason": "length" if job.hidden else reason_of(completion.finish_reason),
            "stop_reason": completion.stop_reason,
            **score_of(completion),
        }
        if completion.reasoning is not None:
            choice["reasoning_content"] = completion.reasoning
        if self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = output.to_dict().get("prompt_logprobs")
        if self.request.return_token_ids:
            choice |= {"token_ids": ids, "prompt_token_ids": output.prompt_token_ids}
        return choice


def _old_logprobs(
    tokens: Sequence[int],
    entries: Sequence[dict[int, Logprob] | None],
    offsets: Sequence[int],
    token_bytes: TokenBytes,
) -> Json:
    """Write log probabilities as completions have them: columns, with one entry for each token."""
    return {
        "tokens": [written(token_bytes[token], PREFIX) for token in tokens],
        "token_logprobs": [
            None if entry is None else finite(entry[token].logprob)
            for token, entry in zip(tokens, entries, strict=True)
        ],
        "top_logprobs": [
            None
            if entry is None
            else {
                written(token_bytes[key], PREFIX) or str(key): finite(logprob.logprob) for key, logprob in entry.items()
            }
            for entry in entries
        ],
        "text_offset": list(offsets),
    }


def finite(value: float) -> float:
    """Return a log probability that JSON can hold."""
    return max(value, -9999.0)


class ChatAnswer:
    """Turns what the engine decodes into the events, or the whole answer, of a chat request."""

    nothing: Final[Json] = {"delta": {}, "logprobs": None, "finish_reason": None}

    def __init__(self, request: ChatRequest, jobs: Sequence[PromptJob], model: str, factory: JobFactory) -> None:
        self.request, (self.job,) = request, jobs
        self.jobs, self._factory = jobs, factory
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        self.answer = AnswerFrame(kind, model, request.request_id)
        self._most, self._bytes = request.top_logprobs or 0, factory.token_bytes
        self._readers: dict[int, Reader] = {}
        self._tokens: dict[int, int] = {}

    def event(self, number: int, chunk: StreamChunk) -> Json:
        """Return the event that tells what a chunk adds to one of the choices; a chat has a single job, number 0."""
        index, ended = chunk.index, chunk.finish_reason is not None
        delta: Json = {} if index in self._readers else {"role": "assistant", "content": ""}
        reader = self._readers.setdefault(index, self._reader())
        live = chunk.output.outputs[index]
        added = reader.feed(chunk.text, last=ended, cut=ended and _is_cut(chunk.finish_reason, live.stop_reason))
        if added.content:
            delta["content"] = added.content
        if reasoning := chunk.reasoning + added.reasoning:
            delta["reasoning_content"] = reasoning
        if added.calls:
            delta["tool_calls"] = added.calls
        start = self._tokens.get(index, 0)
        self._tokens[index] = stop = start + len(chunk.token_ids)
        logprobs = (
            None
            if live.logprobs is None
            else _new_logprobs(chunk.token_ids, live.logprobs[start:stop], self._most, self._bytes)
        )
        choice: Json = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        if ended:
            choice["finish_reason"] = self._reason(chunk.finish_reason, reader)
            choice |= {"stop_reason": live.stop_reason, **score_of(live)}
        if self.request.return_token_ids:
            choice["token_ids"] = list(chunk.token_ids)
        return self.answer.frame([choice])

    def _reader(self) -> Reader:
        return self._factory.reader(self.request, self.job.shown)

    def _reason(self, reason: str | None, reader: Reader) -> str | None:
        return "tool_calls" if reader.whole and reason == "stop" else reason_of(reason)

    def text(self, output: CompletionOutput) -> str | None:
        """Return what an output says beside its thoughts; None where it calls functions."""
        delta = self._reader().feed(output.text, last=True)
        return None if delta.calls else delta.content

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        """Return the whole answer of the one job."""
        (output,) = outputs
        choices = [self._choice(completion) for completion in output.outputs]
        more: Json = {}
        if self.request.prompt_logprobs is not None:
            more["prompt_logprobs"] = output.to_dict().get("prompt_logprobs")
        if self.request.return_token_ids:
            more["prompt_token_ids"] = output.prompt_token_ids
        return self.answer.frame(choices, usage=usage_of(outputs), **more)

    def _choice(self, completion: CompletionOutput) -> Json:
        """Return the choice of one output, read into thoughts, content and calls."""
        reader = self._reader()
        delta = reader.feed(completion.text, last=True, cut=_is_cut(completion.finish_reason, completion.stop_reason))
        message: Json = {"role": "assistant", "content": delta.content or (None if delta.calls else "")}
        message |= {"refusal": None, "reasoning_content": (completion.reasoning or "") + delta.reasoning or None}
        if delta.calls:
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"} for call in delta.calls
            ]
        logprobs = (
            None
            if completion.logprobs is None
            else _new_logprobs(completion.token_ids, completion.logprobs, self._most, self._bytes)
        )
        choice: Json = {
            "index": completion.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": self._reason(completion.finish_reason, reader),
            "stop_reason": completion.stop_reason,
            **score_of(completion),
        }
        if self.request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice


def _is_cut(reason: str | None, by: int | str | None) -> bool:
    """Tell whether something ended the answer that is none of the model's own ends."""
    return reason != "stop" or by is not None


def _new_logprobs(
    tokens: Sequence[int], entries: Sequence[dict[int, Logprob]], most: int, token_bytes: TokenBytes
) -> Json:
    """Write log probabilities as chats have them: a list of entries, each with the `most` likeliest tokens."""

    def told_token(token: int, logprob: Logprob) -> Json:
        data = token_bytes[token]
        return {"token": written(data), "logprob": finite(logprob.logprob), "bytes": list(data)}

    return {
        "content": [
            told_token(token, entry[token])
            | {"top_logprobs": [told_token(key, other) for key, other in entry.items() if other.rank <= most]}
            for token, entry in zip(tokens, entries, strict=True)
        ],
        "refusal": None,
    }
