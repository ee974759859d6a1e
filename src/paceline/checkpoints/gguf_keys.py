"""Which keys of a GGUF file may go unread.

A key of the model's architecture, or of its tokenizer, that nobody asks for may change what is computed, so it is
refused by name unless it is known to change nothing. What keys mean is what llama.cpp makes of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from paceline.checkpoints.gguf_file import GgufFile
from paceline.errors import UnsupportedModelError
from paceline.utils import shortened

HARMLESS: Final = frozenset({
    "vocab_size", "tensor_data_layout", "attention.value_length", "expert_feed_forward_length",
    "expert_shared_feed_forward_length", "rope.scaling.finetuned", "rope.scaling.original_context_length",
    "pooling_type", "attention.layer_norm_epsilon",
})  # fmt: skip
"""Keys that the shapes of tensors say too, that count only together with others, or that say nothing of logits."""

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "attention.causal": (True,),
    "expert_weights_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.yarn_ext_factor": (1,),
}
"""Keys with the values under which they change nothing."""

SAME: Final[Mapping[str, str]] = {
    "attention.key_length_swa": "attention.key_length",
    "attention.value_length_swa": "attention.value_length",
    "embedding_length_out": "embedding_length",
    "rope.dimension_count_swa": "rope.dimension_count",
    "rope.freq_base_swa": "rope.freq_base",
}
"""Keys that change nothing where they have the value of another."""

TOKENIZER: Final = re.compile(
    r"(model|pre|tokens|token_type|token_type_count|scores|merges|add_(bos|eos|sep)_token|add_space_prefix"
    r"|remove_extra_whitespaces|\w+_token_id)"
)
"""Keys of tokenizers that are read, or count for kinds that are not read. (SentencePiece's BPE, as GGUF has it, keeps
white space whatever the file says.)
"""


def refuse_unread(file: GgufFile) -> None:
    """Refuse a key of the architecture that nobody has asked for and that may change what is computed.

    Raises:
        UnsupportedModelError: naming the first of them.
    """
    prefix = f"{file.architecture}."
    for whole, value in file.metadata.items():
        key = whole.removeprefix(prefix)
        if key != whole and key not in file.asked and not _changes_nothing(key, value, file):
            raise UnsupportedModelError(
                f"{file.path} says {whole}={shortened(value)}, which is not supported; use another file of the model, "
                "or the safetensors checkpoint it was made from"
            )


def _changes_nothing(key: str, value: Any, file: GgufFile) -> bool:
    if key in HARMLESS or (key in SAME and value == file.get(SAME[key])):
        return True
    return value in NEUTRAL.get(key, (False, 0, "", []))


def refuse_unread_of_tokenizer(file: GgufFile) -> None:
    """The same for the tokenizer's keys.

    Raises:
        UnsupportedModelError: naming the first of them.
    """
    for whole, value in file.metadata.items():
        key = whole.removeprefix("tokenizer.ggml.")
        if key != whole and value not in (False, 0, "", []) and not TOKENIZER.fullmatch(key):
            raise UnsupportedModelError(
                f"{file.path}: its tokenizer says {whole}={shortened(value)}, which is not supported; give "
                "tokenizer=FOLDER with the tokenizer.json of the model"
            )
