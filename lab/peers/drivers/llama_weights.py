"""A Llama checkpoint: its shape, and its tensors.

Layouts other than Llama's are rejected with an error that names them, never converted approximately.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.peers.drivers.weights import Weights, rope_factors


@dataclass(frozen=True)
class LlamaShape:
    """Sizes and constants of a Llama; `factors` divide the rotary frequencies (all 1 where rope is not scaled)."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    eps: float
    theta: float
    factors: tuple[float, ...]
    tied: bool


class LlamaWeights(Weights):
    """The tensors of a Llama.

    Raises:
        ValueError: another architecture, an activation, bias or rope scaling that the converter does not know.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.shape = _shape(self.config)
        if any(name.endswith(".bias") for name in self.names):
            raise ValueError("the checkpoint has biases; this peer's converter takes Llama layers without")


def _shape(config: dict[str, Any]) -> LlamaShape:
    names = config.get("architectures") or ["?"]
    if names[0] not in ("LlamaForCausalLM", "MistralForCausalLM") or config.get("sliding_window"):
        raise ValueError(f"the checkpoint is a {names[0]}; this peer's converter takes LlamaForCausalLM")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {config['hidden_act']}; this peer's converter takes silu")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    return LlamaShape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config.get("num_key_value_heads") or config["num_attention_heads"],
        head_dim=head_dim,
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        eps=float(config.get("rms_norm_eps", 1e-6)),
        theta=theta,
        factors=rope_factors(rope, theta, head_dim),
        tied=bool(config.get("tie_word_embeddings")),
    )
