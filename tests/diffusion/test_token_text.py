"""Texts of tokens against the tokenizer's own decoding."""

from pathlib import Path

import paceline
from paceline.diffusion import TokenTexts
from paceline.models.loading import Tokenizer

FOLDER = Path(paceline.__file__).parent / "bundled" / "target"


def test_texts_of_tokens_put_together_are_the_decoded_text() -> None:
    tokenizer = Tokenizer.load(FOLDER)
    texts = TokenTexts(tokenizer)
    text = '{"name": "Añb", "list": [1, 2,\n3]} def f(x):\n    return x'
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = [texts(token) for token in ids]
    if None not in whole:  # a character of several tokens has no text of its own
        assert "".join(filter(None, whole)) == text
    plain = tokenizer.encode('{"name": [1, 2]}', add_special_tokens=False)
    assert "".join(texts(token) or "?" for token in plain) == '{"name": [1, 2]}'


def test_tokens_without_text() -> None:
    tokenizer = Tokenizer.load(FOLDER)
    texts = TokenTexts(tokenizer)
    assert all(texts(token) is None for token in tokenizer.special_ids)
    assert texts(10**6) is None
