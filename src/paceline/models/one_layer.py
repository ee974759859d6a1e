"""A fused step for draft models of one layer on the CPU: about ten small NumPy operations and one packed head.

In: a ModelSpec of one plain layer with its weights. Out: a Runner that is fast at one row at a time. Not here: any other model
(models.native), choosing tokens beyond the greedy chains and trees that `draft_chains` and `draft_trees` offer.

The only layer sees embeddings, not the output of another layer. So query, key and value of a token do not depend on the text: they
are rows of a table made at load, rotated by position. A prompt enters the cache by table look-ups without any forward pass, and a
step is one row of attention, the MLP and the head. Arithmetic is float32 but for the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import CapabilityError, ConfigError, DrafterError
from paceline.models.base import Capabilities, ModelInfo
from paceline.models.kernels.choose import fits as kernels_fit
from paceline.models.linear import make_linear
from paceline.models.one_layer_cache import OneLayerCache
from paceline.models.rope import Rope
from paceline.models.spec import ModelSpec
from paceline.tree.token_tree import TokenTree
from paceline.tree.types import Scores

if TYPE_CHECKING:
    from paceline.models.one_layer_chain import Chains
    from paceline.models.one_layer_tree import Trees
    from paceline.models.tree_plan import GrownTree, TreePlan

Array = npt.NDArray[np.float32]
Stop = Callable[[int, float], bool]

MAX_TABLE_BYTES = 256 * 1024 * 1024
MAX_HIDDEN = 512


def fits(spec: ModelSpec, device: torch.device) -> bool:
    """Whether a model has the one plain layer that this runner knows, at a size where dispatch is the cost."""
    layer = spec.layers[0]
    plain = spec.norm_placement == "pre" and not (spec.norm_offset or spec.qk_norm or spec.qkv_bias or spec.o_bias or spec.mlp_bias)
    bare = spec.attention_softcap is None and spec.logit_softcap is None and spec.moe is None and spec.activation == "silu"
    unscaled = spec.embedding_multiplier == spec.residual_multiplier == spec.logit_multiplier == 1.0
    static = layer.window is None and layer.rope is not None and spec.ropes[layer.rope].kind in ("default", "linear", "llama3")
    whole = static and layer.rope is not None and spec.ropes[layer.rope].dims == spec.head_dim
    width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    small = spec.hidden_size <= MAX_HIDDEN and 8 * spec.vocab_size * (width + spec.hidden_size) <= MAX_TABLE_BYTES
    return device.type == "cpu" and spec.num_layers == 1 and plain and bare and unscaled and whole and small


class OneLayerRunner:
    """Runs a one-layer model; see `models.base.Runner`.

    Args:
        weights: canonical names (models.weights).
        dtype: of the head; the rest computes in float32.

    Attributes:
        chains, grown: drafts in compiled code, or None where the model or the machine does not allow it.
    """

    capabilities = Capabilities(trees=True, fork=True)

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, torch.Tensor], *, name: str, dtype: torch.dtype, max_context: int | None = None
    ) -> None:
        self.spec = spec
        heads, kv, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self._rotated = (heads + kv) * dim
        self._shape = kv, heads // kv, dim
        as_float = {key: value.float() for key, value in weights.items()}
        embed = as_float["embed.weight"]
        self.embedding: Array = embed.numpy()
        normed = embed * torch.rsqrt(embed.pow(2).mean(-1, keepdim=True) + spec.norm_eps) * as_float["layers.0.attn_norm.weight"]
        table = normed @ as_float["layers.0.qkv.weight"].T
        table[:, : heads * dim] *= spec.scale
        self.table: Array = table.numpy()
        halves = table[:, : self._rotated].view(-1, heads + kv, 2, dim // 2)
        self.turned: Array = torch.cat((-halves[:, :, 1], halves[:, :, 0]), -1).reshape(len(table), -1).contiguous().numpy()
        gate_up = as_float["layers.0.gate_up.weight"] * as_float["layers.0.mlp_norm.weight"]
        self.gate_up, self.down = gate_up.contiguous().numpy(), as_float["layers.0.down.weight"].contiguous().numpy()
        self.out: Array = as_float["layers.0.o.weight"].contiguous().numpy()
        self.final_norm: Array = as_float["final_norm.weight"].numpy()
        self.head_dtype = dtype
        self._head = make_linear((weights["embed.weight"] if spec.tied else weights["head.weight"]).to(dtype))
        rope = next(iter(spec.ropes.values()))
        context = max_context or spec.max_context
        cos, sin = Rope(rope, torch.device("cpu")).cos_sin(torch.arange(context), context)
        self.cos, self.sin = (np.tile(one.numpy(), heads + kv) for one in (cos, sin))
        self.chains, self.grown = self._compiled(weights)
        self.info = ModelInfo(
            name=name,
            family=spec.family,
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            num_layers=1,
            max_context=context,
            device=torch.device("cpu"),
            dtype=dtype,
            weight_bytes=sum(value.numel() * value.element_size() for key, value in weights.items()),
            fingerprint=f"one-layer-{spec.family}-{spec.vocab_size}-{spec.hidden_size}-{spec.intermediate_size}",
        )

    def _compiled(self, weights: Mapping[str, torch.Tensor]) -> tuple[Chains | None, Trees | None]:
        """Drafts in compiled code, where model and machine allow it."""
        if not kernels_fit(self.spec, self.head_dtype, torch.device("cpu")):
            return None, None
        from paceline.models.one_layer_chain import Chains
        from paceline.models.one_layer_tables import DraftTables
        from paceline.models.one_layer_tree import Trees

        tables = DraftTables(
            self.spec, weights, embedding=self.embedding, table=self.table, turned=self.turned, cos=self.cos, sin=self.sin
        )
        return Chains(tables), Trees(tables)

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        """Heads of keys and values, queries to each, dimension."""
        return self._shape

    def open(self) -> OneLayerCache:
        """A new, empty sequence."""
        kv, _, dim = self._shape
        return OneLayerCache(kv, dim)

    def extend(
        self,
        caches: Sequence[OneLayerCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `Runner.extend`; only rows that are asked for are computed, the others are look-ups."""
        if self.grown is not None and not all_logits and not taps and (found := self.grown.last_rows(caches, tokens)) is not None:
            return Scores(found, tuple(range(len(found) + 1)))
        hidden, rows = [], []
        for cache, chunk in zip(caches, tokens, strict=True):
            queries = self._write(cache, chunk, np.arange(cache.length, cache.length + len(chunk)))
            picked = range(len(chunk)) if all_logits else range(len(chunk) - 1, len(chunk))
            for i in picked:
                stop = cache.length + i + 1
                hidden.append(self._row(chunk[i], queries[i], cache.keys[:, :stop], cache.values[:, :stop]))
            cache.length += len(chunk)
            rows.append(len(picked))
        return self._scores(hidden, rows, taps)

    def score(
        self,
        caches: Sequence[OneLayerCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `Runner.score`."""
        skipped = [0] * len(caches) if computed is None else computed
        if self.grown is not None and not taps and (found := self.grown.score(caches, roots, trees, skipped)) is not None:
            counts = (1 + len(tree) - done for tree, done in zip(trees, skipped, strict=True))
            return Scores(found, tuple(accumulate(counts, initial=0)))
        hidden, rows = [], []
        for cache, root, tree, done in zip(caches, roots, trees, skipped, strict=True):
            inputs = [root, *tree.tokens.tolist()]
            positions = cache.length + np.concatenate(([0], tree.depths))
            queries = self._write(cache, inputs[done:], positions[done:], skip=done)
            chain = tree.is_chain
            for i in range(done, len(inputs)):
                seen = slice(0, cache.length + i + 1) if chain else self._seen(cache.length, tree, i)
                hidden.append(self._row(inputs[i], queries[i - done], cache.keys[:, seen], cache.values[:, seen]))
            rows.append(len(inputs) - done)
        return self._scores(hidden, rows, taps)

    def draft_chains(
        self, caches: Sequence[OneLayerCache], feeds: Sequence[Sequence[int]], steps: Sequence[int], stops: Sequence[Stop | None]
    ) -> list[tuple[list[int], list[float]]]:
        """Append `feeds`, then draft up to `steps` tokens each greedily; all drafted ones but the last are appended too.

        `stop(depth, reach)` is asked before level `depth` (from 2 on) with the chance of the path so far; None never stops.

        Returns:
            The drafted tokens and the probability of each.
        Raises:
            ConfigError: past the context. DrafterError: NaN in the logits.
        """
        if self.chains is not None and max(map(len, feeds)) <= self.chains.most_fed:
            return self.chains.draft(caches, feeds, steps, stops)
        return [self._draft_chain(*one) for one in zip(caches, feeds, steps, stops, strict=True)]

    def _draft_chain(
        self, cache: OneLayerCache, tokens: Sequence[int], steps: int, stop: Stop | None
    ) -> tuple[list[int], list[float]]:
        drafted: list[int] = []
        chances: list[float] = []
        reach, feed = 1.0, tokens
        while True:
            logits_v = self.extend([cache], [feed]).logits[0].numpy()
            token = int(logits_v.argmax())
            chances.append(float(1.0 / np.exp(logits_v - logits_v[token]).sum()))
            if not chances[-1] > 0.0:
                raise DrafterError("the draft model gave NaN; check its checkpoint")
            drafted.append(token)
            reach *= chances[-1]
            if len(drafted) >= steps or (stop is not None and stop(len(drafted) + 1, reach)):
                return drafted, chances
            feed = (token,)

    def grows(self, plan: TreePlan) -> bool:
        """See `models.tree_plan.TreeRunner`."""
        return self.grown is not None and self.grown.fits(plan)

    def draft_trees(
        self,
        caches: Sequence[OneLayerCache],
        feeds: Sequence[Sequence[int]],
        plans: Sequence[TreePlan],
        stops: Sequence[Stop | None],
    ) -> list[GrownTree]:
        """See `models.tree_plan.TreeRunner`.

        Raises:
            ConfigError: past the context. DrafterError: NaN in the logits.
        """
        assert self.grown is not None
        return self.grown.grow(caches, feeds, plans, stops)

    def commit(self, caches: Sequence[OneLayerCache], paths: Sequence[Sequence[int]]) -> None:
        """See `Runner.commit`."""
        for cache, path in zip(caches, paths, strict=True):
            at = cache.length + 1
            for i, node in enumerate(path):
                if node != i:
                    cache.keys[:, at + i], cache.values[:, at + i] = cache.keys[:, at + node], cache.values[:, at + node]
            cache.length = at + len(path)

    def truncate(self, cache: OneLayerCache, length: int) -> None:
        """See `Runner.truncate`."""
        if not 0 <= length <= cache.length:
            raise ConfigError(f"truncate: length must lie in 0..{cache.length}, got {length}")
        cache.length = length

    def fork(self, cache: OneLayerCache) -> OneLayerCache:
        """A copy; a one-layer cache is small."""
        return cache.copy()

    def release(self, cache: OneLayerCache) -> None:
        """Nothing is shared, so nothing is to be given back."""
        cache.length = 0

    def _write(self, cache: OneLayerCache, tokens: Sequence[int], positions: npt.NDArray[np.int64], skip: int = 0) -> Array:
        """Store keys and values of inputs from slot length + skip on; returns their rotated queries (r, kv heads, group, dim)."""
        kv, group, dim = self._shape
        ids, start = list(tokens), cache.length + skip
        if int(positions[-1]) >= len(self.cos):
            raise ConfigError(f"position {int(positions[-1])} lies outside the context of {len(self.cos)} tokens")
        cache.reserve(start + len(ids))
        rotated = self.table[ids, : self._rotated] * self.cos[positions] + self.turned[ids] * self.sin[positions]
        split = kv * group * dim
        cache.keys[:, start : start + len(ids)] = rotated[:, split:].reshape(-1, kv, dim).swapaxes(0, 1)
        cache.values[:, start : start + len(ids)] = self.table[ids, self._rotated :].reshape(-1, kv, dim).swapaxes(0, 1)
        queries: Array = rotated[:, :split].reshape(-1, kv, group, dim)
        return queries

    @staticmethod
    def _seen(length: int, tree: TokenTree, index: int) -> npt.NDArray[np.int64]:
        """Slots that input `index` (0 the root) of a tree attends to."""
        own = [0, *(node + 1 for node in tree.path(index - 1))] if index else [0]
        return np.concatenate((np.arange(length), length + np.array(own, np.int64)))

    def _row(self, token: int, query: Array, keys: Array, values: Array) -> Array:
        """(hidden,) normed output of one input with its query (kv heads, group, dim) over keys (kv heads, s, dim)."""
        weights = query @ keys.swapaxes(1, 2)
        np.exp(weights - weights.max(-1, keepdims=True), out=weights)
        weights /= weights.sum(-1, keepdims=True)
        x = self.embedding[token] + self.out @ (weights @ values).reshape(-1)
        size, eps = len(x), self.spec.norm_eps
        inner = self.gate_up @ (x * np.float32((x.dot(x) / size + eps) ** -0.5))
        gate, up = inner[: len(inner) // 2], inner[len(inner) // 2 :]
        x += self.down @ (gate / (1.0 + np.exp(-gate)) * up)
        normed: Array = x * np.float32((x.dot(x) / size + eps) ** -0.5) * self.final_norm
        return normed

    def _scores(self, hidden: Sequence[Array], rows: Sequence[int], taps: Sequence[int]) -> Scores:
        if taps:
            raise CapabilityError("a fused one-layer model offers no taps of hidden states; load it with LLM(...) instead")
        stacked = torch.from_numpy(hidden[0][None] if len(hidden) == 1 else np.stack(hidden)).to(self.head_dtype)
        return Scores(self._head(stacked).float(), tuple(accumulate(rows, initial=0)))
