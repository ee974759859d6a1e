"""String-level exact match: points in the target's tokens of what the draft wrote, and what is not drafted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import tiny_tokenizers
from toy_models import LETTERS, OTHER, ToyModels
from toys import ToyRunner

from paceline.checkpoints import Tokenizer
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.vocab.slem import SlemDrafter, Writer
from paceline.errors import ConfigError, DrafterError
from paceline.llm import BUNDLED
from paceline.tree import EMPTY_TREE, Budget


def drafter_of(**options: Any) -> tuple[SlemDrafter, ToyModels]:
    context = options.pop("max_context", 4096)
    models = ToyModels(ToyRunner(11), ToyRunner(11, order=None, max_context=context))
    return SlemDrafter(
        DrafterArgs(vocab_size=11, index=3, max_context=99, models=models), model="other", **options
    ), models


def text_of(tokens: Any) -> str:
    return "".join(LETTERS[token - 1] if token else "." for token in tokens)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_offers_the_text_that_the_draft_writes(temperature: float) -> None:
    drafter, models = drafter_of()
    for first in range(1, 9):
        (state,) = drafter.begin([Context("r", [first, 3, 4], 3, temperature)])
        (tree,) = drafter.propose([state], [Budget(9, 9)], [EMPTY_TREE])
        wrote = models.other.greedy([OTHER.index(LETTERS[first - 1]), OTHER.index("cd")], 9)
        text = "".join(OTHER[token] if token else "." for token in wrote).split("z")[0]
        end = text.find(".") + 1 or len(text)
        assert text_of(tree.tokens) == text[: min(end, 9)]
        assert not tree.trials
        assert set(tree.sources.tolist()) <= {3}
        drafter.end([state])
    assert models.other.open_caches == 0


def test_limits() -> None:
    for options, nodes, most in (
        ({"num_speculative_tokens": 2}, 9, 2),
        ({}, 4, 4),
        ({"max_context": 4}, 9, 4),
        ({"max_context": 2}, 9, 0),
    ):
        drafter, _ = drafter_of(**options)
        (state,) = drafter.begin([Context("r", [1, 5, 7], 3)])
        (tree,) = drafter.propose([state], [Budget(nodes, nodes)], [EMPTY_TREE])
        assert len(tree) <= most
        assert most == 0 or len(tree) > 0


def test_what_cannot_be_is_rejected() -> None:
    args = DrafterArgs(vocab_size=11, index=0, max_context=99, models=drafter_of()[1])
    with pytest.raises(DrafterError, match="'strangers' shares no token"):
        SlemDrafter(args, model="strangers")
    with pytest.raises(ConfigError, match="must be a folder or hub id for method 'slem'"):
        SlemDrafter(args)
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        SlemDrafter(args, model="other", num_speculative_tokens=-1)


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
