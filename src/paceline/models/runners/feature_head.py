"""Heads that go on from the target's states with a decoder layer, for many sequences at once: EAGLE-1, FSPAD, EAGLE-3,
P-EAGLE, Falcon and modules for multi-token prediction (models.runners.mtp_head).

Input i is the embedding of token i + 1 with the target's state of token i, or, behind drafted tokens, with what the
layer itself made of the token before. It sees all inputs before it, so each sequence has a cache of its own. The layer
runs as a model of one layer does (models.runners.native), so in compiled passes on CPUs.

EAGLE-1 adds no norm: the layer reads fc([embedding; state]), and what it gives is the next state, from which the head
predicts. EAGLE-3 reads three layers of the target, made one state by fc; queries, keys and values are made of
[norm(embedding); norm(state)]. Their matrix has two halves: the state's is the layer's own, and what the embedding's
makes of the token is added to that (`added_qkv`).

FSPAD is an EAGLE-1 that samples the state before the layer reads it, by the token that was chosen, and whose next state
is not what the head reads:

    s = f + down(SiLU(gate(e)) * up(f))     of state f and embedding e, in a space of more dimensions
    o = layer(fc([e; s]))                   logits: the target's head on o
    next f = o + feature_proj(o)            what was aligned with the target's state

P-EAGLE is an EAGLE-3 of one layer or more that has learned what to make of a mask token, beside which fc(mask_hidden)
stands in the place of a state (`Mask`): masks behind a text predict one token each, in the pass that reads the text.

Falcon is an EAGLE-1 of which an input's state is that of the token k places further on (`unit`). Inputs come k at a
time, each of which sees its whole unit, and an LSTM (models.layers.gates) makes one state of [embedding; state].

Dovetail's is an EAGLE-1 of one layer or more that weighs state f and embedding e against each other: with h1 = W1 f,
h2 = SiLU(W2 norm(e)) and z = sigmoid(Wz [h1; h2]), the layers read z h1 + (1 - z) h2.

A head may run on another device than its target, for which it was made: then it has copies of what it takes from the
target, the embedding and the rows of its head, so that states of tokens are all that goes over to it (`Crossing`), and
what was drafted all that comes back.

Source: EAGLE (arXiv:2401.15077), EAGLE-3 (arXiv:2503.01840), P-EAGLE (arXiv:2602.01469), Falcon (arXiv:2412.12639),
Dovetail (arXiv:2412.18934); FSPAD (arXiv:2408.15562, no public code), of which the residual feature_proj is our
reading.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Final, Protocol

import torch
from torch.nn import functional as F

from paceline.errors import CheckpointError
from paceline.models.base import ModelInfo, PassResult, Runner
from paceline.models.heads.head_config import TAPPED, HeadConfig
from paceline.models.heads.head_files import read_head
from paceline.models.heads.head_tensors import MASK_HIDDEN
from paceline.models.heads.shared_rows import embedding_of, head_of, target_rows
from paceline.models.layers.decoder import head_order
from paceline.models.layers.gates import counting, through_gates
from paceline.models.layers.linear import Map, make_linear, make_norm
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.native import NativeRunner
from paceline.models.runners.state_layer import UNUSED, layer_spec, state_layer
from paceline.models.spec import ModelSpec, attention_shape
from paceline.models.state.cache import NativeCache
from paceline.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """What the layer reads: states (r, hidden), and what is added to queries, keys and values (r, outputs), if anything
    is.
    """

    states: torch.Tensor
    added_qkv: torch.Tensor | None = None


class MakesInputs(Protocol):
    """Makes what the layer reads."""

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """(r, hidden) of the target's states (r, taps * hidden)."""

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor) -> LayerInputs:
        """The inputs of embeddings (r, hidden) and states (r, hidden): `joined` ones, or the head's own."""


AT_ONCE: Final = 4096
"""Embeddings that are copied at once."""

LEVELS, REPEATS = 4, 5
"""Of a timed draft, and how often it is timed; the least time counts."""


@dataclass(slots=True)
class Crossing:
    """The way of the target's states to a head.

    Attributes:
        device: of the head. tensors, bytes: that went over to another device so far.
    """

    device: torch.device
    tensors: int = 0
    bytes: int = 0

    def over(self, states: torch.Tensor) -> torch.Tensor:
        """The states on the head's device."""
        if states.device == self.device:
            return states
        self.tensors, self.bytes = self.tensors + 1, self.bytes + states.nbytes
        return states.to(self.device)


