"""Several exits: thresholds at their ends are fixed drafts, deeper layers catch up in batches, q is the exit's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_checkpoint
from tools.enumerate_draws import Choices
from tools.one_sequence import PROMPT, begin, program, propose, recorded_with
from tools.random_drafts import random_target
from tools.random_trees import WRONG, distribution_error
from toy_models import ToyModels
from toys import ToyRunner

from paceline import LLM, SamplingParams
from paceline.drafters import DrafterArgs
from paceline.drafters.draft_model.s2d import S2dDrafter
from paceline.errors import ConfigError, DrafterError, UnsupportedModelError
from paceline.models import load_runner
from paceline.models.heads import DraftExits
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Trial


def drafter_of(size: int = 11, **options: Any) -> tuple[S2dDrafter, ToyModels]:
    models = ToyModels(ToyRunner(size), ToyRunner(size, order=None, sharpness=1.5))
    args = DrafterArgs(vocab_size=size, index=0, max_context=99, models=models)
    return S2dDrafter(args, model="toy", **options), models


def greedy(models: ToyModels, steps: int, exits: Sequence[int], thresholds: Sequence[float]) -> list[int]:
    """The rule in its plainest form, without a cache."""
    text = list(PROMPT)
    for _ in range(steps):
        for layers, threshold in zip(exits, [*thresholds, 0.0], strict=True):
            row = models.exits.at(text, layers)
            if float(row.softmax(0).max()) >= threshold:
                break
        text.append(int(row.argmax()))
    return text[len(PROMPT) :]


@pytest.mark.parametrize("thresholds", [[0.0, 0.0], [2.0, 2.0], [0.5, 0.7], [2.0, 0.4], [0.4, 2.0]])
def test_every_token_takes_the_first_exit_that_is_sure_enough(thresholds: list[float]) -> None:
    drafter, models = drafter_of(draft_exits=[1, 3], draft_exit_thresholds=thresholds)
    tree = propose(drafter, begin(drafter), 8)
    assert tree.tokens.tolist() == greedy(models, 8, (1, 3, 4), thresholds)


def test_at_the_ends_it_is_the_small_model_and_the_whole_one() -> None:
    drafter, models = drafter_of(draft_exits=[2], draft_exit_thresholds=0.0)
    small = propose(drafter, begin(drafter))
    assert {(first, stop) for first, stop, _ in models.exits.ran} == {(0, 2)}
    assert small.tokens.tolist() == greedy(models, 6, (2, 4), [0.0])
    drafter, models = drafter_of(draft_exits=[2], draft_exit_thresholds=1.5)
    assert propose(drafter, begin(drafter)).tokens.tolist() == models.exits.greedy(PROMPT, 6)


def test_deeper_layers_see_what_waited_in_one_pass() -> None:
    drafter, models = drafter_of(draft_exits=[2], draft_exit_thresholds=0.0)
    state = begin(drafter)
    propose(drafter, state, 5)
    assert models.exits.ran == [(0, 2, 3)] + [(0, 2, 1)] * 4
    drafter.thresholds = [2.0]
    models.exits.ran.clear()
    tree = propose(drafter, state, 2)
    assert models.exits.ran == [(0, 2, 1), (2, 4, 3), (0, 2, 1), (2, 4, 1)], "the text waited for the upper layers"
    state.context.tokens += tree.tokens.tolist()
    models.exits.ran.clear()
    propose(drafter, state, 1)
    assert models.exits.ran == [(0, 2, 1), (2, 4, 1)], "what was drafted through all layers is known"


def test_what_waits_too_long_is_fed_to_all_layers() -> None:
    drafter, models = drafter_of(draft_exits=[2], draft_exit_thresholds=0.0)
    state = begin(drafter, [i % 9 for i in range(60)])
    propose(drafter, state, 2)
    assert state.cache.length == 59
    for _ in range(60):
        state.context.tokens.append(3)
        propose(drafter, state, 2)
    assert 60 < state.cache.length < len(state.context.tokens)
    drafter.end([state])
    assert models.exits.open_caches == 0


def test_the_output_keeps_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, models = drafter_of(4, draft_exits=[1, 2], draft_exit_thresholds=[0.45, 0.55])
    draws = program(monkeypatch, drafter)
    assert distribution_error(draws, random_target(1, 4, zeros=0.0), 4) < 1e-6, "float32 rows"
    assert {stop for _, stop, _ in models.exits.ran} == {1, 2, 4}, "every exit is taken somewhere"


def test_the_distribution_check_catches_a_q_of_another_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, models = drafter_of(4, draft_exits=[1, 2], draft_exit_thresholds=[0.45, 0.55])
    draws = program(monkeypatch, drafter)

    def lying(choices: Choices) -> TokenTree:
        return recorded_with(draws(choices), lambda text: models.exits.at(text, 4))

    assert distribution_error(lying, random_target(1, 4, zeros=0.0), 4) > WRONG


def grown(models: ToyModels, width: int, levels: int, mass: float) -> set[tuple[int, ...]]:
    """Paths of the tree in its plainest form, without limits of nodes: two exits, thresholds 0.4 and 0.6."""
    front: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    found: dict[tuple[int, ...], float] = {}
    for _ in range(levels):
        new = []
        for path, reach in front:
            for layers, threshold in zip((1, 3, 4), (0.4, 0.6, 0.0), strict=True):
                row = models.exits.at([*PROMPT, *path], layers).softmax(0)
                if float(row.max()) >= threshold:
                    break
            chances, tokens = row.topk(width)
            needed = 1 + int((chances.cumsum(0)[:-1] < mass).sum())
            new += [((*path, int(t)), reach * float(c)) for t, c in list(zip(tokens, chances, strict=True))[:needed]]
        found |= dict(new)
        front = sorted(new, key=lambda each: -each[1])[:width]
    return set(found)


def paths_of(tree: TokenTree) -> set[tuple[int, ...]]:
    return {tuple(int(tree.tokens[i]) for i in tree.path(node)) for node in range(len(tree))}


def tree_of(width: int, mass: float = 0.6) -> tuple[TokenTree, ToyModels]:
    given: dict[str, Any] = {"draft_exits": [1, 3], "draft_exit_thresholds": [0.4, 0.6]}
    drafter, models = drafter_of(**given, tree_width=width, tree_mass=mass)
    state = begin(drafter)
    return drafter.propose([state], [Budget(99, 4)], [EMPTY_TREE])[0], models


def test_a_node_has_the_more_children_the_less_sure_its_exit_is() -> None:
    """By brute force. Negative control: as many children everywhere are another tree."""
    tree, models = tree_of(3)
    assert paths_of(tree) == grown(models, 3, 4, 0.6) != grown(models, 3, 4, 1.0)
    widths = {len(tree.children(node)) for node in range(-1, len(tree))}
    assert {1, 2, 3} <= widths
    chain, _ = tree_of(1)
    assert chain.is_chain
    narrow, _ = tree_of(3, 1e-6)
    assert narrow.is_chain
    assert narrow.tokens.tolist() == chain.tokens.tolist()


def test_drawn_trees_keep_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows of another exit."""
    given: dict[str, Any] = {"draft_exits": [1, 2], "draft_exit_thresholds": [0.45, 0.55]}
    drafter, models = drafter_of(4, **given, tree_width=2, tree_mass=0.7)
    draws = program(monkeypatch, drafter, 3)
    assert distribution_error(draws, random_target(1, 4, zeros=0.0), 3) < 1e-6, "float32 rows"

    def lying(choices: Choices) -> TokenTree:
        tree = draws(choices)
        rows = {p: models.exits.at([*PROMPT, *(int(tree.tokens[i]) for i in tree.path(p))], 4) for p in tree.trials}
        told = {p: tuple(Trial(t.node, rows[p].softmax(0), t.removed, t.order) for t in each)
                for p, each in tree.trials.items()}  # fmt: skip
        return tree.replace(trials=told)

    assert distribution_error(lying, random_target(1, 4, zeros=0.0), 3) > WRONG


