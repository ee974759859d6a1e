"""Random-weights models of a chosen shape, so that speed can be measured at any size without a checkpoint.

    291m, 1b, 8b                                                    shapes by name
    llama:hidden=1024,layers=24,heads=16,kv_heads=8,mlp=2816,vocab=8192,context=4096,tie=1
    qwen3_moe:hidden=1024,layers=8,experts=32,top_k=4,mlp=256       any of FAMILIES

Weights are normal with deviation 0.02, norms multiply by 1 and biases are 0, as transformers initialises them; which
tensors there are, transformers says. The text of such a model means nothing and tends to repeat itself: measure
acceptance with the dial, not with drafters.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ConfigError
from paceline.utils import integer, need, reject_unknown, user_cache

if TYPE_CHECKING:
    import torch

PREFIX = "random:"
DEVIATION = 0.02
SHARD_BYTES = 2 * 1024**3
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "ministral3": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 4096},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 512},
    "olmo2": {},
    "olmo3": {},
    "exaone4": {},
    "granite": {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 1 / 64,
        "logits_scaling": 8.0,
    },
    "phi3": {},
    "smollm3": {},
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "starcoder2": {},
    "glm4": {"attention_bias": True},
    "apertus": {},
    "ernie4_5": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_dense": {},
    "seed_oss": {},
    "hunyuan_v1_moe": {},
    "cohere2": {"sliding_window": 4096},
    "gpt_oss": {"sliding_window": 128},
    "deepseek_v2": {"q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek_v3": {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "glm4_moe": {"attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": {},
    "minimax_m2": {},
}
"""Names of families, and what their published models have beside sizes, where transformers has another default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomShape:
    """Says how large a model of random weights is, as `--random-shape` takes it.

    Attributes:
        family: a key of FAMILIES.
        hidden, layers, heads, kv_heads, mlp, vocab, context: sizes; in mixtures `mlp` is that of an expert.
        head_dim: 0 is hidden / heads.
        experts, top_k: of mixtures.
        tie: whether the head is the embedding.
        seed: of the weights.
    Raises:
        ConfigError: a size outside its range, or sizes that do not fit each other.
    """

    family: str = "llama"
    hidden: int = 1024
    layers: int = 24
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 0
    mlp: int = 2816
    vocab: int = 8192
    context: int = 4096
    experts: int = 8
    top_k: int = 2
    tie: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in SIZES:
            integer(f"random model {name}", getattr(self, name), int(name not in MAY_BE_0), 2**31)
        fits = bool(self.head_dim) or self.hidden % (2 * self.heads) == 0
        need(fits, "random model hidden", f"be a multiple of 2 * heads={self.heads}", self.hidden)
        fits = self.heads % self.kv_heads == 0
        need(fits, "random model heads", f"be a multiple of kv_heads={self.kv_heads}", self.heads)
        need(self.top_k <= self.experts, "random model top_k", f"be at most experts={self.experts}", self.top_k)

    @property
    def text(self) -> str:
        """The shape as it is typed."""
        return f"{self.family}:" + ",".join(f"{name}={getattr(self, name)}" for name in SIZES)


SIZES = tuple(field.name for field in fields(RandomShape) if field.name != "family")
MAY_BE_0 = ("head_dim", "tie", "seed")
SHAPES = {
    "291m": RandomShape(),
    "1b": RandomShape(hidden=2048, layers=16, heads=32, kv_heads=8, mlp=8192, vocab=128256, context=8192),
    "8b": RandomShape(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocab=128256, context=8192, tie=0),
}


def parse_shape(text: str) -> RandomShape:
    """The shape that `text` names, with or without "random:".

    Raises:
        ConfigError: an unknown name, family or key.
    """
    text = text.removeprefix(PREFIX)
    if text.lower() in SHAPES:
        return SHAPES[text.lower()]
    family, _, rest = text.partition(":")
    if family not in FAMILIES:
        known = f"{', '.join(SHAPES)} or llama:hidden=1024,layers=24,..., or another of {', '.join(FAMILIES)}"
        raise ConfigError(f"a random model must be {known}, got {text[:100]!r}")
    sizes: dict[str, int] = {}
    for part in filter(None, rest.split(",")):
        key, _, value = part.partition("=")
        reject_unknown(f"a random {family}", {key: value}, SIZES)
        need(key not in sizes, f"random model {key}", "be given once", text)
        need(value.isdecimal() and len(value) < 12, f"random model {key}", "be an integer", value)
        sizes[key] = int(value)
    return RandomShape(family=family, **sizes)


