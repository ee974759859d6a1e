"""What a transformers model remembers of one sequence, and how it is made to forget.

Three kinds, from fast to general. A cache of plain keys and values is *cropped*. Recurrent states, convolutions and
caches that drop old keys cannot be: they are *replayed*, from what was copied of them before the drafts were fed, or
from the start; keys and values beside them are cropped all the same. A model without any usable cache is *recomputed*
from its first token at every step. `choose_history` tries them on the model itself and takes the first whose logits are
those of one pass over the whole text.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import nn

logger = logging.getLogger("paceline")

CHUNKS, SINGLY = "replayed", "replayed one by one"

ROUNDING: Final = 1.5
"""A recurrent state that takes several tokens at once may be this much less exact than one that takes them singly: a
wrong state differs little from a right one in half precision, where no absolute limit tells them apart.
"""

Taps = dict[int, torch.Tensor]


@dataclass(slots=True)
class PassOutput:
    """What one pass gave: logits (m, v) of the tokens fed, or (1, v) of the last; taps, layer -> (m, hidden); the
    model's cache.
    """

    logits: torch.Tensor
    taps: Taps = field(default_factory=dict)
    cache: Any = None


class CausalModel:
    """One way to call any AutoModelForCausalLM.

    Args:
        layers_of: the part of the model whose layers can be tapped; None for all of it.

    Attributes:
        cache_key: the argument and output that carries the cache ("cache", "past_key_values", "cache_params"), or None.
        num_layers: layers that can be tapped, 0 if they were not found.
    """

    def __init__(self, model: Any, device: torch.device, layers_of: Any = None) -> None:
        known = inspect.signature(model.forward).parameters
        self.model, self.device = model, device
        self.cache_key = next((key for key in ("cache", "past_key_values", "cache_params") if key in known), None)
        self._short_head = "logits_to_keep" in known
        self._layers = _decoder_layers(model) if layers_of is None else _first_layers(layers_of)
        self.num_layers = len(self._layers)

    def run(
        self,
        tokens: Sequence[int],
        cache: Any = None,
        *,
        keep: bool = True,
        last_only: bool = False,
        taps: Sequence[int] = (),
    ) -> PassOutput:
        """One forward pass over `tokens` behind what `cache` holds; `keep` asks for a cache."""
        options: dict[str, Any] = {"use_cache": keep}
        if cache is not None and self.cache_key is not None:
            options[self.cache_key] = cache
        if last_only and self._short_head and self.num_layers not in taps:
            options["logits_to_keep"] = 1
        tapped: Taps = {}
        hooks = [self._tap(layer, tapped) for layer in set(taps)]
        try:
            with torch.inference_mode():
                output = self._call(torch.tensor([list(tokens)], device=self.device), options)
        finally:
            for hook in hooks:
                hook.remove()
        logits = output.logits[0, -1:] if last_only else output.logits[0]
        return PassOutput(logits, tapped, None if self.cache_key is None else getattr(output, self.cache_key, None))

    def new_cache(self) -> Any:
        """A cache that keeps every key, in sliding-window layers too: their masks hide what lies outside the window."""
        from transformers import DynamicCache

        return DynamicCache()

    def crop(self, cache: Any, extra: int) -> None:
        """Forget the last tokens of a text, so many."""
        cache.crop(-extra)  # negative: that many tokens less, in every version of transformers 5

    def copied(self, cache: Any) -> Any:
        """A cache that goes its own way; tensors are shared, since they are never written in place."""
        other = copy.copy(cache)
        other.layers = [copy.copy(layer) for layer in cache.layers]
        return other

    def _call(self, tokens: torch.Tensor, options: dict[str, Any]) -> Any:
        """The model's output for (1, n) tokens."""
        return self.model(input_ids=tokens, **options)

    def _tap(self, layer: int, tapped: Taps) -> Any:
        """A hook that puts the output of `layer` into `tapped`; -1: the first layer's input, num_layers: the head's."""

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tapped[layer] = (args[0] if args else kwargs["hidden_states"])[0]

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            tapped[layer] = (output[0] if isinstance(output, tuple | list) else output)[0]

        if layer == -1:
            return self._layers[0].register_forward_pre_hook(before, with_kwargs=True)
        if layer == self.num_layers:
            return self.model.get_output_embeddings().register_forward_pre_hook(before, with_kwargs=True)
        return self._layers[layer].register_forward_hook(after)


def _decoder_layers(model: Any) -> Sequence[nn.Module]:
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return list(module)
    return ()


def _first_layers(part: Any) -> Sequence[nn.Module]:
    return next((list(module) for module in part.modules() if isinstance(module, nn.ModuleList) and len(module)), ())


