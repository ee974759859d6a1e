"""The pass that diffusion drafters share: its canvas, what is stored of it, and how a denoiser is opened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_denoiser
import torch
from diffusion.toys import t4
from drafters.denoisers import Scripted, args, random_rows

from paceline import LLM, SamplingParams
from paceline.drafters import Context
from paceline.drafters.diffusion.deer import DeerDrafter
from paceline.errors import ConfigError, DrafterError, PacelineError
from paceline.models import Call
from paceline.models.runners import NativeDenoiser
from paceline.tree import EMPTY_TREE, Budget, TokenTree

VOCAB = 23
"""Of T4, whose mask token is its last."""

RANDOM = np.random.default_rng(0).integers(0, VOCAB, 400).tolist()


def over(denoiser: Any, **options: Any) -> DeerDrafter:
    return DeerDrafter(args(denoiser, VOCAB), model="toy", **options)


def propose(one: DeerDrafter, state: Any, nodes: int = 5) -> TokenTree:
    (tree,) = one.propose([state], [Budget(nodes, nodes)], [EMPTY_TREE])
    return tree


def begin(one: DeerDrafter, text: Sequence[int]) -> Any:
    return one.begin([Context("r", list(text), len(text))])[0]


def canvas(length: int, nodes: int, *, max_length: int = 4096, **options: Any) -> tuple[int, int]:
    """Tokens of the text, and masks, of one pass."""
    denoiser = Scripted(random_rows(VOCAB), VOCAB, max_length=max_length)
    one = over(denoiser, **options)
    propose(one, begin(one, RANDOM[:length]), nodes)
    ((*ids,),) = denoiser.canvases
    masks = ids.count(denoiser.mask_token_id)
    assert ids == RANDOM[length - len(ids) + masks : length] + [denoiser.mask_token_id] * masks
    return len(ids) - masks, masks


def test_masks_are_never_fewer_than_the_model_expects() -> None:
    assert canvas(30, 4) == (30, 32)
    assert canvas(30, 4, draft_masks=0) == (30, 4)
    assert canvas(30, 40, draft_max_length=36) == (30, 36)
    assert canvas(30, 4, draft_context=10) == (10, 32)


def test_a_long_text_is_cut_at_its_beginning() -> None:
    assert canvas(100, 4, max_length=64) == (32, 32)
    assert canvas(100, 4, max_length=20) == (1, 19)
    assert canvas(100, 40, max_length=8, draft_masks=0) == (1, 7)
    one = over(Scripted(random_rows(VOCAB), VOCAB, max_length=1))
    assert propose(one, begin(one, RANDOM[:9])) is EMPTY_TREE


def direct(denoiser: NativeDenoiser, text: Sequence[int], masks: int) -> list[int]:
    """Likeliest tokens of the masks by a pass of one's own."""
    ids = np.array([*text, *[denoiser.mask_token_id] * masks])
    (logits,) = denoiser.forward([Call(ids, np.arange(ids.size))])
    return logits[len(text) :].argmax(-1).tolist()


@pytest.mark.parametrize("kind", ["full", "shifted"])
def test_a_draft_is_what_the_model_says_of_the_masks(kind: Any) -> None:
    """Shifted logits too: the first mask is predicted at the text's last token."""
    denoiser = t4(kind)
    one = over(denoiser, draft_masks=9)
    for length in (1, 7, 40):
        assert propose(one, begin(one, RANDOM[:length])).tokens.tolist() == direct(denoiser, RANDOM[:length], 9)[:5]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 15])
