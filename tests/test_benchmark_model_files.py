"""Models in CTranslate2's format, as the benchmarks read them out of packages."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import benchmark_scripts
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from safetensors.torch import load_file
from transformers import AutoTokenizer, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from paceline.speech.features import LogMel
from paceline.speech.whisper_tokens import WhisperTokens


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with benchmark_scripts.imported("ctranslate2_files") as found:
        yield found[0]


@pytest.fixture(scope="module")
def whispercpp() -> Iterator[ModuleType]:
    with benchmark_scripts.imported("whispercpp_files") as found:
        yield found[0]


SPECIAL = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe")
SPECIAL += ("startoflm", "startofprev", "nocaptions", "notimestamps")
TOKENIZER = {
    "model": {"type": "BPE", "vocab": {"Ġ": 0, "a": 1}, "merges": []},
    "added_tokens": [
        {"id": 2 + place, "content": f"<|{name}|>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for place, name in enumerate(SPECIAL)
    ],
}
SETTINGS = {"alignment_heads": [[0, 0]], "suppress_ids": [1], "suppress_ids_begin": [0, 2]}


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def packed(variables: Mapping[str, np.ndarray], aliases: Mapping[str, str], *, version: int = 6) -> bytes:
    """A `model.bin`."""
    kinds = ("float32", "int8", "int16", "int32", "float16")
    parts = [struct.pack("<I", version), text("WhisperSpec"), struct.pack("<II", 3, len(variables))]
    for name, values in variables.items():
        parts += [text(name), struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)]
        parts += [struct.pack("<BI", kinds.index(str(values.dtype)), values.nbytes), values.tobytes()]
    parts.append(struct.pack("<I", len(aliases)))
    return b"".join([*parts, *(text(part) for pair in aliases.items() for part in pair)])


def model() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    sizes = {"d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "vocab_size": 20}
    depth = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    return WhisperForConditionalGeneration(
        WhisperConfig(**sizes, **depth, max_source_positions=50, pad_token_id=2, init_std=0.2)
    ).eval()


def variables_of(weights: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """By CTranslate2's names."""
    w = {name.removeprefix("model."): values.numpy() for name, values in weights.items()}
    found: dict[str, np.ndarray] = {"decoder/embeddings/weight": w["decoder.embed_tokens.weight"]}

    def norm(to: str, of: str) -> None:
        found[f"{to}/gamma"], found[f"{to}/beta"] = w[f"{of}.weight"], w[f"{of}.bias"]

    def linear(to: str, *of: str) -> None:
        zero = np.zeros(64, np.float32)
        found[f"{to}/weight"] = np.concatenate([w[f"{name}.weight"] for name in of])
        found[f"{to}/bias"] = np.concatenate([w.get(f"{name}.bias", zero) for name in of])

    for side in ("encoder", "decoder"):
        found[f"{side}/position_encodings/encodings"] = w[f"{side}.embed_positions.weight"]
        norm(f"{side}/layer_norm", f"{side}.layer_norm")
        for layer in range(2):
            to, of = f"{side}/layer_{layer}", f"{side}.layers.{layer}"
            norm(f"{to}/self_attention/layer_norm", f"{of}.self_attn_layer_norm")
            linear(f"{to}/self_attention/linear_0", *(f"{of}.self_attn.{part}_proj" for part in "qkv"))
            linear(f"{to}/self_attention/linear_1", f"{of}.self_attn.out_proj")
            norm(f"{to}/ffn/layer_norm", f"{of}.final_layer_norm")
            linear(f"{to}/ffn/linear_0", f"{of}.fc1")
            linear(f"{to}/ffn/linear_1", f"{of}.fc2")
            if side == "decoder":
                norm(f"{to}/attention/layer_norm", f"{of}.encoder_attn_layer_norm")
                linear(f"{to}/attention/linear_0", f"{of}.encoder_attn.q_proj")
                linear(f"{to}/attention/linear_1", *(f"{of}.encoder_attn.{part}_proj" for part in "kv"))
                linear(f"{to}/attention/linear_2", f"{of}.encoder_attn.out_proj")
    for name in ("conv1", "conv2"):
        for part in ("weight", "bias"):
            found[f"encoder/{name}/{part}"] = w[f"encoder.{name}.{part}"]
    return found | {"encoder/num_heads": np.array(1, np.int16)}


