"""Rollouts in segments: a pool of samples, each of which goes on by at most so many tokens in a step of training.

What has ended leaves the pool and can be trained on at once; what has not is parked, with its tokens, randomness,
rules, drafter states and log-probabilities, and goes on in the next step, perhaps under new weights. So no step waits
for the longest sample. Parking changes no token: with the same weights a sample is what `generate` gives for its seed.
Source: UloRL: An Ultra-Long Output Reinforcement Learning Approach (arXiv:2507.19766).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self
from weakref import finalize

from paceline.config import SamplingParams
from paceline.engine.driver import EngineDriver
from paceline.engine.outputs import CompletionOutput, FinishReason
from paceline.engine.prompts import Prompt
from paceline.engine.request import Request
from paceline.errors import ConfigError
from paceline.utils import integer, need


@dataclass(slots=True)
class Rollout:
    """One sample of a prompt.

    Attributes:
        prompt_index: of its prompt, in the order in which they were given. index: among the samples of the prompt.
        logprobs: of each token, raw, under the policy that produced it. policy_versions: of each token, that policy.
        segments: of each segment so far, its number of tokens.
        finish_reason: None while it goes on; else as in `CompletionOutput`, and so `text`, `stop_reason` and `error`.
    """

    prompt_index: int
    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def take(self, output: CompletionOutput, version: int) -> None:
        """Note what a segment has added."""
        new = output.token_ids[len(self.token_ids) :]
        entries = (output.logprobs or [])[len(self.token_ids) :]
        if new:
            self.segments.append(len(new))
        self.token_ids += new
        self.logprobs += [entry[token].logprob for entry, token in zip(entries, new, strict=True)]
        self.policy_versions += [version] * len(new)
        self.text, self.error = output.text, output.error
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason


@dataclass(slots=True)
class _Open:
    """A prompt whose samples are in the pool."""

    request: Request
    driver: EngineDriver
    samples: list[Rollout]
    limit: int

    @property
    def going(self) -> list[Rollout]:
        return [sample for sample in self.samples if sample.finish_reason is None]

    @property
    def busy(self) -> bool:
        """Whether an output neither has ended nor reached the end of its segment."""
        outputs = self.request.outputs
        return not outputs or any(not output.finished() and len(output.token_ids) < self.limit for output in outputs)


class RolloutPool:
    """Samples on their way. Iterating over it steps until all prompts are done and yields what ends, as it ends.

    Args:
        submit: a prompt's request, checked and not begun, and who decodes it.
        reset: forgets the keys and values of ended and parked samples.
        prompts: taken as places get free. samples: of each prompt.
        segment_tokens: most new tokens of a sample in a step. pool_size: most samples in the pool.
    Attributes:
        policy_version: of the weights, as the caller counts it.
    Raises:
        ConfigError: a value outside its range.
    """

    def __init__(
        self,
        submit: Callable[[Prompt], tuple[Request, EngineDriver]],
        reset: Callable[[], object],
        prompts: Iterable[Prompt],
        *,
        samples: int,
        segment_tokens: int,
        pool_size: int,
    ) -> None:
        integer("segment_tokens", segment_tokens, 1)
        integer("pool_size", pool_size, samples)
        self._submit, self._reset, self._prompts = submit, reset, enumerate(prompts)
        self._samples, self.segment_tokens, self.pool_size = samples, segment_tokens, pool_size
        self._open: dict[str, _Open] = {}
        self._exhausted = False
        self.policy_version = 0
        self._closed = finalize(self, _drop, self._open)

    def update_policy(self, version: int | None = None) -> None:
        """The weights have changed, in place: what is parked is computed anew with them before it goes on.

        Args:
            version: theirs; None is the next.
        Raises:
            ConfigError: it is no integer of 0 or more.
        """
        if version is not None:
            integer("version", version, 0)
        self.policy_version = self.policy_version + 1 if version is None else version
        self._reset()

    def step(self) -> list[Rollout]:
        """Fill the pool up, let all go on by a segment, and return what has ended, which leaves the pool.

        Raises:
            PromptError, ConfigError: a prompt that cannot be decoded; it is left out, and nothing else is lost.
        """
        self.begin_segment()
        while self.advance():
            pass
        return self.gathered()

    def begin_segment(self) -> None:
        """The first part of `step`: fill the pool up, and let all go on by a segment.

        Raises:
            PromptError, ConfigError: as `step`.
        """
        if not self._closed.alive:
            raise ConfigError("this pool of rollouts is closed; open another with LLM.rollouts")
        self._refill()
        for group in self._open.values():
            group.limit += 0 if group.busy else self.segment_tokens
            group.driver.resume(group.request, group.limit)

    def advance(self) -> bool:
        """Its second part, to be repeated: one step of decoding; False once all are at the end of their segments."""
        busy = [group for group in self._open.values() if group.busy]
        if busy:
            busy[0].driver.step()
            for group in self._open.values():
                group.driver.collect(group.request.id)
        return bool(busy)

    def _refill(self) -> None:
        while not self._exhausted and len(self.unfinished) + self._samples <= self.pool_size:
            taken = next(self._prompts, None)
            if taken is None:
                self._exhausted = True
                return
            number, prompt = taken
            request, driver = self._submit(prompt)
            request.streamed = False
            samples = [Rollout(number, i, request.prompt, request.prompt_ids) for i in range(self._samples)]
            self._open[request.id] = _Open(request, driver, samples, self.segment_tokens)
            driver.open(request)

    def gathered(self) -> list[Rollout]:
        """Its last part: note what the segment has added, and return what has ended."""
        ended: list[Rollout] = []
        for name, group in list(self._open.items()):
            for sample in group.going:
                sample.take(group.request.outputs[sample.index], self.policy_version)
                if sample.finish_reason is not None:
                    ended.append(sample)
            if not group.going:
                del self._open[name]
                group.driver.drop(name)
        return ended

    @property
    def unfinished(self) -> list[Rollout]:
        """The samples in the pool, as they are after the last step."""
        return [sample for group in self._open.values() for sample in group.going]

    @property
    def done(self) -> bool:
        """Whether all prompts are done."""
        return not self._open and self._exhausted

    def __iter__(self) -> Iterator[Rollout]:
        while not self.done:
            yield from self.step()

    def close(self) -> None:
        """Cancel what is in the pool."""
        self._closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def rollout_params(params: SamplingParams) -> SamplingParams:
    """Parameters of samples for training: they keep one log-probability a token.

    Raises:
        ConfigError: others are wanted.
    """
    if params.logprobs is None:
        params = replace(params, logprobs=0)
    need(params.logprobs == 0, "logprobs", "be None or 0 in rollouts, which keep one a token", params.logprobs)
    need(params.prompt_logprobs is None, "prompt_logprobs", "be left out of rollouts", params.prompt_logprobs)
    return params


def _drop(opened: dict[str, _Open]) -> None:
    for name, group in list(opened.items()):
        group.driver.drop(name)
    opened.clear()
