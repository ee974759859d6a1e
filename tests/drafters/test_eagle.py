"""EAGLE heads: their logits are those of a plain forward pass, true next states make every draft right, the cache holds
true states alone, and the text stays the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_reference as reference
import pytest
import torch
from lacking import without
from safetensors.torch import load_file

from benchmarks.stand_ins import written_head
from paceline import LLM
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.dovetail import DovetailDrafter
from paceline.drafters.heads.eagle import Eagle2Drafter, Eagle3Drafter, EagleDrafter
from paceline.drafters.heads.falcon import FalconDrafter
from paceline.drafters.heads.feature_drafts import FeatureState
from paceline.drafters.heads.fspad import FspadDrafter
from paceline.drafters.heads.p_eagle import PEagleDrafter
from paceline.errors import CapabilityError, CheckpointError, ConfigError, PacelineError
from paceline.models import PassResult, load_runner
from paceline.models.heads import HeadConfig, tensors_of
from paceline.models.runners import FeatureHead
from paceline.tree import EMPTY_TREE, Budget, TokenTree
from tests.drafters.head_worlds import GREEDY, PROMPTS, HeadWorld, check_texts, close, head_config, outputs

PROMPT = [(7 * i) % 500 + 4 for i in range(300)]
"""Longer than the rows of a compiled pass."""
KINDS: dict[str, Any] = {
    "eagle": EagleDrafter, "eagle2": Eagle2Drafter, "fspad": FspadDrafter, "eagle3": Eagle3Drafter,
    "p_eagle": PEagleDrafter, "falcon": FalconDrafter, "dovetail": DovetailDrafter,
}  # fmt: skip
METHODS: dict[str, Any] = {**{name: name for name in KINDS}, "eagle2": "eagle"}
"""Name -> the method of its head."""
FORMS: dict[str, dict[str, Any]] = {
    "fspad": {"inner_size": 24}, "eagle3": {"taps": (-1, 0, 2)}, "falcon": {"block_size": 2},
    "dovetail": {"num_layers": 2},
}  # fmt: skip
FORMS["p_eagle"] = FORMS["eagle3"] | {"num_layers": 2, "mask_token_id": 9}


def config(method: Any, info: Any, **more: Any) -> HeadConfig:
    """A head of three query heads, one of keys, and taps for EAGLE-3; for compiled passes where the target is."""
    return head_config(method, info, **(FORMS.get(method, {}) | more))


class World(HeadWorld[FeatureState]):
    """One drafter, and the plain forward pass."""

    drafter: EagleDrafter

    def __init__(
        self, folder: Path, name: str = "eagle", *, draft_vocab: int = 300, norm_before_residual: bool = False,
        qk_norm: bool = False, norms: str = "", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(folder)
        more = {"draft_vocab_size": draft_vocab, "norm_before_residual": norm_before_residual}
        self.use(config(METHODS[name], self.target.info, **more))
        for layer in range(self.config.num_layers if qk_norm else 0):
            for one in "qk":
                self.weights[f"layers.{layer}.self_attn.{one}_norm.weight"] = 1 + torch.rand(self.config.head_dim)
        extra = [one for one in tensors_of(self.config) if norms and one.name.startswith(norms)]
        self.weights |= {one.name: 1 + torch.rand(one.shape) for one in extra}
        self.start(KINDS[name](self.args, model=written_head(self.config, self.weights), **options), PROMPT)
        stored = load_file(folder / "model.safetensors")
        self.embedding, self.head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]

    def row(self, drafted: tuple[int, ...] = ()) -> torch.Tensor:
        """(v,) the head's logits behind drafted tokens, by the plain forward pass."""
        ids = self.weights.get("draft_to_target", torch.arange(len(self.head)))
        known = self.tokens[1:], reference.joined(self.config, self.weights, self.states)
        row = torch.full((len(self.head),), float("-inf"))
        given = self.config, self.weights, (self.embedding, self.head[ids]), known
        parallel = self.config.method == "p_eagle"
        row[ids] = reference.ahead(*given, len(drafted) + 1)[-1] if parallel else reference.after(*given, drafted)
        return row


# ------------------------------------------------------------------------------------------------ logits


