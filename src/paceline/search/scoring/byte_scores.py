"""How probable a model finds strings of bytes, whatever its tokens: of another model's text, say.

A string of bytes b is spelled in the model's tokens t_1 ... t_n, and

    P(b) = P(t_1 ... t_n) + sum over i of P(t_1 ... t_(i-1)) * sum over v of P(v | t_1 ... t_(i-1))

where v are the tokens that begin with the bytes of t_i ... t_n and go on. So the end of b may lie within a token that
the model has yet to finish. Other ways to spell b are left out. A byte that the model cannot write, because it is in
none of its tokens there, counts as one token that comes up by chance, once in as many as there are; the rest is read as
if it were not there. So a text with a sign that only the first model knows is judged by all others.

Source: Let's Fuse Step by Step: Generative Fusion Decoding (arXiv:2405.14259).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING

import torch

from paceline.checkpoints import BYTE, encoder_of, token_bytes, whole_characters
from paceline.config import SamplingParams
from paceline.engine import Request, StopChecker
from paceline.errors import NumericsError, PromptError
from paceline.sampling import Rules
from paceline.search.branch import Branch, Origin
from paceline.search.forest import Forest

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.models import Runner


class ByteVocabulary:
    """The tokens of a vocabulary by their bytes; of several with the same, one: the lowest that is no lonely byte.

    Args:
        size: ids lie below it.
    Attributes:
        written: bytes of each id, None of special ones. longest: bytes of the longest.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.written = token_bytes(tokenizer)[:size]
        named, id_of = tokenizer.tokens(), dict[bytes, int]()
        texts = [index for index, data in enumerate(self.written) if data]
        for index in sorted(texts, key=lambda index: (BYTE.fullmatch(named[index]) is not None, index)):
            id_of.setdefault(self.written[index] or b"", index)
        self._id_of, self._sorted = id_of, sorted(id_of)
        self._ids = torch.tensor([id_of[text] for text in self._sorted], dtype=torch.int64)
        self._encode = encoder_of(tokenizer)
        self.longest = max(map(len, id_of))

    def longer(self, beginning: bytes) -> torch.Tensor:
        """Ids of the tokens that begin so and go on."""
        end = beginning + b"\xff" * self.longest
        return self._ids[bisect_right(self._sorted, beginning) : bisect_right(self._sorted, end)]

    def spelled(self, data: bytes) -> tuple[list[int], bytes]:
        """Tokens of a text's bytes, and the bytes at its end with which tokens begin but that none has alone; without
        those, inside or at the end, of which no token can be made.
        """
        size = whole_characters(data)
        tokens = self._encode(data[:size].decode("utf-8", "replace")) if size else []
        known = all(token < len(self.written) for token in tokens)
        if not known or b"".join(self.written[token] or b"" for token in tokens) != data[:size]:
            tokens, size = [], 0
        while size < len(data):
            ends = range(min(len(data), size + self.longest), size, -1)
            end = next((stop for stop in ends if data[size:stop] in self._id_of), None)
            if end is not None:
                tokens.append(self._id_of[data[size:end]])
            elif len(self.longer(data[size:])):
                break
            size = end or size + 1
        return tokens, data[size:]


@dataclass(frozen=True, slots=True)
class _TokenSpelling:
    """A string in a model's tokens.

    Attributes:
        nodes: the text after 0, 1, ... n tokens. rest: bytes behind them. unknown: bytes that are in neither.
        within: tokens that go on over the end of the string, by the number of tokens before them.
    """

    nodes: list[Branch]
    rest: bytes
    unknown: int
    within: dict[int, torch.Tensor]


