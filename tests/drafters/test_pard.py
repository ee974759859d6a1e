"""PARD: one pass of text and masks gives a chain, masks are never kept, and nothing else drafts their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import runner_of, tiny_llama, tokens
from tools.one_sequence import begin, propose
from toy_models import ToyModels
from toys import ToyRunner

from benchmarks.stand_ins import write_masked_draft
from paceline import LLM, SamplingParams
from paceline.checkpoints import mask_token
from paceline.drafters import DrafterArgs
from paceline.drafters.common.draft_state import DraftState
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.drafters.draft_model.pard import PardDrafter
from paceline.errors import CheckpointError, ConfigError, DrafterError
from paceline.llm import BUNDLED
from paceline.tree import TokenTree

VOCAB, MASK = 11, 12
PROMPT = [1, 2, 3, 4, 5]


class Tiny(ToyModels):
    """Opens a tiny model whose last id is its mask token."""

    def __init__(self) -> None:
        super().__init__(ToyRunner(64), ToyRunner(64))
        self.runner = runner_of(tiny_llama())

    def open(self, model: str, **more: Any) -> Any:
        return self.runner


def toys(**options: Any) -> ToyModels:
    """A draft with two ids more than the target, the last one its mask."""
    return ToyModels(ToyRunner(VOCAB), ToyRunner(VOCAB + 2, order=None, **options))


def drafter_of(models: Any, vocab_size: int = VOCAB, **options: Any) -> PardDrafter:
    args = DrafterArgs(vocab_size=vocab_size, index=0, max_context=512, models=models)
    return PardDrafter(args, model="toy", **options)


def go_on_with(drafter: PardDrafter, state: Any, tree: TokenTree, accepted: int, own: int) -> None:
    """The text goes on with some accepted drafts and a token of the target's own."""
    state.context.tokens += [*tree.tokens[:accepted].tolist(), own]
    state.confirm(drafter.runner)


def test_one_pass_over_text_and_masks_gives_the_chain() -> None:
    """Also behind a rejection, where accepted drafts and the target's token are fed with the masks; no token that was
    read is taken back.
    """
    models = toys()
    drafter, runner = drafter_of(models), models.draft
    runner.truncate = None  # type: ignore[method-assign, assignment]
    state = begin(drafter, PROMPT)
    for accepted in (0, 4, 2):
        calls, fed, lacks = runner.calls, runner.fed, len(state.pending)
        tree = propose(drafter, state, 4)
        assert (runner.calls, runner.fed) == (calls + 1, fed + lacks + 3)
        text = list(state.context.tokens)
        expected = [runner.logits([*text, *[MASK] * i])[:VOCAB] for i in range(4)]
        assert tree.is_chain
        assert tree.tokens.tolist() == [int(row.argmax()) for row in expected]
        assert tree.confidence.tolist() == pytest.approx([float(row.softmax(0).max()) for row in expected], rel=1e-5)
        go_on_with(drafter, state, tree, accepted, 7)
        assert len(state.pending) == accepted + 1


