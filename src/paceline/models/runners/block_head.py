"""Heads that draft a whole block in one pass (DFlash, DSpark): decoder layers whose rows see each other both ways, and
in each layer keys and values that are made of the target's states.

    c = norm(fc [states of the taps])                                           (r, hidden) of committed tokens
    keys and values of c in every layer, by the layer's own projections, k norm and angles, with no norm before them
    block = [text's last token, mask, mask, ...]                                (block_size, hidden) embeddings
    layers over the block: every row sees all of c and the whole block
    logits = head(norm(states)); row i says the token at its own place, or, with `sample_from_anchor`, the one behind it

Keys and values of committed tokens stay in the cache, one position for each; those of a block never do. So a step costs
the same however long the text is, but for attention. The cache begins where the first state is known, which is no loss
for rotary embeddings: they are relative. The layers run as a model of as many layers does (models.runners.native), so
in compiled passes on CPUs; what is made of the target's states goes by PyTorch's operators.

Sources: DFlash: block diffusion for flash speculative decoding (arXiv:2602.06036), DSpark (arXiv:2607.05147).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import CheckpointError
from paceline.models.base import Runner
from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.head_files import read_head
from paceline.models.heads.head_tensors import drafted_rows
from paceline.models.heads.sequential_heads import SequentialHeads
from paceline.models.heads.shared_rows import embedding_of, head_of
from paceline.models.layers.decoder import rotate_
from paceline.models.layers.linear import Map, make_head_norm, make_linear, make_norm
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.feature_head import own_head_rows
from paceline.models.runners.native import NativeRunner
from paceline.models.runners.state_layer import UNUSED, layer_spec, state_layer
from paceline.models.state.cache import NativeCache
from paceline.tree import EMPTY_TREE, TokenTree

MaskRow = Callable[[int], torch.Tensor]
"""Gives the (hidden,) embedding of a mask token that the target has no row for."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """What a pass makes of b blocks, place by place.

    Attributes:
        states: (b, k, hidden) behind the final norm; none (b, k, 0) where nothing reads them. logits: (b, k, n).
    """

    states: torch.Tensor
    logits: torch.Tensor


class BlockHead:
    """One head for one target.

    Args:
        weights: by the names of `tensors_of`, on the target's device; taken out as they are packed.
        name: of the head, for messages. mask_row: asked where the mask token is none of the target's.
    Attributes:
        taps: layers of the target whose states it reads.
        depths: tokens that it drafts.
        tokens: (n,) int64 the target's token of each column of logits; None where that is the column itself.
        heads: what is added place by place.
        runner: its layers, for their caches and memory.
    Raises:
        CheckpointError: rotary angles that depend on the length of the text.
        CapabilityError: it takes embeddings or the head from a target that cannot give them.
    """

    def __init__(
        self, config: HeadConfig, weights: Weights, target: Runner, *, name: str, mask_row: MaskRow | None = None
    ) -> None:
        info = target.info
        self.taps, self.depths = config.taps, config.drafts_of_block
        self.tokens = weights.pop("draft_to_target", None)
        self._rows = config.block_size or 0
        self._unit = 1 if config.causal else self._rows
        self._tree = TokenTree.chain([0] * (self._rows - 1)) if self._rows > 1 else EMPTY_TREE
        self._first = 0 if config.sample_from_anchor else 1
        if self.tokens is None:  # rows that are no tokens may be among them
            weights |= {key: rows[: info.vocab_size] for key, rows in weights.items() if drafted_rows(key)}
        self.heads = SequentialHeads(config, weights)
        table = weights.pop("embed.weight", None)
        self._embed = embedding_of(table, target, name)
        self._mask = self._mask_row(config, info.vocab_size if table is None else len(table), name, mask_row)
        head = own_head_rows(weights, target, self.tokens, name=name)
        rows = UNUSED if head is None else len(head)
        spec = layer_spec(config, weights, "layers.0.", rows, layers=config.num_layers)
        self._norm = make_norm(weights["norm.weight"], spec.norm_eps)
        self._context = _Context(config, weights, spec.norm_eps)
        self.runner = state_layer(spec, weights, info, name=name, prefix="layers.0.", head=head)
        if self.runner.rotary.depends_on_length:
            raise CheckpointError(f"the head {name} has rotary angles that depend on the text's length; train it anew")
        self._to_logits = self.runner.head if head is not None else _of_target(target, name, self._norm)
        self.open, self.fork = self.runner.open, self.runner.fork
        self.truncate, self.release = self.runner.truncate, self.runner.release

    @classmethod
    def load(
        cls,
        head: str | Path,
        target: Runner,
        method: str,
        *,
        tokenizer: Callable[[], str] = str,
        mask_row: MaskRow | None = None,
    ) -> BlockHead:
        """The head in a folder, or of a hub id.

        Args:
            method: what it must be. tokenizer: as of `read_head`.
        Raises:
            CheckpointError: as `read_head`, or a head of another method. CapabilityError: as above.
        """
        config, weights = read_head(head, target.info, tokenizer=tokenizer)
        if config.method != method:
            raise CheckpointError(f"the head {head} is of method {config.method!r}, not {method!r}; name that one")
        return cls(config, weights, target, name=str(head), mask_row=mask_row)

    @torch.inference_mode()
    def inject(self, caches: Sequence[NativeCache], counts: Sequence[int], states: torch.Tensor) -> None:
        """Commit keys and values of the next tokens of each sequence, so many of each.

        Args:
            states: (r, taps * hidden) of the target, of all of them.
        """
        positions = [
            position
            for cache, count in zip(caches, counts, strict=True)
            for position in range(cache.length, cache.length + count)
        ]
        made = self._context.keys_and_values(states, self.runner, positions)
        for cache, count in zip(caches, counts, strict=True):
            cache.scratch = 0
            cache.reserve(count)
        for cache, count, part in zip(caches, counts, made.split(list(counts), 1), strict=True):
            slots = cache.slot_index(cache.length, cache.length + count)
            cache.arena.kv.index_copy_(1, torch.from_numpy(slots).to(part.device), part)
            cache.length += count

    @torch.inference_mode()
    def run(self, caches: Sequence[NativeCache], tokens: Sequence[int], depth: int) -> BlockRows:
        """One pass over a block of each sequence, of which nothing stays.

        Args:
            tokens: (b,) the last of each text. depth: places that are wanted, at most `depths`.
        """
        count, rows = len(tokens), self._rows
        block = self._mask.expand(count, rows, -1).clone()
        block[:, 0] = self._embed(tokens).to(block.dtype)
        result = self.runner.run_states(
            caches, [self._tree] * count, [0] * count, block.flatten(0, 1), picked=(), unit=self._unit
        )
        after = result.states.view(count, rows, -1)[:, self._first : self._first + depth].flatten(0, 1)
        logits = self._to_logits(after).view(count, depth, -1)
        states = self._norm(after) if self.heads.present else after[:, :0]
        return BlockRows(states.unflatten(0, (count, depth)), logits)

    def _mask_row(self, config: HeadConfig, known: int, name: str, mask_row: MaskRow | None) -> torch.Tensor:
        """(hidden,) the embedding of the mask token."""
        mask = config.mask_token_id or 0
        if mask < known:
            return self._embed([mask])[0]
        if mask_row is None:
            raise CheckpointError(
                f"the head {name} has mask_token_id {mask}, and the embedding has {known} rows; use one with an "
                "embedding of its own"
            )
        return mask_row(mask)


class _Context:
    """Keys and values of all layers, made of the target's states; takes copies of the layers' weights.

    Axes: n = layers, g = key-value heads, e = dimensions of a head.
    """

    def __init__(self, config: HeadConfig, weights: Weights, eps: float) -> None:
        self._shape = config.num_layers, 2 * config.kv_heads, config.head_dim
        self._keys = config.kv_heads
        names = [f"layers.{i}.self_attn.{part}_proj" for i in range(config.num_layers) for part in "kv"]
        parts = [weights[f"{name}.weight"] for name in names]
        biases = [
            weights.get(f"{name}.bias", part.new_zeros(len(part))) for name, part in zip(names, parts, strict=True)
        ]
        bias = torch.cat(biases) if any(f"{name}.bias" in weights for name in names) else None
        self._project = make_linear(torch.cat(parts), bias, row_invariant=False)
        k_norms = [weights[f"layers.{i}.self_attn.k_norm.weight"] for i in range(config.num_layers)]
        by_head = torch.stack(k_norms).repeat_interleave(self._keys, 0)
        self._k_norm = make_head_norm(by_head, eps)
        self._fc = make_linear(weights.pop("fc.weight"), weights.pop("fc.bias", None), row_invariant=False)
        self._norm = make_norm(weights.pop("hidden_norm.weight"), eps)

    def keys_and_values(self, states: torch.Tensor, runner: NativeRunner, positions: Sequence[int]) -> torch.Tensor:
        """(n, r, 2 g, e) of states (r, taps * hidden) at these positions, keys before values."""
        made = self._project(self._norm(self._fc(states))).view(len(states), *self._shape)
        keys = self._k_norm(made[:, :, : self._keys].flatten(1, 2))
        for rotation in runner.rotary.at(positions, ()).values():
            rotate_(keys, rotation)
        made[:, :, : self._keys] = keys.view(len(states), -1, self._keys, self._shape[-1])
        return made.transpose(0, 1)


def _of_target(target: Runner, name: str, norm: Map) -> Map:
    """The target's head behind a norm."""
    head = head_of(target, name).head
    return lambda states: head(norm(states), norm=False)
