"""LongSpec's head: a decoder layer that also attends to the keys and values of the target's last layer, so that what it
keeps of a text is as large for a long one as for a short one.

    x = embedding of the token                                                          (r, hidden)
    x += self-attention of norm(x): over the tokens of a window before it, and itself
    x += cross-attention of cross_norm(x): queries over what the target has cached      (n, 2 g, e) of committed tokens
    x += MLP of norm(x)
    logits = head(x), the target's, without its final norm

Keys and values of self-attention depend on a token and its position alone. Those of a text's last tokens are kept, as
many as the window has, and those of what is drafted while it is drafted; drafts see each other as a tree's nodes do.
The target's are those of all tokens but the root and what is drafted behind it: the newest one at depth k lies k + 1
tokens back, as in training. They are read where they lie: by compiled passes, where such run the target, and else by
PyTorch's operators, which make the rest of the layer in any case.

Source: LongSpec: long-context lossless speculative decoding with efficient drafting and verification
(arXiv:2502.17421); what the paper leaves open as in sail-sg/LongSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from paceline.errors import CapabilityError, CheckpointError
from paceline.models.abilities import LastKeys, ShowsLastKeys
from paceline.models.attention.segments import Segment, TreeShape
from paceline.models.attention.source_attention import attend_over
from paceline.models.base import Runner, SequenceCache
from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.head_files import read_head
from paceline.models.heads.shared_rows import embedding_of, head_of
from paceline.models.layers.decoder import CrossAttention, PackedLayer
from paceline.models.layers.linear import Map, make_linear
from paceline.models.layers.own_weights import OwnWeights, Weights
from paceline.models.layers.rope import Rotary
from paceline.models.passes.eligibility import fits
from paceline.models.runners.feature_head import own_head_rows
from paceline.models.runners.last_keys import ArenaKeys
from paceline.models.runners.state_layer import layer_spec, of_layer
from paceline.models.spec import AttentionShape, LayerSpec, ModelSpec, attention_shape
from paceline.models.state.parts import keys_of

CROSS: Final = {"cross_attn.q_proj": "cross_q", "cross_attn.o_proj": "cross_o", "cross_layernorm": "cross_norm"}
FIRST_HALF: Final = ("attn_norm", "qkv", "o")
"""Canonical weights of self-attention."""

Half = Callable[[torch.Tensor, Sequence["DraftInputs"]], torch.Tensor]
"""States (r, hidden) behind the layer, of those behind its self-attention and the drafts that they belong to."""


class DraftInputs:
    """What is drafted behind one text: inputs, the root first, each of which sees the text and its ancestors.

    Args:
        length: of the text before the root, which is at that position.
        window: (k, 2 g, e) the head's keys and values of the text's last k tokens.
        cache: the target's, of the text before the root.
        most: tokens before an input that its self-attention sees.
    """

    __slots__ = ("_done", "_drafted", "_length", "_most", "_paths", "_tokens", "_window", "cache")

    def __init__(self, length: int, window: torch.Tensor, cache: SequenceCache, most: int) -> None:
        self._length, self._window, self._most, self.cache = length, window, most, cache
        self._tokens: list[int] = []
        self._paths: list[tuple[int, ...]] = []
        self._drafted, self._done = window[:0], 0

    def feed(self, token: int, parent: int = -1) -> int:
        """Add an input behind the one at place `parent`, -1 for the root; its place."""
        place = len(self._tokens)
        self._tokens.append(token)
        self._paths.append((place,) if parent < 0 else (*self._paths[parent], place))
        return place

    @property
    def fed(self) -> Sequence[int]:
        """Tokens of the inputs that wait for the next pass."""
        return self._tokens[self._done :]

    @property
    def positions(self) -> list[int]:
        """Of these."""
        return [self._length + len(path) - 1 for path in self._paths[self._done :]]

    def keep(self, keys_values: torch.Tensor) -> torch.Tensor:
        """Take (r, 2 g, e) keys and values of these; (s, 2 g, e) those of the window and of all inputs."""
        self._drafted = torch.cat((self._drafted, keys_values))
        return torch.cat((self._window, self._drafted))

    def done(self) -> None:
        """The pass over these is over."""
        self._done = len(self._tokens)

    def mask(self, like: torch.Tensor) -> torch.Tensor | None:
        """(r, s) what is added to their scores; None where they see everything."""
        rows, known, inputs = self._paths[self._done :], len(self._window), len(self._tokens)
        sees = np.zeros((len(rows), known + inputs), np.bool_)
        for row, path in zip(sees, rows, strict=True):
            row[max(0, known + len(path) - 1 - self._most) : known] = True
            row[[known + place for place in path]] = True
        if sees.all():
            return None
        return like.new_zeros(sees.shape).masked_fill_(torch.from_numpy(~sees).to(like.device), -torch.inf)


class LongSpecHead:
    """One head for one target.

    Args:
        weights: by the names of `tensors_of`, on the target's device; taken out as they are packed.
        name: of the head, for messages.
    Attributes:
        source: the target's keys and values.
        tokens: (n,) int64 the target's token of each column of logits; None where that is the column itself.
        window: tokens of a text whose keys and values are kept. token_bytes: of one of them.
        none: (0, 2 g, e) those of an empty text.
        passes: what attends to the target's keys: "compiled", or PyTorch's "operators".
    Raises:
        CapabilityError: a target that does not show its last keys, or gives no embedding or head where the head has
            none.
        CheckpointError: other attention heads than the target's, or rotary angles that depend on the text's length.
    """

    def __init__(self, config: HeadConfig, weights: Weights, target: Runner, *, name: str) -> None:
        self.source, info = _source(target, config, name), target.info
        self.window = config.sliding_window or 0
        self.tokens = weights.pop("draft_to_target", None)
        self._embed = embedding_of(weights.pop("embed.weight", None), target, name)
        self._to_logits = _to_logits(weights, target, self.tokens, name)
        spec, layer = layer_spec(config, weights, "layers.0."), _layer(weights)
        first = replace(spec, layers=(LayerSpec(mlp=False),))
        self._shape = attention_shape(first)
        self._rotary = Rotary(first.ropes, info.device, info.dtype)
        if self._rotary.depends_on_length:
            raise CheckpointError(f"the head {name} has rotary angles that depend on the text's length; train it anew")
        own = {one: layer.pop(one) for one in list(layer) if one.split(".")[0] in FIRST_HALF}
        self._attention = PackedLayer(first, self._shape, 0, OwnWeights(own, "", first, False, info.dtype))
        self._rest, self.passes = _second_half(spec, layer, self.source, target)
        self.none = torch.empty(0, 2 * config.kv_heads, config.head_dim, device=info.device, dtype=info.dtype)
        self.token_bytes = self.none.shape[1] * self.none.shape[2] * self.none.itemsize

    @classmethod
    def load(cls, head: str | Path, target: Runner, *, tokenizer: Callable[[], str] = str) -> LongSpecHead:
        """The head in a folder, or of a hub id.

        Args:
            tokenizer: as of `read_head`.
        Raises:
            CheckpointError: as `read_head`, or a head of another method. CapabilityError: as above.
        """
        config, weights = read_head(head, target.info, tokenizer=tokenizer)
        if config.method != "longspec":
            raise CheckpointError(f"the head {head} is of method {config.method!r}, not 'longspec'; name that one")
        return cls(config, weights, target, name=str(head))

    @torch.inference_mode()
    def known(self, texts: Sequence[Sequence[int]], firsts: Sequence[int]) -> list[torch.Tensor]:
        """(k, 2 g, e) keys and values of known tokens, the first of each text at its position."""
        positions = [first + i for text, first in zip(texts, firsts, strict=True) for i in range(len(text))]
        taken = _Taken(self._shape)
        self._attention.write_keys(
            self._embedded([token for text in texts for token in text]), taken, self._rotary.at(positions, ())
        )
        return list(taken.keys_values.split([len(text) for text in texts]))

    @torch.inference_mode()
    def step(self, drafts: Sequence[DraftInputs]) -> torch.Tensor:
        """(r, n) logits behind the inputs that were fed since the last pass, draft by draft."""
        rotations = self._rotary.at([position for draft in drafts for position in draft.positions], ())
        x = self._embedded([token for draft in drafts for token in draft.fed])
        self._attention.run(x, _Window(self._shape, drafts), rotations)
        states = self._rest(x, drafts)
        for draft in drafts:
            draft.done()
        return self._to_logits(states)

    def opened(self, length: int, window: torch.Tensor, cache: SequenceCache) -> DraftInputs:
        """A draft that has no inputs yet; see there."""
        return DraftInputs(length, window, cache, self.window)

    def _embedded(self, tokens: Sequence[int]) -> torch.Tensor:
        """(r, hidden) new tensor, which the layer works on."""
        return self._embed(tokens).to(self.none.dtype, copy=True)


class _Taken:
    """Takes keys and values out of a pass (`KeyWriter`)."""

    def __init__(self, shape: AttentionShape) -> None:
        self._heads = shape.heads
        self.keys_values = torch.empty(0)

    def write(self, layer: int, qkv: torch.Tensor) -> None:
        """See `KeyWriter`."""
        self.keys_values = qkv[:, self._heads :].clone()


class _Window:
    """Self-attention of a pass, draft by draft (`AttentionStep`)."""

    def __init__(self, shape: AttentionShape, drafts: Sequence[DraftInputs]) -> None:
        self._shape, self._drafts = shape, drafts

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep.attend`; there are no sinks."""
        heads, found = self._shape.heads, []
        for draft, part in zip(self._drafts, qkv.split([len(draft.fed) for draft in self._drafts]), strict=True):
            seen = draft.keep(part[:, heads:])
            found.append(attend_over(self._shape, part[:, :heads], seen, draft.mask(seen)))
        return torch.cat(found)