@pytest.mark.parametrize("nodes", [1, 4, 6])
def test_block_causal_masks_go_on_to_the_end_of_a_block(length: int, nodes: int) -> None:
    denoiser = t4("block")
    one = over(denoiser)
    masks = -(-(length + nodes) // 4) * 4 - length
    assert (
        propose(one, begin(one, RANDOM[:length]), nodes).tokens.tolist()
        == direct(denoiser, RANDOM[:length], masks)[:nodes]
    )


class Counting(NativeDenoiser):
    """Counts the slots that it computes."""

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        self.computed = [call.ids.size for call in calls]
        self.read = [None if call.wanted is None else call.wanted.size for call in calls]
        return super().forward(calls)


def rejections(one: DeerDrafter) -> list[tuple[list[int], list[int]]]:
    """Drafts of a state that goes on, some of whose tokens fall, and of fresh ones."""
    state, found = begin(one, RANDOM[:10]), []
    for step in range(40):
        tree = propose(one, state, 1 + step % 7)
        found.append(
            (tree.tokens.tolist(), propose(one, begin(one, state.context.tokens), 1 + step % 7).tokens.tolist())
        )
        accepted = tree.tokens.tolist()[: step % 4]
        state.context.tokens.extend([*accepted, RANDOM[step]])
    return found


def test_whole_blocks_are_stored_and_rejected_slots_are_not() -> None:
    denoiser = t4("block")
    denoiser.__class__ = Counting
    one = over(denoiser)
    assert all(mine == fresh for mine, fresh in rejections(one))
    state = begin(one, RANDOM[:300])
    tree = propose(one, state)
    assert denoiser.computed == [308]  # type: ignore[attr-defined]
    assert denoiser.read == [len(tree)]  # type: ignore[attr-defined]
    propose(one, state)
    assert denoiser.computed == [8]  # type: ignore[attr-defined]
    state.context.tokens.extend(RANDOM[:3])
    propose(one, state)
    assert denoiser.computed == [8]  # type: ignore[attr-defined]
    twin = one.fork(state, Context("t", RANDOM[:20], 20))
    assert propose(one, twin).tokens.tolist() == propose(one, begin(one, RANDOM[:20])).tokens.tolist()
    one.end([state])
    assert state.cache is None


def test_keeping_rejected_slots_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    monkeypatch.setattr(DeerDrafter, "whole_blocks", lambda self, count: (count + 4) // 4 * 4)
    assert any(mine != fresh for mine, fresh in rejections(over(t4("block"))))


def test_many_sequences_are_one_call_of_the_denoiser() -> None:
    denoiser = t4("block")
    one, texts = over(denoiser), [RANDOM[:9], RANDOM[5:30], RANDOM[40:41]]
    states = [begin(one, text) for text in texts]
    trees = one.propose(states, [Budget(4, 4), Budget(0, 0), Budget(2, 2)], [EMPTY_TREE] * 3)
    assert [len(tree) for tree in trees] == [4, 0, 2]
    assert trees[0].tokens.tolist() == propose(one, begin(one, texts[0]), 4).tokens.tolist()


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(speculative_config=None, dtype="float32", seed=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_denoiser.write(tmp_path_factory.mktemp("denoiser") / "model")


@pytest.mark.parametrize("method", ["diffuspec", "deer"])
def test_a_checkpoint_drafts_and_changes_nothing(llm: LLM, folder: Path, method: str) -> None:
    """Of random weights; at temperature 0 and with a seed. `draft_masks` beyond its canvas are cut."""
    for params in (
        SamplingParams(temperature=0.0, max_tokens=16),
        SamplingParams(temperature=0.9, seed=4, max_tokens=16),
    ):
        given = ["def add(a, b):", "The first"]
        fast = llm.with_speculative_config({"method": method, "model": str(folder), "num_speculative_tokens": 3})
        found = fast.generate(given, params)
        assert [out.outputs[0].token_ids for out in found] == [
            out.outputs[0].token_ids for out in llm.generate(given, params)
        ]
        assert all(out.metrics.num_draft_tokens > 0 and not out.metrics.dropped_drafters for out in found)


@pytest.mark.parametrize("method", ["diffuspec", "deer"])
def test_what_cannot_draft_is_rejected_in_one_line(llm: LLM, folder: Path, tmp_path: Path, method: str) -> None:
    other = tiny_denoiser.write(tmp_path / "other")
    words = (other / "tokenizer.json").read_text().replace('"<|end|>"', '"<|stop|>"')
    (other / "tokenizer.json").write_text(words)
    cases: list[tuple[dict[str, Any], type[PacelineError], str]] = [
        ({"model": str(other)}, DrafterError, "has another tokenizer than the target: token 3 is"),
        ({"model": str(tiny_denoiser.SOURCE)}, PacelineError, "it is no masked diffusion language model"),
        ({"model": str(tmp_path / "nothing")}, PacelineError, "nothing"),
        ({}, ConfigError, "model must be the folder or hub id of a diffusion language model"),
        (
            {"model": str(folder), "draft_device": "auto"},
            ConfigError,
            "draft_device of a diffusion language model must be cpu",
        ),
        ({"model": str(folder), "draft_device": "moon"}, ConfigError, "draft_device"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message) as caught:
            llm.with_speculative_config({"method": method, **options})
        assert "\n" not in str(caught.value)
