"""Drafted tokens of one vocabulary in another: the same text, chances that multiply up, no broken characters."""

from __future__ import annotations

import math

import pytest
import tiny_tokenizers

from paceline.drafters.vocab import Writer
from paceline.llm import BUNDLED
from paceline.models.loading import Tokenizer

TARGET = Tokenizer.load(BUNDLED / "target")


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    folder = tmp_path_factory.mktemp("kinds")
    return {kind: Tokenizer.load(tiny_tokenizers.write(folder / kind, kind)) for kind in ("byte_level", "metaspace")}


@pytest.mark.parametrize("kind", ["byte_level", "metaspace"])
@pytest.mark.parametrize(
    ("before", "after"), [("The quick", " brown fox jumps"), ("I under", "stand it"), ("größ", "er 東京")]
)
def test_the_text_is_kept_and_chances_multiply_up(
    others: dict[str, Tokenizer], kind: str, before: str, after: str
) -> None:
    draft = others[kind]
    together, alone = (draft.encode(text, add_special_tokens=False) for text in (before + after, before))
    drafted = together[len(alone) :]
    if draft.decode(alone + drafted) != before + after or together[: len(alone)] != alone:
        drafted = draft.encode(after, add_special_tokens=False)
    chances = [0.9 - 0.05 * i for i in range(len(drafted))]
    text = TARGET.encode(before, add_special_tokens=False)
    tokens, found = Writer(TARGET, draft, 6144).rewrite(text, drafted, chances)
    assert TARGET.decode([*text, *tokens]).replace(" ", "") == (before + after).replace(" ", "")
    assert math.prod(found) == pytest.approx(math.prod(chances))
    assert all(0.0 <= chance <= 1.0 for chance in found)


def test_tokens_continue_the_text_they_follow(others: dict[str, Tokenizer]) -> None:
    """Encoded with its neighbours a text has the tokens that the target would give the whole."""
    writer, draft = Writer(TARGET, others["byte_level"], 6144), others["byte_level"]
    whole = TARGET.encode("the quick brown fox jumps over the dog", add_special_tokens=False)
    drafted = draft.encode(TARGET.decode(whole[4:]), add_special_tokens=False)
    assert writer.rewrite(whole[:4], drafted, [1.0] * len(drafted))[0] == whole[4:]


def test_an_end_is_handed_on_and_other_special_tokens_stop(others: dict[str, Tokenizer]) -> None:
    draft = others["byte_level"]
    writer, fox = Writer(TARGET, draft, 6144), draft.encode(" fox", add_special_tokens=False)
    chances = [1.0] * len(fox)
    plain = writer.rewrite([5], fox, chances)[0]
    assert writer.rewrite([5], [*fox, draft.eos_id or 0, *fox], [*chances, 0.5, *chances]) == (
        [*plain, 3],
        [1.0] * len(plain) + [0.5],
    )
    assert writer.rewrite([5], [*fox, 0, *fox], [*chances, 0.5, *chances])[0] == plain
    assert writer.rewrite([5], [draft.eos_id or 0], [0.25]) == ([3], [0.25])


def test_a_character_without_its_end_is_not_offered(others: dict[str, Tokenizer]) -> None:
    draft = others["byte_level"]
    ids = draft.encode("a🚀", add_special_tokens=False)
    tokens, _ = Writer(TARGET, draft, 6144).rewrite([5], ids[:-1], [1.0] * (len(ids) - 1))
    assert TARGET.decode(tokens) == "a"
    assert Writer(TARGET, draft, 6144).rewrite([5], ids[1:2], [1.0]) == ([], [])


def test_ids_beyond_the_vocabularies_write_nothing(others: dict[str, Tokenizer]) -> None:
    writer = Writer(TARGET, others["byte_level"], 6144)
    assert writer.rewrite([5, 9999], [9999], [1.0]) == ([], [])
