"""Drafters that know a part of the target's tokens: where the rules ask for one that they lack they draft nothing, and
they go on drafting behind it; a text that a draft model cannot read is one that it does not draft for.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract.worlds import PROMPT, SEED, VOCAB, engine, letters, target, verifier
from drafters.test_contract import BLOCK, LAYER, MARKOV, PARALLEL, PATHS, VARIANTS
from engine.harness import run
from tiny_checkpoint import write
from tools.enumerate_draws import Choices
from tools.one_sequence import enumerated
from tools.random_drafts import random_target
from tools.random_trees import WRONG, distribution_error
from toy_models import OtherToy, ToyModels, nested
from toys import ToyRunner

from benchmarks.stand_ins import head_weights, written_head
from paceline import registry
from paceline.assembly.build import ExactJudge
from paceline.config import SamplingParams
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.common import draft_rows
from paceline.drafters.common.draft_rows import best_tokens
from paceline.errors import ConfigError, DrafterError
from paceline.models import load_runner
from paceline.models.heads import HeadConfig
from paceline.tree import EMPTY_TREE, Budget, TokenTree, prune

KNOWN = 9
"""The drafters' tokens are the end token and the letters a to h; i and j they lack."""
TIGHT = {"structured_outputs": {"regex": "([a-h]{3}j){3}[a-h]{3}"}}
"""Every fourth token is one that they lack."""


def head_of(method: Any, **more: Any) -> str:
    config = HeadConfig(method=method, hidden_size=8, vocab_size=VOCAB, draft_vocab_size=KNOWN, **more)
    return written_head(config, head_weights(config, shared=False, seed=1))


HEADS = {name: head_of(name, **more) for name, _, _, more in PATHS}
HEADS |= {"eagle": head_of("eagle", layer=LAYER), "eagle3": head_of("eagle3", layer=LAYER, taps=(0, 1, 3))}
HEADS["fspad"] = head_of("fspad", layer=LAYER, inner_size=6)
HEADS["p_eagle"] = head_of("p_eagle", layer=LAYER, **PARALLEL)
HEADS["eagle2"] = HEADS["eagle"]
HEADS |= {"dflash": head_of("dflash", **BLOCK), "dspark": head_of("dspark", **BLOCK, **MARKOV)}
MODELS = (
    "draft_model",
    "pearl",
    "quantized_copy",
    "specmquant",
    "s2d",
    "easyspec",
    "pard",
    "tli",
    "diffuspec",
    "deer",
)
CASES = [
    *((name, options | {"model": head}) for name, head in HEADS.items() for options in VARIANTS[name]),
    *((name, options) for name in MODELS for options in VARIANTS[name]),
]
each = pytest.mark.parametrize(("name", "options"), CASES, ids=lambda v: v if isinstance(v, str) else str(len(v)))


def without_the_last(runner: Any) -> Any:
    """The runner with a head that has no rows for i and j."""
    whole = runner.logits

    def cut(text: Any) -> torch.Tensor:
        row: torch.Tensor = whole(text).clone()
        row[KNOWN:] = -torch.inf
        return row

    runner.logits = cut
    return runner


def drafter_of(name: str, options: dict[str, Any], runner: ToyRunner, draft: Any) -> Any:
    models = ToyModels(runner, draft)
    for one in (models.exits, models.groups):
        without_the_last(one)
    args = DrafterArgs(
        vocab_size=VOCAB, index=0, max_context=4096, target=runner, load_runner=lambda name: draft, models=models,
        nested=lambda config: nested(config, args), judge=ExactJudge(), fingerprint=letters().fingerprint,
    )  # fmt: skip
    return registry.load("drafters", name)(args, **options)


def noisy() -> ToyRunner:
    return ToyRunner(VOCAB, seed=3, sharpness=1.5, noise=0.6)


class Watched:
    """What a drafter of the engine proposed: the length of the text, and the tree."""

    def __init__(self, drafter: Any) -> None:
        self.proposed: list[tuple[int, TokenTree]] = []
        inner = drafter.propose

        def propose(states: Any, budgets: Any, so_far: Any) -> Any:
            lengths = [len(state.context.tokens) for state in states]
            trees = inner(states, budgets, so_far)
            self.proposed += zip(lengths, trees, strict=True)
            return trees

        drafter.propose = propose


def params(mode: str, **more: Any) -> SamplingParams:
    heat = {"temperature": 0.0 if mode == "greedy" else 0.8} | ({"seed": 11} if mode == "seeded" else {})
    return SamplingParams(**heat, **{"max_tokens": 15, "ignore_eos": "structured_outputs" not in more} | more)


def decoded(live: Any, wanted: SamplingParams) -> Any:
    (request,) = run(live, [PROMPT], wanted, [SEED])
    return request


@cache
def plain_text(mode: str) -> list[int]:
    found: list[int] = decoded(engine((), verifier("rejection_sampler")), params(mode, **TIGHT)).outputs[0].token_ids
    return found


