"""DFlash and DSpark: their logits are those of a plain forward pass, the cache holds what is made of the target's
states alone, a block's rows see each other both ways, and the text stays the target's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dflash_reference as reference
import pytest
import torch
from safetensors.torch import load_file
from tiny_padded import ROWS, TOKENS
from tiny_padded import write as write_padded
from tools.enumerate_draws import Choices
from tools.one_sequence import begin, enumerated, propose
from tools.random_drafts import random_target
from tools.random_trees import WRONG, distribution_error
from toys import ToyRunner

from benchmarks.stand_ins import head_weights, written_head
from paceline import LLM
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.common import draft_rows
from paceline.drafters.growth.base import Growth
from paceline.drafters.heads.block_drafts import BlockState
from paceline.drafters.heads.dflash import DFlashDrafter, DSparkDrafter
from paceline.errors import CheckpointError, ConfigError, PacelineError
from paceline.models import load_runner
from paceline.models.attention.segments import Segment
from paceline.models.heads import HeadConfig, block_taps
from paceline.models.runners import BlockHead
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Trial, prune
from tests.drafters.head_worlds import GREEDY, HeadWorld, check_texts, close, head_config

PROMPT = [(7 * i) % 500 + 4 for i in range(90)]
KINDS: dict[str, Any] = {"dflash": DFlashDrafter, "dspark": DSparkDrafter}
MARKOV = {"markov_rank": 6, "enable_confidence_head": True, "confidence_head_with_markov": True}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "dflash": ("dflash", {}),
    "causal": ("dflash", {"causal": True}),
    "anchor": ("dflash", {"sample_from_anchor": True}),
    "vanilla": ("dspark", MARKOV),
    "gated": ("dspark", MARKOV | {"markov_head_type": "gated", "confidence_head_with_markov": False}),
    "rnn": ("dspark", MARKOV | {"markov_head_type": "rnn"}),
    "bonus anchor": ("dspark", MARKOV | {"sample_from_anchor": False}),
    "no heads": ("dspark", {}),
}


def config(method: Any, info: Any, **more: Any) -> HeadConfig:
    """Two layers of three query heads, one of keys; for compiled passes where the target is."""
    given = {"taps": (-1, 0, 2), "num_layers": 2, "block_size": 5, "mask_token_id": 17}
    return head_config(method, info, **(given | {"sample_from_anchor": method == "dspark"} | more))


class World(HeadWorld[BlockState]):
    """One drafter, and the plain forward pass."""

    drafter: DFlashDrafter

    def __init__(self, folder: Path, form: str = "dflash", *, draft_vocab: int = 300, **options: Any) -> None:
        super().__init__(folder)
        method, more = FORMS[form]
        self.use(config(method, self.target.info, draft_vocab_size=draft_vocab, **more))
        self.start(KINDS[method](self.args, model=written_head(self.config, self.weights), **options), PROMPT)
        stored = load_file(folder / "model.safetensors")
        self.ids = self.weights.get("draft_to_target", torch.arange(self.target.info.vocab_size))
        head = stored["lm_head.weight"]
        self.tables = reference.Tables(stored["model.embed_tokens.weight"], head[self.ids])
        self.vocab_size = len(head)

    def rows(self) -> torch.Tensor:
        """(k, hidden) states of the rows that draft, by the plain forward pass."""
        return reference.drafted_rows(self.config, self.weights, self.tables, self.tokens, self.states)

    def behind(self, rows: torch.Tensor, drafted: Sequence[int] = ()) -> tuple[torch.Tensor, float]:
        """(v,) logits behind drafted tokens, and the confidence there."""
        path = (self.tokens[-1], *drafted)
        logits, confidence = reference.logits_behind(self.config, self.weights, self.tables, rows, path)
        whole = torch.full((self.vocab_size,), float("-inf")).index_copy(0, self.ids, logits)
        return whole, float(confidence)


def path_to(tree: TokenTree, node: int) -> tuple[int, ...]:
    """The drafted tokens up to and with a node."""
    return tuple(int(tree.tokens[i]) for i in tree.path(node)) if node >= 0 else ()


def trials_agree(world: World, tree: TokenTree) -> list[bool]:
    """Of each drawn token, whether it was drawn from the row of the plain forward pass."""
    rows = world.rows()
    return [
        close(trial.row, world.behind(rows, path_to(tree, parent))[0].softmax(0))
        for parent in range(-1, len(tree))
        for trial in tree.trials_of(parent)
        if trial.row is not None
    ]


# ------------------------------------------------------------------------------------------------ logits


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", ["folder", "wide"])
def test_rows_are_those_of_a_plain_forward_pass(size: str, form: str, request: pytest.FixtureRequest) -> None:
    """Drawn rows of a chain and of a tree, in several rounds with some, all and none of it accepted, where the cache
    was written round by round, and the plain pass sees all states at once.
    """
    folder = request.getfixturevalue(size)
    for policy in ({}, {"tree_policy": "rsd_c", "tree_width": [2, 2, 1]}):
        world = World(folder, form, **policy)
        passes = type(world.drafter.head.runner.passes).__name__
        assert passes == {"folder": "EagerPasses", "wide": "CompiledDecoder"}[size]
        state = world.begin(temperature=1.0)
        for accepted in (1, 9, 0):
            tree = world.propose(state, 12, 4)
            agree = trials_agree(world, tree)
            assert len(agree) == len(tree) >= 4
            assert all(agree)
            path = tree.path(tree.leaves()[-1])[:accepted]
            world.commit(state, tree, path, own=11)


def test_what_is_made_of_states_goes_through_no_layers_norm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the first norm of each layer before it, rows are others."""
    wrong, right = reference.block_states, World(folder)
    tree = right.propose(right.begin(temperature=1.0), 4)
    assert all(trials_agree(right, tree))
    monkeypatch.setattr(reference, "block_states", lambda *given: wrong(*given, norm_context=True))
    assert not any(trials_agree(right, tree))


