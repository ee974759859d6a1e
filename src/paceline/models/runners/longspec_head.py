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
tokens back, as in training. They are read where they lie.

Source: LongSpec: long-context lossless speculative decoding with efficient drafting and verification
(arXiv:2502.17421); what the paper leaves open as in sail-sg/LongSpec.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from paceline.errors import CapabilityError, CheckpointError
from paceline.models.abilities import LastKeys, ShowsLastKeys
from paceline.models.attention.source_attention import attend_over
from paceline.models.base import Runner
from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.head_files import read_head
from paceline.models.heads.shared_rows import embedding_of, head_of
from paceline.models.layers.decoder import PackedLayer
from paceline.models.layers.linear import Map, make_linear
from paceline.models.layers.own_weights import OwnWeights, Weights
from paceline.models.layers.rope import Rotary
from paceline.models.runners.feature_head import own_head_rows
from paceline.models.runners.state_layer import layer_spec, of_layer
from paceline.models.spec import AttentionShape, EncoderSpec, attention_shape

CROSS = {"cross_attn.q_proj": "cross_q", "cross_attn.o_proj": "cross_o", "cross_layernorm": "cross_norm"}


class DraftInputs:
    """What is drafted behind one text: inputs, the root first, each of which sees the text and its ancestors.

    Args:
        length: of the text before the root, which is at that position.
        window: (k, 2 g, e) the head's keys and values of the text's last k tokens.
        source: (n, 2 g, e) those of the target's last layer, of the text's first n tokens.
        most: tokens before an input that its self-attention sees.
    """

    __slots__ = ("_done", "_drafted", "_length", "_most", "_paths", "_tokens", "_window", "source")

    def __init__(self, length: int, window: torch.Tensor, source: torch.Tensor, most: int) -> None:
        self._length, self._window, self._most, self.source = length, window, most, source
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

    def mask(self, like: torch.Tensor) -> torch.Tensor | None:
        """(r, s) what is added to their scores, and they are done; None where they see everything."""
        rows, known, inputs = self._paths[self._done :], len(self._window), len(self._tokens)
        self._done = inputs
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
        tokens: (n,) int64 the target's token of each column of logits; None where that is the column itself.
        window: tokens of a text whose keys and values are kept. token_bytes: of one of them.
    Raises:
        CapabilityError: a target that does not show its last keys, or gives no embedding or head where the head has
            none.
        CheckpointError: other attention heads than the target's, or rotary angles that depend on the text's length.
    """

    def __init__(self, config: HeadConfig, weights: Weights, target: Runner, *, name: str) -> None:
        self.source = _source(target, config, name)
        self.window = config.sliding_window or 0
        self.tokens = weights.pop("draft_to_target", None)
        self._embed = embedding_of(weights.pop("embed.weight", None), target, name)
        self._to_logits = _to_logits(weights, target, self.tokens, name)
        spec = layer_spec(config, weights, "layers.0.")
        own = replace(spec, encoder=EncoderSpec(model=spec))  # a layer that attends to something else as well
        self._shape, info = attention_shape(own), target.info
        self._rotary = Rotary(own.ropes, info.device, info.dtype)
        if self._rotary.depends_on_length:
            raise CheckpointError(f"the head {name} has rotary angles that depend on the text's length; train it anew")
        self._layer = PackedLayer(own, self._shape, 0, OwnWeights(_layer(weights), "", own, False, info.dtype))
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
        self._layer.write_keys(
            self._embedded([token for text in texts for token in text]), taken, self._rotary.at(positions, ())
        )
        return list(taken.keys_values.split([len(text) for text in texts]))

    @torch.inference_mode()
    def step(self, drafts: Sequence[DraftInputs]) -> torch.Tensor:
        """(r, n) logits behind the inputs that were fed since the last pass, draft by draft."""
        positions = [draft.positions for draft in drafts]
        x = self._embedded([token for draft in drafts for token in draft.fed])
        source = _Source(self._shape, self.source, [draft.source for draft in drafts], positions)
        rotations = self._rotary.at([position for own in positions for position in own], ())
        self._layer.run(x, _Window(self._shape, drafts), rotations, source=source)
        return self._to_logits(x)

    def opened(self, length: int, window: torch.Tensor, source: torch.Tensor) -> DraftInputs:
        """A draft that has no inputs yet; see there."""
        return DraftInputs(length, window, source, self.window)

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
        self._shape, self._drafts, self._rows = shape, drafts, [len(draft.fed) for draft in drafts]

    def attend(self, layer: int, qkv: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See `AttentionStep.attend`; there are no sinks."""
        heads, found = self._shape.heads, []
        for draft, part in zip(self._drafts, qkv.split(self._rows), strict=True):
            seen = draft.keep(part[:, heads:])
            found.append(attend_over(self._shape, part[:, :heads], seen, draft.mask(seen)))
        return torch.cat(found)


class _Source:
    """Cross-attention of a pass: each input sees all that there is of its text (`ReadsSource`)."""

    def __init__(
        self,
        shape: AttentionShape,
        keys: LastKeys,
        sources: Sequence[torch.Tensor],
        positions: Sequence[Sequence[int]],
    ) -> None:
        self._shape, self._keys, self._sources, self._positions = shape, keys, sources, positions

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """See `ReadsSource`; nothing is seen of an empty text."""
        rows = [len(own) for own in self._positions]
        turned = self._keys.turned(queries, [position for own in self._positions for position in own]).split(rows)
        return torch.cat(
            [
                attend_over(self._shape, part, seen) if len(seen) else part.new_zeros(len(part), part[0].numel())
                for part, seen in zip(turned, self._sources, strict=True)
            ]
        )


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