class _ByOperators:
    """The layer behind its self-attention, by PyTorch's operators."""

    def __init__(self, spec: ModelSpec, weights: Weights, keys: LastKeys, dtype: torch.dtype) -> None:
        own = OwnWeights(weights, "", spec, False, dtype)
        self._shape, self._keys = attention_shape(spec), keys
        self._cross = CrossAttention(spec, self._shape, 0, own)
        self._norm, self._mlp = own.norm("mlp_norm") or torch.clone, own.mlp()

    def __call__(self, x: torch.Tensor, drafts: Sequence[DraftInputs]) -> torch.Tensor:
        self._cross.run(x, _Source(self._shape, self._keys, drafts))
        return x.add_(self._mlp(self._norm(x)))


class _Source:
    """Cross-attention of a pass: each input sees all that the target has cached of its text (`ReadsSource`)."""

    def __init__(self, shape: AttentionShape, keys: LastKeys, drafts: Sequence[DraftInputs]) -> None:
        self._shape, self._keys, self._drafts = shape, keys, drafts

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """See `ReadsSource`."""
        positions = [draft.positions for draft in self._drafts]
        turned = self._keys.turned(queries, [position for own in positions for position in own])
        parts = turned.split([len(own) for own in positions])
        return torch.cat([
            attend_over(self._shape, part, self._keys.read(draft.cache))
            for part, draft in zip(parts, self._drafts, strict=True)
        ])  # fmt: skip


