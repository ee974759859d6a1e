"""Bad words: which tokens would complete a forbidden sequence of tokens.

In:  words and a tokenizer's `encode`; later the generated tokens and a path. Out: token ids to forbid.
Not here: writing -inf (`constraints.rules`).

As in vLLM, a word counts only inside the output: a word that begins in the prompt can be completed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline.errors import ConfigError, PromptError


def bad_word_token_ids(words: Sequence[str], encode: Callable[[str], Sequence[int]] | None) -> list[tuple[int, ...]]:
    """The token sequences to forbid: each word as it stands at the start of a text and after a space.

    vLLM drops the spelling after a space unless it has as many tokens as the other and another first token. We keep it
    whenever it differs, so that a word whose spellings differ in length cannot slip through in the middle of a
    sentence.

    Args:
        words: as the user wrote them; leading spaces do not matter.
        encode: text -> token ids without special tokens; None where there is no tokenizer.
    Raises:
        ConfigError: there is no tokenizer, or a word that has no tokens.
    """
    if encode is None:
        raise ConfigError(
            f"bad_words needs a tokenizer to find the words' tokens, got {list(words)!r} without one; use logit_bias"
        )
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        spellings = (word.lstrip(), " " + word.lstrip()) if word.strip() else (word,)
        try:
            ids = [tuple(int(token) for token in encode(text)) for text in spellings]
        except PromptError:  # it speaks of a prompt
            raise ConfigError(f"bad_words must be valid Unicode, got {word!r}") from None
        if not any(ids):
            raise ConfigError(f"bad_words must have tokens in this model's vocabulary, got {word!r}, which has none")
        found.update(dict.fromkeys(one for one in ids if one))
    return list(found)


class BadWords:
    """Forbidden token sequences, looked up by the token before the last.

    Attributes:
        always: tokens that are words by themselves, forbidden everywhere.
        reach: how many tokens before the next one can matter; 0 if `always` is all there is.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self.always = sorted({word[0] for word in words if len(word) == 1})
        self.reach = max((len(word) - 1 for word in words), default=0)
        self._ending: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in words:
            if len(word) > 1:
                self._ending.setdefault(word[-2], []).append((tuple(word[:-1]), word[-1]))

    def after(self, generated: Sequence[int], path: Sequence[int]) -> list[int]:
        """Tokens that would complete a word of several tokens after `generated` and then `path`."""
        tail = (*generated[-self.reach :], *path)
        words = self._ending.get(tail[-1], ()) if tail else ()
        return [final for prefix, final in words if tail[-len(prefix) :] == prefix]
