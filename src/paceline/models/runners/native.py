"""The native runner: tokens and trees of many sequences in, logits and hidden states out, for all families of
ModelSpec.

It keeps the promise of `models.base.Runner` with all capabilities and all abilities (models.abilities), but for inputs
beside tokens. Runners that do some of this another way
hold one (`models.runners.grouped`, `models.runners.longrope`).

Rotary angles may depend on the length of a text, which its prompt counts for as one pass, in whatever chunks it comes
(`open`). *Dynamic* ones: the base grows with every token beyond the declared context, and what is cached keeps its
angles. Tokens of the prompt have those of its full length, later ones count one by one, as in transformers. A prompt
within the declared context does not outgrow it (`ModelInfo.rope_border`): one pass over the whole text would find other
logits. Keys that depend on more than the text before them are shared by no two sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from paceline.checkpoints import BLOCKS, Blocks, form_of, is_mixed, is_quantized, kinds_of
from paceline.errors import CapabilityError, ConfigError
from paceline.models.abilities import check_inputs
from paceline.models.added_rows import AddedRows
from paceline.models.attention.double_sparsity import DoubleSparsity
from paceline.models.attention.gaps import Gaps
from paceline.models.attention.kv_selection import KVSelection
from paceline.models.attention.segments import (
    Segment,
    chunk,
    fed_tokens,
    offsets,
    run_lengths,
    seeing_each_other,
    tree_segment,
)
from paceline.models.attention.tree_attention import Masks
from paceline.models.base import ALL_LAYERS, Capabilities, LayerPlan, ModelInfo, PassResult
from paceline.models.checks import check_extend, check_score, check_tokens
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.layers.decoder import Decoder
from paceline.models.layers.linear import RowInvariance
from paceline.models.layers.own_weights import Weights
from paceline.models.layers.rope import Rotary
from paceline.models.passes.base import Passes
from paceline.models.passes.eager import EagerPasses
from paceline.models.passes.eligibility import fits
from paceline.models.passes.graphs import ScoringGraphs
from paceline.models.passes.packed_weights import PackedWeights
from paceline.models.passes.strict import StrictPasses
from paceline.models.runners.added_pass import AddedPass, make_room
from paceline.models.runners.last_keys import ArenaKeys, last_keys_of
from paceline.models.spec import ModelSpec
from paceline.models.state.arena import Arena
from paceline.models.state.cache import NativeCache
from paceline.models.state.cache_memory import ArenaMemory
from paceline.models.state.parts import State, StateOperations, keys_of
from paceline.models.state.window_slots import windows_of
from paceline.tree import Scores, TokenTree

Lengths = Callable[[Sequence[Segment], bool], Sequence[tuple[int, int]]]
"""Of segments, and whether these are chunks of known text: runs of (rows, length) for the rotary kinds that depend on
it.
"""

FIRST: Final = LayerPlan(stop=1)
LATER: Final = LayerPlan(first=1)
"""The first layer, and those behind it."""


class NativeRunner(StateOperations[NativeCache]):
    """One decoder-only model behind the operations of `models.base.Runner`.

    Args:
        spec: the model's shape.
        weights: canonical weights on `device` in `dtype`; taken out of the mapping as they are packed.
        name: folder or hub id, for messages.
        max_context: most tokens of a sequence; None takes the checkpoint's.
        cache_slots: cache slots allocated at first; the cache grows by doubling.
        row_invariant: a row keeps its bits whatever number of rows is scored with it, where the CPU allows it; False is
            faster for tiny float32 models, such as drafts. Compiled passes always keep it.
        compiled: run in compiled passes (models.cpu) where the model and the CPU allow it (models.passes.eligibility),
            else by PyTorch's operators.
        copy_limit: forked sequences up to this length are copied when they part; longer ones go on sharing the blocks
            of their prefix, and attention gathers keys and values from all over the cache.
        forget_behind_windows: layers with a sliding window give back the keys that are behind it, for sequences that
            say so (models.state.window_slots).
        blocks: matrices that are not among the weights, as they lie in a GGUF file; for compiled passes
            (models.passes.eligibility).
        packed: packed matrices of an earlier process, where it has found any, or what keeps those of this one
            (models.passes.packed_weights).
        lengths: how long a text counts as for rotary angles that depend on it.
        strict: where compiled passes do not serve, take PyTorch's operators in the form that keeps a row's bits
            (models.passes.eager).
        selection: attends to a part of the text; not strict, and with `blocks` only where it `compiles`.

    Attributes:
        memory: the blocks of all caches; there is none where keys depend on more than the text before them.
        last_keys: keys and values of the last layer that keeps all of them, where such a layer can be attended to.
        selection: as given.
        held_bytes: of the weights, in the form in which they are kept; of a tied head a second copy, as passes pack it.
    """

    capabilities = Capabilities(trees=True, taps=True, fork=True)
    memory: ArenaMemory
    last_keys: ArenaKeys

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        name: str,
        device: torch.device,
        dtype: torch.dtype,
        max_context: int | None = None,
        cache_slots: int = 2048,
        copy_limit: int = 1024,
        row_invariant: bool = True,
        compiled: bool = True,
        strict: bool = False,
        forget_behind_windows: bool = True,
        blocks: Blocks | None = None,
        packed: PackedWeights | None = None,
        activation_bits: int = 8,
        lengths: Lengths = run_lengths,
        selection: KVSelection | None = None,
    ) -> None:
        self.spec, self.rotary, self._lengths = spec, Rotary(spec.ropes, device, dtype), lengths
        self.selection = selection
        held = sum(weight.nbytes for weight in weights.values()) + sum(rows.nbytes for rows in (blocks or {}).values())
        embedding = weights.get("embed.weight")
        tied = 0 if embedding is None or {"head.weight", "head.scale"} & weights.keys() else embedding.nbytes
        table = (blocks or {}).get("embed.weight", weights.get("embed.weight"))
        self._rows = 0 if table is None else len(table)
        info = _describe(
            spec, weights, blocks or {}, name=name, device=device, dtype=dtype, activation_bits=activation_bits
        )
        with torch.inference_mode():
            self.arena = Arena(
                spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device, slots=cache_slots,
                copy_limit=copy_limit,
                windows=windows_of(spec, device, max_context) if forget_behind_windows else (),
                without_keys=_without_keys(spec),
            )  # fmt: skip
            if not self.rotary.depends_on_length:
                self.memory = ArenaMemory(self.arena)
            if (last := last_keys_of(spec, self.arena, self.rotary)) is not None:
                self.last_keys = last
            self.graphs: ScoringGraphs | None = None
            self.passes: Passes
            if selection is not None:
                selection.prepare(spec, device, name=name)
                info = replace(info, fingerprint=f"{info.fingerprint}-{selection.key}")
                compiled = compiled and selection.compiles
            if blocks or (compiled and fits(spec, dtype, device, quantization=form_of(weights))):
                self.passes = _compiled(
                    spec, weights, self.arena, blocks=blocks, packed=packed, activation_bits=activation_bits,
                    selection=selection,
                )  # fmt: skip
            else:
                self.passes = self._by_operators(weights, "proven" if strict else row_invariant)
        self.info = replace(info, max_context=max_context or spec.max_context, passes=self.passes.name)
        self.held_bytes = held + (0 if isinstance(self.passes, EagerPasses | StrictPasses) else tied)

    def _by_operators(self, weights: Weights, row_invariant: RowInvariance) -> Passes:
        """Passes of PyTorch's operators; scoring has graphs beside them where a GPU can capture it."""
        device, dtype = self.arena.kv.device, self.arena.kv.dtype
        decoder = Decoder(self.spec, weights, row_invariant=row_invariant)
        host = self.spec.moe is not None or bool(self.spec.states)  # choosing experts and going on from states need it
        if device.type == "cuda" and not host and self.selection is None:
            self.graphs = ScoringGraphs(decoder, self.rotary, self.arena, capture=True)
        if row_invariant == "proven":
            passes = EagerPasses(decoder, self.rotary, Masks(dtype, device, row_invariant=True))
            return StrictPasses(passes, self.spec)
        return EagerPasses(decoder, self.rotary, Masks(dtype, device), self.selection)

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> NativeCache:
        """See `Runner.open`."""
        check_inputs(self, inputs)
        if self.selection is not None:
            return self.selection.cache(self.arena, prompt_length)
        return NativeCache(self.arena, prompt_length)

    @torch.inference_mode()
    def extend(
        self,
        caches: Sequence[State],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `Runner.extend`.

        Raises:
            ConfigError: an empty list of tokens, a released cache, or more tokens than the context holds.
        """
        fed = tokens[0] if len(tokens) == 1 else [t for new in tokens for t in new]
        return self._extend(caches, [len(new) for new in tokens], fed, taps, all_logits)

    @torch.inference_mode()
    def extend_embeddings(
        self,
        caches: Sequence[State],
        embeddings: Sequence[torch.Tensor],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """`extend` with input embeddings (rows, hidden), as `embed` returns them, instead of tokens."""
        x = torch.cat([new.to(self.info.dtype) for new in embeddings])
        return self._extend(caches, [len(new) for new in embeddings], x, taps, all_logits)

    def _extend(
        self,
        caches: Sequence[State],
        rows: Sequence[int],
        fed: Sequence[int] | torch.Tensor,
        taps: Sequence[int],
        all_logits: bool,
    ) -> Scores:
        check_extend(self.info, caches, rows)
        if not isinstance(fed, torch.Tensor):
            check_tokens(self.info, fed, self._rows)
        segments = [chunk(cache, count) for cache, count in zip(caches, rows, strict=True)]
        at = offsets(segments)
        wanted = None if all_logits else [stop - 1 for stop in at[1:]]
        result = self._pass(segments, fed, taps=taps, chunked=True, logits=wanted)
        for segment in segments:
            segment.cache.length += segment.slots
            if segment.recurrent is not None:
                segment.recurrent.advance(segment.slots)
        rows = at if all_logits else tuple(range(len(segments) + 1))
        return Scores(result.logits, rows, result.taps, result.best)

    @torch.inference_mode()
    def score(
        self,
        caches: Sequence[State],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `Runner.score`.

        Raises:
            ConfigError: a released cache, `computed` does not fit the previous call, or a path is longer than the
                context.
        """
        check_score(self.info, caches, trees)
        self._check_fed(roots, trees)
        segments = self._segments(caches, trees, computed)
        result: PassResult | None = None
        if self.graphs is not None:
            fed = [
                fed_tokens([root], [tree], [segment])
                for root, tree, segment in zip(roots, trees, segments, strict=True)
            ]
            result = self.graphs.run(segments, fed, taps)
        if result is None:
            result = self._pass(segments, fed_tokens(roots, trees, segments), taps=taps)
        return Scores(result.logits, offsets(segments), result.taps, result.best)

    @torch.inference_mode()
    def score_added(
        self,
        caches: Sequence[State],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        added: Sequence[AddedRows],
        *,
        taps: Sequence[int] = (),
    ) -> tuple[Scores, Scores]:
        """See `ScoresAddedRows.score_added`."""
        if self.spec.states and any(rows.layer for rows in added):
            raise CapabilityError(f"{self.info.name} has recurrent states, and takes rows before its first layer alone")
        check_score(self.info, caches, trees)
        self._check_fed(roots, trees)
        segments = self._segments(caches, trees, None)
        make_room(segments, added)
        result = AddedPass(self._run_added, self.embed, segments, fed_tokens(roots, trees, segments))
        return result.scores(added, taps)

    def _run_added(
        self,
        segments: Sequence[Segment],
        fed: Sequence[int] | torch.Tensor,
        plan: LayerPlan,
        taps: Collection[int],
        states: bool,
    ) -> PassResult:
        """See `models.runners.added_pass.Run`."""
        return self._pass(segments, fed, plan=plan, taps=taps, logits=() if states else None, states=states)

    def _check_fed(self, roots: Sequence[int], trees: Sequence[TokenTree]) -> None:
        check_tokens(self.info, roots, self._rows)
        for tree in trees:
            if len(tree):
                check_tokens(self.info, tree.tokens.tolist(), self._rows)

    @torch.inference_mode()
    def run_layers(
        self,
        caches: Sequence[State],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        plan: LayerPlan = ALL_LAYERS,
        hidden: torch.Tensor | None = None,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> PassResult:
        """See `RunsLayers.run_layers`.

        Raises:
            ConfigError: a pass that begins at a later layer without hidden states, or hidden states of the wrong shape.
        """
        if hidden is None:
            self._check_fed(roots, trees)
        segments = self._segments(caches, trees, computed)
        rows = sum(segment.rows for segment in segments)
        if hidden is None and plan.first:
            raise ConfigError(
                f"run_layers: a pass that begins at layer {plan.first} needs hidden states, got None; pass hidden="
            )
        if hidden is not None and hidden.shape != (rows, self.info.hidden_size):
            raise ConfigError(
                f"run_layers: hidden must be ({rows}, {self.info.hidden_size}), got {tuple(hidden.shape)}"
            )
        fed = fed_tokens(roots, trees, segments) if hidden is None else hidden.to(self.info.dtype)
        return self._pass(segments, fed, plan=plan, taps=taps, logits=(), states=True)

    @torch.inference_mode()
    def run_states(
        self,
        caches: Sequence[State],
        trees: Sequence[TokenTree],
        computed: Sequence[int],
        hidden: torch.Tensor,
        *,
        added_qkv: torch.Tensor | None = None,
        picked: Sequence[int] | None = None,
        unit: int = 1,
        taps: Sequence[int] = (),
    ) -> PassResult:
        """A pass of all layers over states (r, hidden) in place of tokens, for heads that are given a target's.

        Args:
            caches, trees, computed: as for `score`; tokens are not looked at.
            added_qkv: as of `Passes.run`, of the first layer alone. picked: rows whose logits are wanted, ascending;
                None means all.
            unit: inputs that are fed see each other in units of so many, which are chains, counted from the last one.
            taps: as of `score`, without `added_qkv`.
        Returns:
            Logits (picked, v) and states (r, hidden) behind the last layer, and the taps.
        """
        segments, plan = self._segments(caches, trees, computed), ALL_LAYERS
        if unit > 1:
            segments = [seeing_each_other(segment, unit) for segment in segments]
        if added_qkv is not None and self.info.num_layers > 1:
            hidden = self._pass(
                segments, hidden.contiguous(), plan=FIRST, logits=(), states=True, added_qkv=added_qkv
            ).states
            added_qkv, plan = None, LATER
        return self._pass(
            segments, hidden.contiguous(), plan=plan, taps=taps, logits=picked, states=True, added_qkv=added_qkv
        )

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """(r, hidden) input embeddings of tokens, the family's multiplier included."""
        return self.passes.embed(tokens)

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor, *, norm: bool = True) -> torch.Tensor:
        """(r, v) logits of hidden states (r, hidden) of any layer, after the final norm unless `norm` is False."""
        return self.passes.head(hidden, norm=norm)

    def _segments(
        self, caches: Sequence[State], trees: Sequence[TokenTree], computed: Sequence[int] | None
    ) -> list[Segment]:
        segments = []
        for i, (cache, tree) in enumerate(zip(caches, trees, strict=True)):
            done, keys = computed[i] if computed is not None else 0, keys_of(cache)
            if not 0 <= done <= min(keys.scratch, len(tree)):
                raise ConfigError(
                    f"computed[{i}] must lie in 0..{min(keys.scratch, len(tree))} (inputs already scored, one left), "
                    f"got {done}"
                )
            segment = tree_segment(cache, tree, done)
            keys.reserve(segment.slots)
            keys.scratch = segment.slots
            if segment.recurrent is not None:
                segment.recurrent.scored = segment.slots
            segments.append(segment)
        return segments

    def _pass(
        self,
        segments: Sequence[Segment],
        fed: Sequence[int] | torch.Tensor,
        *,
        plan: LayerPlan = ALL_LAYERS,
        taps: Collection[int] = (),
        chunked: bool = False,
        logits: Sequence[int] | None = None,
        states: bool = False,
        added_qkv: torch.Tensor | None = None,
    ) -> PassResult:
        lengths: Sequence[tuple[int, int]] = ()
        if self.rotary.depends_on_length:
            lengths = self._lengths(segments, chunked)
        return self.passes.run(segments, fed, lengths, plan, taps, logits=logits, states=states, added_qkv=added_qkv)


def _without_keys(spec: ModelSpec) -> list[int]:
    """Layers that keep no keys and values; those of a source that a layer attends to lie in the arena, too."""
    return [index for index, layer in enumerate(spec.layers) if not layer.keeps_keys and spec.encoder is None]


def _compiled(
    spec: ModelSpec,
    weights: Weights,
    arena: Arena,
    *,
    blocks: Blocks | None,
    packed: PackedWeights | None,
    activation_bits: int,
    selection: KVSelection | None,
) -> Passes:
    """Compiled passes; the compiler is loaded where they run only."""
    from paceline.models.passes.compiled_decoder import CompiledDecoder

    gaps = selection if isinstance(selection, Gaps) else None
    chosen = selection if isinstance(selection, DoubleSparsity) else None
    if selection is not None and gaps is None and chosen is None:
        raise ConfigError(
            f"kv_selection={selection.name!r} has no compiled passes; its class must say compiles = False"
        )
    return CompiledDecoder(
        spec, weights, arena, blocks=blocks, packed=packed, activation_bits=activation_bits, selection=chosen, gaps=gaps
    )


def _describe(
    spec: ModelSpec,
    weights: Weights,
    blocks: Blocks,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    activation_bits: int,
) -> ModelInfo:
    """What is known of a model before its weights are packed."""
    quantization = BLOCKS if blocks else form_of(weights)
    forms = f"-{quantization}" if quantization else ""
    if blocks:
        forms = f"-{'+'.join(kinds_of(blocks))}-a{activation_bits}"
    read = sum(int(rows.nbytes * _share_read(spec, key)) for key, rows in blocks.items() if key != "embed.weight")
    return ModelInfo(
        name=name,
        family=spec.family,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_layers=spec.num_layers,
        max_context=spec.max_context,
        declared_context=spec.max_context,
        rope_border=_dynamic_border(spec),
        device=device,
        dtype=dtype,
        weight_bytes=bytes_read(spec, weights) + read,
        fingerprint=fingerprint(spec, dtype) + forms + ("-mixed" if is_mixed(weights) else ""),
        quantization=quantization,
        stored_rows=spec.stored_rows,
    )


def _dynamic_border(spec: ModelSpec) -> int | None:
    """See `ModelInfo.rope_border`."""
    return min((rope.max_position for rope in spec.ropes.values() if rope.kind == "dynamic"), default=None)


def bytes_read(spec: ModelSpec, weights: Mapping[str, torch.Tensor]) -> int:
    """Bytes of weights that one pass of one row reads: all but the embedding (unless tied) and the experts left out."""
    beside_head = "embed.weight" if not spec.tied or is_quantized(weights) else ""
    return sum(int(weight.nbytes * _share_read(spec, name)) for name, weight in weights.items() if name != beside_head)


def _share_read(spec: ModelSpec, name: str) -> float:
    """Of a weight, how much a pass of one row reads."""
    return spec.moe.top_k / spec.moe.experts if spec.moe is not None and ".experts." in name else 1.0


def fingerprint(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Names the shape and type of a model: what costs that were measured belong to."""
    experts = f"-{spec.moe.experts}x{spec.moe.intermediate}" if spec.moe else ""
    heads = f"{spec.num_heads}/{spec.num_kv_heads}x{spec.head_dim}"
    sizes = f"{spec.intermediate_size}{experts}-{spec.stored_rows or spec.vocab_size}"
    return f"{spec.family}-{spec.hidden_size}x{spec.num_layers}-{heads}-{sizes}-{str(dtype).removeprefix('torch.')}"