@dataclass(frozen=True, slots=True)
class Mask:
    """What stands for a token that is not known: the mask token, and the joined state (1, hidden) beside it."""

    token: int
    state: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadParts:
    """What such a head is made of.

    Attributes:
        taps: layers of the target whose states it reads.
        embed: makes embeddings (r, hidden) of tokens. inputs: makes what the layer reads of these and of states.
        layer: runs it.
        next_states: makes what goes with the next tokens of the states behind the layer; None is these themselves.
        to_logits: makes logits of what goes with the next tokens; None where `layer` has a head of its own.
        decoupled: they are made of the states behind the layer, whatever goes with the next tokens.
        tokens: (n,) int64 the target's token of each column of logits; None where that is the column itself.
        mask: of a head that drafts in parallel, None of others.
        unit: how far ahead of its input a state is, and how many inputs see each other.
    """

    taps: tuple[int, ...]
    embed: Callable[[Sequence[int]], torch.Tensor]
    inputs: MakesInputs
    layer: NativeRunner
    next_states: Map | None = None
    to_logits: Map | None = None
    decoupled: bool = False
    tokens: torch.Tensor | None = None
    mask: Mask | None = None
    unit: int = 1


class FeatureHead:
    """One head for one target.

    Attributes:
        taps, tokens, mask, unit: as of `HeadParts`.
        runner: its layer, for its caches and their memory.
        crossing: the way of the target's states here.
    """

    def __init__(self, parts: HeadParts) -> None:
        self._parts, self.taps, self.tokens, self.runner = parts, parts.taps, parts.tokens, parts.layer
        self.mask, self.unit, self.crossing = parts.mask, parts.unit, Crossing(parts.layer.info.device)
        self.open, self.fork = self.runner.open, self.runner.fork
        self.truncate, self.release = self.runner.truncate, self.runner.release
        self.commit = self.runner.commit

    @classmethod
    def load(
        cls,
        head: str | Path,
        target: Runner,
        methods: Sequence[str],
        *,
        tokenizer: Callable[[], str] = str,
        device: torch.device | None = None,
    ) -> FeatureHead:
        """The EAGLE head in a folder, or of a hub id.

        Args:
            methods: what it may be. tokenizer: as of `read_head`.
            device: where it runs; None is the target's.
        Raises:
            CheckpointError: as `read_head`, a head of another method, or one that reads states before the target's
                final norm and has no norm for its own head.
            CapabilityError: it takes embeddings or the head from a target that cannot give them.
        """
        info = target.info if device is None else replace(target.info, device=device)
        config, weights = read_head(head, info, tokenizer=tokenizer)
        if config.method not in methods:
            raise CheckpointError(
                f"the head {head} is of method {config.method!r}, not {' or '.join(map(repr, methods))}; name that one"
            )
        if info.device != target.info.device:
            _copy_from_target(config, weights, target, info, name=str(head))
        return cls(eagle_parts(config, weights, target, name=str(head), info=info))

    @torch.inference_mode()
    def joined(self, states: torch.Tensor) -> torch.Tensor:
        """(r, hidden) what the layer takes for the target's states (r, taps * hidden), which come over from its
        device.
        """
        return self._parts.inputs.joined(self.crossing.over(states))

    def level_seconds(self, target: Runner) -> float:
        """Seconds of a drafted token, the way of the target's state here and that of the token to the host included."""
        info, tensors, read = target.info, self.crossing.tensors, self.crossing.bytes
        state = torch.zeros(1, len(self.taps) * info.hidden_size, device=info.device, dtype=info.dtype)
        times = []
        for _ in range(1 + REPEATS):  # the first one warms up
            cache = self.open()
            begin = perf_counter()
            for _ in range(LEVELS):
                result = self.step([cache], [EMPTY_TREE], [0], tokens=[0], states=self.joined(state), picked=[0])
                int(result.logits[0].argmax())
                self.commit([cache], [()])
            times.append(perf_counter() - begin)
            self.release(cache)
        self.crossing.tensors, self.crossing.bytes = tensors, read
        return min(times[1:]) / LEVELS

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
        """One pass over the inputs of all sequences, which stay in scratch until `commit`. Those that are fed see each
        other in units, counted from the last one.

        Args:
            trees: which input sees which, as of `Runner.score`: the root is the first input, and tokens are not looked
                at. computed: inputs of each that were fed before.
            tokens: (r,) of the inputs that are fed. states: (r, hidden) of what comes before each: `joined` ones, or
                what an earlier step returned.
            picked: rows whose logits are wanted, ascending.
        Returns:
            Logits (picked, n), see `tokens`, and the states (r, hidden) that go with the next tokens.
        """
        parts = self._parts
        made = parts.inputs(parts.embed(tokens), states)
        result = self.runner.run_states(
            caches, trees, computed, made.states, added_qkv=made.added_qkv,
            picked=picked if parts.to_logits is None else (), unit=self.unit,
        )  # fmt: skip
        behind = result.states
        if parts.next_states is not None:
            result = replace(result, states=parts.next_states(behind))
        if parts.to_logits is None or not picked:
            return result
        read = behind if parts.decoupled else result.states
        rows = read if len(picked) == len(read) else read[torch.tensor(picked, device=read.device)]
        return PassResult(parts.to_logits(rows), result.states)


