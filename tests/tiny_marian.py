"""Made models in Marian's binary format: random weights, its own names, some of its matrices in int8."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Items = Mapping[str, tuple[int, tuple[int, ...], bytes]]
"""Name -> number of the type, shape, values."""

FLOAT32, INT8, INTGEMM8 = 0x404, 0x101, 0x4101
SIZES: dict[str, Any] = {
    "type": "transformer", "dim-emb": 32, "dim-vocabs": [96, 96], "enc-depth": 2, "dec-depth": 2, "dec-cell": "ssru",
    "transformer-heads": 4, "transformer-dim-ffn": 48, "transformer-ffn-depth": 2, "transformer-ffn-activation": "relu",
    "transformer-decoder-autoreg": "rnn", "transformer-preprocess": "", "transformer-postprocess": "dan",
    "transformer-postprocess-emb": "d", "tied-embeddings-all": True,
}  # fmt: skip


def packed(items: Items, *, version: int = 1) -> bytes:
    """The file of some items, their values filled up to lines of 256 bytes as Marian does."""
    names = [name.encode() + b"\0" for name in items]
    parts = [struct.pack("<QQ", version, len(items))]
    sized = {name: data.ljust(-(-len(data) // 256) * 256, b"\xaa") for name, (_, _, data) in items.items()}
    for name, encoded in zip(items, names, strict=True):
        kind, shape, _ = items[name]
        parts.append(struct.pack("<4Q", len(encoded), kind, len(shape), len(sized[name])))
    parts += [*names, *(struct.pack(f"<{len(shape)}i", *shape) for _, shape, _ in items.values())]
    return b"".join([*parts, struct.pack("<Q", 3), b"\xff" * 3, *sized.values()])


def settings_item(settings: Mapping[str, Any]) -> tuple[int, tuple[int, ...], bytes]:
    text = yaml.safe_dump(dict(settings)).encode() + b"\0"
    return INT8, (len(text),), text


def float_item(values: np.ndarray) -> tuple[int, tuple[int, ...], bytes]:
    return FLOAT32, values.shape, values.astype("<f4").tobytes()


def int8_item(values: np.ndarray, *, turned: bool) -> tuple[int, tuple[int, ...], bytes]:
    """Values rounded to int8; `turned`: written outputs by inputs."""
    multiplier = np.float32(127 / np.abs(values).max())
    integers = np.rint(values * multiplier).astype(np.int8)
    return INTGEMM8, values.shape, (integers.T if turned else integers).tobytes() + struct.pack("<f", multiplier)


class _Items:
    """Items as they come; `rounded`: matrices are int8, with a number for the inputs of each."""

    def __init__(self, width: int, *, rounded: bool) -> None:
        self.random, self.width, self.rounded = np.random.default_rng(0), width, rounded
        self.found: dict[str, tuple[int, tuple[int, ...], bytes]] = {}

    def vector(self, name: str, size: int, *, around: float = 0.0) -> None:
        self.found[name] = float_item(around + 0.3 * self.random.standard_normal((1, size)))

    def matrix(self, name: str, inputs: int, outputs: int) -> None:
        values = self.random.standard_normal((inputs, outputs)) / np.sqrt(inputs)
        self.found[name] = int8_item(values, turned=name != "Wemb") if self.rounded else float_item(values)
        if self.rounded:
            self.found[f"{name}_QuantMultA"] = float_item(np.full((1, 1), 20.0))

    def norm(self, name: str) -> None:
        self.vector(f"{name}_ln_scale", self.width, around=1.0)
        self.vector(f"{name}_ln_bias", self.width)

    def attention(self, name: str) -> None:
        for part in "qkvo":
            self.matrix(f"{name}_W{part}", self.width, self.width)
            self.vector(f"{name}_b{part}", self.width)
        self.norm(f"{name}_Wo")

    def recurrence(self, name: str) -> None:
        self.matrix(f"{name}_W", self.width, self.width)
        self.matrix(f"{name}_Wf", self.width, self.width)
        self.vector(f"{name}_bf", self.width, around=2.0)  # so that the state is kept for long
        self.norm(f"{name}_ffn")

    def feed_forward(self, name: str, inner: int) -> None:
        for number, (inputs, outputs) in enumerate(((self.width, inner), (inner, self.width)), 1):
            self.matrix(f"{name}_W{number}", inputs, outputs)
            self.vector(f"{name}_b{number}", outputs)
        self.norm(f"{name}_ffn")


def items(settings: Mapping[str, Any], *, rounded: bool) -> dict[str, tuple[int, tuple[int, ...], bytes]]:
    """Those of a model, see `_Items`."""
    inner, vocabulary = settings["transformer-dim-ffn"], settings["dim-vocabs"][0]
    made = _Items(settings["dim-emb"], rounded=rounded)
    made.found["special:model.yml"] = settings_item(settings)
    made.matrix("Wemb", vocabulary, made.width)
    made.vector("decoder_ff_logit_out_b", vocabulary)
    for number in range(1, settings["enc-depth"] + 1):
        made.attention(f"encoder_l{number}_self")
        made.feed_forward(f"encoder_l{number}_ffn", inner)
    for number in range(1, settings["dec-depth"] + 1):
        if settings["transformer-decoder-autoreg"] == "rnn":
            made.recurrence(f"decoder_l{number}_rnn")
        else:
            made.attention(f"decoder_l{number}_self")
        made.attention(f"decoder_l{number}_context")
        made.feed_forward(f"decoder_l{number}_ffn", inner)
    return made.found


def make(folder: Path, *, rounded: bool = True, **changed: Any) -> Path:
    """A model's file in a folder, without a tokenizer; `changed`: its settings, underscores for dashes."""
    settings = SIZES | {name.replace("_", "-"): value for name, value in changed.items()}
    path = folder / "model.tiny.bin"
    path.write_bytes(packed(items(settings, rounded=rounded)))
    return path