def test_of_a_tree_that_went_through_all_layers_the_accepted_path_is_kept() -> None:
    drafter, models = drafter_of(draft_exits=[2], draft_exit_thresholds=2.0, tree_width=3, tree_mass=1.0)
    state = begin(drafter)
    (tree,) = drafter.propose([state], [Budget(99, 3)], [EMPTY_TREE])
    leaf = next(leaf for leaf in tree.leaves() if len(tree.path(leaf)) == 3 and tree.path(leaf) != (0, 1, 2))
    state.context.tokens += [*(int(tree.tokens[i]) for i in tree.path(leaf)), 9]
    models.exits.ran.clear()
    propose(drafter, state, 1)
    assert state.cache.length == len(PROMPT) + 2, "the last of them was not fed"
    assert models.exits.ran == [(0, 2, 2), (2, 4, 2)]


def test_exits_and_thresholds_are_those_that_were_trained_for_the_target() -> None:
    def made(layers: tuple[int, ...], **options: Any) -> S2dDrafter:
        models = ToyModels(ToyRunner(11), ToyRunner(11, order=None))
        models.trained_exits = DraftExits(layers).chosen_for({"name": "toy", "fingerprint": "toy-11-2-0"}, (0.3, 0.4))
        target = ToyRunner(11, seed=options.pop("target", 0))
        return S2dDrafter(
            DrafterArgs(vocab_size=11, index=0, max_context=99, models=models, target=target), model="toy", **options
        )

    assert (made((1, 3)).exits, made((1, 3)).thresholds) == ((1, 3, 4), [0.3, 0.4])
    assert made((1, 3), target=5).thresholds == [0.9, 0.9], "none were chosen for this target"
    assert made((1, 3), draft_exits=[1, 2]).thresholds == [0.9, 0.9], "they are of other exits"
    assert made((1, 3), draft_exit_thresholds=0.5).thresholds == [0.5, 0.5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("exits"), num_hidden_layers=4)


