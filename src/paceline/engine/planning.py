"""The life of a plan: it is asked for, holds for its steps, and what came of it is told to the controller.

An error of the controller, or of a function in its budgets, ends its drafting, not a request: decoding is plain from
then on. Errors of others pass."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from paceline.controllers import Controller, Outcome, Plan, StepTimes
from paceline.engine.drafter_set import Proposals
from paceline.engine.parts import EngineParts
from paceline.engine.sequence import DecodingSequence
from paceline.errors import NumericsError
from paceline.tree import EMPTY_TREE, TokenTree, Verdict
from paceline.utils import described

logger = logging.getLogger("paceline.engine")
T = TypeVar("T")


class PlainController(Controller):
    """Takes the place of a controller that failed: nothing is drafted."""

    name = "plain"

    def explain(self, index: int | None = None) -> str:
        """Why."""
        return "Nothing is drafted any more: the controller failed (see the log)."


class Planner:
    """Calls the controller of an engine.

    A plan ends with its last step, where a sequence joins or ends, or where `end` is called; the controller learns what
    came of it once, before the next plan and before it is told that a sequence has ended.

    Args:
        parts: of the engine, whose controller it is.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._plan = Plan.nothing(0)
        self._keys: list[int] = []  # of the sequences that the plan is for, in its order
        self._left = 0  # steps that it still holds for
        self._outcome: Outcome | None = None  # of its steps so far

    def use(self, controller: Controller) -> None:
        """Let another controller decide from the next step on; the last one learns what came of its plan."""
        self.end()
        self._parts.controller = controller

    def plan(self, batch: Sequence[DecodingSequence]) -> Plan:
        """The plan for the next step: the last one while it holds and the same sequences run, else a new one."""
        keys = [sequence.key for sequence in batch]
        if self._left < 1 or keys != self._keys:
            self.end()
            plan = self._guarded("plan", self._asked, batch)
            self._plan, self._keys = Plan.nothing(len(batch)) if plan is None else plan, keys
            self._left = self._plan.steps
        self._left -= 1
        return self._plan

    def _asked(self, batch: Sequence[DecodingSequence]) -> Plan:
        """A new plan, which has budgets for every sequence, and for every drafter or none.

        Raises:
            ValueError: it has not.
        """
        plan, drafters = self._parts.controller.plan([sequence.signal() for sequence in batch]), self._drafters
        if len(plan.budgets) != len(batch):
            raise ValueError(f"budgets for {len(plan.budgets)} sequences instead of {len(batch)}")
        for budgets in plan.budgets:
            if drafters and len(budgets) not in (0, drafters):
                raise ValueError(f"budgets for {len(budgets)} drafters instead of {drafters}")
        return plan

    @property
    def _drafters(self) -> int:
        return len(self._parts.drafter_set.drafters)

    def select(self, proposals: Proposals) -> Sequence[TokenTree]:
        """The proposed trees as the controller cuts them; empty ones where it fails, now or while they were drafted."""
        if proposals.plan_error is not None:
            self._fail("bound a draft", proposals.plan_error)
        elif any(map(len, proposals.trees)):
            trees = self._guarded("select", self._selected, proposals.trees)
            if trees is not None:
                return trees
        return [EMPTY_TREE] * len(proposals.trees)

    def _selected(self, proposed: Sequence[TokenTree]) -> Sequence[TokenTree]:
        trees = self._parts.controller.select(proposed)
        if len(trees) != len(proposed):
            raise ValueError(f"{len(trees)} trees instead of {len(proposed)}")
        return trees

    def observe(
        self,
        batch: Sequence[DecodingSequence],
        proposed: Sequence[TokenTree],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict | NumericsError],
        *,
        times: StepTimes,
        seconds: float,
    ) -> None:
        """Add a step to what came of the plan, which ends with its last step.

        Args:
            times: of the step's parts. seconds: of all of it, with planning and learning.
        """
        sound = [verdict for verdict in verdicts if isinstance(verdict, Verdict)]
        if len(sound) < len(verdicts):
            self._discard()  # nothing to learn from
        else:
            tokens = sum(len(verdict.tokens) for verdict in sound)
            outcome = Outcome(1, tokens, seconds, proposed, trees, sound, times)
            self._outcome = outcome if self._outcome is None else outcome.merged(self._outcome)
            if self._left < 1:
                self.end()
        if logger.isEnabledFor(logging.DEBUG):
            self._guarded("explain", self._explained, batch)

    def _explained(self, batch: Sequence[DecodingSequence]) -> None:
        for index, sequence in enumerate(batch):
            words = self._parts.controller.explain(index).replace("\n", " ")
            logger.debug("request %s: %s", sequence.request.id, words)

    def end(self) -> None:
        """The plan is over: let the controller learn what came of it."""
        outcome = self._outcome
        self._discard()
        if outcome is not None:
            self._guarded("observe", self._parts.controller.observe, outcome)

    def forget(self, sequences: Sequence[DecodingSequence], *, spoiled: bool = False) -> None:
        """These sequences have ended, and with them the plan.

        Args:
            spoiled: a step of theirs was cut short, so that nothing is known of what came of the plan.
        """
        if spoiled:
            self._discard()
        if sequences:
            self.end()
        for sequence in sequences:
            self._guarded("forget", self._parts.controller.forget, sequence.key)

    def _discard(self) -> None:
        self._left, self._outcome = 0, None

    def _guarded(self, what: str, call: Callable[..., T], *arguments: Any) -> T | None:
        """What a call of the controller returns; None where it raises, and from then on nothing is drafted."""
        try:
            return call(*arguments)
        except Exception as error:
            self._fail(what, error)
            return None

    def _fail(self, what: str, error: Exception) -> None:
        """The controller has raised an error: nothing is drafted from now on."""
        name, why = self._parts.controller.name, described(error)
        logger.warning("controller %s failed to %s (%s); decoding goes on without drafts", name, what, why)
        logger.debug("the error of the controller", exc_info=error)
        self._parts.controller = PlainController()
        self._discard()
