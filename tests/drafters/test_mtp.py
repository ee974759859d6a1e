"""Modules for multi-token prediction: their logits are those of transformers' layers for every layout of files, the
cache holds true states alone, a module that knows is always right, and the text stays the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from typing import Any

import pytest
import tiny_hybrid
import torch
from models import checkpoints
from mtp_checkpoints import LAYOUTS, Module, add_module
from safetensors.torch import load_file, save_file
from tiny_checkpoint import edit_json, edit_weights, write

from benchmarks.stand_ins import head_weights, written_head
from paceline import LLM, SamplingParams
from paceline.config import DraftChoice, SpeculativeConfig
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.feature_drafts import FeatureDrafts
from paceline.drafters.heads.mtp import MtpDrafter
from paceline.errors import CheckpointError, ConfigError, PacelineError, UnsupportedModelError
from paceline.models import load_runner
from paceline.models.heads import HeadConfig
from paceline.models.runners import load_mtp_head
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Verdict

TEXT = [3 + (11 * i) % 90 for i in range(20)]
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 500 + 4 for i in range(1 + 14 * j)]} for j in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
FOUR = {"num_speculative_tokens": 4, "controller": "fixed"}


class World:
    """A target of a family with a module in its own files, the drafter, and the module in transformers."""

    def __init__(self, case: str, folder: Path, **options: Any) -> None:
        model = checkpoints.oracle(case)
        self.module: Module = add_module(checkpoints.write(case, "old", folder), model, LAYOUTS[case])
        self.target = load_runner(str(folder), dtype="float32")
        info = self.target.info
        args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=info.max_context, target=self.target)
        self.drafter = MtpDrafter(args, model=str(folder), **options)
        self.cache, self.tokens = self.target.open(), list(TEXT)
        self.taps = self.target.extend([self.cache], [TEXT[:-1]], taps=self.drafter.taps).taps
        (self.states,) = self.taps.values()

    def begin(self, **more: Any) -> Any:
        return self.drafter.begin([Context("a", list(TEXT), len(TEXT), taps=self.taps, **more)])[0]

    def propose(self, state: Any, nodes: int, depth: int = 9) -> TokenTree:
        return self.drafter.propose([state], [Budget(nodes, depth)], [EMPTY_TREE])[0]

    def row(self, drafted: Sequence[int] = (), **more: Any) -> torch.Tensor:
        """(v,) chances behind drafted tokens, by the plain forward pass."""
        return self.module.after(self.tokens[1:], self.states, drafted, **more).softmax(0)

    def commit(self, state: Any, tree: TokenTree, path: Sequence[int], own: int) -> None:
        """A scoring pass of the target, after which the path was accepted."""
        scores = self.target.score([self.cache], [self.tokens[-1]], [tree], taps=self.drafter.taps)
        self.target.commit([self.cache], [path])
        new = [*(int(tree.tokens[i]) for i in path), own]
        (taps,) = scores.taps.values()
        self.states = torch.cat((self.states, taps[[0, *(1 + i for i in path)]]))
        self.tokens += new
        state.context.tokens.extend(new)
        self.drafter.observe([state], [tree], [Verdict(tuple(path), tuple(new[:-1]), own)], scores)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=2e-4, rtol=2e-3)


# ------------------------------------------------------------------------------------------------ logits


@pytest.mark.parametrize("case", LAYOUTS)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Of one pass over the whole text, teacher-forced: of a chain and of a tree, in rounds with some, all and none of
    it accepted. Exchanged halves of fc show.
    """
    for policy in ({}, {"tree_policy": "rsd_c", "tree_width": [2, 2]}):
        world = World(case, tmp_path, **policy)
        state = world.begin(temperature=1.0)
        for accepted in (1, 9, 0):
            tree = world.propose(state, 6, 3)
            assert len(tree) >= 3
            for parent in (-1, *(node for node in range(len(tree)) if tree.trials_of(node))):
                path = tuple(int(tree.tokens[i]) for i in tree.path(parent)) if parent >= 0 else ()
                for trial in tree.trials_of(parent):
                    assert close(trial.row, world.row(path))
            row = tree.trials_of(-1)[0].row
            assert not close(row, world.row((5,)))
            assert not close(row, world.row(swapped=True))
            world.commit(state, tree, tree.path(tree.leaves()[-1])[:accepted], own=11)