class ByteScorer:
    """Scores strings of bytes behind a prompt. What the last strings shared with the next is not computed again.

    Args:
        prompt: in the model's own tokens. temperature: of the probabilities.
    """

    def __init__(self, runner: Runner, tokenizer: Tokenizer, prompt: Sequence[int], temperature: float = 1.0) -> None:
        self.vocabulary = ByteVocabulary(tokenizer, runner.info.vocab_size)
        self._chance = log(runner.info.vocab_size)  # nats of a token that comes up by chance
        self._most = runner.info.max_context - len(prompt)
        if not prompt or self._most < 1:
            most = runner.info.max_context - 1
            raise PromptError(f"the second model's prompt must have 1..{most} tokens, got {len(prompt)}")
        params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=None, detokenize=False)
        rules = Rules(params, vocab_size=runner.info.vocab_size, prompt=prompt)
        self._forest = Forest(runner, chunk=512)
        request = Request("bytes", None, list(prompt), params, 0, self._most)
        self._root = Branch.of_prompt(Origin(request, rules, lambda _: StopChecker(params, (), None, prompt)))
        self._children: dict[tuple[Branch, int], Branch] = {}
        self._totals: dict[Branch, float] = {self._root: 0.0}
        self._rows: dict[Branch, torch.Tensor] = {}

    def scores(self, texts: Sequence[bytes]) -> list[tuple[float, int]]:
        """Of each string log P(b), in nats, and the number of tokens of the spelling that has most of it.

        Raises:
            PromptError: a string has more tokens than the model's context.
            NumericsError: the model's logits are not numbers.
        """
        spellings = [self._spelling(text) for text in texts]
        needed = dict.fromkeys(node for spelling in spellings for node in self._needed(spelling))
        missing = [node for node in needed if node not in self._rows]
        if missing:
            rows, errors = self._forest.rows(missing, kept=list(self._rows))
            if errors:
                raise NumericsError(f"the second model cannot go on: {next(iter(errors.values()))}")
            self._rows |= dict(zip(missing, rows.logprobs, strict=True))
        scores = [self._score(spelling) for spelling in spellings]
        self._rows = {node: self._rows[node] for node in needed}
        return scores

    def close(self) -> None:
        """Free the caches."""
        self._forest.close()

    def _spelling(self, text: bytes) -> _TokenSpelling:
        tokens, rest = self.vocabulary.spelled(text)
        if len(tokens) > self._most:
            raise PromptError(f"the second model's context has {self._most} tokens left, the text {len(tokens)}")
        nodes, within, ahead = [self._root], dict[int, torch.Tensor](), rest
        for token in tokens:
            key = nodes[-1], token
            if key not in self._children:
                self._children[key] = nodes[-1].child(token, 0.0)
            nodes.append(self._children[key])
        for place in range(len(tokens), -1, -1):
            if place < len(tokens):
                ahead = (self.vocabulary.written[tokens[place]] or b"") + ahead
            if len(ahead) >= self.vocabulary.longest:
                break
            if ahead and len(ids := self.vocabulary.longer(ahead)):
                within[place] = ids
        known = sum(len(self.vocabulary.written[token] or b"") for token in tokens) + len(rest)
        return _TokenSpelling(nodes, rest, len(text) - known, within)

    def _needed(self, spelling: _TokenSpelling) -> list[Branch]:
        """The texts whose next-token probabilities count."""
        unknown = [
            node for node, after in zip(spelling.nodes, spelling.nodes[1:], strict=False) if after not in self._totals
        ]
        return [*unknown, *(spelling.nodes[place] for place in spelling.within)]

    def _score(self, spelling: _TokenSpelling) -> tuple[float, int]:
        for node, after in zip(spelling.nodes, spelling.nodes[1:], strict=False):
            if after not in self._totals:
                self._totals[after] = self._totals[node] + float(self._rows[node][after.token])
        parts = [] if spelling.rest else [(self._totals[spelling.nodes[-1]], len(spelling.nodes) - 1)]
        for place, ids in spelling.within.items():
            node = spelling.nodes[place]
            parts.append((self._totals[node] + float(self._rows[node][ids].logsumexp(0)), place + 1))
        total = torch.tensor([part for part, _ in parts], dtype=torch.float64).logsumexp(0)
        return float(total) - spelling.unknown * self._chance, max(parts)[1] + spelling.unknown
