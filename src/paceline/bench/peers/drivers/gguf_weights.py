"""Llama weights as a GGUF file for llama.cpp, with a dummy vocabulary of the right size.

llama.cpp rotates neighbouring pairs of a head (0,1), (2,3), ...; checkpoints rotate (0, d/2), (1, d/2 + 1), ...
The rows of the query and key projections are put into llama.cpp's order, which leaves every attention score as it was.
Prompts are token ids, so that the vocabulary needs no words: 256 byte tokens, where there is room, and numbered ones.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.bench.peers.drivers.llama_weights import LlamaWeights

QUANTS = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}
PER_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def pair_neighbours(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of a query or key projection reordered from halves to neighbouring pairs.

    Args:
        weight: (heads * d, inputs), d even; row i of a head's first half turns with row i of its second half.
        heads: how many heads the rows make.
    Returns:
        The same shape; within each head rows 0, d/2, 1, d/2 + 1, ...
    """
    rows, inputs = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, inputs)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows, inputs)


def tensor_names(layers: int, tied: bool) -> dict[str, str]:
    """Checkpoint name -> GGUF name of every weight of a Llama."""
    names = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if not tied:
        names["lm_head.weight"] = "output.weight"
    for layer in range(layers):
        names.update({f"model.layers.{layer}.{a}.weight": f"blk.{layer}.{b}.weight" for a, b in PER_LAYER.items()})
    return names


def write_gguf(weights: LlamaWeights, path: Path, precision: str) -> None:
    """Write the whole model; `precision` is a key of QUANTS and holds for the matrices (norms stay float32).

    Raises:
        ValueError: a precision that is not in QUANTS.
    """
    import gguf

    if precision not in QUANTS:
        raise ValueError(f"precision {precision!r} is not one of {', '.join(QUANTS)}")
    kind = gguf.GGMLQuantizationType[QUANTS[precision]]
    writer = gguf.GGUFWriter(str(path), "llama")
    _write_keys(writer, weights)
    shape = weights.shape
    for ours, theirs in tensor_names(shape.layers, shape.tied).items():
        data = weights.f32(ours)
        if theirs.endswith(("attn_q.weight", "attn_k.weight")):
            data = pair_neighbours(data, shape.heads if "attn_q" in theirs else shape.kv_heads)
        if data.ndim == 1:
            writer.add_tensor(theirs, data)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(data, kind), raw_dtype=kind)
    if set(shape.factors) != {1.0}:
        writer.add_tensor("rope_freqs.weight", np.array(shape.factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_keys(writer: Any, weights: LlamaWeights) -> None:
    shape = weights.shape
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.theta)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.vocab)
    words = [f"<0x{i:02X}>" if i < 256 else f"t{i}" for i in range(shape.vocab)]
    types = [6 if i < 256 else 1 for i in range(shape.vocab)]  # byte, normal
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * shape.vocab)
    writer.add_token_types(types)
    writer.add_add_bos_token(False)