def model_folder(text: str, folder: Path | None = None) -> Path:
    """The checkpoint of a shape, written in bfloat16 if it is not there yet.

    Args:
        text: see `parse`.
        folder: where; None is a folder of the cache named by the shape.
    """
    shape = parse_shape(text)
    if folder is None:
        digest = hashlib.sha256(shape.text.encode()).hexdigest()[:12]
        folder = user_cache("random") / f"{shape.family}-{shape.hidden}x{shape.layers}-{digest}"
    if not (folder / "config.json").exists():
        write_model(shape, folder)
    return folder


def write_model(shape: RandomShape, folder: Path) -> None:
    """Write a checkpoint in one piece: the folder is there complete or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, suffix=".tmp"))
    try:
        config = shape_config(shape)
        _write_shards(_tensors(config, shape.seed), temporary)
        _copy_tokenizer(temporary, shape.vocab)
        config.save_pretrained(temporary)  # last, since a folder with a config counts as complete
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def shape_config(shape: RandomShape) -> Any:
    """The shape as the configuration that transformers knows it by."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    head_dim = shape.head_dim or shape.hidden // shape.heads
    settings = {
        "model_type": shape.family,
        "dtype": "bfloat16",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": head_dim,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": bool(shape.tie),
        "bos_token_id": 0,
        "pad_token_id": 0,
        **FAMILIES[shape.family],
    }
    if shape.family.startswith("gemma"):
        settings["query_pre_attn_scalar"] = head_dim
    elif shape.family in ("qwen2_moe", "qwen3_moe"):
        settings |= {
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.mlp,
        }
    elif shape.family in ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"):
        settings |= {"n_routed_experts": shape.experts, "num_experts_per_tok": shape.top_k}
        settings["moe_intermediate_size"] = shape.mlp
        if shape.family != "glm4_moe":
            settings["num_key_value_heads"] = shape.heads
    elif shape.family == "ernie4_5_moe":
        settings |= {"moe_num_experts": shape.experts, "moe_k": shape.top_k, "moe_intermediate_size": shape.mlp}
        settings["intermediate_size"] = 2 * shape.kv_heads * shape.mlp  # by which llama.cpp counts the shared ones
    elif shape.family == "hunyuan_v1_moe":
        settings |= {"num_experts": shape.experts, "moe_topk": shape.top_k}
    elif shape.family in ("mixtral", "gpt_oss", "minimax_m2"):
        settings |= {"num_local_experts": shape.experts, "num_experts_per_tok": shape.top_k}
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings["model_type"]]
    config = AutoConfig.for_model(**settings, architectures=[architecture])
    config.eos_token_id = None  # GLM-4 has one where none is given
    return config


def _tensors(config: Any, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and weights, one at a time, so that no second copy of a large model is ever in memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    norms = 0.0 if config.model_type.startswith("gemma") else 1.0  # Gemma's add 1 to it
    stored = skeleton.state_dict()
    buffers = [(name, buffer) for name, buffer in skeleton.named_buffers() if name in stored]
    for name, parameter in (*skeleton.named_parameters(), *buffers):
        if name.endswith("norm.weight"):
            values = torch.full(parameter.shape, norms)
        elif name.endswith("bias"):
            values = torch.zeros(parameter.shape)
        elif name.endswith(("act_fn.beta", "act_fn.eps")):
            values = torch.tensor(0.5 if name.endswith("beta") else -1e-6)
        else:
            values = torch.randn(parameter.shape, generator=generator) * DEVIATION
        yield name, values.to(torch.bfloat16)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """safetensors files of at most SHARD_BYTES (one tensor at least), with their index where there are several."""
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}
    total = 0

    def flush() -> None:
        save_file(held, folder / f"part-{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and sum(part.nbytes for part in held.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        held[name] = tensor
        total += tensor.nbytes
    flush()
    if len(shards) == 1:
        (folder / "part-0.safetensors").rename(folder / "model.safetensors")
        return
    files: dict[str, str] = {}
    for index, names in enumerate(shards):
        final = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{index}.safetensors").rename(folder / final)
        files |= dict.fromkeys(names, final)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": files})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def _copy_tokenizer(folder: Path, vocab: int) -> None:
    """The bundled tokenizer, whose tokens must fit the vocabulary, with tokens that no text has for all other rows.

    Raises:
        ConfigError: they do not.
    """
    from paceline.llm import BUNDLED

    source = BUNDLED / "target"
    least = int(json.loads((source / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    need(vocab >= least, "random model vocab", f"be at least {least}, the size of the bundled tokenizer", vocab)
    shutil.copy(source / "tokenizer_config.json", folder)
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    content["model"]["vocab"] |= {f"<spare {index}>": index for index in range(least, vocab)}
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
