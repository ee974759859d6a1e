"""Encoder-decoder models: parity with transformers for every family, plain, in chunks, on trees and after forks; a
source is read once, and sequences with different sources share nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_encoder_decoder as tiny
import torch
import transformers

from paceline.assembly import find_exactness
from paceline.errors import CheckpointError, ConfigError, PromptError, UnsupportedModelError
from paceline.models import NO_INPUTS, EncodesInputs, Inputs, Runner, load_runner
from paceline.models.runners import what_varies
from paceline.models.state.cross_memory import SourcePart
from paceline.tree import TokenTree

TEXT = [2, 10, 20, 30, 40, 50, 61, 62, 63, 64, 65, 66]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family -> the model of transformers and our runner, each made once."""
    known: dict[str, tuple[Any, Any]] = {}

    def of(name: str) -> tuple[Any, Any]:
        if name not in known:
            folder = tmp_path_factory.mktemp("family")
            known[name] = tiny.make(name, folder), load_runner(folder, dtype="float32")
        return known[name]

    return of


def opened(runner: Any, inputs: Inputs) -> Any:
    cache = runner.open(len(TEXT), inputs)
    runner.encode([cache])
    return cache


@torch.no_grad()
def reference(model: Any, given: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(**given, decoder_input_ids=torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_logits_are_those_of_transformers(name: str, made: Any) -> None:
    model, runner = made(name)
    assert isinstance(runner, EncodesInputs)
    inputs, given = tiny.source(name)
    cache = opened(runner, inputs)
    chunks = [runner.extend([cache], [part], all_logits=True).logits for part in (TEXT[:5], TEXT[5:7])]
    chain = runner.score([cache], [TEXT[7]], [TokenTree.chain(TEXT[8:])]).logits
    want = reference(model, given, TEXT)
    torch.testing.assert_close(torch.cat([*chunks, chain]), want, rtol=1e-4, atol=2e-5)
    other = reference(model, tiny.source(name, 1)[1], TEXT)
    assert (other - want).abs().max() > 1e-2  # the source counts


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_node_of_a_tree_sees_its_path_alone(name: str, made: Any) -> None:
    model, runner = made(name)
    inputs, given = tiny.source(name)
    cache = opened(runner, inputs)
    runner.extend([cache], [TEXT[:4]])
    tree = TokenTree.build([7, 8, 9, 11, 12], [-1, -1, 0, 1, 3])
    logits = runner.score([cache], [TEXT[4]], [tree]).logits
    for node, path in {0: [7], 1: [8], 2: [7, 9], 3: [8, 11], 4: [8, 11, 12]}.items():
        want = reference(model, given, [*TEXT[:5], *path])[-1]
        torch.testing.assert_close(logits[1 + node], want, rtol=1e-4, atol=2e-5)
    runner.commit([cache], [[1, 3]])
    fork = runner.fork(cache)
    for one, more in ((cache, 33), (fork, 44)):
        got = runner.score([one], [more], [TokenTree.chain([5])]).logits
        want = reference(model, given, [*TEXT[:5], 8, 11, more, 5])[-2:]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    runner.truncate(cache, 3)
    got = runner.score([cache], [TEXT[3]], [TokenTree.chain([])]).logits
    torch.testing.assert_close(got[0], reference(model, given, TEXT[:4])[-1], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["t5", "marian", "whisper", "moonshine"])
def test_neighbours_change_nothing(name: str, made: Any) -> None:
    """Sources and texts of mixed lengths side by side, encoded in one pass."""
    model, runner = made(name)
    sources = [tiny.source(name, seed) for seed in range(3)]
    caches = [runner.open(0, inputs) for inputs, _ in sources]
    runner.encode(caches)
    texts = [TEXT[:4], TEXT[:9], TEXT[:6]]
    scores = runner.extend(caches, texts, all_logits=True)
    for i, (text, (_, given)) in enumerate(zip(texts, sources, strict=True)):
        torch.testing.assert_close(scores.of(i), reference(model, given, text), rtol=1e-4, atol=2e-5)


WIDE: dict[str, Any] = {
    "d_model": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 96, "vocab_size": 103,
}  # fmt: skip


def wide(name: str) -> dict[str, Any]:
    """Sizes that fill vectors, or heads that are padded until they do; the head's rows do not fill a strip."""
    if name == "moonshine":
        return {"hidden_size": 288, "encoder_num_attention_heads": 8, "decoder_num_attention_heads": 8}
    if "t5" in name:
        return {"d_model": 64, "d_kv": 32, "num_heads": 2, "vocab_size": 103}
    return WIDE | ({"decoder_vocab_size": 103} if name == "marian" else {})


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of models of such sizes, each made once."""

    @cache
    def of(name: str) -> Path:
        folder = tmp_path_factory.mktemp("wide")
        tiny.make(name, folder, **wide(name))
        return folder

    return of


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_compiled_passes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Chunks, a tree, a commit of its path, taps, and what the heads ask of the source."""
    model, runner = tiny.make(name, tmp_path, **wide(name)), load_runner(tmp_path, dtype="float32")
    assert runner.info.passes == "compiled"
    inputs, given = tiny.source(name)
    cache = opened(runner, inputs)
    chunk = runner.extend([cache], [TEXT[:4]], all_logits=True, taps=(0, 2))
    torch.testing.assert_close(chunk.logits, reference(model, given, TEXT[:4]), rtol=1e-4, atol=2e-4)
    states = model(**given, decoder_input_ids=torch.tensor([TEXT[:4]]), output_hidden_states=True).decoder_hidden_states
    torch.testing.assert_close(chunk.taps[0], states[1][0], rtol=1e-4, atol=2e-4)
    tree = TokenTree.build([7, 8, 9, 11], [-1, -1, 0, 1])
    logits = runner.score([cache], [TEXT[4]], [tree]).logits
    for node, path in {0: [7], 1: [8], 2: [7, 9], 3: [8, 11]}.items():
        want = reference(model, given, [*TEXT[:5], *path])[-1]
        torch.testing.assert_close(logits[1 + node], want, rtol=1e-4, atol=2e-4)
    runner.commit([cache], [[1, 3]])
    other_inputs, other_given = tiny.source(name, 1)
    other = opened(runner, other_inputs)
    scores = runner.extend([cache, other], [[33, 34], TEXT[:3]], all_logits=True)
    want = reference(model, given, [*TEXT[:5], 8, 11, 33, 34])[-2:]
    torch.testing.assert_close(scores.of(0), want, rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(scores.of(1), reference(model, other_given, TEXT[:3]), rtol=1e-4, atol=2e-4)
    fresh = opened(runner, inputs)
    heads = [(0, 1), (2, 0)]
    weights = runner.attention_to_source(fresh, TEXT, heads)
    model.set_attn_implementation("eager")
    seen = model(**given, decoder_input_ids=torch.tensor([TEXT]), output_attentions=True).cross_attentions
    for (layer, head), rows in zip(heads, weights, strict=True):
        torch.testing.assert_close(rows, seen[layer][0, head], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "whisper", "marian", "moonshine"])
def test_a_row_keeps_its_bits_in_compiled_passes(name: str, folder_of: Callable[[str], Path]) -> None:
    """Alone, among many rows and in int8."""
    inputs, _ = tiny.source(name)
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "int8"}):
        runner: Any = load_runner(folder_of(name), **options)
        assert runner.info.passes == "compiled"
        whole = runner.extend([opened(runner, inputs)], [TEXT], all_logits=True).logits
        cache, rows = opened(runner, inputs), []
        for token in TEXT:
            rows.append(runner.score([cache], [token], [TokenTree.chain([])]).logits)
            runner.commit([cache], [[]])
        assert torch.equal(torch.cat(rows), whole)
        other = runner.extend([opened(runner, tiny.source(name, 1)[0])], [TEXT], all_logits=True).logits
        assert not torch.equal(other, whole)  # the source counts


