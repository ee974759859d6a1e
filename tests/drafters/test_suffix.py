"""SuffixDecoding: what is drafted from this text and from past ones, how much of it, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.drafters import Context, DrafterArgs
from paceline.drafters.suffix import SuffixDrafter
from paceline.drafters.suffix import drafter as suffix_drafter
from paceline.errors import ConfigError, DrafterError
from paceline.tree import EMPTY_TREE, Budget, TokenTree

VOCAB = 100


def make(vocab: int = VOCAB, words: str = "abc", **options: Any) -> SuffixDrafter:
    return SuffixDrafter(DrafterArgs(vocab_size=vocab, index=1, max_context=512, fingerprint=lambda: words), **options)


def context(tokens: Sequence[int], prompt: int | None = None, tenant: str = "") -> Context:
    return Context("r", list(tokens), len(tokens) if prompt is None else prompt, tenant=tenant)


def drafted(
    drafter: SuffixDrafter, text: Sequence[int], nodes: int = 16, depth: int = 16, tenant: str = ""
) -> TokenTree:
    (state,) = drafter.begin([context(text, tenant=tenant)])
    (tree,) = drafter.propose([state], [Budget(nodes, depth)], [EMPTY_TREE])
    tree.check(VOCAB, nodes)
    return tree


def teach(drafter: SuffixDrafter, prompt: Sequence[int], output: Sequence[int], tenant: str = "") -> None:
    """A request that comes and goes."""
    (state,) = drafter.begin([context(prompt, tenant=tenant)])
    state.context.tokens.extend(output)
    drafter.end([state])


def test_text_that_repeats_itself_is_drafted_as_far_as_it_matches() -> None:
    """abcabcabc: six tokens match, so six are drafted, beyond the end of what was there to copy."""
    text = [1, 2, 3] * 3
    tree = drafted(make(), text)
    assert tree.tokens.tolist() == [1, 2, 3, 1, 2, 3]
    assert tree.is_chain
    assert drafted(make(suffix_decoding_max_spec_factor=2.0), text).tokens.tolist() == [1, 2, 3] * 4
    assert drafted(make(suffix_decoding_max_spec_factor=0.5), text).tokens.tolist() == [1, 2, 3]
    assert drafted(make(suffix_decoding_use_tree_spec=True), text).tokens.tolist() == [1, 2, 3] * 2


def test_a_copy_is_drafted_ever_further_and_accepted() -> None:
    """The first token of the copy matches 1, then 2, 4, 8 follow; with depth 24 the draft is 12 long where 12 match."""
    original = list(range(10, 60))
    drafter = make()
    (state,) = drafter.begin([context([*original, 5, 10])])
    done, lengths = 1, []
    while done < len(original) - 12:
        (tree,) = drafter.propose([state], [Budget(16, 16)], [EMPTY_TREE])
        assert tree.tokens.tolist() == original[done : done + len(tree)]
        lengths.append(len(tree))
        state.context.tokens.extend(original[done : done + len(tree) + 1])
        done += len(tree) + 1
    assert lengths == [1, 3, 7, 12, 12]


@pytest.mark.parametrize("tree_mode", [False, True])
def test_where_every_token_is_new_nothing_is_drafted(tree_mode: bool) -> None:
    drafter = make(suffix_decoding_use_tree_spec=tree_mode)
    assert drafted(drafter, range(90)) is EMPTY_TREE
    teach(drafter, range(50), range(50, 90))
    assert drafted(drafter, [95, 96, 97]) is EMPTY_TREE


def test_outputs_of_past_requests_are_known_with_the_end_of_their_prompts() -> None:
    drafter = make(suffix_decoding_max_tree_depth=6)
    teach(drafter, [1, 2, 3, 4, 5, 6, 7, 8], [20, 21, 22, 23])
    assert drafted(drafter, [30, 7, 8]).tokens.tolist() == [20, 21]
    assert drafted(drafter, [30, 21, 22]).tokens.tolist() == [23]
    assert drafted(drafter, [30, 1, 2]) is EMPTY_TREE
    whole = make(suffix_decoding_max_tree_depth=6, suffix_decoding_cache_prompts=True)
    teach(whole, [1, 2, 3, 4, 5, 6, 7, 8], [20, 21, 22, 23])
    assert drafted(whole, [30, 1, 2]).tokens.tolist() == [3, 4]
    for keeps_nothing in (make(suffix_decoding_max_cached_requests=0), make(max_cached_tokens=0)):
        teach(keeps_nothing, [7, 8], [20, 21])
        assert drafted(keeps_nothing, [30, 7, 8]) is EMPTY_TREE


def test_the_oldest_request_is_forgotten_first() -> None:
    drafter = make(suffix_decoding_max_cached_requests=2)
    for start in (10, 20, 30):
        teach(drafter, [5], range(start, start + 5))
    assert drafted(drafter, [1, 10, 11]) is EMPTY_TREE
    assert drafted(drafter, [1, 20, 21]).tokens.tolist() == [22, 23]
    few = make(max_cached_tokens=12)
    for start in (10, 20, 30):
        teach(few, [5], range(start, start + 5))
    assert drafted(few, [1, 10, 11]) is EMPTY_TREE
    assert drafted(few, [1, 30, 31]).tokens.tolist() == [32, 33]


def test_tenants_learn_nothing_of_each_other_unless_tables_are_shared() -> None:
    apart, shared = make(), make(shared_tables=True)
    for drafter in (apart, shared):
        teach(drafter, [1, 2], [3, 4, 5], tenant="a")
    assert drafted(apart, [9, 2, 3], tenant="b") is EMPTY_TREE
    assert drafted(apart, [9, 2, 3], tenant="a").tokens.tolist() == [4, 5]
    assert drafted(shared, [9, 2, 3], tenant="b").tokens.tolist() == [4, 5]


def test_the_tree_with_the_higher_score_drafts() -> None:
    """The text knows two tokens of the match, past requests three; where both know as many, the text's own word
    counts.
    """
    drafter = make()
    teach(drafter, [50], [7, 8, 9, 20, 21, 22])
    assert drafted(drafter, [8, 9, 30, 31, 32, 7, 8, 9]).tokens.tolist() == [20, 21, 22]
    assert drafted(drafter, [7, 8, 9, 30, 31, 32, 7, 8, 9]).tokens.tolist() == [30, 31, 32]
    certain = [1, 8, 9, 40, 41, 2, 8, 9, 40, 41, 3, 8, 9]
    teach(drafter, [50], [60, 8, 9, 61, 60, 8, 9, 62, 60, 8, 9, 63, 60, 8, 9, 64])
    assert drafted(drafter, certain).tokens.tolist() == [40, 41]


def test_counts_decide_and_improbable_paths_are_not_followed() -> None:
    drafter = make(suffix_decoding_min_token_prob=0.4)
    for output in ([7, 8, 9, 20], [7, 8, 9, 20], [7, 8, 9, 21]):
        teach(drafter, [50], output)
    assert drafted(drafter, [1, 8, 9]).tokens.tolist() == [20]
    picky = make(suffix_decoding_min_token_prob=0.7)
    for output in ([7, 8, 9, 20], [7, 8, 9, 20], [7, 8, 9, 21]):
        teach(picky, [50], output)
    assert drafted(picky, [1, 8, 9]) is EMPTY_TREE


def test_tree_mode_follows_all_probable_children() -> None:
    drafter = make(suffix_decoding_use_tree_spec=True, suffix_decoding_max_spec_factor=4.0)
    for output in ([7, 8, 20, 30], [7, 8, 20, 30], [7, 8, 20, 31], [7, 8, 21, 40]):
        teach(drafter, [50], output)
    tree = drafted(drafter, [1, 7, 8])
    paths = {tuple(int(tree.tokens[i]) for i in tree.path(leaf)) for leaf in tree.leaves()}
    assert paths == {(20, 30), (20, 31), (21, 40)}
    assert tree.tokens[0] == 20
    few = drafted(drafter, [1, 7, 8], nodes=3)
    assert sorted(few.tokens.tolist()) == [20, 21, 30]
    assert drafted(drafter, [1, 7, 8], depth=1).tokens.tolist() == [20, 21]


def test_what_is_drafted_follows_from_the_counts() -> None:
    """Every token is a most frequent follower of the path before it, and its chance is the one that the counts give."""
    rng = np.random.default_rng(3)
    drafter, texts = make(suffix_decoding_max_tree_depth=8), []
    for _ in range(30):
        texts.append([int(t) for t in rng.choice(6, 40, p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05])])
        teach(drafter, [], texts[-1])
    drafts = 0
    for _ in range(60):
        tail = [99, *(int(t) for t in rng.permutation(6)[:4])]  # nothing to copy from the text itself
        tree = drafted(drafter, tail)
        drafts += len(tree) > 0
        assert not len(tree) or any(
            explained(texts, tail[-match:], tree, drafter.workspace.scarce) for match in range(1, 5)
        )
    assert drafts > 40


def explained(texts: Sequence[Sequence[int]], match: Sequence[int], tree: TokenTree, scarce: np.ndarray) -> bool:
    """Whether counts after `match` give exactly this chain and these chances."""
    path, room, prob = list(match), min(len(match), 8 - len(match)), 1.0
    for i in range(room):
        seen, after = occurrences(texts, path), {t: occurrences(texts, [*path, t]) for t in range(6)}
        most = max(after.values())
        prob *= most / max(seen, 1)
        if not most or prob < 0.1:
            return i == len(tree)
        token = int(tree.tokens[i]) if i < len(tree) else -1
        trust = suffix_drafter.PARTED if sum(count > 0 for count in after.values()) > 1 else 1.0
        if (
            after.get(token) != most
            or abs(float(tree.confidence[i]) - trust * most / (seen + scarce[len(path)])) > 1e-6
        ):
            return False
        path.append(token)
    return len(tree) == room


def occurrences(texts: Sequence[Sequence[int]], part: Sequence[int]) -> int:
    size = len(part)
    return sum(list(text[i : i + size]) == list(part) for text in texts for i in range(len(text) - size + 1))


def test_the_explanation_is_rejected_for_other_tokens() -> None:
    """Negative control of the check above."""
    drafter = make()
    teach(drafter, [], [1, 2, 3, 4])
    tree = drafted(drafter, [99, 1, 2])
    assert explained([[1, 2, 3, 4]], [1, 2], tree, drafter.workspace.scarce)
    assert not explained([[1, 2, 3, 5]], [1, 2], tree, drafter.workspace.scarce)
    assert not explained([[1, 2, 3, 4], [1, 2, 3, 4]], [1, 2], tree, drafter.workspace.scarce)


def test_tables_are_kept_on_disk(tmp_path: Path) -> None:
    drafter = make(tables=str(tmp_path))
    teach(drafter, [1, 2], [3, 4, 5], tenant="a")
    drafter.tables.save()
    assert drafted(make(tables=str(tmp_path)), [9, 2, 3], tenant="a").tokens.tolist() == [4, 5]
    with pytest.raises(DrafterError, match="tokenizer"):
        make(words="other", tables=str(tmp_path))
    path = tmp_path / "suffix.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DrafterError, match="cannot be read"):
        make(tables=str(tmp_path))


@pytest.mark.parametrize(
    "options",
    [
        {"suffix_decoding_max_tree_depth": 1},
        {"suffix_decoding_max_tree_depth": 256},
        {"suffix_decoding_max_cached_requests": -1},
        {"suffix_decoding_max_spec_factor": -0.5},
        {"suffix_decoding_min_token_prob": 1.5},
        {"suffix_decoding_use_tree_spec": 1},
        {"suffix_decoding_cache_prompts": "yes"},
        {"max_cached_tokens": -1},
        {"num_speculative_tokens": -1},
    ],
)
def test_values_outside_their_range_are_rejected(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        make(**options)


def test_a_vocabulary_that_does_not_fit_is_rejected() -> None:
    with pytest.raises(ConfigError, match="vocabularies"):
        make(vocab=2**23)
