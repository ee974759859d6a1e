"""Kangaroo: an adapter that is all that the target does behind the exit is always right, and the text stays the
target's.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch
from safetensors.torch import load_file, save_file
from toys import ToyCache, ToyRunner

from benchmarks.stand_ins import adapter_weights, written_adapter
from paceline import LLM, SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.self.kangaroo import KangarooDrafter
from paceline.drafters.self.skip_replay import replayed
from paceline.errors import CheckpointError, ConfigError, PacelineError
from paceline.tree import EMPTY_TREE, Budget

WIDTH, HEADS = 32, 2
PROMPTS = [{"prompt_token_ids": [(7 * i + j) % 500 + 4 for i in range(8 + 5 * j)]} for j in range(3)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
observe = KangarooDrafter.observe
ADAPTER = written_adapter(adapter_weights(WIDTH), WIDTH, HEADS)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A target of four layers that behind the first one does nothing but one layer's attention, and that layer as an
    adapter.
    """
    folder = tiny_checkpoint.write(tmp_path_factory.mktemp("target"), num_hidden_layers=4)
    state = load_file(folder / "model.safetensors")
    for layer in (1, 2, 3):
        state[f"model.layers.{layer}.mlp.down_proj.weight"].zero_()
        state[f"model.layers.{layer}.self_attn.o_proj.weight"].mul_(4.0 if layer == 1 else 0.0)
    save_file(state, folder / "model.safetensors")
    own = {
        name.replace("model.layers.1.", "layers.0.").removeprefix("model."): value
        for name, value in state.items()
        if name.startswith(("model.layers.1.self_attn", "model.layers.1.input_layernorm"))
        or name == "model.norm.weight"
    }
    config = json.loads((folder / "config.json").read_text())
    heads = {key: config[key] for key in ("num_key_value_heads", "rms_norm_eps")}
    return {"target": str(folder), "adapter": written_adapter(own, WIDTH, HEADS, **heads), "own": own, "heads": heads}


@pytest.fixture(scope="module")
def plain(weights: dict[str, Any]) -> LLM:
    return LLM(weights["target"], speculative_config=None, dtype="float32", seed=1)


def drafting(plain: LLM, model: str, **options: Any) -> LLM:
    options = {
        "exit_layer": 1,
        "draft_stop_threshold": 0.0,
        "controller": "fixed",
        "num_speculative_tokens": 4,
    } | options
    return plain.with_speculative_config({"method": "kangaroo", "model": model, **options})


def rate(llm: LLM, prompts: list[Any], params: SamplingParams) -> float:
    """Share of the drafted tokens that stood."""
    found = llm.generate(prompts, params)
    assert not any(out.metrics.dropped_drafters for out in found), found[0].metrics.dropped_drafters
    drafted = sum(out.metrics.num_draft_tokens for out in found)
    assert drafted > 20
    return sum(out.metrics.num_accepted_tokens for out in found) / drafted


def outputs(llm: LLM, prompts: list[Any], params: SamplingParams) -> list[Any]:
    return [[one.token_ids for one in out.outputs] for out in llm.generate(prompts, params)]


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_adapter_that_is_the_rest_of_the_target_is_always_right(
    plain: LLM, weights: dict[str, Any], count: int, resume: bool
) -> None:
    """Whole drafts stand in every round, so that each time the last token's state comes from the scoring pass alone, or
    from a pass of the first layers at the end of the draft.
    """
    fast = drafting(plain, weights["adapter"], num_speculative_tokens=count, resume_verification=resume)
    assert rate(fast, PROMPTS, GREEDY) > 0.97
    assert outputs(fast, PROMPTS, GREEDY) == outputs(plain, PROMPTS, GREEDY)


