"""Who runs when: queueing, chunked prefill, forking of n outputs, and giving everything back.

In: requests. Out: the list of running sequences, each ready for a decoding step. Not here: decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from itertools import count
from time import perf_counter
from typing import Any

from paceline.config import EngineConfig
from paceline.constraints.rules import Rules, bad_word_token_ids
from paceline.engine.crew import Crew
from paceline.engine.request import Request
from paceline.engine.sequence import Sequence, prompt_logprobs
from paceline.engine.transcript import Transcript
from paceline.models.base import Runner
from paceline.tree.types import Scores


class Scheduler:
    """Admits requests up to `max_num_seqs` sequences, first come first served.

    Args:
        runner, crew: whose caches and states the sequences own.
        tokenizer: for text; None for token ids only.
        eos_ids: end tokens.
    """

    def __init__(self, runner: Runner, crew: Crew, config: EngineConfig, *, tokenizer: Any = None, eos_ids: Seq[int] = ()) -> None:
        self.runner, self.crew, self.config = runner, crew, config
        self.tokenizer, self.eos_ids = tokenizer, tuple(eos_ids)
        self.waiting: deque[Request] = deque()
        self.filling: list[tuple[Sequence, list[Sequence]]] = []
        self.running: list[Sequence] = []
        self._keys = count()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.filling or self.running)

    def check(self, request: Request) -> None:
        """Make the request's rules once, for the errors.

        Raises:
            ConfigError: parameters that do not fit this model (token ids out of range).
        """
        self._rules(request)

    def add(self, request: Request) -> None:
        """Queue a request; bad parameters fail here and not among others (see `check`)."""
        self.check(request)
        request.metrics.num_prompt_tokens = len(request.prompt_ids)
        request.metrics.arrival_time = request.metrics.arrival_time or perf_counter()
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        self.waiting.append(request)

    def _rules(self, request: Request) -> Rules:
        params, tokenizer = request.params, self.tokenizer
        ends = () if params.ignore_eos else self.eos_ids
        encode = None if tokenizer is None else (lambda text: tokenizer.encode(text, add_special_tokens=False))
        return Rules(
            params,
            vocab_size=self.runner.info.vocab_size,
            prompt=request.prompt_ids,
            stop_ids=(*ends, *params.stop_token_ids),
            bad_word_ids=bad_word_token_ids(params.bad_words, encode) if params.bad_words else (),
        )

    def _open(self, request: Request) -> tuple[Sequence, list[Sequence]]:
        """The first output of a request, which prefills, and its siblings, which will fork from it."""
        made = []
        for index in range(request.params.n):
            transcript = Transcript(request.params, request.prompt_ids, self.tokenizer, self.eos_ids, request.max_tokens)
            cache = self.runner.open() if index == 0 else None
            made.append(Sequence(request, index, next(self._keys), rules=self._rules(request), transcript=transcript, cache=cache))
        request.outputs = [sequence.output for sequence in made]
        return made[0], made[1:]

    def prefill(self) -> None:
        """Admit what fits, feed one chunk of prompts (at most `max_num_batched_tokens` tokens), start those that are done."""
        while self.waiting and (not self._load() or self._load() + self.waiting[0].params.n <= self.config.max_num_seqs):
            self.filling.append(self._open(self.waiting[0]))
            self.waiting.popleft()
        if not self.filling:
            return
        batch, chunks = self._chunk()
        if batch:
            wants_all = any(sequence.request.params.prompt_logprobs is not None for sequence in batch)
            scores = self.runner.extend([s.cache for s in batch], chunks, taps=self.crew.taps, all_logits=wants_all)
            self._keep(batch, chunks, scores, wants_all)
        for first, others in list(self.filling):
            if first.cache.length == len(first.request.prompt_ids) - 1:
                self._start(first, others)
                self.running += [first, *others]
                self.filling = [pair for pair in self.filling if pair[0] is not first]

    def _load(self) -> int:
        return len(self.running) + sum(1 + len(others) for _, others in self.filling)

    def _chunk(self) -> tuple[list[Sequence], list[list[int]]]:
        """The next tokens of the prompts that are being filled, all but each prompt's last, which is the first root."""
        left, batch, chunks = self.config.max_num_batched_tokens, [], []
        for sequence, _ in self.filling:
            done = sequence.cache.length
            tokens = sequence.request.prompt_ids[done : min(len(sequence.request.prompt_ids) - 1, done + left)]
            if tokens:
                batch.append(sequence)
                chunks.append(tokens)
                left -= len(tokens)
            if left <= 0:
                break
        return batch, chunks

    def _keep(self, batch: Seq[Sequence], chunks: Seq[list[int]], scores: Scores, has_all: bool) -> None:
        """Collect taps and prompt logprobs of a chunk; rows are every chunk token's, in order, when `has_all`."""
        row = 0
        for sequence, chunk in zip(batch, chunks, strict=True):
            rows = slice(row, row + len(chunk))
            row = rows.stop
            if scores.taps:
                sequence.prompt_taps.append({layer: tap[rows] for layer, tap in scores.taps.items()})
            request = sequence.request
            if has_all and request.prompt_logprobs is not None:
                start = sequence.cache.length - len(chunk)
                request.prompt_logprobs += prompt_logprobs(request, start, scores.logits[rows], sequence.transcript)

    def _start(self, first: Sequence, others: Seq[Sequence]) -> None:
        """The prompt is in the cache: fork it for the other outputs and give everyone drafter states."""
        first.join_taps()
        first.request.metrics.first_step_time = perf_counter()
        self.crew.begin(first)
        for other in others:
            other.cache = self.runner.fork(first.cache)
            other.context.taps = first.context.taps
            self.crew.fork(first, other)

    def take(self, request_id: str) -> list[Sequence]:
        """The unfinished sequences of a request, wherever they are; a request still waiting is opened, to be closed."""
        for request in [r for r in self.waiting if r.id == request_id]:
            self.filling.append(self._open(request))
            self.waiting = deque(one for one in self.waiting if one is not request)
        return [sequence for sequence in self.started() if sequence.request.id == request_id]

    def take_started(self) -> list[Sequence]:
        """The sequences of all requests that are not waiting, each once, however far a step came that was cut short."""
        found = self.started()
        known = {id(sequence.request) for sequence in found}
        self.waiting = deque(request for request in self.waiting if id(request) not in known)
        return found

    def started(self) -> list[Sequence]:
        """All sequences that fill or run, each once."""
        filling = [sequence for first, others in self.filling for sequence in (first, *others)]
        return list(dict.fromkeys(filling + self.running))

    def remove(self, sequence: Sequence) -> None:
        """Give back the sequence's cache; the lists forget it last, so that a removal cut short can be repeated."""
        if sequence.has_cache:
            self.runner.release(sequence.cache)
            sequence.drop_cache()
        self.running = [one for one in self.running if one is not sequence]
        pairs = ((first, [one for one in others if one is not sequence]) for first, others in self.filling)
        self.filling = [(first, others) for first, others in pairs if first.has_cache or others]
