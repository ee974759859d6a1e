"""Models and heads beside the target: drafts of the same or another tokenizer, rounded copies of the target itself, and
trained heads, on the device where they are fastest.

A draft's tokens, and above temperature 0 the distributions they were drawn from, are all that crosses between devices;
so what a level takes on each of them, the way back to the host included, is what decides where a draft runs. It is
measured on the device itself, once per draft model.

Source: Dovetail: a CPU/GPU heterogeneous speculative decoding for LLM inference (arXiv:2412.18934).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, Final, TypeVar

import torch

from paceline.checkpoints import Tokenizer, head_share, mask_token, read_config, resolve, same_tokenizer
from paceline.config import NOT_QUANTIZED, QUANTIZATIONS, EngineConfig
from paceline.drafters.vocab import counts_path
from paceline.errors import ConfigError, DrafterError, OutOfMemoryError
from paceline.models import (
    Denoiser,
    ModelInfo,
    Runner,
    has_ability,
    load_denoiser,
    load_runner,
    load_source_draft,
    memory_of,
    resolve_device,
    source_draft_target,
    stored_embedding,
)
from paceline.models.heads import DraftExits
from paceline.models.runners import SourceDraftRunner

logger = logging.getLogger("paceline")

H = TypeVar("H")

AUTO: Final = "auto"
LEVELS, CONTEXT, REPEATS = 4, 32, 5
"""Tokens of a timed draft, of the text before it, and how often it is timed; the least time counts."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a draft model goes.

    Attributes:
        device: the chosen one. seconds: of a level, by device; empty where there was no choice.
        full: devices that have no room for it.
    """

    device: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    full: Sequence[str] = ()

    def words(self, model: str) -> str:
        """What was decided, and why."""
        if not self.seconds:
            return f"draft model {model!r} runs on {self.device}: there is no other device here"
        each = ", ".join(f"{1e3 * seconds:.3g} ms on {device}" for device, seconds in self.seconds.items())
        lacking = f"; {', '.join(self.full)} has no room for it" if self.full else ""
        return f"draft model {model!r} runs on {self.device}: a level takes {each}{lacking}"


def place_draft_model(devices: Sequence[str], seconds_of: Callable[[str], float]) -> Placement:
    """The device where a level takes the least time; of equal ones the first.

    Args:
        devices: the target's first; a single one is taken without a measurement.
        seconds_of: loads the draft on a device and times a level.
    Raises:
        OutOfMemoryError: no device has room for the draft.
    """
    if len(devices) == 1:
        return Placement(devices[0])
    seconds: dict[str, float] = {}
    full: dict[str, OutOfMemoryError] = {}
    for device in devices:
        try:
            seconds[device] = seconds_of(device)
        except OutOfMemoryError as error:
            full[device] = error
    if not seconds:
        raise full[devices[0]]
    return Placement(min(seconds, key=lambda device: seconds[device]), seconds, tuple(full))


def devices_for(target: torch.device) -> list[str]:
    """The devices of this machine, the target's first and under its own name."""
    others = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return [str(target), *(device for device in (*others, "cpu") if not _same(torch.device(device), target))]


def requested_device(option: Any, target: torch.device) -> str:
    """`AUTO`, or the device that an option `draft_device` names; None is the target's own.

    Raises:
        ConfigError: no device, or none of this machine.
    """
    if option is not None and not isinstance(option, str):
        raise ConfigError(f"draft_device must be auto, cpu, cuda or cuda:N, got {option!r}")
    if option == AUTO:
        return AUTO
    chosen = target if option is None else resolve_device(option, name="draft_device")
    return str(target if _same(chosen, target) else chosen)


