"""Training of LongSpec's head: a decoder layer with a sliding window that attends to the target's last keys and values.

    row j reads the embedding of token j, and predicts token j + 1
    self-attention: token j and `sliding_window` tokens before it
    cross-attention: the target's keys and values of the tokens up to j - s           (b, t, 2 g, e)
    loss: cross-entropy against the target's distribution of the token, over the draft vocabulary

*Flash noisy training*: at depth k of a draft the newest token that the target has cached lies k + 1 tokens back, so
that s is drawn from 1 to `max_shift` in each step; it is judged at depth k with s = k + 1. *Anchor-offset positions*:
the first 0 to `max_sinks` positions of a text stay as they are, the others move on by a random number, so that a head
which has learned from short texts has seen distances as there are in long ones. The target reads its texts once, at
their own positions; its keys are rotated on with the tokens, which for rotary embeddings is the same but for what it
would have made of its sinks.

Source: LongSpec: long-context lossless speculative decoding with efficient drafting and verification
(arXiv:2502.17421); what the paper leaves open as in sail-sg/LongSpec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.config import documented, option
from paceline.errors import CapabilityError
from paceline.models import LastKeys, ShowsLastKeys
from paceline.models.heads import HeadConfig
from paceline.training.batches import Batch, Document, TargetView
from paceline.training.heads import HeadTrainer, layer_of
from paceline.training.layer import RMSNorm, TrainableDecoderLayer
from paceline.training.train_config import TrainConfig

if TYPE_CHECKING:
    from paceline.llm import LLM
    from paceline.models import ModelInfo, Runner

LONGEST: Final = 30_000
"""Position up to which texts are moved where nobody says so and the model's context allows it."""

PART: Final = "last_keys"
"""What the target's keys and values are called on disk."""


@documented
@dataclass(frozen=True, kw_only=True)
class LongSpecConfig(TrainConfig):
    """Says what a row of a LongSpec head sees while it is trained."""

    sliding_window: int = option(512, "Tokens before its own that a row's self-attention sees.", low=1)
    max_shift: int = option(
        4, "Most tokens that the model's newest key lies behind a row's token; drawn from 1 on.", low=1, high=64
    )
    max_sinks: int = option(4, "Most positions at the beginning of a text that are not moved.", low=0)
    longest_position: int | None = option(
        None, "Up to which texts are moved; the model's context, 30,000 at most, by default, 0 moves none.", low=0
    )


class KeysView(TargetView):
    """What a LongSpec head reads of its target: taps are the keys and values of the last layer, (b, t, 2 g * e).

    Raises:
        CapabilityError: the target does not show them.
    """

    def __init__(self, runner: Runner, vocabulary: Tensor, *, keep_bytes: int) -> None:
        if not isinstance(runner, ShowsLastKeys):
            raise CapabilityError(
                f"training longspec needs the keys and values of the model's last layer, which {runner.info.name} does "
                "not show as it runs here; use another model or method"
            )
        super().__init__(runner, (), vocabulary, keep_bytes=keep_bytes)
        self.keys: LastKeys = runner.last_keys

    @property
    def parts(self) -> Sequence[int | str]:
        return (PART,)

    @property
    def width(self) -> int:
        return 2 * self.keys.kv_heads * self.keys.head_dim

    def _computed(self, documents: Sequence[Document]) -> Iterator[tuple[Tensor, ...]]:
        last = self.runner.info.num_layers
        for document in documents:
            cache = self.runner.open()
            try:
                final = self.runner.extend([cache], [document.tokens], taps=(last,)).taps[last]
                yield self.keys.read(cache).flatten(1).clone(), final.clone()
            finally:
                self.runner.release(cache)


