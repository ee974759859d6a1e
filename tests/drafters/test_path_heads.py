"""Hydra's heads, Clover's and the MLP speculator's: what they predict on a path is what the papers say of these tokens,
and the layer of Hydra++ and Clover sees committed tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_reference as reference
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from benchmarks.stand_ins import head_weights, written_head
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.clover import CloverDrafter
from paceline.drafters.heads.hydra import HydraDrafter, HydraPlusDrafter
from paceline.drafters.heads.mlp_speculator import MLPSpeculatorDrafter
from paceline.errors import CheckpointError, ConfigError
from paceline.models import load_runner
from paceline.models.heads import HeadConfig, HydraHead, MedusaHead
from paceline.models.runners import CloverHead
from paceline.training.batches import Batch
from paceline.training.clover import CloverTrainer
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Verdict, from_paths

PROMPT = [(7 * i) % 500 + 4 for i in range(300)]
"""Longer than the rows of a compiled pass."""
DRAFTERS: dict[str, Any] = {
    "hydra": HydraDrafter,
    "hydra++": HydraPlusDrafter,
    "clover": CloverDrafter,
    "mlp_speculator": MLPSpeculatorDrafter,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "hydra": ("hydra", {"num_layers": 2}),
    "hydra++": ("hydra++", {"num_layers": 3}),
    "clover": ("clover", {"num_layers": 2}),
    "mlp_speculator": ("mlp_speculator", {"inner_size": 24}),
    "tied": ("mlp_speculator", {"inner_size": 24, "tie_weights": True, "scale_input": True}),
}
WITH_PREFIX = ("hydra++", "clover")
Weights = dict[str, torch.Tensor]


def config(kind: str, info: Any) -> HeadConfig:
    method, more = KINDS[kind]
    layer = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 40, "rms_norm_eps": 1e-5}
    layer |= {"head_dim": 32 if info.hidden_size > 32 else 16, "max_position_embeddings": 64, "rope_theta": 500.0}
    return HeadConfig(
        method=method,  # type: ignore[arg-type]
        hidden_size=info.hidden_size,
        vocab_size=info.vocab_size,
        draft_vocab_size=300,
        num_heads=3,
        layer=layer if method in WITH_PREFIX else {},
        **more,
    )


# ------------------------------------------------------------------------------------------------ the papers


def affine(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def hydra(config: HeadConfig, weights: Weights, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """(hidden,) what the head behind len(embedded) tokens makes of a state (hidden,) and their embeddings."""
    name = f"heads.{len(embedded) - 1}"
    read = torch.cat((state, embedded.flatten()))
    x = affine(weights, f"{name}.reduce", read) + F.silu(affine(weights, f"{name}.blocks.0", read))
    for block in range(1, config.num_layers):
        x = x + F.silu(affine(weights, f"{name}.blocks.{block}", x))
    return x


def prefix(config: HeadConfig, weights: Weights, states: torch.Tensor) -> torch.Tensor:
    """(n, hidden) what the prefix layer makes of a text's states (n, hidden)."""
    own = {name.replace("prefix.", "layers.0.", 1): one for name, one in weights.items() if name.startswith("prefix.")}
    eps = config.layer["rms_norm_eps"]
    x = states + reference.attention(config, own, reference.norm(states, own["layers.0.input_layernorm.weight"], eps))
    x = x + reference.mlp(config, own, x)
    return reference.norm(x, own["layers.0.norm.weight"], eps) if "layers.0.norm.weight" in own else x


