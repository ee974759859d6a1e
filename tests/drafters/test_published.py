"""Named alone a method drafts as its paper or its published code does: shapes and numbers, seen in what is scored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datastores import Numbers, write

from benchmarks.stand_ins import random_head
from paceline import LLM, SamplingParams, registry
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.lookup.token_recycling import TokenRecyclingDrafter
from paceline.errors import ConfigError
from paceline.llm import BUNDLED
from paceline.tree import TokenTree

PROMPT = "Name the first three months of the year, please."
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


def scored(llm: LLM, params: SamplingParams = GREEDY) -> tuple[Any, list[TokenTree]]:
    """Its text, and the trees that were scored."""
    controller, trees = llm.engine.parts.controller, list[TokenTree]()
    select = controller.select

    def noted(proposed: Any) -> Any:
        chosen = select(proposed)
        trees.extend(tree for tree in chosen if len(tree))
        return chosen

    controller.select = noted  # type: ignore[method-assign]
    (found,) = llm.generate(PROMPT, params)
    assert not found.metrics.dropped_drafters
    return found.outputs[0].token_ids, trees


def text_of(plain: LLM, params: SamplingParams = GREEDY) -> Any:
    return plain.generate(PROMPT, params)[0].outputs[0].token_ids


def levels(tree: TokenTree) -> Iterator[np.ndarray]:
    """The nodes of each level."""
    for depth in range(1, tree.max_depth + 1):
        yield np.flatnonzero(tree.depths == depth)


def test_token_recycling_fills_the_papers_template_of_80_nodes(plain: LLM) -> None:
    llm = plain.with_speculative_config("token_recycling")
    (drafter,) = llm.engine.parts.drafter_set.drafters
    assert isinstance(drafter, TokenRecyclingDrafter)
    tables = drafter.tables.of("").candidates_vk
    tables[:] = (np.arange(len(tables))[:, None] + 1 + np.arange(8)) % len(tables)
    tokens, trees = scored(llm)
    assert tokens == text_of(plain)
    full = trees[:-8]  # the end of the output allows less
    assert full
    assert {tuple(len(level) for level in levels(tree)) for tree in full} == {(8, 21, 25, 15, 8, 3)}


@pytest.mark.parametrize(
    ("params", "candidates"),
    [(GREEDY, (3, 5, 8, 10)), (SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True), (1, 3, 5, 10))],
    ids=["greedy", "seeded"],
)
def test_swift_keeps_more_candidates_where_it_doubts(
    plain: LLM, params: SamplingParams, candidates: tuple[int, ...]
) -> None:
    """By the best one's chance: above 0.95, above 0.8, above 0.5, and below; below 0.8 it is the last level."""
    tokens, trees = scored(plain.with_speculative_config({"method": "swift", "max_search_steps": 0}), params)
    assert tokens == text_of(plain, params)
    seen = set()
    for tree in trees:
        for depth, nodes in enumerate(levels(tree), 1):
            chances = tree.confidence[nodes]
            best = float(chances.max())
            wanted = candidates[(best <= 0.95) + (best <= 0.8) + (best <= 0.5)]
            assert len(set(tree.parents[nodes].tolist())) == 1, "side branches hang off the chain"
            assert len(nodes) == wanted
            assert best >= 0.8 or depth == tree.max_depth
            seen.add(wanted)
        assert tree.max_depth <= 25
    assert len(seen) > 1
    chains = plain.with_speculative_config({"method": "swift", "max_search_steps": 0, "tree_width": 1})
    assert all(tree.is_chain for tree in scored(chains, params)[1])


def test_eagle2_drafts_six_levels_and_59_nodes(plain: LLM) -> None:
    """Sixty with the root, of which ten children and nodes a level."""
    info = plain.runner.info
    head = random_head("eagle", info.hidden_size, info.vocab_size)
    tokens, trees = scored(plain.with_speculative_config({"method": "eagle2", "model": head}))
    assert tokens == text_of(plain)
    assert {len(tree) for tree in trees[:-8]} == {59}
    assert {tree.max_depth for tree in trees[:-8]} <= {*range(1, 7)}
    assert max(len(level) for tree in trees for level in levels(tree)) > 10
    (drafter,) = plain.with_speculative_config({"method": "eagle2", "model": head}).engine.parts.drafter_set.drafters
    assert (drafter.tree_policy, drafter.limit) == ("eagle2", 6)  # type: ignore[attr-defined]


def store_of(plain: LLM, folder: Path) -> str:
    info, tokenizer = plain.runner.info, plain.tokenizer
    words = Numbers(info.vocab_size, tokenizer.fingerprint())
    return str(write(folder / "texts.datastore", [text_of(plain)], tokenizer=words))


def test_rasd_has_a_draft_model_before_it(plain: LLM, tmp_path: Path) -> None:
    store = store_of(plain, tmp_path)
    llm = plain.with_speculative_config({"method": "rasd", "datastore": store, "model": str(BUNDLED / "draft")})
    drafters = llm.engine.parts.drafter_set.drafters
    assert [drafter.name for drafter in drafters] == ["draft_model", "rasd"]
    assert isinstance(drafters[0], DraftModelDrafter)
    assert drafters[0].tree_policy == "eagle2"
    tokens, trees = scored(llm)
    assert tokens == text_of(plain)
    sources = {int(source) for tree in trees for source in tree.sources}
    assert sources == {0, 1}
    assert max(map(len, trees)) <= 64


def test_options_go_to_the_method_that_was_named(plain: LLM, tmp_path: Path) -> None:
    store = store_of(plain, tmp_path)
    llm = plain.with_speculative_config({"method": "rasd", "datastore": store, "prune_top_k": 3})
    assert llm.engine.parts.drafter_set.drafters[1].kept == 3  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="prune_top"):
        plain.with_speculative_config({"method": "rasd", "datastore": store, "prune_top": 3})
    alone = plain.with_speculative_config({"method": "rasd", "datastore": store, "num_speculative_tokens": 4})
    assert [drafter.name for drafter in alone.engine.parts.drafter_set.drafters] == ["rasd"], "not as published"


def test_every_published_setting_is_one_that_the_method_takes() -> None:
    """Keys of a method that nobody has would be an error at the first use."""
    from paceline.assembly import check_methods
    from paceline.config import SpeculativeConfig

    for name, entry in registry.DRAFTERS.items():
        check_methods(SpeculativeConfig.parse(name))
        listed = entry.published.get("method")
        assert listed is None or name in [one["method"] for one in listed]
