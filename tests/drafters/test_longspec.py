"""LongSpec's head: its logits are those of a plain forward pass over what the target has cached, its memory does not
grow with the text, and what it reads of the target is right whatever has become of the blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from eagle_reference import mlp, norm, rotated
from lacking import without
from safetensors.torch import load_file
from tiny_checkpoint import write
from tiny_llama import runner_of, tiny_llama
from transformers import LlamaForCausalLM

from benchmarks.stand_ins import head_weights, written_head
from paceline import LLM, SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.longspec import LongSpecDrafter, LongSpecState
from paceline.engine.scheduler import Scheduler
from paceline.errors import CapabilityError, CheckpointError, DrafterError
from paceline.models import load_runner
from paceline.models.heads import HeadConfig
from paceline.models.state import NativeCache
from paceline.tree import EMPTY_TREE, Budget, TokenTree

PROMPT = [(7 * i) % 500 + 4 for i in range(120)]
WINDOW = 40
SIZES: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of two layers, which runs by PyTorch's operators."""
    return write(tmp_path_factory.mktemp("target"), **SIZES)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that runs in compiled passes."""
    return write(tmp_path_factory.mktemp("wide"), hidden_size=64, **SIZES | {"head_dim": 32, "intermediate_size": 64})


@cache
def oracle(folder: Path) -> Any:
    """The target in transformers."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def config(info: Any, **more: Any) -> HeadConfig:
    """A head of four query heads and two of keys, as the target has."""
    layer = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32 if info.hidden_size > 32 else 16}
    layer |= {"intermediate_size": 40, "max_position_embeddings": 64, "rope_theta": 500.0, "rms_norm_eps": 1e-5}
    given: dict[str, Any] = {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "layer": layer}
    return HeadConfig(method="longspec", **{"draft_vocab_size": 300, "sliding_window": WINDOW, **given, **more})


