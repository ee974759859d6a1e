"""Drafting with part of the target's layers: compiled passes draft what readable ones do, and leave the target as it
was.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lacking import without
from models.layer_chains import layer_chains
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.errors import CapabilityError
from paceline.models import LayerPlan, load_runner
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.passes.packing import ROWS
from paceline.models.runners import NativeRunner, layer_drafts_of, native
from paceline.tree import EMPTY_TREE, TokenTree

VOCAB, LAYERS = 150, 4
TEXTS = [[5, 9, 60, 44, 7, 3, 9, 21], [1, 4], [(7 * i) % VOCAB for i in range(100)]]
PLANS = [
    LayerPlan(stop=1),
    LayerPlan(stop=3),
    LayerPlan(stop=LAYERS),
    LayerPlan(skip_attention={1, 2}, skip_mlp={2, 3}),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layers")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
        intermediate_size=96, max_position_embeddings=512, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    return path


def load(folder: Path, dtype: str = "float32", *, compiled: bool = True) -> NativeRunner:
    with patch.object(native, "fits", native.fits if compiled else lambda *a, **b: False):
        runner: Any = load_runner(folder, dtype=dtype)
    if compiled and not isinstance(runner.passes, CompiledDecoder):
        pytest.skip("this machine runs no compiled passes")
    return runner


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runner(folder: Path, request: pytest.FixtureRequest) -> NativeRunner:
    return load(folder, request.param)


def opened(runner: NativeRunner, texts: Sequence[Sequence[int]] = TEXTS) -> tuple[list[Any], list[int]]:
    """Caches that lack each text's last token, and those tokens."""
    caches = [runner.open() for _ in texts]
    runner.extend(caches, [text[:-1] for text in texts])
    return caches, [text[-1] for text in texts]


def chains(
    runner: Any, caches: Sequence[Any], roots: Sequence[int], steps: Sequence[int], plan: LayerPlan
) -> list[list[int]]:
    return layer_chains(layer_drafts_of(runner, "x"), caches, roots, steps, plan)[0]


def greedy(runner: NativeRunner, text: Sequence[int], count: int) -> list[int]:
    (cache,), (root,) = opened(runner, [text])
    found = []
    for _ in range(count):
        found.append(root := int(runner.score([cache], [root], [EMPTY_TREE]).logits[0].argmax()))
        runner.commit([cache], [()])
    runner.release(cache)
    return found


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_compiled_chains_are_those_of_readable_passes(folder: Path, plan: LayerPlan) -> None:
    found = {}
    for compiled in (True, False):
        runner = load(folder, compiled=compiled)
        found[compiled] = {id(one): chains(runner, *opened(runner), [4, 7, 40], one) for one in PLANS}
    assert found[True] == found[False]
    assert [len(tokens) for tokens in found[True][id(plan)]] == [4, 7, 40]
    assert any(found[True][id(one)] != found[True][id(plan)] for one in PLANS if one is not plan), "plans differ"


def test_all_layers_draft_what_the_target_says(runner: NativeRunner) -> None:
    caches, roots = opened(runner)
    found = chains(runner, caches, roots, [9, 9, 9], LayerPlan(stop=LAYERS))
    assert found == [greedy(runner, text, 9) for text in TEXTS]


def test_a_draft_changes_no_bit_of_what_the_target_says_next(runner: NativeRunner) -> None:
    """Neither of a tree scored behind it nor of what follows once that is committed; the next pass runs all layers
    again.
    """
    drafts, tree = layer_drafts_of(runner, "x"), TokenTree.chain([3, 8, 140])
    (touched, clean), (root, _) = opened(runner, TEXTS[:1] * 2)
    chains(runner, [touched], [root], [6], PLANS[1])
    drafts.step([touched], [[root]], PLANS[3])
    for tokens in (tree, EMPTY_TREE):
        mine, theirs = (runner.score([cache], [root], [tokens]).logits.clone() for cache in (touched, clean))
        assert torch.equal(mine, theirs)
        runner.commit([touched, clean], [(0, 1)] * 2 if len(tokens) else [()] * 2)


def test_the_comparison_catches_a_draft_that_commits(runner: NativeRunner) -> None:
    """Negative control: keys and values of a draft by fewer layers, kept, change what comes next."""
    (touched, clean), (root, _) = opened(runner, TEXTS[:1] * 2)
    (tokens,) = chains(runner, [touched], [root], [4], PLANS[0])
    touched.commit((0, 1))
    runner.extend([clean], [[root, *tokens[:2]]])
    mine, theirs = (runner.score([cache], [tokens[2]], [EMPTY_TREE]).logits.clone() for cache in (touched, clean))
    assert not torch.equal(mine, theirs)


def test_verification_can_resume_at_the_exit(runner: NativeRunner) -> None:
    """States of drafted positions, taken through the other layers, give the bits of a whole pass."""
    drafts, plan = layer_drafts_of(runner, "x"), LayerPlan(stop=2)
    (cache, clean), (root, _) = opened(runner, TEXTS[:1] * 2)
    inputs, states = [root, 17, 3, 90], []
    for count in range(1, len(inputs) + 1):
        states.append(drafts.step([cache], [inputs[:count]], plan, states=True).states)
    tree = TokenTree.chain(inputs[1:])
    hidden = runner.run_layers([cache], [root], [tree], plan=LayerPlan(first=2), hidden=torch.cat(states)).states
    assert torch.equal(runner.head(hidden), runner.score([clean], [root], [tree]).logits)


def test_more_sequences_than_a_pass_holds(folder: Path) -> None:
    runner = load(folder)
    texts = [[(1 + i) % VOCAB, (3 * i) % VOCAB, 5] for i in range(ROWS + 3)]
    caches, roots = opened(runner, texts)
    found = chains(runner, caches, roots, [2] * len(texts), PLANS[0])
    assert found[-1:] == chains(runner, caches[-1:], roots[-1:], [2], PLANS[0])


def test_scattered_caches_draft_alike(folder: Path) -> None:
    runner = load(folder)
    runner.arena.copy_limit = 0
    (cache,), (root,) = opened(runner, [TEXTS[2]])
    expected = chains(runner, [cache], [root], [5], PLANS[1])[0]
    twin = runner.fork(cache)
    found = chains(runner, [cache, twin], [root] * 2, [5, 5], PLANS[1])
    assert min(cache.base, twin.base) < 0, "nothing is scattered"
    assert found == [expected] * 2


def test_a_runner_that_cannot_is_rejected_by_name(folder: Path) -> None:
    runner = load(folder)
    layer_drafts_of(runner, "layer_skip")
    for method in ("run_layers", "head"):
        with pytest.raises(
            CapabilityError, match="method 'layer_skip' drafts with some of the target's own layers, which"
        ):
            layer_drafts_of(without(runner, method), "layer_skip")
