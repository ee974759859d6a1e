"""Maps between states in training: what the target makes of pseudo states is what it makes of them when they draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import write

from paceline import LLM
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.hidden_transfer import HiddenTransferDrafter
from paceline.errors import ConfigError
from paceline.training import training_config
from paceline.training.batches import Document
from paceline.training.hidden_transfer import HiddenTransferTrainer
from paceline.tree import EMPTY_TREE, Verdict

TEXT = tuple(5 * i % 57 + 4 for i in range(12))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write(tmp_path_factory.mktemp("target"), vocab_size=320, num_hidden_layers=4)
    return LLM(folder, speculative_config=None, dtype="float32", threads=1, profile=False)


@torch.no_grad()
def test_a_pseudo_state_of_training_says_what_it_says_when_it_drafts(llm: LLM, tmp_path: Path) -> None:
    """With maps that enter before different layers; not with a map that was changed since."""
    config = training_config("hidden_transfer", data=(Path("x"),), transfer_layers=(1, 2, 2))
    trainer, view = HiddenTransferTrainer.init(llm, config, torch.arange(320))
    for parameter in trainer.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    trainer.write(tmp_path / "head", llm, view, {"target": {"name": "tiny"}})
    info, target = llm.runner.info, llm.runner
    args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=info.max_context, target=target)
    drafter, place, cache = HiddenTransferDrafter(args, model=str(tmp_path / "head")), 6, target.open()
    assert drafter.layers == [1, 2, 2]
    (state,) = drafter.begin([Context("a", list(TEXT[: place + 1]), 4)])
    target.extend([cache], [TEXT[:place]])
    runner: Any = target
    added = drafter.added_rows([state], [EMPTY_TREE], [6])
    drafter.read_rows([state], [runner.score_added([cache], [TEXT[place]], [EMPTY_TREE], added)[1].of(0)])
    drafter.observe([state], [EMPTY_TREE], [Verdict((), (), 1)], None)
    batch = view.batch([[Document(TEXT, 4)]], 32)
    kept = torch.zeros(batch.tokens.shape, dtype=torch.bool)
    kept[0, [place, 3]] = True

    def said() -> torch.Tensor:
        return torch.stack([trainer.logits(states[1]) for _, states in trainer.states(batch, [kept] * 3)])

    assert torch.allclose(said(), state.guesses, atol=1e-3)
    trainer.transfers[1].weight.mul_(1.1)
    same = torch.isclose(said(), state.guesses, atol=1e-3).all(1).tolist()
    assert same == [True, False, False], "later ones see earlier ones, not the other way round"


def test_layers_that_are_not_there_are_named(llm: LLM) -> None:
    def checked(**settings: Any) -> None:
        config = training_config("hidden_transfer", data=(Path("x"),), **settings)
        HiddenTransferTrainer.check(llm.runner.info, config)

    checked(transfer_layers=(1, 3))
    with pytest.raises(ConfigError, match="transfer_layers must be at most 3"):
        checked(transfer_layers=(1, 4))
    with pytest.raises(ConfigError, match="depths must be left out with transfer_layers"):
        checked(transfer_layers=(1, 2), depths=3)
    with pytest.raises(ConfigError, match="transfer_layers must be one number or more that never fall"):
        checked(transfer_layers=(2, 1))