class History:
    """The tokens of one sequence that the model has seen; the base recomputes everything at every step.

    It goes back by `mark` and `rewind`, whatever the model remembers; states of native models do so part by part
    (models.state.parts.StatePart).

    Attributes:
        singly: tokens behind the first chunk take a pass each, so that nothing is gained by drafting any.
    """

    singly = False

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.tokens: list[int] = []

    def feed(self, tokens: Sequence[int], *, last_only: bool = False, taps: Sequence[int] = ()) -> PassOutput:
        """Append tokens; logits and taps cover the new tokens only."""
        new = len(tokens)
        self.tokens += tokens
        fed = self.model.run(self.tokens, keep=False, last_only=last_only, taps=taps)
        return PassOutput(fed.logits[-new:], {layer: states[-new:] for layer, states in fed.taps.items()})

    def mark(self) -> None:
        """Drafts come next: make going back to here cheap."""

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        del self.tokens[length:]

    def fork(self) -> History:
        """A copy that goes its own way."""
        other = type(self)(self.model)
        other.tokens = list(self.tokens)
        return other


class CroppedHistory(History):
    """A cache of keys and values in full; tensors are never written in place, so that forks share them."""

    def __init__(self, model: CausalModel) -> None:
        super().__init__(model)
        self.cache = model.new_cache()

    def feed(self, tokens: Sequence[int], *, last_only: bool = False, taps: Sequence[int] = ()) -> PassOutput:
        fed = self.model.run(tokens, self.cache, last_only=last_only, taps=taps)
        self.tokens += tokens
        return fed

    def rewind(self, length: int) -> None:
        extra = len(self.tokens) - length
        if length == 0:
            self.cache = self.model.new_cache()
        elif extra > 0:
            self.model.crop(self.cache, extra)
        super().rewind(length)

    def fork(self) -> History:
        other = CroppedHistory(self.model)
        other.tokens, other.cache = list(self.tokens), self.model.copied(self.cache)
        return other


class ReplayedHistory(History):
    """Whatever cache the model makes for itself; what of it cannot be cropped is copied before drafts are fed.

    Args:
        singly: feed the tokens behind the first chunk singly, for models whose state cannot take several at once.
    """

    def __init__(self, model: CausalModel, *, singly: bool = False) -> None:
        super().__init__(model)
        self.singly = singly
        self.cache: Any = None
        self._saved: tuple[int, Any] | None = None  # (length, what `before_drafts` gave at that length)

    def feed(self, tokens: Sequence[int], *, last_only: bool = False, taps: Sequence[int] = ()) -> PassOutput:
        single = self.singly and bool(self.tokens)
        parts = []
        for chunk in [[token] for token in tokens] if single else [list(tokens)]:
            parts.append(self.model.run(chunk, self.cache, last_only=last_only, taps=taps))
            self.cache = parts[-1].cache
            self.tokens += chunk
        if len(parts) == 1:
            return parts[0]
        logits = parts[-1].logits if last_only else torch.cat([part.logits for part in parts])
        return PassOutput(logits, {layer: torch.cat([part.taps[layer] for part in parts]) for layer in set(taps)})

    def mark(self) -> None:
        with torch.inference_mode():
            self._saved = len(self.tokens), before_drafts(self.cache)

    def rewind(self, length: int) -> None:
        if length == len(self.tokens):
            return
        known, (at, saved) = self.tokens[:length], self._saved or (0, None)
        self._saved = None  # it is about to be written to
        if at > length or saved is None:
            self.tokens, self.cache = [], None
        else:
            self.cache = gone_back(self.cache, saved, len(self.tokens) - at)
            self.tokens = known[:at]
        if at == length:
            return
        if replay := known[len(self.tokens) :]:
            self.feed(replay, last_only=True)

    def fork(self) -> History:
        other = ReplayedHistory(self.model, singly=self.singly)
        with torch.inference_mode():
            other.tokens, other.cache = list(self.tokens), own_cache(self.cache)
        return other


def before_drafts(cache: Any) -> Any:
    """What `gone_back` needs of a cache: for each layer what cannot be cropped, None where all can; the whole cache
    where it is of another class than transformers' own; None of none.
    """
    from transformers import DynamicCache

    if type(cache) is not DynamicCache:
        return copy.deepcopy(cache)
    kept = [own_layer(layer) for layer in cache.layers]
    for number, layer in enumerate(kept):
        if type(layer) in _layer_kinds().cropped:
            kept[number] = None
        elif type(layer) in _layer_kinds().half_cropped:
            layer.keys = layer.values = None
    return kept