def clover(config: HeadConfig, weights: Weights, state: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """(hidden,) what the head behind len(rows) tokens makes of the block's state (hidden,) and the tokens' rows."""
    for row in rows:
        read = row / row.square().mean().sqrt()
        q = affine(
            weights,
            "decoder.q_proj",
            reference.norm(state, weights["decoder.norm.weight"], config.layer["rms_norm_eps"]),
        )
        k, v = affine(weights, "decoder.k_proj", read), affine(weights, "decoder.v_proj", read)
        sizes = q.view(2, -1), k.view(2, -1), v.view(2, -1)  # two attention heads
        added = [q @ k / (q.norm() * k.norm()) * v for q, k, v in zip(*sizes, strict=True)]
        state = state + torch.cat(added)
    name = f"heads.{len(rows) - 1}.blocks"
    for block in range(config.num_layers):
        state = state + F.silu(affine(weights, f"{name}.{block}", state))
    return state


def speculator(config: HeadConfig, weights: Weights, state: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """(v,) logits behind tokens: as in IBM's server, the state is not weighed down but the embedding up."""
    kept = 0.5 ** (0.5 / config.num_heads)
    scale = (1 - kept**2) ** 0.5 * (config.inner_size / 2) ** 0.5 / kept  # type: ignore[operator]
    if config.scale_input:
        state = reference.norm(state, torch.ones(()), 1e-6) / 2**0.5
    for k, token in enumerate(tokens):
        name, proj = ("heads.0", f"heads.{min(k, 1)}") if config.tie_weights else (f"heads.{k}", f"heads.{k}")
        x = weights[f"{proj}.proj.weight"] @ state + scale * weights[f"{name}.embed.weight"][token]
        x = reference.norm(x, weights[f"{name}.norm.weight"], 1e-6) + weights.get(f"{name}.norm.bias", 0.0)
        state = 0.5 * x * (1 + torch.erf(x / 2**0.5))
    return weights[f"{name}.head.weight"] @ state


class World:
    """One drafter over a target in float32, with what a plain forward pass needs."""

    def __init__(self, folder: Path, kind: str, **options: Any) -> None:
        self.target = load_runner(str(folder), dtype="float32")
        info = self.target.info
        self.config = config(kind, info)
        self.weights = head_weights(self.config, shared=False)
        self.weights |= {"draft_to_target": torch.arange(300) * 7 + 3}
        if kind in ("hydra", "clover"):  # the target's embedding and head, as trained heads have them
            shared = ("embed.weight", "head.weight", "head.bias")
            self.weights = {name: one for name, one in self.weights.items() if not name.endswith(shared)}
        for name in [name for name in self.weights if name.startswith("prefix.") and name.endswith(".bias")]:
            self.weights.pop(name)
        args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=info.max_context, target=self.target)
        self.drafter = DRAFTERS[self.config.method](args, model=written_head(self.config, self.weights), **options)
        stored = load_file(folder / "model.safetensors")
        self.embedding = self.weights.get("embed.weight", stored["model.embed_tokens.weight"])
        self.every_row = stored["lm_head.weight"]
        self.head = self.every_row[self.weights["draft_to_target"]]
        self.cache = self.target.open()
        self.tokens, self.states = list(PROMPT), self.extended(PROMPT[:-1])

    def extended(self, tokens: Sequence[int]) -> torch.Tensor:
        """(n, hidden) the target's states of more tokens."""
        self.taps = self.target.extend([self.cache], [tokens], taps=self.drafter.taps).taps
        return self.taps[self.target.info.num_layers]

    def begin(self, **more: Any) -> Any:
        return self.drafter.begin([Context("a", list(PROMPT), len(PROMPT), taps=self.taps, **more)])[0]

    def propose(self, state: Any, nodes: int, depth: int = 9) -> TokenTree:
        return self.drafter.propose([state], [Budget(nodes, depth)], [EMPTY_TREE])[0]

    def row(self, drafted: tuple[int, ...] = ()) -> torch.Tensor:
        """(v,) the logits behind drafted tokens, from the papers."""
        row = torch.full((self.target.info.vocab_size,), float("-inf"))
        row[self.weights["draft_to_target"]] = self.logits([self.tokens[-1], *drafted])
        return row

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        if self.config.method == "mlp_speculator":
            return speculator(self.config, self.weights, self.states[-1], tokens)
        plus = self.config.method == "hydra++"
        begun = prefix(self.config, self.weights, self.states) if self.config.method in WITH_PREFIX else self.states
        state = begun[-1]
        if self.config.method == "clover":
            return self.head @ clover(self.config, self.weights, state, self.every_row[list(tokens)])
        x = hydra(self.config, self.weights, state, self.embedding[list(tokens)])
        name = f"heads.{len(tokens) - 1}.head"
        return affine(self.weights, name, x) if plus else self.head @ x

    def commit(self, state: Any, tree: TokenTree, path: Sequence[int], own: int) -> None:
        """A scoring pass of the target, after which the path was accepted."""
        scores = self.target.score([self.cache], [self.tokens[-1]], [tree], taps=self.drafter.taps)
        self.target.commit([self.cache], [path])
        new = [*(int(tree.tokens[i]) for i in path), own]
        found = scores.taps[self.target.info.num_layers][[0, *(1 + i for i in path)]]
        self.states = torch.cat((self.states, found))
        self.tokens += new
        state.context.tokens.extend(new)
        self.drafter.observe([state], [tree], [Verdict(tuple(path), tuple(new[:-1]), own)], scores)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=2e-4, rtol=2e-4)


