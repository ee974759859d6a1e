"""String-level exact match: a draft model with another tokenizer drafts text.

The draft model writes greedily in its own tokens; what it wrote is encoded with the target's tokenizer, together with
the last few tokens of the text, since tokens depend on their neighbours, and offered as points: a token is accepted
where the target itself generates it. The vocabularies need not have tokens of more than a character in common. A
character without its last bytes is not offered.

Source: string-level exact match (SLEM), Accelerating LLM inference with lossless speculative decoding algorithms for
heterogeneous vocabularies (arXiv:2502.05202); universal assisted generation of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from paceline.checkpoints import encoder_of, token_bytes, whole_characters
from paceline.drafters.base import Context, Drafter, DrafterArgs
from paceline.drafters.common.bases import limit_of, model_of
from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_chain import ChainDraft, draft_chains
from paceline.drafters.vocab.retokenize import Retokenizer, TranslatedState
from paceline.drafters.vocab.vocabularies import check_shared, shared_tokens
from paceline.models import Runner
from paceline.tree import EMPTY_TREE, Budget, TokenTree

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer

LOOK_BACK: Final = 8
"""Tokens of the target that are encoded again with what was drafted."""


class Writer:
    """Writes drafted tokens in the target's.

    Args:
        vocab_size: of the target; ids lie below it.
    """

    def __init__(self, target: Tokenizer, draft: Tokenizer, vocab_size: int) -> None:
        self._mine, self._theirs = token_bytes(target)[:vocab_size], token_bytes(draft)
        self._encode, self._end, self._their_end = encoder_of(target), target.eos_id, draft.eos_id

    def rewrite(
        self, text: Sequence[int], drafted: Sequence[int], chances: Sequence[float]
    ) -> tuple[list[int], list[float]]:
        """The target's tokens of what was drafted after `text`, and the chance of each at its place as the draft sees
        it: that of the drafted tokens which it ends or touches first.
        """
        data, reach, end = self._read(drafted, chances)
        size = whole_characters(data)
        tokens = self._tokens(text, data[:size]) if size else []
        reaches, before, at = list[float](), 1.0, 0
        for token in tokens:
            at += len(self._mine[token] or b"")
            now = reach[at - 1]
            reaches.append(min(now / before, 1.0) if before > 0.0 else 0.0)
            before = now
        if end is not None and self._end is not None and at == len(data):
            return [*tokens, self._end], [*reaches, end]
        return tokens, reaches

    def _read(self, drafted: Sequence[int], chances: Sequence[float]) -> tuple[bytes, list[float], float | None]:
        """Bytes up to the first special token, the chance that the draft gets to the token of each, and that of an end
        there.
        """
        data, reach, now = b"", list[float](), 1.0
        for token, chance in zip(drafted, chances, strict=True):
            written = self._theirs[token] if token < len(self._theirs) else None
            if written is None:
                return data, reach, chance if token == self._their_end else None
            now *= chance
            data += written
            reach += [now] * len(written)
        return data, reach, None

    def _tokens(self, text: Sequence[int], data: bytes) -> list[int]:
        """The target's tokens of `data` behind a text, none where they cannot be told from those of the text."""
        behind = self._behind(text)
        together = self._encode((behind + data).decode("utf-8", "replace"))
        left, first = len(data), len(together)
        while left > 0 and first > 0:
            first -= 1
            left -= self._size(together[first])
        if left == 0:
            return together[first:]
        alone = self._encode(data.decode("utf-8", "replace"))
        return alone if b"".join(self._bytes(token) for token in alone) == data else []

    def _behind(self, text: Sequence[int]) -> bytes:
        """What the last few tokens wrote, from the first whole character and the last special token on."""
        behind = b""
        for token in reversed(text[-LOOK_BACK:]):
            if not (written := self._bytes(token)):
                break
            behind = written + behind
        start = next((i for i, byte in enumerate(behind) if not 0x80 <= byte < 0xC0), len(behind))
        return behind[start:]

    def _bytes(self, token: int) -> bytes:
        """What a token of the target writes; nothing for special and unknown ones."""
        return (self._mine[token] or b"") if token < len(self._mine) else b""

    def _size(self, token: int) -> int:
        """Bytes of a token of the target; more than any text for one that writes none, which ends the search."""
        return len(self._bytes(token)) or 1 << 60