def gone_back(cache: Any, saved: Any, extra: int) -> Any:
    """The cache without its last `extra` tokens, before which `saved` was taken; neither may be used any more."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer

    if type(cache) is not DynamicCache:
        return saved
    for number, (layer, before) in enumerate(zip(cache.layers, saved, strict=True)):
        if before is None:
            layer.crop(-extra)
            continue
        if type(layer) in _layer_kinds().half_cropped:
            DynamicLayer.crop(layer, -extra)
            before.keys, before.values = layer.keys, layer.values
        cache.layers[number] = before
    return cache


def own_cache(cache: Any) -> Any:
    """A cache that goes its own way: keys and values, which are replaced and never written into, are shared."""
    from transformers import DynamicCache

    if type(cache) is not DynamicCache:
        return copy.deepcopy(cache)
    other = copy.copy(cache)
    other.layers = [own_layer(layer) for layer in cache.layers]
    return other


class _LayerKinds(NamedTuple):
    """Classes of transformers for what a cache holds of one layer, by how they are taken back.

    Attributes:
        cropped: keys and values of all tokens, or nothing.
        windowed: keys and values of the last tokens.
        states: convolutions and recurrent states, which are overwritten in place, alone or beside keys and values of
            the last tokens. half_cropped: those beside keys and values of all tokens.
    """

    cropped: Collection[type]
    windowed: Collection[type]
    states: Collection[type]
    half_cropped: Collection[type]


@lru_cache
def _layer_kinds() -> _LayerKinds:
    """Empty where a version of transformers has no such class."""
    from transformers import cache_utils

    def named(*names: str) -> Collection[type]:
        return frozenset(getattr(cache_utils, name) for name in names if hasattr(cache_utils, name))

    return _LayerKinds(
        named("DynamicLayer", "DummyLayer"),
        named("DynamicSlidingWindowLayer"),
        named("LinearAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"),
        named("LinearAttentionAndFullAttentionLayer"),
    )


def own_layer(layer: Any) -> Any:
    """A copy of one layer's cache that shares keys and values alone; of an unknown class a copy of everything."""
    kinds, kind = _layer_kinds(), type(layer)
    if kind in kinds.cropped or kind in kinds.windowed:
        return copy.copy(layer)
    if kind not in kinds.states and kind not in kinds.half_cropped:
        return copy.deepcopy(layer)
    other = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):  # a state, or what is known of it, by its number
            own = {key: one.clone() if isinstance(one, torch.Tensor) else one for key, one in value.items()}
            setattr(other, name, own)
    return other


def choose_history(model: CausalModel, vocab_size: int, max_context: int) -> Callable[[], History]:
    """How this model's sequences are kept.

    The first kind that reproduces a pass over the whole text on a short random one.
    """
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(0, vocab_size, (min(9, max_context),), generator=generator).tolist()
    if len(tokens) < 9:
        return lambda: History(model)
    expected = model.run(tokens, keep=False).logits.float()
    candidates = _candidates(model, tokens)
    errors = {name: error_of(name, make, tokens, expected) for name, make in candidates.items()}
    limit = 3e-5 if model.model.dtype == torch.float32 else 0.1
    limits = {CHUNKS: min(limit, ROUNDING * errors.get(SINGLY, math.inf) + 1e-6)}
    fitting = [make for name, make in candidates.items() if errors[name] <= limits.get(name, limit)]
    return fitting[0] if fitting else lambda: History(model)


def error_of(name: str, make: Callable[[], History], tokens: Sequence[int], expected: torch.Tensor) -> float:
    """How far a history is off, as the mean difference of logits relative to how much they vary; infinity if it does
    not work.
    """
    spread = float((expected - expected.mean()).abs().mean())
    try:
        error = float((_trial(make(), tokens) - expected).abs().mean()) / max(spread, 1e-30)
    except Exception as failure:  # a foreign model may raise anything; what else there is needs less of it
        logger.debug("history %r does not work for this model: %s", name, failure)
        return math.inf
    logger.debug("history %r is off by %.2g of the logits' spread", name, error)
    return error


def _candidates(model: CausalModel, tokens: Sequence[int]) -> dict[str, Callable[[], History]]:
    """Kinds that this model may allow, the fastest first."""
    from transformers import DynamicCache

    try:
        cache = model.run(tokens[:2]).cache
    except Exception as failure:  # as in `error_of`
        logger.debug("this model makes no cache: %s", failure)
        return {}
    if cache is None:
        return {}
    plain = {*_layer_kinds().cropped, *_layer_kinds().windowed}
    whole = type(cache) is DynamicCache and all(type(layer) in plain for layer in cache.layers)
    kinds: dict[str, Callable[[], History]] = {"cropped": lambda: CroppedHistory(model)} if whole else {}
    return kinds | {CHUNKS: lambda: ReplayedHistory(model), SINGLY: lambda: ReplayedHistory(model, singly=True)}


def _trial(history: History, tokens: Sequence[int]) -> torch.Tensor:
    """Logits at every token, with wrong drafts fed and taken back twice on the way."""
    rows = [history.feed(tokens[:4]).logits]
    for start, stop in ((4, 7), (7, 9)):
        history.mark()
        history.feed([*tokens[start : start + 1], *tokens[:3]])
        history.rewind(start + 1)
        history.rewind(start)
        rows.append(history.feed(tokens[start:stop]).logits)
    return torch.cat(rows).float()
