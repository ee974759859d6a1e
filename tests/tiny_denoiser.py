"""A diffusion language model of random weights with the bundled target's tokenizer, in LLaDA's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from paceline.llm import BUNDLED

SOURCE = BUNDLED / "target"
MASK = 6144
WIDTH, INNER = 16, 24


def write(folder: Path, *, seed: int = 0, **changes: object) -> Path:
    """A checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LLaDAModelLM"], "model_type": "llada", "activation_type": "silu", "d_model": WIDTH,
        "n_heads": 2,
        "n_layers": 1, "mlp_hidden_size": INNER, "vocab_size": MASK + 1, "embedding_size": MASK + 1,
        "mask_token_id": MASK,
        "eos_token_id": 3, "max_sequence_length": 512, "rms_norm_eps": 1e-5, "rope": True, "rope_theta": 10000.0,
        "weight_tying": False, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config | changes))
    generator, at = torch.Generator().manual_seed(seed), "model.transformer."
    shapes = {
        f"{at}wte.weight": (MASK + 1, WIDTH),
        f"{at}ff_out.weight": (MASK + 1, WIDTH),
        f"{at}ln_f.weight": (WIDTH,),
    }
    block = {f"{x}_proj": (WIDTH, WIDTH) for x in "qkv"} | {"attn_out": (WIDTH, WIDTH), "ff_out": (WIDTH, INNER)}
    block |= {"ff_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "attn_norm": (WIDTH,), "ff_norm": (WIDTH,)}
    shapes |= {f"{at}blocks.0.{name}.weight": shape for name, shape in block.items()}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Backend.from_file(str(SOURCE / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|mask|>", special=True, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text((SOURCE / "tokenizer_config.json").read_text())
    return folder
