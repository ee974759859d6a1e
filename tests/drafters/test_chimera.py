"""Chimera's heads: what they predict on a path is what the encoders say of its trigrams and of the target's states, and
these states alone stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import eagle_reference as reference
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from benchmarks.stand_ins import written_head
from paceline.drafters.heads.chimera import ChimeraDrafter
from paceline.drafters.heads.chimera_drafts import ChimeraState
from paceline.models.runners import ChimeraHead, chimera_head, trigram
from paceline.tree import EMPTY_TREE, TokenTree
from tests.drafters.head_worlds import HeadWorld, close, head_config

PROMPT = [(7 * i) % 500 + 4 for i in range(40)]
POLICIES: dict[str, dict[str, Any]] = {
    "chain": {}, "tree": {"tree_policy": "rsd_c", "tree_width": [2, 2]}, "dyspec": {"tree_policy": "dyspec"},
}  # fmt: skip


class World(HeadWorld[ChimeraState]):
    """One drafter, and the plain forward pass."""

    drafter: ChimeraDrafter

    def __init__(self, folder: Path, prompt: Sequence[int] = PROMPT, *, context: bool = True, **options: Any) -> None:
        super().__init__(folder)
        self.use(head_config("chimera", self.target.info, num_heads=3, num_layers=2))
        if not context:
            self.weights["encoder.self_attn.o_proj.weight"].zero_()
            for head in range(self.config.num_heads):
                self.weights[f"heads.{head}.reduce.weight"][:, : self.config.hidden_size] = 0.0
        model = written_head(self.config, self.weights)
        self.start(ChimeraDrafter(self.args, model=model, draft_context=None, **options), prompt)
        stored = load_file(folder / "model.safetensors")
        self.embedding, self.head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]

    def feature(self, tokens: Sequence[int]) -> torch.Tensor:
        """(hidden,) of the trigram at the end of tokens."""
        last = ([tokens[0]] * 2 + list(tokens))[-3:]
        read = self.embedding[last].flatten()
        inner = F.linear(read, self.weights["trigram.block.weight"])
        return F.linear(read + F.silu(inner), self.weights["trigram.reduce.weight"])

    def encoded(self, inputs: torch.Tensor) -> torch.Tensor:
        """(n, hidden) what the encoder makes of inputs (n, hidden)."""
        weights = {name.replace("encoder.", "layers.0."): one for name, one in self.weights.items()}
        normed = reference.norm(inputs, weights["layers.0.input_layernorm.weight"], self.config.layer["rms_norm_eps"])
        x = inputs + reference.attention(self.config, weights, normed)
        return x + reference.mlp(self.config, weights, x)

    def row(self, drafted: tuple[int, ...] = ()) -> torch.Tensor:
        """(v,) the logits behind drafted tokens."""
        text = [*self.tokens, *drafted]
        features = [self.feature(text[:end]) for end in range(len(self.tokens), len(text) + 1)]
        state = torch.cat((self.states[-1], self.encoded(torch.cat((self.states, torch.stack(features))))[-1]))
        name, row = f"heads.{len(drafted)}", torch.full((len(self.head),), float("-inf"))
        state = F.linear(state, self.weights[f"{name}.reduce.weight"])
        for block in range(self.config.num_layers):
            state = state + F.silu(F.linear(state, self.weights[f"{name}.blocks.{block}.weight"]))
        ids = self.weights["draft_to_target"]
        row[ids] = self.head[ids] @ state
        return row


@pytest.mark.parametrize(
    ("size", "policy"),
    [("folder", "chain"), ("folder", "tree"), ("folder", "dyspec"), ("wide", "chain"), ("wide", "dyspec")],
)
def test_rows_on_a_path_are_those_of_a_plain_forward_pass(
    size: str, policy: str, request: pytest.FixtureRequest
) -> None:
    """Drawn rows of a chain and of trees, of one depth and of several at once, in rounds with some, all and none of it
    accepted.
    """
    world = World(request.getfixturevalue(size), **POLICIES[policy])
    passes = {"folder": "EagerPasses", "wide": "CompiledDecoder"}[size]
    assert type(world.drafter.head.runner.passes).__name__ == passes
    state = world.begin(temperature=1.0)
    for accepted in (1, 9, 0):
        tree = world.propose(state, 6)
        assert len(tree) >= 3
        assert tree.max_depth <= 3
        for parent in (-1, *(node for node in range(len(tree)) if tree.trials_of(node))):
            path = tuple(int(tree.tokens[i]) for i in tree.path(parent)) if parent >= 0 else ()
            assert all(close(trial.row, world.row(path).softmax(0)) for trial in tree.trials_of(parent))
        assert not close(tree.trials_of(-1)[0].row, world.row((5,)).softmax(0))
        world.commit(state, tree, tree.path(tree.leaves()[-1])[:accepted], own=11)


@pytest.mark.parametrize("text", [[9, 8], [9, 8, 7], PROMPT])
def test_texts_of_few_tokens_are_read(folder: Path, text: list[int]) -> None:
    """The first token stands for those before it."""
    world = World(folder, text)
    (trial,) = world.propose(world.begin(temperature=1.0), 1).trials_of(-1)
    assert close(trial.row, world.row().softmax(0))
    assert trigram([4]) == (4, 4, 4)
    assert trigram([4, 5], [6]) == (4, 5, 6)
    assert trigram([4], [5]) == (4, 4, 5)


@pytest.mark.parametrize("context", [False, True])
def test_without_the_context_a_draft_depends_on_three_tokens_alone(folder: Path, context: bool) -> None:
    """Without what the encoder's attention adds, and what heads read of the target's state."""

    def drafted(place: int) -> torch.Tensor:
        prompt = list(PROMPT)
        prompt[-place] += 1
        world = World(folder, prompt, context=context)
        return world.propose(world.begin(temperature=1.0), 1).trials_of(-1)[0].row

    own = drafted(20)
    assert close(own, drafted(4)) is not context
    assert not close(own, drafted(3))


def test_kept_features_are_those_that_are_computed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They tell trigrams apart by all three tokens, and come from memory where they were met, the last ones."""
    head: ChimeraHead = World(folder).drafter.head
    grams = [(1, 2, 3), (4, 2, 3), (1, 2, 3), (3, 2, 1), (1, 3, 2)]
    computed = head.computed(grams)
    for _ in range(2):
        assert all(close(head.features([gram])[0], row) for gram, row in zip(grams, computed, strict=True))
        assert close(head.features(grams), computed)
    assert not any(close(computed[0], computed[other]) for other in (1, 3, 4))
    calls = list[int]()
    compute = head.computed
    monkeypatch.setattr(head, "computed", lambda own: (calls.append(len(own)), compute(own))[1])
    assert close(head.features([(3, 2, 1), (1, 2, 3)]), computed[[3, 0]])
    assert calls == []
    monkeypatch.setattr(chimera_head, "KEPT", 2)
    head.features([(9, 9, 9)])
    head.features([(9, 9, 9), (1, 2, 3)])
    head.features([(1, 3, 2)])
    assert calls == [1, 1]


