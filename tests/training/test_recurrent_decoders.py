"""A decoder with a recurrent state is no ground for a draft of its layers, and the trainer says so by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_marian

from paceline.errors import CapabilityError
from paceline.models import load_runner
from paceline.training.source_layers import check_trainable


def test_drafts_of_recurrent_layers_are_refused_by_name(tmp_path: Path) -> None:
    """The same model with self-attention (the control) is none of them."""
    for kind, folder in (("rnn", tmp_path / "rnn"), ("self-attention", tmp_path / "attention")):
        folder.mkdir()
        tiny_marian.make(folder, transformer_decoder_autoreg=kind)
        spec = load_runner(folder, dtype="float32").spec  # type: ignore[attr-defined]  # of native runners
        if kind == "rnn":
            with pytest.raises(CapabilityError, match="bergamot has recurrent states, with which layers are"):
                check_trainable(spec, "bergamot")
        else:
            check_trainable(spec, "bergamot")
