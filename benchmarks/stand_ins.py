"""Stand-ins for models that drafters need and nobody ships: an adapter of Kangaroo and trained heads with random
weights, and the bundled draft under shuffled token ids, which has another tokenizer and shares every token of the
target.

What they draft mostly fails; that it does not show in the output is what they are for.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from paceline.bench import BUNDLED_DRAFT
from paceline.models.heads import HeadConfig, stream_layers, tensors_of, write_head, write_rate_adapters


def adapter_weights(width: int, *, mute: bool = False) -> dict[str, torch.Tensor]:
    """Random weights of one layer; `mute`: its attention adds nothing, so that the exit alone drafts."""
    generator = torch.Generator().manual_seed(0)
    names = [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
    found = {name: 0.3 * torch.randn(width, width, generator=generator) for name in names}
    if mute:
        found["layers.0.self_attn.o_proj.weight"].zero_()
    return found | {"layers.0.input_layernorm.weight": torch.ones(width), "norm.weight": torch.ones(width)}


def written_adapter(weights: Mapping[str, torch.Tensor], width: int, heads: int = 2, **config: Any) -> str:
    """Path of an adapter in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-adapter-"))
    shape = {
        "hidden_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": width // heads,
    }
    rest = {"num_hidden_layers": 1, "intermediate_size": 4 * width, "vocab_size": 11, "rms_norm_eps": 1e-6}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**llama, **shape, **rest, **config}))
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")
    return str(folder)


def written_rate_adapters(width: int, layers: int, rate: int, *, rank: int = 8, scale: float = 0.5) -> str:
    """Path of M2R2's adapters for a target of so many layers, of random weights; `scale` 0: they add nothing."""
    generator, folder = torch.Generator().manual_seed(0), tempfile.mkdtemp(prefix="paceline-adapter-")
    tensors = dict[str, torch.Tensor]()
    for step in range(len(stream_layers(layers, rate))):
        tensors[f"steps.{step}.down.weight"] = torch.randn(rank, width, generator=generator) / width**0.5
        tensors[f"steps.{step}.up.weight"] = scale * torch.randn(width, rank, generator=generator) / rank**0.5
    return str(write_rate_adapters(folder, tensors, rate=rate, num_layers=layers, facts={}))


OTHER_FORMS = re.compile(r".*\.[qk]_norm\.weight|(input_norm|fc_norm\.\d+)\.weight")
"""Norms that some heads have."""


def head_weights(
    config: HeadConfig, *, shared: bool = True, scale: float = 1.0, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Random weights of a head, whose vocabulary, where it is reduced, is the target's first tokens, with a layer of
    Llama's form.

    Args:
        shared: embedding and head are the target's, where the method allows it; no biases.
        scale: of what matrices add to what they read.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for one in tensors_of(config):
        if one.optional and (shared or one.name == "draft_to_target" or OTHER_FORMS.fullmatch(one.name)):
            continue
        if one.name == "draft_to_target":
            found[one.name] = torch.arange(config.draft_vocab_size)
        elif len(one.shape) == 1 and "norm" in one.name:
            found[one.name] = 1.0 + 0.1 * torch.randn(one.shape, generator=generator)
        else:
            found[one.name] = scale * torch.randn(one.shape, generator=generator) / one.shape[-1] ** 0.5
    return found


def written_head(config: HeadConfig, weights: Mapping[str, torch.Tensor] | None = None, *, shared: bool = True) -> str:
    """Path of a head in a folder of its own, with random weights where none are given."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-head-"))
    return str(write_head(folder, config, head_weights(config, shared=shared) if weights is None else weights))


def random_head(
    method: Any, width: int, vocab_size: int, *, heads: int = 4, kv_heads: int | None = None, tokens: int = 500
) -> str:
    """Path of a head of random weights that drafts the first `tokens` tokens: what it drafts is wrong.

    Args:
        kv_heads: the target's, which longspec needs.
    """
    layer = {"num_attention_heads": heads, "intermediate_size": 2 * width, "max_position_embeddings": 2048}
    if kv_heads is not None:
        layer["num_key_value_heads"] = kv_heads
    with_layer = method in ("hydra++", "clover", "chimera")
    several = with_layer or method in ("medusa", "hydra", "mlp_speculator", "ppd", "hidden_transfer", "lud")
    block = method in ("dflash", "dspark")
    return written_head(
        HeadConfig(
            method=method,
            hidden_size=width,
            vocab_size=vocab_size,
            draft_vocab_size=vocab_size if method in ("ppd", "hidden_transfer", "lud") else tokens,
            num_heads=3 if several else 1,
            taps=(0, 2, 4) if block or method in ("eagle3", "p_eagle", "hidden_transfer") else (),
            mask_token_id=1 if block or method in ("p_eagle", "lud") else None,
            layer={} if several and not with_layer else layer,
            inner_size=width // 2 if method in ("mlp_speculator", "fspad") else None,
            block_size=5 if block else 2 if method == "falcon" else None,
            sliding_window=64 if method == "longspec" else None,
            sample_from_anchor=method == "dspark",
            markov_rank=16 if method == "dspark" else 0,
            enable_confidence_head=method == "dspark",
            confidence_head_with_markov=method == "dspark",
        )
    )


def write_masked_draft(folder: Path) -> Path:
    """The bundled draft with a mask token that it has not learned, behind its other tokens, as a checkpoint folder."""
    weights = load_file(BUNDLED_DRAFT / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat((weights[name], weights[name][5:6]))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_DRAFT / name, folder)
    config = json.loads((BUNDLED_DRAFT / "config.json").read_text())
    mask = config["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": mask + 1, "pard_token": mask}))
    return folder


def write_shuffled_draft(folder: Path) -> Path:
    """The bundled draft with its token ids in another order, as a checkpoint folder."""
    weights = load_file(BUNDLED_DRAFT / "model.safetensors")
    places = np.random.default_rng(0).permutation(6144)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][torch.from_numpy(np.argsort(places))].contiguous()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_DRAFT / name, folder)
    words = json.loads((BUNDLED_DRAFT / "tokenizer.json").read_text())
    words["model"]["vocab"] = {token: int(places[index]) for token, index in words["model"]["vocab"].items()}
    for added in words["added_tokens"]:
        added["id"] = int(places[added["id"]])
    (folder / "tokenizer.json").write_text(json.dumps(words))
    return folder


def random_cross_encoder() -> str:
    """Path of a small BERT that scores pairs of texts, which it reads letter by letter."""
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="paceline-cross-encoder-"))
    letters = [chr(code) for code in range(33, 127)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(words))
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(words), num_labels=1, initializer_range=0.5, **shape)
    BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt"), model_max_length=512).save_pretrained(folder)
    return str(folder)
