"""DEL: the exit layer and the length of a self-draft are chosen anew as the text goes on.

A length d from exit l brings (1 - a^(d+1)) / (1 - a) tokens where a is the chance that l agrees with the target; the
exit and length with the most tokens per layer run are chosen.

At a verified position every layer's state, through the final norm and the head, says what that exit would have drafted
there: its *shadow token*. Positions behind the first rejected token follow a text that is not the target's, and do not
count. Above temperature 0 the overlap of both distributions counts as the match. Looking at all exits costs a head for
each; so it is done at growing distances, and in between the verdicts tell of the exit in use. They are gathered, and
the choice is made anew after every few.

Source: DEL: Context-aware dynamic exit layer for efficient self-speculative decoding (arXiv:2504.05598). The paper
leaves open how its averages start and decay and how the threshold of the dynamic draft exit comes about; what is done
here is noted at the options.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import SampleMethod
from paceline.drafters.self.base import DraftPlan, SelfDrafter, SelfState
from paceline.errors import ConfigError
from paceline.models import LayerPlan
from paceline.tree import EMPTY_TREE, Budget, Scores, TokenTree, Verdict
from paceline.utils import integer, items, need, number

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

PRIOR = 8.0
"""Positions that what is known of other texts counts for."""
ENOUGH = 2.0
"""Confidences of right and of wrong tokens from which on a threshold is drawn between them."""


def best_exit(rates: Array, exits: Counts, layers: int, most: int) -> tuple[int, int]:
    """The exit and length with the most expected tokens per layer run.

    A drafted token costs its exit's, a verification all once.

    Args:
        rates: (n,) chance of each exit to agree with the target. exits: (n,) layers of each. layers: of the target.
        most: longest.
    Returns:
        Index of the exit, the earlier of equals; length, from 1.
    """
    lengths = np.arange(1, most + 1)
    gains = (1.0 + np.cumsum(rates[:, None] ** lengths, axis=1)) / (layers + exits[:, None] * lengths)
    exit_index, position = divmod(int((gains >= gains.max() * (1.0 - 1e-9)).argmax()), most)
    return exit_index, 1 + position


class ExitRecord:
    """Acceptance and confidence of each exit on one text, recent rounds counting more.

    Args:
        known: (n,) chances on other texts of the same tenant.
        weight: positions that these count for. decay: weight of a round against the one after it.

    Attributes:
        matched, valid: (n,) positions at which each exit was right, and all that count, recent ones more.
    """

    __slots__ = ("_sure", "_weight", "decay", "known", "matched", "valid")

    def __init__(self, known: Array, weight: float, decay: float) -> None:
        self.known, self._weight, self.decay = known, weight, decay
        self.matched, self.valid = np.zeros(len(known)), np.zeros(len(known))
        self._sure = [(0.0, 0.0, 0.0, 0.0)] * len(
            known
        )  # sum and number of confidences of right tokens, then of wrong ones

    @property
    def rates(self) -> Array:
        """(n,) chance that each exit agrees with the target."""
        rates: Array = (self.matched + self._weight * self.known) / (self.valid + self._weight)
        return rates

    def add_all(self, matches: Array, positions: int) -> None:
        """A round in which every exit was looked at: (n,) expected matches at so many positions."""
        self.matched = self.matched * self.decay + matches
        self.valid = self.valid * self.decay + positions

    def add(self, exit_index: int, rounds: Sequence[tuple[int, int]]) -> None:
        """Rounds that tell of one exit alone: of each, the matches and the positions."""
        matched, valid, decay = float(self.matched[exit_index]), float(self.valid[exit_index]), self.decay
        for matches, positions in rounds:
            matched, valid = matched * decay + matches, valid * decay + positions
        self.matched[exit_index], self.valid[exit_index] = matched, valid

    def note_confidences(self, exit_index: int, right: Sequence[float], wrong: Sequence[float]) -> None:
        """Confidences of drafted tokens that were accepted, and of one that was not."""
        a, b, c, d = self._sure[exit_index]
        kept = self.decay
        self._sure[exit_index] = (
            a * kept + sum(right),
            b * kept + len(right),
            c * kept + sum(wrong),
            d * kept + len(wrong),
        )

    def threshold(self, exit_index: int) -> float:
        """The confidence halfway between that of right and of wrong tokens, below which a draft ends.

        0 while too few are known.
        """
        right, rights, wrong, wrongs = self._sure[exit_index]
        if rights < ENOUGH or wrongs < ENOUGH:
            return 0.0
        return min(0.5 * (right / rights + wrong / wrongs), 1.0)


MAX_DRAFT = 12
"""Tokens of the longest draft where the user sets no number."""
LONGEST_GAP = 256
"""Rounds between two looks at all exits, at most."""
VERDICTS_PER_CHOICE = 16
"""Verdicts after which the choice is made anew."""
GAP_GROWTH = 4
"""How much longer each distance between two looks is than the one before."""
START = 2.0
"""Positions that a first estimate counts for where nothing is known: an exit is right as often as its share of the
layers says.
"""

TENANTS = 1024
"""Tenants that are remembered."""

NOBODY: set[int] = set()


class DelState(SelfState):
    """Keeps one sequence, and which exit drafts for it.

    Attributes:
        record: what is known of the exits on this text. exit: index of the one in use. draft_plan: how it is used.
        rounds: so far. look: the round in which all exits are looked at next. gap: rounds from there to the one after;
            both go on from text to text of a tenant.
        proposed: the last chain. scored: chains from this exit that were scored since the last choice, and how many of
            their tokens were accepted.
    """

    __slots__ = ("draft_plan", "exit", "gap", "look", "proposed", "record", "rounds", "scored")

    def __init__(self, context: Context, record: ExitRecord, draft_plan: DraftPlan, look: int, gap: int) -> None:
        super().__init__(context)
        self.record, self.exit, self.draft_plan = record, 0, draft_plan
        self.rounds, self.look, self.gap = 0, look, gap
        self.proposed: TokenTree | None = None
        self.scored: list[tuple[TokenTree, int]] = []


class DynamicExitDrafter(SelfDrafter[DelState]):
    """Drafts from the exit and over the length that promise most tokens per layer run.

    Args:
        exit_layers: exits to choose from, each from 1 to one less than the target has layers; None is all of them.
        dynamic_draft_exit: end a draft behind a token whose confidence is nearer to that of recently rejected tokens
            than to that of accepted ones.
        decay: weight of a round against the one after it, in the averages of acceptance and confidence.
        shadow_every: rounds between two looks at all exits, 1 as in the paper; None lets the distance grow, for a look
            takes as long as a step where there are many exits, and verification cannot resume in a round with one.
        num_speculative_tokens: most tokens to draft; None is 12, within the budget.
        draft_sample_method: above temperature 0, "probabilistic" draws from the early exit's distribution, "greedy"
            takes its most likely tokens. By default it draws, but for requests with a seed of their own.
        resume_verification: let scoring go on behind the exit, with its states and the keys and values that are there
            already, but in steps in which all exits are looked at; by default where a measurement finds that faster.
    Raises:
        ConfigError: a layer that the target does not have, a value outside its range.
        CapabilityError: a target whose layers cannot be run alone.
    """

    name = "del"
    keeps_trajectory = True
    shares_state = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        exit_layers: Sequence[int] | None = None,
        dynamic_draft_exit: bool = True,
        decay: float = 0.95,
        shadow_every: int | None = None,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
        resume_verification: bool | None = None,
    ) -> None:
        super().__init__(
            args,
            num_speculative_tokens=num_speculative_tokens,
            draft_sample_method=draft_sample_method,
            resume_verification=resume_verification,
        )
        layers = self.target.info.num_layers
        exits = range(1, layers) if exit_layers is None else items("exit_layers", exit_layers, "be a list of layers")
        for layer in exits:
            integer("each of exit_layers", layer, 1, layers - 1)
        need(isinstance(dynamic_draft_exit, bool), "dynamic_draft_exit", "be True or False", dynamic_draft_exit)
        number("decay", decay, 0.0, 1.0, "be in 0..1")
        if shadow_every is not None:
            integer("shadow_every", shadow_every, 1)
        self.exits = sorted(set(exits))
        if not self.exits:
            raise ConfigError(f"exit_layers must name at least one layer of 1..{layers - 1}, got none")
        self.plans = [LayerPlan(stop=layer) for layer in self.exits]
        self.most = MAX_DRAFT if num_speculative_tokens is None else max(num_speculative_tokens, 1)
        self._ends, self.decay, self._every = dynamic_draft_exit, decay, shadow_every
        self.known: dict[
            str, tuple[Array, int, int]
        ] = {}  # rates, rounds to the next look, and from there to the one after
        self._looking: list[DelState] = []

    @property
    def score_taps(self) -> Sequence[int]:
        """The exits' last layers, where somebody looks at all of them in this step."""
        return [layer - 1 for layer in self.exits] if self._looking else ()

    def propose(
        self, states: Sequence[DelState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        trees = super().propose(states, budgets, so_far)
        self._looking = []
        for state, tree in zip(states, trees, strict=True):
            state.proposed = tree
            if state.rounds >= state.look and tree is not EMPTY_TREE:
                self._looking.append(state)
            state.rounds += 1
        return trees

    def observe(
        self, states: Sequence[DelState], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        """Learn how right each exit was, and choose again."""
        looking = self._looked_at(scores)
        for i, (state, tree, verdict) in enumerate(zip(states, trees, verdicts, strict=True)):
            proposed, state.proposed = state.proposed, None
            mine = (
                proposed is not None
                and len(tree.tokens) > 0
                and (tree is proposed or np.array_equal(tree.tokens, proposed.tokens))
            )
            if scores is not None and id(state) in looking:
                self.learn(state, verdict, scores, i, tree if mine else None)
            elif mine:
                state.scored.append((tree, len(verdict.path)))
                if len(state.scored) >= VERDICTS_PER_CHOICE:
                    self._choose(state)

    def _looked_at(self, scores: Scores | None) -> set[int]:
        """Identities of the states whose exits are all looked at now; none is from here on."""
        looking, self._looking = self._looking, []
        if not looking or scores is None or any(layer - 1 not in scores.taps for layer in self.exits):
            return NOBODY
        return {id(state) for state in looking}

    def fork(self, state: DelState, context: Context) -> DelState:
        return self._state(context)

    def end(self, states: Sequence[DelState]) -> None:
        """What the texts taught is what the tenant's next ones begin with."""
        gone = {id(state) for state in states}
        self._looking = [state for state in self._looking if id(state) not in gone]
        for state in states:
            self._learn(state)
            if float(state.record.valid.max()) > 0:
                self.known.pop(state.context.tenant, None)
                self.known[state.context.tenant] = (state.record.rates, max(state.look - state.rounds, 0), state.gap)
            if len(self.known) > TENANTS:
                del self.known[next(iter(self.known))]

    def _state(self, context: Context) -> DelState:
        """A text begins with what is known of the tenant's others."""
        new = np.array(self.exits) / self.target.info.num_layers, 0, 2
        rates, look, gap = self.known.get(context.tenant, new)
        record = ExitRecord(rates, PRIOR if rates is not new[0] else START, self.decay)
        state = DelState(context, record, DraftPlan(self.plans[0], 0), 0 if self._every else look, gap)
        self._choose(state)
        return state

    def _usual(self) -> LayerPlan:
        return self.plans[len(self.plans) // 2]

    def draft_plan(self, state: DelState) -> DraftPlan:
        return state.draft_plan

    def _choose(self, state: DelState) -> None:
        self._learn(state)
        state.exit, steps = best_exit(state.record.rates, np.array(self.exits), self.target.info.num_layers, self.most)
        state.draft_plan = DraftPlan(
            self.plans[state.exit], steps, state.record.threshold(state.exit) if self._ends else 0.0
        )

    def _learn(self, state: DelState) -> None:
        """What the verdicts say of the exit in use."""
        scored, state.scored = state.scored, []
        rounds = [(right, self._note_confidences(state, tree, right)) for tree, right in scored]
        state.record.add(state.exit, rounds)

    @staticmethod
    def _note_confidences(state: DelState, tree: TokenTree, right: int) -> int:
        """Note the confidences of a chain's tokens that were put to the test; how many they are."""
        tested = tree.confidence[: right + 1].tolist()
        state.record.note_confidences(state.exit, tested[:right], tested[right:])
        return len(tested)

    def learn(self, state: DelState, verdict: Verdict, scores: Scores, index: int, proposed: TokenTree | None) -> None:
        """Shadow tokens of all exits at the positions that follow the target's own text; then choose again. `proposed`:
        the tree that was scored, where it is what this drafter proposed.
        """
        first = scores.rows[index]
        rows = torch.tensor([first, *(first + 1 + node for node in verdict.path)], device=scores.logits.device)
        states = torch.cat([scores.taps[layer - 1][rows] for layer in self.exits])
        if self.draws(state.context):
            matches = self._overlaps(state, states, scores.logits[rows])
        else:
            own_tokens = verdict.tokens if len(verdict.tokens) == len(rows) else scores.logits[rows].argmax(-1).tolist()
            matches = (self.shadows(states) == np.array(own_tokens)).sum(1).astype(np.float64)
        self._learn(state)
        if proposed is not None:
            self._note_confidences(state, proposed, len(verdict.path))
        state.record.add_all(matches, len(rows))
        self._choose(state)
        state.look, state.gap = state.rounds + (self._every or state.gap) - 1, min(GAP_GROWTH * state.gap, LONGEST_GAP)

    def shadows(self, states: torch.Tensor) -> npt.NDArray[np.int64]:
        """(n, positions) tokens that each exit would have drafted, from their states one exit after the other."""
        return np.array(self.drafts.best(states), np.int64).reshape(len(self.exits), -1)

    def _overlaps(self, state: DelState, states: torch.Tensor, target: torch.Tensor) -> Array:
        """(n,) expected matches of each exit with the target (positions, v) over all positions."""
        heat = state.context.temperature
        distributions = torch.softmax(self.drafts.head(states).float() / heat, -1).view(len(self.exits), *target.shape)
        overlaps: Array = (
            torch.minimum(distributions, torch.softmax(target.float() / heat, -1)).sum((1, 2)).double().cpu().numpy()
        )
        return overlaps