def read(folder: Path, sources: list[Inputs], **options: Any) -> list[torch.Tensor]:
    """What the encoder of a loaded model makes of sources side by side, in float32."""
    return states_of(load_runner(folder, **options), sources)


def states_of(runner: Any, sources: list[Inputs]) -> list[torch.Tensor]:
    tensors = [
        torch.tensor(inputs.encoder_tokens) if inputs.encoder_tokens else torch.tensor(*inputs.features.values())
        for inputs in sources
    ]
    with torch.inference_mode():
        return [states.float() for states in runner.encoder.run(tensors)]


def error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((ours - wanted).norm() / wanted.norm())


ENCODERS = pytest.mark.parametrize("name", ["t5", "marian", "whisper", "moonshine"])
TYPES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "quantization": "int8"},
    "int8 and bfloat16": {"dtype": "bfloat16", "quantization": "int8"},
}
EACH_TYPE = pytest.mark.parametrize("kind", TYPES)


@ENCODERS
@EACH_TYPE
def test_an_encoder_gives_the_numbers_of_operators(
    name: str, kind: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled of it rounds activations, but in float32."""
    folder, sources = folder_of(name), [tiny.source(name, seed)[0] for seed in range(3)]
    compiled = read(folder, sources, **TYPES[kind])
    monkeypatch.setenv("PACELINE_COMPILED", "0")
    operators, whole = read(folder, sources, **TYPES[kind]), read(folder, sources, dtype="float32")
    for i in range(3):
        assert error(compiled[i], operators[i]) < (0.06 if kind != "float32" else 3e-6)
        assert error(compiled[i], whole[i]) < 0.07
        assert (error(compiled[i], whole[i]) > 1e-3) == (kind != "float32"), "the control: numbers are rounded"
        rows = min(len(compiled[i]), len(operators[i - 1]))
        assert error(compiled[i][:rows], operators[i - 1][:rows]) > 0.3, "the control: sources count"


@ENCODERS
@pytest.mark.parametrize("kind", ["bfloat16", "int8 and bfloat16"])
def test_an_encoder_computes_in_float32_where_bfloat16_is_slow(
    name: str, kind: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the weights that bfloat16 has; what the decoder attends to is in bfloat16 as before."""
    sources = [tiny.source(name)[0]]
    found = {}
    for has in (True, False):
        monkeypatch.setattr("paceline.models.passes.compiled_encoder.has_bfloat", lambda has=has: has)
        monkeypatch.setattr("paceline.models.passes.compiled_encoder.attention_agrees", lambda dtype: False)
        runner: Any = load_runner(folder_of(name), **TYPES[kind])
        assert runner.encoder.dtype is (torch.bfloat16 if has else torch.float32)
        cache = runner.open(0, sources[0])
        runner.encode([cache])
        assert runner.native.arena.layers[0].dtype is torch.bfloat16
        found[has] = runner.extend([cache], [[5, 6]]).logits.float(), states_of(runner, sources)[0]
    assert error(found[True][0], found[False][0]) < 0.2
    assert 1e-4 < error(found[True][1], found[False][1]) < 0.06


@ENCODERS
@EACH_TYPE
def test_a_source_reads_the_same_beside_others(name: str, kind: str, folder_of: Callable[[str], Path]) -> None:
    """Within what PyTorch's own operators change; what is compiled keeps every bit (test_products, test_two_sided)."""
    sources = [tiny.source(name, seed)[0] for seed in range(3)]
    runner = load_runner(folder_of(name), **TYPES[kind])
    beside = states_of(runner, sources)
    for inputs, states in zip(sources, beside, strict=True):
        (alone,) = states_of(runner, [inputs])
        assert alone.shape == states.shape
        assert error(alone, states) < (1e-5 if kind == "float32" else 0.01)


def test_what_reads_a_source_is_rounded_to_bytes_in_int4_too(tmp_path: Path) -> None:
    tiny.make("whisper", tmp_path, **wide("whisper"))
    sources = [tiny.source("whisper")[0]]
    found = {form: read(tmp_path, sources, dtype="float32", quantization=form)[0] for form in ("int8", "int4", None)}
    assert torch.equal(found["int4"], found["int8"])
    assert not torch.equal(found["int8"], found[None])


def test_a_source_is_read_once_for_all_that_have_it(made: Any) -> None:
    _, runner = made("t5")
    inputs = Inputs(encoder_tokens=[4, 5, 6, 7, 8, 9, 3])
    before = runner.sources_read
    assert runner.memory.blocks_to_come(inputs) == runner.memory.blocks_for(7)
    free = runner.memory.left()
    cache = runner.open(0, inputs)
    assert runner.rows_to_encode(cache) == 7
    runner.encode([cache, runner.open(0, Inputs(encoder_tokens=[4, 5, 6, 7, 8, 9, 3]))])
    assert runner.sources_read == before + 1
    again, fork = runner.open(0, inputs), runner.fork(cache)
    assert runner.rows_to_encode(again) == 0
    runner.encode([again, fork])
    assert runner.sources_read == before + 1
    assert runner.memory.blocks_to_come(inputs) == 0
    assert runner.memory.left() == free - runner.memory.blocks_for(7)
    for one in (cache, again, fork):
        runner.release(one)
    assert runner.memory.blocks_to_come(inputs) > 0


def test_tokens_need_their_source(made: Any) -> None:
    _, runner = made("t5")
    cache = runner.open(0, Inputs(encoder_tokens=[4, 5]))
    with pytest.raises(ConfigError, match="source was not read"):
        runner.extend([cache], [[1, 2]])


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("t5", Inputs(encoder_tokens=[99]), "must lie in 0..98, got 99"),
        ("bart", Inputs(encoder_tokens=[3] * 65), "takes 1..64; shorten or split it"),
        ("t5", tiny.source("whisper")[0], "takes tokens and encoder_tokens as inputs"),
        ("whisper", Inputs(encoder_tokens=[3]), "takes tokens and features as inputs"),
        ("whisper", tiny.source("moonshine")[0], r"reads the features 'input_features' \(8, steps\)"),
        ("moonshine", Inputs(features={"input_values": np.zeros(50, np.float32)}), "give more"),
    ],
)
def test_a_source_that_does_not_fit_is_named(name: str, inputs: Inputs, message: str, made: Any) -> None:
    with pytest.raises(PromptError, match=message):
        made(name)[1].open(0, inputs)