def quantised(variables: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    values = variables[name]
    scale = 127 / np.abs(values).reshape(len(values), -1).max(1)
    integers = np.rint(values * scale.reshape(-1, *[1] * (values.ndim - 1))).astype(np.int8)
    return {**variables, name: integers, f"{name}_scale": scale.astype(np.float32)}


@pytest.fixture(scope="module")
def written(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Whisper out of a file with one matrix of int8, which went through its integers before."""
    folder = tmp_path_factory.mktemp("whisper")
    variables = quantised(variables_of(model().state_dict()), "decoder/layer_1/ffn/linear_0/weight")
    (folder / "model.bin").write_bytes(packed(variables, {"decoder/projection/weight": "decoder/embeddings/weight"}))
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    (folder / "config.json").write_text(json.dumps(SETTINGS))
    files = (folder / name for name in ("model.bin", "tokenizer.json", "config.json"))
    script.write_whisper(folder / "made", *files)
    return folder / "made"


def logits(of: WhisperForConditionalGeneration) -> torch.Tensor:
    noise = torch.randn(1, 80, 100, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found: torch.Tensor = of(input_features=noise, decoder_input_ids=torch.tensor([[3, 4, 1, 1, 2]])).logits
    return found


def test_transformers_reads_the_folder_whole(written: Path) -> None:
    read, told = WhisperForConditionalGeneration.from_pretrained(written, output_loading_info=True)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    expected = logits(model())
    error = (logits(read.eval()) - expected).abs().max() / expected.std()
    assert 0 < error < 0.02, "one matrix was rounded to 8 bits"
    for name, values in model().state_dict().items():
        if name != "model.decoder.layers.1.fc1.weight":
            assert torch.equal(read.state_dict()[name], values), name


def test_times_follow_the_last_special_token(written: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(written)
    assert tokenizer.decode([12, 1, 12 + 50], decode_with_timestamps=True) == "<|0.00|>a<|1.00|>"


def test_ids_and_features_are_read_from_the_folder(written: Path) -> None:
    tokens = WhisperTokens.load(written)
    assert (tokens.end, tokens.start, tokens.no_speech, tokens.first_timestamp) == (2, 3, 10, 12)
    assert not tokens.multilingual, "its vocabulary is that of a model of one language"
    assert tokens.suppressed_at_begin == (0, 2)
    assert tokens.alignment_heads == ((0, 0),)
    assert LogMel.load(written).bins == 80
    told = json.loads((written / "generation_config.json").read_text())
    assert told["forced_decoder_ids"] == [[1, 11]]


def test_the_ids_of_many_languages(script: ModuleType) -> None:
    ids = {token["content"]: token["id"] for token in TOKENIZER["added_tokens"]}
    config = {"vocab_size": 51865, "max_target_positions": 448, "eos_token_id": 2}
    told = script.generation_config(config, ids, SETTINGS)
    assert told["lang_to_id"] == {"<|en|>": 4, "<|de|>": 5}
    assert told["task_to_id"] == {"transcribe": 7, "translate": 6}
    assert told["forced_decoder_ids"] == [[1, None], [2, 7]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-3], "ends too early"),
        (lambda data: struct.pack("<I", 5) + data[4:], "must hold a WhisperSpec of version 6, got .* of version 5"),
    ],
)
def test_other_files_are_named(script: ModuleType, tmp_path: Path, change: Any, says: str) -> None:
    (tmp_path / "model.bin").write_bytes(change(packed({"x": np.zeros(2, np.float32)}, {"y": "x"})))
    with pytest.raises(ValueError, match=says):
        script.read_variables(tmp_path / "model.bin")


def test_keys_with_a_bias_are_not_whispers(script: ModuleType) -> None:
    given = variables_of(model().state_dict())
    given["encoder/layer_0/self_attention/linear_0/bias"] = np.ones(192, np.float32)
    with pytest.raises(ValueError, match="has a bias of the keys"):
        script.whisper_weights(given)


# ------------------------------------------------------------------------------------------------ whisper.cpp

KINDS = {0: GGMLQuantizationType.F32, 1: GGMLQuantizationType.F16, 8: GGMLQuantizationType.Q8_0}


def ggml(file: BinaryIO) -> tuple[tuple[int, ...], np.ndarray, list[bytes], dict[str, np.ndarray]]:
    """Sizes, mel filters, tokens and tensors of a file of whisper.cpp, read as its format says."""

    def numbers(count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}i", file.read(4 * count))

    sizes, shape = numbers(12), numbers(2)
    filters = np.frombuffer(file.read(4 * shape[0] * shape[1]), "<f4").reshape(shape)
    tokens = [file.read(numbers(1)[0]) for _ in range(numbers(1)[0])]
    tensors = {}
    while head := file.read(12):
        rank, length, kind = struct.unpack("<3i", head)
        axes, name = numbers(rank)[::-1], file.read(length).decode()
        row, size = GGML_QUANT_SIZES[KINDS[kind]]
        raw = np.frombuffer(file.read(int(np.prod(axes)) // row * size), np.uint8)
        tensors[name] = dequantize(raw.reshape(*axes[:-1], -1), KINDS[kind])
    return sizes, filters, tokens, tensors


@pytest.mark.parametrize(("kind", "number", "error"), [("float16", 1, 1e-3), ("q8_0", 2007, 1e-2)])
def test_a_file_of_whispercpp_has_all_that_the_folder_has(
    whispercpp: ModuleType, written: Path, tmp_path: Path, kind: str, number: int, error: float
) -> None:
    whispercpp.write_whispercpp(written, tmp_path / "model", kind)
    with (tmp_path / "model").open("rb") as file:
        sizes, filters, tokens, tensors = ggml(file)
    assert sizes == (0x67676D6C, 20, 50, 64, 1, 2, 448, 64, 1, 2, 80, number)
    assert np.allclose(filters, WhisperFeatureExtractor.from_pretrained(written).mel_filters.T)
    assert tokens == [b" ", b"a"]
    weights = load_file(written / "model.safetensors")
    names = {name: whispercpp.renamed(name) for name in weights if name != "proj_out.weight"}
    assert tensors.keys() == set(names.values())
    for name, renamed in names.items():
        wanted = weights[name].numpy().reshape(tensors[renamed].shape)
        assert np.abs(tensors[renamed] - wanted).max() <= error * np.abs(wanted).max(), name
        if wanted.ndim == 1 or "position" in renamed:
            assert np.array_equal(tensors[renamed], wanted), name
    assert names["model.encoder.layers.1.self_attn.q_proj.weight"] == "encoder.blocks.1.attn.query.weight"
    assert names["model.decoder.layers.0.encoder_attn_layer_norm.bias"] == "decoder.blocks.0.cross_attn_ln.bias"
    assert names["model.decoder.layers.0.final_layer_norm.bias"] == "decoder.blocks.0.mlp_ln.bias"
    assert names["model.encoder.layer_norm.weight"] == "encoder.ln_post.weight"
    rounded = tensors["decoder.blocks.0.mlp.0.weight"] - weights["model.decoder.layers.0.fc1.weight"].numpy()
    assert np.abs(rounded).max() > 0, "the control of the numbers above"