def test_one_token_is_that_of_the_draft_model() -> None:
    models = toys()
    args = DrafterArgs(vocab_size=VOCAB, index=0, max_context=512, load_runner=lambda name: models.draft)
    plain, drafter = DraftModelDrafter(args, model="toy"), drafter_of(models)
    for text in (PROMPT, [*PROMPT, 9, 9], [3]):
        one, other = (propose(each, begin(each, text), 1) for each in (drafter, plain))
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.confidence.tolist() == pytest.approx(other.confidence.tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_mask_is_never_drafted(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although it is a token of the target, too, and by far the likeliest of the draft."""

    def drafted() -> set[int]:
        models = ToyModels(ToyRunner(VOCAB), ToyRunner(VOCAB - 1, order=None, pad=1, sharpness=3.0))
        drafter = drafter_of(models)
        return {*propose(drafter, begin(drafter, PROMPT, temperature=temperature), 8).tokens.tolist()}

    assert VOCAB - 1 not in drafted()
    monkeypatch.setattr(PardDrafter, "fitted", lambda self, rows_kv: rows_kv)
    assert VOCAB - 1 in drafted()


def test_drawn_tokens_carry_rows_that_follow_the_rules_of_the_request() -> None:
    """The rules see the drafted path, the model does not."""

    def rules(logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        rows = logits.float() * 2
        for row, path in zip(rows, paths, strict=True):
            row[list(path)] = -torch.inf
        return rows

    models = toys()
    drafter = drafter_of(models)
    tree = propose(drafter, begin(drafter, PROMPT, temperature=1.0, apply_rules=rules), 5)
    drawn = tree.tokens.tolist()
    assert len(set(drawn)) == 5
    for i, (trial,) in ((parent + 1, trials) for parent, trials in tree.trials.items()):
        row = models.draft.logits([*PROMPT, *[MASK] * i])[None, :VOCAB]
        assert trial.row is not None
        assert torch.allclose(trial.row, rules(row, [drawn[:i]]).softmax(-1)[0])


def keeps_masks(self: DraftState, runner: Any) -> None:
    """Wrong: all that was fed stays, masks included."""
    if self.fed_tokens:
        kept = min(len(self.context.tokens) - 1 - self.base, len(self.fed_tokens) + 3)
        runner.commit([self.cache], [range(kept - 1)])
        self.fed_tokens, self.base = [], self.cache.length


def test_masks_are_never_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step the cache is a fresh one of the text before it. Negative control: masks stay where drafts were
    accepted.
    """

    def differs() -> bool:
        models, wrong = Tiny(), False
        drafter = drafter_of(models, 64)
        state = begin(drafter, tokens(30))
        for accepted in (4, 0, 2, 4, 1):
            tree, before = propose(drafter, state, 4), len(state.context.tokens)
            go_on_with(drafter, state, tree, accepted, accepted)
            text = state.context.tokens[: state.cache.length]
            wrong |= len(text) != before
            fresh: Any = models.runner.open()
            models.runner.extend([fresh], [text])
            wrong |= any(
                not torch.allclose(a, b, atol=1e-5) for a, b in zip(held(state.cache), held(fresh), strict=True)
            )
        return wrong

    assert not differs()
    monkeypatch.setattr(DraftState, "confirm", keeps_masks)
    assert differs()


def held(cache: Any) -> list[torch.Tensor]:
    """Keys and values of the text, layer by layer."""
    slots = torch.from_numpy(cache.slot_index(0, cache.length))
    return [layer[slots] for layer in cache.arena.layers]


def test_the_models_own_context_limits_the_masks() -> None:
    drafter = drafter_of(toys(max_context=8))
    assert [len(propose(drafter, begin(drafter, [1] * length), 9)) for length in (6, 8, 9)] == [3, 1, 0]


def test_a_checkpoint_must_name_its_mask_token() -> None:
    for value in (None, VOCAB + 2):
        models = toys()
        models.mask_token_of = lambda model, value=value: value  # type: ignore[method-assign, misc]
        with pytest.raises(DrafterError, match="no parallel one" if value is None else "13 embeddings"):
            drafter_of(models)
    with pytest.raises(ConfigError, match="must be a folder or hub id for method 'pard'"):
        PardDrafter(DrafterArgs(vocab_size=VOCAB, index=0, max_context=99, models=toys()))
    keys = [{"ptd_token_id": 3}, {"pard_token": 2, "ptd_token_id": 3}, {"pard_token": 2, "mask_token_id": 1}, {}]
    assert [mask_token(config, "x") for config in keys] == [3, 2, 1, None]
    for wrong in ("5", -1, True, [5]):
        with pytest.raises(CheckpointError, match=r"x: pard_token in config\.json must be a token id"):
            mask_token({"pard_token": wrong}, "x")


def test_the_option_of_vllm_names_this_method(tmp_path: Path) -> None:
    """Greedy and drawn outputs are the target's, several at once."""
    plain = LLM(speculative_config=None, dtype="float32", seed=1)
    draft = str(write_masked_draft(tmp_path / "draft"))
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    llm = plain.with_speculative_config(config | {"parallel_drafting": True})
    assert llm.drafter_methods == ["pard"]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True),
    ):
        prompts = ["Name the first three months.", "A cat", "Count: 1, 2, 3,"]
        found, expected = llm.generate(prompts, params), plain.generate(prompts, params)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
        assert all(one.metrics.num_draft_tokens > 0 and not one.metrics.dropped_drafters for one in found)
    assert plain.with_speculative_config(config | {"parallel_drafting": False}).drafter_methods == ["draft_model"]
    by_auto = {"method": "auto", "model": draft, "parallel_drafting": True}
    assert plain.with_speculative_config(by_auto).drafter_methods[-1] == "pard"
    with pytest.raises(ConfigError, match="parallel_drafting must be True or False, got 'yes'"):
        plain.with_speculative_config(config | {"parallel_drafting": "yes"})
    with pytest.raises(DrafterError, match="names no mask token"):
        plain.with_speculative_config({"method": "pard", "model": str(BUNDLED / "draft")})