def test_rows_of_a_block_see_each_other_both_ways(folder: Path) -> None:
    """The first draft changes with the mask's embedding in the last row, which causal blocks do not see."""

    def changed(form: str) -> bool:
        world = World(folder, form)
        head, state = world.drafter.head, world.begin()
        world.drafter.catch_up([state])
        whole = head.runner.run_states
        rows = []
        for factor in (1.0, 3.0):

            def run(caches: Any, trees: Any, computed: Any, hidden: Any, factor: float = factor, **more: Any) -> Any:
                hidden = hidden.clone()
                hidden[-1] *= factor
                return whole(caches, trees, computed, hidden, **more)

            head.runner.run_states = run  # type: ignore[method-assign]
            rows.append(head.run([state.cache], [5], 4).logits[0])
        assert not close(rows[0][-1], rows[1][-1])
        return not close(rows[0][0], rows[1][0])

    assert changed("dflash")
    assert not changed("causal")


def test_default_layers_are_spread_over_the_target() -> None:
    cases = {(36, 5): (1, 9, 17, 25, 33), (28, 5): (1, 7, 13, 19, 25), (64, 5): (1, 16, 31, 46, 61), (32, 1): (16,)}
    assert all(block_taps(*sizes) == taps for sizes, taps in cases.items())


