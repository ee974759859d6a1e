"""One setting against plain decoding on one group of prompts, in turn: the measurement that tuning repeats.

In: a loaded LLM, settings, groups of prompts. Out: ratios of tokens per second. Not here: what to measure (`bench.halving`).

Every visit of a setting to a group has a `cache_salt` of its own: tables that outlive a request may learn from other prompts of the
same round, but never from their own answer in an earlier one, which would be repeated word by word.

A setting is refused when it cannot be built, when a drafter of it fails, or when its greedy output differs from plain decoding's
elsewhere than at a near tie.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

from paceline.bench.candidates import Arm
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
        settings: Sequence[Arm],
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
        self._visits: Counter[tuple[int, int]] = Counter()

    def warm_up(self, item: int) -> None:
        """Decode a group plainly, so that what happens once happens now."""
        self._run(self.plain, item, self.threads, "warm-up")

    def pull(self, arm: int, item: int) -> float:
        """Tokens per second of a setting over those of plain decoding with the default threads; which goes first, alternates.

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

    def _run(self, llm: LLM, item: int, threads: int, salt: str) -> tuple[list[RequestOutput], float]:
        _set_threads(threads)
        prompts = [salted(prompt, salt) for prompt in self.groups[item]]
        start = self.clock()
        outputs = llm.generate(prompts, self.params)
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
