"""Hidden transfer: what the target makes of states that were transferred by layers, and the methods at its ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_llama import close, runner_of, tiny_llama

from benchmarks.stand_ins import written_head
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.hidden_transfer import HiddenTransferDrafter
from paceline.drafters.heads.ppd import PPDDrafter
from paceline.errors import CheckpointError, ConfigError
from paceline.models import LayerPlan
from paceline.models.heads import HeadConfig
from paceline.tree import EMPTY_TREE, Budget, TokenTree, Verdict

TEXT, TREE = [7, 3, 9, 4, 1], TokenTree.build([5, 6, 8], [-1, 0, -1], confidence=[0.4, 0.5, 0.3])


def config_for(target: Any, method: str, levels: int, **more: Any) -> HeadConfig:
    info = target.info
    sizes = {"hidden_size": info.hidden_size, "vocab_size": info.vocab_size, "draft_vocab_size": info.vocab_size}
    return HeadConfig(method=method, num_heads=levels, **sizes, **more)  # type: ignore[arg-type]


def drafter_of(target: Any, model: str, kind: Any = HiddenTransferDrafter) -> Any:
    info = target.info
    return kind(DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=99, target=target), model=model)


def guesses(target: Any, drafter: Any, path: tuple[int, ...]) -> torch.Tensor:
    """(levels, v) behind a path of the tree."""
    cache, (state,) = target.open(), drafter.begin([Context("a", list(TEXT), 5)])
    target.extend([cache], [TEXT[:-1]])
    added = drafter.added_rows([state], [TREE], [99])
    drafter.read_rows([state], [target.score_added([cache], TEXT[-1:], [TREE], added)[1].of(0)])
    tokens = tuple(int(TREE.tokens[node]) for node in path)
    state.context.tokens += [*tokens, 2]
    drafter.observe([state], [TREE], [Verdict(path, tokens, 2)], None)
    if len(state.guesses):
        (drafted,) = drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE])
        assert drafted.tokens.tolist() == state.guesses.argmax(-1).tolist()
    found: torch.Tensor = state.guesses
    return found


def test_guesses_are_those_of_states_that_entered_layer_by_layer() -> None:
    """By runs of parts of the layers, which know nothing of rows that enter."""
    target = runner_of(tiny_llama())
    drafter = drafter_of(target, written_head(config_for(target, "hidden_transfer", 2, taps=(0, 1)), shared=False))
    found = guesses(target, drafter, (0, 1))

    def by_hand(order: tuple[int, int]) -> torch.Tensor:
        cache = target.open()
        target.extend([cache], [TEXT[:-1]])
        x = target.run_layers([cache], [1], [TokenTree.chain([5, 6])], plan=LayerPlan(stop=1)).states
        for level, layer in enumerate((1, 2)):
            weight, bias = drafter.maps[order[level]]
            x = torch.cat([x, x[2:3] @ weight.T + bias])
            plan = LayerPlan(first=layer, stop=2 if layer == 1 else None)
            tree = TokenTree.chain([5, 6, *[0] * (1 + level)])
            x = target.run_layers([cache], [1], [tree], plan=plan, hidden=x).states
        return target.head(x[3:])

    assert close(found, by_hand((0, 1)))
    assert not close(found, by_hand((1, 0))), "each has a map of its own"
    assert not close(found, guesses(target, drafter, (2,))), "of another input"


@pytest.mark.parametrize("constant", [True, False])
def test_with_constant_states_before_the_first_layer_it_is_ppd(constant: bool) -> None:
    target = runner_of(tiny_llama())
    d, states = target.info.hidden_size, torch.randn(3, target.info.hidden_size)
    weights = {f"transfers.{k}.bias": states[k] for k in range(3)}
    weights |= {f"transfers.{k}.weight": torch.zeros(d, d) if constant else torch.eye(d) for k in range(3)}
    transfer = written_head(config_for(target, "hidden_transfer", 3, taps=(-1, -1, -1)), weights)
    prompts = written_head(config_for(target, "ppd", 3), {"prompts": states[:, None]})
    both = drafter_of(target, transfer), drafter_of(target, prompts, PPDDrafter)
    first, second = (guesses(target, drafter, (0, 1)) for drafter in both)
    assert close(first, second) is constant


def test_maps_that_enter_nowhere_are_named() -> None:
    target = runner_of(tiny_llama())
    late = written_head(config_for(target, "hidden_transfer", 1, taps=(3,)))
    with pytest.raises(CheckpointError, match="is for num_layers 4, but tiny has 3"):
        drafter_of(target, late)
    for taps in ((1,), (1, 0)):
        with pytest.raises(ConfigError, match="taps must name a layer for each head, in their order"):
            config_for(target, "hidden_transfer", 2, taps=taps)
    with pytest.raises(ConfigError, match="pseudo_rows must be"):
        HiddenTransferDrafter(DrafterArgs(vocab_size=64, index=0, max_context=99, target=target), pseudo_rows=-1)
