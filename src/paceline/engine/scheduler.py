"""Who runs when: queueing, chunked prefill, forking of n outputs, making way where memory is short, and giving
everything back.

Where memory is short the youngest sequence makes way: its cache is given up, its text, rules, noise and drafters stay,
and when there is room again, before any request that has not begun, the cache is filled from prompt and output, so that
it goes on as it would have. A sequence may be parked likewise, at a number of tokens that its request names, until it
is told to go on.

Owners of requests take turns. Where one has more sequences than another would get, its youngest make way likewise; and
while several have some, each takes part in as many steps as its share of the time allows (`engine.fairness`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Any

from paceline.config import EngineConfig
from paceline.drafters import Models
from paceline.engine.cache_room import Room
from paceline.engine.companions import Companions
from paceline.engine.drafter_set import DrafterSet
from paceline.engine.fairness import Decoded, FairQueue, Shares
from paceline.engine.outputs import StreamChunk
from paceline.engine.prefix_cache import PrefixCache
from paceline.engine.request import Request, check_inputs
from paceline.engine.sequence import DecodingSequence, no_text, prompt_logprobs
from paceline.engine.transcript import Transcript
from paceline.errors import ConfigError
from paceline.models import EncodesInputs, Runner, SequenceCache, memory_of
from paceline.sampling import LogitRule, Rules, bad_word_token_ids
from paceline.tree import Scores, TokenTree
from paceline.utils import need

WHOLE = ("stop", "length", "abort")
"""Finish reasons of sequences whose caches hold what they should."""


@dataclass(frozen=True, slots=True)
class Filling:
    """Outputs of a request of which the first has a cache that is being filled, or will be when there is room; the
    others fork from it.
    """

    sequences: tuple[DecodingSequence, ...]

    @property
    def first(self) -> DecodingSequence:
        return self.sequences[0]

    @property
    def others(self) -> tuple[DecodingSequence, ...]:
        return self.sequences[1:]


class Scheduler:
    """Admits requests up to `max_num_seqs` sequences: of an owner by priority, then first come first served.

    Args:
        runner: opens the sequences' caches and fills them.
        drafter_set: begins and forks the sequences' drafter states.
        config: how many sequences and tokens it takes at a time, and memory for their caches.
        tokenizer: makes text; None for token ids only.
        eos_ids: end tokens of the checkpoint.
        models: opens models beside the target for steering.

    Attributes:
        waiting: requests that have not begun.
        paused: sequences that made way, or whose prompts did, oldest first. parked: those that wait to be told.
        filling, running: those with a cache.
        companions: what steers them.
        absent: ids of the model that are no tokens of the tokenizer.

    Raises:
        ConfigError: a limit of memory for a runner that cannot count it.
    """

    def __init__(
        self,
        runner: Runner,
        drafter_set: DrafterSet,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        eos_ids: Sequence[int] = (),
        models: Models | None = None,
    ) -> None:
        self.runner, self.drafter_set, self.config = runner, drafter_set, config
        self.tokenizer, self.eos_ids = tokenizer, tuple(eos_ids)
        whole = tokenizer is None or runner.info.source == "input_features"  # tokens of time may have no name
        known = range(runner.info.vocab_size) if whole else {*tokenizer.tokens(), *eos_ids}
        self.absent = frozenset(token for token in range(runner.info.vocab_size) if token not in known)
        self.waiting = FairQueue[Request]()
        self.fairness = Shares()
        self._limited = False  # there was a request with `max_running`
        self.due: Collection[str] = ()  # owners who go on in this step
        self.read = dict[str, int]()  # tokens of prompts in this step, by owner
        self.paused: list[Filling] = []
        self.parked: list[Filling] = []
        self.filling: list[Filling] = []
        self.running: list[DecodingSequence] = []
        self._keys = count()
        self._encoder = runner if isinstance(runner, EncodesInputs) else None
        self.companions = Companions(
            runner,
            config.max_num_batched_tokens,
            tokenizer=tokenizer,
            models=models,
            branches=bool(drafter_set.drafters) and not drafter_set.chains_only,
        )
        self.memory = memory = memory_of(runner)
        if memory is None and config.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"kv_cache_memory_bytes is not available for {runner.info.name}: its caches are not counted"
            )
        if memory is not None:
            memory.set_limit(config.kv_cache_memory_bytes, config.max_num_seqs, config.max_num_batched_tokens)
        cached = memory is not None and memory.can_share_prefixes and config.enable_prefix_caching
        self.prefixes = (
            PrefixCache(memory, tap_reread=drafter_set.tap_reread) if memory is not None and cached else None
        )
        self.room = None if memory is None else Room(memory, self.prefixes)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.paused or self.filling or self.running)

    def check(self, request: Request) -> None:
        """Make the request's rules, for the errors and for its first output.

        Raises:
            ConfigError: parameters that do not fit this model (token ids out of range), or drafters that are not here.
            PromptError: more than memory ever holds, or than the model that steers it does; inputs that the model does
                not take.
        """
        check_inputs(self.runner, request)
        self.drafter_set.check(request)
        if request.rules is None:
            request.rules = self._rules(request)
        if request.companion is None:
            request.companion = self.companions.of(request)
        if self.room is not None:
            self.room.check(request)

    def add(self, request: Request) -> None:
        """Queue a request; bad parameters fail here and not among others (see `check`)."""
        self.check(request)
        request.metrics.num_prompt_tokens = len(request.prompt_ids)
        request.metrics.arrival_time = request.metrics.arrival_time or perf_counter()
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        self._limited = self._limited or request.max_running is not None
        self.waiting.append(request.owner, request, request.priority)

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
            constraint=self._constraint(request),
            absent=self.absent,
        )

    def _constraint(self, request: Request) -> LogitRule | None:
        params = request.params.structured_outputs
        if params is None:
            return None if request.rule is None else request.rule.fork()
        need(request.rule is None, "structured_outputs", "be left out where a text keeps to another rule", params)
        from paceline.grammar import constraint

        return constraint(params, self.tokenizer, self.runner.info.vocab_size, self.eos_ids)

    def _open(self, request: Request) -> Filling:
        """The outputs of a request, the first of which has an empty cache."""
        sequences = []
        request.metrics.scheduled_time = perf_counter()
        rules, request.rules = request.rules or self._rules(request), None
        each = [rules, *(rules.fork() for _ in range(1, request.params.n))]
        for index, output_rules in enumerate(each):
            try:
                transcript, failure = self._transcript(request, self.tokenizer), None
            except Exception as error:
                transcript, failure = self._transcript(request, None), no_text(error)
            cache = self._opened(request) if index == 0 else None
            sequence = DecodingSequence(
                request, index, next(self._keys), rules=output_rules, transcript=transcript, cache=cache
            )
            sequences.append(sequence)
            if failure is not None:
                sequence.fail_next_step(failure)
        request.outputs = [sequence.output for sequence in sequences]
        return Filling(tuple(sequences))

    def _transcript(self, request: Request, tokenizer: Any) -> Transcript:
        return Transcript(
            request.params, request.prompt_ids, tokenizer, self.eos_ids, request.max_tokens,
            at_once=not request.streamed,
        )  # fmt: skip

    def _opened(self, request: Request) -> SequenceCache:
        """An empty cache for an output of a request."""
        return self._for_good(self.runner.open(len(request.prompt_ids), request.inputs))

    def _for_good(self, cache: SequenceCache) -> SequenceCache:
        """A cache whose committed tokens are never taken back."""
        if self.memory is not None:
            self.memory.forget_behind_windows(cache)
        return cache

    def prefill(self) -> None:
        """Make room for running requests, admit what fits, feed one chunk of prompts, start those complete."""
        if self.room is not None and not self.room.plenty:
            self._make_room(self.room)
        if self.waiting or self.paused:
            self._admit()
        self.due, self.read = self.fairness.turn(self._loads()), {}
        if not self.filling:
            return
        if self.room is not None:
            self._make_room(self.room)
        self._read_sources()
        batch, prompt_chunks = self._next_chunks()
        if batch:
            wants_all = any(s.request.params.prompt_logprobs is not None and not s.begun for s in batch)
            scores = self.runner.extend(
                [s.cache for s in batch], prompt_chunks, taps=self._taps(batch, prompt_chunks), all_logits=wants_all
            )
            self._collect_prefill_results(batch, prompt_chunks, scores, wants_all)
            if self.prefixes is not None:
                self.prefixes.keep_states(batch)
        for filled in [filling for filling in self.filling if self._is_filled(filling.first)]:
            self._start(filled.first, filled.others)
            self.running += filled.sequences
            self.filling = [filling for filling in self.filling if filling is not filled]
        if self.room is not None:
            self._make_room(self.room)

    def batch(self) -> list[DecodingSequence]:
        """The running sequences that go on in this step: those of owners who are due, and of all who have as few, for
        whom a step takes hardly longer.
        """
        running = _within_limits(self.running) if self._limited else self.running
        if not self.fairness.several:
            return running
        sizes = _counted(running)
        widest = max((sizes.get(owner, 0) for owner in self.due), default=0)
        going = {owner for owner, size in sizes.items() if owner in self.due or size <= widest}
        return [sequence for sequence in running if sequence.request.owner in going]

    def count(
        self, batch: Sequence[DecodingSequence], chunks: Sequence[StreamChunk], reading: float, decoding: float
    ) -> None:
        """Note a step: the sequences that were decoded with what they made, and the seconds of reading prompts and of
        decoding.
        """
        tokens: dict[str, int] = {}
        for sequence, chunk in zip(batch, chunks, strict=True):
            owner = sequence.request.owner
            tokens[owner] = tokens.get(owner, 0) + len(chunk.token_ids)
        decoded = {owner: Decoded(count, tokens[owner]) for owner, count in _counted(batch).items()}
        self.fairness.count(self.read, reading, decoded, decoding)

    def active(self) -> list[DecodingSequence]:
        """All sequences with a cache."""
        return [*self.running, *(filling.first for filling in self.filling)]

    def _loads(self) -> dict[str, int]:
        """How many outputs of each owner run, or will when their prompts are read."""
        return _counted([*self.running, *_sequences(self.filling)])

    def _admit(self) -> None:
        """Let in who has the least, as far as there is room, or others have more than that: of each owner first those
        that made way, oldest first, then requests, by priority and then first come first served.
        """
        while self.paused or self.waiting:
            paused = {waiting.first.request.owner: waiting for waiting in reversed(self.paused)}
            loads = self._loads()
            owner = min([*paused, *self.waiting.owners], key=lambda owner: loads.get(owner, 0))
            if owner in paused:
                first = paused[owner].first
                request, size, more = first.request, len(first.context.tokens), len(paused[owner].sequences)
            else:
                request = self.waiting.first(owner)
                size, more = len(request.prompt_ids), request.params.n
            if not self._fits(request, size, more) and not self._freed(request, size, more):
                return
            if owner in paused:
                first.cache = self._opened(request)
                self.filling.append(paused[owner])
                self.paused = [waiting for waiting in self.paused if waiting.first is not first]
            else:
                self.filling.append(self._open(request))
                self.waiting.pop(owner)

    def _fits(self, request: Request, size: int, more: int) -> bool:
        """Whether there is room for a text of so many tokens, and so many outputs of it."""
        load = sum(self._loads().values())
        if load and load + more > self.config.max_num_seqs:
            return False
        return self.room is None or self.room.admits(request, size, self.active())

    def _freed(self, request: Request, size: int, more: int) -> bool:
        """Make room, as long as it is at the cost of owners who keep as many outputs as this one gets."""
        loads = self._loads()
        whole = loads.get(request.owner, 0) + more
        for _ in range(sum(loads.values()) + more - self.config.max_num_seqs):
            greedy = max(loads, key=lambda owner: loads[owner])
            if loads[greedy] <= whole:
                return False
            loads[greedy] -= 1
        while not self._fits(request, size, more):
            loads = self._loads()
            most = max(loads.values())
            youngest = self._youngest([owner for owner, load in loads.items() if load == most])
            if most - len(self._filling_of(youngest).sequences) < whole:  # who makes way together comes back together
                return False
            self.pause(youngest)
        return True

    def _youngest(self, owners: Collection[str]) -> DecodingSequence:
        active = [sequence for sequence in self.active() if sequence.request.owner in owners]
        return max(active, key=lambda sequence: sequence.key)

    def _make_room(self, room: Room) -> None:
        """Send the youngest of who has the most back to the queue until all others can make their next step."""
        while len(active := self.active()) and not room.enough(active) and len(active) > 1:
            counts = _counted(active)
            most = max(counts.values())
            self.pause(self._youngest([owner for owner, count in counts.items() if count == most]))

    def pause(self, sequence: DecodingSequence) -> None:
        """Give up a sequence's cache, to be filled again."""
        self._wait([self._filling_of(sequence)])
        self.running = [other for other in self.running if other is not sequence]
        self.filling = [filling for filling in self.filling if filling.first is not sequence]
        self._release(sequence, keep=True)
        if not sequence.begun:
            sequence.prompt_taps = []
            if sequence.request.prompt_logprobs is not None:
                del sequence.request.prompt_logprobs[1:]

    def _wait(self, paused: Sequence[Filling]) -> None:
        self.paused = sorted([*self.paused, *paused], key=lambda waiting: waiting.first.key)

    def park(self, batch: Sequence[DecodingSequence]) -> None:
        """Give up the caches of those that are due, until they are resumed."""
        for sequence in batch:
            if sequence.request.park_at is not None and sequence.due:
                self.pause(sequence)
                self.parked += [waiting for waiting in self.paused if waiting.first is sequence]
                self.paused = [waiting for waiting in self.paused if waiting.first is not sequence]

    def resume(self, request_id: str) -> None:
        """Let what is parked of a request go on, as far as it is not due again."""
        going = [parked for parked in self.parked if parked.first.request.id == request_id and not parked.first.due]
        self.parked = [parked for parked in self.parked if parked not in going]
        self._wait(going)

    def fit(self, batch: Sequence[DecodingSequence], trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """The trees of the running sequences' next step, cut to the room that there is."""
        return trees if self.room is None else self.room.fit(batch, trees, self.active())

    def _is_filled(self, sequence: DecodingSequence) -> bool:
        return sequence.cache.length == len(sequence.context.tokens) - 1 and not self._unread(sequence)

    def _unread(self, sequence: DecodingSequence) -> int:
        """Rows that the encoder is yet to read of a sequence's source."""
        return 0 if self._encoder is None else self._encoder.rows_to_encode(sequence.cache)

    def _read_sources(self) -> None:
        """Have the encoder read sources, whose rows count as tokens of a prompt; of an owner one at least."""
        if self._encoder is None:
            return
        most, chosen = self.fairness.prefill_quota(self.config.max_num_batched_tokens), list[DecodingSequence]()
        for sequence in [filling.first for filling in self.filling]:
            owner, rows = sequence.request.owner, self._unread(sequence)
            done = self.read.get(owner, 0)
            if rows and owner in self.due and (not done or done + rows <= most):
                chosen.append(sequence)
                self.read[owner] = done + rows
        if chosen:
            self._encoder.encode([sequence.cache for sequence in chosen])

    def _next_chunks(self) -> tuple[list[DecodingSequence], list[list[int]]]:
        """The next tokens of the texts that are being filled, all but each text's last, which is the first root."""
        batch, chunks = [], []
        most = self.fairness.prefill_quota(self.config.max_num_batched_tokens)
        for index, sequence in enumerate([filling.first for filling in self.filling]):
            owner = sequence.request.owner
            if owner not in self.due or (left := most - self.read.get(owner, 0)) <= 0:
                continue
            if self._unread(sequence) or (not sequence.cache.length and not self._begin(sequence, index)):
                continue
            done, text = sequence.cache.length, sequence.context.tokens
            stop = min(len(text) - 1, done + left)
            tokens = text[done : stop if self.prefixes is None else self.prefixes.chunk_end(sequence, done, stop)]
            if tokens:
                batch.append(sequence)
                chunks.append(tokens)
                self.read[owner] = self.read.get(owner, 0) + len(tokens)
        return batch, chunks

    def _first_tapped(self, sequence: DecodingSequence) -> int:
        """Position of the first prompt token whose states drafters want."""
        window = self.drafter_set.tap_window
        return 0 if window is None else max(0, len(sequence.request.prompt_ids) - 1 - window)

    def _taps(self, batch: Sequence[DecodingSequence], chunks: Sequence[list[int]]) -> Sequence[int]:
        """Layers whose states are wanted of some token of these chunks, which are not in the caches yet."""
        wanted = any(
            not sequence.begun and sequence.cache.length + len(chunk) > self._first_tapped(sequence)
            for sequence, chunk in zip(batch, chunks, strict=True)
        )
        return self.drafter_set.taps if wanted else ()

    def _begin(self, sequence: DecodingSequence, index: int) -> bool:
        """Take over what others have of its beginning; False to wait for one of those before it, `index` of them."""
        if self.prefixes is None:
            return True
        others = [other for other in self.active() if other is not sequence]
        ahead = [filling.first for filling in self.filling[:index] if filling.first.request.owner in self.due]
        return self.prefixes.begin(sequence, ahead, others)

    def _collect_prefill_results(
        self, batch: Sequence[DecodingSequence], chunks: Sequence[list[int]], scores: Scores, has_all: bool
    ) -> None:
        """Collect taps and prompt logprobs of a chunk; rows are every chunk token's, in order, when `has_all`."""
        row = 0
        for sequence, chunk in zip(batch, chunks, strict=True):
            rows = slice(row, row + len(chunk))
            row = rows.stop
            if sequence.begun:
                continue
            request, start = sequence.request, sequence.cache.length - len(chunk)
            if scores.taps and (skipped := max(self._first_tapped(sequence) - start, 0)) < len(chunk):
                wanted = slice(rows.start + skipped, rows.stop)
                sequence.prompt_taps.append({layer: tap[wanted] for layer, tap in scores.taps.items()})
            if has_all and request.prompt_logprobs is not None:
                try:
                    entries = prompt_logprobs(request, start, scores.logits[rows], sequence.transcript)
                    request.prompt_logprobs += entries
                except Exception as error:
                    for output in self._filling_of(sequence).sequences:
                        output.fail_next_step(no_text(error))

    def _filling_of(self, first: DecodingSequence) -> Filling:
        """A sequence with those that will fork from it: none where its cache is not being filled."""
        return next((filling for filling in self.filling if filling.first is first), Filling((first,)))

    def _start(self, first: DecodingSequence, others: Sequence[DecodingSequence]) -> None:
        """The prompt is in the cache: fork it for the other outputs and give everyone drafter states, unless they have
        them.
        """
        if first.begun:
            return
        first.join_taps()
        first.request.metrics.first_step_time = perf_counter()
        self.drafter_set.begin(first)
        for other in others:
            other.cache = self._for_good(self.runner.fork(first.cache))
            other.context.taps = first.context.taps
            self.drafter_set.fork(first, other)
        self.companions.fork(first, others)
        for sequence in (first, *others):
            sequence.begun, sequence.context.taps = True, {}

    def dequeue(self, request_id: str) -> list[DecodingSequence]:
        """The unfinished sequences of a request, wherever they are; one that still waits is opened, to be closed."""
        for request in [r for r in self.waiting if r.id == request_id]:
            self.filling.append(self._open(request))
            self.waiting.remove(request.owner, request)
        return [sequence for sequence in self.started() if sequence.request.id == request_id]

    def dequeue_started(self) -> list[DecodingSequence]:
        """The sequences of all requests that are not waiting, each once, however far a step came that was cut short."""
        started = self.started()
        known = {id(sequence.request) for sequence in started}
        for request in [waiting for waiting in self.waiting if id(waiting) in known]:
            self.waiting.remove(request.owner, request)
        return started

    def started(self) -> list[DecodingSequence]:
        """All sequences that were paused or parked, fill or run, each once."""
        return list(dict.fromkeys([*_sequences([*self.paused, *self.parked, *self.filling]), *self.running]))

    def remove(self, sequence: DecodingSequence, *, spoiled: bool = False) -> None:
        """Give back the sequence's cache; the lists forget it last, so that a removal cut short can be repeated.

        Args:
            spoiled: whatever it holds, no prefix of it is kept.
        """
        self._release(sequence, keep=not spoiled and sequence.output.finish_reason in WHOLE)
        self.running = [other for other in self.running if other is not sequence]
        self.filling, self.paused = _without(sequence, self.filling), _without(sequence, self.paused)
        self.parked = _without(sequence, self.parked)

    def _release(self, sequence: DecodingSequence, *, keep: bool) -> None:
        if sequence.companion is not None:
            sequence.companion.release()
        if sequence.has_cache:
            if keep and self.prefixes is not None:
                self.prefixes.keep(sequence)
            self.runner.release(sequence.cache)
            sequence.drop_cache()


def _within_limits(sequences: Sequence[DecodingSequence]) -> list[DecodingSequence]:
    """The sequences of each owner that its requests let take part in a step, oldest first."""
    chosen, counts = list[DecodingSequence](), dict[str, int]()
    for sequence in sequences:
        owner, most = sequence.request.owner, sequence.request.max_running
        if most is None or counts.get(owner, 0) < most:
            chosen.append(sequence)
            counts[owner] = counts.get(owner, 0) + 1
    return chosen


def _counted(sequences: Sequence[DecodingSequence]) -> dict[str, int]:
    """How many sequences each owner has."""
    counts: dict[str, int] = {}
    for sequence in sequences:
        owner = sequence.request.owner
        counts[owner] = counts.get(owner, 0) + 1
    return counts


def _sequences(fillings: Iterable[Filling]) -> list[DecodingSequence]:
    """All of their sequences."""
    return [sequence for filling in fillings for sequence in filling.sequences]


def _without(sequence: DecodingSequence, fillings: Iterable[Filling]) -> list[Filling]:
    """The same but for one sequence, and without a filling that has no other."""
    left = (tuple(other for other in filling.sequences if other is not sequence) for filling in fillings)
    return [Filling(sequences) for sequences in left if sequences]
