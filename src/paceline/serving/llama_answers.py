"""Answers in the words of llama-server's own routes: one object, several in a list, or events of a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response

from paceline.checkpoints import TokenBytes
from paceline.config import SamplingParams
from paceline.engine import CompletionOutput, RequestOutput, StreamChunk
from paceline.llm import LLM
from paceline.sampling import Logprob
from paceline.serving.answers import CompletionAnswer, finite
from paceline.serving.api_errors import ApiError
from paceline.serving.jobs import PromptJob
from paceline.serving.llama_request import LlamaRequest
from paceline.serving.runs import Json, RequestRun, event
from paceline.serving.token_texts import token_bytes_of, written

NO_SLOT: Final = -1
"""Sequences have no slots here: whatever was read before is found from everywhere."""

ANY_SEED: Final = 2**32 - 1
"""llama-server writes so that a seed is drawn."""


def settings_of(params: SamplingParams) -> Json:
    """Return sampling parameters under the names that llama-server has for them."""
    bound = params.structured_outputs
    return {
        "seed": ANY_SEED if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": -1,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "max_tokens": -1 if params.max_tokens is None else params.max_tokens,
        "n_probs": params.logprobs or 0,
        "grammar": "" if bound is None else bound.grammar or "",
    }


class LlamaAnswer(CompletionAnswer):
    """Turns what the engine decodes into llama-server's answer, or events.

    Args:
        most: tokens that a prompt and its answer may have together.
    """

    def __init__(self, request: LlamaRequest, jobs: Sequence[PromptJob], model: str, llm: LLM, most: int) -> None:
        super().__init__(request, jobs, model, llm)
        self._asked, self._model, self._most = request, model, most
        self._token_bytes = token_bytes_of(llm.tokenizer)
        self._ended: dict[tuple[int, int], int] = {}

    def event(self, number: int, chunk: StreamChunk) -> Json:
        """Return what a chunk adds; the last one of an output has all that is known of it."""
        which, output, job = (number, chunk.index), chunk.output, self.jobs[number]
        live, start = output.outputs[chunk.index], self._ended.get(which, 0)
        self._ended[which] = stop = start + len(chunk.token_ids)
        body: Json = {
            "index": number * job.params.n + chunk.index,
            "content": chunk.text,
            "tokens": list(chunk.token_ids),
            "stop": False,
            "id_slot": NO_SLOT,
            "tokens_predicted": stop,
            "tokens_evaluated": output.num_prompt_tokens,
        }
        if live.logprobs is not None:
            body["completion_probabilities"] = _probabilities(
                chunk.token_ids, live.logprobs[start:stop], job.params.logprobs or 0, self._token_bytes
            )
        if self._asked.timings_per_token:
            body["timings"] = timings_of(output, stop)
        if chunk.finish_reason not in (None, "error"):
            body |= {"stop": True, **self._end(job, output, live)}
        return body

    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        """Return the answer of one output, or a list of them all."""
        bodies = [
            self._whole(job, output, completion, index)
            for number, (job, output) in enumerate(zip(self.jobs, outputs, strict=True))
            for index, completion in enumerate(output.outputs, number * job.params.n)
        ]
        bodies = [selected(body, self._asked.response_fields) for body in bodies]
        return bodies[0] if len(bodies) == 1 else bodies

    def _whole(self, job: PromptJob, output: RequestOutput, completion: CompletionOutput, index: int) -> Json:
        ids = [] if job.hidden else list(completion.token_ids)
        body: Json = {
            "index": index,
            "content": "" if job.hidden else completion.text,
            "tokens": ids if self._asked.return_tokens else [],
            "id_slot": NO_SLOT,
            "stop": True,
            "tokens_predicted": len(ids),
            "tokens_evaluated": output.num_prompt_tokens,
            **self._end(job, output, completion),
        }
        if completion.logprobs is not None:
            body["completion_probabilities"] = _probabilities(
                ids, completion.logprobs[: len(ids)], job.params.logprobs or 0, self._token_bytes
            )
        return body

    def _end(self, job: PromptJob, output: RequestOutput, completion: CompletionOutput) -> Json:
        """Return what is known of an output when it has ended."""
        by, count = completion.stop_reason, 0 if job.hidden else len(completion.token_ids)
        word = by if isinstance(by, str) else ""
        limited = completion.finish_reason == "length" or job.hidden
        full = len(output.prompt_token_ids) + count >= self._most
        return {
            "model": self._model,
            "generation_settings": settings_of(job.params) | {"stream": bool(self._asked.stream)},
            "prompt": job.shown,
            "has_new_line": not job.hidden and "\n" in completion.text,
            "truncated": limited and full and count < (job.params.max_tokens or self._most),
            "stop_type": "limit" if limited else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": output.num_cached_tokens or 0,
            "timings": timings_of(output, count),
        }


def selected(body: Json, fields: Sequence[str] | None) -> Json:
    """Return these fields of a body, those inside others (`generation_settings/n_predict`) under their own names; all
    where none are named. What is not there is left out.
    """
    if not fields:
        return body
    found: Json = {}
    for field in fields:
        value: Any = body
        for name in field.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            found[field.rpartition("/")[2]] = value
    return found


def timings_of(output: RequestOutput, predicted: int) -> Json:
    """Return the times of reading a prompt and of `predicted` tokens, in milliseconds, and what follows from them."""
    metrics, cached = output.metrics, output.num_cached_tokens or 0
    begun, read = metrics.scheduled_time, metrics.first_step_time
    prompt = output.num_prompt_tokens - cached
    prompt_ms = 1000 * (read - begun) if begun is not None and read is not None else 0.0
    since = perf_counter() - read if read is not None else 0.0
    predicted_ms = 1000 * (metrics.generation_time or since)
    return {
        "cache_n": cached,
        **_rate("prompt", prompt, prompt_ms),
        **_rate("predicted", predicted, predicted_ms),
        "draft_n": metrics.num_draft_tokens,
        "draft_n_accepted": metrics.num_accepted_tokens,
    }


def _rate(name: str, count: int, ms: float) -> Json:
    return {
        f"{name}_n": count,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / count if count else 0.0,
        f"{name}_per_second": 1000 * count / ms if ms else 0.0,
    }


def _probabilities(
    tokens: Sequence[int], entries: Sequence[dict[int, Logprob]], most: int, token_bytes: TokenBytes
) -> list[Json]:
    """Write log probabilities: of each token, and of the `most` likeliest in its place."""

    def told(token: int, logprob: Logprob) -> Json:
        data = token_bytes[token]
        return {"id": token, "token": written(data), "bytes": list(data), "logprob": finite(logprob.logprob)}

    return [
        told(token, entry[token])
        | {"top_logprobs": [told(key, other) for key, other in entry.items() if other.rank <= most]}
        for token, entry in zip(tokens, entries, strict=True)
    ]


class LlamaOutgoing:
    """Sends an answer as llama-server does: events without names and without a mark of the end; the last one of an
    output adds no text.
    """

    def __init__(self, run: RequestRun, fields: Sequence[str] | None) -> None:
        self._run, self._fields, self.stream = run, fields, run.stream

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events, an error among them as the last one."""
        try:
            async with aclosing(self._run.frames()) as parts:
                async for part in parts:
                    yield b"".join(event(body) for frame in part for body in self._split(frame))
        except ApiError as error:
            yield event(error.body())

    def _split(self, frame: Json) -> Iterator[Json]:
        """Yield an event for the text, and one for the end where there is one."""
        if not frame["stop"]:
            yield frame
            return
        if frame["content"] or frame["tokens"]:
            names = ("index", "content", "tokens", "id_slot", "tokens_predicted", "tokens_evaluated")
            added = {name: frame[name] for name in (*names, "completion_probabilities") if name in frame}
            yield added | {"stop": False}
        last = {name: value for name, value in frame.items() if name != "completion_probabilities"}
        yield selected(last | {"content": "", "tokens": []}, self._fields)

    async def whole(self, http: Request) -> Response:
        """Return the answer; decoding ends with the client's connection."""
        return await self._run.whole(http)