@torch.inference_mode()
def _copy_from_target(config: HeadConfig, weights: Weights, target: Runner, info: ModelInfo, *, name: str) -> None:
    """Add what the head would take from its target in every step, on the head's own device.

    Args:
        info: of the target, with the head's device.
    Raises:
        CapabilityError: the target cannot give it.
    """
    if "embed.weight" not in weights:
        embed, size = embedding_of(None, target, name), config.vocab_size
        parts = [embed(list(range(start, min(start + AT_ONCE, size)))) for start in range(0, size, AT_ONCE)]
        weights["embed.weight"] = torch.cat([part.to(info.device) for part in parts])
    if "head.weight" not in weights:
        known = weights.get("draft_to_target", torch.arange(config.vocab_size))
        rows = target_rows(head_of(target, name), target.info, known.to(target.info.device))
        weights["head.weight"] = rows.to(info.device)


def eagle_parts(
    config: HeadConfig, weights: Weights, target: Runner, *, name: str, info: ModelInfo | None = None
) -> HeadParts:
    """An EAGLE head.

    Args:
        weights: by the names of `tensors_of`, on the head's device; taken out as they are packed.
        name: of the head, for messages. info: of the target, with the head's device; None is the target's own.
    Raises:
        CapabilityError, CheckpointError: as `FeatureHead.load`.
    """
    info, tokens = info or target.info, weights.pop("draft_to_target", None)
    embed = embedding_of(weights.pop("embed.weight", None), target, name)
    head_weight = own_head_rows(weights, target, tokens, name=name)
    if head_weight is not None and not config.normed and "norm.weight" not in weights:
        raise CheckpointError(
            f"the head {name} reads states before the final norm of {info.name}, so it needs a norm.weight"
        )
    rows = UNUSED if head_weight is None else config.draft_vocab_size
    spec = layer_spec(config, weights, "layers.0.", rows, layers=config.num_layers)
    inputs = _inputs_of(config, weights, spec)
    mask = None
    if config.mask_token_id is not None:
        mask = Mask(config.mask_token_id, _joined(inputs, weights.pop(MASK_HIDDEN).view(1, -1)))
    to_logits = None
    if head_weight is None:
        to_logits = _target_head(target, name, weights.get("norm.weight"), spec.norm_eps, normed=config.normed)
    parts = HeadParts(
        taps=config.taps_in(info.num_layers), embed=embed, inputs=inputs, to_logits=to_logits, tokens=tokens, mask=mask,
        layer=state_layer(spec, weights, info, name=name, prefix="layers.0.", head=head_weight),
        unit=config.block_size or 1,
    )  # fmt: skip
    return _fspad_parts(parts, weights) if config.method == "fspad" else parts


def _fspad_parts(eagle: HeadParts, weights: Weights) -> HeadParts:
    """The head with a sampler before fc, and states that the logits do not read."""
    aligned = _taken(weights, "feature_proj")
    inputs = _Sampler(eagle.inputs, *(_taken(weights, f"sampler.{name}") for name in ("gate", "up", "down")))
    return replace(eagle, inputs=inputs, next_states=lambda states: states + aligned(states), decoupled=True)


def _taken(weights: Weights, name: str) -> Map:
    """The linear layer of that name."""
    return make_linear(weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None), row_invariant=False)


def _inputs_of(config: HeadConfig, weights: Weights, spec: ModelSpec) -> MakesInputs:
    """What makes the inputs of the layers; its weights are taken out."""
    if config.method == "dovetail":
        return _fused_inputs(weights, spec.norm_eps)
    return _eagle3_inputs(weights, spec, config) if config.method in TAPPED else _eagle_inputs(weights, config)


@torch.inference_mode()
def _joined(inputs: MakesInputs, states: torch.Tensor) -> torch.Tensor:
    return inputs.joined(states)


def own_head_rows(weights: Weights, target: Runner, tokens: torch.Tensor | None, *, name: str) -> torch.Tensor | None:
    """(n, hidden) the head's own rows, those of the target for a reduced vocabulary; None where all rows are the
    target's.

    Args:
        tokens: of the reduced vocabulary. name: of the head, for messages.
    Raises:
        CapabilityError: they are the target's, which cannot give them.
    """
    rows = weights.pop("head.weight", None)
    if rows is not None:
        return rows
    source = head_of(target, name)
    return None if tokens is None else target_rows(source, target.info, tokens)