def test_each_row_is_of_the_head_of_its_depth(folder: Path) -> None:
    """Rows of several depths in one pass, as trees of several sequences have them."""
    head = World(folder).drafter.head
    states, encoded = torch.randn(2, 4, head.runner.info.hidden_size)
    depths = [2, 0, 1, 2]
    together = head.logits(states, encoded, depths)
    alone = [head.logits(states[i : i + 1], encoded[i : i + 1], [depth])[0] for i, depth in enumerate(depths)]
    assert close(together, torch.stack(alone))
    assert not close(together, head.logits(states, encoded, [0] * 4))


def cached(world: World, cache: Any) -> torch.Tensor:
    """Keys and values of committed inputs."""
    return world.drafter.head.runner.arena.layers[0][torch.as_tensor(cache.slot_index(0, cache.length))]


def fresh(world: World, states: torch.Tensor) -> torch.Tensor:
    """The same of a pass over these states alone."""
    head = world.drafter.head
    cache = head.open()
    head.encode([cache], [TokenTree.chain([0] * (len(states) - 1))], [0], states)
    head.commit([cache], [range(len(states) - 1)])
    return cached(world, cache)


def test_the_cache_holds_the_targets_states_alone(folder: Path) -> None:
    """Each at its position; drafts, of which some are accepted, leave nothing."""
    world = World(folder, tree_width=3)
    state = world.begin()
    for turn in range(5):
        tree = world.propose(state, 8, 3)
        path = tree.path(tree.leaves()[turn % len(tree.leaves())])[: turn % 4]
        world.commit(state, EMPTY_TREE if turn == 3 else tree, () if turn == 3 else path, own=20 + turn)
    world.propose(state, 4, 2)
    count = state.cache.length
    assert count > len(PROMPT)
    assert close(cached(world, state.cache), fresh(world, world.states[:count]))
    assert not close(cached(world, state.cache), fresh(world, world.states[1 : count + 1]))
