"""Token-level intersection: the output's distribution, noise of its own every step, the same drafts as a draft with the
target's tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tools.enumerate_draws import Choices
from tools.one_sequence import begin, enumerated
from tools.random_drafts import random_target
from tools.random_trees import WRONG, distribution_error
from toy_models import OTHER, ToyModels
from toys import ToyRunner

from benchmarks.stand_ins import write_shuffled_draft
from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.common import draft_rows
from paceline.drafters.vocab.tli import TliDrafter
from paceline.errors import ConfigError, DrafterError
from paceline.llm import BUNDLED
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Trial
from paceline.verifiers import recursive_rejection

TOKENS = 4
"""</s>, a, b, c: the other vocabulary has them, and eleven more."""


def drafter_of(vocab_size: int = TOKENS, **options: Any) -> tuple[TliDrafter, ToyModels]:
    models = ToyModels(ToyRunner(vocab_size), ToyRunner(11, order=None, sharpness=1.0))
    args = DrafterArgs(vocab_size=vocab_size, index=0, max_context=99, models=models)
    return TliDrafter(args, model="other", **options), models


def propose(drafter: TliDrafter, state: Any, nodes: int = 3, depth: int = 2) -> TokenTree:
    return drafter.propose([state], [Budget(nodes, depth)], [EMPTY_TREE])[0]


def program(monkeypatch: pytest.MonkeyPatch, width: int) -> Any:
    drafter, _ = drafter_of(tree_width=width)

    def draws(choices: Choices) -> TokenTree:
        monkeypatch.setattr(draft_rows, "draw_tokens", enumerated(choices))
        state = begin(drafter, [1, 2], temperature=1.0)
        tree = propose(drafter, state)
        drafter.end([state])
        return tree

    return draws


@pytest.mark.parametrize("width", [1, 2])
def test_the_output_keeps_the_distribution(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    assert distribution_error(program(monkeypatch, width), random_target(width, TOKENS), 3) < 1e-6, "float32 rows"


def raw(models: ToyModels, tree: TokenTree, parent: int) -> torch.Tensor:
    """(v,) the draft's distribution before it was renormalised over the shared tokens."""
    text = [
        OTHER.index("ab"),
        *(OTHER.index("?abc"[int(tree.tokens[i])]) if tree.tokens[i] else 0 for i in tree.path(parent)),
    ]
    whole = models.other.logits(text).softmax(0)
    return torch.stack([whole[0], *(whole[OTHER.index(letter)] for letter in "abc")])


def test_the_distribution_check_catches_an_intersection_that_is_not_renormalised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draws, (_, models) = program(monkeypatch, 1), drafter_of()

    def unscaled(choices: Choices) -> TokenTree:
        tree: TokenTree = draws(choices)
        return tree.replace(
            trials={parent: (Trial(each[0].node, raw(models, tree, parent)),) for parent, each in tree.trials.items()}
        )

    target = random_target(5, TOKENS, zeros=0.0)
    assert distribution_error(unscaled, target, 3) < 1e-6, "the verifier normalises what it is given"
    monkeypatch.setattr(recursive_rejection, "proposal", lambda trial, token, like: trial.row.to(like))
    assert distribution_error(unscaled, target, 3) > WRONG


def test_steps_whose_texts_are_equally_long_have_noise_of_their_own() -> None:
    """ "a" and "ab" are one token each for the draft."""
    drafter, _ = drafter_of(11)
    state = begin(drafter, [1], temperature=1.0, seed=4)
    propose(drafter, state)
    first, length = state.inner.context.seed, len(state.inner.context.tokens)
    state.context.tokens.append(2)
    propose(drafter, state)
    assert len(state.inner.context.tokens) == length
    assert state.inner.context.seed != first


def test_the_cache_keeps_what_stays_the_same() -> None:
    drafter, models = drafter_of(11, num_speculative_tokens=2)
    state = begin(drafter, [3, 4, 5, 1])
    propose(drafter, state, 2)
    fed = models.other.fed
    state.context.tokens.append(2)  # the draft's last token "a" becomes "ab"
    propose(drafter, state, 2)
    assert models.other.fed - fed == 1 + 1, "the changed token and one draft"


def test_a_text_that_begins_with_a_broken_character_waits(shuffled: Path) -> None:
    llm = LLM(
        speculative_config={"method": "tli", "model": str(shuffled), "num_speculative_tokens": 3}, dtype="float32"
    )
    ids = llm.tokenizer.encode("a 🚀", add_special_tokens=False)
    (drafter,) = llm.engine.parts.drafter_set.drafters
    states = drafter.begin([Context("r", ids[:stop], stop) for stop in (len(ids) - 1, len(ids))])
    trees = drafter.propose(states, [Budget(3, 3)] * 2, [EMPTY_TREE] * 2)
    assert [len(tree) for tree in trees] == [0, 3]
    drafter.end(states)


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled draft under another tokenizer that shares every token."""
    return write_shuffled_draft(tmp_path_factory.mktemp("shuffled"))


@pytest.mark.parametrize("method", ["tli", "slem"])
def test_a_draft_with_other_ids_drafts_what_the_same_draft_does(shuffled: Path, method: str) -> None:
    plain = LLM(speculative_config=None, dtype="float32", seed=1)
    prompts = [
        {"prompt_token_ids": plain.chat_ids([{"role": "user", "content": p.prompt}])}
        for p in bundled_prompts()[::6][:4]
    ]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    found = {}
    for name, model in (("draft_model", BUNDLED / "draft"), (method, shuffled)):
        outs = plain.with_speculative_config(
            {"method": name, "model": str(model), "num_speculative_tokens": 3}
        ).generate(prompts, params)
        assert not any(out.metrics.dropped_drafters for out in outs)
        found[name] = [(o.outputs[0].token_ids, o.metrics.num_accepted_tokens) for o in outs]
    assert found[method] == found["draft_model"]
    assert [tokens for tokens, _ in found[method]] == [o.outputs[0].token_ids for o in plain.generate(prompts, params)]


def test_what_cannot_be_is_rejected(shuffled: Path) -> None:
    drafter, models = drafter_of(11)
    args = DrafterArgs(vocab_size=11, index=0, max_context=99, models=models)
    with pytest.raises(DrafterError, match="'strangers' shares no token with the target"):
        TliDrafter(args, model="strangers")
    with pytest.raises(ConfigError, match="must be a folder or hub id for method 'tli'"):
        TliDrafter(args)
    with pytest.raises(ConfigError, match="tree_width"):
        drafter_of(11, tree_width=0)
    with pytest.raises(DrafterError, match=r"has another tokenizer than the target: .*only methods 'tli' and 'slem'"):
        LLM(speculative_config={"model": str(shuffled)})
    assert propose(drafter, begin(drafter, [1] * 97), 9, 9).max_depth > 0


def test_the_option_of_vllm_names_this_method(shuffled: Path) -> None:
    config = {"method": "draft_model", "model": str(shuffled), "use_heterogeneous_vocab": True}
    llm = LLM(speculative_config=config)
    assert llm.drafter_methods == ["tli"]
    same = llm.with_speculative_config({"model": str(BUNDLED / "draft"), "use_heterogeneous_vocab": False})
    assert same.drafter_methods == ["draft_model"]
    with pytest.raises(ConfigError, match="use_heterogeneous_vocab must be True or False, got 'yes'"):
        llm.with_speculative_config(config | {"use_heterogeneous_vocab": "yes"})
