"""Iterative retrieval: every few tokens the passage that fits the last ones best takes its place before the prompt.

A step is

1. the query, the last `query_tokens` tokens of prompt and text;
2. the passage that the index ranks first for it; where it finds none, the one in use stays;
3. `interval` tokens, written behind that passage, the prompt and the text.

Keys and values of the text behind the passages that were last in use are kept: behind one that comes back, only what
was written since is read. Tokens are drawn as plain decoding draws them at their place in the prompt without passages.

Sources: In-Context Retrieval-Augmented Language Models (arXiv:2302.00083) for the loop, with its 4 tokens and 32;
RaLMSpec (arXiv:2401.14021) for guessing the passages (`search.retrieving`), which prefetches 20.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

from paceline.errors import ConfigError, NumericsError, PromptError
from paceline.models import HasEmbedding
from paceline.retrieval import MOST_CHANCE, Hits, PassageIndex
from paceline.search.base import Steps
from paceline.search.branch import Branch, Origin
from paceline.search.retrieving import OS3, Guess, Retrieving
from paceline.utils import integer, need

PASSAGE: Final = "{passage}"
LEAST_ROOM: Final = 8
"""Tokens of a passage that must fit into the context."""


@dataclass(frozen=True, slots=True)
class Written:
    """A text behind a passage.

    Attributes:
        told: behind the prompt alone. behind: the same tokens behind the passage and the prompt.
        passage: number in the index; None for none.
    """

    told: Branch
    behind: Branch
    passage: int | None

    @property
    def ended(self) -> bool:
        return self.told.ended


@dataclass(slots=True, kw_only=True)
class Behind(Guess[Written]):
    """A step behind a guessed passage.

    Attributes:
        passage: its number; None for none.
    """

    passage: int | None


class Ralm(Retrieving[Written]):
    """Writes with passages of an index before the prompt, which change as the text goes on; which ones is guessed from
    a local cache and checked several at a time. The text is that of asking the index in every step.

    Args:
        index: folder of an index of passages (`paceline retrieval build`), or the index itself.
        interval: tokens from one retrieval to the next. query_tokens: last tokens that are the query.
        passage_tokens: a longer passage is cut. template: how it stands before the prompt.
        speculate: guess the passages; False asks the index in every step.
        stride: guesses that are checked at once, or "os3", which finds the number that brings the most per second.
        most_chance: most that it takes the chance of a right guess for, in 0..1 without 1.
        asynchronous: go on guessing while the index is asked.
        prefetch: passages that each search brings into the local cache.
        contexts: passages behind which keys and values of the text are kept.
    Raises:
        ConfigError: a value outside its range, no such index, or one of another model.
    """

    name = "ralm"

    def __init__(
        self,
        index: Any = None,
        *,
        interval: int = 4,
        query_tokens: int = 32,
        passage_tokens: int = 256,
        template: str = "{passage}\n\n",
        speculate: bool = True,
        stride: int | str = OS3,
        asynchronous: bool = False,
        most_chance: float = MOST_CHANCE,
        prefetch: int = 20,
        contexts: int = 4,
    ) -> None:
        super().__init__(
            index, speculate=speculate, stride=stride, asynchronous=asynchronous, prefetch=prefetch,
            most_chance=most_chance,
        )  # fmt: skip
        integer("interval", interval, 1)
        integer("query_tokens", query_tokens, 1)
        integer("passage_tokens", passage_tokens, LEAST_ROOM)
        integer("contexts", contexts, 1, 64)
        fine = isinstance(template, str) and template.count(PASSAGE) == 1
        need(fine, "template", f"hold {PASSAGE} once", template)
        self.interval, self.query_tokens, self.longest = interval, query_tokens, passage_tokens
        self.template, self.contexts = template, contexts
        self._origins: dict[int | None, Origin] = {}
        self._path: list[Written] = []  # the text so far where its passage changed or a step ended, guesses included

    def prepare(self) -> None:
        super().prepare()
        if not isinstance(self.index, PassageIndex):
            raise ConfigError(f"index: method {self.name!r} needs one of passages, got kind {self.index.kind!r}")
        self.passages: PassageIndex[Any] = self.index
        embed = self.runner.embed if isinstance(self.runner, HasEmbedding) else None
        self._read = self.passages.reader(self.tokenizer, embed)

    def beginning(self, root: Branch) -> Steps[Written]:
        if root.request.inputs.digest:
            raise PromptError("retrieval puts passages before a prompt of tokens alone; leave other inputs out")
        self._origins = {None: root.origin}
        self._room = min(self.longest, self._free(root))
        text = Written(root, root, None)
        if self.speculates:  # the first step is never guessed, since nothing is known yet
            self.keep(text, ())
            text = yield from self.plain_step(text)
        return text

    def _free(self, root: Branch) -> int:
        """Tokens of the context that a passage may take.

        Raises:
            PromptError: hardly any.
        """
        request, context = root.request, self.runner.info.max_context
        free = context - len(request.prompt_ids) - request.max_tokens
        if free < LEAST_ROOM:
            raise PromptError(
                f"prompt ({len(request.prompt_ids)} tokens) and max_tokens ({request.max_tokens}) leave {max(0, free)} "
                f"of the context of {context} to passages; lower max_tokens, or shorten the prompt"
            )
        return free

    def plain_step(self, text: Written) -> Steps[Written]:
        found = self.search(self.query(text))
        return (yield from self._written(text, chosen(found, text)))

    def guess(self, text: Written) -> Steps[Guess[Written]]:
        query = self.query(text)
        number = chosen(self.cache.search(query, 1), text)
        guess = Behind(text, text, query, passage=number)
        try:
            guess.after = yield from self._written(text, number)
        except NumericsError as error:
            guess.error = error
        return guess

    def agrees(self, guess: Guess[Written], found: Hits) -> bool:
        assert isinstance(guess, Behind)
        return chosen(found, guess.before) == guess.passage

    def corrected(self, guess: Guess[Written], found: Hits) -> Steps[Written]:
        length = guess.before.told.length
        self._path = [one for one in self._path if one.told.length <= length]
        return (yield from self._written(guess.before, chosen(found, guess.before)))

    def branch_of(self, text: Written) -> Branch:
        return text.told

    def close(self, text: Written) -> None:
        begin = 0
        for one in self._path:
            self.retrieval.note_passage(begin, one.passage)
            begin = one.told.length

    def keep(self, text: Written, trail: Sequence[Guess[Written]]) -> None:
        last: dict[int | None, Branch] = {}
        for one in reversed(self._path):
            last.setdefault(one.passage, one.behind)
        recent = list(last.values())[: self.contexts]
        self.kept = [text.behind, *recent, *(guess.before.behind for guess in trail)]

    def neighbours(self, ids: Iterable[int]) -> Iterable[int]:
        return ids

    def query(self, text: Written) -> Any:
        """What the index is asked with behind a text."""
        tokens = text.told.tokens()[-self.query_tokens :]
        more = self.query_tokens - len(tokens)
        return self._read([*(text.told.request.prompt_ids[-more:] if more else ()), *tokens])

    def _written(self, text: Written, passage: int | None) -> Steps[Written]:
        """The text with so many more tokens, written behind a passage.

        Raises:
            NumericsError: where the model or a rule gives no distribution.
        """
        told, behind = text.told, text.behind if passage == text.passage else self._behind(text.told, passage)
        for _ in range(self.interval):
            rows = yield [behind]
            logprobs_v = rows.logprobs[0]
            token = told.draw(logprobs_v, 0)
            told = told.child(token, float(logprobs_v[token]))
            if told.ended:
                break
            behind = behind.child(token, 0.0)
        written = Written(told, behind, passage)
        self._path.append(written)
        return written

    def _behind(self, told: Branch, passage: int | None) -> Branch:
        """The text behind another passage, from as much of it as is known there."""
        known = next((one.behind for one in reversed(self._path) if one.passage == passage), None)
        branch = Branch.of_prompt(self._origin(passage)) if known is None else known
        for token in told.tokens()[branch.length :]:
            branch = branch.child(token, 0.0)
        return branch

    def _origin(self, passage: int | None) -> Origin:
        """The prompt behind a passage, whose tokens no rule sees."""
        if passage not in self._origins:
            plain = self._origins[None]
            assert passage is not None
            prompt, start = plain.request.prompt_ids, self._start(plain.request.prompt_ids)
            ids = [*prompt[:start], *self._framed(self.passages.passage(passage)), *prompt[start:]]
            self._origins[passage] = Origin(replace(plain.request, prompt_ids=ids), plain.rules, plain.checker)
        return self._origins[passage]

    def _framed(self, passage: str) -> list[int]:
        """Tokens of the template with a passage in it, which is cut to what there is room for."""
        before, after = (self.tokenizer.encode_plain(part) if part else [] for part in self.template.split(PASSAGE))
        room = max(0, self._room - len(before) - len(after))
        return [*before, *self.tokenizer.encode_plain(passage)[:room], *after]

    def _start(self, prompt: Sequence[int]) -> int:
        """Tokens at the prompt's beginning that the checkpoint puts before every text."""
        pairs = zip(prompt[:-1], self.tokenizer.framed([]), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def chosen(found: Hits, text: Written) -> int | None:
    """The passage that the next tokens are written behind."""
    return text.passage if found.best is None else found.best