@pytest.mark.parametrize("draft_vocab", [300, None])
@pytest.mark.parametrize("name", ["eagle", "fspad", "eagle3", "p_eagle"])
@pytest.mark.parametrize("size", ["folder", "wide"])
def test_logits_are_those_of_a_plain_forward_pass(
    size: str, name: str, draft_vocab: int | None, request: pytest.FixtureRequest
) -> None:
    """Drawn rows of a chain and of a tree, in several rounds with some, all and none of it accepted."""
    folder = request.getfixturevalue(size)
    vocab = draft_vocab or load_runner(str(folder), dtype="float32").info.vocab_size
    for policy in ({"tree_policy": "levels"}, {"tree_policy": "rsd_c", "tree_width": [2, 2]}):
        world = World(folder, name, draft_vocab=vocab, **policy)
        assert (
            type(world.drafter.head.runner.passes).__name__
            == {"folder": "EagerPasses", "wide": "CompiledDecoder"}[size]
        )
        state = world.begin(temperature=1.0)
        for accepted in (1, 9, 0):
            tree = world.propose(state, 6, 3)
            assert len(tree) >= 3
            for parent in (-1, *(node for node in range(len(tree)) if tree.trials_of(node))):
                path = tuple(int(tree.tokens[i]) for i in tree.path(parent)) if parent >= 0 else ()
                for trial in tree.trials_of(parent):
                    assert close(trial.row, world.row(path).softmax(0))
            assert not close(tree.trials_of(-1)[0].row, world.row((5,)).softmax(0))
            path = tree.path(tree.leaves()[-1])[:accepted]
            world.commit(state, tree, path, own=11)


