"""One setting against plain decoding on one group of prompts, in turn: the measurement that tuning repeats.

In: a loaded LLM, settings, groups of prompts. Out: ratios of tokens per second. Not here: what to measure
(`bench.halving`).

Every visit of a setting to a group has a `cache_salt` of its own: tables that outlive a request may learn from other
prompts of the same round, but never from their own answer in an earlier one, which would be repeated word by word.

A setting is refused when it cannot be built, when a drafter of it fails, or when its greedy output differs from plain
decoding's elsewhere than at a near tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from statistics import median
from time import perf_counter
from typing import Any, Final

from paceline.bench.judge.tokens import first_difference
from paceline.bench.tune.arms import Arm
from paceline.bench.tune.halving import RefusedError
from paceline.config import SamplingParams
from paceline.engine import RequestOutput
from paceline.errors import PacelineError
from paceline.llm import LLM

LEAST_TOKENS: Final = 16
"""Runs are not made shorter than this: what a step takes shows in the steps after the first ones."""

LOOKS: Final = 4
"""Most runs by which the pace at the start is told."""


class Trial:
    """Measures settings, each built when it is first asked for.

    Args:
        llm: the loaded model.
        settings: the arms.
        groups: prompts that are decoded at once, a group after the other.
        params: greedy.
        clock: seconds.
    Attributes:
        identical, near_ties: compared outputs that were equal, and that differed first at a near tie.
        seconds: that each pair of runs took.
    """

    def __init__(
        self,
        llm: LLM,
        settings: Sequence[Arm],
        groups: Sequence[Sequence[Any]],
        params: SamplingParams,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.llm, self.settings, self.groups, self.params, self.clock = llm, list(settings), list(groups), params, clock
        self.threads = _threads()
        self.plain = llm.with_speculative_config(None)
        self.identical = self.near_ties = 0
        self.seconds: list[float] = []
        self._built: dict[int, LLM] = {}
        self._turns: Counter[int] = Counter()
        self._visits: Counter[tuple[int, int]] = Counter()

    def warm_up(self, item: int) -> None:
        """Decode a group plainly, so that what happens once happens now."""
        self._run(self.plain, item, self.threads, "warm-up", replace(self.params, max_tokens=LEAST_TOKENS))

    def shorten(self, item: int, seconds: float) -> None:
        """Let runs end after so many tokens that a plain one of this group takes about `seconds`; never under
        LEAST_TOKENS, and never longer than they are.
        """
        (few, short), (many, long) = self._paced(item, 1, seconds), self._paced(item, LEAST_TOKENS, seconds)
        each = max(0.0, long - short) / max(1, many - few)
        self._end_after(few + (seconds - short) / each if each else inf)

    def hurry(self, pairs: int, seconds: float) -> None:
        """The same by the pace of the pairs so far, so that as many more of them fit into `seconds`."""
        if self.seconds and self.params.max_tokens is not None:
            self._end_after(self.params.max_tokens * max(0.0, seconds) / (pairs * median(self.seconds) or inf))

    def _end_after(self, tokens: float) -> None:
        most = self.params.max_tokens
        if most is not None and most > LEAST_TOKENS:
            self.params = replace(self.params, max_tokens=max(LEAST_TOKENS, int(min(most, tokens))))

    def _paced(self, item: int, tokens: int, enough: float) -> tuple[int, float]:
        """Tokens of the longest output of a plain run that ends after so many, and the least seconds of up to LOOKS
        such runs, as many as fit into `enough`: whatever else the machine does, makes runs longer and never shorter.
        """
        times: list[float] = []
        longest = 0
        while not times or (len(times) < LOOKS and sum(times) < enough):
            salt = f"{tokens} tokens, {len(times)}"
            outputs, taken = self._run(self.plain, item, self.threads, salt, replace(self.params, max_tokens=tokens))
            longest = max(len(one.outputs[0].token_ids) for one in outputs)
            times.append(taken)
        return longest, min(times)

    def pull(self, arm: int, item: int) -> float:
        """Tokens per second of a setting over those of plain decoding with the default threads; which goes first,
        alternates.

        Raises:
            RefusedError: the setting cannot run on this model, or its output is wrong.
        """
        llm, threads = self._llm(arm, item), self.settings[arm].threads
        self._turns[arm] += 1
        self._visits[arm, item] += 1
        salt = f"visit {self._visits[arm, item]}"
        if self._turns[arm] % 2:
            plain, slow = self._run(self.plain, item, self.threads, salt)
            outputs, fast = self._run(llm, item, threads, salt)
        else:
            outputs, fast = self._run(llm, item, threads, salt)
            plain, slow = self._run(self.plain, item, self.threads, salt)
        self.seconds.append(slow + fast)
        self._compare(plain, outputs)
        return (_tokens(outputs) / fast) / (_tokens(plain) / slow)

    def restore(self) -> None:
        """Give PyTorch back the number of threads that it had."""
        _set_threads(self.threads)

    def _llm(self, arm: int, item: int) -> LLM:
        """The setting's engine, warmed up."""
        if arm not in self._built:
            setting = self.settings[arm]
            _set_threads(setting.threads)
            try:
                llm = self.llm.with_speculative_config(setting.config)
                self._run(llm, item, setting.threads, "warm-up")
            except PacelineError as error:
                raise RefusedError(f"cannot run: {error}") from error
            self._built[arm] = llm
        return self._built[arm]

    def _run(
        self, llm: LLM, item: int, threads: int, salt: str, params: SamplingParams | None = None
    ) -> tuple[list[RequestOutput], float]:
        _set_threads(threads)
        prompts = [salted(prompt, salt) for prompt in self.groups[item]]
        start = self.clock()
        outputs = llm.generate(prompts, params or self.params)
        seconds = self.clock() - start
        for one in outputs:
            one.raise_for_error()
            for name, why in one.metrics.dropped_drafters.items():
                raise RefusedError(f"drafter {name} failed: {why}")
        return outputs, seconds

    def _compare(self, plain: Sequence[RequestOutput], fast: Sequence[RequestOutput]) -> None:
        for slow, quick in zip(plain, fast, strict=True):
            tokens = slow.outputs[0].token_ids, quick.outputs[0].token_ids
            difference = first_difference(self.llm.runner, slow.prompt_token_ids, *tokens)
            if difference is None:
                self.identical += 1
            elif difference.near_tie:
                self.near_ties += 1
            else:
                raise RefusedError(
                    f"output differs from plain decoding at token {difference.position} ({difference.plain} against "
                    f"{difference.fast}, logit gap {difference.gap:.3g}), not a near tie"
                )


def salted(prompt: Any, salt: str) -> dict[str, Any]:
    """A prompt, in any form that `LLM.generate` takes, with this `cache_salt` behind its own."""
    if isinstance(prompt, Mapping):
        own = prompt.get("cache_salt")
        return {**prompt, "cache_salt": salt if own is None else f"{own} {salt}"}
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


def _tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(one.outputs[0].token_ids) for one in outputs)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _set_threads(number: int) -> None:
    import torch

    if torch.get_num_threads() != number:
        torch.set_num_threads(number)
