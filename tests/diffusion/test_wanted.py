"""Logits, a whole vocabulary each, are computed only where a rule looks at them, and what is written stays the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.diffusion import METHODS, Outcome, Transition
from tests.diffusion.decoding import Watched, fill, same
from tests.diffusion.test_catalogue import END, config_of
from tests.diffusion.toys_t4 import t4

PROMPT = (3, 4, 6, 7)
SPAN = {"method": "prophet", "monitor": "span", "answer_length": 4, "gap_thresholds": (1.5, 0.6, 0.3)}
READERS = {
    "learn2pd": {
        "method": "learn2pd",
        "block_length": 8,
        "filter": lambda step: 4 - 8 * confidences(step),
        "filter_threshold": 0.5,
    },
    "prophet": SPAN,
}


def confidences(step: Any) -> Any:
    """The mean of the block, its written slots included."""
    known = [slot for slot in step.block if step.predictions.known(np.array([slot]))[0]]
    return np.full(len(step.block), step.predictions.confidence[step.predictions.rows(np.array(known))].mean())


def decoded(config: Any, kind: Any = "full", seed: int = 2) -> tuple[Outcome, Watched]:
    toy = Watched(t4(kind, eos_token_ids=(END,), seed=seed))
    return fill(toy, config, 8, PROMPT), toy


def rows(toy: Watched) -> list[int]:
    """Slots with logits, over all passes."""
    return [int(slot) for calls, _ in toy.passes for call in calls for slot in call.slots[call.wanted]]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "cfg_dllm"])
def test_what_is_written_is_what_all_logits_would_write(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(method, temperature=0.7)
    few, watched = decoded(config)
    monkeypatch.setattr(Transition, "reads_written", True)
    every, control = decoded(config)
    assert same(few, every)
    assert few.trajectory.calls == every.trajectory.calls
    assert len(rows(watched)) <= len(rows(control))
    assert min(rows(control)) >= len(PROMPT), "never the prompt"
    for calls, outputs in watched.passes:
        assert [len(call.wanted) for call in calls] == [len(logits) for logits in outputs]


@pytest.mark.parametrize("kind", ["full", "shifted", "block", "shifted block"])
@pytest.mark.parametrize("more", [{}, {"cache": "block"}, {"method": "freedave", "layout": "tree"}])
def test_only_masked_slots_get_logits(kind: str, more: dict[str, Any]) -> None:
    if more.get("cache") and "block" not in kind:
        more = {"cache": "prefix"}
    _, toy = decoded({"method": "static", "block_length": 4, **more}, kind)
    for calls, _ in toy.passes:
        for call in calls:
            assert (call.ids[call.wanted] == toy.mask_token_id).all()
            assert not call.write or len(call.slots) > len(call.wanted)


@pytest.mark.parametrize("name", READERS)
def test_rules_that_look_at_written_slots_get_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [decoded(READERS[name], seed=seed)[0] for seed in range(6)]
    monkeypatch.setattr(Transition, "reads_written", True)
    assert all(same(one, decoded(READERS[name], seed=seed)[0]) for seed, one in enumerate(whole))
    monkeypatch.setattr(Transition, "reads_written", False)
    assert not all(same(one, decoded(READERS[name], seed=seed)[0]) for seed, one in enumerate(whole))
