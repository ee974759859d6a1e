"""A model folder from a training state: LLaDA's layout for the plain model, SDAR's for the block-causal one.

Reads OUT/state.safetensors of train.py, the bundled target's tokenizer. Writes a folder that `load_denoiser` reads:
config.json, model.safetensors in bfloat16, tokenizer files with the mask token, generation_config.json with the longest
answers of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor

from paceline.models import DenoiserSpec
from recipes.bundled_diffusion.lessons import LENGTHS
from recipes.bundled_diffusion.model import EOS, MASK, MAX_LENGTH, TOKENIZER, Net, read_state
from recipes.common.options import new_parser

MASK_TEXT = "<|mask|>"
GENERATION = {"eos_token_id": EOS, "pad_token_id": EOS, "max_new_tokens": max(LENGTHS)}
Weights = Mapping[str, Tensor]


def parts_of(weights: Weights, layer: int) -> dict[str, Tensor]:
    """The tensors of one layer by what they are, matrices apart from each other."""
    at = f"layers.{layer}."
    own = {
        name.removeprefix(at).removesuffix(".weight"): value for name, value in weights.items() if name.startswith(at)
    }
    own |= zip("qkv", own.pop("qkv").chunk(3), strict=True)
    return own | dict(zip(("gate", "up"), own.pop("gate_up").chunk(2), strict=True))


def renamed(weights: Weights, once: Mapping[str, str], layers: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """All tensors under a layout's names.

    Args:
        once: of what is there once. layers: what all names of layers begin with. names: of the parts of a layer.
    """
    tensors = {f"{to}.weight": weights[f"{name}.weight"] for name, to in once.items()}
    count = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    for layer in range(count):
        tensors |= {f"{layers}.{layer}.{names[part]}.weight": value for part, value in parts_of(weights, layer).items()}
    return tensors


LLADA: Mapping[str, Any] = {
    "architectures": ["LLaDAModelLM"],
    "model_type": "llada",
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "max_sequence_length": MAX_LENGTH,
    "rope": True,
    "rope_full_precision": True,
    "scale_logits": False,
    "weight_tying": False,
}
"""Keys that are the same for every shape."""


def llada(spec: DenoiserSpec, weights: Weights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """LLaDA-8B's keys and names."""
    model = spec.model
    config = dict(LLADA) | {
        "d_model": model.hidden_size,
        "embedding_size": model.vocab_size,
        "mlp_hidden_size": model.intermediate_size,
        "n_heads": model.num_heads,
        "n_kv_heads": model.num_kv_heads,
        "n_layers": model.num_layers,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.ropes["default"].theta,
        "vocab_size": model.vocab_size,
    }
    names = {
        "q": "q_proj",
        "k": "k_proj",
        "v": "v_proj",
        "o": "attn_out",
        "gate": "ff_proj",
        "up": "up_proj",
        "down": "ff_out",
    }
    names |= {"attn_norm": "attn_norm", "mlp_norm": "ff_norm"}
    once = {"embed": "wte", "final_norm": "ln_f", "head": "ff_out"}
    return config, renamed(
        weights, {x: f"model.transformer.{to}" for x, to in once.items()}, "model.transformer.blocks", names
    )


def sdar(spec: DenoiserSpec, weights: Weights) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """SDAR's keys and names, which are Qwen3's."""
    model = spec.model
    config = {
        "architectures": ["SDARForCausalLM"],
        "model_type": "sdar",
        "attention_bias": False,
        "block_size": spec.block_length,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": MAX_LENGTH,
        "num_attention_heads": model.num_heads,
        "num_hidden_layers": model.num_layers,
        "num_key_value_heads": model.num_kv_heads,
        "rms_norm_eps": model.norm_eps,
        "rope_scaling": None,
        "rope_theta": model.ropes["default"].theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": model.vocab_size,
    }
    names = {x: f"self_attn.{x}_proj" for x in "qkvo"} | {x: f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    names |= {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    names |= {f"{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
    once = {"embed": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
    return config, renamed(weights, once, "model.layers", names)


LAYOUTS: Mapping[str, Callable[[DenoiserSpec, Weights], tuple[dict[str, Any], dict[str, Tensor]]]] = {
    "llada": llada,
    "sdar": sdar,
}


def write_tokenizer(out: Path) -> None:
    """The target's tokenizer with the mask token behind its vocabulary; prompts are taken as they are, without a chat
    template.
    """
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    tokenizer.add_special_tokens([AddedToken(MASK_TEXT, special=True, normalized=False)])
    assert tokenizer.token_to_id(MASK_TEXT) == MASK
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    facts = json.loads(TOKENIZER.with_name("tokenizer_config.json").read_text(encoding="utf-8"))
    facts = {key: value for key, value in facts.items() if key != "chat_template"}
    facts |= {"mask_token": MASK_TEXT, "model_max_length": MAX_LENGTH}
    (out / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def write(net: Net, out: Path) -> None:
    """The folder of a model."""
    out.mkdir(parents=True, exist_ok=True)
    config, tensors = LAYOUTS[net.spec.model.family](net.spec, net.state_dict())
    config |= {
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "mask_token_id": net.spec.mask_token_id,
        "torch_dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (out / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n", encoding="utf-8")
    stored = {name: value.to(torch.bfloat16).contiguous() for name, value in tensors.items()}
    save_file(stored, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the writer leaves it readable by its owner alone
    write_tokenizer(out)


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    parser.add_argument("state", type=Path, help="OUT/state.safetensors of train.py")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    write(read_state(options.state), options.out)


if __name__ == "__main__":
    main()