class SlemDrafter(Drafter):
    """Drafts text with a model of another tokenizer.

    Args:
        model: folder or hub id of the draft model.
        num_speculative_tokens: most tokens to draft; None leaves it to the budget.
        draft_device: as for `draft_model`.
    Raises:
        ConfigError: a value outside its range.
        DrafterError: tokenizers with nothing in common.
    """

    name = "slem"
    catches_up = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        num_speculative_tokens: int | None = None,
        draft_device: str | None = None,
    ) -> None:
        self.index, self.limit = args.index, limit_of(num_speculative_tokens)
        model, models = model_of(args, self.name, model)
        target, draft = models.tokenizer, models.tokenizer_of(model)
        shared = shared_tokens(target, draft)
        check_shared(shared, model, target, draft)
        self.runner = models.open(model, other_tokens=True, device=draft_device)
        self._retokenizer = Retokenizer(target, draft, shared.specials)
        self._writer = Writer(target, draft, args.vocab_size)

    def begin(self, contexts: Sequence[Context]) -> list[TranslatedState]:
        return [TranslatedState(context, self._retokenizer.open(), self.runner.open()) for context in contexts]

    def propose(
        self, states: Sequence[TranslatedState], budgets: Sequence[Budget], so_far: Sequence[TokenTree]
    ) -> list[TokenTree]:
        trees = [EMPTY_TREE] * len(states)
        active = [(i, state, _GoOn(budget)) for i, (state, budget) in enumerate(zip(states, budgets, strict=True))]
        active = [(i, state, limit) for i, state, limit in active if self._steps(state, limit.budget) > 0]
        if not active:
            return trees
        drafted = self._draft([state for _, state, _ in active], [limit for *_, limit in active])
        for (i, state, limit), tree in zip(active, drafted, strict=True):
            tokens, chances = self._writer.rewrite(state.context.tokens, tree.tokens.tolist(), tree.confidence.tolist())
            count = min(len(tokens), limit.budget.nodes, limit.most, self.limit)
            trees[i] = chain_tree(tokens[:count], chances[:count], self.index)
        return trees

    def runners(self) -> Sequence[Runner]:
        return (self.runner,)

    def fork(self, state: TranslatedState, context: Context) -> TranslatedState:
        return state.fork(context, self.runner)

    def end(self, states: Sequence[TranslatedState]) -> None:
        for state in states:
            self.runner.release(state.inner.cache)

    def _steps(self, state: TranslatedState, budget: Budget) -> int:
        """Tokens of the draft to draft: within the budget, the option and the draft model's context."""
        steps = min(budget.nodes, budget.depth)
        if steps <= 0:
            return 0
        state.follow(self.runner, self._known)
        return (
            min(steps, self.limit, self.runner.info.max_context - len(state.inner.context.tokens) + 1)
            if state.ready
            else 0
        )

    def _known(self, tokens: Sequence[int]) -> list[int]:
        """Tokens of the draft without those that its tokenizer has and its model has not."""
        return [token for token in tokens if token < self.runner.info.vocab_size]

    def _draft(self, states: Sequence[TranslatedState], limits: Sequence[_GoOn]) -> list[TokenTree]:
        """Greedy chains in the draft's tokens."""
        runner, inner = self.runner, [state.inner for state in states]
        for draft_state in inner:
            draft_state.confirm(runner)
            draft_state.context.temperature = 0.0
        steps = [self._steps(state, limit.budget) for state, limit in zip(states, limits, strict=True)]
        each = zip(inner, steps, limits, strict=True)
        chains = [ChainDraft(state.context, count, limit.go_on, drawn=False) for state, count, limit in each]
        return draft_chains(runner, inner, chains, runner.info.vocab_size, self.index)


class _GoOn:
    """A controller's `go_on`, applied to each token of the draft.

    Attributes:
        most: levels that it allowed, of the target's tokens as well.
    """

    def __init__(self, budget: Budget) -> None:
        self.budget, self.most = budget, budget.depth

    def go_on(self, depth: int, confidence: float, features: object) -> bool:
        """See `Budget.go_on`."""
        if not self.budget.go_on(depth, confidence, features):
            self.most = min(self.most, depth - 1)
            return False
        return True
