"""The decoder layer of EAGLE-1 and EAGLE-3 with its inputs and its head, for many sequences at once.

Input i is the embedding of token i + 1 with the target's state of token i, or, behind drafted tokens, with what the
layer itself made of the token before. It sees all inputs before it, so each sequence has a cache of its own. The layer
runs as a model of one layer does (models.runners.native), so in compiled passes on CPUs.

EAGLE-1 adds no norm: the layer reads fc([embedding; state]), and what it gives is the next state, from which the head
predicts. EAGLE-3 reads three layers of the target, made one state by fc; queries, keys and values are made of
[norm(embedding); norm(state)]. Their matrix has two halves: the state's is the layer's own, and what the embedding's
makes of the token is added to that (`added_qkv`).

Source: EAGLE (arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.errors import CheckpointError
from paceline.models.base import PassResult, Runner
from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.head_files import read_head
from paceline.models.heads.shared_rows import embedding_of, head_of, target_rows
from paceline.models.layers.decoder import head_order
from paceline.models.layers.linear import Map, make_linear, make_norm
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.state_layer import UNUSED, layer_spec, state_layer
from paceline.models.spec import ModelSpec, attention_shape
from paceline.models.state.cache import NativeCache
from paceline.tree import TokenTree


class FeatureHead:
    """One EAGLE head for one target.

    Args:
        config, weights: of the head, on the target's device; the weights are taken out as they are packed.
        name: of the head, for messages.
    Attributes:
        taps: layers of the target whose states it reads.
        runner: its layer, for its caches and their memory.
        tokens: (n,) int64 the target's token of each column of `step`'s logits; None where that is the column itself.
    Raises:
        CapabilityError: it takes embeddings or the head from a target that cannot give them.
        CheckpointError: it reads states before the target's final norm, and has no norm for its own head.
    """

    def __init__(self, config: HeadConfig, weights: Weights, target: Runner, *, name: str) -> None:
        self.config, self.target, self.name = config, target, name
        info = target.info
        self.taps = config.taps_in(info.num_layers)
        self.tokens = weights.pop("draft_to_target", None)
        self._embed = embedding_of(weights.pop("embed.weight", None), target, name)
        head_weight = _head_rows(weights, self)
        if head_weight is not None and not config.normed and "norm.weight" not in weights:
            raise CheckpointError(
                f"the head {name} reads states before the final norm of {info.name}, so it needs a norm.weight"
            )
        spec = layer_spec(config, weights, "layers.0.", UNUSED if head_weight is None else config.draft_vocab_size)
        self._make = _eagle3_inputs(weights, spec, config) if config.method == "eagle3" else _eagle_inputs(weights)
        self._norm = (
            make_norm(weights["norm.weight"], spec.norm_eps)
            if head_weight is None and "norm.weight" in weights
            else None
        )
        self._shared = head_weight is None
        self.runner = state_layer(spec, weights, info, name=name, prefix="layers.0.", head=head_weight)
        self.open, self.fork = self.runner.open, self.runner.fork
        self.truncate, self.release = self.runner.truncate, self.runner.release
        self.commit = self.runner.commit

    @classmethod
    def load(
        cls, head: str | Path, target: Runner, methods: Sequence[str], *, tokenizer: Callable[[], str] = str
    ) -> FeatureHead:
        """The head in a folder, or of a hub id.

        Args:
            methods: what it may be. tokenizer: as of `read_head`.
        Raises:
            CheckpointError: as `read_head`, and a head of another method. CapabilityError: as above.
        """
        config, weights = read_head(head, target.info, tokenizer=tokenizer)
        if config.method not in methods:
            raise CheckpointError(
                f"the head {head} is of method {config.method!r}, not {' or '.join(map(repr, methods))}; name that one"
            )
        return cls(config, weights, target, name=str(head))

    @torch.inference_mode()
    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """(r, hidden) what the layer takes for the target's states (r, taps * hidden)."""
        return self._make.joined(states)

    @torch.inference_mode()
    def step(
        self,
        caches: Sequence[NativeCache],
        trees: Sequence[TokenTree],
        computed: Sequence[int],
        *,
        tokens: Sequence[int],
        states: torch.Tensor,
        picked: Sequence[int],
    ) -> PassResult:
        """One pass over the inputs of all sequences, which stay in scratch until `commit`.

        Args:
            trees: which input sees which, as of `Runner.score`: the root is the first input, and tokens are not looked
                at. computed: inputs of each that were fed before.
            tokens: (r,) of the inputs that are fed. states: (r, hidden) of what comes before each: `joined` ones, or
                what an earlier step returned.
            picked: rows whose logits are wanted, ascending.
        Returns:
            Logits (picked, n), see `tokens`, and the states (r, hidden) that go with the next tokens.
        """
        made = self._make(self._embed(tokens), states)
        result = self.runner.run_states(
            caches, trees, computed, made.states, added_qkv=made.added_qkv, picked=() if self._shared else picked
        )
        if not self._shared or not picked:
            return result
        after = result.states
        rows = after if len(picked) == len(after) else after[torch.tensor(picked, device=after.device)]
        return PassResult(self._target_logits(rows), after)

    def _target_logits(self, states: torch.Tensor) -> torch.Tensor:
        states = states if self._norm is None else self._norm(states)
        return head_of(self.target, self.name).head(states, norm=self._norm is None and not self.config.normed)


