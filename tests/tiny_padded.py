"""A tiny Llama whose embedding has more rows than its tokenizer has tokens; what fills it up has the largest logits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, ROWS, END = 257, 384, 256
"""One token for each byte, and the end."""


def write(folder: Path, *, holes: Sequence[int] = (), tied: bool = False, **changes: Any) -> Path:
    """A checkpoint.

    Args:
        holes: ids below TOKENS that are no tokens either.
    """
    torch.manual_seed(1)
    config: dict[str, Any] = {
        "vocab_size": ROWS, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128,
        "bos_token_id": END, "eos_token_id": END, "pad_token_id": END, "tie_word_embeddings": tied,
        "initializer_range": 0.3,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**(config | changes)))
    with torch.no_grad():
        weight = model.lm_head.weight
        half = 4.0 * torch.randn((ROWS - TOKENS) // 2, weight.shape[1])
        weight[TOKENS:] = torch.cat((half, -half, half[:1]))[: max(0, len(weight) - TOKENS)]
        for hole in holes:
            weight[hole] = weight[TOKENS + hole % 100]
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = {token: i for i, token in enumerate(alphabet) if i not in holes}
    inner = Tokenizer(models.BPE(vocab=known | {"<end>": END}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<end>"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return folder
