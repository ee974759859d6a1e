"""The native runner against transformers, family by family: prefill, stepwise decoding, trees, commit and rollback,
ragged batches.

Two rotary kinds depend on the length. With dynamic, a chunk counts with the length it leads to, a scored row with the
length up to itself, and what is cached keeps its angles: what transformers does with a cache when tokens come one at a
time. With longrope, the logits after n tokens are those of one pass over the n tokens, as in transformers' `generate`,
which then drops the cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import CASES, STYLES, Case, Tensors, reference

from paceline.checkpoints import Checkpoint, load_weights, read_config, spec_from_config
from paceline.checkpoints.families import FAMILIES
from paceline.errors import CheckpointError
from paceline.models import ModelSpec, load_runner
from paceline.models.passes.compiled_decoder import CompiledDecoder
from paceline.models.runners import NativeRunner, RecurrentRunner, native_of
from paceline.tree import EMPTY_TREE, TokenTree

TEXT = torch.randint(3, 128, (48,), generator=torch.Generator().manual_seed(1)).tolist()
LONG = 45
"""Longer than every window (8) and every original context (16 or 32) of the cases."""

TREE = TokenTree.build([70, 71, 72, 73, 74, 75, 76, 77], [-1, -1, 0, 0, 1, 2, 5, 4])
PATH = (1, 4, 7)
"""A path that leaves the order of the nodes, so that its cache entries must move."""

Load = Callable[[str, str], NativeRunner]
by_name = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    return cache(lambda name, style: checkpoints.write(name, style, tmp_path_factory.mktemp(f"{name}-{style}")))


@pytest.fixture(scope="module")
def load(folder_of: Callable[[str, str], Path]) -> Load:
    @cache
    def runner(name: str, style: str) -> NativeRunner:
        loaded = load_runner(str(folder_of(name, style)))
        assert native_of(loaded) is not None
        return loaded

    return runner


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


def prefilled(runner: NativeRunner, tokens: list[int]) -> Any:
    sequence = runner.open()
    runner.extend([sequence], [tokens])
    return sequence


def decode(runner: NativeRunner, sequence: Any, tokens: list[int]) -> torch.Tensor:
    """(n, v) logits of tokens fed one by one."""
    rows = []
    for token in tokens:
        rows.append(runner.score([sequence], [token], [EMPTY_TREE]).logits)
        runner.commit([sequence], [()])
    return torch.cat(rows)


@by_name
def test_prefill(load: Load, name: str) -> None:
    """One style of files is loaded, since all mean the same (`test_weights`)."""
    runner = load(name, STYLES[0])
    for length in (12, LONG):
        logits = runner.extend([runner.open()], [TEXT[:length]], all_logits=True).logits
        wanted = reference(name, TEXT[:length])
        assert wanted.std() > 0.5, "the oracle's logits hardly vary, so that equality would say little"
        assert distance(logits, wanted) < CASES[name].tolerance


def _llama_class() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM


def _own_names(tensors: Tensors) -> Tensors:
    return {name.replace("model.layers", "h").replace("mlp.down_proj", "mlp.out"): tensors[name] for name in tensors}


def test_a_family_that_transformers_lacks_has_names_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ((re.compile(r"^h\."), "model.layers."), (re.compile(r"\.mlp\.out\."), ".mlp.down_proj."))
    family: Any = replace(FAMILIES["llama"], keys={"n_embd": "hidden_size"}, names=names)
    case = Case(model_type="renamed", old={"n_embd": 64}, keys=_own_names, oracle=_llama_class)
    monkeypatch.setitem(FAMILIES, "renamed", family)  # type: ignore[arg-type]
    monkeypatch.setitem(CASES, "renamed", case)
    wanted = reference("renamed", TEXT[:LONG])
    for style in STYLES:
        runner: Any = load_runner(str(checkpoints.write("renamed", style, tmp_path / style)))
        assert runner.spec.family == "renamed"
        found = runner.extend([runner.open()], [TEXT[:LONG]], all_logits=True).logits
        assert distance(found, wanted) < CASES["renamed"].tolerance
    monkeypatch.setitem(FAMILIES, "renamed", replace(family, names=names[:1]))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"lacks layers\.0\.mlp\.down_proj\.weight"):
        load_runner(str(tmp_path / "old"))


@pytest.mark.parametrize("name", checkpoints.COMPILED)
def test_cases_of_such_sizes_run_in_compiled_passes(load: Load, name: str) -> None:
    native = native_of(load(name, "new"))
    assert native is not None
    assert isinstance(native.passes, CompiledDecoder)


def first_step(name: str) -> int:
    """From where a text is fed token by token: before 32, and before every length at which angles change."""
    return 10 if CASES[name].by_length or "longrope" in name else 26


@by_name
def test_stepwise_decoding(load: Load, name: str) -> None:
    runner, first = load(name, STYLES[0]), first_step(name)
    logits = decode(runner, prefilled(runner, TEXT[:first]), TEXT[first:LONG])
    assert distance(logits, _recomputed(name) if CASES[name].afresh else _stepwise(name)) < CASES[name].tolerance


@cache
def _stepwise(name: str) -> torch.Tensor:
    """transformers' logits of the tokens from `first_step` to LONG, fed one by one into its cache."""
    model, rows, first = checkpoints.fresh(name), [], first_step(name)
    with torch.no_grad():
        out = model(torch.tensor([TEXT[:first]]), use_cache=True)
        key = next(key for key in ("cache", "past_key_values") if key in out)
        for token in TEXT[first:LONG]:
            out = model(torch.tensor([[token]]), use_cache=True, **{key: out[key]})
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


