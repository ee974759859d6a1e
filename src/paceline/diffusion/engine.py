"""Requests on a diffusion language model: canvases for prompts, results shaped as those of every other model.

`max_tokens` slots are generated, rounded up to whole blocks; what is beyond them is cut off again, as is everything
after the first token or string that ends the text. A constrained text must not be cut, so its slots beyond hold the end
from the start. A bias on logits is added before anything looks at them. Thoughts are a text of their own, before the
answer; both have the lengths and ends that any text has. What is wrong with a request is said before anything runs;
whatever code of one output raises from then on ends that output alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from paceline.checkpoints import GenerationDefaults, Tokenizer
from paceline.config import EngineConfig, SamplingParams, ThinkParams
from paceline.diffusion.canvas import Canvas, Status, given_slots
from paceline.diffusion.jobs import FinalPrefix, Job, Writing, alone, said
from paceline.diffusion.layout import BiasedLayout, OpenedLayout
from paceline.diffusion.loop import CanvasMethod, FinishedCanvas, running
from paceline.diffusion.methods import ConfiguredMethod
from paceline.diffusion.options import check_engine, check_sampling, honoured, parse_config
from paceline.diffusion.outputs import CanvasChunk, DiffusionMetrics, Painter, Pieces, TokenTexts
from paceline.diffusion.schedule import whole_blocks
from paceline.diffusion.tccf import answering, answering_denoiser, thinking
from paceline.engine import CompletionOutput, Request, StopChecker, no_text, tell
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.models import Denoiser, load_denoiser
from paceline.models.runners import NativeDenoiser
from paceline.sampling import draw_seed
from paceline.utils import Advance, integer, need


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
        groups = self._groups([job for request in requests for job in self._jobs(request)])
        for group in groups[1:]:
            self._ready(group)
        for group in groups:
            ready = self._ready(group)
            _begin(group)
            for _ in self._running(ready):
                pass
            for job in group:
                self._finish(job)
            if advance is not None:
                tell(advance, requests)

    def _groups(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Canvases that run side by side; those that begin with thoughts go through both phases together."""
        most = self.config.max_num_seqs
        kinds = [[job for job in jobs if job.thinks == thinks] for thinks in (False, True)]
        return [kind[low : low + most] for kind in kinds for low in range(0, len(kind), most)]

    def _ready(self, jobs: Sequence[Job]) -> list[tuple[Job, CanvasMethod]]:
        """Those that can begin, each with its method.

        Raises:
            ConfigError, UnsatisfiableError: see `ConfiguredMethod.parts`.
        """
        ready = []
        for job in jobs:
            try:
                if job.failure is None:
                    ready.append((job, self._parts(job)))
            except PacelineError:
                raise
            except Exception as error:
                job.fail(said("the diffusion method", error))
        return ready

    def _running(self, ready: Sequence[tuple[Job, CanvasMethod]]) -> Iterator[None]:
        """Thoughts, where there are some, and then the outputs, one pass of the model at a time."""
        while ready:
            jobs = [job for job, _ in ready]
            for _ in running([job.outcome for job in jobs], jobs[0].writing.denoiser, [parts for _, parts in ready]):
                self._look_for_ends(jobs)
                yield
            ready = []
            for job in jobs:
                with alone(job, "the answer to the thoughts"):
                    if job.thinks and self._goes_on(job):
                        self._begin_answer(job)
                        ready.append((job, self._parts(job)))

    def check(self, request: Request) -> None:
        """Reject a request that could not begin; nothing is decoded.

        Raises:
            ConfigError, PromptError, UnsatisfiableError: what is wrong with it.
        """
        self._ready(self._jobs(request)[:1])

    def stream(self, request: Request) -> Generator[CanvasChunk]:
        """Decode one request and yield a chunk after every round of an output; closing it cancels the request.

        Raises:
            ConfigError, PromptError, UnsatisfiableError: at once.
        """
        jobs = self._jobs(request)
        return self._streaming(jobs, self._ready(jobs))

    def _streaming(self, jobs: list[Job], ready: list[tuple[Job, CanvasMethod]]) -> Generator[CanvasChunk]:
        _begin(jobs)
        try:
            for _ in self._running(ready):
                for job in jobs:
                    if job.failure is None and job.outcome.canvas.round != job.shown:
                        yield self._chunk(job)
            for job in jobs:
                self._finish(job)
                yield self._chunk(job)
        finally:
            for job in jobs:
                if not job.output.finished():
                    self._finish(job)
                    if job.output.error is None:
                        job.output.finish_reason, job.output.stop_reason = "abort", None

    def _chunk(self, job: Job) -> CanvasChunk:
        output, request, canvas = job.output, job.request, job.outcome.canvas
        pieces: Pieces = ()
        text = ""
        tokens: tuple[int, ...] = ()
        with alone(job):
            pieces = self._pieces(job)
            if not output.finished() and job.writing.final_once_written:
                text, tokens = job.final.grow(self._read(job)[0])
        if output.finished():
            text, tokens = job.final.rest(output.text, output.token_ids)
        if job.thinks and not output.finished():
            output.reasoning, text, tokens = (output.reasoning or "") + text, "", ()
        reasoning = (output.reasoning or "")[job.told :]
        job.shown, job.told = canvas.round, job.told + len(reasoning)
        if tokens and request.metrics.time_to_first_token is None:
            request.metrics.time_to_first_token = perf_counter() - request.metrics.arrival_time
        segments = ((text, None),) if text else ()
        return CanvasChunk(
            job.index, segments, tokens, output.finish_reason, request.result(), reasoning=reasoning, pieces=pieces
        )

    def _pieces(self, job: Job) -> Pieces:
        text = job.writing.text
        return self._painter.pieces(job.outcome.canvas, text.max_tokens, self._ends(text), job.shown)

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
        think = ThinkParams.parse(request.params.think)
        writing = Writing(request, self._method(self.given, request), self.denoiser)
        if think is not None:
            writing = self._thoughts(request, think)
        canvas = self._canvas(writing)
        request.metrics = DiffusionMetrics(
            num_prompt_tokens=len(request.prompt_ids), method=self.method.name, arrival_time=perf_counter()
        )
        request.outputs = [
            CompletionOutput(index, reasoning=None if think is None else "") for index in range(request.params.n)
        ]
        jobs = [
            Job(request, output.index, writing, FinishedCanvas(canvas), output, self._final(writing))
            for output in request.outputs
        ]
        if think is not None:
            self._check_answer(jobs, think)
        return jobs

    def _method(self, config: Mapping[str, Any], request: Request) -> ConfiguredMethod:
        return ConfiguredMethod({**config, "temperature": 0.0 if request.params.greedy else request.params.temperature})

    def _final(self, writing: Writing) -> FinalPrefix:
        return FinalPrefix(partial(self._checker, writing.text, at_once=False))

    def _thoughts(self, request: Request, think: ThinkParams) -> Writing:
        """The thoughts before an output."""
        answer_params = request.params
        params = SamplingParams(
            temperature=answer_params.temperature,
            logit_bias=answer_params.logit_bias,
            stop=think.end,
            max_tokens=think.max_tokens,
            ignore_eos=answer_params.ignore_eos,
            skip_special_tokens=answer_params.skip_special_tokens,
        )
        text = Request(request.id, None, request.prompt_ids, params, request.seed, think.max_tokens)
        return Writing(text, self._method(thinking(self.given), request), self.denoiser)

    def _check_answer(self, jobs: Sequence[Job], think: ThinkParams) -> None:
        """See that the answer to the longest thoughts of a request can be written.

        Raises:
            ConfigError, UnsatisfiableError: it cannot.
        """
        request = jobs[0].request
        longest = self._answer(request, think, [request.prompt_ids[-1]] * think.max_tokens)
        canvas = self._canvas(longest)
        try:
            self._make(longest, canvas, 0)
        except PacelineError:
            raise
        except Exception as error:
            for job in jobs:
                job.fail(said("the diffusion method", error))

    def _answer(self, request: Request, think: ThinkParams, thoughts: Sequence[int]) -> Writing:
        """The answer to thoughts.

        Raises:
            ConfigError: no room for it.
        """
        check = self.tokenizer.encode(think.check_prompt, add_special_tokens=False)
        prompt = [*request.prompt_ids, *thoughts, *check]
        room = self.max_context - len(prompt)
        rule = f"leave room for an answer: it shares {self.max_context} tokens with the prompt and the check prompt"
        need(room > 0, "think max_tokens", rule, think.max_tokens)
        text = Request(request.id, None, prompt, request.params, request.seed, min(request.max_tokens, room))
        return Writing(text, self._method(answering(self.given, self.denoiser), request), self._fine)

    @cached_property
    def _fine(self) -> Denoiser:
        return answering_denoiser(self.denoiser)

    def _goes_on(self, job: Job) -> bool:
        """Whether the thoughts are complete; what failed ends the output."""
        return job.outcome.error is None or self._read(job)[1].finished

    def _begin_answer(self, job: Job) -> None:
        """Keep the thoughts, and write the answer from now on."""
        think = ThinkParams.parse(job.request.params.think)
        assert think is not None
        tokens = self._keep_thoughts(job)
        writing = self._answer(job.request, think, tokens)
        outcome, final = FinishedCanvas(self._canvas(writing)), self._final(writing)
        job.writing, job.thought, job.shown = writing, job.outcome, 0
        job.outcome, job.final = outcome, final

    def _keep_thoughts(self, job: Job) -> list[int]:
        """The thoughts as far as they are written, without an end of text."""
        tokens, checker = self._read(job)
        if not checker.finished:
            checker.cut_off()
        if tokens and tokens[-1] in self._eos(job.writing.text):
            tokens.pop()
        job.output.reasoning, job.output.reasoning_token_ids = checker.text, tokens
        return tokens

    def _canvas(self, writing: Writing) -> Canvas:
        """Masked slots after the prompt, and what is given among them. A constrained text must not be cut, so the slots
        beyond its limit hold the end.
        """
        text, mask = writing.text, self.denoiser.mask_token_id
        slots, eos = self._slots(writing), self._eos(text)
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        sizes = {"slots": min(slots, text.max_tokens), "vocab_size": self.vocab_size, "mask_token_id": mask}
        priors = given_slots(text.params.canvas or (), encode, **sizes)
        if "check" in writing.method.names and slots > text.max_tokens:
            rule = "fill whole blocks where a constrained text has no end token"
            need(bool(eos), "max_tokens", rule, text.max_tokens)
            priors |= dict.fromkeys(range(text.max_tokens, slots), eos[0])
        return Canvas.of(text.prompt_ids, slots, mask_token_id=mask, eos_token_ids=eos, priors=priors)

    def _slots(self, writing: Writing) -> int:
        """Slots after the prompt: as many tokens as wanted, rounded up to whole blocks as far as the context allows."""
        text, denoiser = writing.text, writing.denoiser
        causal, prompt = denoiser.attention == "block", len(text.prompt_ids)
        unit = denoiser.block_length if causal else writing.method.options.get("block_length")
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
        wanted = whole_blocks(prompt, text.max_tokens, denoiser, unit)
        slots = min(wanted, (self.max_context - before) // unit * unit + before - prompt)
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

    def _parts(self, job: Job) -> CanvasMethod:
        """The method, made for one output."""
        return self._make(job.writing, job.outcome.canvas, job.index)

    def _make(self, writing: Writing, canvas: Canvas, index: int) -> CanvasMethod:
        text, facts = writing.text, writing.denoiser
        params = text.params
        if params.ignore_eos:
            facts = copy(facts)
            facts.eos_token_ids = ()
        texts = self._texts if "check" in writing.method.names else None
        parts = writing.method.parts(facts, canvas, seed=draw_seed(text.seed, index), token_text=texts)
        if params.logit_bias:
            parts.layout = BiasedLayout(parts.layout, params.logit_bias)
        prior = np.flatnonzero(canvas.status[canvas.start :][: text.max_tokens] == Status.PRIOR)
        if prior.size and facts.eos_token_ids:
            parts.layout = OpenedLayout(parts.layout, facts.eos_token_ids, canvas.start + int(prior[-1]))
        return parts

    def _look_for_ends(self, jobs: Sequence[Job]) -> None:
        """Spare canvases whose text has ended what would be cut off; where written slots may change, all is decoded."""
        for job in jobs:
            if job.writing.final_once_written and not job.outcome.enough:
                with alone(job):
                    job.outcome.enough = self._read(job)[1].finished

    def _read(self, job: Job) -> tuple[list[int], StopChecker]:
        """The tokens up to the first masked slot or the end of the text, and where that ends."""
        return self._up_to_end(job, self._checker(job.writing.text))

    def _up_to_end(self, job: Job, checker: StopChecker) -> tuple[list[int], StopChecker]:
        canvas = job.outcome.canvas
        masked = canvas.masked(canvas.start)
        tokens: list[int] = canvas.tokens[canvas.start : masked[0] if masked.size else canvas.length].tolist()
        return tokens[: checker.push(tokens)], checker

    def _checker(self, request: Request, *, at_once: bool = True, unread: bool = False) -> StopChecker:
        eos, most = self.denoiser.eos_token_ids, request.max_tokens
        tokenizer = None if unread else self.tokenizer
        return StopChecker(request.params, eos, tokenizer, request.prompt_ids, max_new_tokens=most, at_once=at_once)

    def _finish(self, job: Job) -> None:
        """Make the output of what is written, and count it."""
        try:
            self._write(job)
        except Exception as error:
            job.fail(no_text(error))
            self._keep_tokens(job)
        if job.failure is not None:
            job.output.finish_reason, job.output.stop_reason, job.output.error = "error", None, job.failure
        self._count(job)

    def _write(self, job: Job) -> None:
        output = job.output
        tokens, checker = self._read(job)
        if not checker.finished:
            checker.cut_off()
        output.finish_reason = checker.finish_reason or "length"
        if job.thinks:
            self._keep_thoughts(job)
        else:
            output.token_ids, output.text, output.stop_reason = tokens, checker.text, checker.stop_reason
        if job.outcome.error is not None and not checker.finished:
            output.finish_reason, output.error = "error", str(job.outcome.error)

    def _keep_tokens(self, job: Job) -> None:
        """What is left of an output whose text cannot be made: its tokens, and of the text what has come out."""
        output = job.output
        tokens, _ = self._up_to_end(job, self._checker(job.writing.text, unread=True))
        if job.thinks:
            output.reasoning_token_ids = tokens
        else:
            output.token_ids, output.text = tokens, job.final.text

    def _count(self, job: Job) -> None:
        request, output = job.request, job.output
        metrics = request.metrics
        assert isinstance(metrics, DiffusionMetrics)
        for outcome in (job.thought, job.outcome):
            if outcome is not None:
                metrics.add(outcome.trajectory)
        metrics.num_reasoning_tokens += len(output.reasoning_token_ids)
        metrics.num_generation_tokens += len(output.token_ids) + len(output.reasoning_token_ids)
        now = perf_counter()
        metrics.generation_time = now - (metrics.first_step_time or now)
        if metrics.time_to_first_token is None:
            metrics.time_to_first_token = now - metrics.arrival_time


def _begin(jobs: Sequence[Job]) -> None:
    """Note when the first canvas of each request begins; its others may have to wait for room."""
    now = perf_counter()
    for job in jobs:
        job.request.metrics.first_step_time = job.request.metrics.first_step_time or now
