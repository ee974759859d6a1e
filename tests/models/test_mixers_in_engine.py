"""Models with mixers behind `LLM`: drafts change no token, and a cache that holds no keys has a size all the same."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import CASES
from models.test_parity import PATH, TEXT, TREE
from tiny_checkpoint import TARGET, TOKENIZER

from paceline import LLM, SamplingParams
from paceline.models import load_runner
from paceline.models.state.arena import blocks_for
from paceline.models.state.cache_memory import STATES_HELD
from paceline.tree import EMPTY_TREE, TokenTree

VOCABULARY = json.loads((TARGET / "config.json").read_text(encoding="utf-8"))["vocab_size"]
PROMPTS = [
    {"prompt_token_ids": [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]},
    {"prompt_token_ids": [9, 10, 11]},
    {"prompt_token_ids": list(range(20, 90))},
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LEAST = 3 * 2**18
"""Bytes of a cache in which the three sequences find no room side by side where layers keep keys."""


def model_folder(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A case with the bundled tokenizer and as many tokens."""
    case = CASES[name]
    sizes = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 3, "max_position_embeddings": 128}
    sized = replace(case, new={**case.new, **sizes}, old={**case.old, **sizes})
    monkeypatch.setitem(CASES, f"{name}-in-engine", sized)
    checkpoints.write(f"{name}-in-engine", "new", folder)
    for file in TOKENIZER:
        shutil.copy(TARGET / file, folder)
    return folder


def written(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(str(folder), dtype="float32", **options) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("name", ["mamba", "mamba2", "nemotron_h-moe", "lightnet"])
def test_drafts_and_a_small_cache_change_no_token(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_folder(name, tmp_path, monkeypatch)
    plain = written(folder, speculative_config=None)
    assert written(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 6}) == plain
    assert written(folder, kv_cache_memory_bytes=LEAST) == plain
    assert len({tuple(tokens) for tokens in plain}) == len(PROMPTS), "the model writes the same whatever it reads"


@pytest.mark.parametrize("name", ["mamba", "jamba", "nemotron_h-moe", "kimi_linear", "lightnet", "phi4flash"])
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "int8"}])
def test_rounded_weights_change_logits_a_little(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = checkpoints.write(name, "new", tmp_path)
    plain, rounded = logits_in(folder, dtype="float32"), logits_in(folder, **options)
    assert 0 < (rounded - plain).std() < 0.2 * plain.std()


def logits_in(folder: Path, **options: Any) -> torch.Tensor:
    """Of a text, of a tree behind it, and of a chain behind a path of the tree."""
    runner: Any = load_runner(str(folder), **options)
    sequence = runner.open()
    found = [runner.extend([sequence], [TEXT[:20]], all_logits=True).logits]
    found.append(runner.score([sequence], [TEXT[20]], [TREE]).logits)
    runner.commit([sequence], [PATH])
    found.append(runner.score([sequence], [TEXT[21]], [TokenTree.chain(TEXT[22:26])]).logits)
    return torch.cat(found).float()


SMALL = TokenTree.build([70, 71, 72, 73], [-1, -1, 0, 0])
"""The beginning of TREE."""


@pytest.mark.parametrize("name", ["mamba", "mamba2", "kimi_linear", "lightnet", "lfm2", "phi4flash"])
def test_a_tree_in_two_steps_is_what_it_is_in_one(name: str, tmp_path: Path) -> None:
    runner: Any = load_runner(str(checkpoints.write(name, "new", tmp_path)))
    one, two, other = (runner.open() for _ in range(3))
    for sequence in (one, two, other):
        runner.extend([sequence], [TEXT[:20]])
    whole = runner.score([one], [TEXT[20]], [TREE]).logits
    runner.score([two, other], [TEXT[20]] * 2, [SMALL, TokenTree.chain(TEXT[21:23])])
    parts = runner.score([two, other], [TEXT[20]] * 2, [TREE, TokenTree.chain(TEXT[21:26])], computed=[5, 3])
    assert (parts.of(0) - whole[5:]).abs().max() < CASES[name].tolerance
    for sequence, path in ((one, PATH), (two, PATH), (other, (0, 1, 2, 3))):
        runner.commit([sequence], [path])
    again = runner.score([one, two], [7, 7], [SMALL, SMALL])
    assert (again.of(0) - again.of(1)).abs().max() < CASES[name].tolerance
    text = [*TEXT[:25], 7]
    found = runner.score([other], [7], [EMPTY_TREE]).logits
    assert (found - checkpoints.reference(name, text)[-1:]).abs().max() < CASES[name].tolerance


def test_models_without_keys_have_blocks_of_a_size(tmp_path: Path) -> None:
    runner: Any = load_runner(str(checkpoints.write("mamba2", "new", tmp_path)))
    assert runner.native.arena.nbytes == 0
    runner.memory.set_limit(None)
    assert 0 < runner.memory.capacity < 2**40
    runner.memory.set_limit(8 * runner.memory.block_bytes + STATES_HELD * runner.memory.state_bytes)
    assert runner.memory.capacity == 7
    sequence = runner.open()
    with torch.inference_mode():
        runner.extend([sequence], [list(range(40))])
    assert blocks_for(40) <= runner.memory.used <= runner.memory.capacity
