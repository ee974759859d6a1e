"""The adversaries are what they claim to be, so that tests which survive them mean something."""

from __future__ import annotations

import pytest
from adversaries import INVALID, VALID, Adversary, Liar, Oracle, TooDeep, TooFewTrees
from toys import ToyRunner

from paceline.drafters import Context, DrafterArgs
from paceline.errors import DrafterError
from paceline.tree import EMPTY_TREE, Budget, TokenTree

TARGET = ToyRunner(11)
PROMPT = [1, 2, 3]


def proposals(kind: type[Adversary], nodes: int = 6, depth: int = 3) -> list[TokenTree]:
    adversary = kind(DrafterArgs(vocab_size=11, index=0, max_context=99, target=TARGET))
    states = adversary.begin([Context("r", list(PROMPT), 3)])
    found = adversary.propose(states, [Budget(nodes, depth)], [EMPTY_TREE])
    adversary.end(states)
    assert adversary.open == 0
    return found


@pytest.mark.parametrize("kind", VALID)
@pytest.mark.parametrize("nodes", [0, 1, 6])
def test_valid_ones_keep_the_contract(kind: type[Adversary], nodes: int) -> None:
    (tree,) = proposals(kind, nodes)
    tree.check(11, nodes)
    assert tree.max_depth <= 3


@pytest.mark.parametrize("kind", INVALID)
def test_invalid_ones_break_it(kind: type[Adversary]) -> None:
    found = proposals(kind)
    if kind is TooFewTrees:
        assert not found
    elif kind is TooDeep:
        assert found[0].max_depth > 3
    else:
        with pytest.raises(DrafterError):
            found[0].check(11, 6)


def test_the_oracle_is_right_and_the_liar_is_wrong() -> None:
    assert proposals(Oracle)[0].tokens.tolist() == TARGET.greedy(PROMPT, 3)
    lies = proposals(Liar)[0].tokens.tolist()
    assert all(TARGET.greedy([*PROMPT, *lies[:i]], 1) != [token] for i, token in enumerate(lies))
