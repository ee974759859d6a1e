"""A tiny random BERT with a tokenizer of words, written as checkpoint folders of encoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, BertModel, BertTokenizerFast

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{i}" for i in range(40)))
MOST = 48


def write(folder: Path, *, labels: int | None = None, seed: int = 0, **changes: Any) -> Path:
    """An encoder, or a cross-encoder of so many labels; `changes` replaces keys of its config."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    shape = {
        "vocab_size": len(WORDS),
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": MOST,
        "initializer_range": 0.5,
    }
    config = BertConfig(**(shape | changes), **({} if labels is None else {"num_labels": labels}))
    (BertModel if labels is None else BertForSequenceClassification)(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=MOST).save_pretrained(folder)
    return folder


def write_modules(folder: Path, *, normalize: bool, others: tuple[str, ...] = (), **pooling: Any) -> None:
    """sentence-transformers' files beside a checkpoint."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *others]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 24, **pooling}))
