"""Whisper models of Hugging Face's form as files of whisper.cpp, for `speech.py`.

The file, little endian: u32 magic "ggml"; eleven i32 of sizes (`SIZES`), the last of which is the kind of its weights;
the mel filters, i32 bins, i32 frequencies and as many float32; i32 count of tokens, and for each i32 length and its
bytes, those with a special meaning left out; then the tensors. Each: i32 rank, i32 length of its name, i32 type, its
sizes, the last axis first, its name, its values. Names are those of OpenAI's own files.

Matrices are float16, or blocks of 32 weights (q8_0): a float16 scale and 32 int8. Convolutions are float16; biases,
norms and positions float32. The head is the embedding.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import WhisperFeatureExtractor
from transformers.convert_slow_tokenizer import bytes_to_unicode

Array = npt.NDArray[Any]

MAGIC = 0x67676D6C
SIZES = (
    "vocab_size", "max_source_positions", "d_model", "encoder_attention_heads", "encoder_layers",
    "max_target_positions", "d_model", "decoder_attention_heads", "decoder_layers", "num_mel_bins",
)  # fmt: skip
FLOAT32, FLOAT16, Q8_0 = 0, 1, 8
FILE_KINDS: Mapping[str, int] = {"float16": 1, "q8_0": 2007}
"""Of weights, by the number that a file has for it: with q8_0 the second version of its blocks."""
BLOCK = 32

NAMES = (
    (r"^model\.", ""),
    (r"^(encoder|decoder)\.layers\.", r"\1.blocks."),
    (r"\.self_attn_layer_norm\.", ".attn_ln."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attn_ln."),
    (r"(blocks\.\d+)\.final_layer_norm\.", r"\1.mlp_ln."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"\.q_proj\.", ".query."),
    (r"\.k_proj\.", ".key."),
    (r"\.v_proj\.", ".value."),
    (r"\.out_proj\.", ".out."),
    (r"\.fc1\.", ".mlp.0."),
    (r"\.fc2\.", ".mlp.2."),
    (r"^encoder\.layer_norm\.", "encoder.ln_post."),
    (r"^decoder\.layer_norm\.", "decoder.ln."),
    (r"\.embed_positions\.weight$", ".positional_embedding"),
    (r"^decoder\.embed_tokens\.", "decoder.token_embedding."),
)


def renamed(name: str) -> str:
    """The name of a tensor in OpenAI's files."""
    for pattern, new in NAMES:
        name = re.sub(pattern, new, name)
    return name


def write_whispercpp(folder: Path, target: Path, kind: str) -> None:
    """Write a Hugging Face folder as a file of whisper.cpp.

    Args:
        kind: "float16" or "q8_0".
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    filters = WhisperFeatureExtractor.from_pretrained(folder).mel_filters.T.astype("<f4")
    with target.open("wb") as file:
        file.write(struct.pack("<I11i", MAGIC, *(config[name] for name in SIZES), FILE_KINDS[kind]))
        file.write(struct.pack("<2i", *filters.shape) + filters.tobytes())
        tokens = list(plain_tokens(folder))
        file.write(struct.pack("<i", len(tokens)))
        for token in tokens:
            file.write(struct.pack("<i", len(token)) + token)
        for name, tensor in load_file(folder / "model.safetensors").items():
            if name != "proj_out.weight":
                _put_tensor(file, renamed(name), tensor.float(), kind)


def plain_tokens(folder: Path) -> Iterator[bytes]:
    """The bytes of all tokens before those with a special meaning."""
    read = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    first, alphabet = min(token["id"] for token in read["added_tokens"]), {v: k for k, v in bytes_to_unicode().items()}
    for word, number in sorted(read["model"]["vocab"].items(), key=lambda item: item[1]):
        if number < first:
            yield bytes(alphabet[character] for character in word)


def _put_tensor(file: BinaryIO, name: str, tensor: torch.Tensor, kind: str) -> None:
    if re.fullmatch(r"encoder\.conv\d\.bias", name):
        tensor = tensor[:, None]
    matrix = name.endswith("weight") and tensor.dim() > 1
    number = FLOAT32 if not matrix else Q8_0 if kind == "q8_0" and tensor.dim() == 2 else FLOAT16
    values = {FLOAT32: _float32, FLOAT16: _float16, Q8_0: in_blocks}[number](tensor.numpy())
    encoded = name.encode()
    file.write(struct.pack("<3i", tensor.dim(), len(encoded), number))
    file.write(struct.pack(f"<{tensor.dim()}i", *reversed(tensor.shape)) + encoded + values)


def _float32(values: Array) -> bytes:
    return values.astype("<f4").tobytes()


def _float16(values: Array) -> bytes:
    return values.astype("<f2").tobytes()


def in_blocks(values: Array) -> bytes:
    """Blocks of q8_0: the scale is the largest magnitude / 127, rounded to float16 behind the division by it."""
    blocks = values.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(1, keepdims=True) / 127
    whole = np.rint(blocks / np.where(scale == 0, 1, scale)).astype(np.int8)
    return np.concatenate((scale.astype("<f2").view(np.int8), whole), 1).tobytes()
