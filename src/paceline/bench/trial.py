"""One setting against plain decoding on one group of prompts, in turn: the measurement that tuning repeats.

In: a loaded LLM, settings, groups of prompts. Out: ratios of tokens per second. Not here: what to measure (`bench.halving`).

A setting is refused when it cannot be built, when a drafter of it fails, or when its greedy output differs from plain decoding's
elsewhere than at a near tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from paceline.bench.candidates import Setting
from paceline.bench.compare import first_difference
from paceline.bench.halving import RefusedError
from paceline.config import SamplingParams
from paceline.engine.outputs import RequestOutput
from paceline.errors import PacelineError
from paceline.llm import LLM


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
    """

    def __init__(
        self,
        llm: LLM,
        settings: Sequence[Setting],
        groups: Sequence[Sequence[Any]],
        params: SamplingParams,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.llm, self.settings, self.groups, self.params, self.clock = llm, list(settings), list(groups), params, clock
        self.threads = _threads()
        self.plain = llm.with_speculative_config(None)
        self.identical = self.near_ties = 0
        self._built: dict[int, LLM] = {}
        self._turns: Counter[int] = Counter()

    def plain_seconds(self, item: int) -> float:
        """Seconds of plain decoding of a group, after a first run that is not counted."""
        for _ in range(2):
            _, seconds = self._run(self.plain, item, self.threads)
        return seconds

    def pull(self, arm: int, item: int) -> float:
        """Tokens per second of a setting over those of plain decoding with the default threads; which goes first, alternates.

        Raises:
            RefusedError: the setting cannot run on this model, or its output is wrong.
        """
        llm = self._llm(arm, item)
        self._turns[arm] += 1
        if self._turns[arm] % 2:
            plain, slow = self._run(self.plain, item, self.threads)
            outputs, fast = self._run(llm, item, self.settings[arm].threads)
        else:
            outputs, fast = self._run(llm, item, self.settings[arm].threads)
            plain, slow = self._run(self.plain, item, self.threads)
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
                self._run(llm, item, setting.threads)
            except PacelineError as error:
                raise RefusedError(f"cannot run: {error}") from error
            self._built[arm] = llm
        return self._built[arm]

    def _run(self, llm: LLM, item: int, threads: int) -> tuple[list[RequestOutput], float]:
        _set_threads(threads)
        start = self.clock()
        outputs = llm.generate(list(self.groups[item]), self.params)
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


def _tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(one.outputs[0].token_ids) for one in outputs)


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _set_threads(number: int) -> None:
    import torch

    if torch.get_num_threads() != number:
        torch.set_num_threads(number)
