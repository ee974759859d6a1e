"""Mixers in compiled passes against PyTorch's operators: chunks, growing trees, kinds of weights, threads, strict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from models import checkpoints
from models.checkpoints import CASES

from paceline.errors import ConfigError
from paceline.models import load_runner
from paceline.models.runners import native_of, what_varies
from paceline.tree import TokenTree

FILLED: Mapping[str, Mapping[str, Any]] = {
    "jamba-dense": {
        "num_attention_heads": 2, "num_key_value_heads": 1, "mamba_d_state": 16, "mamba_dt_rank": 16,
    },
    "falcon_mamba": {"intermediate_size": 192, "state_size": 16, "time_step_rank": 16},
    "nemotron_h-moe": {"mamba_num_heads": 8, "head_dim": 32},
    "kimi_linear": {
        "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "linear_head_dim": 32,
        "linear_num_heads": 2, "model_max_length": 1024,
    },
    "lightnet": {"expand_ratio": 32, "gate_low_rank_dim": 16},
}  # fmt: skip
"""Cases with other sizes, which fill vectors."""

BY_CHANNEL = ("falcon_mamba-filled", "kimi_linear-filled", "lightnet-filled")
"""Of each kind of recurrence whose decays are by channel one."""
NAMES = ("lfm2-wide", "lfm2-bias-wide", "qwen3_5_text-wide", "granitemoehybrid-wide", "falcon_h1-wide")
NAMES = (*NAMES, *(f"{name}-filled" for name in FILLED))
TEXT = torch.randint(3, 128, (600,), generator=torch.Generator().manual_seed(1)).tolist()
TREE = TokenTree.build([70, 71, 72, 73, 74, 75, 76, 77], [-1, -1, 0, 0, 1, 2, 5, 4])
Load = Callable[..., Any]
by_name = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    """Runners of a case, whose texts may be long; `compiled=False` runs PyTorch's operators."""

    @cache
    def folder(name: str) -> Path:
        made = checkpoints.write(name, "new", tmp_path_factory.mktemp(name))
        config = made / "config.json"
        declared = '"max_position_embeddings": '
        config.write_text(config.read_text().replace(f"{declared}64", f"{declared}1024"))
        return made

    @cache
    def runner(name: str, *, compiled: bool = True, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PACELINE_COMPILED", str(int(compiled)))
            loaded = load_runner(folder(name), **options)
        assert loaded.info.passes == ("compiled" if compiled else "operators")
        return loaded

    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in FILLED.items():
            case = CASES[name]
            filled = replace(case, new={**case.new, **sizes}, old={**case.old, **sizes})
            patch.setitem(CASES, f"{name}-filled", filled)
        yield runner


def read(runner: Any, *chunks: list[int]) -> tuple[Any, torch.Tensor]:
    """A sequence that has read chunks, and the logits of all rows."""
    state = runner.open()
    return state, torch.cat([runner.extend([state], [chunk], all_logits=True).logits for chunk in chunks])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max())


@by_name
def test_long_chunks_are_those_of_operators(load: Load, name: str) -> None:
    """A chunk of more rows than a pass takes is read in several, which the state is carried through."""
    _, wanted = read(load(name, compiled=False), TEXT)
    for chunks in ([TEXT], [TEXT[:1], TEXT[1:3], TEXT[3:500], TEXT[500:]]):
        state, found = read(load(name), *chunks)
        assert state.length == len(TEXT)
        assert distance(found, wanted) < 2e-3


@by_name
def test_a_tree_that_grows_is_the_whole_tree(load: Load, name: str) -> None:
    runner, prompt = load(name), TEXT[:40]
    first, _ = read(runner, prompt)
    whole = runner.score([first], [TEXT[40]], [TREE]).logits
    state, _ = read(runner, prompt)
    rows = []
    for done, nodes in ((0, 2), (3, 6), (7, 8)):
        part = TokenTree.build(TREE.tokens[:nodes].tolist(), TREE.parents[:nodes].tolist())
        rows.append(runner.score([state], [TEXT[40]], [part], computed=[done]).logits)
    assert distance(torch.cat(rows), whole) < 1e-5
    for one in (first, state):
        runner.commit([one], [(1, 4, 7)])
    after = [runner.score([one], [9], [TokenTree.chain([8, 7])]).logits for one in (first, state)]
    assert distance(*after) < 1e-5
    text = [*prompt, TEXT[40], *TREE.tokens[[1, 4, 7]].tolist(), 9, 8, 7]
    assert distance(after[0], read(load(name, compiled=False), text)[1][-3:]) < 1e-3


