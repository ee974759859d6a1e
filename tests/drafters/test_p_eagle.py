"""P-EAGLE: one pass drafts, its first token is EAGLE-3's, drawn tokens carry the rows of their depths, and heads that
cannot draft in parallel are named. (`test_eagle.py` compares rows and caches of all heads with plain forward passes.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.stand_ins import head_weights, written_head
from paceline import LLM, SamplingParams
from paceline.drafters import DrafterArgs
from paceline.drafters.heads.eagle import Eagle3Drafter
from paceline.drafters.heads.feature_drafts import FeatureState
from paceline.errors import CheckpointError, ConfigError
from paceline.models.heads import HeadConfig, read_head, tensors_of
from tests.drafters.test_eagle import PROMPT, World, config


@pytest.mark.parametrize("options", [{}, {"tree_width": 3}, {"tree_policy": "eagle2"}, {"tree_policy": "dyspec"}])
def test_a_draft_takes_one_pass(folder: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all the text's new tokens and the masks behind them, whatever the tree."""
    world = World(folder, "p_eagle", **options)
    head, fed = world.drafter.head, list[tuple[int, int]]()
    step = head.step
    state = world.begin(temperature=1.0)
    world.drafter.catch_up([state])

    def counted(*args: Any, tokens: Sequence[int], picked: Sequence[int], **more: Any) -> Any:
        fed.append((list(tokens).count(9), len(picked)))
        return step(*args, tokens=tokens, picked=picked, **more)

    monkeypatch.setattr(head, "step", counted)
    tree = world.propose(state, 12, 4)
    assert fed == [(3, 4)]
    assert len(tree) >= 4
    assert tree.is_chain == (options == {})


def test_one_token_is_that_of_eagle3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same weights. Negative control: each token beside the state of another one."""
    world = World(folder, "p_eagle")
    world.config = replace(world.config, num_layers=1)
    weights = {name: one for name, one in world.weights.items() if not name.startswith("layers.1.")}
    third = replace(world.config, method="eagle3", mask_token_id=None)
    args = DrafterArgs(vocab_size=world.target.info.vocab_size, index=0, max_context=2048, target=world.target)
    parallel = type(world.drafter)(args, model=written_head(world.config, weights))
    single = Eagle3Drafter(
        args, model=written_head(third, {name: one for name, one in weights.items() if name != "mask_hidden"})
    )

    def chances(drafter: Any) -> torch.Tensor:
        world.drafter = drafter
        (trial,) = world.propose(world.begin(temperature=1.0), 1).trials_of(-1)
        return trial.row

    assert torch.allclose(chances(parallel), expected := chances(single), atol=1e-6)

    def early(self: FeatureState) -> list[int]:
        return self.context.tokens[self.states.first : self.states.first + self.states.count]

    monkeypatch.setattr(FeatureState, "pending", property(early))
    assert not torch.allclose(chances(parallel), expected, atol=1e-3)


def test_drawn_tokens_carry_rows_that_follow_the_rules_of_the_request(folder: Path) -> None:
    """The rules see the drafted path, the head does not."""

    def rules(logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        rows = logits.float() * 2
        for row, path in zip(rows, paths, strict=True):
            row[list(path)] = -torch.inf
        return rows

    world = World(folder, "p_eagle")
    tree = world.propose(world.begin(temperature=1.0, apply_rules=rules), 5)
    drawn = tuple(tree.tokens.tolist())
    assert len(set(drawn)) == 5
    for i in range(5):
        (trial,) = tree.trials_of(i - 1)
        assert torch.allclose(trial.row, rules(world.row(drawn[:i])[None], [drawn[:i]]).softmax(-1)[0], atol=1e-4)


def test_without_mask_hidden_it_is_no_head(folder: Path, tmp_path: Path) -> None:
    """Nothing stands in for what was learned."""
    own = config("p_eagle", World(folder, "p_eagle").target.info)
    assert [one.optional for one in tensors_of(own) if one.name == "mask_hidden"] == [False]
    head = Path(written_head(own))
    stored = load_file(head / "model.safetensors")
    stored.pop("mask_hidden")
    save_file(stored, head / "model.safetensors")
    with pytest.raises(CheckpointError, match="lacks mask_hidden; write it again"):
        read_head(head, World(folder, "p_eagle").target.info)
    for mask, rule in ((None, "got None"), (own.vocab_size, f"in 0..{own.vocab_size - 1}")):
        with pytest.raises(ConfigError, match=rf"mask_token_id must be .*{rule}"):
            replace(own, mask_token_id=mask)
    with pytest.raises(ConfigError, match="mask_token_id must be left out for method 'eagle'"):
        HeadConfig(method="eagle", hidden_size=8, vocab_size=9, draft_vocab_size=9, layer=own.layer, mask_token_id=1)


def test_states_before_fc_are_normed_once(folder: Path) -> None:
    own = config("p_eagle", World(folder, "p_eagle").target.info)
    norms = {one.name: torch.ones(one.shape) for one in tensors_of(own) if one.name.startswith(("fc_", "input_norm"))}
    for given in (norms, {"fc_norm.1.weight": norms["fc_norm.1.weight"]}):
        with pytest.raises(CheckpointError, match="must have input_norm or an fc_norm for each of its 3 taps"):
            written_head(own, head_weights(own) | given)


def test_the_names_of_others_mean_this_method() -> None:
    """vLLM's option of EAGLE-3 and the name of the `speculators` package; outputs are the target's."""
    plain = LLM(speculative_config=None, dtype="float32", seed=1)
    heads = {name: written_head(config(name, plain.runner.info)) for name in ("eagle3", "p_eagle")}
    given = {"method": "eagle3", "model": heads["p_eagle"], "num_speculative_tokens": 4}
    llm = plain.with_speculative_config(given | {"parallel_drafting": True})
    assert llm.drafter_methods == ["p_eagle"]
    prompts = [{"prompt_token_ids": PROMPT[:length]} for length in (4, 30)]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True),
    ):
        found, expected = llm.generate(prompts, params), plain.generate(prompts, params)
        assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in expected]
        assert all(one.metrics.num_draft_tokens > 0 and not one.metrics.dropped_drafters for one in found)
    assert plain.with_speculative_config(given | {"method": "peagle"}).drafter_methods == ["p_eagle"]
    off = given | {"model": heads["eagle3"], "parallel_drafting": False}
    assert plain.with_speculative_config(off).drafter_methods == ["eagle3"]
    for wrong, message in (
        (given, "is of method 'p_eagle', not 'eagle3'; name that one"),
        (off | {"parallel_drafting": True}, "is of method 'eagle3', not 'p_eagle'; name that one"),
    ):
        with pytest.raises(CheckpointError, match=message):
            plain.with_speculative_config(wrong)
    with pytest.raises(ConfigError, match="parallel_drafting must be True or False, got 'yes'"):
        plain.with_speculative_config(given | {"parallel_drafting": "yes"})