# ------------------------------------------------------------------------------------------------ rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", ["folder", "wide"])
def test_rows_on_a_path_are_those_of_teacher_forcing(size: str, kind: str, request: pytest.FixtureRequest) -> None:
    """Drawn rows of a chain and of trees, in several rounds with some, all and none of it accepted."""
    for policy in ({}, {"tree_policy": "rsd_c", "tree_width": [2, 2]}, {"tree_policy": "dyspec"}):
        world = World(request.getfixturevalue(size), kind, **policy)
        state = world.begin(temperature=1.0)
        for accepted in (1, 9, 0):
            tree = world.propose(state, 6, 5)
            assert len(tree) >= 3
            assert max(tree.depths) <= 3, "there are no more levels than heads"
            for parent in (-1, *(node for node in range(len(tree)) if tree.trials_of(node))):
                path = tuple(int(tree.tokens[i]) for i in tree.path(parent)) if parent >= 0 else ()
                for trial in tree.trials_of(parent):
                    assert close(trial.row, world.row(path).softmax(0))
                    other = (*path[:-1], path[-1] + 7) if path else ()
                    assert not other or not close(trial.row, world.row(other).softmax(0))
            path = tree.path(tree.leaves()[-1])[:accepted]
            world.commit(state, tree, path, own=11)


@pytest.mark.parametrize("kind", KINDS)
def test_two_sequences_at_once_are_each_alone(folder: Path, kind: str) -> None:
    alone, both = World(folder, kind, tree_width=3), World(folder, kind, tree_width=3)
    context = Context("b", PROMPT[:8], 8, taps={layer: tap[:7] for layer, tap in both.taps.items()})
    states = [both.begin(), *both.drafter.begin([context])]
    first, second = both.drafter.propose(states, [Budget(9, 4), Budget(5, 2)], [EMPTY_TREE] * 2)
    assert first.tokens.tolist() == alone.propose(alone.begin(), 9, 4).tokens.tolist()
    one = alone.drafter.propose(alone.drafter.begin([context]), [Budget(5, 2)], [EMPTY_TREE])[0]
    assert second.tokens.tolist() == one.tokens.tolist() != first.tokens.tolist()[: len(one)]


def test_a_controllers_shape_is_drafted_unless_a_policy_is_named(folder: Path) -> None:
    shape = from_paths([(0,), (1,), (2,), (0, 0), (1, 0), (1, 1), (1, 0, 0), (1, 0, 0, 0)])
    for kind, options, follows in (
        ("hydra", {}, True),
        ("hydra++", {}, True),
        ("clover", {}, True),
        ("hydra", {"tree_width": 1}, False),
        ("hydra", {"draft_sample_method": "probabilistic"}, False),
        ("mlp_speculator", {}, False),
    ):
        world = World(folder, kind, **options)
        state = world.begin()
        tree = world.drafter.propose([state], [Budget(8, 8, shape=shape)], [EMPTY_TREE])[0]
        if follows:
            ranks = world.row().topk(3).indices.tolist()
            assert sorted(tree.depths.tolist()) == [1, 1, 1, 2, 2, 2, 3], "of three heads"
            assert {int(tree.tokens[node]) for node in tree.children(-1)} == set(ranks)
        else:
            assert tree.is_chain
            assert len(tree) == 3


