"""What the tests of the command line share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command import Command
from tiny_checkpoint import write

from paceline.checkpoints.tokenizer import Tokenizer
from paceline.llm import BUNDLED
from paceline.models import load_runner

LOADED: dict[Any, Any] = {}


def once(load: Callable[..., Any]) -> Callable[..., Any]:
    """Loads from a folder of the package once for each set of arguments; other folders are loaded as ever."""

    def loaded(folder: Any, **arguments: Any) -> Any:
        if not Path(folder).is_relative_to(BUNDLED):
            return load(folder, **arguments)
        given = sorted((name, str(value)) for name, value in arguments.items())
        key = load, str(folder), torch.get_num_threads(), *given
        if key not in LOADED:
            LOADED[key] = load(folder, **arguments)
        return LOADED[key]

    return loaded


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of commands run on the bundled models: engines of their own, as with `with_speculative_config`, around
    models and tokenizers that are read and packed once. Commands in processes of their own load as ever.
    """
    for place in ("paceline.llm.load_runner", "paceline.assembly.draft_models.load_runner"):
        monkeypatch.setattr(place, once(load_runner))
    monkeypatch.setattr(Tokenizer, "load", once(Tokenizer.load))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(capsys, monkeypatch)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny"))