def test_what_a_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    tiny.make("t5", tmp_path, feed_forward_proj="relu")
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 3', '"num_layers": 4'))
    with pytest.raises(CheckpointError, match=r"lacks .*layers\.3"):
        load_runner(tmp_path)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("name", ["t5", "whisper", "moonshine"])
def test_a_source_keeps_its_bits_beside_others(
    name: str, options: dict[str, Any], folder_of: Callable[[str], Path]
) -> None:
    load = {"dtype": "float32", "exactness": "strict", **options}
    runner, alone = (load_runner(folder_of(name), **load) for _ in range(2))
    sources = [tiny.source(name, seed)[0] for seed in range(3)]
    caches = [runner.open(0, inputs) for inputs in sources]
    runner.encode(caches)
    beside = runner.extend(caches, [TEXT] * 3, all_logits=True)
    for i, inputs in enumerate(sources):
        found = alone.extend([opened(alone, inputs)], [TEXT], all_logits=True).logits
        assert torch.equal(found, beside.of(i))
        assert not torch.equal(found, beside.of(i - 1))  # the source counts


@pytest.mark.parametrize("name", ["t5", "whisper", "marian"])
def test_the_self_test_finds_what_changes_a_row_with_a_source(
    name: str, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner: Any = load_runner(folder_of(name), dtype="float32", exactness="strict")
    assert find_exactness(runner, "strict").proven
    assert runner.sources_held == 0, "it leaves nothing behind"
    memory = runner.memory_of(NO_INPUTS)
    with monkeypatch.context() as patch:
        patch.setattr(SourcePart, "fork", lambda part: SourcePart(part.inputs, memory))
        assert "of a forked sequence" in str(what_varies(runner))
    run, read = runner.encoder.run, list[int]()

    def with_others(given: list[torch.Tensor]) -> list[torch.Tensor]:
        read.append(len(given))
        return [states * (1 + 1e-6 * len(read)) for states in run(given)]

    monkeypatch.setattr(runner.encoder, "run", with_others)
    assert what_varies(runner) == "a source that is read beside another one"


def test_strict_mode_needs_compiled_passes(folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    load_runner(folder_of("t5"), dtype="float32", exactness="strict")
    monkeypatch.setenv("PACELINE_COMPILED", "0")
    with pytest.raises(ConfigError, match="only compiled passes keep the bits"):
        load_runner(folder_of("t5"), dtype="float32", exactness="strict")


@pytest.mark.parametrize("option", [{"head_rows": [1, 2]}, {"group_size": 2}, {"lora": "adapter"}])
def test_what_is_for_decoders_alone_is_refused(option: dict[str, Any], tmp_path: Path) -> None:
    tiny.make("t5", tmp_path)
    with pytest.raises(UnsupportedModelError, match="has an encoder, for which"):
        load_runner(tmp_path, **option)


def test_other_kinds_are_named(tmp_path: Path) -> None:
    tiny.make("t5", tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "t5"', '"model_type": "pix2struct"'))
    with pytest.raises(UnsupportedModelError, match=r"pix2struct.*encoder-decoder models of this kind"):
        load_runner(tmp_path)


OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "blenderbot": ("BlenderbotConfig", "BlenderbotForConditionalGeneration", tiny.ABSOLUTE),
    "led": (
        "LEDConfig",
        "LEDForConditionalGeneration",
        {
            **tiny.SIZES,
            "max_encoder_position_embeddings": 64,
            "max_decoder_position_embeddings": 64,
            "attention_window": 4,
        },
    ),
    "longt5": ("LongT5Config", "LongT5ForConditionalGeneration", {**tiny.T5, "local_radius": 7}),
}


@pytest.mark.parametrize("name", ["t5", "whisper", "moonshine", *OTHERS])
def test_transformers_runs_the_others(name: str, tmp_path: Path) -> None:
    """Chains, commits, forks and sources that are read once, in the fallback; native families by the same code."""
    if name in OTHERS:
        config, kind, sizes = OTHERS[name]
        torch.manual_seed(0)
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes)).eval()
        model.save_pretrained(tmp_path)
    else:
        model = tiny.make(name, tmp_path)
    runner: Any = load_runner(tmp_path, dtype="float32", native=name in OTHERS)
    assert runner.info.passes == "transformers"
    assert isinstance(runner, EncodesInputs)
    inputs, given = tiny.source("bart" if name in OTHERS else name)
    cache, unread = opened(runner, inputs), runner.open(0, tiny.source("bart" if name in OTHERS else name, 1)[0])
    assert runner.rows_to_encode(cache) == 0 < runner.rows_to_encode(unread)
    with pytest.raises(ConfigError, match="source was not read"):
        runner.extend([unread], [[1, 2]])
    chunk = runner.extend([cache], [TEXT[:5]], all_logits=True).logits
    chain = runner.score([cache], [TEXT[5]], [TokenTree.chain(TEXT[6:])]).logits
    torch.testing.assert_close(torch.cat([chunk, chain]), reference(model, given, TEXT), rtol=1e-4, atol=2e-5)
    runner.commit([cache], [[0, 1]])
    fork = runner.fork(cache)
    got = runner.score([fork], [9], [TokenTree.chain([4])]).logits
    torch.testing.assert_close(got, reference(model, given, [*TEXT[:8], 9, 4])[-2:], rtol=1e-4, atol=2e-5)
    got = runner.score([cache], [TEXT[8]], [TokenTree.chain([])]).logits
    torch.testing.assert_close(got, reference(model, given, TEXT[:9])[-1:], rtol=1e-4, atol=2e-5)
    assert runner.sources_read == 1
    runner.encode([runner.open(0, inputs)])
    assert runner.sources_read == 1


def test_runners_are_complete(made: Any) -> None:
    runner: Runner = made("t5")[1]
    assert runner.info.source == "encoder_tokens"
    assert made("whisper")[1].info.source == "input_features"
    assert runner.info.family == "t5"
