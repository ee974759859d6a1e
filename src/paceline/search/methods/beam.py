"""Beam search: the texts with the highest sum of log-probabilities, `beam_width` of them side by side.

In every step all continuations of all beams compete; those that end are set aside, scored by the sum of their
log-probabilities over their length to the power `length_penalty`. With the same options the same texts come out as of
`generate(num_beams=...)` of transformers. Source: as there; vLLM's `beam_search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from paceline.search.base import Search, Steps
from paceline.search.branch import Branch, Found
from paceline.utils import choice, integer, need, number

Candidate = tuple[float, int, int]
"""Sum of log-probabilities, beam, token."""


class BeamSearch(Search):
    """Keeps the likeliest texts.

    Args:
        beam_width: texts side by side (alias of transformers: num_beams).
        length_penalty: the sum of log-probabilities is divided by the length to this power; above 0 it favours long
            texts.
        early_stopping: True: end as soon as there are `beam_width` ended texts; False: where the best beam, at its
            present length, is worse than all of them; "never": only where no beam could become better.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "beam"
    drops_dead_ends = keeps_spellings = keeps_beginnings = True
    words = frozenset({"early_stopping"})

    def __init__(
        self,
        beam_width: int = 4,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
    ) -> None:
        super().__init__()
        integer("beam_width", beam_width, 1, 256)
        number("length_penalty", length_penalty, -10.0, 10.0, "be in -10..10")
        if not isinstance(early_stopping, bool):
            choice("early_stopping", early_stopping, ("never",))
        self.branches = beam_width
        self.width, self.length_penalty, self.early_stopping = beam_width, float(length_penalty), early_stopping

    def steps(self, root: Branch) -> Steps[None]:
        self.alive = [root]
        while self.alive and not self.over(root.request.max_tokens):
            rows = yield self.alive
            self.choose(rows.logprobs)
        self.alive = []

    def choose(self, logprobs: torch.Tensor, handicap: torch.Tensor | None = None) -> None:
        """Go on with the best continuations.

        Args:
            logprobs: (b, v) of what may follow the beams. handicap: (v,) that each token loses in the choice.
        """
        ends = len(self.alive[0].stops.end_ids)
        enough = self.width * max(2, 1 + ends)  # among so many as there are beams do not end
        self._keep(likeliest(self.alive, logprobs, enough, handicap))

    def score(self, branch: Branch) -> float:
        return branch.logprob / float(max(1, branch.length) ** self.length_penalty)

    def over(self, most: int) -> bool:
        """Whether no beam can lead to a better text."""
        if len(self.found) < self.width:
            return False
        if self.early_stopping is True:
            return True
        best = max(self.alive, key=lambda beam: beam.logprob)  # in a group, the first is the best with its handicap
        late = self.early_stopping == "never" and self.length_penalty > 0.0
        reachable = best.logprob / float(max(1, most if late else best.length) ** self.length_penalty)
        return reachable <= min(text.score for text in self.found)

    def _keep(self, candidates: Sequence[Candidate]) -> None:
        """Set aside those of the best that end; the best that do not are the beams."""
        beams: list[Branch] = []
        for place, (total, beam, token) in enumerate(candidates):
            if place >= self.width and len(beams) == self.width:
                break
            parent = self.alive[beam]
            child = parent.child(token, total - parent.logprob)
            if not child.ended:
                beams.append(child)
            elif place < self.width:
                self.found.append(Found(child, self.score(child)))
        self.found = sorted(self.found, key=lambda text: -text.score)[: self.width]
        self.alive = beams[: self.width]


def likeliest(
    beams: Sequence[Branch], logprobs: torch.Tensor, count: int, handicap: torch.Tensor | None = None
) -> list[Candidate]:
    """The continuations with the highest sums of log-probabilities, best first; forbidden ones are none.

    Args:
        logprobs: (b, v) of the next tokens. handicap: (v,) that the sums lose in the comparison alone.
    """
    totals = (logprobs + torch.tensor([beam.logprob for beam in beams])[:, None]).flatten()
    compared = totals if handicap is None else totals - handicap.repeat(len(beams))
    best = compared.topk(min(count, len(totals))).indices
    size = logprobs.shape[1]
    pairs = zip(totals[best].tolist(), best.tolist(), strict=True)
    return [(value, place // size, place % size) for value, place in pairs if value > float("-inf")]


class DiverseBeamSearch(Search):
    """Beam search in groups that keep away from each other's tokens.

    In every step the groups choose one after the other; a token loses `diversity_penalty` for every beam of the groups
    before that has chosen it in the same step (Hamming diversity). The penalty counts in the choice alone: texts are
    ranked by their own log-probabilities, as in `BeamSearch`. Beams that end do not count. Source: Diverse Beam Search:
    Decoding Diverse Solutions from Neural Sequence Models (arXiv:1610.02424).

    Args:
        beam_width: texts side by side, of all groups together. num_beam_groups: must divide it (default: a beam each).
        diversity_penalty: nats; 0.2 to 0.8 as published.
        length_penalty: as in `BeamSearch`.
    Raises:
        ConfigError: a value outside its range.
    """

    name = "diverse_beam"
    drops_dead_ends = keeps_spellings = True

    def __init__(
        self,
        beam_width: int = 4,
        num_beam_groups: int | None = None,
        diversity_penalty: float = 0.5,
        length_penalty: float = 1.0,
    ) -> None:
        super().__init__()
        integer("beam_width", beam_width, 1, 256)
        groups = beam_width if num_beam_groups is None else num_beam_groups
        integer("num_beam_groups", groups, 1, beam_width)
        need(beam_width % groups == 0, "num_beam_groups", f"divide beam_width ({beam_width})", groups)
        number("diversity_penalty", diversity_penalty, 0.0, 1e6, "be in 0..1000000")
        self.penalty, self.branches = float(diversity_penalty), beam_width
        self.groups = [BeamSearch(beam_width // groups, length_penalty) for _ in range(groups)]

    def steps(self, root: Branch) -> Steps[None]:
        for group in self.groups:
            group.alive = [root]
        going = self.groups
        while going := [group for group in going if group.alive and not group.over(root.request.max_tokens)]:
            self.alive = [beam for group in going for beam in group.alive]
            rows = yield self.alive
            parts = rows.logprobs.split([len(group.alive) for group in going])
            used = torch.zeros(rows.logprobs.shape[1])
            for group, logprobs in zip(going, parts, strict=True):
                group.choose(logprobs, self.penalty * used)
                for beam in group.alive:
                    used[beam.token] += 1.0
            self.found = [text for group in self.groups for text in group.found]
        self.alive = []

    def score(self, branch: Branch) -> float:
        return self.groups[0].score(branch)