# ------------------------------------------------------------------------------------------------ Hydra


def test_without_embeddings_hydra_is_medusa(folder: Path) -> None:
    target = load_runner(str(folder), dtype="float32")
    info, d = target.info, target.info.hidden_size
    sizes = {"hidden_size": d, "vocab_size": info.vocab_size, "draft_vocab_size": 50, "num_heads": 3, "num_layers": 2}
    medusa = HeadConfig(method="medusa", **sizes)  # type: ignore[arg-type]
    own = head_weights(medusa)
    wide = dict(own)
    for head in range(3):
        wide[f"heads.{head}.blocks.0.weight"] = F.pad(own[f"heads.{head}.blocks.0.weight"], (0, (head + 1) * d))
        wide[f"heads.{head}.reduce.weight"] = F.pad(torch.eye(d), (0, (head + 1) * d))
    states, tokens = torch.randn(4, d), [[5, 6, 7, 8], [300, 301, 9, 10], [11, 12, 13, 14]]
    both = [
        MedusaHead(written_head(medusa, own), target),
        HydraHead(written_head(HeadConfig(method="hydra", **sizes), wide), target),  # type: ignore[arg-type]
    ]
    wide["heads.2.blocks.0.weight"][:, -d:] += 0.1
    both.append(HydraHead(written_head(HeadConfig(method="hydra", **sizes), wide), target))  # type: ignore[arg-type]
    memories = [head.begin(states) for head in both]
    for depth, read in enumerate(tokens):
        found = [head.step(memory, read, depth) for head, memory in zip(both, memories, strict=True)]
        memories = [step.memory for step in found]
        assert close(found[0].logits, found[1].logits)
        assert close(found[0].logits, found[2].logits) == (depth < 2), (
            "the embeddings of the last head matter in the control"
        )


def cached(world: World, cache: Any) -> torch.Tensor:
    """Keys and values of the prefix layer's inputs."""
    return world.drafter.head.runner.arena.layers[0][torch.as_tensor(cache.slot_index(0, cache.length))]


@pytest.mark.parametrize(("size", "kind"), [("folder", "hydra++"), ("wide", "hydra++"), ("wide", "clover")])
def test_the_prefix_layer_sees_what_was_committed_and_nothing_else(
    size: str, kind: str, request: pytest.FixtureRequest
) -> None:
    world = World(request.getfixturevalue(size), kind, tree_width=3, draft_context=None)
    state = world.begin()
    for turn in range(6):
        tree = world.propose(state, 8, 3)
        assert state.cache.length == world.cache.length == len(world.tokens) - 1
        path = tree.path(tree.leaves()[turn % len(tree.leaves())])[: turn % 4]
        world.commit(state, EMPTY_TREE if turn == 3 else tree, () if turn == 3 else path, own=20 + turn)
    world.propose(state, 4, 2)
    head = world.drafter.head
    fresh, other = head.open(), head.open()
    head.read([fresh], [len(world.states)], world.states)
    head.read([other], [len(world.states)], world.states.roll(1, 0))
    assert close(cached(world, state.cache), cached(world, fresh))
    assert not close(cached(world, other), cached(world, fresh))


