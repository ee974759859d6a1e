"""Made encoder-decoder checkpoints of every native family: random weights, published keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from paceline.models import Inputs

SIZES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 48, "vocab_size": 99, "pad_token_id": 1, "bos_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 99, "d_model": 32, "d_kv": 12, "d_ff": 64, "num_layers": 3, "num_heads": 4, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
ABSOLUTE = {**SIZES, "max_position_embeddings": 64}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "t5 with gates": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5Config", "MT5ForConditionalGeneration", T5),
    "umt5": ("UMT5Config", "UMT5ForConditionalGeneration", T5),
    "bart": ("BartConfig", "BartForConditionalGeneration", ABSOLUTE),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", {**ABSOLUTE, "scale_embedding": True}),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", ABSOLUTE),
    "marian": ("MarianConfig", "MarianMTModel", {**ABSOLUTE, "scale_embedding": True, "decoder_vocab_size": 99}),
    "m2m_100": ("M2M100Config", "M2M100ForConditionalGeneration", ABSOLUTE),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**SIZES, "num_mel_bins": 8, "max_source_positions": 25, "max_target_positions": 64},
    ),
    "moonshine": (
        "MoonshineConfig",
        "MoonshineForConditionalGeneration",
        {
            "vocab_size": 99, "hidden_size": 36, "intermediate_size": 48, "encoder_num_hidden_layers": 2,
            "decoder_num_hidden_layers": 3, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
        },
    ),
}  # fmt: skip
"""Name -> configuration class, model class and sizes, in transformers."""


def make(name: str, folder: Path, **changed: Any) -> Any:
    """The model of transformers, saved in a folder; its weights are far enough from zero that every part matters."""
    config, model, sizes = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**{**sizes, **changed})).eval()
    spread = 0.05 if "d_kv" in sizes else 0.2
    computed = made.config.model_type in {"marian", "pegasus"}
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if not (computed and "embed_positions" in key):
                weight.add_(torch.randn_like(weight) * spread)
        for key, bias in made.named_buffers():
            if key.endswith("final_logits_bias"):
                bias.copy_(torch.randn_like(bias))
    made.save_pretrained(folder)
    return made


def source(name: str, seed: int = 0) -> tuple[Inputs, dict[str, torch.Tensor]]:
    """A source as our inputs, and as arguments of transformers."""
    random = np.random.default_rng(seed)
    if name == "whisper":
        features = random.standard_normal((8, 50)).astype(np.float32)
        return Inputs(features={"input_features": features}), {"input_features": torch.from_numpy(features)[None]}
    if name == "moonshine":
        sound = random.standard_normal(6000 + 500 * seed).astype(np.float32)
        return Inputs(features={"input_values": sound}), {"input_values": torch.from_numpy(sound)[None]}
    tokens = random.integers(3, 99, 30 + seed).tolist()
    return Inputs(encoder_tokens=tokens), {"input_ids": torch.tensor([tokens])}
