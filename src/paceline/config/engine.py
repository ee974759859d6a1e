"""Sizes of the engine, and forms of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from paceline.errors import ConfigError
from paceline.utils import (
    choice,
    integer,
    need,
)

DTYPES = ("auto", "float32", "bfloat16", "float16")
EXACTNESS = ("auto", "strict")
QUANTIZATIONS: Mapping[str, Literal["int8", "int4"]] = {
    "int8": "int8", "int8_weight_only": "int8", "int8wo": "int8", "int4": "int4", "int4_weight_only": "int4",
    "int4wo": "int4"
}  # fmt: skip
"""What a user may write -> what it is; the longer names are torchao's."""

FORMATS: Final[Mapping[str, str]] = {
    "gguf": "leave it out, GGUF files are read as they are",
    "mxfp4": "leave it out, gpt-oss is read as it is",
    **dict.fromkeys(
        (
            "awq",
            "awq_marlin",
            "bitsandbytes",
            "compressed-tensors",
            "fp8",
            "gptq",
            "gptq_marlin",
            "modelopt",
            "torchao",
        ),
        "give 'int8' or 'int4', which round the weights of a bfloat16 checkpoint when they are loaded, or a GGUF file",
    ),
}
"""Other values of vLLM's `quantization` -> what to do here."""

NOT_QUANTIZED = "none"
"""Keeps the values of weights, also where the file is quantised."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine.

    Attributes:
        dtype, device: "auto" takes the checkpoint's dtype, and CUDA where there is one.
        max_model_len: longest sequence; None takes the checkpoint's.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most prompt tokens in one prefill chunk.
        enable_prefix_caching: keep keys and values of ended requests and take them over where a prompt begins with the
            same tokens; without effect where the model's runner cannot share blocks.
        kv_cache_memory_bytes: most bytes of keys and values; None takes a share of the free memory. Requests that do
            not fit wait.
        speculative_memory_bytes: most bytes that speculation may take beside the weights: draft trees of all running
            sequences (keys, values, logits) and the caches of draft models. Trees are cut to what fits; None sets no
            limit.
        threads: of PyTorch on the CPU; None leaves PyTorch's setting.
        seed: base for requests that have none of their own.
        exactness: "strict": tokens have the bits of plain decoding under every drafter and in every batch, proven by a
            self-test at start, or the model is rejected; "auto": the fastest form, which is strict too where that costs
            nothing.
        quantization: "int8" or "int4" rounds the weights of the linear layers when they are loaded, those of the head
            to int8; "none" leaves them, and so does None but for GGUF files (models.load).
        activation_bits: 8 or 16: to how many bits activations are rounded where they meet the blocks of a GGUF file;
            None: 8. 16 costs about twice the arithmetic, where reading the weights does not hide it.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = None
    speculative_memory_bytes: int | None = None
    threads: int | None = None
    seed: int | None = None
    exactness: str = "auto"
    quantization: str | None = None
    activation_bits: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.quantization, str) and (instead := FORMATS.get(self.quantization.lower())):
            raise ConfigError(f"quantization={self.quantization!r} names a format of checkpoints; {instead}")
        choice("quantization", self.quantization, (NOT_QUANTIZED, *QUANTIZATIONS), optional=True)
        need(self.activation_bits in (None, 8, 16), "activation_bits", "be 8 or 16", self.activation_bits)
        choice("dtype", self.dtype, DTYPES)
        choice("exactness", self.exactness, EXACTNESS)
        kind = self.device.split(":")[0] if isinstance(self.device, str) else None
        need(kind in ("auto", "cpu", "cuda"), "device", "be auto, cpu, cuda or cuda:N", self.device)
        if self.max_model_len is not None:
            integer("max_model_len", self.max_model_len, 2)
        integer("max_num_seqs", self.max_num_seqs, 1, 1024)
        integer("max_num_batched_tokens", self.max_num_batched_tokens, 1, 65536)
        need(
            isinstance(self.enable_prefix_caching, bool),
            "enable_prefix_caching",
            "be True or False",
            self.enable_prefix_caching,
        )
        for name in ("kv_cache_memory_bytes", "speculative_memory_bytes"):
            if (size := getattr(self, name)) is not None:
                integer(name, size, 1)
        if self.threads is not None:
            integer("threads", self.threads, 1, 1024)
        if self.seed is not None:
            integer("seed", self.seed, -(2**63), 2**63 - 1)