@pytest.mark.parametrize("size", ["folder", "wide"])
@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("eagle3", {"norm_before_residual": True}), ("eagle3", {"qk_norm": True}), ("eagle3", {"norms": "fc_norm."}),
        ("p_eagle", {"norm_before_residual": True, "qk_norm": True, "norms": "input_norm."}),
    ],
)  # fmt: skip
def test_layers_of_other_forms(size: str, name: str, form: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """As in many heads of speculators: attention is added to the normed state, queries and keys are normed, or what fc
    reads.
    """
    world = World(request.getfixturevalue(size), name, **form)
    state = world.begin(temperature=1.0)
    for own in (7, 8):
        tree = world.propose(state, 3)
        rows = [trial.row for node in (-1, 0, 1) for trial in tree.trials_of(node)]
        paths = [tuple(int(token) for token in tree.tokens[:n]) for n in range(3)]
        assert all(close(row, world.row(path).softmax(0)) for row, path in zip(rows, paths, strict=True))
        config, weights = world.config, world.weights
        world.config = replace(config, norm_before_residual=False)
        world.weights = {name: one for name, one in weights.items() if "_norm." not in name or "hidden" in name}
        assert not close(rows[0], world.row().softmax(0))
        world.config, world.weights = config, weights
        world.commit(state, tree, (0,), own)


def test_two_sequences_at_once_are_each_alone(folder: Path) -> None:
    alone, both = World(folder, tree_width=3), World(folder, tree_width=3)
    context = Context("b", PROMPT[:8], 8, taps={layer: tap[:7] for layer, tap in both.taps.items()})
    states = [both.begin(), *both.drafter.begin([context])]
    first, second = both.drafter.propose(states, [Budget(9, 4)] * 2, [EMPTY_TREE] * 2)
    assert first.tokens.tolist() == alone.propose(alone.begin(), 9, 4).tokens.tolist()
    assert second.tokens.tolist() == alone.propose(alone.drafter.begin([context])[0], 9, 4).tokens.tolist()


# ------------------------------------------------------------------------------------------------ trees


@pytest.mark.parametrize("width", [2, 3])
def test_eagle2_is_the_paper_by_brute_force(folder: Path, width: int) -> None:
    """Expand the best paths of each level, rank all, keep the best; every node's parent is among them."""
    world = World(folder, "eagle2", tree_width=width)
    tree = world.propose(world.begin(), 7, 3)
    scores: dict[tuple[int, ...], float] = {}
    front: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        level: dict[tuple[int, ...], float] = {}
        for path, score in front.items():
            chances, tokens = world.row(path).softmax(0).topk(width)
            level |= {(*path, t): score * c for t, c in zip(tokens.tolist(), chances.tolist(), strict=True)}
        scores |= level
        front = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    found = {tuple(int(tree.tokens[j]) for j in tree.path(i)) for i in range(len(tree))}
    assert found == set(sorted(scores, key=lambda path: -scores[path])[:7])
    assert all(len(path) == 1 or path[:-1] in found for path in found)


def test_one_child_a_node_is_the_chain(folder: Path) -> None:
    trees = [
        world.propose(world.begin(), 5)
        for world in (World(folder, "eagle2", tree_width=1), World(folder), World(folder, "eagle2"))
    ]
    assert trees[0].is_chain
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert not trees[2].is_chain


# ------------------------------------------------------------------------------------------------ the cache


def cached(world: World, cache: Any) -> torch.Tensor:
    """Keys and values of a head's committed inputs."""
    slots = torch.as_tensor(cache.slot_index(0, cache.length))
    return torch.stack([layer[slots] for layer in world.drafter.head.runner.arena.layers])


def fresh(world: World, count: int) -> torch.Tensor:
    """The same of a pass over the text's first inputs, with true states."""
    head, tokens = world.drafter.head, world.tokens[1 : 1 + count]
    cache = head.open()
    chain = TokenTree.chain([0] * (count - 1))
    head.step([cache], [chain], [0], tokens=tokens, states=head.joined(world.states[:count]), picked=())
    head.commit([cache], [range(count - 1)])
    return cached(world, cache)


@pytest.mark.parametrize("name", ["eagle", "eagle2", "eagle3", "p_eagle"])
@pytest.mark.parametrize("size", ["folder", "wide"])
def test_the_cache_is_that_of_a_fresh_pass_with_true_states(
    size: str, name: str, request: pytest.FixtureRequest
) -> None:
    world = World(request.getfixturevalue(size), name)
    state = world.begin()
    for turn in range(6):
        tree = world.propose(state, 8, 4)
        path = tree.path(tree.leaves()[turn % len(tree.leaves())])[: turn % 4]
        world.commit(state, EMPTY_TREE if turn == 3 else tree, () if turn == 3 else path, own=20 + turn)
    world.propose(state, 4, 2)
    count = state.cache.length
    assert count > len(PROMPT)
    assert close(cached(world, state.cache), want := fresh(world, count))
    world.states = world.states.roll(1, 0)
    assert not close(want, fresh(world, count))


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
    assert int(tree.tokens[0]) == int(world.row().argmax())


# ------------------------------------------------------------------------------------------------ a head that knows


class Oracle:
    """In place of the layer: the target's true next state, which it finds by the state that it is given."""

    def __init__(self, llm: LLM, texts: Sequence[list[int]]) -> None:
        self.runner, self.last = llm.runner, llm.runner.info.num_layers
        self.texts: dict[bytes, tuple[int, ...]] = {}
        for text in texts:
            for row, end in zip(self.states(text)[1], range(1, len(text) + 1), strict=True):
                self.texts[row.numpy().tobytes()] = tuple(text[:end])

    def states(self, text: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self.runner.open()
        scores = self.runner.extend([cache], [list(text)], taps=(self.last,))
        self.runner.release(cache)
        return scores.logits, scores.taps[self.last]

    def step(self, caches: Any, trees: Any, computed: Any, *, tokens: Any, states: Any, picked: Any) -> Any:
        found = []
        for row, token in zip(states, tokens, strict=True):
            text = (*self.texts[row.numpy().tobytes()], token)  # a KeyError: no state of the target's
            logits, made = self.states(text)
            self.texts[made[-1].numpy().tobytes()] = text
            found.append((logits[0], made[-1]))
        logits, made = (torch.stack(rows) for rows in zip(*found, strict=True))
        return PassResult(logits[list(picked)], made)


def knowing(plain: LLM, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LLM:
    """The target with a head whose every guess is true."""
    info = plain.runner.info
    own = config("eagle", info, draft_vocab_size=info.vocab_size)
    more = {"num_speculative_tokens": 4, "controller": "fixed", **options}
    fast = plain.with_speculative_config({"method": "eagle", "model": written_head(own), **more})
    texts = [p["prompt_token_ids"] + out[0] for p, out in zip(PROMPTS, outputs(plain, GREEDY), strict=True)]
    head = fast.engine.parts.drafter_set.drafters[0].head
    monkeypatch.setattr(head, "step", Oracle(plain, texts).step)
    monkeypatch.setattr(head, "commit", lambda caches, paths: None)
    monkeypatch.setattr(head, "truncate", lambda cache, length: None)
    return fast


def accepted(llm: LLM) -> float:
    """Share of the drafted tokens that stood."""
    found = llm.generate(PROMPTS, GREEDY)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    drafted = sum(out.metrics.num_draft_tokens for out in found)
    assert drafted > 20
    return sum(out.metrics.num_accepted_tokens for out in found) / drafted


def test_true_next_states_make_every_draft_right(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = knowing(plain, monkeypatch)
    assert accepted(fast) == 1.0
    assert outputs(fast, GREEDY) == outputs(plain, GREEDY)


def test_tokens_beside_the_wrong_states_show(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: tokens one place too early are mostly rejected."""

    def early(self: FeatureState) -> list[int]:
        return self.context.tokens[self.states.first : self.states.first + self.states.count]

    fast = knowing(plain, monkeypatch)
    monkeypatch.setattr(FeatureState, "pending", property(early))
    assert accepted(fast) < 0.9


# ------------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize("method", KINDS)
def test_the_text_is_the_targets(plain: LLM, method: str) -> None:
    own = config(METHODS[method], plain.runner.info)
    check_texts(plain, {"method": method, "model": written_head(own)})


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_head_of_a_quantised_target_runs_in_compiled_passes(quantization: str) -> None:
    """It stays as it is written, in the dtype of the target's states; the text is that target's."""
    rounded = LLM(speculative_config=None, dtype="bfloat16", quantization=quantization, seed=1)
    expected = outputs(rounded, GREEDY)
    for method in ("eagle3", "p_eagle", "falcon"):
        fast = rounded.with_speculative_config(
            {"method": method, "model": written_head(config(method, rounded.runner.info)), "num_speculative_tokens": 3}
        )
        head = fast.engine.parts.drafter_set.drafters[0].head
        assert type(head.runner.passes).__name__ == type(rounded.runner.passes).__name__ == "CompiledDecoder"
        assert head.runner.info.quantization is None
        assert outputs(fast, GREEDY) == expected


# ------------------------------------------------------------------------------------------------ errors


def test_wrong_heads_and_targets_are_named(folder: Path) -> None:
    target = load_runner(str(folder), dtype="float32")
    args = DrafterArgs(vocab_size=target.info.vocab_size, index=0, max_context=128, target=target)
    model = written_head(config("eagle", target.info))
    cases: list[tuple[type[PacelineError], str, Any]] = [
        (CheckpointError, "is of method 'eagle', not 'eagle3'", lambda: Eagle3Drafter(args, model=model)),
        (ConfigError, "speculative_config model must be the folder or hub id of a head", lambda: EagleDrafter(args)),
        (ConfigError, "draft_context must be", lambda: EagleDrafter(args, model=model, draft_context=0)),
        (
            ConfigError,
            "draft_sample_method must be greedy or left out with tree_policy 'eagle2'",
            lambda: Eagle2Drafter(args, model=model, draft_sample_method="probabilistic"),
        ),
        (
            CheckpointError,
            "reads states before the final norm of .*, so it needs a norm.weight",
            lambda: EagleDrafter(args, model=written_head(config("eagle", target.info, normed=False))),
        ),
    ]
    for error, message, make in cases:
        with pytest.raises(error, match=message):
            make()


def test_a_target_that_gives_no_states_is_named(plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"method": "eagle", "model": written_head(config("eagle", plain.runner.info)), "num_speculative_tokens": 2}
    whole = plain.runner
    blind = without(whole)
    blind.capabilities = replace(whole.capabilities, taps=False)
    for runner, message in (
        (blind, "method 'eagle' needs a model that gives the states behind its layers"),
        (without(whole, "embed"), "takes its input embeddings from the target"),
        (without(whole, "head"), "takes its head from the target"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(plain, "runner", runner)
            with pytest.raises(CapabilityError, match=message):
                plain.with_speculative_config(entry)


def test_a_head_stays_in_its_memory(folder: Path) -> None:
    """Caches are given back; states that wait are no more than was said."""
    world = World(folder, draft_context=8)
    memory = world.drafter.head.runner.memory
    before = memory.used
    state = world.begin()
    assert state.states.count == 8
    for _ in range(600):
        world.commit(state, EMPTY_TREE, (), 5)
    held = state.states.count * state.states.all()[0].nbytes
    assert 8 * state.states.all()[0].nbytes < held <= world.drafter.held_bytes(len(world.tokens))
    twin = world.drafter.fork(state, Context("b", list(state.context.tokens), len(PROMPT)))
    assert world.propose(twin, 3).tokens.tolist() == world.propose(state, 3).tokens.tolist()
    world.drafter.end([state, twin])
    assert memory.used == before


def test_heads_are_read_once(folder: Path) -> None:
    """The type that runs them is public, for training and tools."""
    target = load_runner(str(folder), dtype="float32")
    head = FeatureHead.load(written_head(config("eagle3", target.info)), target, ("eagle", "eagle3"))
    assert head.taps == (-1, 0, 2)