@dataclass(frozen=True, slots=True)
class _LayerInputs:
    """What the layer reads: states (r, hidden), and what is added to queries, keys and values (r, outputs), if anything
    is.
    """

    states: torch.Tensor
    added_qkv: torch.Tensor | None = None


class _EagleInputs:
    """fc([embedding; state])."""

    def __init__(self, fc: Map) -> None:
        self._fc = fc

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor) -> _LayerInputs:
        return _LayerInputs(self._fc(torch.cat((embedded, states), 1)))


class _Eagle3Inputs:
    """The state, normed here where attention is added to the normed one, and what the normed embedding adds to queries,
    keys and values.
    """

    def __init__(self, fc: Map, norm: Map, half: Map, state_norm: Map | None) -> None:
        self.joined, self._norm, self._half, self._state_norm = fc, norm, half, state_norm

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor) -> _LayerInputs:
        states = states if self._state_norm is None else self._state_norm(states)
        return _LayerInputs(states, self._half(self._norm(embedded)))


def _eagle_inputs(weights: Weights) -> _EagleInputs:
    return _EagleInputs(make_linear(weights.pop("fc.weight"), weights.pop("fc.bias", None), row_invariant=False))


def _eagle3_inputs(weights: Weights, spec: ModelSpec, config: HeadConfig) -> _Eagle3Inputs:
    """Takes the embedding's half out of the projections."""
    d, halves = spec.hidden_size, []
    for name in "qkv":
        key = f"layers.0.self_attn.{name}_proj.weight"
        halves.append(weights[key][:, :d])
        weights[key] = weights[key][:, d:]
    order = head_order(attention_shape(spec)).to(halves[0].device)
    half = torch.cat((halves[0][order], *halves[1:])).contiguous()
    norm = make_norm(weights.pop("layers.0.input_layernorm.weight"), spec.norm_eps)
    hidden_norm, state_norm = weights.pop("layers.0.hidden_norm.weight"), None
    if config.norm_before_residual:
        state_norm = make_norm(hidden_norm, spec.norm_eps)
    else:
        weights["layers.0.input_layernorm.weight"] = hidden_norm
    fc = make_linear(weights.pop("fc.weight"), weights.pop("fc.bias", None), row_invariant=False)
    return _Eagle3Inputs(fc, norm, make_linear(half, row_invariant=False), state_norm)


def _head_rows(weights: Weights, head: FeatureHead) -> torch.Tensor | None:
    """(n, hidden) the head's own rows, those of the target for a reduced vocabulary; None where all rows are the
    target's.
    """
    rows = weights.pop("head.weight", None)
    if rows is not None:
        return rows
    source = head_of(head.target, head.name)
    return None if head.tokens is None else target_rows(source, head.target.info, head.tokens)
