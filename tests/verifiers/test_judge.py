"""Judge decoding: rejected drafts stand where a head on the target's states says so, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.harness import run
from engine.test_loop import Guess
from toys import ToyRunner
from verifiers.test_reflective import DRAWN, GREEDY, NODES, PROMPTS, live, written

from paceline import LLM, SamplingParams
from paceline.errors import CapabilityError, CheckpointError, ConfigError
from paceline.llm import BUNDLED
from paceline.models.heads import StateJudge
from paceline.tree import ROOT, Budget, TokenTree
from paceline.verifiers import RecursiveRejection
from paceline.verifiers import judge as module
from paceline.verifiers.judge import Judge

LAYERS, HIDDEN = 4, 8
HEAD = StateJudge(torch.linspace(-1.0, 1.0, HIDDEN), 0.1)


def rule(threshold: float = 0.5, head: StateJudge = HEAD) -> Judge:
    made = Judge(judge_threshold=threshold)
    made.use(head, LAYERS)
    return made


def chance(runner: ToyRunner, text: Sequence[int]) -> float:
    """That the last token of a text is good."""
    odds = float(runner.hidden(LAYERS - 1, list(text)).double() @ HEAD.weight.double()) + HEAD.bias
    return 1.0 / (1.0 + math.exp(-odds))


def by_hand(prompt: Sequence[int], threshold: float) -> tuple[list[int], int]:
    """Tokens and departures at temperature 0, from the definition."""
    runner, text, departures = ToyRunner(order=None), list(prompt), 0
    guess, size = Guess(runner), len(prompt) + GREEDY.max_tokens
    while len(text) < size:
        depth = min(NODES, size - len(text) - 1)
        drafts = guess._one(text, Budget(depth, depth)).tokens.tolist() if depth else []
        for draft in drafts:
            if draft != (best := int(runner.logits(text).argmax())):
                if not chance(runner, [*text, draft]) > threshold:
                    text.append(best)
                    break
                departures += 1
            text.append(draft)
        else:
            text.append(int(runner.logits(text).argmax()))
    return text[len(prompt) :], departures


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7])
def test_texts_and_departures_are_those_of_the_definition(threshold: float) -> None:
    found = written(rule(threshold))
    assert found == [by_hand(prompt, threshold) for prompt in PROMPTS]
    assert sum(departures for _, departures in found) > 0


def test_the_comparison_catches_the_state_before_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [by_hand(prompt, 0.5) for prompt in PROMPTS]
    original = Judge.seeing
    before = lambda self, states: original(self, [one.roll(1, 0) for one in states])  # noqa: E731
    monkeypatch.setattr(Judge, "seeing", before)
    assert written(rule()) != expected


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_at_threshold_1_it_is_the_exact_rule(params: SamplingParams) -> None:
    sure = StateJudge(torch.zeros(HIDDEN), 1e3)
    exact = written(RecursiveRejection(), params)
    assert written(rule(1.0, sure), params) == exact
    assert written(rule(0.5, sure), params) != exact


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_at_threshold_0_all_drafts_stand(params: SamplingParams) -> None:
    doubting = StateJudge(torch.zeros(HIDDEN), -1e3)
    for one in run(live(rule(0.0, doubting)), PROMPTS, params):
        assert one.metrics.num_accepted_tokens == one.metrics.num_draft_tokens > 0
        assert one.metrics.num_departures > 0
    strict = [one.metrics for one in run(live(rule(0.5, doubting)), PROMPTS, params)]
    assert any(one.num_accepted_tokens < one.num_draft_tokens for one in strict)


def test_what_the_rules_forbid_is_never_kept() -> None:
    allowed = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, allowed_token_ids=[1, 2, 3, 5])
    for tokens, _ in written(rule(0.0), allowed):
        assert set(tokens) <= {1, 2, 3, 5}


def test_trees_and_a_missing_head_are_errors_that_name_what_to_do() -> None:
    seeing = rule().at_zero().seeing([torch.zeros(3, HIDDEN)])
    with pytest.raises(CapabilityError, match="acceptance_method 'judge' judges chains"):
        seeing.verify([TokenTree.build([0, 1], [ROOT, ROOT])], [torch.zeros(3, 9)], ())
    with pytest.raises(CapabilityError, match="judge' has no head; give judge_model"):
        Judge().seeing([torch.zeros(2, HIDDEN)]).at_zero().verify([TokenTree.chain([1])], [torch.zeros(2, 9)], ())
    assert module.log_odds(0.5) == 0.0
    assert module.log_odds(0.0) == -math.inf == -module.log_odds(1.0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None, seed=3)


def config(folder: Path | None, **more: Any) -> dict[str, Any]:
    draft = {"method": "draft_model", "model": str(BUNDLED / "draft"), "num_speculative_tokens": 4}
    return draft | {"acceptance_method": "judge"} | ({} if folder is None else {"judge_model": str(folder)}) | more


def test_a_head_in_a_folder_judges_by_name_and_is_rejected_for_another_model(llm: LLM, tmp_path: Path) -> None:
    info, params = llm.runner.info, SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    target = {"name": "bundled", "fingerprint": info.fingerprint, "tokenizer": llm.tokenizer.fingerprint()}
    head = StateJudge(torch.zeros(info.hidden_size), 5.0, target)
    judged = llm.with_speculative_config(config(head.write(tmp_path / "head")))
    (one,) = judged.generate("The first thing is", params)
    assert one.metrics.num_accepted_tokens == one.metrics.num_draft_tokens
    assert one.metrics.num_departures > 0
    (plain,) = llm.generate("The first thing is", params)
    assert one.outputs[0].token_ids != plain.outputs[0].token_ids
    for other, why in (
        (StateJudge(torch.zeros(info.hidden_size + 1), 0.0), "hidden_size"),
        (StateJudge(torch.zeros(info.hidden_size), 0.0, target | {"tokenizer": "another"}), "tokenizer"),
    ):
        with pytest.raises(CheckpointError, match=why):
            llm.with_speculative_config(config(other.write(tmp_path / why)))
    with pytest.raises(CheckpointError, match="holds no judge"):
        llm.with_speculative_config(config(BUNDLED / "draft"))
    with pytest.raises(ConfigError, match="judge_model must be the folder of a head"):
        llm.with_speculative_config(config(None))