class Seen:
    """Per scoring pass that went on behind the exit, how many inputs were known of how many; and replayed tokens."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        drafter = llm.engine.parts.drafter_set.drafters[0]
        assert isinstance(drafter, KangarooDrafter)
        score, self.known, self.replays = drafter.drafts.score, list[tuple[int, int]](), list[int]()

        def counted(caches: Any, roots: Any, trees: Any, known: Any, plan: Any) -> Any:
            self.known += [(len(states), 1 + len(tree)) for states, tree in zip(known, trees, strict=True)]
            return score(caches, roots, trees, known, plan)

        def noted(runner: Any, cache: Any, start: int, tokens: Any, *, plan: Any) -> Any:
            self.replays.append(start)
            return replayed(runner, cache, start, tokens, plan=plan)

        monkeypatch.setattr(drafter.drafts, "score", counted)
        monkeypatch.setattr("paceline.drafters.self.kangaroo.replayed", noted)


@pytest.mark.parametrize("model", ["right", "random"])
def test_verification_goes_on_from_the_exits_states(
    plain: LLM, weights: dict[str, Any], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No token goes through the first layers twice: scoring knows all inputs, and only prompts are replayed. Control:
    without resuming, every pass is a whole one.
    """
    adapter = {"right": weights["adapter"], "random": ADAPTER}[model]
    for resume in (True, False):
        fast = drafting(plain, adapter, resume_verification=resume)
        seen = Seen(fast, monkeypatch)
        for params in (GREEDY, replace(GREEDY, temperature=0.9, seed=3)):
            assert outputs(fast, PROMPTS[:1], params) == outputs(plain, PROMPTS[:1], params)
        assert bool(seen.known) == resume
        assert all(known == inputs for known, inputs in seen.known)
        assert seen.replays == [0, 0]


def test_states_of_other_tokens_are_rejected_drafts(
    plain: LLM, weights: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: an adapter that is told other states of the accepted tokens is right less often."""

    def told(self: KangarooDrafter, states: Any, *given: Any) -> None:
        for state in states:
            state.kept = replace(state.kept, states=state.kept.states.roll(1, 0))
        observe(self, states, *given)

    monkeypatch.setattr(KangarooDrafter, "observe", told)
    fast = drafting(plain, weights["adapter"], resume_verification=True)
    assert rate(fast, PROMPTS, GREEDY) < 0.9
    assert outputs(fast, PROMPTS, GREEDY) == outputs(plain, PROMPTS, GREEDY)


@pytest.mark.parametrize("wrong", ["positions", "lost rows", "no replay", "norm"])
def test_whatever_the_adapter_lacks_shows(
    plain: LLM, weights: dict[str, Any], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: with a part of the drafter broken, drafts are rejected; the text is the target's all the
    same.
    """
    model = weights["adapter"]
    if wrong == "positions":
        model = written_adapter(weights["own"], WIDTH, HEADS, rope_theta=3.0, **weights["heads"])
    elif wrong == "norm":
        model = written_adapter(
            weights["own"] | {"norm.weight": torch.arange(1.0, 33.0)}, WIDTH, HEADS, **weights["heads"]
        )
    fast = drafting(plain, model)
    if wrong == "lost rows":
        monkeypatch.setattr(KangarooDrafter, "observe", _careless)
    elif wrong == "no replay":
        monkeypatch.setattr("paceline.drafters.self.kangaroo.replayed", lambda *a, **k: torch.zeros(len(a[3]), WIDTH))
    assert rate(fast, PROMPTS, GREEDY) < 0.9
    assert outputs(fast, PROMPTS, GREEDY) == outputs(plain, PROMPTS, GREEDY)


def _careless(self: KangarooDrafter, states: Any, trees: Any, verdicts: Any, scores: Any) -> None:
    """The states of tokens that stood are taken from the row before."""
    observe(
        self,
        states,
        trees,
        verdicts,
        replace(scores, taps={layer: tap.roll(1, 0) for layer, tap in scores.taps.items()}),
    )


def test_an_adapter_that_knows_nothing_costs_no_text(plain: LLM) -> None:
    fast = drafting(plain, ADAPTER)
    for params in (
        GREEDY,
        SamplingParams(temperature=0.8, seed=5, max_tokens=12, n=2),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=12),
    ):
        assert outputs(fast, PROMPTS, params) == outputs(plain, PROMPTS, params)