def cached(world: World, cache: Any) -> torch.Tensor:
    """Keys and values of a module's committed inputs."""
    slots = torch.as_tensor(cache.slot_index(0, cache.length))
    return world.drafter.head.runner.arena.layers[0][slots]


def fresh(world: World, count: int) -> torch.Tensor:
    """The same of a pass over the text's first inputs, with true states."""
    head, cache = world.drafter.head, world.drafter.head.open()
    chain = TokenTree.chain([0] * (count - 1))
    head.step([cache], [chain], [0], tokens=world.tokens[1 : 1 + count], states=world.states[:count], picked=())
    head.commit([cache], [range(count - 1)])
    return cached(world, cache)


def check_lengths(world: World) -> Any:
    """The state behind some rounds, after each of which the cache is as long as what is committed."""
    state = world.begin()
    for turn in range(6):
        tree = world.propose(state, 6, 3)
        path = tree.path(tree.leaves()[turn % len(tree.leaves())])[: turn % 4]
        world.commit(state, EMPTY_TREE if turn == 3 else tree, () if turn == 3 else path, own=20 + turn)
        world.propose(state, 2, 1)
        assert state.cache.length == len(world.tokens) - 1 - state.states.count >= len(TEXT) - 1
    return state


def test_the_cache_is_as_long_as_what_is_committed_and_holds_true_states(tmp_path: Path) -> None:
    world = World("qwen3_5_text", tmp_path, tree_width=2)
    state = check_lengths(world)
    want = fresh(world, state.cache.length)
    assert close(cached(world, state.cache), want)
    world.states = world.states.roll(1, 0)
    assert not close(want, fresh(world, state.cache.length))


def test_an_input_that_is_fed_twice_shows_in_the_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    def careless(self: FeatureDrafts, state: Any) -> None:
        self.head.commit([state.cache], [range(state.kept - 1)])
        state.states.drop(state.kept - 1)
        state.kept = 0

    monkeypatch.setattr(FeatureDrafts, "_keep", careless)  # private: nothing public leaves rows in the cache
    with pytest.raises(AssertionError):
        check_lengths(World("qwen3_5_text", tmp_path, tree_width=2))


# ------------------------------------------------------------------------------------------------ a module that knows


@cache
def of_last_tokens() -> LLM:
    """A target whose layers add nothing, so that its next token follows from the last one alone."""
    folder = write(Path(mkdtemp(prefix="paceline-mtp-")), max_position_embeddings=256)

    def silence(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()

    edit_weights(folder, silence)
    return LLM(str(folder), speculative_config=None, dtype="float32", seed=1)


def knowing(half: int, **more: Any) -> LLM:
    """The same with a module whose layer adds nothing either, and reads the embedding (half 0) or the state (1)."""
    plain = of_last_tokens()
    info, stored = plain.runner.info, load_file(plain.folder / "model.safetensors")
    layer = {"num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6}
    own = HeadConfig(
        method="mtp", hidden_size=info.hidden_size, vocab_size=info.vocab_size, draft_vocab_size=info.vocab_size,
        layer=layer,
    )  # fmt: skip
    weights = head_weights(own)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "fc.weight")):
            weight.zero_()
        if name.endswith("norm.weight"):
            weight.fill_(1.0)
    weights["norm.weight"] = stored["model.norm.weight"]
    weights["fc.weight"][:, half * info.hidden_size :][:, : info.hidden_size] = torch.eye(info.hidden_size)
    return plain.with_speculative_config({"method": "mtp", "model": written_head(own, weights), **FOUR, **more})


def accepted(llm: LLM) -> float:
    """Share of the drafted tokens that stood."""
    found = llm.generate(PROMPTS, GREEDY)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    drafted = sum(out.metrics.num_draft_tokens for out in found)
    assert drafted > 20
    return sum(out.metrics.num_accepted_tokens for out in found) / drafted


