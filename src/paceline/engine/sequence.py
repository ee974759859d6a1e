"""One sequence being decoded: an output of a request with its cache, rules, text and drafter states."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paceline.controllers import Signal
from paceline.drafters import Context
from paceline.engine.outputs import CompletionOutput, FinishReason, StreamChunk
from paceline.engine.request import Request
from paceline.engine.transcript import Segments, Transcript
from paceline.models import SequenceCache
from paceline.sampling import KeyedDraws, Logprob, Rules, draw_seed, top_logprobs
from paceline.tree import Scores, TokenTree, Verdict
from paceline.utils import described

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("paceline.engine")


class DecodingSequence:
    """The decoding state of output number `index` of a request.

    Args:
        key: unique number of this sequence.
        rules, transcript: fresh ones for this prompt.
        cache: of the runner, empty; None for an output that will be forked from another.

    Attributes:
        context: the text that counts; drafters get copies of it (`DrafterSet`).
        states, texts: by drafter, its state (None without one) and its own copy of the text, which is `known_length`
            tokens long.
        begun: drafters have begun; the cache may have been given up since, to be filled again from prompt and output.
        failing: it ends with an error in the next step.
        plain: its logits are those of the model, and its tokens the likeliest: no rules, no steering, no randomness.
        state_borders: numbers of tokens behind which the states of the model's mixers are kept while the text is read;
            none where there are no mixers.
        companion: what it is steered by, with a cache of its own; None where it is not.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        key: int,
        *,
        rules: Rules,
        transcript: Transcript,
        cache: SequenceCache | None,
    ) -> None:
        self.request, self.index, self.key = request, index, key
        self.rules, self.transcript = rules, transcript
        self._cache = cache
        self.seed = draw_seed(request.seed, index)
        self.output = CompletionOutput(index, logprobs=[] if request.params.logprobs is not None else None)
        self.context = Context(
            request_id=request.id,
            tokens=list(request.prompt_ids),
            prompt_length=len(request.prompt_ids),
            temperature=0.0 if request.params.greedy else request.params.temperature,
            seed=self.seed,
            seeded=request.params.seed is not None,
            apply_rules=None if request.params.greedy and rules.trivial else rules.apply_paths,
            tenant=request.tenant,
            prediction=tuple(request.prediction),
            forced=None if rules.constraint is None else rules.forced,
            source=request.inputs.encoder_tokens or None,
            inputs=request.inputs,
        )
        self.states: list[Any] = []
        self.texts: list[list[int]] = []
        self.known_length = 0
        self.prompt_taps: list[dict[int, torch.Tensor]] = []
        self.state_borders: tuple[int, ...] = ()
        self.begun = self.failing = False
        self.companion = None if request.companion is None else request.companion.fresh()
        self.plain = request.params.greedy and rules.trivial and self.companion is None

    def fail_next_step(self, why: str) -> None:
        """End with an error in the next step, before which nothing else of its request's own is asked."""
        self.rules.fail(why)
        self.plain, self.failing = False, True

    @property
    def cache(self) -> SequenceCache:
        """The runner's handle; outputs 1..n-1 have one once the prompt is in the cache of output 0.

        Raises:
            RuntimeError: it has none yet, or was paused, parked or removed.
        """
        if self._cache is None:
            raise RuntimeError(f"output {self.index} of request {self.request.id} has no cache now")
        return self._cache

    @cache.setter
    def cache(self, cache: SequenceCache) -> None:
        self._cache = cache

    @property
    def has_cache(self) -> bool:
        return self._cache is not None

    def drop_cache(self) -> None:
        """Forget the cache, which was released."""
        self._cache = None

    def join_taps(self) -> None:
        """Hand the prompt's hidden states, collected chunk by chunk, to the drafters' context."""
        import torch

        layers = self.prompt_taps[0] if self.prompt_taps else {}
        self.context.taps = {layer: torch.cat([chunk[layer] for chunk in self.prompt_taps]) for layer in layers}
        self.prompt_taps = []

    @property
    def greedy(self) -> bool:
        return self.request.params.greedy

    @property
    def remaining(self) -> int:
        """Most tokens that it may still produce, before it is parked if it will be."""
        most, parked = self.request.max_tokens, self.request.park_at
        return (most if parked is None else min(most, parked)) - len(self.output.token_ids)

    @property
    def due(self) -> bool:
        """It goes on, but is to be parked first."""
        parked = self.request.park_at
        return parked is not None and len(self.output.token_ids) >= parked and self.output.finish_reason is None

    def signal(self) -> Signal:
        """What the controller may know."""
        return Signal(self.key, len(self.context.tokens), self.remaining, self.context.temperature)

    def draws(self) -> KeyedDraws:
        """The randomness of this step: keyed by the position of the token after the root."""
        return KeyedDraws(self.seed, len(self.context.tokens))

    def advance(self, tree: TokenTree, verdict: Verdict, scores: Scores, index: int, names: list[str]) -> StreamChunk:
        """Commit a verdict: cut it where plain decoding would have stopped, extend text, rules and counters.

        Args:
            scores: of this step, for logprobs; this sequence has number `index` in them.
            names: drafters' names by source index.
        """
        now, request, output, transcript = perf_counter(), self.request, self.output, self.transcript
        metrics, tokens, path = request.metrics, verdict.tokens, verdict.path
        segments, kept = transcript.push(tokens, () if transcript.quiet else _sources(tree, verdict, names))
        if kept < len(tokens):
            tokens, path = tokens[:kept], path[:kept]
        metrics.add_step(tree, path, names)
        metrics.num_departures += bisect_left(verdict.departures, kept)
        output.token_ids += tokens
        self.context.tokens += tokens
        if not self.plain:
            self.rules.advance(tokens)
        failure = None
        if output.logprobs is not None or request.kept_logits is not None:
            rows = scores.of(index)[[0, *(node + 1 for node in verdict.path)]][: len(tokens)]
            if request.kept_logits is not None:
                request.kept_logits.append(rows)
            if output.logprobs is not None:
                failure = self._add_logprobs(rows, tokens)
        if metrics.time_to_first_token is None:
            metrics.time_to_first_token = now - metrics.arrival_time
        metrics.num_generation_tokens += kept
        metrics.generation_time = now - (metrics.first_step_time or now)
        reason = transcript.finish_reason
        if reason is not None:
            output.finish_reason, output.stop_reason = reason, transcript.stop_reason
        if reason is not None or not transcript.quiet:
            output.text = transcript.text
        if failure is not None:
            last = self.close("error", failure)
            return replace(last, segments=segments + last.segments, token_ids=tokens)
        return StreamChunk(self.index, segments, tokens, reason, request.result())

    def close(self, reason: FinishReason, error: str | None = None) -> StreamChunk:
        """End without a verdict (cancelled or failed); what was produced is kept, its text as far as it can be made."""
        segments: Segments = ()
        try:
            segments = self.transcript.flush()
        except Exception as failure:
            reason, error = "error", error or no_text(failure)
        self.output.text = self.transcript.text
        self.output.finish_reason, self.output.error = reason, error
        return StreamChunk(self.index, segments, (), reason, self.request.result())

    def _add_logprobs(self, rows: torch.Tensor, tokens: Sequence[int]) -> str | None:
        """Add the logprobs of committed tokens; returns why their texts could not be made, None where they could."""
        entries = top_logprobs(rows, tokens, self.request.params.logprobs or 0)
        if self.output.logprobs is not None:
            self.output.logprobs += entries
        chosen = sum(entry[token].logprob for entry, token in zip(entries, tokens, strict=True))
        self.output.cumulative_logprob = (self.output.cumulative_logprob or 0.0) + chosen
        try:
            for entry in entries:
                self.transcript.name_tokens(entry)
        except Exception as error:  # of the tokenizer
            return no_text(error)
        return None


def no_text(failure: Exception) -> str:
    """What a request is told whose tokens the tokenizer cannot read."""
    logger.debug("the error of the tokenizer", exc_info=failure)
    return f"the text could not be made: the tokenizer failed ({described(failure)})"


def _sources(tree: TokenTree, verdict: Verdict, names: Sequence[str]) -> list[str | None]:
    """Which drafter each of a verdict's tokens came from; None for the target's own."""
    drafted = tree.sources.tolist()
    sources: list[str | None] = [names[drafted[node]] for node in verdict.path]
    return sources if verdict.next_token is None else [*sources, None]


def prompt_logprobs(
    request: Request, start: int, logits: torch.Tensor, transcript: Transcript
) -> list[dict[int, Logprob]]:
    """Logprobs of prompt tokens start + 1, ... from the (c, v) logits at start, ... of a prefill chunk."""
    chosen = request.prompt_ids[start + 1 : start + 1 + len(logits)]
    entries = top_logprobs(logits, chosen, request.params.prompt_logprobs or 0)
    return [transcript.name_tokens(entry) for entry in entries]