def test_many_blocks_at_once_are_each_alone(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than a compiled pass has: no block is cut. Negative control: one that is does not see all of itself."""
    world = World(wide)
    head = world.drafter.head
    caches, tokens, counts = [head.open() for _ in range(60)], list(range(60)), list(range(20, 80))
    head.inject(caches, counts, torch.cat([world.states[:count] for count in counts]))
    alone = [head.run([cache], [token], 4).logits for cache, token in zip(caches, tokens, strict=True)]
    assert close(head.run(caches, tokens, 4).logits, torch.cat(alone))
    monkeypatch.setattr(Segment, "unit", property(lambda self: 1, lambda self, value: None))
    assert not close(head.run(caches, tokens, 4).logits, torch.cat(alone))


# ------------------------------------------------------------------------------------------------ the cache


def cached(world: World, cache: Any) -> torch.Tensor:
    """Keys and values of a sequence, of all layers."""
    return world.drafter.head.runner.arena.kv[:, torch.as_tensor(cache.slot_index(0, cache.length))]


@pytest.mark.parametrize("form", ["dflash", "vanilla"])
@pytest.mark.parametrize("size", ["folder", "wide"])
def test_the_cache_has_one_position_for_each_state(size: str, form: str, request: pytest.FixtureRequest) -> None:
    """After every draft: as many as tokens before the pending one, and what one pass over all states makes. Control:
    other states make another cache.
    """
    world = World(request.getfixturevalue(size), form)
    state = world.begin()
    for turn in range(5):
        tree = world.propose(state, 4, 4)
        assert state.cache.length == len(world.states) == len(world.tokens) - 1
        fresh, other = world.drafter.head.open(), world.drafter.head.open()
        world.drafter.head.inject(
            [fresh, other], [len(world.states)] * 2, torch.cat((world.states, world.states.roll(1)))
        )
        assert close(cached(world, state.cache), cached(world, fresh))
        assert not close(cached(world, state.cache), cached(world, other))
        path = tree.path(tree.leaves()[0])[: turn % 4]
        world.commit(state, EMPTY_TREE if turn == 3 else tree, () if turn == 3 else path, own=20 + turn)


def test_a_fork_goes_on_for_itself(folder: Path) -> None:
    world = World(folder)
    state = world.begin()
    first = world.propose(state, 4).tokens.tolist()
    other = world.drafter.fork(state, Context("b", list(PROMPT), len(PROMPT)))
    world.commit(state, EMPTY_TREE, (), 9)
    assert world.propose(state, 4).tokens.tolist() != first
    assert world.propose(other, 4).tokens.tolist() == first


def test_a_gap_in_the_states_is_left_behind(folder: Path) -> None:
    """Tokens whose states nobody gave: nothing is drafted before there are new ones, and then from these alone."""
    world = World(folder)
    state = world.begin()
    world.propose(state, 4)
    state.context.tokens += [9, 10]
    assert world.propose(state, 4) is EMPTY_TREE
    world.states = torch.cat((world.states, world.extended([PROMPT[-1], 9])))
    world.tokens += [9, 10]
    world.commit(state, EMPTY_TREE, (), 12)
    world.tokens, world.states = world.tokens[-2:], world.states[-1:]
    tree = world.propose(state, 4)
    assert int(tree.tokens[0]) == int(world.behind(world.rows())[0].argmax())


def test_two_sequences_at_once_are_each_alone(folder: Path) -> None:
    for options in ({}, {"tree_width": 3}):
        alone, both = World(folder, "rnn", **options), World(folder, "rnn", **options)
        context = Context("b", PROMPT[:8], 8, taps={layer: tap[:7] for layer, tap in both.taps.items()})
        states = [both.begin(), *both.drafter.begin([context])]
        first, second = both.drafter.propose(states, [Budget(9, 4)] * 2, [EMPTY_TREE] * 2)
        assert first.tokens.tolist() == alone.propose(alone.begin(), 9, 4).tokens.tolist()
        assert second.tokens.tolist() == alone.propose(alone.drafter.begin([context])[0], 9, 4).tokens.tolist()


# ------------------------------------------------------------------------------------------------ DSpark's heads


def test_without_a_correction_it_is_dflash_from_the_anchor(folder: Path) -> None:
    """W2 = 0. Control: with it, other tokens are drafted."""
    dspark, anchor = World(folder, "vanilla", draft_vocab=300), World(folder, "anchor")
    args = DrafterArgs(vocab_size=dspark.vocab_size, index=0, max_context=99, target=dspark.target)
    weights = dict(dspark.weights)
    weights |= {name: one for name, one in anchor.weights.items() if name in weights}
    drafted = {}
    for scale in (0.0, 20.0):
        w2 = {"markov_head.markov_w2.weight": scale * dspark.weights["markov_head.markov_w2.weight"]}
        dspark.drafter = DSparkDrafter(args, model=written_head(dspark.config, weights | w2))
        drafted[scale] = dspark.propose(dspark.begin(), 5).tokens.tolist()
    assert drafted[0.0] == anchor.propose(anchor.begin(), 5).tokens.tolist() != drafted[20.0]


@pytest.mark.parametrize("form", ["vanilla", "gated", "rnn"])
def test_a_correction_sees_the_tokens_before_it_alone(form: str, folder: Path) -> None:
    """Along a chain of drawn tokens. Negative control: with the row's own token in the place of the one before it."""
    world = World(folder, form)
    tree = world.propose(world.begin(temperature=1.0), 5)
    rows, tokens = world.rows(), tree.tokens.tolist()
    for i in range(5):
        (trial,) = tree.trials_of(i - 1)
        assert trial.row is not None
        assert close(trial.row, world.behind(rows, tokens[:i])[0].softmax(0))
        late = (*tokens[: i + 1],)
        logits, _ = reference.logits_behind(world.config, world.weights, world.tables, rows, late)
        assert not close(trial.row[world.ids], logits.softmax(0))


@pytest.mark.parametrize("form", ["vanilla", "gated", "rnn"])
def test_the_draft_ends_before_the_first_that_is_not_likely_enough(form: str, folder: Path) -> None:
    """By the confidence of the plain forward pass, for chains and trees; nothing at 1, the whole block at 0."""
    for policy in ({}, {"tree_width": 3}, {"tree_policy": "dyspec"}, {"tree_policy": "eagle2", "tree_width": 3}):
        found = {}
        for threshold in (0.0, 0.45, 0.55, 1.0):
            world = World(folder, form, confidence_threshold=threshold, **policy)
            tree, rows = world.propose(world.begin(), 16, 5), world.rows()
            found[threshold] = len(tree)
            for node in (node for node in range(-1, len(tree)) if node < 0 or tree.depths[node] < 5):
                enough = world.behind(rows, path_to(tree, node))[1] >= threshold
                assert enough or not tree.children(node)
                assert tree.children(node) or policy or not enough
        assert found[0.0] >= found[0.45] >= found[0.55] >= found[1.0] == 0 < found[0.0]


def test_drawn_trees_draft_nothing_behind_an_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every policy that draws; no rule of the request revives a place. Control: growth that does not know of ends."""
    policies = [{"tree_policy": name} for name in ("rsd_c", "rsd_s", "dyspec", "dyspec_threshold", "spectr")]
    for options in policies:
        world = World(folder, "vanilla", confidence_threshold=1.0, **options)
        assert len(world.propose(world.begin(temperature=1.0), 16, 5)) == 0
    monkeypatch.setattr(Growth, "rows", lambda self, logits: logits)
    world = World(folder, "vanilla", confidence_threshold=1.0, tree_policy="rsd_c")
    assert len(world.propose(world.begin(temperature=1.0), 16, 5)) > 0


# ------------------------------------------------------------------------------------------------ the law of the text


SHORT = [1, 2, 3]


def enumerable(form: str, threshold: float, **options: Any) -> tuple[DSparkDrafter, Callable[[Choices], TokenTree]]:
    """A drafter over four tokens, and its tree behind a short text as a program whose draws go through `Choices`."""
    target, (method, more) = ToyRunner(4, seed=3), FORMS[form]
    layer = {"num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 64}
    own = HeadConfig(
        method=method, hidden_size=8, vocab_size=4, draft_vocab_size=4, taps=(0, 2), layer=layer, block_size=2,
        mask_token_id=3, sample_from_anchor=True, **more,
    )  # type: ignore[arg-type]  # fmt: skip
    weights = head_weights(own, shared=False, seed=1)
    weights["markov_head.markov_w2.weight"] *= 3.0
    weights["markov_head.markov_w1.weight"][:, 0] = torch.tensor([-2.0, 2.0, -2.0, 2.0])  # of the first and third token
    weights["confidence_head.proj.weight"] = torch.eye(14)[8:9]  # nothing is to be drafted behind
    args = DrafterArgs(vocab_size=4, index=0, max_context=99, target=target)
    drafter = DSparkDrafter(args, model=written_head(own, weights), confidence_threshold=threshold, **options)
    texts = [SHORT[:end] for end in range(1, len(SHORT))]
    taps = {layer: torch.stack([target.hidden(layer, text) for text in texts]) for layer in drafter.taps}

    def draws(choices: Choices) -> TokenTree:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(draft_rows, "draw_tokens", enumerated(choices))
            state = begin(drafter, SHORT, temperature=1.0, taps=taps)
            tree = propose(drafter, state, 3)
            drafter.end([state])
        return tree

    return drafter, draws


LAW = random_target(1, 4, zeros=0.0)
CUTTING = 0.45
"""Confidence that some paths have and others lack."""


RSD_C, DYSPEC = {"tree_policy": "rsd_c", "tree_width": [2, 1]}, {"tree_policy": "dyspec"}


@pytest.mark.parametrize(
    ("form", "options"), [("vanilla", {}), ("rnn", {}), ("vanilla", RSD_C), ("rnn", DYSPEC)], ids=str
)
def test_the_text_has_the_targets_law(form: str, options: dict[str, Any]) -> None:
    """Exactly, over all draws, where the confidence cuts some drafts and not others."""
    _, draws = enumerable(form, CUTTING, **options)
    sizes: set[int] = set()

    def seen(choices: Choices) -> TokenTree:
        tree = draws(choices)
        sizes.add(tree.max_depth)
        return tree

    assert distribution_error(seen, LAW, 3) < 1e-6, "float32 rows"
    assert len(sizes) > 1


def test_rows_without_the_correction_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: tokens are drawn with the correction and verified by what the block's rows say alone."""
    drafter, draws = enumerable("vanilla", 0.0)
    rows = []
    run = drafter.head.run
    monkeypatch.setattr(drafter.head, "run", lambda *given: rows.append(run(*given)) or rows[-1])

    def lying(choices: Choices) -> TokenTree:
        tree = draws(choices)
        said = rows[-1].logits[0].softmax(-1)
        trials = {p: (Trial(each[0].node, said[p + 1]),) for p, each in tree.trials.items()}
        return tree.replace(trials=trials)

    assert distribution_error(lying, LAW, 3) > WRONG


def test_a_cut_by_the_drafted_token_itself_shows() -> None:
    """Negative control: a drawn token goes because nothing is likely to be accepted behind it."""
    _, draws = enumerable("vanilla", CUTTING)

    def cut(choices: Choices) -> TokenTree:
        tree = draws(choices)
        last = len(tree) - 1
        return prune(tree, list(range(last))) if 0 <= last < 2 else tree

    assert max(distribution_error(cut, random_target(seed, 4, zeros=0.0), 3) for seed in range(4)) > WRONG


# ------------------------------------------------------------------------------------------------ the mask token


def test_the_mask_may_be_a_row_that_is_no_token(tmp_path: Path) -> None:
    """Its embedding is read from the target's files: the rows are those of a network with the embedding in its own.
    Control: another row for the mask makes others.
    """
    llm = LLM(write_padded(tmp_path), speculative_config=None, dtype="float32", threads=1, profile=False)
    own = config("dflash", llm.runner.info, draft_vocab_size=100, vocab_size=ROWS, mask_token_id=ROWS - 1)
    assert llm.runner.info.vocab_size == TOKENS < ROWS
    weights, table = head_weights(own), load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]

    def rows(own: HeadConfig, **more: torch.Tensor) -> torch.Tensor:
        given = {"method": "dflash", "model": written_head(own, weights | more), "num_speculative_tokens": 4}
        fast = llm.with_speculative_config(given)
        (out,) = fast.generate("abc abc abc", GREEDY)
        assert out.metrics.num_draft_tokens > 0
        assert not out.metrics.dropped_drafters
        head: BlockHead = fast.engine.parts.drafter_set.drafters[0].head
        return head.run([head.open()], [5], 4).logits

    found = rows(own)
    assert close(found, rows(own, **{"embed.weight": table}))
    other = torch.cat((table[:-1], table[:1]))
    assert not close(found, rows(own, **{"embed.weight": other}))
    with pytest.raises(CheckpointError, match=f"has {ROWS} embeddings, and its head asks for that of token {ROWS}"):
        rows(replace(own, mask_token_id=ROWS))