@each
def test_drafters_go_on_behind_tokens_that_they_lack(name: str, options: dict[str, Any]) -> None:
    """The drafted text is plain decoding's, and the drafter is asked and answers to the end."""
    for mode in ("greedy", "seeded", "sampled"):
        runner = target()
        drafter = drafter_of(name, options, runner, without_the_last(noisy()))
        watched = Watched(drafter)
        found = decoded(engine([drafter], verifier("rejection_sampler"), runner=runner), params(mode, **TIGHT))
        assert not found.metrics.dropped_drafters
        text = found.outputs[0].token_ids
        assert [i for i, token in enumerate(text) if token == VOCAB - 1] == [3, 7, 11]
        later = [tree for length, tree in watched.proposed if length > len(PROMPT) + 4]
        assert any(map(len, later)), "nothing was drafted behind the first j"
        lacking = [tree for length, tree in watched.proposed if (length - len(PROMPT)) % 4 == 3]
        assert not any(map(len, lacking)), "something was drafted where j alone is allowed"
        if mode != "sampled" or not drafter.draws_tokens:
            assert text == plain_text(mode)


@each
def test_nothing_is_drafted_where_every_token_is_lacking(name: str, options: dict[str, Any]) -> None:
    """Until the end of a request whose `allowed_token_ids` are i and j; the same drafter serves the next one."""
    runner = target()
    drafter = drafter_of(name, options, runner, without_the_last(noisy()))
    watched, live = Watched(drafter), engine([drafter], verifier("rejection_sampler"), runner=runner)
    found = decoded(live, params("sampled", allowed_token_ids=[9, 10]))
    assert not found.metrics.dropped_drafters
    assert set(found.outputs[0].token_ids) == {9, 10}
    assert not any(len(tree) for _, tree in watched.proposed)
    assert watched.proposed
    decoded(live, params("greedy"))
    assert any(len(tree) for _, tree in watched.proposed)


@pytest.mark.parametrize("name", ["eagle3", "p_eagle", "hydra", "draft_model"])
def test_nan_still_drops_a_drafter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a row of NaN is none that allows nothing."""
    runner, options = target(), {"model": HEADS.get(name, "toy")}
    drafter = drafter_of(name, options, runner, ToyRunner(VOCAB, nan_from=1))
    if name in HEADS:
        fitted = "paceline.drafters.heads.head_drafter.DraftVocabulary.fitted"
        monkeypatch.setattr(fitted, lambda _, rows: torch.full((len(rows), VOCAB), torch.nan))
    found = decoded(engine([drafter], verifier("rejection_sampler"), runner=runner), params("sampled", **TIGHT))
    assert "NaN" in found.metrics.dropped_drafters[name]


def test_rows_of_nothing_and_of_nan_are_told_apart() -> None:
    none, some, nan = (
        torch.full((4,), -torch.inf),
        torch.tensor([0.0, 1.0, 1.0, -torch.inf]),
        torch.full((4,), torch.nan),
    )
    for width in (1, 3):
        tokens, chances = best_tokens(torch.stack([some, none]), width)
        assert tokens[1] == chances[1] == []
        assert tokens[0][0] in (1, 2)
        assert chances[0][0] == pytest.approx(1 / (2 + np.exp(-1)))
        for bad in (nan, torch.tensor([-torch.inf, torch.inf, 0.0, 0.0]), torch.tensor([torch.nan, *[-torch.inf] * 3])):
            with pytest.raises(DrafterError, match="NaN"):
                best_tokens(torch.stack([none, bad]), width)


# ------------------------------------------------------------------------------------- texts that cannot be read

READERS = [case for case in CASES if case[0] in ("draft_model", "pearl", "specmquant", "s2d", "easyspec", "pard")]
FOREIGN = "DrafterError: the text holds token 9, and draft model 'toy' has only 9 tokens; choose one"


def short_of_two(name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """An engine whose draft model has two embeddings less than the target, and its drafter."""
    runner, draft = target(), ToyRunner(VOCAB, seed=3, sharpness=1.5, noise=0.6, pad=KNOWN - VOCAB)
    drafter = drafter_of(name, options, runner, draft)
    return engine([drafter], verifier("rejection_sampler"), runner=runner), drafter


@pytest.mark.parametrize(("name", "options"), READERS, ids=lambda v: v if isinstance(v, str) else str(len(v)))
def test_a_draft_model_serves_the_texts_that_it_can_read(name: str, options: dict[str, Any]) -> None:
    """In one batch with one that it cannot, which says so once it holds the token and gets the target's tokens."""
    live, _ = short_of_two(name, options)
    wanted = [params("greedy", allowed_token_ids=[*range(1, KNOWN)]), params("greedy"), params("greedy")]
    prompts = [PROMPT, [*PROMPT, 9], PROMPT]
    plain = run(engine((), verifier("rejection_sampler")), prompts, wanted, [SEED] * 3)
    assert 9 in plain[2].outputs[0].token_ids or 10 in plain[2].outputs[0].token_ids
    fine, foreign, later = run(live, prompts, wanted, [SEED] * 3)
    assert [one.outputs[0].token_ids for one in (fine, foreign, later)] == [one.outputs[0].token_ids for one in plain]
    assert not fine.metrics.dropped_drafters
    assert fine.metrics.num_draft_tokens > 0
    assert foreign.metrics.dropped_drafters[name].startswith(FOREIGN)
    assert foreign.metrics.num_draft_tokens == 0
    assert "the text holds token" in later.metrics.dropped_drafters[name]
    assert later.metrics.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["tli", "slem"])
