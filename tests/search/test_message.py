"""Couplings have their marginals and little entropy; a message is read again, from text distributed as without it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.search import entropy_bits, hide_message, minimum_entropy_coupling, read_message
from paceline.search.coupling import bottleneck
from paceline.search.message import Channel

PROMPT = "Once upon a time"


def distributions(count: int, *sizes: int) -> Iterator[list[np.ndarray[Any, Any]]]:
    generator = np.random.default_rng(5)
    for _ in range(count):
        yield [generator.dirichlet(np.full(size, 0.7)) for size in sizes]


# ------------------------------------------------------------------------------------------------ couplings


def vertices(p: np.ndarray[Any, Any], q: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """All extreme couplings of p and q, among which is one of least entropy: those with at most x + y - 1 cells."""
    cells = list(itertools.product(range(len(p)), range(len(q))))
    equations = np.array([[float(i == x) for i, _ in cells] for x in range(len(p))]
                         + [[float(j == y) for _, j in cells] for y in range(len(q))])  # fmt: skip
    for chosen in itertools.combinations(range(len(cells)), len(p) + len(q) - 1):
        part = equations[:-1, chosen]
        if abs(np.linalg.det(part)) > 1e-9:
            mass = np.linalg.solve(part, np.concatenate([p, q])[:-1])
            if mass.min() > -1e-12:
                joint = np.zeros(len(cells))
                joint[list(chosen)] = mass.clip(0.0)
                yield joint.reshape(len(p), len(q))


def test_a_coupling_has_its_marginals_and_few_cells() -> None:
    for p, q in distributions(40, 30, 200):
        joint = minimum_entropy_coupling(p, q)
        assert np.abs(joint.sum(1) - p).max() < 1e-9
        assert np.abs(joint.sum(0) - q).max() < 1e-9
        assert (joint > 0).sum() <= len(p) + len(q) - 1
        assert entropy_bits(joint) < entropy_bits(np.outer(p, q)) - 1.0  # independence would not do


def test_a_coupling_is_within_half_a_bit_of_the_best() -> None:
    worst = 0.0
    for p, q in distributions(12, 3, 3):
        least = min(entropy_bits(joint) for joint in vertices(p, q))
        found = entropy_bits(minimum_entropy_coupling(p, q))
        assert max(entropy_bits(p), entropy_bits(q)) - 1e-9 <= least <= found + 1e-9
        worst = max(worst, found - least)
        assert entropy_bits(np.outer(p, q)) > found
    assert worst <= np.log2(np.e) / np.e


def test_couplings_with_itself_and_with_a_point() -> None:
    p = np.array([0.5, 0.3, 0.15, 0.05])
    assert np.allclose(minimum_entropy_coupling(p, p), np.diag(p))
    assert np.allclose(minimum_entropy_coupling(p, np.ones(1))[:, 0], p)


def grouped(p: np.ndarray[Any, Any], rate: float) -> np.ndarray[Any, Any]:
    return np.bincount(bottleneck(p, rate), p)


def groupings(size: int) -> Iterator[list[int]]:
    """Every way to put values into groups."""
    found = [[0]]
    for _ in range(size - 1):
        found = [[*one, group] for one in found for group in range(max(one) + 2)]
    yield from found


def test_a_bottleneck_keeps_its_rate_and_comes_near_it() -> None:
    four = grouped(np.full(4, 0.25), 1.0)
    assert four.tolist() == [0.75, 0.25]
    assert entropy_bits(four) == pytest.approx(0.811, abs=1e-3)
    for (p,) in distributions(30, 6):
        second = np.sort(p)[-2]
        gap = entropy_bits(np.array([second, 1 - second]))
        for rate in (0.3, 0.8, 1.4):
            found = entropy_bits(grouped(p, rate))
            best = max(h for one in groupings(6) if (h := entropy_bits(np.bincount(one, p))) <= rate + 1e-12)
            assert found <= rate + 1e-9
            assert best - gap <= found <= best + 1e-9
        assert entropy_bits(grouped(p, 10.0)) == pytest.approx(entropy_bits(p))


# ------------------------------------------------------------------------------------------------ the channel


def row(size: int, seed: int, scale: float = 2.0) -> torch.Tensor:
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale).log_softmax(-1)


@pytest.mark.parametrize("rate", [None, 0.5, 2.0])
@pytest.mark.parametrize("size", [50, 3000])
def test_over_all_values_of_a_byte_the_token_is_the_models(size: int, rate: float | None) -> None:
    """At first, and after tokens have told something of it; 3,000 tokens are more than are told apart."""
    channel = Channel(b"key", rate)
    for step in range(6):
        logprobs = row(size, step)
        coupled = channel.coupled(logprobs)
        belief = channel.beliefs[coupled.index]
        rows = torch.stack([coupled.given(value).exp() for value in range(256)])
        marginal = (torch.from_numpy(belief)[:, None] * rows).sum(0)
        assert torch.allclose(marginal, logprobs.double().softmax(-1), atol=1e-9, rtol=0)
        if step == 0 and rate is None:
            assert (rows - marginal).abs().max() > 0.1  # it does tell something
        token = int(rows[7].argmax())
        by_bayes = belief * rows[:, token].numpy()
        told = entropy_bits(np.bincount(coupled.groups, belief))
        assert rate is None or told <= rate + 1e-9
        channel.learn(coupled, token)
        assert np.abs(channel.beliefs[coupled.index] - by_bayes / by_bayes.sum()).max() < 1e-9
        if channel.known:
            break


def chi_square(counts: Counter[Any], chances: dict[Any, float], total: int) -> tuple[float, int]:
    """The statistic and its degrees of freedom, rare cells as one."""
    common = [one for one, chance in chances.items() if chance * total >= 5]
    expected = [chances[one] * total for one in common]
    seen = [counts[one] for one in common]
    expected.append(total - sum(expected))
    seen.append(total - sum(seen))
    return sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True) if e > 0), len(common)


def is_likely(statistic: float, freedom: int) -> bool:
    """Below the quantile of about 1 - 1e-4 (Wilson and Hilferty)."""
    return statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 120, "seed": 3, "ignore_eos": True, **changes})


def test_the_first_tokens_are_distributed_as_the_models_under_random_keys_and_not_under_one(llm: LLM) -> None:
    total = 280
    cache = llm.runner.open()
    logits = llm.runner.extend([cache], [llm.tokenizer.encode(PROMPT)]).logits[0].float()
    llm.runner.release(cache)
    chances = dict(enumerate(logits.softmax(-1).tolist()))
    generator = np.random.default_rng(1)

    def drawn(key: bytes | None, total: int) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for seed in range(total):
            secret = key or generator.bytes(16)
            hidden = hide_message(llm, PROMPT, b"the same", params(max_tokens=1, seed=seed), key=secret)
            found[hidden.token_ids[0]] += 1
        return found

    assert is_likely(*chi_square(drawn(None, total), chances, total))
    assert not is_likely(*chi_square(drawn(b"one key for all", total // 8), chances, total // 8))


@pytest.mark.parametrize(
    ("changes", "rate"), [({}, None), ({}, 1.0), ({"top_p": 0.95, "temperature": 1.2, "repetition_penalty": 1.1}, None)]
)
def test_a_message_is_read_again(llm: LLM, changes: dict[str, Any], rate: float | None) -> None:
    how, key = params(max_tokens=400, **changes), b"0123456789abcdef"
    hidden = hide_message(llm, PROMPT, b"at noon", how, key=key, rate=rate)
    assert hidden.complete
    assert hidden.known_bytes == 9
    assert read_message(llm, PROMPT, hidden.token_ids, how, key=key, rate=rate) == b"at noon"
    with pytest.raises(PacelineError, match="the tokens"):
        read_message(llm, PROMPT, hidden.token_ids, how, key=b"another", rate=rate)


def test_a_bottleneck_tells_less_per_token_and_a_short_text_not_all(llm: LLM) -> None:
    key = b"sixteen are here"
    known = [
        hide_message(llm, PROMPT, bytes(range(40)), params(max_tokens=60), key=key, rate=rate).known_bytes
        for rate in (None, 0.5)
    ]
    assert known[0] > 2 * known[1]
    short = hide_message(llm, PROMPT, bytes(range(40)), params(max_tokens=60), key=key)
    assert not short.complete
    with pytest.raises(PromptError, match=r"the tokens tell \d+ of 42 bytes of a message"):
        read_message(llm, PROMPT, short.token_ids, params(), key=key)


def test_behind_the_message_the_text_is_plain_sampling(llm: LLM) -> None:
    """The same noise at the same places: a text that goes on from the told part is the plain one from there."""
    how = params(max_tokens=300, seed=11)
    hidden = hide_message(llm, PROMPT, b"", how, key=b"k")
    assert hidden.complete
    ids = hidden.token_ids
    for start in range(40, 280, 60):
        prompt = {"prompt_token_ids": [*llm.tokenizer.encode(PROMPT), *ids[:start]]}
        (plain,) = llm.generate(prompt, params(max_tokens=15, seed=11))
        assert list(plain.outputs[0].token_ids) == ids[start : start + 15]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"message": "text"}, "message must be bytes"),
        ({"message": bytes(5000)}, "message must have at most 4096 bytes"),
        ({"key": b""}, "key must have a byte or more"),
        ({"rate": 0.0}, "rate must be above 0"),
        ({"params": SamplingParams(temperature=0.0)}, "temperature must be above 0"),
        ({"params": SamplingParams(n=2)}, "n must be 1"),
    ],
)
def test_bad_arguments_get_one_line(llm: LLM, changes: dict[str, Any], message: str) -> None:
    given = {"message": b"one", "params": params(), "key": b"key", **changes}
    with pytest.raises(ConfigError, match=message):
        hide_message(llm, PROMPT, **given)
    with pytest.raises(ConfigError, match="prompt must be one prompt"):
        read_message(llm, [PROMPT, PROMPT], [1], params(), key=b"key")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokens must hold a token"):
        read_message(llm, PROMPT, [], params(), key=b"key")
