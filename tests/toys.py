"""ToyRunner: the Runner protocol without weights, for tests of everything that runs a model.

Its logits are a fixed pseudo-random function of the last `order` tokens (or of the whole
text with `order=None`, so that one wrong token anywhere in a cache shows). It checks its callers: handles used after
release, paths that are not paths of the tree last scored, `computed` inputs that changed, sequences that outgrow the
context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from toy_layers import ToyKeys, ToyLayers
from toy_numbers import normal

from paceline.models import NO_INPUTS, AddedRows, Capabilities, Inputs, LayerPlan, ModelInfo, PassResult, context_of
from paceline.tree import EMPTY_TREE, Scores, TokenTree

Rows = list[list[int]]


class ToyError(AssertionError):
    """The caller broke the Runner protocol."""


def ensure(condition: bool, text: str) -> None:
    if not condition:
        raise ToyError(text)


@dataclass(eq=False)
class ToyCache:
    """Committed tokens, the inputs (root first) of the tree last scored, and how many of these an exact pass has
    seen.
    """

    tokens: list[int] = field(default_factory=list)
    inputs: list[tuple[int, int]] = field(default_factory=list)
    released: bool = False
    exact: int = 2**31

    @property
    def length(self) -> int:
        ensure(not self.released, "length of a released cache")
        return len(self.tokens)


class ToyRunner:
    """A model of `vocab_size` tokens without weights.

    Args:
        vocab_size: of the function; `pad` more (or, negative, fewer) columns appear in the logits, the added ones with
            high values, as padded embeddings have.
        order: how many last tokens the logits depend on; None for all of them.
        seed: of the function. Two runners with equal seeds agree but for `noise`.
        sharpness: standard deviation of the logits.
        noise: standard deviation of what `noise_seed` adds, to make a draft model that resembles its target.
        nan_from: logits are NaN after texts of at least this many tokens.
        trees: declare and allow trees; False makes a runner of chains only.

    Attributes:
        open_caches: caches that were opened or forked and not released.
        fed: input rows so far; `calls`: forward passes so far.
    """

    def __init__(
        self,
        vocab_size: int = 16,
        *,
        order: int | None = 2,
        seed: int = 0,
        sharpness: float = 2.0,
        noise: float = 0.0,
        noise_seed: int = 1,
        pad: int = 0,
        max_context: int = 4096,
        nan_from: int | None = None,
        trees: bool = True,
        hidden_size: int = 8,
        num_layers: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.vocab_size, self.order, self.seed, self.sharpness = vocab_size, order, seed, sharpness
        self.noise, self.noise_seed, self.pad, self.nan_from = noise, noise_seed, pad, nan_from
        self.info = ModelInfo(
            name="toy",
            family="toy",
            vocab_size=vocab_size + pad,
            hidden_size=hidden_size,
            num_layers=num_layers,
            max_context=max_context,
            device=torch.device("cpu"),
            dtype=dtype,
            weight_bytes=1000,
            fingerprint=f"toy-{vocab_size}-{order}-{seed}",
        )
        self.capabilities = Capabilities(trees=trees, taps=True, fork=True)
        self.layers, self.last_keys = ToyLayers(self), ToyKeys(self)
        self.open_caches = 0
        self.fed = 0
        self.calls = 0
        self._rows: dict[tuple[int, ...], np.ndarray] = {}
        self._tensors: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """(v,) logits after `text`, as `score` gives them."""
        if self.nan_from is not None and len(text) >= self.nan_from:
            return torch.full((self.info.vocab_size,), float("nan"), dtype=self.info.dtype)
        key = self._key(text)
        row = self._tensors.get(key)
        if row is None:
            row = self._tensors[key] = torch.from_numpy(self._row(key)).to(self.info.dtype)
        return row

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        """What plain greedy decoding of this model gives after `prompt`."""
        text = list(prompt)
        for _ in range(steps):
            text.append(int(self.logits(text).argmax()))
        return text[len(prompt) :]

    def _key(self, text: Sequence[int]) -> tuple[int, ...]:
        return tuple(text if self.order is None else text[-self.order :])

    def _row(self, key: tuple[int, ...]) -> np.ndarray:
        row = self._rows.get(key)
        if row is None:
            base = self._normal(self.seed, key) * self.sharpness
            if self.noise:
                base += self._normal(1_000_003 + self.noise_seed, key) * self.noise
            extra = np.full(max(0, self.pad), 2 * self.sharpness, np.float32)
            row = self._rows[key] = np.concatenate([base, extra])[: self.info.vocab_size]
        return row

    def _normal(self, seed: int, key: tuple[int, ...]) -> np.ndarray:
        return normal(self.vocab_size, (seed, len(key), *key))

    def hidden(self, layer: int, text: Sequence[int]) -> torch.Tensor:
        """(hidden,) state at `layer` of the last token of `text`."""
        key = self._key(text)
        end = () if len(key) == self.order else (2**31 + len(key),)  # else seeds of (3,) and (3, 0) give the same
        state = torch.from_numpy(normal(self.info.hidden_size, (self.seed, layer + 2, *key, *end)).copy())
        state = state.to(self.info.dtype)
        self.layers.given.add(state.float().numpy().tobytes())
        return state

    def _scores(self, logit_texts: list[Rows], tap_texts: list[Rows], taps: Sequence[int]) -> Scores:
        rows = [self.logits(text) for texts in logit_texts for text in texts]
        states = {layer: torch.stack([self.hidden(layer, t) for texts in tap_texts for t in texts]) for layer in taps}
        self.fed += sum(len(texts) for texts in tap_texts)
        self.calls += 1
        logits = torch.stack(rows) if rows else torch.empty(0, self.info.vocab_size, dtype=self.info.dtype)
        return Scores(logits, tuple(accumulate((len(texts) for texts in logit_texts), initial=0)), states)

    def _check(self, caches: Sequence[ToyCache], *others: Sequence[object]) -> None:
        ensure(len(caches) > 0, "an empty batch")
        ensure(len({id(cache) for cache in caches}) == len(caches), "one cache twice in a batch")
        ensure(not any(cache.released for cache in caches), "a cache was used after release")
        ensure(all(len(other) == len(caches) for other in others), "columns of a batch differ in length")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if len(tokens) and not 0 <= int(min(tokens)) <= int(max(tokens)) < self.info.vocab_size:
            raise ToyError(f"token ids out of range: {list(tokens)}")

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> ToyCache:
        context_of(self, inputs)
        self.open_caches += 1
        return ToyCache()

    def extend(
        self,
        caches: Sequence[ToyCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        self._check(caches, tokens)
        every: list[Rows] = []
        for cache, chunk in zip(caches, tokens, strict=True):
            ensure(len(chunk) > 0, "an empty chunk")
            self._check_tokens(chunk)
            start = cache.length
            cache.tokens += [int(t) for t in chunk]
            cache.inputs = []
            ensure(cache.length <= self.info.max_context, "a sequence outgrew the context")
            every.append([cache.tokens[: start + i + 1] for i in range(len(chunk))])
        return self._scores(every if all_logits else [texts[-1:] for texts in every], every, taps)

    def score(
        self,
        caches: Sequence[ToyCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        computed = [0] * len(caches) if computed is None else computed
        self._check(caches, roots, trees, computed)
        texts = [self._score_one(*each) for each in zip(caches, roots, trees, computed, strict=True)]
        return self._scores(texts, texts, taps)

    def score_added(
        self,
        caches: Sequence[ToyCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        added: Sequence[AddedRows],
        *,
        taps: Sequence[int] = (),
    ) -> tuple[Scores, Scores]:
        """An added row says what the model says behind the text with its own likeliest token in the row's place."""
        scores = self.score(caches, roots, trees, taps=taps)
        texts = [self._score_one(*each, 0) for each in zip(caches, roots, trees, strict=True)]
        found: list[Rows] = [[] for _ in caches]
        for rows in added:
            ensure(0 <= rows.layer <= self.info.num_layers, "rows before a layer that is not there")
            behind = [node for nodes in rows.nodes for node in nodes]
            made = rows.make(torch.zeros(len(behind), self.info.hidden_size, dtype=self.info.dtype))
            ensure(made.shape == (len(behind), self.info.hidden_size), "rows of another number or size")
            for own, mine, nodes, after in zip(texts, found, rows.nodes, rows.after, strict=True):
                for node, before in zip(nodes, after, strict=True):
                    text = own[node + 1] if before < 0 else mine[before]
                    mine.append([*text, int(self.logits(text).argmax())])
                    ensure(len(mine[-1]) <= self.info.max_context, "an added row outgrew the context")
        return scores, self._scores(found, found, ())

    def _score_one(self, cache: ToyCache, root: int, tree: TokenTree, computed: int) -> Rows:
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        inputs = [(int(root), -2), *zip(tokens, parents, strict=True)]
        self._check_tokens([int(root), *tokens])
        ensure(self.capabilities.trees or tree.is_chain, "this runner scores chains only")
        ensure(0 <= computed < len(inputs), "at least one of the inputs must be left to be computed")
        ensure(inputs[:computed] == cache.inputs[:computed], "inputs said to be computed differ from those scored last")
        ensure(cache.length + 1 + tree.max_depth <= self.info.max_context, "a tree outgrew the context")
        cache.inputs = inputs
        prefix = [*cache.tokens, int(root)]
        texts = [prefix]
        for token, parent in zip(tokens, parents, strict=True):
            texts.append([*texts[parent + 1], token])
        return texts[computed:]

    def run_layers(
        self,
        caches: Sequence[ToyCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        plan: LayerPlan,
        hidden: torch.Tensor | None = None,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> PassResult:
        computed = [0] * len(caches) if computed is None else computed
        self._check(caches, roots, trees, computed)
        before = [list(cache.inputs) for cache in caches]
        texts = [text for each in zip(caches, roots, trees, computed, strict=True) for text in self._score_one(*each)]
        if hidden is not None:
            self.layers.check_states(hidden, texts, plan.first)
            pairs = zip(caches, before, strict=True)
            ensure(all(c.inputs == fed[: len(c.inputs)] for c, fed in pairs), "scratch holds something else")
        states = torch.stack(self.layers.run(texts, plan))
        tapped = {layer: torch.stack([self.hidden(layer, text) for text in texts]) for layer in taps}
        return PassResult(states.new_empty(0, self.info.vocab_size), states, tapped)

    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        return self.layers.head(hidden, norm=norm)

    def commit(self, caches: Sequence[ToyCache], paths: Sequence[Sequence[int]]) -> None:
        self._check(caches, paths)
        for cache, path in zip(caches, paths, strict=True):
            ensure(bool(cache.inputs), "commit without score")
            parent = -1
            for node in path:
                ensure(0 <= node < len(cache.inputs) - 1, "a node was not scored")
                if cache.inputs[node + 1][1] != parent:
                    raise ToyError(f"{list(path)} is not a path of the tree last scored")
                parent = node
            cache.tokens += [cache.inputs[0][0], *(cache.inputs[node + 1][0] for node in path)]
            cache.inputs = []

    def truncate(self, cache: ToyCache, length: int) -> None:
        self._check([cache])
        ensure(0 <= length <= cache.length, f"cannot truncate {cache.length} tokens to {length}")
        del cache.tokens[length:]
        cache.inputs = []

    def fork(self, cache: ToyCache) -> ToyCache:
        self._check([cache])
        self.open_caches += 1
        return ToyCache(list(cache.tokens))

    def release(self, cache: ToyCache) -> None:
        ensure(not cache.released, "a cache was released twice")
        cache.released = True
        self.open_caches -= 1


def plain_decode(runner: ToyRunner, prompt: Sequence[int], steps: int) -> list[int]:
    """Greedy decoding through `score` with empty trees: the loop's plain case, step by step."""
    cache, text = runner.open(), list(prompt)
    if len(prompt) > 1:
        runner.extend([cache], [text[:-1]])
    for _ in range(steps):
        scores = runner.score([cache], [text[-1]], [EMPTY_TREE])
        runner.commit([cache], [()])
        text.append(int(scores.logits[0].argmax()))
    runner.release(cache)
    return text[len(prompt) :]