def test_a_module_that_knows_is_always_right_and_with_exchanged_halves_hardly_ever() -> None:
    assert accepted(knowing(0)) == 1.0
    assert accepted(knowing(1)) < 0.1
    assert outputs(knowing(0), GREEDY) == outputs(of_last_tokens(), GREEDY) == outputs(knowing(1), GREEDY)


# ------------------------------------------------------------------------------------------------ texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 with a module in its own files, of sizes that compiled passes take."""
    from transformers import AutoModelForCausalLM

    found = tiny_hybrid.write(tmp_path_factory.mktemp("target"), "delta")
    add_module(found, AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32), LAYOUTS["qwen3_5_text"])
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    return LLM(str(folder), speculative_config=None, dtype="float32", seed=1)


def outputs(llm: LLM, params: SamplingParams) -> list[Any]:
    found = llm.generate(PROMPTS, params)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    return [[one.token_ids for one in out.outputs] for out in found]


@pytest.mark.parametrize(
    "given",
    [
        {"method": "qwen3_5_mtp", "num_speculative_tokens": 3},
        {"method": "mtp", "num_speculative_tokens": 6, "tree_policy": "eagle2", "tree_width": 2},
        {"method": ["ngram", "mtp"], "num_speculative_tokens": 3},
    ],
)
def test_the_text_is_the_targets(plain: LLM, given: dict[str, Any]) -> None:
    """Of several prompts at once, with its own module: greedy, with seeds, several outputs, rules and a grammar."""
    fast = plain.with_speculative_config(given)
    assert "mtp" in fast.drafter_methods
    for params in (
        GREEDY,
        SamplingParams(temperature=0.8, seed=5, max_tokens=12, n=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=12),
        SamplingParams(temperature=0.0, structured_outputs={"regex": "[a-z ]{12}"}, max_tokens=12),
    ):
        assert outputs(fast, params) == outputs(plain, params), given


def test_auto_drafts_with_a_module_of_the_targets_own(plain: LLM) -> None:
    assert plain.with_speculative_config("auto").drafter_methods[-1] == "mtp"
    assert outputs(plain.with_speculative_config("auto"), GREEDY) == outputs(plain, GREEDY)
    assert "mtp" not in of_last_tokens().with_speculative_config("auto").drafter_methods


def test_auto_leaves_out_a_module_that_it_cannot_read(folder: Path, tmp_path: Path) -> None:
    copytree(folder, tmp_path / "copy")
    edit_weights(tmp_path / "copy", in_integers)
    assert "mtp" not in LLM(str(tmp_path / "copy"), dtype="float32").drafter_methods


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_module_of_a_rounded_target_is_rounded_too(folder: Path, quantization: str) -> None:
    rounded = LLM(str(folder), speculative_config=None, dtype="bfloat16", quantization=quantization, seed=1)
    fast = rounded.with_speculative_config({"method": "mtp", "num_speculative_tokens": 3})
    layer = fast.engine.parts.drafter_set.drafters[0].head.runner
    assert layer.info.quantization == quantization
    assert type(layer.passes).__name__ == "CompiledDecoder"
    assert outputs(fast, GREEDY) == outputs(rounded, GREEDY)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_module_with_a_part_of_the_head_drafts_as_before_among_its_tokens(
    folder: Path, quantization: str | None
) -> None:
    llm = LLM(str(folder), speculative_config=None, dtype="float32", quantization=quantization, seed=1)
    entry = {"method": "mtp", "num_speculative_tokens": 3}
    heads = []
    for more in ({}, {"draft_vocab_size": 400}):
        fast = llm.with_speculative_config(entry | more)
        heads.append(fast.engine.parts.drafter_set.drafters[0].head)
        assert outputs(fast, GREEDY) == outputs(llm, GREEDY)
    states = torch.randn(1, llm.runner.info.hidden_size, generator=torch.Generator().manual_seed(0))
    whole, part = (head.step([head.open()], [EMPTY_TREE], [0], tokens=[5], states=states, picked=[0]) for head in heads)
    ids = heads[1].tokens
    assert len(ids) == 400
    assert heads[0].tokens is None
    off = 2e-3 if quantization is None else 0.05 * whole.logits.std()
    assert (part.logits - whole.logits[:, ids]).abs().max() < off
    assert (part.logits - whole.logits[:, ids - 1]).abs().max() > off
    assert torch.allclose(part.states, whole.states, atol=1e-4)


