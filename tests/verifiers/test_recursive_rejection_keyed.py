"""The exact verifier with its real noise: the target's distribution in float32 (G-test), and for points the tokens of
plain decoding.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tools.gtest import ERROR, g_test

from paceline.sampling import KeyedDraws
from paceline.tree import EMPTY_TREE, ROOT, TokenTree, Trial, Verdict
from paceline.verifiers import RecursiveRejection, recursive_rejection

P = torch.tensor([0.35, 0.3, 0.2, 0.1, 0.05])
Q = torch.tensor([0.1, 0.1, 0.2, 0.3, 0.3])


def p_value(samples: int = 2400) -> float:
    """G-test of the first token over positions, with two drawn trials without replacement and a point between them."""
    counts, rng = np.zeros(5), np.random.default_rng(0)
    for position in range(samples):
        first, second = rng.choice(5, size=2, replace=False, p=Q.double().numpy() / Q.double().numpy().sum()).tolist()
        tokens = list(dict.fromkeys([first, 1, second]))
        trials = [Trial(0, Q), Trial(tokens.index(1)), Trial(tokens.index(second), Q, (first,))]
        tree = TokenTree.build(tokens, [ROOT] * len(tokens), trials={ROOT: trials})
        (verdict,) = RecursiveRejection().verify(
            [tree], [P.log().repeat(1 + len(tokens), 1)], [KeyedDraws(3, position)]
        )
        assert isinstance(verdict, Verdict)
        counts[verdict.tokens[0]] += 1
    return g_test(counts, P.double().numpy() / P.double().numpy().sum())


def test_draws_follow_the_target():
    assert p_value() > ERROR


@pytest.mark.parametrize(("name", "wrong"), [("acceptance", lambda r_x, q_x: r_x), ("residual", lambda r_v, q_v: r_v)])
def test_the_check_catches_a_wrong_rule(monkeypatch, name, wrong):
    monkeypatch.setattr(recursive_rejection, name, wrong)
    assert p_value() < ERROR


# ------------------------------------------------------------------------------------------------ the same tokens as
# plain decoding


VOCABULARY = 12


def toy_logits(text: list[int]) -> torch.Tensor:
    """float32 logits that depend on the last three tokens."""
    rng = np.random.default_rng([17, *text[-3:]])
    return torch.from_numpy((rng.normal(size=VOCABULARY) * 2).astype(np.float32))


def guess(text: list[int], rng: np.random.Generator) -> TokenTree:
    """A random tree of points, drawn with a bias to what the target finds likely."""
    tokens, parents, texts = [], [], {ROOT: text}
    for _ in range(int(rng.integers(0, 9))):
        parent = int(rng.integers(-1, len(tokens)))
        token = int(toy_logits(texts[parent]).topk(3).indices[rng.integers(3)])
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            parents.append(parent)
            tokens.append(token)
            texts[len(tokens) - 1] = [*texts[parent], token]
    return TokenTree.build(tokens, parents)


def decode(seed: int, length: int, *, drafts: bool, key_by_step: bool = False) -> tuple[list[int], int]:
    """(tokens, steps) of decoding with or without drafts."""
    text, steps, rng = [0, 0, 0], 0, np.random.default_rng(seed)
    while len(text) < length + 3:
        tree = guess(text, rng) if drafts else EMPTY_TREE
        rows = torch.stack(
            [toy_logits(text + [int(tree.tokens[i]) for i in tree.path(node)]) for node in range(-1, len(tree))]
        )
        draws = KeyedDraws(seed, steps if key_by_step else len(text))
        (verdict,) = RecursiveRejection().verify([tree], [rows], [draws])
        assert isinstance(verdict, Verdict)
        text += verdict.tokens
        steps += 1
    return text[3 : length + 3], steps


@pytest.mark.parametrize("seed", range(4))
def test_points_give_the_tokens_of_plain_decoding(seed):
    plain, steps = decode(seed, 300, drafts=False)
    drafted, fewer = decode(seed, 300, drafts=True)
    assert drafted == plain
    assert fewer < 0.8 * steps


def test_the_check_catches_noise_keyed_by_step():
    assert decode(0, 300, drafts=True, key_by_step=True)[0] != decode(0, 300, drafts=False, key_by_step=True)[0]