class World:
    """One drafter over a target in float32, with what a plain forward pass needs.

    Attributes:
        window, shift: what the plain pass sees: tokens before its own, and how far back the newest key of the target
            lies. repeated: how it makes as many key heads as there are of queries.
    """

    def __init__(self, folder: Path, *, more: Mapping[str, Any] | None = None, **options: Any) -> None:
        self.target = load_runner(str(folder), dtype="float32")
        info = self.target.info
        self.config = config(info, **more or {})
        self.weights = head_weights(self.config)
        if "draft_to_target" in self.weights:
            self.weights["draft_to_target"] = self.weights["draft_to_target"] * 7 + 3
        torch.manual_seed(0)
        for part in "qkv":
            bias = torch.randn(len(self.weights[f"layers.0.self_attn.{part}_proj.weight"]))
            self.weights[f"layers.0.self_attn.{part}_proj.bias"] = bias
        self.weights["layers.0.cross_attn.q_proj.bias"] = torch.randn(4 * self.config.head_dim)
        for name, factor in (("self_attn.q", 4), ("cross_attn.o", 5)):  # so that single keys count
            self.weights[f"layers.0.{name}_proj.weight"] *= factor
        args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=info.max_context, target=self.target)
        self.drafter = LongSpecDrafter(args, model=written_head(self.config, self.weights), **options)
        stored = load_file(folder / "model.safetensors")
        self.embedding, self.head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
        self.oracle, self.last = oracle(folder), (0, *torch.empty(2, 2, 0, self.config.head_dim))
        self.cache, self.tokens = self.target.open(), list(PROMPT)
        self.target.extend([self.cache], [PROMPT[:-1]])
        self.window, self.shift, self.repeated = self.config.sliding_window or 0, 0, torch.Tensor.repeat_interleave

    def begin(self, tokens: Sequence[int] = PROMPT, cache: Any = None, **more: Any) -> LongSpecState:
        context = Context("a", list(tokens), len(tokens), cache=lambda: cache or self.cache, **more)
        return self.drafter.begin([context])[0]

    def propose(self, state: LongSpecState, nodes: int, depth: int = 9) -> TokenTree:
        return self.drafter.propose([state], [Budget(nodes, depth)], [EMPTY_TREE])[0]

    @torch.inference_mode()
    def row(self, drafted: Sequence[int] = ()) -> torch.Tensor:
        """(v,) the head's logits behind drafted tokens, by a plain forward pass and transformers' cache."""
        known = self.tokens[:-1]
        if self.last[0] != len(known):
            layer = self.oracle(torch.tensor([known]), use_cache=True).past_key_values.layers[-1]
            self.last = len(known), layer.keys[0], layer.values[0]
        keys, values = (part[:, : len(known) - self.shift] for part in self.last[1:])
        x = self.embedding[torch.tensor([*self.tokens, *drafted])]
        x = x + self.self_attention(norm(x, self.weights["layers.0.input_layernorm.weight"], 1e-5))
        x = x + self.cross_attention(norm(x, self.weights["layers.0.cross_layernorm.weight"], 1e-5), keys, values)
        x = x + mlp(self.config, self.weights, x)
        ids = self.weights.get("draft_to_target", torch.arange(len(self.head)))
        row = torch.full((len(self.head),), float("-inf"))
        row[ids] = x[-1] @ self.head[ids].T
        return row

    def projected(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """(heads, n, e)."""
        weight, bias = (self.weights[f"layers.0.{name}_proj.{part}"] for part in ("weight", "bias"))
        return (x @ weight.T + bias).view(len(x), -1, self.config.head_dim).transpose(0, 1)

    def self_attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.projected(x, f"self_attn.{part}") for part in "qkv")
        q, k, v = rotated(q, 500.0), rotated(k, 500.0).repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        back = torch.arange(len(x))[:, None] - torch.arange(len(x))
        return self.mixed(q, k, v, (back >= 0) & (back <= self.window), "self_attn")

    def cross_attention(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        q = rotated(self.projected(x, "cross_attn.q"), self.oracle.config.rope_parameters["rope_theta"])
        k, v = (self.repeated(part, 2, 0) for part in (keys, values))
        return self.mixed(q, k, v, torch.ones(len(x), k.shape[1], dtype=torch.bool), "cross_attn")

    def mixed(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor, name: str) -> torch.Tensor:
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~sees, float("-inf"))
        out = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return out @ self.weights[f"layers.0.{name}.o_proj.weight"].T

    def commit(self, state: LongSpecState, tree: TokenTree, path: Sequence[int], own: int) -> None:
        """A scoring pass of the target, after which the path was accepted."""
        self.target.score([self.cache], [self.tokens[-1]], [tree])
        self.target.commit([self.cache], [path])
        new = [*(int(tree.tokens[i]) for i in path), own]
        self.tokens += new
        state.context.tokens.extend(new)


