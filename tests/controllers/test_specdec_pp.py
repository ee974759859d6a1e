"""SpecDec++: the checks of its description, of the controller and of what a draft model passes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from acceptance_heads import acceptance_head
from controllers.steps import granted, requested, step
from controllers.worlds import Guesser, World, informed
from safetensors.torch import load_file, save_file
from tools.enumerate_draws import Choices
from tools.one_sequence import enumerated
from tools.random_drafts import random_target
from tools.random_trees import TOLERANCE, WRONG, distribution_error
from torch.nn.functional import silu
from toys import ToyRunner

from paceline.assembly.build import build_parts
from paceline.config import SpeculativeConfig
from paceline.controllers.policies import FixedController
from paceline.controllers.policies.specdec_pp import SpecDecPPController
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.common import draft_rows
from paceline.drafters.draft_model.drafter import DraftModelDrafter
from paceline.errors import CapabilityError, CheckpointError, ConfigError
from paceline.models.heads import AcceptanceHead
from paceline.tree import ACCEPTANCE, EMPTY_TREE, Budget, TokenTree, select_nodes

VOCAB, PROMPT = 11, [1, 2, 3, 4, 5]


def passed(chances: Sequence[float]) -> list[object]:
    """What a drafter passes before each level but the first: the chance of the token before the last drafted one."""
    return [None, *({ACCEPTANCE: chance} for chance in chances)]


def test_the_ends_of_the_threshold_are_the_bounds() -> None:
    for chance in (0.999, 0.5, 0.01):
        features = passed([chance] * 40)
        assert requested(SpecDecPPController(stop_threshold=1.0), [0.5] * 40, features)[1] == 20
        assert requested(SpecDecPPController(stop_threshold=0.0), [0.5] * 40, features)[1] == 2
    assert requested(SpecDecPPController(stop_threshold=1.0, bound=[3, 7]), [0.5] * 40, passed([0.5] * 40))[1] == 7


def test_the_token_that_comes_with_the_crossing_state_is_the_last_one() -> None:
    """0.9 ** 3 = 0.729 is a chance of rejection of 0.271, 0.9 ** 4 = 0.656 one of 0.344: of the fourth token, whose
    state comes with the fifth. The first factor belongs to the text. Whatever the drafter thinks of its tokens.
    """
    for confidence in (0.1, 0.99):
        assert requested(SpecDecPPController(), [confidence] * 40, passed([0.9] * 40))[1] == 5
    chances = [0.9, 0.9, 0.6, 0.9]
    assert requested(SpecDecPPController(), [0.5] * 40, passed(chances))[1] == 4


def test_drafters_without_a_head_go_on_to_the_bound() -> None:
    assert requested(SpecDecPPController(), [0.1] * 40)[1] == 20
    assert step(SpecDecPPController(), [0.1] * 20, 0, sequential=False) == 20


class Foretelling(Guesser):
    """A drafter whose head knows the true chances, or says the opposite, and comes one token late."""

    lies = False

    def propose(self, step: int, budget: Budget, rng: Any) -> tuple[list[int], list[float], int]:
        told, chances = [], list[float]()

        def chance(step: int, rng: Any) -> tuple[float, float]:
            chances.append(self.chance(step, rng)[0])
            return chances[-1], 0.5

        def go_on(depth: int, confidence: float, features: object) -> bool:
            last = chances[-2] if len(chances) > 1 else 1.0
            told.append({ACCEPTANCE: 1 - last if self.lies and len(chances) > 1 else last})
            return budget.go_on(depth, confidence, told[-1])

        inner = Guesser(self.name, chance, self.fixed, self.per_level)
        return inner.propose(step, Budget(budget.nodes, budget.depth, go_on), rng)


class Lying(Foretelling):
    lies = True


def speed(kind: type[Guesser], controller: Any) -> float:
    """Tokens per second where a verification takes a second and a draft step 0.15; easy and hard tokens."""
    world = World([kind("a", informed(0.3, 0.99), per_level=0.15)], lambda rows: 1.0, jitter=0.0, outliers=0.0)
    return world.run(controller, 800)


def test_an_oracle_for_the_head_beats_every_fixed_length() -> None:
    """Negative control: a head that says the opposite."""
    best = max(speed(Foretelling, FixedController(number)) for number in range(12))
    assert speed(Foretelling, SpecDecPPController(bound=(1, 20))) > 1.04 * best
    assert speed(Lying, SpecDecPPController(bound=(1, 20))) < best


@pytest.mark.parametrize("wrong", [{"stop_threshold": 2}, {"bound": 3}, {"bound": [0, 5]}, {"bound": [6, 5]}])
def test_wrong_options_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SpecDecPPController(**wrong)


def written(folder: Path, **facts: Any) -> str:
    return str(acceptance_head(seed=3, **facts).write(folder / "head"))


def drafter_of(head: str, runner: ToyRunner | None = None, **options: Any) -> tuple[DraftModelDrafter, ToyRunner]:
    runner = runner or ToyRunner(VOCAB, order=None)
    args = DrafterArgs(vocab_size=runner.vocab_size, index=0, max_context=4096, load_runner=lambda name: runner)
    return DraftModelDrafter(args, model="toy", acceptance_head=head, **options), runner


def test_the_head_reads_the_state_of_the_token_before_the_last_drafted_one(tmp_path: Path) -> None:
    """By brute force. Negative controls: states that are shifted by one either way say something else."""
    drafter, runner = drafter_of(written(tmp_path))
    told: list[float | None] = []

    def go_on(depth: int, confidence: float, features: Any) -> bool:
        told.append(None if features is None else features[ACCEPTANCE])
        return True

    (state,) = drafter.begin([Context("r", list(PROMPT), len(PROMPT))])
    (tree,) = drafter.propose([state], [Budget(6, 6, go_on)], [EMPTY_TREE])
    text = [*PROMPT, *tree.tokens.tolist()]
    head = acceptance_head(seed=3)
    states = torch.stack([runner.hidden(4, text[:end]) for end in range(1, len(text) + 1)])
    chances = head.chances(states)
    assert told[0] is None
    assert told[1:] == pytest.approx(chances[len(PROMPT) : len(PROMPT) + 4], abs=1e-5)
    for shift in (-1, 1):
        assert told[1:] != pytest.approx(chances[len(PROMPT) + shift : len(PROMPT) + shift + 4], abs=1e-3)


def parts(config: dict[str, Any]) -> Any:
    runner, parsed = ToyRunner(VOCAB), SpeculativeConfig.parse(config)
    return build_parts(runner, parsed, load=lambda name: ToyRunner(VOCAB, order=None))[1]


def test_a_head_asks_for_its_controller_and_the_controller_for_a_head(tmp_path: Path) -> None:
    head = written(tmp_path)
    config = {"method": "draft_model", "model": "toy", "acceptance_head": head}
    assert parts(config).controller.name == "specdec_pp"
    assert parts({**config, "stop_threshold": 0.6, "bound": [1, 9]}).controller.bound == (1, 9)
    assert parts({**config, "num_speculative_tokens": 3}).controller.num_speculative_tokens == 3
    assert parts({"method": ["ngram", config]}).controller.name == "specdec_pp"
    with pytest.raises(ConfigError, match="controller 'specdec_pp' reads an acceptance head, and no method has one"):
        parts({"method": "draft_model", "model": "toy", "controller": "specdec_pp"})
    for name in ("auto", "online_acceptance"):
        with pytest.raises(ConfigError, match=f"controller '{name}' does not read an acceptance head"):
            parts({**config, "controller": name})
    with pytest.raises(ConfigError, match="acceptance_head must be left out with tree_policy 'levels'"):
        parts({**config, "tree_width": 2})


def test_the_law_of_the_output_does_not_depend_on_the_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By enumeration of all draws where the head says how many are made. Negative control: a token is taken back once
    the head has read that token itself.
    """
    head, runner = acceptance_head(seed=3), ToyRunner(4, order=None, sharpness=1.0)
    drafter, _ = drafter_of(written(tmp_path), runner)
    lengths, looks = set[int](), False

    def draws(choices: Choices) -> TokenTree:
        monkeypatch.setattr(draft_rows, "draw_tokens", enumerated(choices))
        (state,) = drafter.begin([Context("r", list(PROMPT[:3]), 3, temperature=1.0)])
        controller = SpecDecPPController(stop_threshold=0.5, bound=(1, 3))
        (tree,) = drafter.propose([state], [granted(controller, temperature=1.0)], [EMPTY_TREE])
        drafter.end([state])
        if looks:
            text = [*PROMPT[:3], *tree.tokens.tolist()]
            (chance,) = head.chances(runner.hidden(4, text)[None])
            tree = tree if chance > 0.5 else select_nodes(tree, len(tree) - 1)
        lengths.add(len(tree))
        return tree

    target = random_target(1, 4)
    assert distribution_error(draws, target, 3) < TOLERANCE
    assert len(lengths) > 1
    looks = True
    assert distribution_error(draws, target, 3) > WRONG


