"""Tuning: which method and settings decode these prompts fastest with this model on this machine, and is it worth it?

Three parts of the budget search, two confirm: the winner of the search is measured again, on prompts that the search
did not see where there are enough. It is chosen only if the interval of its gain over plain decoding lies above 1,
plain decoding only if it lies below; in between nothing is chosen, and `auto` stays. Where
the model is so slow, or the machine so busy, that RUNS runs would not fit, runs are made shorter; the search ends early
enough for MIN_PAIRS pairs of the winner at the pace of the pairs so far, or these pairs are made shorter still. A
budget is passed only by runs that cannot be shorter, and by a pace that changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import numpy as np
import torch

from paceline.checkpoints import digest_of, resolve
from paceline.config import SamplingParams
from paceline.engine import RequestOutput
from paceline.errors import PacelineError
from paceline.llm import LLM
from paceline.models import abilities_of
from paceline.profiles import Conditions, Profile
from paceline.tune.candidates import Arm, Candidates, find_candidates, thread_counts, with_request_drafters
from paceline.tune.memory import MemoryBudget, lengths_of
from paceline.tune.search import LEAST_ARMS, MIN_PAIRS, Gain, Interval, Race, RejectedError, confirm, interval, race
from paceline.utils import in_turn, timed
from paceline.verify import first_difference, inputs_of

LEAST_TOKENS: Final = 16
"""Runs are not made shorter than this: what a step takes shows in the steps after the first ones."""

LOOKS: Final = 4
"""Most runs by which the pace at the start is told."""


class TuningTrial:
    """Measures settings, each built when it is first asked for.

    Args:
        llm: the loaded model.
        settings: the arms.
        groups: prompts that are decoded at once, a group after the other.
        params: greedy.
        clock: seconds.
        memory: what settings must keep within; None is no limit.
    Attributes:
        identical, near_ties: compared outputs that were equal, and that differed first at a near tie.
        seconds: that each pair of runs took.
        tokens, passes: per setting, of its runs in pairs; passes as each output took part in them.
    """

    def __init__(
        self,
        llm: LLM,
        settings: Sequence[Arm],
        groups: Sequence[Sequence[Any]],
        params: SamplingParams,
        clock: Callable[[], float] = perf_counter,
        *,
        memory: MemoryBudget | None = None,
    ) -> None:
        self.llm, self.settings, self.groups, self.params, self.clock = llm, list(settings), list(groups), params, clock
        self.memory = memory
        self.threads = torch.get_num_threads()
        self.plain = llm.with_speculative_config(None)
        self.identical = self.near_ties = 0
        self.seconds: list[float] = []
        self.tokens, self.passes = Counter[int](), Counter[int]()
        self._built: dict[int, LLM] = {}
        self._order = np.random.default_rng(0)
        self._visits: Counter[tuple[int, int]] = Counter()

    def warm_up(self, item: int) -> None:
        """Decode a group plainly, so that what happens once happens now."""
        self._run(self.plain, item, self.threads, "warm-up", replace(self.params, max_tokens=LEAST_TOKENS))

    def shorten(self, item: int, seconds: float) -> None:
        """Let runs end after so many tokens that a plain one of this group takes about `seconds`.

        Never under LEAST_TOKENS, and never longer than they are.
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
        longest, params = 0, replace(self.params, max_tokens=tokens)
        while not times or (len(times) < LOOKS and sum(times) < enough):
            run = partial(self._run, self.plain, item, self.threads, f"{tokens} tokens, {len(times)}", params)
            outputs, taken = timed(run, self.clock)
            longest = max(len(output.outputs[0].token_ids) for output in outputs)
            times.append(taken)
        return longest, min(times)

    def pull(self, arm: int, item: int) -> float:
        """Tokens per second of a setting over those of plain decoding with the default threads, in turn.

        Raises:
            RejectedError: the setting cannot run on this model, or its output is wrong.
        """
        llm, threads = self._llm(arm, item), self.settings[arm].threads
        self._visits[arm, item] += 1
        salt = f"visit {self._visits[arm, item]}"
        runs = {
            "plain": lambda item, _: self._run(self.plain, item, self.threads, salt),
            "arm": lambda item, _: self._run(llm, item, threads, salt),
        }
        with nullcontext() if self.memory is None else self.memory.measured(self._words(arm)):
            (turn,) = in_turn(runs, [item], 1, order=self._order, clock=self.clock)
        self.seconds.append(sum(turn.seconds.values()))
        self._compare(turn.outputs["plain"], turn.outputs["arm"])
        self.tokens[arm] += _tokens(turn.outputs["arm"])
        self.passes[arm] += sum(output.metrics.num_steps for output in turn.outputs["arm"])
        slow, fast = (_tokens(turn.outputs[name]) / turn.seconds[name] for name in runs)
        return fast / slow

    def restore(self) -> None:
        """Give PyTorch back the number of threads that it had."""
        set_threads(self.threads)

    def _llm(self, arm: int, item: int) -> LLM:
        """The setting's engine, warmed up."""
        if arm not in self._built:
            setting = self.settings[arm]
            set_threads(setting.threads)
            try:
                if self.memory is None:
                    llm = self.llm.with_speculative_config(setting.config)
                else:
                    llm = self.memory.fit(self.llm, setting.config, self._words(arm))
                self._run(llm, item, setting.threads, "warm-up")
            except PacelineError as error:
                raise RejectedError(f"cannot run: {error}") from error
            self._built[arm] = llm
        return self._built[arm]

    def _words(self, arm: int) -> str:
        return self.settings[arm].words(self.threads)

    def _run(
        self, llm: LLM, item: int, threads: int, salt: str, params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        set_threads(threads)
        outputs = llm.generate([salted(prompt, salt) for prompt in self.groups[item]], params or self.params)
        for output in outputs:
            output.raise_for_error()
            for name, why in output.metrics.dropped_drafters.items():
                raise RejectedError(f"drafter {name} failed: {why}")
        return outputs

    def _compare(self, plain: Sequence[RequestOutput], fast: Sequence[RequestOutput]) -> None:
        for slow, quick in zip(plain, fast, strict=True):
            tokens = slow.outputs[0].token_ids, quick.outputs[0].token_ids
            difference = first_difference(self.llm.runner, slow.prompt_token_ids, *tokens, inputs=inputs_of(slow))
            if difference is None:
                self.identical += 1
            elif difference.near_tie:
                self.near_ties += 1
            else:
                raise RejectedError(
                    f"output differs from plain decoding at token {difference.position} ({difference.plain} against "
                    f"{difference.fast}, logit gap {difference.gap:.3g}), not a near tie"
                )


def salted(prompt: Any, salt: str) -> dict[str, Any]:
    """A prompt, in any form that `LLM.generate` takes, with this `cache_salt` behind its own."""
    if isinstance(prompt, Mapping):
        prompt_salt = prompt.get("cache_salt")
        return {**prompt, "cache_salt": salt if prompt_salt is None else f"{prompt_salt} {salt}"}
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


def _tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def set_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


SEARCH = 0.6
"""Share of the budget that the search may use."""

RUNS = 3 * LEAST_ARMS + 2 * MIN_PAIRS
"""Runs that are made in any case: a first look has one to warm up, and pairs are two."""

USED = 0.9
"""Share of the budget that those runs may take, by a plain one's pace at the start."""

APART = 8
"""From so many groups of prompts on, search and confirmation use different ones."""

FIXED_UP_TO = 4
"""A fixed number of tokens is good for the batch size it was measured at; drafts are off from so many times that size
on.
"""

Progress = Callable[[str, float], None]
"""`progress(what, seconds)`: what is going on, and seconds since the start."""


@dataclass(slots=True)
class Tuning:
    """Reports what `tune` has measured and chosen, and what was left out.

    Attributes:
        best: the setting that the search preferred; None if all were rejected, or there was no time for any.
        gain: of `best`, on fresh measurements (after an interrupt in the search: on the search's own); None without
            measurements.
        chosen: what to use from now on: `best`, or plain decoding; None where neither is shown to be faster.
        settings: words of a setting -> (median gain in the search, number of paired runs), best first.
        tokens_per_pass: words of a setting -> tokens of a pass of the target.
        rejected, skipped: words or method -> why.
        left_out: words of the settings that the budget did not allow to try.
        beyond: words of those that were not among the most promising (`MAX_CANDIDATES`).
        near_ties, compared: outputs that differed from plain decoding at a near tie, of all that were compared.
        asked_tokens, max_tokens: most new tokens of a prompt, as asked for and as the budget allowed.
        interrupted: Ctrl-C ended it; `in_search` before the confirmation.
        memory: of a budget of memory, what plain decoding takes, what each setting was given and has held; else None.
        profile: what to keep; None where nothing was chosen.
    """

    model: str
    dtype: str
    device: str
    threads: int
    prompts: int
    batch_size: int
    best: Arm | None = None
    gain: Interval | None = None
    chosen: Arm | None = None
    settings: dict[str, tuple[float, int]] = field(default_factory=dict)
    tokens_per_pass: dict[str, float] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[str] = ()
    beyond: Sequence[str] = ()
    near_ties: int = 0
    compared: int = 0
    interrupted: bool = False
    in_search: bool = False
    budget: float = 0.0
    asked_tokens: int | None = None
    max_tokens: int | None = None
    seconds: float = 0.0
    memory: Mapping[str, Any] | None = None
    profile: Profile | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        facts = {
            key: getattr(self, key)
            for key in self.__dataclass_fields__
            if key not in ("best", "chosen", "gain", "profile", "tokens_per_pass")
        }
        for key in ("best", "chosen"):
            setting: Arm | None = getattr(self, key)
            facts[key] = setting and {"speculative_config": setting.config, "threads": setting.threads}
        facts["settings"] = [
            {"setting": words, "gain": gain, "pairs": pairs, "tokens_per_pass": self.tokens_per_pass.get(words)}
            for words, (gain, pairs) in self.settings.items()
        ]
        return facts | {"gain": self.gain and asdict(self.gain), "profile": self.profile and asdict(self.profile)}


def tune(
    llm: LLM,
    folder: Path,
    prompts: Sequence[Any],
    *,
    drafts: Sequence[str] = (),
    tried: Candidates | None = None,
    cores: int = 1,
    budget: float = 120.0,
    max_tokens: int = 128,
    batch_size: int = 1,
    memory: int | None = None,
    clock: Callable[[], float] = perf_counter,
    progress: Progress = lambda what, seconds: None,
) -> Tuning:
    """Find the fastest setting: search, confirm the best on other runs, choose.

    Args:
        llm: loaded; its own speculative_config plays no part.
        folder: of the checkpoint.
        prompts: as for `LLM.generate`.
        tried: the settings; None takes those of `find_candidates`, with the draft models `drafts`.
        cores: physical cores at hand, for the numbers of threads to try; 0 tries the present number only.
        budget: seconds; RUNS runs are made in any case, of fewer tokens where they would take longer.
        batch_size: prompts that are decoded at once. clock: seconds.
        memory: bytes that every setting must keep within, weights included (`tune.memory`); None is no limit.
    Raises:
        ConfigError: plain decoding takes more memory.
    """
    start, info = clock(), llm.runner.info
    conditions = Conditions.of(info, folder)
    threads, groups = thread_counts(conditions.threads, cores, info.device.type), groups_of(prompts, batch_size)
    tried = tried or find_candidates(abilities_of(llm.runner), drafts=drafts, threads=threads)
    limit = None if memory is None else MemoryBudget(memory, lengths_of(llm, groups, max_tokens))
    plain = None if limit is None else limit.check_plain(llm.with_speculative_config(None))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    trial = TuningTrial(llm, tried.settings, groups, params, clock, memory=limit)
    count = sum(map(len, groups))
    tuning = Tuning(info.name, conditions.dtype, str(info.device), conditions.threads, count, len(groups[0]))
    tuning.budget, tuning.asked_tokens, tuning.skipped = budget, max_tokens, dict(tried.skipped)
    tuning.beyond = [setting.words(tuning.threads) for setting in tried.beyond]
    try:
        _decide(tuning, trial, elapsed=lambda: clock() - start, budget=budget, progress=progress)
    finally:
        trial.restore()
    tuning.seconds = clock() - start
    if limit is not None and plain is not None:
        tuning.memory = limit.to_dict(plain)
    if tuning.chosen is not None:
        tuning.profile = _profile(tuning, tuning.chosen, conditions)
    return tuning


def groups_of(prompts: Sequence[Any], batch_size: int) -> list[Sequence[Any]]:
    """The prompts in groups of this size, or of all where there are fewer; what does not fill a group is left out."""
    size = min(batch_size, len(prompts))
    return [prompts[at : at + size] for at in range(0, len(prompts) - size + 1, size)]


def _decide(
    tuning: Tuning, trial: TuningTrial, *, elapsed: Callable[[], float], budget: float, progress: Progress
) -> None:
    """Fill in everything that is measured."""
    items = range(len(trial.groups))
    apart = len(items) >= APART
    words = [setting.words(tuning.threads) for setting in trial.settings]
    try:
        progress("warming up", elapsed())
        trial.warm_up(0)
        trial.shorten(0, USED * (budget - elapsed()) / RUNS)
    except KeyboardInterrupt:
        tuning.interrupted = tuning.in_search = True
        return
    raced = race(
        len(words),
        items[::2] if apart else items,
        trial.pull,
        elapsed=lambda: elapsed() + max(0.0, _promised(trial) - (1 - SEARCH) * budget),
        budget=SEARCH * budget,
        progress=lambda alive: progress(f"searching, {alive} settings left", elapsed()),
    )
    measured = _confirm(
        tuning, trial, raced, items[1::2] if apart else items, elapsed=elapsed, budget=budget, progress=progress
    )
    tuning.left_out = [words[arm] for arm in raced.unseen]
    tuning.rejected = {words[arm]: why for arm, why in raced.rejected.items()}
    tuning.settings = {
        words[a]: (median(g.ratio for g in raced.gains[a]), len(raced.gains[a])) for a in raced.order if raced.gains[a]
    }
    tuning.tokens_per_pass = {words[arm]: trial.tokens[arm] / (trial.passes[arm] or inf) for arm in trial.tokens}
    tuning.max_tokens = trial.params.max_tokens
    tuning.near_ties, tuning.compared = trial.near_ties, trial.near_ties + trial.identical
    _choose(tuning, measured)


def _promised(trial: TuningTrial) -> float:
    """Seconds that the fewest measurements of a winner will take, at the pace so far."""
    return MIN_PAIRS * median(trial.seconds) if trial.seconds else 0.0


def _confirm(
    tuning: Tuning,
    trial: TuningTrial,
    raced: Race,
    items: Sequence[int],
    *,
    elapsed: Callable[[], float],
    budget: float,
    progress: Progress,
) -> list[Gain]:
    """Measure the best again; one that turns out to be wrong gives way to the next. After an interrupt: what there
    is.
    """
    if raced.interrupted:
        tuning.interrupted = tuning.in_search = True
        measured = [arm for arm in raced.order if raced.gains[arm]]
        tuning.best = trial.settings[measured[0]] if measured else None
        return raced.gains[measured[0]] if measured else []
    trial.hurry(MIN_PAIRS, budget - elapsed())
    for arm in list(raced.order):
        tuning.best, words = trial.settings[arm], trial.settings[arm].words(tuning.threads)
        try:
            gains, tuning.interrupted = confirm(
                arm,
                items,
                trial.pull,
                elapsed=elapsed,
                budget=budget,
                progress=lambda pairs, words=words: progress(f"measuring {words}", elapsed()),  # type: ignore[misc]
            )
            return gains
        except RejectedError as error:
            raced.rejected[arm] = str(error)
            raced.order.remove(arm)
    tuning.best = None
    return []


def _choose(tuning: Tuning, measured: Sequence[Gain]) -> None:
    """The best where it is shown to be faster than plain decoding, plain decoding where it is shown to be slower, else
    nothing: `auto` stays. Runs of the search show nothing, since they chose the setting that they flatter.
    """
    tuning.gain = interval(measured) if measured else None
    if tuning.gain is None or tuning.in_search or len(measured) < MIN_PAIRS:
        return
    if tuning.gain.low > 1.0:
        tuning.chosen = tuning.best
    elif tuning.gain.high < 1.0:
        tuning.chosen = Arm(None, tuning.threads)


def _profile(tuning: Tuning, chosen: Arm, conditions: Conditions) -> Profile:
    config = None if chosen.config is None else with_request_drafters(chosen.config)
    if config is not None and chosen.fixed:
        config["disable_by_batch_size"] = FIXED_UP_TO * tuning.batch_size + 1
    measured = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "gain": None if tuning.gain is None else asdict(tuning.gain),
        "best": None if tuning.best is None else tuning.best.words(tuning.threads),
        "prompts": tuning.prompts,
        "batch_size": tuning.batch_size,
        "max_tokens": tuning.max_tokens,
        "budget_seconds": tuning.budget,
        "seconds": round(tuning.seconds, 1),
        "interrupted": tuning.interrupted,
        "model": tuning.model,
        "memory": None if tuning.memory is None else tuning.memory["budget"],
    }
    drafts = {name: digest_of(resolve(name)) for name in chosen.drafts}
    return Profile(
        conditions=conditions, speculative_config=config, threads=chosen.threads, drafts=drafts, measured=measured
    )
