"""Tiny random diffusion checkpoints with a tokenizer of single characters, written as folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.models.denoiser_reference import VOCAB
from tests.models.denoiser_references import FAMILIES

SPECIAL = ("<unk>", "<s>", "<pad>", "</s>")
CHARACTERS = '{}[]:," 0123456789abcdefghijklmnop\n'
END, MASK = 3, VOCAB - 1
TEMPLATE = "{% for m in messages %}{{ m['content'] }}:{% endfor %}"


def write(folder: Path, layout: str = "llada", seed: int = 0, **changes: Any) -> Path:
    """A checkpoint of a layout; `changes` replaces keys of its config."""
    FAMILIES[layout](folder, seed, **changes)
    names = [*SPECIAL, *CHARACTERS, "<|mask|>"]
    assert len(names) == VOCAB
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*SPECIAL, "<|mask|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "mask_token": "<|mask|>",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named | {"tokenizer_class": "TokenizersBackend"}))
    return folder
