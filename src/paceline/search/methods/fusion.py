"""Two models write one text: beam search by the sum of what both think of it, compared as bytes.

The engine's model proposes (a recogniser's part); a second model with any tokenizer, or a function such as a
recogniser's score, is asked about every proposal.

Source: Let's Fuse Step by Step: Generative Fusion Decoding (arXiv:2405.14259).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from paceline.checkpoints import token_bytes
from paceline.search.base import Search, Steps, mean_logprob
from paceline.search.branch import Branch, Found
from paceline.search.named import named, numbers
from paceline.search.scoring import ByteScorer
from paceline.utils import integer, need, number

SPREAD: Final = 20
"""The search ends where the beams differ in length by more tokens."""

Scorer = Callable[[Sequence[bytes]], Sequence[float]]


class GenerativeFusion(Search):
    """Beam search by (1 - weight) * log P / tokens of the model + weight * log P / tokens of the second, each in its
    own tokens.

    The second model's P of a text's bytes also counts the tokens that go on over their end, so that a text is not
    punished for ending within one; a byte that it has in no token counts as one that comes up by chance. An end token
    is only taken where it is the likeliest. In the authors' program the second model scores a text without its last
    token, one pass for all continuations; here it scores all of it.

    Args:
        model: folder or hub id of the second model; its tokenizer may be another.
        scorer: in its place, of the bytes of some texts behind the prompt, the log-probability of each (shallow
            fusion): a callable or "module:function". It is divided by the text's tokens.
        weight: of the second, 0..1.
        beam_width: texts side by side. candidates: continuations that are tried of each.
        model_prompt: the second model's prompt; by default the text of the prompt.
        model_temperature: of the second model's probabilities (published for speech: 1.7).
    Raises:
        ConfigError: a value outside its range, neither or both of `model` and `scorer`.
    """

    name = "gfd"
    needs_code = True
    drops_dead_ends = keeps_beginnings = True

    def __init__(
        self,
        model: str | None = None,
        scorer: Scorer | str | None = None,
        *,
        weight: float = 0.2,
        beam_width: int = 5,
        candidates: int = 5,
        model_prompt: str | None = None,
        model_temperature: float = 1.0,
    ) -> None:
        super().__init__()
        need((model is None) != (scorer is None), "model", "be given, or else scorer", model)
        need(model is None or isinstance(model, str), "model", "be a folder or hub id", model)
        need(model_prompt is None or isinstance(model_prompt, str), "model_prompt", "be a string", model_prompt)
        number("weight", weight, 0.0, 1.0, "be in 0..1")
        number("model_temperature", model_temperature, 0.01, 100.0, "be in 0.01..100")
        integer("beam_width", beam_width, 1, 256)
        integer("candidates", candidates, 1, 256)
        self.model, self.scorer = model, None if scorer is None else named("scorer", scorer)
        self.weight, self.width, self.candidates = weight, beam_width, candidates
        self.branches = beam_width
        self.model_prompt, self.temperature = model_prompt, model_temperature
        self._scores: dict[Branch, float] = {}
        self._second: ByteScorer | None = None

    def steps(self, root: Branch) -> Steps[None]:
        if self.model is not None:
            self._second = self._opened(self.model, root)
        try:
            yield from self._beams(root)
        finally:
            if self._second is not None:
                self._second.close()

    def _beams(self, root: Branch) -> Steps[None]:
        written = token_bytes(self.tokenizer)
        texts, beams = {root: b""}, [root]
        self.alive = beams
        while self.alive:
            rows = yield self.alive
            children: list[Branch] = []
            for parent, row in zip(self.alive, rows.logprobs, strict=True):
                for child in self._children(parent, row):
                    data = written[child.token] if child.token < len(written) else None
                    texts[child] = texts[parent] + (data or b"")
                    children.append(child)
            if not children:  # no token is allowed behind any of them
                self.alive = []
                return
            self._rate(children, texts)
            pool = [*(beam for beam in beams if beam.ended), *children]
            beams = sorted(pool, key=lambda beam: -self._scores[beam])[: self.width]
            texts = {beam: texts[beam] for beam in beams}
            self.found = [Found(beam, self._scores[beam]) for beam in beams if beam.ended]
            lengths = [beam.length for beam in beams]
            self.alive = [beam for beam in beams if not beam.ended] if max(lengths) - min(lengths) <= SPREAD else []
        self.alive, self.found = [], [Found(beam, self._scores[beam]) for beam in beams if beam.length]

    def score(self, branch: Branch) -> float:
        return self._scores[branch]

    def _opened(self, model: str, root: Branch) -> ByteScorer:
        request, tokenizer = root.request, self.models.tokenizer_of(model)
        prompt = self.model_prompt
        if prompt is None:
            prompt = self.tokenizer.decode(request.prompt_ids) if request.prompt is None else request.prompt
        runner = self.models.open(model, other_tokens=True)
        return ByteScorer(runner, tokenizer, tokenizer.encode(prompt), self.temperature)

    def _children(self, branch: Branch, logprobs: torch.Tensor) -> list[Branch]:
        """The likeliest continuations: the end alone where it is the likeliest, else no end."""
        ends = branch.stops.end_ids
        top = logprobs.topk(min(len(logprobs), self.candidates + len(ends)))
        pairs = [(int(token), float(value)) for value, token in zip(*top, strict=True) if value > float("-inf")]
        if not pairs:
            return []
        if pairs[0][0] in ends:
            return [branch.child(*pairs[0])]
        return [
            branch.child(*pair) for pair in [choice for choice in pairs if choice[0] not in ends][: self.candidates]
        ]

    def _rate(self, branches: Sequence[Branch], texts: dict[Branch, bytes]) -> None:
        """Score new texts."""
        asked = [texts[branch] for branch in branches]
        if self._second is not None:
            second = [total / max(1, size) for total, size in self._second.scores(asked)]
        else:
            assert self.scorer is not None
            judged = numbers("scorer", self.scorer(asked), len(asked))
            second = [score / branch.length for score, branch in zip(judged, branches, strict=True)]
        for branch, other in zip(branches, second, strict=True):
            likelihood = (1 - self.weight) * mean_logprob(branch)
            self._scores[branch] = likelihood + self.weight * other if self.weight else likelihood
