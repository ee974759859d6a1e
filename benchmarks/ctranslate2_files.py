"""Whisper models in CTranslate2's format, written as Hugging Face folders; for `real_models.py`.

`model.bin`, version 6, little endian: u32 version, text kind of model, u32 revision, u32 count of variables. Each
variable: text name, u8 rank, rank times u32 size, u8 type (`TYPES`), u32 bytes, the values. Then u32 count of aliases,
each two texts: another name, and that of its variable. A text is a u16 length and bytes, the last of which is 0. The
values of a variable of integers stand for value / scale, with a scale for each row in the variable `NAME_scale`.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

Array = npt.NDArray[Any]

VERSION = 6
TYPES = ("float32", "int8", "int16", "int32", "float16")
KIND = "WhisperSpec"
HEAD_SIZE = 64


def read_variables(path: Path) -> dict[str, Array]:
    """Name -> values; those of integers with a scale as float32.

    Raises:
        ValueError: another version or kind of model, or a file that ends too early.
    """
    with path.open("rb") as file:
        version, kind, _ = _number(file, "<I"), _text(file), _number(file, "<I")
        if (version, kind) != (VERSION, KIND):
            raise ValueError(f"{path} must hold a {KIND} of version {VERSION}, got {kind!r} of version {version}")
        stored = dict(_variable(file) for _ in range(_number(file, "<I")))
        aliases = [(_text(file), _text(file)) for _ in range(_number(file, "<I"))]
    found = {name: _values(name, stored) for name in stored if not name.endswith("_scale")}
    return found | {name: found[of] for name, of in aliases if of in found}


def _number(file: BinaryIO, form: str) -> int:
    size = struct.calcsize(form)
    if len(data := file.read(size)) < size:
        raise ValueError("the file ends too early")
    return int(struct.unpack(form, data)[0])


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "<H")).rstrip(b"\0").decode()


def _variable(file: BinaryIO) -> tuple[str, Array]:
    name = _text(file)
    sizes = [_number(file, "<I") for _ in range(_number(file, "<B"))]
    kind, count = TYPES[_number(file, "<B")], _number(file, "<I")
    return name, np.frombuffer(file.read(count), dtype=kind).reshape(sizes)


def _values(name: str, stored: Mapping[str, Array]) -> Array:
    values, scale = stored[name], stored.get(f"{name}_scale")
    if scale is None:
        return values
    by_row = np.asarray(scale, np.float32).reshape(-1, *[1] * (values.ndim - 1))
    return values.astype(np.float32) / by_row


# ------------------------------------------------------------------------------------------------ Hugging Face's names


def whisper_weights(variables: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Weights by the names of transformers' WhisperForConditionalGeneration, as float32."""
    given = {name: torch.from_numpy(np.array(values, np.float32)) for name, values in variables.items()}
    found: dict[str, torch.Tensor] = {}
    for side in ("encoder", "decoder"):
        found[f"{side}.embed_positions.weight"] = given[f"{side}/position_encodings/encodings"]
        found |= _norm(given, f"{side}/layer_norm", f"{side}.layer_norm")
        for layer in range(_layers(given, side)):
            found |= _layer(given, f"{side}/layer_{layer}", f"{side}.layers.{layer}")
    for name in ("conv1", "conv2"):
        found |= {f"encoder.{name}.{part}": given[f"encoder/{name}/{part}"] for part in ("weight", "bias")}
    found["decoder.embed_tokens.weight"] = given["decoder/embeddings/weight"]
    return {f"model.{name}": values.contiguous() for name, values in found.items()}


def _layers(given: Mapping[str, torch.Tensor], side: str) -> int:
    return len({found[1] for name in given if (found := re.match(rf"{side}/layer_(\d+)/", name))})


def _layer(given: Mapping[str, torch.Tensor], of: str, to: str) -> dict[str, torch.Tensor]:
    found = _norm(given, f"{of}/self_attention/layer_norm", f"{to}.self_attn_layer_norm")
    found |= _split(given, f"{of}/self_attention/linear_0", f"{to}.self_attn", ("q_proj", "k_proj", "v_proj"))
    found |= _split(given, f"{of}/self_attention/linear_1", f"{to}.self_attn", ("out_proj",))
    if f"{of}/attention/linear_0/weight" in given:
        found |= _norm(given, f"{of}/attention/layer_norm", f"{to}.encoder_attn_layer_norm")
        found |= _split(given, f"{of}/attention/linear_0", f"{to}.encoder_attn", ("q_proj",))
        found |= _split(given, f"{of}/attention/linear_1", f"{to}.encoder_attn", ("k_proj", "v_proj"))
        found |= _split(given, f"{of}/attention/linear_2", f"{to}.encoder_attn", ("out_proj",))
    found |= _norm(given, f"{of}/ffn/layer_norm", f"{to}.final_layer_norm")
    for place in (0, 1):
        found |= _split(given, f"{of}/ffn/linear_{place}", to, (f"fc{place + 1}",))
    return found