@cache
def _recomputed(name: str) -> torch.Tensor:
    """The same, each from a forward pass over all that is before it."""
    return torch.stack([reference(name, TEXT[: end + 1])[-1] for end in range(first_step(name), LONG)])


@by_name
def test_a_tree_gives_what_its_nodes_give_one_by_one(load: Load, name: str) -> None:
    runner = load(name, STYLES[0])
    for length in (1, 38):
        sequence = prefilled(runner, TEXT[:length])
        logits = runner.score([sequence], [TEXT[length]], [TREE]).logits
        for node in TREE.leaves():
            path = TREE.path(node)
            alone = decode(runner, prefilled(runner, TEXT[:length]), [TEXT[length], *TREE.tokens[list(path)].tolist()])
            assert distance(logits[[0, *(i + 1 for i in path)]], alone) < CASES[name].tolerance, (length, node)


@by_name
def test_commit_and_rollback_against_a_forward_from_scratch(load: Load, name: str) -> None:
    runner = load(name, STYLES[0])
    sequence = prefilled(runner, TEXT[:20])
    runner.score([sequence], [TEXT[20]], [TREE])
    runner.commit([sequence], [PATH])
    kept = [*TEXT[:21], *TREE.tokens[list(PATH)].tolist()]
    assert sequence.length == len(kept)
    logits = runner.score([sequence], [TEXT[21]], [TokenTree.chain(TEXT[22:26])]).logits
    assert distance(logits, reference(name, [*kept, *TEXT[21:26]])[-5:]) < CASES[name].tolerance
    if not runner.capabilities.truncate:
        return
    runner.truncate(sequence, 17)
    logits = runner.score([sequence], [TEXT[30]], [TREE]).logits
    wanted = reference(name, [*TEXT[:17], TEXT[30], *TREE.tokens[list(PATH)].tolist()])[-4:]
    assert distance(logits[[0, *(i + 1 for i in PATH)]], wanted) < CASES[name].tolerance


@by_name
def test_batches_of_ragged_lengths(load: Load, name: str) -> None:
    runner = load(name, STYLES[0])
    texts = [TEXT[:3], TEXT[5:19], TEXT[2:27]]
    sequences = [runner.open() for _ in texts]
    scores = runner.extend(sequences, texts, all_logits=True)
    for i, text in enumerate(texts):
        assert distance(scores.of(i), reference(name, text)) < CASES[name].tolerance
    trees = [TREE, EMPTY_TREE, TokenTree.chain(TEXT[30:33])]
    scores = runner.score(sequences, TEXT[:3], trees)
    paths = [list(PATH), [], [0, 1, 2]]
    for i, (text, tree, path) in enumerate(zip(texts, trees, paths, strict=True)):
        wanted = reference(name, [*text, TEXT[i], *tree.tokens[path].tolist()])[len(text) :]
        assert distance(scores.of(i)[[0, *(node + 1 for node in path)]], wanted) < CASES[name].tolerance


@pytest.mark.parametrize("name", ["llama3", "gemma3", "mixtral"])
def test_sharded_files(name: str, tmp_path: Path) -> None:
    checkpoints.oracle(name).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    runner: Any = load_runner(str(tmp_path))
    logits = runner.extend([runner.open()], [TEXT[:LONG]], all_logits=True).logits
    assert distance(logits, reference(name, TEXT[:LONG])) < CASES[name].tolerance


def test_the_text_of_a_kimi_k2_5_is_read_without_what_sees(tmp_path: Path) -> None:
    """Its files name the language model's tensors within `language_model`, beside a vision tower and a projector."""
    checkpoints.write("deepseek_v3", "old", tmp_path)
    tensors = {f"language_model.{name}": one for name, one in checkpoints.load_tensors(tmp_path).items()}
    seeing = {
        f"{name}.weight": torch.ones(2, 2) for name in ("vision_tower.encoder.blocks.0.wo", "mm_projector.proj.0")
    }
    checkpoints.save_tensors(tmp_path / "model.safetensors", tensors | seeing)
    text = checkpoints.load_json(tmp_path / "config.json") | {"model_type": "kimi_k2"}
    whole = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {}}
    checkpoints.save_json(tmp_path / "config.json", whole | {"text_config": text})
    runner: Any = load_runner(str(tmp_path))
    logits = runner.extend([runner.open()], [TEXT[:LONG]], all_logits=True).logits
    assert distance(logits, reference("deepseek_v3", TEXT[:LONG])) < CASES["deepseek_v3"].tolerance
    checkpoints.save_tensors(tmp_path / "model.safetensors", tensors | {"projector.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"holds projector\.weight which its architecture does not have"):
        load_runner(str(tmp_path))


def test_a_hub_id_out_of_the_cache_while_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.hub_cache(tmp_path, "some-org/tiny", lambda folder: checkpoints.write("qwen3", "new", folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    runner: Any = load_runner("some-org/tiny", revision="main")
    assert runner.info.name == "some-org/tiny"
    logits = runner.extend([runner.open()], [TEXT[:LONG]], all_logits=True).logits
    assert distance(logits, reference("qwen3", TEXT[:LONG])) < CASES["qwen3"].tolerance


def _theta(spec: ModelSpec) -> ModelSpec:
    return replace(spec, ropes={key: replace(rope, theta=rope.theta * 1.05) for key, rope in spec.ropes.items()})


def _unscaled(spec: ModelSpec) -> ModelSpec:
    return replace(spec, ropes={key: replace(rope, kind="default", scaling={}) for key, rope in spec.ropes.items()})


def _ungrown(spec: ModelSpec) -> ModelSpec:
    return replace(spec, ropes={key: replace(rope, growth=None) for key, rope in spec.ropes.items()})


def _window(width: int | None) -> Callable[[ModelSpec], ModelSpec]:
    def change(spec: ModelSpec) -> ModelSpec:
        return replace(
            spec, layers=tuple(replace(layer, window=width if layer.window else None) for layer in spec.layers)
        )

    return change


def _all_rotated(spec: ModelSpec) -> ModelSpec:
    return replace(spec, layers=tuple(replace(layer, rope="default") for layer in spec.layers))


def _one_rope(spec: ModelSpec) -> ModelSpec:
    return replace(spec, ropes=dict.fromkeys(spec.ropes, spec.ropes["full_attention"]))


def _moe(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, moe=replace(spec.moe, **changes))  # type: ignore[type-var]  # cases with a mixture only


def _fields(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    return lambda spec: replace(spec, **changes)


def _mixer(**changes: Any) -> Callable[[ModelSpec], ModelSpec]:
    def change(spec: ModelSpec) -> ModelSpec:
        layers = [(layer, layer.mixer and replace(layer.mixer, **changes)) for layer in spec.layers]
        return replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer, mixer in layers))

    return change


WRONG: list[tuple[str, Callable[[ModelSpec], ModelSpec]]] = [
    ("llama", _theta),
    ("llama3", _unscaled),
    ("llama-linear", _unscaled),
    ("llama-dynamic", _unscaled),
    ("llama-yarn", _unscaled),
    ("phi3-longrope", _unscaled),
    ("gemma3_text", _one_rope),
    ("mistral", _window(9)),
    ("mistral", _window(None)),
    ("qwen2", _window(7)),
    ("gemma2", _window(None)),
    ("gemma3", _window(9)),
    ("qwen3", _fields(qk_norm=None)),
    ("gemma3_text", _fields(qk_norm=None)),
    ("olmo2", _fields(qk_norm=None)),
    ("gemma2", _fields(attention_softcap=None)),
    ("gemma2", _fields(logit_softcap=None)),
    ("gemma2", _fields(attention_scale=None)),
    ("gemma2", _fields(norm_offset=False)),
    ("gemma2", _fields(embedding_multiplier=1.0)),
    ("gemma2", _fields(activation="gelu")),
    ("granite", _fields(residual_multiplier=1.0)),
    ("granite", _fields(logit_multiplier=1.0)),
    ("granite", _fields(attention_scale=None)),
    ("smollm3", _all_rotated),
    ("mixtral", _moe(top_k=1)),
    ("qwen3_moe", _moe(norm_top_k=False)),
    ("qwen3_moe-unnormed", _moe(norm_top_k=True)),
    ("llama", _fields(norm_eps=1e-3)),
    ("starcoder2", _fields(norm="rms")),
    ("starcoder2", _fields(activation="silu")),
    ("starcoder2", _window(9)),
    ("glm4", _theta),
    ("cohere2", _all_rotated),
    ("cohere2", _fields(parallel=False)),
    ("cohere2", _fields(logit_multiplier=1.0)),
    ("gpt_oss", _unscaled),
    ("gpt_oss", _window(None)),
    ("gpt_oss", _fields(attention_sinks=False)),
    ("gpt_oss", _fields(swiglu_limit=7.0)),
    ("gpt_oss", _fields(swiglu_alpha=1.0)),
    ("gpt_oss", _moe(top_k=1)),
    ("deepseek_v3", _moe(groups=None)),
    ("glm4_moe", _moe(scaling=1.0)),
    ("glm4_moe_lite", _moe(groups=None)),
    ("ministral3", _ungrown),
    ("mistral4", _ungrown),
    ("olmo3", _one_rope),
    ("exaone4", _all_rotated),
    ("hunyuan_v1_dense", _fields(qk_norm_rotated=False)),
    ("hunyuan_v1_moe", _fields(qk_norm_rotated=False)),
    ("minimax_m2", _fields(qk_norm=None)),
    ("ernie4_5_moe", _moe(biased_choice=False)),
    ("apertus", _unscaled),
    ("apertus", _fields(activation="relu2")),
    ("qwen2_moe-wide", _moe(norm_top_k=True)),
    ("qwen2_moe-wide", _moe(shared_gate=False)),
    ("granitemoehybrid", _fields(residual_multiplier=1.0)),
    ("granitemoehybrid-wide", _fields(residual_multiplier=1.0)),
    ("granitemoehybrid", _mixer(norm_groups=1)),
    ("granitemoehybrid-wide", _fields(residual_multiplier=1.0)),
    ("falcon_h1-normed", _mixer(norm="gated_after")),
    ("falcon_h1", _mixer(steps=(0.1, 0.5))),
    ("qwen3_next", _moe(shared_gate=False)),
    ("lfm2_moe", _moe(scaling=1.0)),
    ("lfm2_moe", _moe(sigmoid=False)),
    ("lfm2_moe-unnormed", _moe(norm_top_k=True)),
    ("kimi_linear", _fields(norm_eps=1e-2)),
    ("kimi_linear", _moe(groups=None)),
    ("kimi_linear-ranked", _moe(scaling=1.0)),
    ("lightnet", _fields(norm_eps=1e-2)),
    ("bamba", _mixer(norm_groups=1)),
    ("bamba-bias", _theta),
    ("jamba", _moe(norm_top_k=True)),
    ("jamba-dense", _mixer(norm_eps=1e-2)),
    ("nemotron_h", _fields(activation="relu")),
    ("nemotron_h-moe", _moe(groups=None)),
    ("nemotron_h-moe", _moe(scaling=1.0)),
    ("mamba", _fields(norm_eps=1e-2)),
    ("mamba-bias", _fields(norm_eps=1e-2)),
    ("falcon_mamba", _mixer(norm=None)),
    ("falcon_mamba", _mixer(norm_eps=1e-6)),
    ("mamba2", _mixer(norm_groups=1)),
    ("mamba2-bias", _mixer(norm="gated_after")),
    ("phi4flash", _window(9)),
    ("phi4flash", _fields(attention_scale=None)),
    ("phi4flash", _fields(norm_eps=1e-2)),
]
WRONG += [(name, _theta) for name in CASES if not name.endswith("-wide") and all(name != one for one, _ in WRONG)]


@pytest.mark.parametrize(("name", "change"), WRONG)
def test_the_check_catches_a_wrong_model(
    name: str, change: Callable[[ModelSpec], ModelSpec], folder_of: Callable[[str, str], Path]
) -> None:
    folder = folder_of(name, "new")
    spec, device = spec_from_config(read_config(folder)), torch.device("cpu")
    weights = load_weights(Checkpoint(folder), spec, device=device, dtype=torch.float32)
    kind: Any = RecurrentRunner if spec.states else NativeRunner
    runner = kind(change(spec), weights, name=name, device=device, dtype=torch.float32)
    logits = runner.extend([runner.open()], [TEXT[:LONG]], all_logits=True).logits
    assert distance(logits, reference(name, TEXT[:LONG])) > 10 * CASES[name].tolerance


@pytest.mark.parametrize("name", ["glm4", "cohere2", "ernie4_5", "ernie4_5_moe"])
def test_the_check_catches_pairs_of_other_dimensions(name: str, tmp_path: Path) -> None:
    folder, device = checkpoints.write(name, "new", tmp_path), torch.device("cpu")
    spec = spec_from_config(read_config(folder))
    spec = replace(spec, ropes={key: replace(rope, interleaved=False) for key, rope in spec.ropes.items()})
    weights = load_weights(Checkpoint(folder), spec, device=device, dtype=torch.float32)
    runner = NativeRunner(spec, weights, name=name, device=device, dtype=torch.float32)
    logits = runner.extend([runner.open()], [TEXT[:LONG]], all_logits=True).logits
    assert distance(logits, reference(name, TEXT[:LONG])) > 10 * CASES[name].tolerance


def test_mxfp4_experts(tmp_path: Path) -> None:
    """The packed file means what the file of transformers' own dequantisation means."""
    packed, plain = (checkpoints.write("gpt_oss", "module", tmp_path / kind) for kind in ("packed", "plain"))
    checkpoints.pack_experts(packed, plain)
    found = []
    for folder in (packed, plain):
        runner: Any = load_runner(str(folder), quantization="none")
        assert isinstance(runner, NativeRunner)
        found.append(runner.extend([runner.open()], [TEXT[:LONG]], all_logits=True).logits)
    assert torch.equal(*found)
    assert distance(found[0], reference("gpt_oss", TEXT[:LONG])) > 10 * CASES["gpt_oss"].tolerance


def test_the_check_catches_a_tree_scored_as_a_chain(load: Load) -> None:
    runner = load("llama", "new")
    sequence = prefilled(runner, TEXT[:20])
    chain = TokenTree.chain(TREE.tokens.tolist())
    logits = runner.score([sequence], [TEXT[20]], [chain]).logits
    wanted = reference("llama", [*TEXT[:21], *TREE.tokens[list(PATH)].tolist()])[20:]
    assert distance(logits[[0, *(i + 1 for i in PATH)]], wanted) > 10 * CASES["llama"].tolerance