@pytest.mark.parametrize("name", BY_CHANNEL)
def test_a_tree_at_the_beginning_of_a_text(load: Load, name: str) -> None:
    """There is no state yet, and LightNet's sums begin with the root."""
    found, wanted = (
        load(name, **how).score([load(name, **how).open()], [TEXT[0]], [TREE]).logits
        for how in ({}, {"compiled": False})
    )
    assert distance(found, wanted) < 1e-3
    assert distance(found[1:], wanted[:-1]) > 0.1


@pytest.mark.parametrize("name", ["lfm2-wide", *BY_CHANNEL])
def test_the_comparison_catches_a_tree_that_is_read_as_a_chain(
    load: Load, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolutions and recurrences that go on from the node before in the pass, not the one before in the text."""
    from paceline.models.passes import mixer_tables

    runner, prompt = load(name), TEXT[:40]
    right, wrong = (read(runner, prompt)[0] for _ in range(2))
    wanted = runner.score([right], [TEXT[40]], [TREE]).logits
    monkeypatch.setattr(mixer_tables, "parents_of", lambda sees: torch.arange(-1, len(sees) - 1).numpy())
    assert distance(runner.score([wrong], [TEXT[40]], [TREE]).logits, wanted) > 0.1


@by_name
def test_forks_and_cancelled_drafts_leave_states_alone(load: Load, name: str) -> None:
    runner = load(name)
    state, _ = read(runner, TEXT[:40])
    fork = runner.fork(state)
    wanted = runner.score([state], [5], [TREE]).logits
    runner.truncate(state, state.length)
    runner.score([state], [9], [TREE])
    runner.commit([state], [(0, 2)])
    assert torch.equal(runner.score([fork], [5], [TREE]).logits, wanted)
    with pytest.raises(ConfigError, match="the recurrent state of 40 tokens can go back to"):
        runner.truncate(fork, 39)


@by_name
@pytest.mark.parametrize(
    ("options", "most"),
    [({"dtype": "bfloat16"}, 0.5), ({"quantization": "int8"}, 0.3), ({"quantization": "int4"}, 3.0)],
)
def test_other_weights_are_near(load: Load, name: str, options: dict[str, Any], most: float) -> None:
    """Typical differences of logits, whose own spread is above 1, from those of float32."""
    state, found = read(load(name, **options), TEXT[:40])
    runner = load(name, **options)
    found = torch.cat([found, runner.score([state], [TEXT[40]], [TREE]).logits]).float()
    other = load(name)
    state, wanted = read(other, TEXT[:40])
    wanted = torch.cat([wanted, other.score([state], [TEXT[40]], [TREE]).logits])
    assert wanted.std() > 1
    assert (found - wanted).square().mean().sqrt() < most


def test_threads_divide_the_work_to_the_same_bits(load: Load) -> None:
    before = torch.get_num_threads()
    for name in NAMES:
        found = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            try:
                state, logits = read(load(name), TEXT[:50])
                found.append(torch.cat([logits, load(name).score([state], [TEXT[50]], [TREE]).logits]))
            finally:
                torch.set_num_threads(before)
        assert torch.equal(*found), name


@pytest.mark.parametrize("name", ["lfm2-wide", "falcon_mamba-filled", "jamba-dense-filled"])
def test_short_convolutions_and_states_behind_nodes_keep_a_rows_bits(load: Load, name: str) -> None:
    runner = load(name, exactness="strict")
    native = native_of(runner)
    assert native is not None
    assert native.passes.row_invariant
    _, whole = read(runner, TEXT[:60])
    _, pieces = read(runner, TEXT[:7], TEXT[7:8], TEXT[8:60])
    assert torch.equal(whole, pieces)
    state, _ = read(runner, TEXT[:41])
    branches = TokenTree.build([TEXT[42], 9, TEXT[43], 8], [-1, -1, 0, 1])
    assert torch.equal(runner.score([state], [TEXT[41]], [branches]).logits[[0, 1, 3]], whole[41:44])
    assert not what_varies(runner)


def test_operators_carry_states_through_pieces_of_a_pass(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strict passes of PyTorch's operators take so many rows at a time."""
    monkeypatch.setenv("PACELINE_COMPILED", "0")
    _, wanted = read(load("lfm2-wide", compiled=False), TEXT)
    runner: Any = load_runner(load("lfm2-wide").info.name, exactness="strict")
    assert runner.info.passes == "strict operators"
    assert runner.native.passes.most_rows < len(TEXT)
    _, found = read(runner, TEXT)
    assert distance(found, wanted) < 1e-3


def test_strict_mode_names_what_it_is_not_there_for(load: Load) -> None:
    assert what_varies(load("qwen3_5_text-wide"))
    with pytest.raises(ConfigError, match=r"not available for .*recurrent states are summed in another order"):
        load("qwen3_5_text-wide", exactness="strict")