# ------------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize("form", ["dflash", "rnn"])
def test_the_text_is_the_targets(plain: LLM, form: str) -> None:
    method, more = FORMS[form]
    own = config(method, plain.runner.info, **more)
    check_texts(plain, {"method": method.upper(), "model": written_head(own)})


def test_wrong_heads_are_named(folder: Path) -> None:
    target = load_runner(str(folder), dtype="float32")
    args = DrafterArgs(vocab_size=target.info.vocab_size, index=0, max_context=128, target=target)
    own = config("dflash", target.info)
    dynamic = {**own.layer, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    cases: list[tuple[type[PacelineError], str, Any]] = [
        (CheckpointError, "is of method 'dflash', not 'dspark'", lambda: DSparkDrafter(args, model=written_head(own))),
        (ConfigError, "speculative_config model must be the folder or hub id of a head", lambda: DFlashDrafter(args)),
        (ConfigError, "confidence_threshold must be in 0..1", lambda: DSparkDrafter(args, confidence_threshold=2.0)),
        (
            CheckpointError,
            "has rotary angles that depend on the text's length",
            lambda: DFlashDrafter(args, model=written_head(replace(own, layer=dynamic))),
        ),
        (
            CheckpointError,
            "has mask_token_id 9999, and the embedding has",
            lambda: DFlashDrafter(args, model=written_head(replace(own, mask_token_id=9999))),
        ),
    ]
    for error, message, make in cases:
        with pytest.raises(error, match=message):
            make()
