"""Models beside the target: drafts of the same or another tokenizer, and rounded copies of the target itself.

In: names, and how the target was loaded. Out: runners, each loaded once. Not here: loading (models.load), what
drafters do with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.config import QUANTIZATIONS, EngineConfig
from paceline.errors import ConfigError, DrafterError
from paceline.models.base import ModelInfo, Runner
from paceline.models.hub import read_config, resolve
from paceline.models.load import load_runner
from paceline.models.tokenizer import Tokenizer, same_tokenizer


class DraftModels:
    """See `drafters.base.Models`.

    Args:
        folder: of the target's checkpoint. tokenizer, info: the target's. config: how it was loaded.
    """

    def __init__(
        self, folder: Path, tokenizer: Tokenizer, info: ModelInfo, config: EngineConfig, *, trust_remote_code: bool = False
    ) -> None:
        self.folder, self.tokenizer, self.info, self.config = folder, tokenizer, info, config
        self._trust = trust_remote_code
        self._known: dict[tuple[object, ...], Runner] = {}
        self._tokenizers: dict[str, Tokenizer] = {}

    def open(
        self, model: str, *, head_rows: Sequence[int] | None = None, other_tokens: bool = False, layers: bool = False
    ) -> Runner:
        """Another checkpoint by folder or hub id.

        Raises:
            DrafterError: another tokenizer, unless `other_tokens`. CheckpointError: nothing to load there.
            OutOfMemoryError: it would not fit. UnsupportedModelError: `head_rows` or `layers` of a model without a native runner.
        """

        def load() -> Runner:
            folder = resolve(model, code=self._trust)
            read_config(folder)
            if not other_tokens:
                self._check_tokens(model, folder)
            config, trust = self.config, self._trust
            found = load_runner(
                folder, name=model, dtype=config.dtype, device=config.device, trust_remote_code=trust, draft=not layers,
                head_rows=head_rows,
            )  # fmt: skip
            if layers and not found.capabilities.early_exit:
                raise DrafterError(f"draft model {model!r} cannot run parts of its layers; take a model of a supported family")
            return found

        return self._once(("open", model, _named(head_rows), layers), load)

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

    def copy_of_target(self, quantization: str, *, head_rows: Sequence[int] | None = None) -> Runner:
        """The target with rounded weights, read again from its files.

        Args:
            quantization: a key of `config.QUANTIZATIONS`.
        Raises:
            ConfigError: the target is rounded so itself. OutOfMemoryError: no room for both.
            UnsupportedModelError: a target without a native runner.
        """
        form, info = QUANTIZATIONS[quantization], self.info
        if info.quantization == form:
            raise ConfigError(f"quantization must differ from the target's, which is {form} itself, got {quantization!r}")
        name = f"the {form} copy of {info.name}"
        dtype, device = str(info.dtype).removeprefix("torch."), str(info.device)
        return self._once(
            ("copy", form, _named(head_rows)),
            lambda: load_runner(
                self.folder, name=name, dtype=dtype, device=device, max_context=info.max_context, draft=True, quantization=form,
                head_rows=head_rows,
            ),
        )  # fmt: skip

    def _check_tokens(self, model: str, folder: Path) -> None:
        why = same_tokenizer(self.tokenizer, Tokenizer.load(folder, trust_remote_code=self._trust))
        if why is not None:
            raise DrafterError(
                f"draft model {model!r} has another tokenizer than the target: {why}; choose one of the same family "
                "(only methods 'tli' and 'slem' draft with other tokenizers)"
            )

    def _once(self, key: tuple[object, ...], load: Callable[[], Runner]) -> Runner:
        if key not in self._known:
            self._known[key] = load()
        return self._known[key]


def _named(head_rows: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if head_rows is None else tuple(head_rows)
