"""Histories go back and fork without a trace, and the choice among them is made by what the model itself computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicLayer

from paceline.models.runners.fallback import transformers_cache
from paceline.models.runners.fallback.transformers_cache import (
    CausalModel,
    CroppedHistory,
    History,
    ReplayedHistory,
    choose_history,
)

VOCAB = 53
ATTENTION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 64,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "starcoder2": ATTENTION | {"sliding_window": 4},
    "lfm2": ATTENTION | {"layer_types": ["conv", "full_attention"]},
    "olmo_hybrid": ATTENTION
    | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    | {"layer_types": ["linear_attention", "full_attention"]},
    "zamba2": ATTENTION
    | {"num_key_value_heads": 2, "attention_head_dim": 32, "attention_hidden_size": 64, "num_mem_blocks": 1}
    | {"mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_headdim": 16}
    | {"layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1]},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "falcon_mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
}
TEXT = [7, 3, 44, 12, 9, 30, 2, 51, 18, 5, 6, 41]


def tiny(family: str) -> CausalModel:
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(family, vocab_size=VOCAB, initializer_range=0.2, **ends, **SHAPES[family])
    return CausalModel(AutoModelForCausalLM.from_config(config).eval(), torch.device("cpu"))


def error(model: CausalModel, rows: torch.Tensor, tokens: list[int]) -> float:
    return float((rows - model.run(tokens, keep=False).logits[-len(rows) :]).abs().max())


CASES: list[tuple[str, Callable[[CausalModel], History]]] = [
    ("gpt2", CroppedHistory),
    ("gpt2", ReplayedHistory),
    ("gpt2", History),
    ("starcoder2", CroppedHistory),
    ("starcoder2", ReplayedHistory),
    ("olmo_hybrid", ReplayedHistory),
    ("zamba2", ReplayedHistory),
    ("lfm2", lambda model: ReplayedHistory(model, singly=True)),
    ("mamba", lambda model: ReplayedHistory(model, singly=True)),
    ("falcon_mamba", lambda model: ReplayedHistory(model, singly=True)),
]


@pytest.mark.parametrize(("family", "make"), CASES)
def test_going_back_leaves_no_trace(family: str, make: Callable[[CausalModel], History]) -> None:
    model = tiny(family)
    history = make(model)
    assert error(model, history.feed(TEXT[:5]).logits, TEXT[:5]) < 1e-4
    history.mark()
    history.feed([1, 2, 3])
    for length in (7, 6, 4, 0):  # behind the mark twice, before it, and to nothing
        history.rewind(length)
        tokens = [*TEXT[:5], 1, 2, 3][:length]
        assert history.tokens == tokens
        assert error(model, history.feed(TEXT[5:8]).logits, tokens + TEXT[5:8]) < 1e-4


@pytest.mark.parametrize(("family", "make"), CASES)
def test_forks_go_their_own_ways(family: str, make: Callable[[CausalModel], History]) -> None:
    model = tiny(family)
    first = make(model)
    first.feed(TEXT[:6])
    second = first.fork()
    assert error(model, first.feed(TEXT[6:9]).logits, TEXT[:9]) < 1e-4
    second.rewind(5)
    assert error(model, second.feed([1, 1]).logits, [*TEXT[:5], 1, 1]) < 1e-4
    assert error(model, first.feed(TEXT[9:], last_only=True).logits, TEXT) < 1e-4


class Copied(TorchDispatchMode):
    """Counts bytes of tensors that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_):
            self.bytes += found.nbytes
        return found


def copied_bytes(history: History) -> tuple[int, int]:
    """By marking and by forking."""
    with Copied() as marked:
        history.mark()
    with Copied() as forked:
        history.fork()
    return marked.bytes, forked.bytes


def state_bytes(history: History) -> int:
    """Of convolutions and recurrent states."""
    assert isinstance(history, ReplayedHistory)
    layers = [layer for layer in history.cache.layers if hasattr(layer, "conv_states")]
    return sum(one.nbytes for layer in layers for kind in (layer.conv_states, layer.recurrent_states)
               for one in kind.values())  # fmt: skip