def _same(one: torch.device, other: torch.device) -> bool:
    """Whether both are one device: "cuda" is "cuda:0"."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def level_seconds(runner: Runner) -> float:
    """Seconds of a drafted token, the way of the token to the host included."""
    context = max(1, min(CONTEXT, runner.info.max_context - LEVELS - 1))
    cache = runner.open()
    try:
        runner.extend([cache], [[1] * context])
        if (memory := memory_of(runner)) is not None:
            memory.keep_state(cache)  # to come back to
        times = []
        for _ in range(1 + REPEATS):  # the first one warms up
            start = perf_counter()
            _draft(runner, cache)
            times.append(perf_counter() - start)
            runner.truncate(cache, context)
    finally:
        runner.release(cache)
    return min(times[1:]) / LEVELS


def _draft(runner: Runner, cache: Any) -> None:
    """One greedy chain, as drafters draft it."""
    token = 1
    for _ in range(LEVELS):
        token = int(runner.extend([cache], [[token]]).logits[0].argmax())
        token = min(token, runner.info.vocab_size - 1)


class DraftModels:
    """See `drafters.base.Models`.

    Args:
        folder: of the target's checkpoint. tokenizer, info: the target's. config: how it was loaded.
        lora: folder of the adapter that is merged into the target, and into copies of it.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: Tokenizer,
        info: ModelInfo,
        config: EngineConfig,
        *,
        trust_remote_code: bool = False,
        lora: str | Path | None = None,
    ) -> None:
        self.folder, self.tokenizer, self.info, self.config = folder, tokenizer, info, config
        self._trust, self._lora = trust_remote_code, lora
        self.known: dict[tuple[object, ...], Runner] = {}
        self._placed: dict[tuple[object, ...], str] = {}
        self._denoisers: dict[tuple[str, str], Denoiser] = {}
        self._tokenizers: dict[str, Tokenizer] = {}
        self._on_sources: dict[tuple[str, str | None], SourceDraftRunner] = {}

    def open(
        self,
        model: str,
        *,
        head_rows: Sequence[int] | None = None,
        other_tokens: bool = False,
        layers: bool = False,
        device: str | None = None,
        group_size: int | None = None,
    ) -> Runner:
        """See `drafters.base.Models.open`.

        Raises:
            ConfigError: no device of this machine.
            DrafterError: another tokenizer, unless `other_tokens`.
            CheckpointError: nothing to load there.
            OutOfMemoryError: it would not fit.
            UnsupportedModelError: `head_rows`, `layers` or `group_size` of a model without a native runner.
        """
        where = requested_device(device, self.info.device)
        key = ("open", model, _named(head_rows), layers, group_size)

        def on(chosen: str) -> Runner:
            more = {"head_rows": head_rows, "group_size": group_size}
            return self._once((*key, chosen), lambda: self._load(model, chosen, not other_tokens, layers, more))

        if where != AUTO:
            return on(where)
        if key not in self._placed:
            self._placed[key] = self._place(model, key, on)
        return on(self._placed[key])

    def _place(self, model: str, key: tuple[object, ...], on: Callable[[str], Runner]) -> str:
        """The device on which a draft model is fastest; what was loaded elsewhere to find out is let go."""
        before = set(self.known)
        placement = place_draft_model(devices_for(self.info.device), lambda device: level_seconds(on(device)))
        for other in set(self.known) - before - {(*key, placement.device)}:
            del self.known[other]
        logger.log(logging.INFO if placement.seconds else logging.DEBUG, placement.words(model))
        return placement.device

    def _load(self, model: str, device: str, same_tokens: bool, layers: bool, more: Mapping[str, Any]) -> Runner:
        folder = resolve(model, code=self._trust)
        read_config(folder)
        if same_tokens:
            self.check_tokens(model, folder)
        runner = load_runner(
            folder, name=model, dtype=self.config.dtype, device=device, trust_remote_code=self._trust, **more
        )
        if layers and not has_ability(runner, "early_exit"):
            raise DrafterError(
                f"draft model {model!r} cannot run some of its layers alone; use a model of a supported family"
            )
        return runner

    def placed(self, model: str, device: str, load: Callable[[torch.device], H], seconds: Callable[[H], float]) -> H:
        """See `drafters.base.Models.placed`.

        Raises:
            ConfigError: no device of this machine. OutOfMemoryError: none has room for it.
        """
        where = requested_device(device, self.info.device)
        if where != AUTO:
            return load(torch.device(where))
        made: dict[str, H] = {}

        def timed(name: str) -> float:
            made[name] = load(torch.device(name))
            return seconds(made[name])

        placement = place_draft_model(devices_for(self.info.device), timed)
        logger.log(logging.INFO if placement.seconds else logging.DEBUG, placement.words(model))
        return made[placement.device] if placement.device in made else load(torch.device(placement.device))

    def denoiser(self, model: str, *, device: str | None = None) -> Denoiser:
        """See `drafters.base.Models.denoiser`.

        Raises:
            ConfigError: no device of this machine.
            DrafterError: another tokenizer.
            CheckpointError: nothing to load there.
            OutOfMemoryError: it would not fit.
            UnsupportedModelError: no diffusion language model, or one without a native runner.
        """
        where = requested_device(device, self.info.device)
        if where == AUTO:
            raise ConfigError("draft_device of a diffusion language model must be cpu, cuda or cuda:N, got 'auto'")
        if (model, where) not in self._denoisers:
            folder = resolve(model)
            read_config(folder)
            self.check_tokens(model, folder)
            self._denoisers[model, where] = load_denoiser(folder, dtype=self.config.dtype, device=where, name=model)
        return self._denoisers[model, where]

    def tokenizer_of(self, model: str) -> Tokenizer:
        """The tokenizer of another checkpoint.

        Raises:
            CheckpointError: nothing to load there.
        """
        if model not in self._tokenizers:
            folder = resolve(model, code=self._trust)
            read_config(folder)
            self._tokenizers[model] = Tokenizer.load(folder, trust_remote_code=self._trust)
        return self._tokenizers[model]

    def mask_token_of(self, model: str) -> int | None:
        """See `drafters.base.Models.mask_token_of`.

        Raises:
            CheckpointError: nothing to load there, or a mask token that is no id.
        """
        return mask_token(read_config(resolve(model, code=self._trust)), model)

    def exits_of(self, model: str) -> DraftExits | None:
        """See `drafters.base.Models.exits_of`.

        Raises:
            CheckpointError: nothing to load there, or exits that are none.
        """
        folder = resolve(model, code=self._trust)
        return DraftExits.of(read_config(folder), model) if folder.is_dir() else None

    def embedding_of(self, token: int) -> torch.Tensor:
        """See `drafters.base.Models.embedding_of`.

        Raises:
            CheckpointError: the target's files have no such row.
        """
        return stored_embedding(self.folder, token, self.info)

    def copy_of_target(self, quantization: str, *, head_rows: Sequence[int] | None = None) -> Runner:
        """The target with rounded weights, read again from its files.

        Args:
            quantization: a key of `config.QUANTIZATIONS`.
        Raises:
            ConfigError: the target is rounded so itself.
            OutOfMemoryError: no room for both.
            UnsupportedModelError: a target without a native runner.
        """
        form, info = QUANTIZATIONS[quantization], self.info
        if info.quantization == form:
            raise ConfigError(
                f"quantization must differ from the target's, which is {form} itself, got {quantization!r}"
            )
        name = f"the {form} copy of {info.name}"
        dtype, device = str(info.dtype).removeprefix("torch."), str(info.device)
        return self._once(
            ("copy", form, _named(head_rows)),
            lambda: load_runner(
                self.folder, name=name, dtype=dtype, device=device, max_context=info.max_context, quantization=form,
                head_rows=head_rows, lora=self._lora,
            ),
        )  # fmt: skip

    def on_sources_of(self, target: Runner, model: str, *, quantization: str | None = None) -> SourceDraftRunner:
        """See `drafters.base.Models.on_sources_of`.

        Raises:
            CapabilityError: a target without an encoder, or without the native runner.
            CheckpointError: no such draft, or one for another model.
        """
        encoding = source_draft_target(target, "encdec_draft")
        form = QUANTIZATIONS.get((self.info.quantization if quantization is None else quantization) or NOT_QUANTIZED)
        if (model, form) not in self._on_sources:
            self._on_sources[model, form] = load_source_draft(
                model, encoding, self.folder, tokenizer=self.tokenizer.fingerprint, quantization=form
            )
        return self._on_sources[model, form]

    def forget(self, model: str) -> None:
        """See `drafters.base.Models.forget`."""
        for key in [key for key in self.known if key[:2] == ("open", model)]:
            del self.known[key]

    def counts_file(self) -> Path | None:
        """See `drafters.base.Models.counts_file`."""
        path = counts_path(self.folder)
        return path if path.is_file() else None

    def head_share(self, model: str | None = None) -> float:
        """See `drafters.base.Models.head_share`.

        Raises:
            CheckpointError: nothing to load there.
        """
        return head_share(self.folder if model is None else resolve(model, code=self._trust))

    def base_of_target(self) -> Runner:
        """The target without its LoRA adapter, read again from its files.

        Raises:
            ConfigError: it was loaded without one.
            OutOfMemoryError: no room for both.
        """
        if self._lora is None:
            raise ConfigError(
                f"model must name the base of {self.info.name}, which was loaded without a LoRA adapter; got nothing"
            )
        return self.target_with(None)

    def target_with(self, lora: str | None) -> Runner:
        """The target with the LoRA adapter in a folder in place of its own, read again from its files.

        Raises:
            CheckpointError: no such adapter, or one of another model.
            OutOfMemoryError: no room for both.
        """
        info = self.info
        name = f"{info.name} with the adapter {lora}" if lora else f"{info.name} without its adapter"
        dtype, device = str(info.dtype).removeprefix("torch."), str(info.device)
        return self._once(
            ("adapted", lora),
            lambda: load_runner(
                self.folder, name=name, dtype=dtype, device=device, max_context=info.max_context,
                quantization=info.quantization if info.quantization in QUANTIZATIONS else None, lora=lora,
            ),
        )  # fmt: skip

    def check_tokens(self, model: str, folder: Path) -> None:
        """Reject a draft model with another tokenizer."""
        why = same_tokenizer(self.tokenizer, Tokenizer.load(folder, trust_remote_code=self._trust))
        if why is not None:
            raise DrafterError(
                f"draft model {model!r} has another tokenizer than the target: {why}; choose one of the same family "
                "(only methods 'tli' and 'slem' draft with other tokenizers)"
            )

    def _once(self, key: tuple[object, ...], load: Callable[[], Runner]) -> Runner:
        if key not in self.known:
            self.known[key] = load()
        return self.known[key]


def _named(head_rows: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if head_rows is None else tuple(head_rows)