def _norm(given: Mapping[str, torch.Tensor], of: str, to: str) -> dict[str, torch.Tensor]:
    return {f"{to}.weight": given[f"{of}/gamma"], f"{to}.bias": given[f"{of}/beta"]}


def _split(given: Mapping[str, torch.Tensor], of: str, to: str, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """A linear map, or several that lie behind one another; that of the keys has no bias.

    Raises:
        ValueError: the keys have one all the same.
    """
    found = {}
    weights, biases = (given[f"{of}/{part}"].chunk(len(names)) for part in ("weight", "bias"))
    for name, weight, bias in zip(names, weights, biases, strict=True):
        found[f"{to}.{name}.weight"] = weight
        if name != "k_proj":
            found[f"{to}.{name}.bias"] = bias
        elif bias.any():
            raise ValueError(f"{of} has a bias of the keys, which Whisper has not")
    return found


# ------------------------------------------------------------------------------------------------ folders


def write_whisper(folder: Path, model: Path, tokenizer: Path, settings: Path) -> None:
    """Write a Hugging Face folder.

    Args:
        model: a `model.bin`.
        tokenizer: a `tokenizer.json`.
        settings: CTranslate2's `config.json`, with alignment_heads, suppress_ids and suppress_ids_begin.
    Raises:
        ValueError: as `read_variables`.
    """
    weights = whisper_weights(read_variables(model))
    tokens = json.loads(tokenizer.read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    config = whisper_config(weights, ids)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    contents = {
        "config": config,
        "generation_config": generation_config(config, ids, json.loads(settings.read_text(encoding="utf-8"))),
        "preprocessor_config": preprocessor_config(config["num_mel_bins"]),
        "tokenizer_config": {
            "tokenizer_class": "WhisperTokenizer",
            "processor_class": "WhisperProcessor",
            **dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), "<|endoftext|>"),
            "additional_special_tokens": sorted(ids, key=ids.__getitem__),  # times follow the last one
        },
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def whisper_config(weights: Mapping[str, torch.Tensor], ids: Mapping[str, int]) -> dict[str, Any]:
    """`config.json`, from the sizes of the weights."""
    vocab_size, width = weights["model.decoder.embed_tokens.weight"].shape
    end = ids["<|endoftext|>"]

    def count(side: str) -> int:
        return 1 + max(int(name.split(".")[3]) for name in weights if name.startswith(f"model.{side}.layers."))

    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": vocab_size,
        "num_mel_bins": weights["model.encoder.conv1.weight"].shape[1],
        "d_model": width,
        "encoder_layers": count("encoder"),
        "decoder_layers": count("decoder"),
        "encoder_attention_heads": width // HEAD_SIZE,
        "decoder_attention_heads": width // HEAD_SIZE,
        "encoder_ffn_dim": weights["model.encoder.layers.0.fc1.weight"].shape[0],
        "decoder_ffn_dim": weights["model.decoder.layers.0.fc1.weight"].shape[0],
        "max_source_positions": weights["model.encoder.embed_positions.weight"].shape[0],
        "max_target_positions": weights["model.decoder.embed_positions.weight"].shape[0],
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "dtype": "float32",
    }


def generation_config(config: Mapping[str, Any], ids: Mapping[str, int], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`generation_config.json`: the ids that are forced, suppressed and looked up."""
    start, no_timestamps = ids["<|startoftranscript|>"], ids["<|notimestamps|>"]
    tasks = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    languages = {name: number for name, number in ids.items() if start < number < min(tasks.values())}
    found: dict[str, Any] = {name: config[name] for name in config if name.endswith("_token_id")}
    found |= {
        "alignment_heads": settings["alignment_heads"],
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
        "is_multilingual": multilingual(config),
        "no_timestamps_token_id": no_timestamps,
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
        "forced_decoder_ids": [[1, no_timestamps]],
    }
    if multilingual(config):
        found |= {"lang_to_id": languages, "task_to_id": tasks}
        found["forced_decoder_ids"] = [[1, None], [2, tasks["transcribe"]]]
    return found


def multilingual(config: Mapping[str, Any]) -> bool:
    """English-only models have one token less."""
    return bool(config["vocab_size"] >= 51865)


def preprocessor_config(bins: int) -> dict[str, Any]:
    """`preprocessor_config.json`: windows of 30 s in frames of 10 ms."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": bins,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
        "n_samples": 480000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }
