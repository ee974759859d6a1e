"""Sizes of the engine, and forms of its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from paceline.config.declared import check_options, documented, option
from paceline.errors import ConfigError
from paceline.utils import choice, json_value, need, shortened

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
        ("awq", "awq_marlin", "compressed-tensors", "fp8", "gptq", "gptq_marlin", "modelopt"),
        "leave it out, such checkpoints are read as they are; 'int8' and 'int4' round the weights of others",
    ),
    **dict.fromkeys(
        ("bitsandbytes", "torchao"),
        "give 'int8' or 'int4', which round the weights of a bfloat16 checkpoint when they are loaded, or a GGUF file",
    ),
}
"""Other values of vLLM's `quantization` -> what to do here."""

NOT_QUANTIZED = "none"
"""Keeps the values of weights, also where the file is quantised."""


def _check_quantization(name: str, value: object) -> None:
    if isinstance(value, str) and (instead := FORMATS.get(value.lower())):
        raise ConfigError(f"quantization={value!r} names a format of checkpoints; {instead}")
    choice(name, value, (NOT_QUANTIZED, *QUANTIZATIONS), optional=True)


def _check_device(name: str, value: object) -> None:
    kind = value.split(":")[0] if isinstance(value, str) else None
    need(kind in ("auto", "cpu", "cuda"), name, "be auto, cpu, cuda or cuda:N", value)


def _check_bits(name: str, value: object) -> None:
    need(value in (8, 16), name, "be 8 or 16", value)


EXAMPLES: Final[Mapping[str, str]] = {
    "kv_selection": '{"method": "double_sparsity", "channels": "FILE"}',
    "skipping": '{"method": "unified_layer_skipping", "speedup": 2}',
}
"""Of arguments that name a method with its options."""


def parse_named(name: str, given: Mapping[str, Any] | str) -> Mapping[str, Any]:
    """A method and its options, from a dict, its JSON text, or a name.

    Args:
        name: of the argument, one of `EXAMPLES`.
    Raises:
        ConfigError: neither.
    """
    read: object = given
    if isinstance(given, str):
        read = json_value(name, given) if given.lstrip().startswith("{") else {"method": given}
    if isinstance(read, Mapping) and isinstance(read.get("method"), str):
        return read
    raise ConfigError(f"{name} must be a dict with a method, as {EXAMPLES[name]}, got {shortened(given)}")


def _check_named(name: str, value: Any) -> None:
    parse_named(name, value)


@documented
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of the engine, and forms of its weights: arguments of `LLM`, of which the API reference says more."""

    dtype: str = option("auto", "auto, float32, bfloat16 or float16.", metavar="NAME", choices=DTYPES)
    device: str = option("auto", "auto, cpu, cuda or cuda:N.", metavar="NAME", check=_check_device)
    max_model_len: int | None = option(None, "Maximum length of a sequence; default: the checkpoint's.", low=2)
    max_num_seqs: int = option(16, doc="Most sequences that run at once.", low=1, high=1024)
    max_num_batched_tokens: int = option(512, doc="Most prompt tokens in one prefill chunk.", low=1, high=65536)
    enable_prefix_caching: bool = option(
        True,
        doc="Keep keys and values of ended requests, where the runner can share blocks, for prompts that begin alike.",
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Maximum memory for keys and values, in bytes; default: 0.6 of what is free.", low=1
    )
    speculative_memory_bytes: int | None = option(
        None, "Maximum memory for draft trees and the caches of draft models, in bytes; default: no limit.", low=1
    )
    threads: int | None = option(None, "CPU threads; default: PyTorch's setting.", low=1, high=1024)
    seed: int | None = option(None, doc="Base for requests that have none of their own.", low=-(2**63), high=2**63 - 1)
    exactness: str = option(
        "auto", "strict: bit for bit the tokens of plain decoding, or an error; default: auto.", metavar="NAME",
        choices=EXACTNESS,
    )  # fmt: skip
    quantization: str | None = option(
        None, "int8 or int4 rounds the weights when they are loaded, none keeps them; default: none; quantised files "
        "keep their numbers where they can, else int8 or int4.", metavar="NAME", check=_check_quantization,
    )  # fmt: skip
    activation_bits: int | None = option(
        None, "8 or 16, of what the numbers of a quantised file are multiplied with; default: 8.", check=_check_bits
    )

    kv_selection: Mapping[str, Any] | str | None = option(
        None, 'Attend to a part of long texts (approximate): a method and its options, as {"method": '
        '"double_sparsity", "channels": "FILE"}.', metavar="JSON", check=_check_named,
    )  # fmt: skip
    skipping: Mapping[str, Any] | str | None = option(
        None, 'Leave out a part of the passes (approximate): a method and its options, as {"method": '
        '"unified_layer_skipping", "speedup": 2}.', metavar="JSON", check=_check_named,
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_options(self)