def test_the_prefix_layer_stays_in_its_memory(folder: Path) -> None:
    """Caches are given back, states that wait are no more than was said, and a gap is left behind."""
    world = World(folder, "hydra++", draft_context=8)
    before = world.drafter.head.runner.memory.used
    state = world.begin()
    assert state.states.count == 8
    for _ in range(600):
        world.commit(state, EMPTY_TREE, (), 5)
    assert 8 * 128 < state.states.count * 128 <= world.drafter.held_bytes(len(world.tokens))
    twin = world.drafter.fork(state, Context("b", list(state.context.tokens), len(PROMPT)))
    assert world.propose(twin, 3).tokens.tolist() == world.propose(state, 3).tokens.tolist()
    state.context.tokens += [9, 10]
    assert world.propose(state, 3) is EMPTY_TREE
    world.drafter.end([state, twin])
    assert world.drafter.head.runner.memory.used == before


# ------------------------------------------------------------------------------------------------ Clover


@pytest.mark.parametrize("adds", [False, True])
def test_where_values_are_zero_clover_is_medusa_on_what_the_block_makes(folder: Path, adds: bool) -> None:
    """The tokens matter through the values alone."""
    world = World(folder, "clover")
    scale = 1.0 if adds else 0.0
    named = {
        name: scale * one if "v_proj" in name and "decoder" in name else one for name, one in world.weights.items()
    }
    head = CloverHead(written_head(world.config, named), world.target)
    own = {name: one for name, one in named.items() if not name.startswith(("prefix.", "decoder."))}
    medusa = MedusaHead(written_head(replace(world.config, method="medusa", layer={}), own), world.target)
    begun = head.read([head.open()], [len(world.states)], world.states)
    memory = head.begin(begun)
    for depth, token in enumerate((5, 300, 7)):
        step = head.step(memory, [token], depth)
        memory = step.memory
        assert close(step.logits, medusa.logits(begun, depth)) is not adds
    assert close(memory, begun) is not adds


def test_every_loss_of_clover_reaches_the_block_and_the_tokens_before() -> None:
    """Through the state that goes from head to head; not what lies behind the head's last token."""
    layer = {"num_attention_heads": 2, "intermediate_size": 16, "max_position_embeddings": 64}
    sizes = {"hidden_size": 16, "vocab_size": 30, "draft_vocab_size": 30, "num_heads": 3}
    trainer = CloverTrainer(HeadConfig(method="clover", layer=layer, **sizes), torch.randn(30, 16))  # type: ignore[arg-type]
    for parameter in trainer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    trainer.table = torch.randn(30, 16).requires_grad_()
    text = torch.arange(10)[None]
    here, nothing = torch.zeros(1, 10, dtype=torch.int64), torch.zeros(1, 10, 0)
    batch = Batch(text, here, text, text, torch.ones(1, 10, dtype=torch.bool), nothing, nothing, torch.randn(1, 10, 16))
    for depth, (at, _, states) in enumerate(trainer.head_states(batch)):
        trainer.zero_grad()
        trainer.table.grad = None
        states[at == 2].sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert trainer.table.grad is not None
        assert trainer.table.grad.any(1).nonzero().squeeze(1).tolist() == [3, 4, 5][: depth + 1]
        assert all(part.grad.any() for part in trainer.prefix.parameters())


# ------------------------------------------------------------------------------------------------ errors


def test_what_cannot_draft_is_named(folder: Path) -> None:
    target = load_runner(str(folder), dtype="float32")
    args = DrafterArgs(vocab_size=target.info.vocab_size, index=0, max_context=128, target=target)
    own = config("hydra", target.info)
    model = written_head(own)
    with pytest.raises(CheckpointError, match=r"is of method 'hydra', not 'hydra\+\+'"):
        HydraPlusDrafter(args, model=model)
    with pytest.raises(ConfigError, match="must be the folder or hub id of a head for method 'mlp_speculator'"):
        MLPSpeculatorDrafter(args)
    biased = head_weights(own) | {"heads.1.head.bias": torch.zeros(300)}
    with pytest.raises(CheckpointError, match=r"heads\.1\.head has a bias and no weight"):
        HydraDrafter(args, model=written_head(own, biased))