@pytest.mark.parametrize("name", ["deepseek_mtp", "qwen3_next_mtp", "mtp"])
def test_names_of_vllm_are_known(name: str) -> None:
    assert SpeculativeConfig.parse({"method": name}) == SpeculativeConfig.parse({"method": "mtp"})
    assert SpeculativeConfig.parse(["ngram", name]) == SpeculativeConfig.parse(["ngram", "mtp"])
    assert DraftChoice.parse({"method": name}).methods == ("mtp",)


# ------------------------------------------------------------------------------------------------ errors


def in_integers(weights: dict[str, torch.Tensor]) -> None:
    name = "mtp.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name].to(torch.int8)


def test_of_several_modules_the_first_drafts(tmp_path: Path) -> None:
    model, layout = checkpoints.oracle("mimo"), LAYOUTS["mimo"]
    folder = checkpoints.write("mimo", "old", tmp_path)
    add_module(folder, model, layout)
    second = {
        name.replace("mtp_layers.0.", "mtp_layers.1."): 0 * value
        for name, value in Module(model, layout, 2).tensors().items()
    }
    path = folder / "model.safetensors"
    save_file(dict(sorted((load_file(path) | second).items(), reverse=True)), path, metadata={"format": "pt"})
    head = load_mtp_head(folder, load_runner(str(folder), dtype="float32"))
    result = head.step([head.open()], [EMPTY_TREE], [0], tokens=[5], states=torch.ones(1, 64), picked=[0])
    assert bool(result.logits.any())


def test_what_cannot_be_used_is_named(tmp_path: Path, plain: LLM) -> None:
    target = load_runner(str(checkpoints.write("llama", "new", tmp_path / "plain")), dtype="float32")
    layer = {"num_attention_heads": 2, "intermediate_size": 8, "max_position_embeddings": 64}
    eagle = HeadConfig(method="eagle", hidden_size=64, vocab_size=128, draft_vocab_size=128, layer=layer)

    def broken(change: Any) -> Path:
        folder = checkpoints.write("qwen3_5_text", "old", tmp_path / str(len(list(tmp_path.iterdir()))))
        add_module(folder, checkpoints.oracle("qwen3_5_text"), LAYOUTS["qwen3_5_text"])
        edit_weights(folder, change)
        return folder

    cases: list[tuple[type[PacelineError], str, Any]] = [
        (CheckpointError, "holds no module for multi-token prediction", tmp_path / "plain"),
        (CheckpointError, "is of method 'eagle', not 'mtp'", written_head(eagle)),
        (CheckpointError, "without its norm", broken(lambda weights: weights.pop("mtp.norm.weight"))),
        (
            CheckpointError,
            r"mtp.fc.weight must have shape \(64, 128\), got \(64, 64\)",
            broken(lambda weights: weights.update({"mtp.fc.weight": torch.eye(64)})),
        ),
        (
            CheckpointError,
            "lacks layers.0.self_attn.o_proj",
            broken(lambda w: w.pop("mtp.layers.0.self_attn.o_proj.weight")),
        ),
        (UnsupportedModelError, "is stored as I8; such quantised weights are not supported", broken(in_integers)),
    ]
    for error, message, model in cases:
        with pytest.raises(error, match=message):
            load_mtp_head(model, target)
    own_embedding = broken(lambda weights: None)
    edit_json(own_embedding / "config.json", mtp_use_dedicated_embeddings=True)
    with pytest.raises(UnsupportedModelError, match="an embedding of its own is not implemented"):
        load_mtp_head(own_embedding, target)
    with pytest.raises(CheckpointError, match=r"is for hidden_size 64, but .* has 32"):
        load_mtp_head(broken(lambda weights: None), of_last_tokens().runner)
    with pytest.raises(ConfigError, match="draft_vocab_size must be left out for a trained head"):
        knowing(0, draft_vocab_size=500)
    with pytest.raises(ConfigError, match="model must be the folder or hub id of a head for method 'mtp'"):
        MtpDrafter(DrafterArgs(vocab_size=128, index=0, max_context=64, target=target))