def test_steps_without_drafts_are_caught_up(plain: LLM, weights: dict[str, Any]) -> None:
    """Another drafter's tokens, and steps in which nobody drafted."""
    mixed = plain.with_speculative_config(
        {
            "method": [
                {"method": "ngram", "prompt_lookup_min": 1},
                {"method": "kangaroo", "model": weights["adapter"], "exit_layer": 1, "draft_stop_threshold": 0.0},
            ],
            "num_speculative_tokens": 3,
            "controller": "fixed",
        }
    )
    assert outputs(mixed, PROMPTS, GREEDY) == outputs(plain, PROMPTS, GREEDY)
    drafter = drafting(plain, weights["adapter"]).engine.parts.drafter_set.drafters[0]
    assert isinstance(drafter, KangarooDrafter)
    runner, text = plain.runner, [int(t) for t in PROMPTS[1]["prompt_token_ids"]]
    cache = runner.open()
    runner.extend([cache], [text[:-1]])
    (state,) = drafter.begin([Context("r", text, len(text), cache=lambda: cache)])
    trees = drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE])
    more = [9, 8, 7, 6]
    runner.extend([cache], [[text[-1], *more[:-1]]])
    text.extend(more)
    trees = drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE])
    (fresh,) = drafter.begin([state.context])
    assert drafter.propose([fresh], [Budget(3, 3)], [EMPTY_TREE])[0].tokens.tolist() == trees[0].tokens.tolist()
    assert state.known == fresh.known == len(text)
    drafter.end([state, fresh])
    runner.release(cache)


def test_a_draft_ends_behind_the_first_token_that_is_not_sure() -> None:
    target = ToyRunner(11, max_context=64)
    model = written_adapter(adapter_weights(8), 8)
    text = [1, 2, 3]
    lengths = set()
    for eta in (0.0, 0.4, 0.9, 1.0):
        args = DrafterArgs(vocab_size=11, index=0, max_context=64, target=target)
        drafter = KangarooDrafter(args, model=model, draft_stop_threshold=eta)
        (state,) = drafter.begin([Context("r", text, 3, cache=lambda: ToyCache(text[:-1]))])
        (tree,) = drafter.propose([state], [Budget(12, 12)], [EMPTY_TREE])
        sure = [float(chance) >= eta for chance in tree.confidence]
        assert all(sure[:-1])
        assert len(tree) == 6 or not sure[-1]
        lengths.add(len(tree))
    assert len(lengths) > 1
    assert max(lengths) == 6


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"model": None}, ConfigError, "model must be the folder or hub id of an adapter"),
        ({"exit_layer": 4}, ConfigError, r"exit_layer must be an integer in 1\.\.3, got 4"),
        ({"draft_stop_threshold": 2.0}, ConfigError, r"draft_stop_threshold must be in 0\.\.1, got 2"),
        (
            {"model": "wide"},
            CheckpointError,
            r"reads states of width 64, but .* has 32; use one that was trained for this model",
        ),
        ({"model": "headless"}, CheckpointError, r"lacks norm\.weight"),
        ({"model": "surplus"}, CheckpointError, r"holds lm_head\.weight which its architecture does not have"),
        ({"model": "target"}, CheckpointError, "which its architecture does not have"),
        ({"model": "/no/such/folder"}, CheckpointError, "no folder '/no/such/folder'"),
    ],
)
def test_bad_adapters_and_layers_are_rejected_in_one_line(
    plain: LLM, weights: dict[str, Any], options: dict[str, Any], kind: type[PacelineError], words: str
) -> None:
    own = weights["own"]
    made = {
        "wide": lambda: written_adapter(adapter_weights(64), 64),
        "headless": lambda: written_adapter(
            {k: v for k, v in own.items() if k != "norm.weight"}, WIDTH, HEADS, **weights["heads"]
        ),
        "surplus": lambda: written_adapter(
            own | {"lm_head.weight": torch.ones(11, WIDTH)}, WIDTH, HEADS, **weights["heads"]
        ),
        "target": lambda: weights["target"],
    }
    given = {"model": weights["adapter"]} | options
    given["model"] = made.get(given["model"], lambda: given["model"])()
    config = {"method": "kangaroo"} | {k: v for k, v in given.items() if v is not None}
    with pytest.raises(kind, match=words) as refused:
        plain.with_speculative_config(config).engine  # noqa: B018 (made at the first look)
    assert "\n" not in str(refused.value)
    assert Path(weights["adapter"]).is_dir()
