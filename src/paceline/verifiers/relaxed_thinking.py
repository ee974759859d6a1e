"""Relaxed acceptance while a reasoning model thinks: any of the likeliest tokens will do. Approximate by design.

At temperature 0, where the text is between the token that begins thoughts and the one that ends them, a draft is
accepted if it is among the target's N likeliest tokens and p(draft) >= max p - delta, with p the softmax of the logits
after all sampling rules. Elsewhere, and for the two tokens themselves, equal or reject decides. A draft that is
rejected gives way to the likeliest token, which ends the step.

The phase is that of the text up to each draft, so that it changes within a step. N = 1 is equal or reject, and so is
delta = 0 where no two tokens are equally likely. Note that delta is a difference of probabilities: where no token has
more than delta, all N are accepted.

Source: `use_relaxed_acceptance_for_thinking` of TensorRT-LLM, described in "DeepSeek R1 MTP Implementation and
Optimization" of its technical blog (N = 10, delta = 0.6 there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from paceline.errors import NumericsError
from paceline.tree import TokenTree, Verdict
from paceline.verifiers.base import ArgmaxVerifier, AtZero, Verifier, before_bad_row, chain_of, sample, verify_each
from paceline.verifiers.recursive_rejection import PlaceByPlace, probabilities_of, reject

if TYPE_CHECKING:
    from paceline.verifiers.base import Draws, Rows


class RelaxedThinking(PlaceByPlace):
    """Relaxes what is accepted in thoughts at temperature 0; above it, `rejection_sampler` decides. Chains alone.

    Args:
        relaxed_topk: N, how many of the likeliest tokens may be accepted.
        relaxed_delta: by how much less likely than the likeliest they may be.
        begin_thinking_phase_token, end_thinking_phase_token: token ids; those of DeepSeek-R1 by default.
    """

    name = "relaxed_thinking"
    chains_only = True
    decide = staticmethod(reject)

    def __init__(
        self,
        relaxed_topk: int = 1,
        relaxed_delta: float = 0.0,
        begin_thinking_phase_token: int = 128798,
        end_thinking_phase_token: int = 128799,
    ) -> None:
        self.relaxed_topk, self.relaxed_delta = relaxed_topk, relaxed_delta
        self.begin, self.end = begin_thinking_phase_token, end_thinking_phase_token

    def at_zero(self) -> ArgmaxVerifier:
        """What relaxes."""
        return AtZero(Thinking(self))

    def thinking_after(self, text: Sequence[int], before: bool = False) -> bool:
        """Whether thoughts are open behind a text; `before`: whether they were in front of it."""
        for token in reversed(text):
            if token in (self.begin, self.end):
                return token == self.begin
        return before

    def plausible(self, weights_v: torch.Tensor, token: int, depth: int) -> bool:
        """Whether a token may be accepted within thoughts; of equally likely tokens those with lower ids go first."""
        if token in (self.begin, self.end):
            return False
        p_v = probabilities_of(weights_v, depth)
        p = p_v[token]
        rank = int((p_v > p).sum()) + int((p_v[:token] == p).sum())
        return rank < self.relaxed_topk and float(p) > 0.0 and float(p_v.max() - p) <= self.relaxed_delta


class Thinking(Verifier):
    """The rule at temperature 0.

    Args:
        rule: with its parameters.
        thinking: for each sequence of a step, whether its committed text is within thoughts.
    Raises:
        CapabilityError: on a tree with branches.
    """

    name = RelaxedThinking.name
    row_by_row = True
    chains_only = True
    reads_text = True

    def __init__(self, rule: RelaxedThinking, thinking: Sequence[bool] = ()) -> None:
        self.rule, self.thinking = rule, thinking

    def after(self, texts: Sequence[Sequence[int]]) -> Thinking:
        """See `Verifier.after`."""
        return Thinking(self.rule, [self.rule.thinking_after(text) for text in texts])

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[Rows], draws: Sequence[Draws]
    ) -> list[Verdict | NumericsError]:
        """See `Verifier.verify`."""
        return verify_each(self._verdict, trees, list(zip(rows, self.thinking, strict=True)), draws)

    def _verdict(self, tree: TokenTree, judged: tuple[Rows, bool], draws: Draws) -> Verdict:
        rows_nv, thinking = judged
        path, departures = list[int](), list[int]()
        nodes = [trial.node for trial in chain_of(tree, self.name)]
        tokens = [int(tree.tokens[node]) for node in nodes]
        for place in range(len(nodes) + 1):
            weights_v = rows_nv[path[-1] + 1 if path else 0]
            try:
                best = sample(draws, place, weights_v)
            except NumericsError:
                if path:
                    return replace(before_bad_row(path, tokens[:place]), departures=tuple(departures))
                raise
            if place == len(nodes):
                break
            if tokens[place] != best:
                if not (thinking and self.rule.plausible(weights_v, tokens[place], place)):
                    break
                departures.append(place)
            thinking = self.rule.thinking_after(tokens[place : place + 1], thinking)
            path.append(nodes[place])
        return Verdict(tuple(path), tuple(tokens[: len(path)]), best, tuple(departures))
