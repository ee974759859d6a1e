"""What tokens write: the bytes of a text's tokens are the text, for every kind of vocabulary."""

from __future__ import annotations

import pytest
import tiny_tokenizers

from paceline.llm import BUNDLED
from paceline.models.loading import Tokenizer, token_bytes

TEXT = "the quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: Tokenizer.load(tiny_tokenizers.write(folder / kind, kind)) for kind in tiny_tokenizers.KINDS}


def written(tokenizer: Tokenizer, text: str) -> bytes:
    table = token_bytes(tokenizer)
    return b"".join(table[token] or b"" for token in tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("text", [TEXT, "größer\n\n東京  🙂", " a\tb"])
def test_byte_level_tokens_write_the_text(tokenizers: dict[str, Tokenizer], text: str) -> None:
    for tokenizer in (tokenizers["byte_level"], Tokenizer.load(BUNDLED / "target")):
        assert written(tokenizer, text) == text.encode()


@pytest.mark.parametrize("text", [TEXT, "größer 東京 🙂"])
def test_sentencepiece_tokens_write_the_text_behind_a_space(tokenizers: dict[str, Tokenizer], text: str) -> None:
    assert written(tokenizers["metaspace"], text) == b" " + text.encode()


@pytest.mark.parametrize("kind", ["wordpiece", "unigram"])
def test_other_tokens_write_words_behind_spaces(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    assert written(tokenizers[kind], TEXT) == b" " + TEXT.encode()


@pytest.mark.parametrize("kind", tiny_tokenizers.KINDS)
def test_special_tokens_write_nothing(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    table = token_bytes(tokenizers[kind])
    assert [table[index] for index in sorted(tokenizers[kind].special_ids)] == [None] * len(
        tokenizers[kind].special_ids
    )
    assert sum(one is not None for one in table) == len(tokenizers[kind].tokens()) - len(tokenizers[kind].special_ids)
