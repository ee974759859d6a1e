"""Requests on a diffusion language model: canvases for prompts, results shaped as those of every other model.

`max_tokens` slots are generated, rounded up to whole blocks; what is beyond them is cut off again, as is everything
after the first token or string that ends the text. A constrained text must not be cut, so its slots beyond hold the end
from the start. A bias on logits is added before anything looks at them.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from paceline.config import EngineConfig
from paceline.diffusion.canvas import Canvas
from paceline.diffusion.layout import BiasedLayout
from paceline.diffusion.loop import Outcome, Parts, running
from paceline.diffusion.methods import ConfiguredMethod
from paceline.diffusion.options import check_engine, check_sampling, honoured, parse_config
from paceline.diffusion.outputs import CanvasChunk, DiffusionMetrics, Painter, TokenTexts
from paceline.engine import CompletionOutput, Request, StopChecker, tell
from paceline.errors import ConfigError, PromptError
from paceline.models.denoiser import NativeDenoiser, load_denoiser
from paceline.models.loading import GenerationDefaults, Tokenizer
from paceline.sampling import draw_seed
from paceline.utils import Advance, integer, need


@dataclass(slots=True)
class Job:
    """One output in the making.

    Attributes:
        request: whose output it is.
        index: 0..n-1.
        outcome: its canvas, kept current by the loop.
        output: what the caller sees of it.
    """

    request: Request
    index: int
    outcome: Outcome
    output: CompletionOutput


class FinalPrefix:
    """What of an output of a stream is final while its canvas still fills: text and tokens that will not change.

    Args:
        checker: of the output, which has seen nothing yet; text that may begin a stop string is held back.
    """

    __slots__ = ("_chars", "_checker", "_tokens")

    def __init__(self, checker: StopChecker) -> None:
        self._checker, self._chars, self._tokens = checker, 0, 0

    def grow(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """What is new among the tokens that are final, the ones of earlier calls included."""
        new = tuple(tokens[self._tokens :])
        if new:
            self._checker.push(new)
        self._tokens += len(new)
        before, self._chars = self._chars, max(self._chars, self._checker.safe_text_length)
        return self._checker.text[before : self._chars], new

    def rest(self, text: str, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """What is left of the whole output."""
        return text[self._chars :], tuple(tokens[self._tokens :])


class DiffusionEngine:
    """A denoiser that serves requests; threads may share one, each decodes its own.

    Args:
        denoiser: the model.
        tokenizer: of it.
        defaults: what the checkpoint recommends; its end tokens count besides the denoiser's.
        config: sizes; `max_num_seqs` canvases run side by side.
        diffusion_config: method and options, see `diffusion.methods`; where it names no cache and the method none
            either, a block-causal model takes the exact block cache.
    Attributes:
        vocab_size: token ids lie below; what the model has beyond, and what is no token below, is never written.
        declared_context: of the model; max_context: of it, or `max_model_len`.
        defaults: of them what can be honoured.
    Raises:
        ConfigError: something that does not fit the model, or cannot be honoured.
    """

    def __init__(
        self,
        denoiser: NativeDenoiser,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        config: EngineConfig,
        diffusion_config: Mapping[str, Any] | str | None = None,
    ) -> None:
        check_engine(config)
        self.tokenizer, self.config, self.defaults = tokenizer, config, honoured(defaults)
        ends = tuple(dict.fromkeys((*denoiser.eos_token_ids, *defaults.eos_ids)))
        known = {*tokenizer.tokens(), *ends, denoiser.mask_token_id}
        self._absent = frozenset(range(denoiser.vocab_size)) - known
        self.denoiser = denoiser.without(sorted(self._absent))
        self.denoiser.eos_token_ids = ends
        self.vocab_size = 1 + max(known.intersection(range(denoiser.vocab_size)))
        self.max_context = denoiser.max_length
        self.declared_context = denoiser.max_length
        if config.max_model_len is not None:
            integer("max_model_len", config.max_model_len, 1, denoiser.max_length)
            self.max_context = config.max_model_len
        self.given = parse_config(diffusion_config)
        self.method = ConfiguredMethod(self.given)
        if denoiser.attention == "block" and "cache" not in self.given and self.method.names["cache"] == "none":
            self.given["cache"] = "block"
            self.method = ConfiguredMethod(self.given)
        if (length := self.method.options.get("block_length")) is not None:
            integer("block_length", length, 1)

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        config: EngineConfig,
        diffusion_config: Mapping[str, Any] | str | None,
        *,
        name: str,
    ) -> DiffusionEngine:
        """Read a checkpoint folder; what is wrong in the configurations is rejected before the weights are read.

        Raises:
            CheckpointError: see `load_denoiser`.
            ConfigError: see the class.
        """
        check_engine(config)
        ConfiguredMethod(parse_config(diffusion_config))
        denoiser = load_denoiser(folder, dtype=config.dtype, device=config.device, name=name)
        return cls(denoiser, tokenizer, defaults, config, diffusion_config)

    def run(self, requests: Sequence[Request], advance: Advance | None = None) -> None:
        """Decode all requests to their ends.

        Args:
            advance: told when some are done, how many, and how many tokens there are.
        Raises:
            ConfigError, PromptError, UnsatisfiableError: before anything runs.
        """
        jobs = [job for request in requests for job in self._jobs(request)]
        side_by_side = self.config.max_num_seqs
        for job in jobs[side_by_side:]:
            self._parts(job)
        for low in range(0, len(jobs), side_by_side):
            group = jobs[low : low + side_by_side]
            parts = [self._parts(job) for job in group]
            _begin(group)
            for _ in running([job.outcome for job in group], self.denoiser, parts):
                self._look_for_ends(group)
            for job in group:
                self._finish(job)
            if advance is not None:
                tell(advance, requests)

    def stream(self, request: Request) -> Generator[CanvasChunk]:
        """Decode one request and yield a chunk after every round of an output; closing it cancels the request.

        Raises:
            ConfigError, PromptError, UnsatisfiableError: at once.
        """
        jobs = self._jobs(request)
        return self._streaming(jobs, [self._parts(job) for job in jobs])

    def _streaming(self, jobs: list[Job], parts: list[Parts]) -> Generator[CanvasChunk]:
        shown = [0] * len(jobs)
        _begin(jobs)
        final = [FinalPrefix(self._checker(job.request, at_once=False)) for job in jobs]
        try:
            for _ in running([job.outcome for job in jobs], self.denoiser, parts):
                self._look_for_ends(jobs)
                for job in jobs:
                    if (now := job.outcome.canvas.round) != shown[job.index]:
                        yield self._chunk(job, shown[job.index], final[job.index])
                        shown[job.index] = now
            for job in jobs:
                self._finish(job)
                yield self._chunk(job, shown[job.index], final[job.index])
        finally:
            for job in jobs:
                if not job.output.finished():
                    self._finish(job)
                    job.output.finish_reason, job.output.stop_reason = "abort", None

    def _chunk(self, job: Job, since: int, final: FinalPrefix) -> CanvasChunk:
        output, request = job.output, job.request
        pieces = self._painter.pieces(job.outcome.canvas, request.max_tokens, self._ends(request), since)
        text = ""
        tokens: tuple[int, ...] = ()
        if output.finished():
            text, tokens = final.rest(output.text, output.token_ids)
        elif self._final_once_written:
            text, tokens = final.grow(self._read(job)[0])
        if tokens and request.metrics.time_to_first_token is None:
            request.metrics.time_to_first_token = perf_counter() - request.metrics.arrival_time
        segments = ((text, None),) if text else ()
        return CanvasChunk(job.index, segments, tokens, output.finish_reason, request.result(), pieces)

    @property
    def _final_once_written(self) -> bool:
        """Whether what is written stays."""
        return "edit" not in self.method.names

    @cached_property
    def _painter(self) -> Painter:
        return Painter(self.tokenizer)

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    def _jobs(self, request: Request) -> list[Job]:
        """The outputs of a request, after a look at what it asks for."""
        check_sampling(request.params)
        if request.prediction:
            raise ConfigError("a prediction cannot be used with a diffusion language model; leave it out")
        for token in request.params.logit_bias or ():
            integer("logit_bias token id", token, 0, self.vocab_size - 1)
            need(token not in self._absent, "logit_bias", "hold ids of the tokenizer's tokens", token)
            rule = "leave out the mask token, which is never written"
            need(token != self.denoiser.mask_token_id, "logit_bias", rule, token)
        canvas = self._canvas(request)
        request.metrics = DiffusionMetrics(
            num_prompt_tokens=len(request.prompt_ids), method=self.method.name, arrival_time=perf_counter()
        )
        request.outputs = [CompletionOutput(index) for index in range(request.params.n)]
        return [Job(request, index, Outcome(canvas), output) for index, output in enumerate(request.outputs)]

    def _canvas(self, request: Request) -> Canvas:
        """Masked slots after the prompt. A constrained text must not be cut, so the slots beyond its limit hold the
        end.
        """
        slots, mask, eos = self._slots(request), self.denoiser.mask_token_id, self._eos(request)
        priors: dict[int, int] = {}
        if "check" in self.method.names and slots > request.max_tokens:
            rule = "fill whole blocks where a constrained text has no end token"
            need(bool(eos), "max_tokens", rule, request.max_tokens)
            priors = dict.fromkeys(range(request.max_tokens, slots), eos[0])
        return Canvas.of(request.prompt_ids, slots, mask_token_id=mask, eos_token_ids=eos, priors=priors)

    def _slots(self, request: Request) -> int:
        """Slots after the prompt: as many tokens as wanted, rounded up to whole blocks as far as the context allows."""
        causal, prompt = self.denoiser.attention == "block", len(request.prompt_ids)
        unit = self.denoiser.block_length if causal else self.method.options.get("block_length")
        unit, before = unit or 1, 0 if causal else prompt
        if unit > self.max_context:
            raisable = self.max_context < self.denoiser.max_length
            do = (
                ("raise max_model_len" if raisable else "take another model")
                if causal
                else "choose a smaller block_length"
            )
            raise ConfigError(
                f"a block of {unit} slots is longer than the context, which holds {self.max_context} tokens; {do}"
            )
        wanted = -(-(prompt - before + request.max_tokens) // unit) * unit
        slots = min(wanted, (self.max_context - before) // unit * unit) + before - prompt
        if slots < 1:
            raise PromptError(
                f"the prompt has {prompt} tokens, but the context holds {self.max_context} including at least one "
                f"block of {unit} "
                "slots; shorten the prompt"
            )
        return slots

    def _eos(self, request: Request) -> tuple[int, ...]:
        return () if request.params.ignore_eos else self.denoiser.eos_token_ids

    def _ends(self, request: Request) -> frozenset[int]:
        return frozenset((*self._eos(request), *request.params.stop_token_ids))

    def _parts(self, job: Job) -> Parts:
        """The method, made for one output."""
        params, facts = job.request.params, self.denoiser
        if params.ignore_eos:
            facts = copy(facts)
            facts.eos_token_ids = ()
        method = ConfiguredMethod({**self.given, "temperature": 0.0 if params.greedy else params.temperature})
        texts = self._texts if "check" in method.names else None
        parts = method.parts(facts, job.outcome.canvas, seed=draw_seed(job.request.seed, job.index), token_text=texts)
        if params.logit_bias:
            parts.layout = BiasedLayout(parts.layout, params.logit_bias)
        return parts

    def _look_for_ends(self, jobs: Sequence[Job]) -> None:
        """Spare canvases whose text has ended what would be cut off; where written slots may change, all is decoded."""
        for job in jobs:
            if self._final_once_written and not job.outcome.enough:
                job.outcome.enough = self._read(job)[1].finished

    def _read(self, job: Job) -> tuple[list[int], StopChecker]:
        """The tokens up to the first masked slot or the end of the text, and where that ends."""
        canvas, checker = job.outcome.canvas, self._checker(job.request)
        masked = canvas.masked(canvas.start)
        tokens: list[int] = canvas.tokens[canvas.start : masked[0] if masked.size else canvas.length].tolist()
        return tokens[: checker.push(tokens)], checker

    def _checker(self, request: Request, *, at_once: bool = True) -> StopChecker:
        eos, most = self.denoiser.eos_token_ids, request.max_tokens
        return StopChecker(
            request.params, eos, self.tokenizer, request.prompt_ids, max_new_tokens=most, at_once=at_once
        )

    def _finish(self, job: Job) -> None:
        """Make the output of what is written, and count it."""
        request, output = job.request, job.output
        output.token_ids, checker = self._read(job)
        if not checker.finished:
            checker.cut_off()
        output.text, output.stop_reason = checker.text, checker.stop_reason
        output.finish_reason = checker.finish_reason or "length"
        if job.outcome.error is not None and not checker.finished:
            output.finish_reason, output.error = "error", str(job.outcome.error)
        metrics = request.metrics
        assert isinstance(metrics, DiffusionMetrics)
        metrics.add(job.outcome.trajectory)
        metrics.num_generation_tokens += len(output.token_ids)
        now = perf_counter()
        metrics.generation_time = now - (metrics.first_step_time or now)
        if metrics.time_to_first_token is None:
            metrics.time_to_first_token = now - metrics.arrival_time


def _begin(jobs: Sequence[Job]) -> None:
    """Note when the first canvas of each request begins; its others may have to wait for room."""
    now = perf_counter()
    for job in jobs:
        job.request.metrics.first_step_time = job.request.metrics.first_step_time or now