def close(chances: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether a drawn row is that of logits."""
    return torch.allclose(chances.log(), logits.log_softmax(0), atol=1e-3, rtol=0)


# ------------------------------------------------------------------------------------------------ logits


@pytest.mark.parametrize(("size", "draft_vocab"), [("folder", 300), ("wide", None)])
def test_logits_are_those_of_a_plain_forward_pass(
    size: str, draft_vocab: int | None, request: pytest.FixtureRequest
) -> None:
    """Drawn rows of chains and trees in several rounds, over a text longer than the head was made for. Negative
    controls: a window of one token more, a target's key less, key heads that are repeated in another order.
    """
    folder = request.getfixturevalue(size)
    for policy in ({}, {"tree_policy": "rsd_c", "tree_width": [2, 2]}):
        world = World(folder, more={} if draft_vocab else {"draft_vocab_size": len(load_vocab(folder))}, **policy)
        assert world.drafter.head.passes == {"folder": "operators", "wide": "compiled"}[size]
        state = world.begin(temperature=1.0)
        for accepted in (1, 9):
            tree = world.propose(state, 6, 3)
            assert len(tree) >= 3
            for parent in (-1, *(node for node in range(len(tree)) if tree.trials_of(node))):
                path = tuple(int(tree.tokens[i]) for i in tree.path(parent)) if parent >= 0 else ()
                for trial in tree.trials_of(parent):
                    assert close(trial.row, world.row(path))
            path = tree.path(tree.leaves()[-1])[:accepted]
            world.commit(state, tree, path, own=11)
        row = world.propose(state, 1).trials_of(-1)[0].row
        assert close(row, world.row())
        for name, wrong in (("window", WINDOW + 1), ("shift", 1), ("repeated", by_turns)):
            right = getattr(world, name)
            setattr(world, name, wrong)
            assert not close(row, world.row()), name
            setattr(world, name, right)


def by_turns(part: torch.Tensor, times: int, _: int) -> torch.Tensor:
    return part.repeat(times, 1, 1)


def load_vocab(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["lm_head.weight"]


def test_a_window_of_the_whole_text_is_full_attention(folder: Path) -> None:
    """Whatever is left over; a window of a token less is not."""
    rows = []
    for window in (len(PROMPT) - 1, 5000, len(PROMPT) - 2):
        world = World(folder, more={"sliding_window": window})
        world.window = 10**6  # the plain pass sees everything
        rows.append(world.propose(world.begin(temperature=1.0), 1).trials_of(-1)[0].row)
    assert torch.allclose(rows[0], rows[1], atol=1e-6)
    assert close(rows[0], world.row())
    assert not close(rows[2], world.row())


def test_nothing_is_drafted_behind_a_text_of_one_token(folder: Path) -> None:
    """The target has cached nothing; the token behind it has something to go by."""
    world = World(folder)
    assert world.propose(world.begin([9], world.target.open()), 3) is EMPTY_TREE
    cache = world.target.open()
    world.target.extend([cache], [[9]])
    world.tokens, state = [9, 11], world.begin([9, 11], cache, temperature=1.0)
    assert close(world.propose(state, 1).trials_of(-1)[0].row, world.row())


def test_several_sequences_at_once_are_each_alone(folder: Path) -> None:
    alone, both = World(folder, tree_width=3), World(folder, tree_width=3)
    short = both.target.open()
    both.target.extend([short], [PROMPT[:7]])
    states = [both.begin(), both.begin(PROMPT[:8], short)]
    first, second = both.drafter.propose(states, [Budget(9, 4)] * 2, [EMPTY_TREE] * 2)
    assert first.tokens.tolist() == alone.propose(alone.begin(), 9, 4).tokens.tolist()
    other = alone.target.open()
    alone.target.extend([other], [PROMPT[:7]])
    assert second.tokens.tolist() == alone.propose(alone.begin(PROMPT[:8], other), 9, 4).tokens.tolist()


@torch.inference_mode()
def test_far_from_the_beginning_it_says_what_it_says_near(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """30,000 positions further on, target's keys included. Negative control: keys that stay where they were."""
    world = World(folder)
    head, source, far = world.drafter.head, world.drafter.head.source, 30_000
    text, cached = PROMPT[-WINDOW - 1 : -1], source.read(world.cache)
    keys = cached.split(2, 1)

    def said(further: int, seen: torch.Tensor) -> torch.Tensor:
        (window,) = head.known([text], [len(PROMPT) - 1 - WINDOW + further])
        inputs = head.opened(len(PROMPT) - 1 + further, window, world.cache)
        inputs.feed(9, inputs.feed(PROMPT[-1]))
        with monkeypatch.context() as patched:
            patched.setattr(source, "read", lambda cache: seen)
            return head.step([inputs])

    near = said(0, cached)
    moved = torch.cat((source.turned(keys[0], [far] * len(cached)), keys[1]), 1)
    assert torch.allclose(said(far, moved), near, atol=0.02)
    assert not torch.allclose(said(far, cached), near, atol=0.2)


# ------------------------------------------------------------------------------------------------ memory


def held(state: LongSpecState) -> int:
    """Bytes that a sequence's state keeps alive."""
    return state.window.untyped_storage().nbytes()


def test_its_memory_is_that_of_the_window_however_long_the_text(folder: Path) -> None:
    """After drafts behind 200 and behind 2,000 tokens, whatever the target has cached of them, and after rounds of
    accepted ones. Negative control: a window that is never cut.
    """

    def grown(world: World) -> list[int]:
        found = []
        for length in (200, 2000):
            text = [5 + i % 400 for i in range(length)]
            state = world.begin(text)
            world.propose(state, 4)
            found.append(held(state))
            for _ in range(3):
                state.context.tokens += [7, 8, 9]
                world.propose(state, 4)
            found.append(held(state))
        return found

    world = World(folder)
    bytes_of_window = WINDOW * 2 * 2 * 16 * 4
    assert grown(world) == [bytes_of_window] * 4
    assert world.drafter.held_bytes(200) == world.drafter.held_bytes(2000) == bytes_of_window
    assert world.drafter.held_bytes(10) == bytes_of_window // 4
    assert not world.drafter.runners()
    world.drafter.head.window = 10**6
    short, _, long, _ = grown(world)
    assert long == short * 1999 / 199


def test_drafts_leave_nothing_and_copies_share(folder: Path) -> None:
    """Drafted tokens are in no window; a copy goes its own way."""
    world = World(folder)
    state = world.begin()
    world.propose(state, 8, 4)
    window = state.window
    copy = world.drafter.fork(state, Context("b", [*PROMPT], len(PROMPT), cache=lambda: world.cache))
    assert copy.window is window
    world.commit(state, EMPTY_TREE, (), own=11)
    tokens = world.propose(state, 4).tokens.tolist()
    assert torch.equal(copy.window, window)
    assert world.propose(copy, 4).tokens.tolist() != tokens
    fresh = world.begin(world.tokens)
    assert world.propose(fresh, 4).tokens.tolist() == tokens
    assert torch.allclose(fresh.window, state.window, atol=1e-6)


# ------------------------------------------------------------------------------------------------ the engine


class Seen:
    """Compares what every draft reads of the target with a fresh pass over the same text.

    Attributes:
        right, late: drafts that read its keys, and those of the text a token further on.
        scattered: drafts that read blocks which are not adjacent.
    """

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner, self.drafts, self.right, self.late, self.scattered = llm.runner, 0, 0, 0, 0
        self.keys: Any = self.runner.last_keys  # type: ignore[attr-defined]
        opened = LongSpecDrafter.opened

        def compared(drafter: LongSpecDrafter, states: Sequence[LongSpecState]) -> Any:
            found = opened(drafter, states)
            for state, inputs in zip(states, found, strict=True):
                text = state.context.tokens
                self.drafts += 1
                self.scattered += not cast(NativeCache, state.context.target_cache()).in_order(None)
                read = self.keys.read(inputs.cache)
                self.right += torch.allclose(read, self.fresh(text[:-1]), atol=1e-4)
                self.late += torch.allclose(read, self.fresh(text[1:]), atol=1e-4)
            return found

        monkeypatch.setattr(LongSpecDrafter, "opened", compared)

    def fresh(self, text: Sequence[int]) -> torch.Tensor:
        cache = self.runner.open()
        self.runner.extend([cache], [text])
        found: torch.Tensor = self.keys.read(cache).clone()
        self.runner.release(cache)
        return found


def test_the_targets_keys_are_right_after_forks_shared_prefixes_and_pauses(
    wide: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of several outputs, prompts that begin alike, and so little memory that sequences make way and come
    back. Negative control: keys of a text that is a token further.
    """
    ample = LLM(str(wide), speculative_config=None, dtype="float32", threads=1)
    own = written_head(config(ample.runner.info))
    size = 9 * ample.runner.memory.block_bytes  # type: ignore[attr-defined]
    llm = LLM(
        str(wide), dtype="float32", threads=1, kv_cache_memory_bytes=size,
        speculative_config={"method": "longspec", "model": own, "num_speculative_tokens": 2, "controller": "fixed"},
    )  # fmt: skip
    pauses, pause = list[int](), Scheduler.pause
    monkeypatch.setattr(Scheduler, "pause", lambda self, one: pauses.append(one.key) or pause(self, one))
    seen = Seen(llm, monkeypatch)
    prompts = [{"prompt_token_ids": [*range(20, 52), 60 + i]} for i in range(4)]
    given = [SamplingParams(temperature=0.0 if i else 0.9, seed=3, n=1 if i else 2, max_tokens=30, ignore_eos=True)
             for i in range(4)]  # fmt: skip
    found = llm.generate(prompts, given)
    assert [one.outputs for one in found] == [one.outputs for one in ample.generate(prompts, given)]
    assert not any(one.metrics.dropped_drafters for one in found)
    assert seen.right == seen.drafts > 60
    assert not seen.late
    assert seen.scattered
    assert pauses
    assert sum(one.num_cached_tokens or 0 for one in found) > 0


# ------------------------------------------------------------------------------------------------ verification


def test_a_tree_over_a_long_prefix_is_attended_to_as_by_one_mask() -> None:
    """The paper's tree, of levels of 4, 16, 16, 16 and 16 nodes, behind 1,500 tokens: compiled passes go through the
    prefix without a mask and through the tree by each node's ancestors, and join the two. Negative control: nodes that
    see others than these. (On GPUs the two parts are merged by their log-sums, see `test_fixed_shape_attention.py`.)
    """
    parents, level = list[int](), [-1]
    for width in (4, 16, 16, 16, 16):
        first = len(parents)
        parents += [level[i % len(level)] for i in range(width)]
        level = list(range(first, len(parents)))
    tokens = [30 + 5 * i for i in range(len(parents))]
    prefix, sizes = [(11 * i) % 500 + 4 for i in range(1500)], {"hidden_size": 64, "head_dim": 32}
    model = tiny_llama(vocab_size=512, intermediate_size=64, max_position_embeddings=2048, **sizes)

    def scored(tree: TokenTree, *, compiled: bool) -> torch.Tensor:
        runner = runner_of(model, compiled=compiled)
        assert runner.info.passes == ("compiled" if compiled else "operators")
        state = runner.open()
        runner.extend([state], [prefix])
        return runner.score([state], [7], [tree]).logits

    tree = TokenTree.build(tokens, parents)
    masked = scored(tree, compiled=False)
    assert torch.allclose(scored(tree, compiled=True), masked, atol=1e-3)
    other = [max(parent - 1, -1) if parent >= 4 else parent for parent in parents]
    assert not torch.allclose(scored(TokenTree.build(tokens, other), compiled=True), masked, atol=1e-2)


# ------------------------------------------------------------------------------------------------ what it needs


def test_what_it_needs_is_named(folder: Path) -> None:
    world = World(folder)
    info, path = world.target.info, written_head(world.config, world.weights)

    def made(target: Any, model: str = path) -> LongSpecDrafter:
        args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=99, target=target)
        return LongSpecDrafter(args, model=model)

    with pytest.raises(CapabilityError, match="reads the keys and values of the target's last layer, which"):
        made(without(world.target, "last_keys"))
    narrow = config(info, layer={**world.config.layer, "head_dim": 8})
    with pytest.raises(CheckpointError, match=r"has 2 key-value heads of 8 dimensions, but .* has 2 of 16"):
        made(world.target, written_head(narrow))
    eagle = HeadConfig(method="eagle", hidden_size=32, vocab_size=info.vocab_size, draft_vocab_size=9,
                       layer=world.config.layer)  # fmt: skip
    with pytest.raises(CheckpointError, match="is of method 'eagle', not 'longspec'"):
        made(world.target, written_head(eagle))
    (state,) = made(world.target).begin([Context("a", list(PROMPT), 3)])
    with pytest.raises(DrafterError, match="needs the target's cache, which this engine does not give"):
        world.propose(state, 3)