@pytest.mark.parametrize("threshold", [0.0, 0.02, 2.0])
def test_a_real_model_with_exits_is_itself(folder: Path, threshold: float) -> None:
    """Near ties apart: the last exit's chain is the whole model's own, and the target's text stays."""
    plain = LLM(folder, speculative_config=None, dtype="float32", seed=1)
    prompts = [{"prompt_token_ids": [5 + 3 * i for i in range(n)]} for n in (3, 70, 20)]
    config = {"method": "s2d", "model": str(folder), "draft_exits": [1, 2], "draft_exit_thresholds": threshold}
    fast = plain.with_speculative_config(config | {"num_speculative_tokens": 4})
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    found = fast.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    assert not any(o.metrics.dropped_drafters for o in found)
    share = sum(o.metrics.num_accepted_tokens for o in found) / sum(o.metrics.num_draft_tokens for o in found)
    assert share == 1.0 or threshold < 1
    assert share < 1.0 or threshold > 0


def test_trees_of_a_real_model_leave_the_text_alone(folder: Path) -> None:
    plain = LLM(folder, speculative_config=None, dtype="float32", seed=1)
    prompts = [{"prompt_token_ids": [5 + 3 * i for i in range(n)]} for n in (3, 20)]
    config = {"method": "s2d", "model": str(folder), "draft_exits": [1, 2], "draft_exit_thresholds": 0.02}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    wide = plain.with_speculative_config(config | {"tree_width": 3, "max_nodes": 12, "controller": "auto"})
    found = wide.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in plain.generate(prompts, params)]
    assert not any(o.metrics.dropped_drafters for o in found)


def test_an_exit_gives_what_its_layers_give(folder: Path) -> None:
    runner: Any = load_runner(folder, dtype="float32")
    models = ToyModels(ToyRunner(6144), ToyRunner(6144))
    models.exits = runner
    drafter = S2dDrafter(
        DrafterArgs(vocab_size=6144, index=0, max_context=99, models=models),
        model="x",
        draft_exits=[2],
        draft_exit_thresholds=0.0,
    )
    state = begin(drafter, [5, 6, 7])
    tree = propose(drafter, state, 3)
    text = [5, 6, 7, *tree.tokens.tolist()]
    from paceline.models import LayerPlan

    chain = TokenTree.chain(text[1:])
    states = runner.run_layers([runner.open()], [text[0]], [chain], plan=LayerPlan(stop=2)).states
    assert runner.head(states).argmax(-1).tolist()[2:5] == tree.tokens.tolist()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"draft_exits": [4]}, r"draft_exits must be layers in 1\.\.3 in ascending order"),
        ({"draft_exits": [2, 1]}, "ascending"),
        ({"draft_exits": []}, "ascending"),
        ({"draft_exits": "12"}, "ascending"),
        ({"draft_exit_thresholds": [0.5]}, "one for each of 2 exits"),
        ({"draft_exit_thresholds": -0.1}, r"be in 0\.\.2"),
        ({"draft_exit_thresholds": "x"}, "one number"),
        ({"tree_width": 0}, r"tree_width must be an integer in 1\.\.64"),
        ({"tree_mass": 0.0}, "tree_mass must be above 0"),
        ({"draft_sample_method": "best"}, "draft_sample_method"),
    ],
)
def test_bad_options_are_rejected(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        drafter_of(**options)


def test_models_without_exits_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = tiny_checkpoint.write(tmp_path / "one", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="must have two layers or more, got 1"):
        LLM(speculative_config={"method": "s2d", "model": str(one)})
    from paceline.models import load

    two = tiny_checkpoint.write(tmp_path / "two")
    llm = LLM(speculative_config=None)
    monkeypatch.setattr(load, "spec_from_config", Mock(side_effect=UnsupportedModelError("of no family")))
    with pytest.raises(DrafterError, match="cannot run some of its layers alone"):
        llm.with_speculative_config({"method": "s2d", "model": str(two)})
