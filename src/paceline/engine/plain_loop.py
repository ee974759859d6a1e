"""Plain decoding in a few lines: the oracle that the loop must agree with, whatever is drafted.

Nothing is drafted, planned, timed, shared or stopped by text. The rest is the same: the rules of a request, the noise
of its seed at each position, the end tokens. Only tests use it; they compare token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.request import Request
from paceline.models import EncodesInputs, Runner, SequenceCache
from paceline.sampling import KeyedDraws, Rules, draw_seed
from paceline.tree import EMPTY_TREE


def decode_plainly(runner: Runner, requests: Sequence[Request], eos_ids: Sequence[int]) -> list[list[list[int]]]:
    """Token ids of every output of every request, decoded side by side.

    Args:
        requests: checked (`Engine.check`) and not begun.
        eos_ids: end tokens of the checkpoint.
    """
    texts = [[PlainText(request, i, eos_ids, runner) for i in range(request.params.n)] for request in requests]
    while going := [text for outputs in texts for text in outputs if not text.ended]:
        caches = [text.cache for text in going]
        scores = runner.score(caches, [text.tokens[-1] for text in going], [EMPTY_TREE] * len(going))
        for i, text in enumerate(going):
            text.push(scores.of(i))
        runner.commit(caches, [()] * len(going))
    for text in [text for outputs in texts for text in outputs]:
        runner.release(text.cache)
    return [[text.output for text in outputs] for outputs in texts]


class PlainText:
    """One output of a request, whose prompt is in the cache, all but the last token."""

    def __init__(self, request: Request, index: int, eos_ids: Sequence[int], runner: Runner) -> None:
        assert request.rules is not None
        self.tokens = list(request.prompt_ids)
        self.cache: SequenceCache = runner.open(len(self.tokens), request.inputs)
        if isinstance(runner, EncodesInputs):
            runner.encode([self.cache])
        if len(self.tokens) > 1:
            runner.extend([self.cache], [self.tokens[:-1]])
        self._rules: Rules = request.rules.fork()
        self._greedy, self._seed = request.params.greedy, draw_seed(request.seed, index)
        self._ends = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else eos_ids)}
        self._prompt, self._most = len(self.tokens), request.max_tokens
        self.ended = False

    def push(self, logits_1v: torch.Tensor) -> None:
        """Add the token that the model's logits give."""
        row_v = self._rules.apply(logits_1v, EMPTY_TREE)[0]
        draws = KeyedDraws(self._seed, len(self.tokens))
        token = int(row_v.argmax()) if self._greedy else draws.gumbel(0, row_v)
        self._rules.advance([token])
        self.tokens.append(token)
        self.ended = token in self._ends or len(self.output) == self._most

    @property
    def output(self) -> list[int]:
        return self.tokens[self._prompt :]