def test_another_tokenizer_may_know_more_than_its_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it makes of a text is fed without the tokens that the model lacks; here that of "fg"."""

    class Shorter(OtherToy):
        def __init__(self, like: ToyRunner, **more: Any) -> None:
            super().__init__(like, pad=-1, **more)

    monkeypatch.setattr("toy_models.OtherToy", Shorter)
    runner = target()
    drafter = drafter_of(name, {"model": "other"}, runner, noisy())
    live, wanted = engine([drafter], verifier("rejection_sampler"), runner=runner), params("greedy")
    (found,) = run(live, [[1, 2, 6, 7, 3]], wanted, [SEED])
    (plain,) = run(engine((), verifier("rejection_sampler")), [[1, 2, 6, 7, 3]], wanted, [SEED])
    assert not found.metrics.dropped_drafters
    assert found.metrics.num_draft_tokens > 0
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_model_of_the_native_runner_says_so_too(tmp_path: Path) -> None:
    """Before the model itself refuses the token."""
    runner = load_runner(str(write(tmp_path)), dtype="float32")
    rows = runner.info.vocab_size
    with pytest.raises(ConfigError, match=f"was fed token {rows}, and its ids lie in"):
        runner.extend([runner.open()], [[rows]])
    args = DrafterArgs(vocab_size=rows + 8, index=0, max_context=99, load_runner=lambda name: runner)
    drafter = registry.load("drafters", "draft_model")(args, model="tiny")
    for text in ([4, rows - 1, 5], [4, rows + 7, 5]):
        (state,) = drafter.begin([Context("r", text, 3)])
        ask = partial(drafter.propose, [state], [Budget(3, 3)], [EMPTY_TREE])
        if max(text) < rows:
            assert len(ask()[0])
        else:
            with pytest.raises(DrafterError, match=f"the text holds token {rows + 7}, and .* has only {rows} tokens"):
                ask()


# ------------------------------------------------------------------------------------------------ the distribution

LACKED = 2
"""Of four tokens, the one that the draft does not have; behind token 0 it alone is allowed."""


def law(path: tuple[int, ...]) -> Any:
    return np.eye(4)[LACKED] if path and path[-1] == 0 else random_target(1, 4, zeros=0.0)(path)


def allowed(logits: torch.Tensor, paths: Any) -> torch.Tensor:
    rows = logits.float().clone()
    for row, path in zip(rows, paths, strict=True):
        if path and path[-1] == 0:
            row[[token for token in range(4) if token != LACKED]] = -torch.inf
    return rows


POLICIES: list[dict[str, Any]] = [
    {},
    {"tree_width": 2},
    {"tree_policy": "dyspec"},
    {"tree_policy": "dyspec_threshold"},
    {"tree_policy": "rsd_c", "tree_width": 2},
]


def program(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> Any:
    """Trees of a draft without token 2, under a rule that sometimes allows nothing else."""
    draft: Any = ToyRunner(4, order=None, sharpness=1.0)
    models = ToyModels(ToyRunner(4), draft, letters())
    monkeypatch.setattr("paceline.drafters.vocab.trimmed_head.kept_tokens", lambda *given: [0, 1, 3])
    args = DrafterArgs(vocab_size=4, index=0, max_context=99, load_runner=lambda name: draft, models=models)
    drafter = registry.load("drafters", "draft_model")(args, model="toy", draft_vocab_size=3, **options)

    def propose(choices: Choices) -> TokenTree:
        monkeypatch.setattr(draft_rows, "draw_tokens", enumerated(choices))
        (state,) = drafter.begin([Context("r", [1, 2], 2, 1.0, apply_rules=allowed)])
        (tree,) = drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE])
        drafter.end([state])
        for parent, trials in tree.trials.items():
            for trial in trials:
                assert trial.row is not None
                assert float(trial.row.sum()) == pytest.approx(1.0), (parent, "drawn from no distribution")
        return tree

    return propose


@pytest.mark.parametrize("options", POLICIES, ids=str)
def test_the_distribution_holds_where_a_path_ends_for_want_of_tokens(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    assert distribution_error(program(monkeypatch, options), law, 3) < 1e-6, "float32 rows"


def test_the_distribution_check_catches_drafts_cut_for_where_they_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong: a drawn token is taken out because nothing can be drafted behind it."""
    draws = program(monkeypatch, {})

    def cut(choices: Choices) -> TokenTree:
        tree: TokenTree = draws(choices)
        bad = {node for node in range(len(tree)) if int(tree.tokens[node]) == 0}
        return prune(tree, [node for node in range(len(tree)) if bad.isdisjoint(tree.path(node))])

    assert distribution_error(cut, law, 3) > WRONG
