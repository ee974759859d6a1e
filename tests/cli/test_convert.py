"""`paceline convert`: a head goes to another engine's files and comes back, and one line says what cannot be done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command import Command
from safetensors.torch import load_file

from benchmarks.stand_ins import random_head
from paceline import LLM
from paceline.models.heads import MedusaHead


def test_medusa_goes_to_vllm_with_its_rows_and_comes_back(run: Command, tmp_path: Path) -> None:
    llm = LLM()
    info = llm.runner.info
    own = random_head("medusa", info.hidden_size, info.vocab_size)  # it drafts 500 tokens, by the target's rows
    there, back = tmp_path / "there", tmp_path / "back"
    made = run("convert", own, "--to", "medusa_vllm", "-o", there)
    assert (made.code, made.out.replace("\n", " ").split()) == (0, ["Wrote", f"{there}."]), made.err
    found = json.loads((there / "config.json").read_text())
    assert (found["truncated_vocab_size"], found["original_lm_head"]) == (500, True)
    tensors = load_file(there / "model.safetensors")
    assert tensors["lm_heads.0.weight"].shape == (500, info.hidden_size)
    assert tensors["token_map"].tolist() == list(range(500))
    assert run("convert", there, "--to", "paceline", "-o", back).code == 0
    states = torch.randn(3, info.hidden_size, dtype=info.dtype)
    first, second = (MedusaHead(folder, llm.runner).logits(states, 1) for folder in (own, back))
    assert torch.allclose(first.float(), second.float(), atol=0.05)
    assert not torch.allclose(first.float(), second.float().roll(1, 1), atol=0.05)


@pytest.mark.parametrize(
    ("to", "line"),
    [
        ("speculators", "a head of method 'hydra' has no form in the format 'speculators', which holds eagle3 and "),
        ("hydra", "the format 'hydra' has no place for a reduced vocabulary; write 'paceline', or another format"),
        ("gguf", "to must be one of paceline, speculators, "),
    ],
)
def test_what_cannot_be_written_is_one_line(run: Command, tmp_path: Path, to: str, line: str) -> None:
    found = run("convert", random_head("hydra", 256, 6144), "--to", to, "-o", tmp_path / "out")
    assert found.code == 2
    assert found.line.startswith(line)
    assert not (tmp_path / "out").exists()


def test_a_head_of_another_model_and_pickles_are_one_line(run: Command, tmp_path: Path) -> None:
    other = run("convert", random_head("hydra", 64, 6144), "--to", "hydra", "-o", tmp_path / "out")
    assert other.code == 2
    assert "is for hidden_size 64, but" in other.line
    (tmp_path / "config.json").write_text(json.dumps({"hydra_num_heads": 4}))
    (tmp_path / "hydra_lm_head.pt").write_bytes(b"\x80")
    pickled = run("convert", tmp_path, "--to", "paceline", "-o", tmp_path / "out")
    assert pickled.code == 2
    assert "safetensors.torch.save_file(torch.load('hydra_lm_head.pt', weights_only=True)" in pickled.line