@pytest.mark.parametrize("family", ["olmo_hybrid", "zamba2"])
def test_states_alone_are_copied(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the text is; the control is a copy of the whole cache, which grows with it."""
    model, counts = tiny(family), []
    for tokens in (TEXT[:4], TEXT * 4):
        history = ReplayedHistory(model)
        history.feed(tokens)
        assert copied_bytes(history) == (state_bytes(history), state_bytes(history))
        with monkeypatch.context() as patch:
            patch.setattr(transformers_cache, "own_layer", copy.deepcopy)
            counts.append(copied_bytes(history))
        assert min(counts[-1]) > state_bytes(history)
    assert counts[0] < counts[1]


@pytest.mark.parametrize("family", ["olmo_hybrid", "zamba2"])
def test_a_state_that_is_not_copied_and_keys_that_are_not_cropped_show(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)

    def off() -> float:
        history = ReplayedHistory(model)
        history.feed(TEXT[:5])
        history.mark()
        history.feed([1, 2, 3])
        history.rewind(6)
        return error(model, history.feed(TEXT[5:8]).logits, [*TEXT[:5], 1, *TEXT[5:8]])

    assert off() < 1e-4
    with monkeypatch.context() as patch:
        patch.setattr(transformers_cache, "own_layer", copy.copy)
        assert off() > 1e-3
    monkeypatch.setattr(DynamicLayer, "crop", lambda *_: None)
    assert off() > 1e-3


@pytest.mark.parametrize(
    ("family", "kind"), [("gpt2", CroppedHistory), ("starcoder2", CroppedHistory), ("mamba", ReplayedHistory)]
)
def test_the_choice_is_the_fastest_kind_that_is_right(family: str, kind: type[History]) -> None:
    assert type(choose_history(tiny(family), VOCAB, 64)()) is kind


def test_half_precision_finds_the_same_history() -> None:
    model = tiny("gpt2")
    model.model.to(torch.bfloat16)
    assert type(choose_history(model, VOCAB, 64)()) is CroppedHistory


def test_a_context_too_short_to_try_anything_is_recomputed() -> None:
    assert type(choose_history(tiny("gpt2"), VOCAB, 4)()) is History


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "lfm2"])
def test_a_state_that_cannot_take_several_tokens_gets_them_singly(family: str, dtype: torch.dtype) -> None:
    """Some versions of transformers continue some recurrent models wrongly by more than one token."""
    exact = tiny(family)
    chunks = ReplayedHistory(exact)
    chunks.feed(TEXT[:4])
    wrong = error(exact, chunks.feed(TEXT[4:]).logits, TEXT) > 1e-4
    exact.model.to(dtype)
    made = choose_history(exact, VOCAB, 64)()
    assert isinstance(made, ReplayedHistory)
    assert made.singly or not wrong


class Forgetful(CroppedHistory):
    """Forgets to crop."""

    def rewind(self, length: int) -> None:
        del self.tokens[length:]


def test_the_choice_rejects_a_history_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers_cache, "CroppedHistory", Forgetful)
    assert type(choose_history(tiny("gpt2"), VOCAB, 64)()) is ReplayedHistory
    monkeypatch.setattr(transformers_cache, "ReplayedHistory", lambda model, singly=False: Forgetful(model))
    assert type(choose_history(tiny("gpt2"), VOCAB, 64)()) is History


def test_a_model_that_raises_with_a_cache_is_recomputed() -> None:
    model = tiny("gpt2")
    run = model.run

    def without_cache(
        tokens: list[int], cache: Any = None, *, keep: bool = True, **options: Any
    ) -> transformers_cache.Fed:
        if keep:
            raise ValueError("this model takes no cache")
        return run(tokens, cache, keep=keep, **options)

    model.run = without_cache  # type: ignore[method-assign]  # a foreign model's behaviour, made up
    history = choose_history(model, VOCAB, 64)()
    assert type(history) is History
    assert error(model, history.feed(TEXT[:4]).logits, TEXT[:4]) < 1e-4
