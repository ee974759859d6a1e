"""Judge decoding: a rejected draft is kept where a linear head on the target's states says that it is good.
Approximate by design.

Each draft of a chain is first judged by the exact rule: at temperature 0 equal or reject, above it sample-and-match
for points and rejection for draws. A draft that it rejects is kept all the same if sigmoid(w . h + b) > delta, with h
the target's state of its last layer, before the final norm, at the draft's own position: it has read the draft. The
first draft that fails both gives way to the token of the exact rule, which ends the step. What the request's rules
forbid is never kept. delta = 1 is the exact rule, delta = 0 keeps all drafts.

The head is trained on right answers and on answers with errors whose places are known (`training.judge`). It belongs to
one checkpoint; quality depends on the draft model from then on. Source: Judge Decoding: Faster Speculative Sampling
Requires Going Beyond Model Alignment (arXiv:2501.19309).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import CapabilityError, ConfigError, NumericsError
from paceline.models.heads import StateJudge
from paceline.tree import TokenTree, Verdict
from paceline.verifiers.base import ArgmaxVerifier, AtZero, Verifier, verify_each
from paceline.verifiers.kept_rejections import JudgedChain, walk_past

if TYPE_CHECKING:
    import torch

    from paceline.checkpoints import Tokenizer
    from paceline.models import Runner
    from paceline.verifiers.base import Draws, Rows


class Judge(Verifier):
    """Keeps rejected drafts that a trained head finds good, at temperature 0 too; chains alone.

    Args:
        judge_model: folder or hub id of the head, as `paceline train judge` writes it.
        judge_threshold: delta, the chance from which on a draft is good enough.
    Raises:
        CapabilityError: on a tree with branches, or a target without states.
        CheckpointError: a head of another model.
    """

    name = "judge"
    row_by_row = True
    chains_only = True

    def __init__(self, judge_model: str | None = None, judge_threshold: float = 0.5) -> None:
        self.judge_model, self.judge_threshold = judge_model, judge_threshold
        self.head: StateJudge | None = None
        self._states: Sequence[torch.Tensor] = ()

    def prepare(self, runner: Runner, tokenizer: Tokenizer | None) -> None:
        """See `Verifier.prepare`."""
        if not isinstance(self.judge_model, str):
            raise ConfigError(
                "judge_model must be the folder of a head that `paceline train judge` has written, got nothing"
            )
        fingerprint = str if tokenizer is None else tokenizer.fingerprint
        self.use(StateJudge.read(self.judge_model, runner, tokenizer=fingerprint), runner.info.num_layers)

    def use(self, head: StateJudge, num_layers: int) -> None:
        """Judge by this head of a model of so many layers."""
        self.head, self.taps = head, (num_layers - 1,)

    def seeing(self, states: Sequence[torch.Tensor]) -> Judge:
        """See `Verifier.seeing`."""
        found = copy(self)
        found._states = states
        return found

    def at_zero(self) -> ArgmaxVerifier:
        """The same rule, judged against the likeliest tokens."""
        return AtZero(self)

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[Rows], draws: Sequence[Draws]
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`."""
        return verify_each(self._verdict, trees, list(zip(rows, self._states, strict=True)), draws)

    def _verdict(self, tree: TokenTree, judged: tuple[Rows, torch.Tensor], draws: Draws) -> Verdict:
        if self.head is None:
            raise CapabilityError("acceptance_method 'judge' has no head; give judge_model")
        rows_nv, states_nd = judged
        keeps = Keeps(self.head.logits(states_nd[1:]).tolist(), log_odds(self.judge_threshold))
        return walk_past(self.name, tree, rows_nv, draws, keeps)


@dataclass(frozen=True, slots=True)
class Keeps:
    """Whether rejected drafts are good enough.

    Attributes:
        odds: log-odds of each node. least: above which a draft is kept.
    """

    odds: Sequence[float]
    least: float

    def __call__(self, chain: JudgedChain, place: int) -> bool:
        node = chain.trials[place].node
        good = node < len(self.odds) and self.odds[node] > self.least  # the last may have come while others were scored
        return good and chain.possible(place) is not None


def log_odds(chance: float) -> float:
    """Of a probability, infinite at 0 and 1."""
    if chance <= 0.0:
        return -math.inf
    return math.inf if chance >= 1.0 else math.log(chance / (1.0 - chance))