class _Compiled:
    """The layer behind its self-attention, in compiled passes over the target's blocks."""

    def __init__(self, spec: ModelSpec, weights: Weights, keys: ArenaKeys) -> None:
        from paceline.models.passes.compiled_source import CompiledSource

        self._passes = CompiledSource(spec, weights, keys.arena, keys.layer, keys.rope)

    def __call__(self, x: torch.Tensor, drafts: Sequence[DraftInputs]) -> torch.Tensor:
        return self._passes.states([self._segment(draft) for draft in drafts], x)

    def _segment(self, draft: DraftInputs) -> Segment:
        state: Any = draft.cache
        cache, positions = keys_of(state), np.array(draft.positions)
        count = len(positions)
        return Segment(cache, count, tree=TreeShape(positions - cache.length, np.ones((count, count), np.bool_)))


def _second_half(spec: ModelSpec, weights: Weights, keys: LastKeys, target: Runner) -> tuple[Half, str]:
    """The layer behind its self-attention, and what runs it."""
    info = target.info
    if isinstance(keys, ArenaKeys) and info.passes == "compiled" and fits(spec, info.dtype, info.device):
        return _Compiled(spec, weights, keys), "compiled"
    return _ByOperators(spec, weights, keys, info.dtype), "operators"


def _source(target: Runner, config: HeadConfig, name: str) -> LastKeys:
    """What the target shows, which must have the head's attention heads."""
    if not isinstance(target, ShowsLastKeys):
        raise CapabilityError(
            f"the head {name} reads the keys and values of the target's last layer, which {target.info.name} does not "
            "show as it runs here; use another method"
        )
    its, own = (target.last_keys.kv_heads, target.last_keys.head_dim), (config.kv_heads, config.head_dim)
    if its != own:
        raise CheckpointError(
            f"the head {name} has {own[0]} key-value heads of {own[1]} dimensions, but {target.info.name} has {its[0]} "
            f"of {its[1]}; use one that was trained for this model"
        )
    return target.last_keys


def _to_logits(weights: Weights, target: Runner, tokens: torch.Tensor | None, name: str) -> Map:
    """The head's rows, or else the target's, without a norm."""
    rows = own_head_rows(weights, target, tokens, name=name)
    if rows is not None:
        return make_linear(rows, row_invariant=False)
    head = head_of(target, name).head
    return lambda states: head(states, norm=False)


def _layer(weights: Weights) -> Weights:
    """The layer's weights by the decoder's names."""
    layer = of_layer(weights, "layers.0.", "")
    for stored, name in CROSS.items():
        for kind in ("weight", "bias"):
            if (weight := weights.get(f"layers.0.{stored}.{kind}")) is not None:
                layer[f"{name}.{kind}"] = weight
    return layer