def test_heads_of_other_models_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="for shape toy-9"):
        drafter_of(written(tmp_path, draft={"name": "small", "fingerprint": "toy-9-None-0"}))
    with pytest.raises(CheckpointError, match=r"model\.0\.linear\.weight must be \(16, 16\) for this draft model, got"):
        drafter_of(written(tmp_path), ToyRunner(VOCAB, hidden_size=16))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, tmp_path / "other" / "model.safetensors")
    with pytest.raises(CheckpointError, match="holds no acceptance head"):
        drafter_of(str(tmp_path / "other"))
    runner = ToyRunner(VOCAB)
    runner.capabilities = type(runner.capabilities)(taps=False)
    with pytest.raises(CapabilityError, match="acceptance_head reads states"):
        drafter_of(written(tmp_path), runner)


def test_the_authors_files_whose_blocks_share_a_weight_are_read(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / "head" / "model.safetensors"
    tensors = {name: one for name, one in load_file(file).items() if not name.startswith("model.1.")}
    save_file(tensors, file)
    (tmp_path / "head" / "config.json").write_text(json.dumps({"hidden_size": 8, "num_layers": 2}))
    head = AcceptanceHead.read(tmp_path / "head", ToyRunner(VOCAB), None)
    assert torch.equal(head.blocks[0][0], head.blocks[1][0])
    states = found = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        found = found + silu(found @ tensors["model.0.linear.weight"].T + tensors["model.0.linear.bias"])
    expected = found @ tensors["model.2.weight"].T + tensors["model.2.bias"]
    assert torch.allclose(head.logits(states), expected, atol=1e-5)