class LongSpecLayer(TrainableDecoderLayer):
    """Self-attention, attention to the target's keys and values, and an MLP."""

    def __init__(self, layer: Mapping[str, Any], hidden: int) -> None:
        super().__init__(layer, hidden, hidden)
        width, eps = self.heads * self.head_dim, layer.get("rms_norm_eps") or 1e-6
        self.input_layernorm, self.cross_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.cross_attn = nn.ModuleDict({
            "q_proj": nn.Linear(hidden, width, bias=False), "o_proj": nn.Linear(width, hidden, bias=False)
        })  # fmt: skip

    def cross(self, x: Tensor, keys: LastKeys, positions: Tensor, source: Tensor, visible: Tensor) -> Tensor:
        """(b, t, hidden) what attention to keys and values (b, t, 2 g, e) adds to x (b, t, hidden), as far as they are
        visible (b, t, t); nothing where none is.
        """
        b, t, _ = x.shape
        queries = self.cross_attn["q_proj"](self.cross_layernorm(x)).view(b * t, self.heads, self.head_dim)
        queries = keys.turned(queries, positions.flatten().tolist()).view(b, t, self.heads, -1).transpose(1, 2)
        own, values = (
            part.transpose(1, 2).repeat_interleave(self.heads // self.groups, 1).to(queries.dtype)
            for part in source.chunk(2, 2)
        )
        some = visible.any(-1, keepdim=True)
        mixed = F.scaled_dot_product_attention(queries, own, values, (visible | ~some)[:, None])
        attended: Tensor = self.cross_attn["o_proj"]((mixed.transpose(1, 2).flatten(2) * some).to(queries.dtype))
        return attended


class LongSpecTrainer(HeadTrainer):
    """Trains a head whose memory is constant, for texts longer than those that it learns from.

    Args:
        config: of the head. rows: of the target's head, for the draft vocabulary. keys: the target's.
        settings: what rows see; `depths` are `max_shift` by default.
    """

    name: ClassVar[str] = "longspec"
    config_class: ClassVar[type[TrainConfig]] = LongSpecConfig

    def __init__(self, config: HeadConfig, rows: Tensor, keys: LastKeys, settings: LongSpecConfig) -> None:
        super().__init__(config, rows)
        self.settings, self.keys, self.depths = settings, keys, settings.depths or settings.max_shift
        self.layers = nn.ModuleList([LongSpecLayer(config.layer, config.hidden_size)])

    @classmethod
    def init(cls, llm: LLM, config: TrainConfig, vocabulary: Tensor) -> tuple[LongSpecTrainer, TargetView]:
        assert isinstance(config, LongSpecConfig)
        view, info = KeysView(llm.runner, vocabulary, keep_bytes=config.feature_cache_bytes), llm.runner.info
        head_config = cls.config_of(info, layer_of(llm.runner), len(vocabulary), 1)
        head_config = replace(head_config, sliding_window=config.sliding_window)
        longest = min(LONGEST, info.max_context) if config.longest_position is None else config.longest_position
        return cls(head_config, view.rows, view.keys, replace(config, longest_position=longest)), view

    @classmethod
    def config_of(cls, target: ModelInfo, layer: Mapping[str, Any], draft_vocab_size: int, depths: int) -> HeadConfig:
        return HeadConfig(
            method="longspec",
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            layer=layer,
            sliding_window=LongSpecConfig.sliding_window,
        )

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        shift = 1 + int(torch.randint(self.settings.max_shift, (1,), generator=generator))
        states = self.states(batch, shift, self.moved(batch, generator))
        at, columns = batch.learned(shift + 1)
        at = at[columns >= 0] + shift
        return self.soft_targets(batch).loss(states.flatten(0, 1)[at], self.rows, at + 1) / max(1, len(at))

    def predict(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        for depth in range(self.depths):
            at, _ = batch.learned(depth + 2)
            states = self.states(batch, depth + 1, torch.zeros_like(batch.positions)).flatten(0, 1)
            yield at, self.logits(states[at + depth + 1]).argmax(-1)

    def states(self, batch: Batch, shift: int, moved: Tensor) -> Tensor:
        """(b, t, d) behind the layer, where the newest of the target's keys lies `shift` tokens back.

        Args:
            moved: (b, t) int64 how much further on each token stands than in its text.
        """
        layer, x, positions = cast(LongSpecLayer, self.layers[0]), batch.embedded, batch.positions + moved
        visible, window = batch.visible(), self.config.sliding_window or 0
        places = torch.arange(x.shape[1], device=x.device)
        back = places[:, None] - places
        q, own = layer.read(layer.input_layernorm(x), positions)
        x = x + layer.attend(q, own, (), visible & (back <= window))
        seen = visible & (back >= shift)
        return layer.finish(x, layer.cross(x, self.keys, positions, self.source(batch, moved), seen))

    def source(self, batch: Batch, moved: Tensor) -> Tensor:
        """(b, t, 2 g, e) the target's keys and values, keys rotated on by so many positions (b, t)."""
        b, t = batch.tokens.shape
        found = batch.taps.view(b * t, -1, self.keys.head_dim)
        keys, values = found.chunk(2, 1)
        scale = self.keys.turned(torch.ones_like(keys[:1, :1]), [0])  # which the cached keys have already
        keys = self.keys.turned(keys, moved.flatten().tolist()) / scale
        return torch.cat((keys, values), 1).view(b, t, -1, self.keys.head_dim)

    def moved(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """(b, t) int64 how much further on each token stands: 0 for the sinks of its document, a random number of the
        document's own for the others.
        """
        (b, t), device, most = batch.tokens.shape, batch.tokens.device, int(batch.documents.max()) + 1
        room = max(0, (self.settings.longest_position or 0) - t)
        offsets = torch.randint(room + 1, (b, max(1, most)), generator=generator).to(device)
        sinks = torch.randint(self.settings.max_sinks + 1, (b, max(1, most)), generator=generator).to(device)
        number = batch.documents.clamp(min=0)
        return torch.where(batch.positions >= sinks.gather(1, number), offsets.gather(1, number), 0)
