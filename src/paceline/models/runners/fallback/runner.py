"""The fallback runner: any causal model of transformers behind the Runner protocol.

Every sequence has its own history and its own forward pass. A branching tree would need masks that a foreign model may
not take, so it is rejected; chains, forks and taps of hidden states work.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from paceline.errors import CapabilityError, CheckpointError, ConfigError, PacelineError, UnsupportedModelError
from paceline.models.abilities import check_inputs
from paceline.models.base import Capabilities, ModelInfo
from paceline.models.checks import check_chains, check_extend, check_score, check_tokens
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.runners.fallback.transformers_cache import CausalModel, History, PassOutput, choose_history
from paceline.tree import Scores, TokenTree

log = logging.getLogger("paceline")

UNLIMITED = 2**20
"""Longest context of models that declare none (recurrent ones)."""


class FallbackCache:
    """One sequence: its history, of which the first `length` tokens are committed.

    The rest was scored and waits for a commit.

    Attributes:
        marked: the history was marked since the tokens that wait were first scored.
    """

    def __init__(self, history: History) -> None:
        self.history: History | None = history
        self.length = 0
        self.marked = False

    def opened(self) -> History:
        """The history, unless the sequence was released.

        Raises:
            ConfigError: it was.
        """
        if self.history is None:
            raise ConfigError("this sequence's cache was released; open a new one with runner.open()")
        return self.history


class TransformersRunner:
    """See `models.base.Runner`. `score` takes chains only.

    Args:
        model: an AutoModelForCausalLM, or anything that is called like one; moved to nowhere, set to evaluation.
        name: for messages.
        max_context: most tokens of a sequence; None takes the configuration's.
        tokens: ids that are tokens lie below, and logits of those beyond are left out; None takes all.
    Raises:
        ConfigError: more context than the configuration declares.
    """

    def __init__(self, model: Any, *, name: str, max_context: int | None = None, tokens: int | None = None) -> None:
        model.eval()
        self.model = model
        first = next(model.parameters())
        caller = self._caller(model, first.device)
        declared = _declared_context(model.config)
        if max_context is not None and not 2 <= max_context <= declared:
            raise ConfigError(f"max_model_len must lie in 2..{declared}, the context of {name}, got {max_context}")
        limit = max_context or declared
        rows = int(caller.run([0], keep=False).logits.shape[-1])
        vocab_size = rows if tokens is None else min(rows, tokens)
        table = model.get_input_embeddings()
        self._rows = rows if table is None else int(table.weight.shape[0])
        self.make_history = self._history_maker(caller, vocab_size, limit)
        history = self.make_history()
        self.history_kind = type(history).__name__
        self.info = _describe(model, name=name, vocab_size=vocab_size, max_context=limit, first=first)
        if vocab_size < rows:
            self.info = replace(self.info, stored_rows=rows)
        taps = _can_tap(caller, self.info.hidden_size)
        self.capabilities = Capabilities(taps=taps, fork=True, drafts=not history.singly)

    def _caller(self, model: Any, device: torch.device) -> CausalModel:
        return CausalModel(model, device)

    def _history_maker(self, caller: CausalModel, vocab_size: int, max_context: int) -> Callable[[], History]:
        return choose_history(caller, vocab_size, max_context)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        name: str,
        device: torch.device | str,
        dtype: torch.dtype | str,
        trust_remote_code: bool = False,
        max_context: int | None = None,
        tokens: int | None = None,
    ) -> TransformersRunner:
        """Load a checkpoint folder with transformers, from safetensors files only.

        Args:
            dtype: a torch dtype, its name, or "auto" for the checkpoint's.
            trust_remote_code: run Python code that lies in the folder.
        Raises:
            UnsupportedModelError: an architecture unknown to transformers too, code that is not trusted, a quantised
                checkpoint.
            CheckpointError: missing, incomplete or inconsistent files.
        """
        from transformers import AutoConfig

        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        try:
            config = AutoConfig.from_pretrained(str(folder), **options)
        except Exception as error:  # transformers raises whatever its configuration classes raise
            raise _refusal(error, name) from error
        if getattr(config, "quantization_config", None):
            raise UnsupportedModelError(
                f"{name} is a quantised checkpoint, which is not supported; use the original weights"
            )

        def loaded(shape: Any) -> Loaded:
            with quiet():
                model, report = cls._loader(shape).from_pretrained(
                    str(folder), config=shape, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
                )
            return model, report

        try:
            model, report = loaded(config)
        except Exception as error:  # as above
            alone = _text_alone(loaded, config, cls._loader(config))
            if alone is None:
                raise _refusal(error, name) from error
            model, report = alone
        _check_complete(report, name)
        return cls._started(model.to(device), name, max_context, tokens)

    @classmethod
    def _loader(cls, config: Any) -> Any:
        """The class of transformers that loads such a model."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM

    @classmethod
    def _started(cls, model: Any, name: str, max_context: int | None, tokens: int | None) -> TransformersRunner:
        """A runner that has run one token: a configuration that loads may still not run."""
        try:
            runner = cls(model, name=name, max_context=max_context, tokens=tokens)
            runner.extend([runner.open()], [[0]])
        except PacelineError:
            raise
        except Exception as error:  # whatever the model's code raises about its configuration
            raise _refusal(error, name) from error
        return runner

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> FallbackCache:
        """See `Runner.open`; the length of the prompt is not used."""
        check_inputs(self, inputs)
        return FallbackCache(self.make_history())

    def extend(
        self,
        caches: Sequence[FallbackCache],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `Runner.extend`."""
        self._check_taps(taps)
        check_extend(self.info, caches, [len(new) for new in tokens])
        fed = []
        for cache, new in zip(caches, tokens, strict=True):
            if not len(new):
                raise ConfigError(
                    "extend needs at least one token for each sequence, got none; leave that sequence out"
                )
            check_tokens(self.info, new, self._rows)
            history = _cut(cache, cache.length)
            fed.append(history.feed([int(token) for token in new], last_only=not all_logits, taps=taps))
            cache.length += len(new)
        return _scores(fed, taps, self.info.vocab_size)

    def score(
        self,
        caches: Sequence[FallbackCache],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `Runner.score`.

        Raises:
            CapabilityError: a tree that branches.
        """
        self._check_taps(taps)
        check_chains(f"{self.info.name} runs through transformers, which", trees)
        check_score(self.info, caches, trees)
        fed = []
        for i, (cache, root, tree) in enumerate(zip(caches, roots, trees, strict=True)):
            chain, done = [int(root), *tree.tokens.tolist()], 0 if computed is None else computed[i]
            check_tokens(self.info, chain, self._rows)
            again = len(cache.opened().tokens) > cache.length
            history = _cut(cache, cache.length + done)
            if done >= len(chain) or history.tokens[cache.length :] != chain[:done]:
                raise ConfigError(
                    f"score: the first {done} inputs of sequence {i} are not those scored before; pass computed=0"
                )
            cache.marked = cache.marked and done > 0
            if not cache.marked and (len(chain) > 1 or again):  # a plain step stays, unless it is scored again
                history.mark()
                cache.marked = True
            fed.append(history.feed(chain[done:], taps=taps))
        return _scores(fed, taps, self.info.vocab_size)

    def commit(self, caches: Sequence[FallbackCache], paths: Sequence[Sequence[int]]) -> None:
        """See `Runner.commit`."""
        for cache, path in zip(caches, paths, strict=True):
            kept = cache.length + 1 + len(path)
            if list(path) != list(range(len(path))) or kept > len(cache.opened().tokens):
                raise ConfigError(f"commit: path {list(path)} does not lie in the chain last scored; score first")
            cache.opened().rewind(kept)
            cache.length = kept

    def truncate(self, cache: FallbackCache, length: int) -> None:
        """See `Runner.truncate`."""
        if not 0 <= length <= cache.length:
            raise ConfigError(f"truncate: length must lie in 0..{cache.length}, got {length}")
        cache.opened().rewind(length)
        cache.length = length

    def fork(self, cache: FallbackCache) -> FallbackCache:
        """See `Runner.fork`; keys and values are shared, recurrent states are copied."""
        other = FallbackCache(cache.opened().fork())
        other.opened().rewind(cache.length)
        other.length = cache.length
        return other

    def release(self, cache: FallbackCache) -> None:
        """See `Runner.release`."""
        cache.history = None

    def _check_taps(self, taps: Sequence[int]) -> None:
        if taps and not self.capabilities.taps:
            raise CapabilityError(
                f"{self.info.name} runs through transformers, and its layers were not found; taps need them"
            )
        for layer in taps:
            if not -1 <= layer <= self.info.num_layers:
                raise ConfigError(f"taps must lie in -1..{self.info.num_layers}, got {layer}")


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and reports of transformers meanwhile: what matters of them is an error of ours."""
    from transformers.utils import logging as reports

    level, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity(logging.CRITICAL)
    reports.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(level)
        if bars:
            reports.enable_progress_bar()


def _cut(cache: FallbackCache, length: int) -> History:
    """The history without what is behind its first `length` tokens."""
    history = cache.opened()
    if length < len(history.tokens):
        history.rewind(length)
    return history


def _scores(fed: Sequence[PassOutput], taps: Sequence[int], vocab_size: int) -> Scores:
    rows = tuple(accumulate((len(output.logits) for output in fed), initial=0))
    return Scores(
        torch.cat([output.logits[:, :vocab_size] for output in fed]),
        rows,
        {layer: torch.cat([output.taps[layer] for output in fed]) for layer in set(taps)},
    )


def _can_tap(caller: CausalModel, hidden_size: int) -> bool:
    """Whether every layer was found and gives one hidden state a token."""
    if not caller.num_layers or caller.model.get_output_embeddings() is None:
        return False
    layers = range(-1, caller.num_layers + 1)
    tapped = caller.run([0, 0], keep=False, taps=layers).taps
    return all(layer in tapped and tapped[layer].shape == (2, hidden_size) for layer in layers)


def _declared_context(config: Any) -> int:
    """The longest sequence.

    For longrope it ends where the angles change: transformers would leave those of the cache as they are, so that a
    drafted text would have other logits than a plain one.
    """
    text = config.get_text_config()
    keys = (
        *("max_decoder_position_embeddings", "max_target_positions", "max_position_embeddings", "n_positions"),
        *("max_seq_len", "seq_length", "context_length"),
    )
    sizes = [size for key in keys if isinstance(size := getattr(text, key, None), int) and size > 0]
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = rope.values() if rope and all(isinstance(kind, Mapping) for kind in rope.values()) else [rope]
    borders = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"]
    return min([*sizes[:1], *(border for border in borders if border)], default=UNLIMITED)


def _describe(model: Any, *, name: str, vocab_size: int, max_context: int, first: torch.Tensor) -> ModelInfo:
    config = model.config.get_text_config()
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    read = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    if table is not None and (head is None or head.weight is not table.weight):
        read -= table.weight.numel() * table.weight.element_size()  # a lookup reads rows, not the table
    shapes = sorted(f"{key}{tuple(weight.shape)}" for key, weight in model.named_parameters())
    digest = hashlib.sha256(" ".join(shapes).encode()).hexdigest()[:12]
    return ModelInfo(
        name=name,
        family=str(model.config.model_type),
        vocab_size=vocab_size,
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        max_context=max_context,
        declared_context=_declared_context(model.config),
        device=first.device,
        dtype=model.dtype,
        weight_bytes=read,
        fingerprint=f"transformers-{model.config.model_type}-{digest}-{str(model.dtype).removeprefix('torch.')}",
        passes="transformers",
    )


Loaded = tuple[Any, Mapping[str, Any]]
"""A model of transformers, and its report of what was in the files."""


def _text_alone(loaded: Callable[[Any], Loaded], config: Any, loader: Any) -> Loaded | None:
    """The text part of a model that cannot be loaded as a whole: what reads pictures and sounds may need packages that
    are not there (timm for Gemma 3n). None where transformers has no class for it, or cannot load that either.
    """
    text = config.get_text_config()
    if text is config or type(text) not in getattr(loader, "_model_mapping", {}):
        return None
    try:
        return loaded(text)
    except Exception as error:  # transformers raises anything; what the whole model lacks is told
        log.debug("the text part alone cannot be loaded: %s", error)
        return None


def _check_complete(report: Mapping[str, Any], name: str) -> None:
    lacking = sorted(str(key) for key in (*report.get("missing_keys", ()), *report.get("mismatched_keys", ())))
    if lacking:
        raise CheckpointError(
            f"{name} lacks {len(lacking)} of its weights, first {lacking[0]}; download the checkpoint again"
        )


def _refusal(error: Exception, name: str) -> CheckpointError:
    """One line for an error of transformers."""
    whole = " ".join(str(error).split())
    said = whole[:300]
    if "trust_remote_code" in whole:
        return UnsupportedModelError(f"{name} brings its own code; pass trust_remote_code=True if you trust it")
    if "does not recognize this architecture" in said or "Unrecognized" in said:
        return UnsupportedModelError(
            f"{name} has an architecture that neither we nor transformers know as a causal model ({said})"
        )
    return CheckpointError(
        f"{name} cannot be loaded by transformers ({type(error).__name__}: {said}); check the folder"
    )
