"""Trimmed heads: which tokens stay, that the output keeps its distribution, and what bad files are answered with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.enumerate_draws import Choices
from tools.one_sequence import enumerated
from tools.random_drafts import random_target
from tools.random_trees import WRONG, distribution_error
from toy_models import ToyModels, letters
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.checkpoints import Tokenizer
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.common import draft_rows
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.vocab.trimmed_head import indispensable, kept_tokens, read_counts
from paceline.errors import ConfigError
from paceline.llm import BUNDLED
from paceline.tree import EMPTY_TREE, Budget, TokenTree

DRAFT = str(BUNDLED / "draft")


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.load(BUNDLED / "target")


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


def toy(tokens: int) -> Any:
    return ToyRunner(tokens)


def test_the_most_frequent_and_the_indispensable_stay(words: Tokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the dog and the other dog and the cat")
    kept = kept_tokens(300, str(text), words, 6144)
    assert kept is not None
    assert kept == sorted(set(kept))
    assert len(kept) == 300
    assert set(words.encode(text.read_text(), add_special_tokens=False)) <= set(kept)
    assert indispensable(words) <= set(kept)
    assert {words.eos_id, *words.special_ids} <= indispensable(words)
    assert words.encode("\x07\x1b", add_special_tokens=False)[0] in kept, "every byte can be written"
    assert kept_tokens(6144, None, words, 6144) is None
    assert (
        kept_tokens(300, None, words, 6144)
        == sorted(set(range(300 - len([t for t in indispensable(words) if t >= 300]))) | indispensable(words))[:300]
    )


def test_counts_lists_and_texts_say_the_same(words: Tokenizer, tmp_path: Path) -> None:
    ids = words.encode("a b a c a b", add_special_tokens=False)
    counts = np.bincount(ids, minlength=6144)
    forms = {
        "counts.json": json.dumps({str(i): int(n) for i, n in enumerate(counts) if n} | {"9999": 3}),
        "text.txt": "a b a c a b",
        "list.json": json.dumps([int(i) for i in np.argsort(-counts, kind="stable")[: (counts > 0).sum()]]),
    }
    for name, content in forms.items():
        (tmp_path / name).write_text(content)
        found = read_counts(tmp_path / name, words, 6144)
        assert (np.argsort(-found, kind="stable") == np.argsort(-counts, kind="stable")).all()
    (tmp_path / "code.py").write_text("[x for x in y]")
    assert read_counts(tmp_path / "code.py", words, 6144).sum() == len(
        words.encode("[x for x in y]", add_special_tokens=False)
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size must be an integer of 1"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size must be an integer"),
        ({"draft_vocab_size": 40}, "special tokens and single bytes are always kept, got 40"),
        ({"draft_vocab_file": "x.txt"}, "cannot be read"),
        ({"draft_vocab_size": 900, "draft_vocab_file": "/none/x.txt"}, "cannot be read"),
        ({"draft_vocab_size": 10**9, "draft_vocab_file": "/none/x.txt"}, "cannot be read"),
        ({"draft_vocab_size": 900, "draft_vocab_file": 3}, "draft_vocab_file must be a path"),
    ],
)
def test_bad_options_are_rejected(plain: LLM, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        plain.with_speculative_config({"method": "draft_model", "model": DRAFT, **options})


@pytest.mark.parametrize("content", ['{"a": 1}', '{"1": -2}', '{"1": 1.5}', "[-1]", "[true]", '{"1": null}'])
def test_bad_counts_are_rejected(words: Tokenizer, tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ConfigError, match="must hold"):
        read_counts(tmp_path / "bad.json", words, 6144)


def test_without_files_a_head_cannot_be_trimmed() -> None:
    args = DrafterArgs(vocab_size=11, index=0, max_context=99, load_runner=lambda name: toy(11))
    with pytest.raises(ConfigError, match="draft_vocab_size must be left out"):
        DraftModelDrafter(args, model="toy", draft_vocab_size=5)


def test_outputs_stay_and_a_smaller_head_is_right_less_often(plain: LLM) -> None:
    prompt = {
        "prompt_token_ids": plain.chat_ids([{"role": "user", "content": "List three animals and what they eat."}])
    }
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    (want,) = plain.generate(prompt, params)
    accepted = {}
    for size in (None, 6144, 3000, 261):
        config = {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}
        found = plain.with_speculative_config(config | ({"draft_vocab_size": size} if size else {}))
        (out,) = found.generate(prompt, params)
        assert out.outputs[0].token_ids == want.outputs[0].token_ids
        accepted[size] = out.metrics.num_accepted_tokens
    assert accepted[None] == accepted[6144] >= accepted[3000] > accepted[261]


def args_of(tokens: int) -> tuple[DrafterArgs, ToyRunner]:
    draft: Any = ToyRunner(tokens, order=None, sharpness=1.0)
    models = ToyModels(ToyRunner(tokens), draft, letters())
    return DrafterArgs(vocab_size=tokens, index=0, max_context=99, load_runner=lambda name: draft, models=models), draft


def program(monkeypatch: pytest.MonkeyPatch, width: int) -> Any:
    """Trees of a draft over 4 tokens that never drafts token 2, whose draws go through `Choices`."""
    args, _ = args_of(4)
    monkeypatch.setattr("paceline.drafters.vocab.trimmed_head.kept_tokens", lambda *given: [0, 1, 3])
    drafter = DraftModelDrafter(args, model="toy", draft_vocab_size=3, tree_width=width)

    def propose(choices: Choices) -> TokenTree:
        monkeypatch.setattr(draft_rows, "draw_tokens", enumerated(choices))
        (state,) = drafter.begin([Context("r", [1, 2], 2, 1.0)])
        (tree,) = drafter.propose([state], [Budget(3, 2)], [EMPTY_TREE])
        assert 2 not in tree.tokens
        drafter.end([state])
        return tree

    return propose


@pytest.mark.parametrize("width", [1, 2])
def test_the_distribution_holds_with_tokens_that_are_never_drafted(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    assert distribution_error(program(monkeypatch, width), random_target(width, 4, zeros=0.0), 3) < 1e-6, "float32 rows"


def test_the_distribution_check_catches_a_q_that_forgets_the_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: the trials carry the whole head's distribution."""
    draws, (_, draft) = program(monkeypatch, 1), args_of(4)

    def whole(choices: Choices) -> TokenTree:
        tree: TokenTree = draws(choices)
        texts = {parent: [1, 2, *(int(tree.tokens[i]) for i in tree.path(parent))] for parent in tree.trials}
        rows = {parent: draft.logits(text).softmax(0) for parent, text in texts.items()}
        trials = {
            parent: tuple(type(t)(t.node, rows[parent], t.removed, t.order) for t in each)
            for parent, each in tree.trials.items()
        }
        return tree.replace(trials=trials)

    assert distribution_error(whole, random_target(1, 4, zeros=0.0), 3) > WRONG
