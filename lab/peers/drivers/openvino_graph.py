"""Llama weights as an OpenVINO graph that OpenVINO GenAI runs: stateful, with a cache per layer.

Its inputs are input_ids, attention_mask, position_ids (batch, length) and beam_idx (batch,), its output logits (batch,
length, vocabulary).

The pieces are written in the forms that OpenVINO's own passes know (RMS norm, half rotation, cache as ReadValue -
Gather - Concat - Assign around ScaledDotProductAttention), so that they are fused and the attention can be replaced by
the paged one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.peers.drivers.llama_weights import LlamaWeights

STORES = ("bfloat16", "float16", "float32", "int8")
INPUTS = ("input_ids", "attention_mask", "position_ids", "beam_idx")


def int8_rows(weight: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Symmetric 8-bit weights with one scale a row: weight is about q * scale.

    Args:
        weight: (rows, inputs).
    Returns:
        q, the same shape, in -127..127; scale, (rows, 1).
    """
    scale = np.maximum(np.abs(weight).max(axis=1, keepdims=True), 1e-12) / 127.0
    return np.rint(weight / scale).astype(np.int8), scale.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What all layers share: the rotation, the mask, the order of the beams, the batch size; nodes of the graph."""

    turn: Callable[[Any], Any]
    mask: Any
    beam_idx: Any
    batch: Any


class Graph:
    """Builds the graph; every method returns a node."""

    def __init__(self, weights: LlamaWeights, store: str) -> None:
        import openvino as ov
        from openvino import opset13

        if store not in STORES:
            raise ValueError(f"precision {store!r} is not one of {', '.join(STORES)}")
        self.ov, self.op = ov, opset13
        self.weights, self.shape, self.store = weights, weights.shape, store
        self.sinks: list[Any] = []

    def const(self, values: Any, kind: Any = np.int64) -> Any:
        return self.op.constant(np.array(values, dtype=kind))

    def matrix(self, name: str) -> Any:
        """A weight matrix, kept as stored until a kernel reads it."""
        if self.store == "int8":
            q, scale = int8_rows(self.weights.f32(name))
            wide = self._kept(self.op.convert(self.op.constant(q), "f32"))
            return self.op.multiply(wide, self.op.constant(scale))
        data, kind = self.weights.stored(name)
        if self.store == "bfloat16" and kind == "BF16":
            tensor = self.ov.Tensor(np.ascontiguousarray(data), self.ov.Shape(data.shape), self.ov.Type.bf16)
            return self._kept(self.op.convert(self.op.constant(tensor, shared_memory=False), "f32"))
        if self.store == "float16" or (self.store == "bfloat16" and kind == "F16"):
            return self._kept(self.op.convert(self.op.constant(self.weights.f32(name).astype(np.float16)), "f32"))
        return self.op.constant(self.weights.f32(name))

    @staticmethod
    def _kept(node: Any) -> Any:
        node.get_rt_info()["decompression_0"] = ""  # the mark of weights that are not to be folded to float32
        return node

    def linear(self, x: Any, name: str) -> Any:
        return self.op.matmul(x, self.matrix(name), False, True)

    def norm(self, x: Any, name: str) -> Any:
        op = self.op
        squares = op.reduce_mean(op.power(x, self.const([[[2.0]]], np.float32)), self.const([-1]), True)
        root = op.sqrt(op.add(squares, self.const([[[self.shape.eps]]], np.float32)))
        scaled = op.multiply(x, op.divide(self.const([[[1.0]]], np.float32), root))
        return op.multiply(scaled, self.op.constant(self.weights.f32(name)[None, None]))

    def angles(self, position_ids: Any) -> tuple[Any, Any]:
        """cos and sin, (batch, 1, length, head_dim)."""
        op, s = self.op, self.shape
        half = np.arange(0, s.head_dim, 2, dtype=np.float64) / s.head_dim
        inverse = (1.0 / (s.theta**half * np.array(s.factors))).astype(np.float32)
        places = op.convert(op.unsqueeze(position_ids, self.const(1)), "f32")
        turned = op.matmul(op.constant(inverse.reshape(1, -1, 1)), places, False, False)
        angle = op.transpose(turned, self.const([0, 2, 1]))
        both = op.concat([angle, angle], -1)
        return op.unsqueeze(op.cos(both), self.const(1)), op.unsqueeze(op.sin(both), self.const(1))

    def rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        op, half = self.op, self.shape.head_dim // 2
        first, one, axis = self.const([0]), self.const([1]), self.const([3])
        low = op.slice(x, first, self.const([half]), one, axis)
        high = op.slice(x, self.const([half]), self.const([np.iinfo(np.int64).max]), one, axis)
        turned = op.concat([op.multiply(high, self.const([[[[-1.0]]]], np.float32)), low], -1)
        return op.add(op.multiply(x, cos), op.multiply(turned, sin))

    def heads(self, x: Any, count: int) -> Any:
        split = self.op.reshape(x, self.const([0, 0, count, self.shape.head_dim]), True)
        return self.op.transpose(split, self.const([0, 2, 1, 3]))

    def cached(self, new: Any, name: str, inputs: LayerInputs) -> Any:
        """The layer's past, reordered by beam, with the new positions behind it; (batch, kv heads, all, head_dim)."""
        op, s = self.op, self.shape
        info = self.ov.op.util.VariableInfo()
        info.data_shape = self.ov.PartialShape([-1, s.kv_heads, -1, s.head_dim])
        info.data_type, info.variable_id = self.ov.Type.f32, name
        variable = self.ov.op.util.Variable(info)
        shape = op.concat([inputs.batch, self.const([s.kv_heads]), self.const([0]), self.const([s.head_dim])], 0)
        empty = op.broadcast(self.const(0.0, np.float32), shape)
        past = op.gather(self.ov.op.read_value(empty, variable), inputs.beam_idx, self.const(0))
        joined = op.concat([past, new], 2)
        self.sinks.append(self.ov.op.assign(joined, variable))
        return joined

    def spread(self, x: Any) -> Any:
        """Every key or value head repeated for the query heads of its group."""
        op, s = self.op, self.shape
        group = s.heads // s.kv_heads
        if group == 1:
            return x
        shape = op.concat(
            [op.gather(op.shape_of(x), self.const([0, 1]), self.const(0)), self.const([group]),
             op.gather(op.shape_of(x), self.const([2, 3]), self.const(0))], 0,
        )  # fmt: skip
        wide = op.broadcast(op.unsqueeze(x, self.const(2)), shape, "BIDIRECTIONAL")
        return op.reshape(wide, self.const([0, s.heads, -1, s.head_dim]), True)

    def layer(self, x: Any, index: int, inputs: LayerInputs) -> Any:
        op, s, at, turn = self.op, self.shape, f"model.layers.{index}", inputs.turn
        y = self.norm(x, f"{at}.input_layernorm.weight")
        query = turn(self.heads(self.linear(y, f"{at}.self_attn.q_proj.weight"), s.heads))
        key = turn(self.heads(self.linear(y, f"{at}.self_attn.k_proj.weight"), s.kv_heads))
        value = self.heads(self.linear(y, f"{at}.self_attn.v_proj.weight"), s.kv_heads)
        keys = self.spread(self.cached(key, f"past_key_values.{index}.keypresent.{index}.key", inputs))
        values = self.spread(self.cached(value, f"past_key_values.{index}.valuepresent.{index}.value", inputs))
        seen = op.scaled_dot_product_attention(query, keys, values, inputs.mask)
        merged = op.reshape(
            op.transpose(seen, self.const([0, 2, 1, 3])), self.const([0, 0, s.heads * s.head_dim]), True
        )
        x = op.add(x, self.linear(merged, f"{at}.self_attn.o_proj.weight"))
        y = self.norm(x, f"{at}.post_attention_layernorm.weight")
        gate = op.swish(self.linear(y, f"{at}.mlp.gate_proj.weight"))
        inner = op.multiply(gate, self.linear(y, f"{at}.mlp.up_proj.weight"))
        return op.add(x, self.linear(inner, f"{at}.mlp.down_proj.weight"))

    def mask(self, input_ids: Any, attention_mask: Any) -> Any:
        """(batch, 1, length, all) float32: 0 where a row may look, a large negative number elsewhere."""
        op = self.op
        total = op.gather(op.shape_of(attention_mask), self.const(1), self.const(0))
        new = op.gather(op.shape_of(input_ids), self.const(1), self.const(0))
        columns = op.range(self.const(0), total, self.const(1), "i64")
        rows = op.range(op.subtract(total, new), total, self.const(1), "i64")
        causal = op.less_equal(op.unsqueeze(columns, self.const(0)), op.unsqueeze(rows, self.const(1)))
        real = op.unsqueeze(op.convert(attention_mask, "boolean"), self.const([1, 2]))
        allowed = op.logical_and(op.unsqueeze(causal, self.const([0, 1])), real)
        return op.select(allowed, self.const(0.0, np.float32), self.const(np.finfo(np.float32).min, np.float32))

    def tokenizer(self) -> Any:
        """Makes token 0 of any text; a pipeline with a draft wants a tokenizer, although all prompts are ids."""
        op = self.op
        text = op.parameter(self.ov.PartialShape([-1]), self.ov.Type.string)
        shape = op.concat([op.shape_of(text), self.const([1])], 0)
        ids, mask = op.broadcast(self.const(0), shape), op.broadcast(self.const(1), shape)
        made = self.ov.Model([op.result(ids), op.result(mask)], [text], "tokenizer")
        text.output(0).get_tensor().set_names({"string_input"})
        for index, name in enumerate(("input_ids", "attention_mask")):
            made.output(index).get_tensor().set_names({name})
        return made

    def model(self) -> Any:
        """The whole graph."""
        op, s = self.op, self.shape
        pair = self.ov.PartialShape([-1, -1])
        input_ids, attention_mask, position_ids = (op.parameter(pair, np.int64) for _ in range(3))
        beam_idx = op.parameter(self.ov.PartialShape([-1]), np.int32)
        inputs = [input_ids, attention_mask, position_ids, beam_idx]
        batch = op.gather(op.shape_of(input_ids), self.const([0]), self.const(0))
        embedding = self.matrix("model.embed_tokens.weight")
        x = op.gather(embedding, op.convert(input_ids, "i32"), self.const(0))
        cos, sin = self.angles(position_ids)
        mask = self.mask(input_ids, attention_mask)
        shared = LayerInputs(turn=lambda y: self.rotated(y, cos, sin), mask=mask, beam_idx=beam_idx, batch=batch)
        for index in range(s.layers):
            x = self.layer(x, index, shared)
        x = self.norm(x, "model.norm.weight")
        head = embedding if s.tied else self.matrix("lm_head.weight")
        logits = op.matmul(x, head, False, True)
        model = self.ov.Model([op.result(logits)], self.sinks, inputs, "llama")
        for node, name in zip(inputs, INPUTS, strict=True):
            node.set_friendly_name(name)  # the paged attention looks for these names
            node.output(0).get_tensor().set_names({name})
        model.output(0).get_tensor().set_names({"logits"})
        return model


def write_openvino(weights: LlamaWeights, folder: Path, store: str) -> None:
    """Write openvino_model.xml and .bin; `store` is one of STORES.

    Raises:
        ValueError: another store.
    """
    graph = Graph(weights, store)
    graph.ov.save_model(graph.model(), str(folder / "openvino_model.xml"), compress_to_fp16=False)
    graph.ov.save_model(graph.tokenizer(), str(folder / "openvino_tokenizer.xml"), compress_to_fp16=False)