def _target_head(target: Runner, name: str, weight: torch.Tensor | None, eps: float, *, normed: bool) -> Map:
    """The target's head behind a norm: that of the weight, or else the target's own, unless states are `normed`."""
    head = head_of(target, name).head
    if weight is None:
        return lambda states: head(states, norm=not normed)
    norm = make_norm(weight, eps)
    return lambda states: head(norm(states), norm=False)


class _EagleInputs:
    """fc([embedding; state]), or what an LSTM makes of the two."""

    def __init__(self, fc: Map) -> None:
        self._fc = fc

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor) -> LayerInputs:
        return LayerInputs(self._fc(torch.cat((embedded, states), 1)))


class _Sampler:
    """What another makes of the embedding and the state, once the embedding has chosen from the state."""

    def __init__(self, then: MakesInputs, gate: Map, up: Map, down: Map) -> None:
        self._then, self._gate, self._up, self._down = then, gate, up, down

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        return self._then.joined(states)

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor) -> LayerInputs:
        sampled = states + self._down(F.silu(self._gate(embedded)) * self._up(states))
        return self._then(embedded, sampled)


class _FusedInputs:
    """State and embedding, weighed against each other by a gate."""

    def __init__(self, state: Map, norm: Map, token: Map, gate: Map) -> None:
        self._state, self._norm, self._token, self._gate = state, norm, token, gate

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor) -> LayerInputs:
        h1, h2 = self._state(states), F.silu(self._token(self._norm(embedded)))
        z = self._gate(torch.cat((h1, h2), 1)).sigmoid()
        return LayerInputs(z * h1 + (1 - z) * h2)


class _Eagle3Inputs:
    """The state, normed here where attention is added to the normed one, and what the normed embedding adds to queries,
    keys and values.
    """

    def __init__(self, fc: Map, fc_norm: Map | None, norm: Map, half: Map, state_norm: Map | None) -> None:
        self._fc, self._fc_norm, self._norm, self._half, self._state_norm = fc, fc_norm, norm, half, state_norm

    def joined(self, states: torch.Tensor) -> torch.Tensor:
        return self._fc(states if self._fc_norm is None else self._fc_norm(states))

    def __call__(self, embedded: torch.Tensor, states: torch.Tensor) -> LayerInputs:
        states = states if self._state_norm is None else self._state_norm(states)
        return LayerInputs(states, self._half(self._norm(embedded)))


def _eagle_inputs(weights: Weights, config: HeadConfig) -> MakesInputs:
    if config.method == "falcon":
        return _EagleInputs(through_gates([_gates(weights, layer) for layer in range(2)]))
    return _EagleInputs(_taken(weights, "fc"))


def _gates(weights: Weights, layer: int) -> Map:
    """Makes the gates of a layer of the LSTM."""
    names = [f"lstm.bias_{kind}_l{layer}" for kind in ("ih", "hh")]
    biases = [counting(weights.pop(name)) for name in names if name in weights]
    bias = torch.stack(biases).sum(0) if biases else None
    return make_linear(counting(weights.pop(f"lstm.weight_ih_l{layer}")), bias, row_invariant=False)


def _fused_inputs(weights: Weights, eps: float) -> _FusedInputs:
    state, token, gate = (
        make_linear(weights.pop(f"fusion.{name}.weight"), row_invariant=False) for name in ("state", "token", "gate")
    )
    return _FusedInputs(state, make_norm(weights.pop("fusion.norm.weight"), eps), token, gate)


def _eagle3_inputs(weights: Weights, spec: ModelSpec, config: HeadConfig) -> MakesInputs:
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
    half_map, fc_norm = make_linear(half, row_invariant=False), _fc_norm(weights, spec, len(config.taps))
    return _Eagle3Inputs(_taken(weights, "fc"), fc_norm, norm, half_map, state_norm)


def _fc_norm(weights: Weights, spec: ModelSpec, taps: int) -> Map | None:
    """What norms the states (r, taps * hidden) that fc reads: all of them as one, or each tap's."""
    if (whole := weights.pop("input_norm.weight", None)) is not None:
        return make_norm(whole, spec.norm_eps)
    if "fc_norm.0.weight" not in weights:
        return None
    norms = [make_norm(weights.pop(f"fc_norm.{tap}.weight"), spec.norm_eps) for tap in range(taps)]
    return lambda states: torch.cat([norm(part) for norm, part in zip(norms, states.chunk(taps, 1), strict=True)], 1)
