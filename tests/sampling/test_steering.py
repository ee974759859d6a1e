"""Methods of steering as functions of rows: against their formulas, where they collapse, and row by row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.spatial.distance import jensenshannon

from paceline import registry
from paceline.config import SamplingParams
from paceline.errors import ConfigError
from paceline.sampling.steering import parse_steering
from paceline.sampling.steering.contrastive import ContrastiveDecoding
from paceline.sampling.steering.dola import DoLa
from paceline.sampling.steering.guidance import ClassifierFreeGuidance
from paceline.sampling.steering.lol import LowerLayerMatters
from paceline.sampling.steering.svdecode import SVDecode

ROWS, VOCAB = 5, 40


def rows(seed: int, count: int = ROWS, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(count, vocab, generator=torch.Generator().manual_seed(seed))


TARGET, OTHER = rows(0), rows(1)


def probabilities(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().softmax(-1)


def plausible(logits: torch.Tensor, alpha: float) -> torch.Tensor:
    p = probabilities(logits)
    return p >= alpha * p.amax(-1, keepdim=True)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal up to rounding, what is implausible included, and up to what softmax does not see."""
    assert (found < -5000).any(-1).all()
    return torch.allclose(probabilities(found), probabilities(expected), atol=1e-6)


def test_dola_takes_the_layer_that_differs_most_row_by_row() -> None:
    layers = [rows(seed) for seed in (2, 3, 4)]
    found = DoLa(alpha=0.1).shape(TARGET, iter(layers))
    chosen = []
    for i in range(ROWS):
        p = probabilities(TARGET[i])
        distances = [float(jensenshannon(p, probabilities(layer[i]))) ** 2 for layer in layers]
        chosen.append(max(range(3), key=lambda k: distances[k]))
        contrast = p.log() - probabilities(layers[chosen[-1]][i]).log()
        assert close(found[i : i + 1], contrast.masked_fill(~plausible(TARGET[i], 0.1), -math.inf)[None])
    assert len(set(chosen)) > 1
    assert not close(DoLa(alpha=0.1).shape(TARGET, layers[:1]), found)


def test_layers_are_counted_as_in_the_paper() -> None:
    assert DoLa("low").taps(32) == tuple(range(1, 15, 2))
    assert DoLa("high").taps(32) == tuple(range(15, 31, 2))
    assert DoLa("low").taps(80) == tuple(range(1, 19, 2))
    assert DoLa("high").taps(80) == tuple(range(59, 79, 2))
    assert DoLa([4, 0, 2]).taps(6) == (-1, 1, 3)
    assert all(len(DoLa(which).taps(size)) >= 1 for which in ("low", "high") for size in range(1, 60))
    assert all(-1 <= tap < size - 1 or size == 1 for size in range(1, 60) for tap in DoLa("low").taps(size))
    with pytest.raises(ConfigError, match="layers must be below 6"):
        DoLa([1, 6]).taps(6)


def test_guidance_is_the_model_at_1_and_the_other_prompt_at_0() -> None:
    assert torch.equal(ClassifierFreeGuidance(1.0).shape(TARGET, [OTHER]), TARGET)
    nothing = probabilities(ClassifierFreeGuidance(0.0).shape(TARGET, [OTHER]))
    assert torch.allclose(nothing, probabilities(OTHER), atol=1e-6)
    p, u = probabilities(TARGET), probabilities(OTHER)
    expected = p**1.5 / u**0.5
    found = probabilities(ClassifierFreeGuidance(1.5).shape(TARGET, [OTHER]))
    assert torch.allclose(found, expected / expected.sum(-1, keepdim=True), atol=1e-6)
    assert not torch.allclose(found, p, atol=1e-2)


def test_contrastive_forms() -> None:
    p, a = probabilities(TARGET), probabilities(OTHER / 0.5)
    ratio = (p / a).log().masked_fill(~plausible(TARGET, 0.1), -math.inf)
    assert close(ContrastiveDecoding("m", 0.1, amateur_temperature=0.5).shape(TARGET, [OTHER]), ratio)
    assert not close(ContrastiveDecoding("m", 0.1).shape(TARGET, [OTHER]), ratio)
    second = (1.5 * p.log() - 0.5 * probabilities(OTHER).log()).masked_fill(~plausible(TARGET, 0.1), -math.inf)
    assert close(ContrastiveDecoding("m", 0.1, beta=0.5).shape(TARGET, [OTHER]), second)
    assert torch.equal(ContrastiveDecoding("m", 0.0, beta=0.0).shape(TARGET, [OTHER]), TARGET)
    assert torch.equal(ContrastiveDecoding("m", 0.0, beta=0.7).shape(TARGET, [TARGET]), TARGET)


def test_svdecode_follows_the_gradient_of_the_divergence() -> None:
    logits = TARGET.double().requires_grad_()
    q, log_p = logits.log_softmax(-1), OTHER.double().log_softmax(-1)
    ((q.exp() * (q - log_p)).sum()).backward()
    found = (SVDecode(mu=2.0, alpha=0.0).shape(TARGET, [OTHER]) - TARGET) / 2.0
    assert logits.grad is not None
    assert torch.allclose(found.double(), logits.grad, atol=1e-5)
    assert found.abs().amax() > 0.1
    assert torch.allclose(found.double().sum(-1), torch.zeros(ROWS, dtype=torch.float64), atol=1e-5)
    assert torch.equal(SVDecode(mu=0.0, alpha=0.0).shape(TARGET, [OTHER]), TARGET)
    assert torch.allclose(SVDecode(mu=5.0, alpha=0.0).shape(TARGET, [TARGET]), TARGET, atol=1e-5)
    masked = SVDecode(mu=2.0, alpha=0.1).shape(TARGET, [OTHER])
    kept = plausible(TARGET, 0.1)
    assert torch.equal(masked > -5000, kept)
    among = masked.masked_fill(kept, -math.inf)  # as where a grammar allows nothing plausible
    assert torch.allclose(probabilities(among), probabilities(TARGET.masked_fill(kept, -math.inf)), atol=1e-3)


def test_lol_fuses_two_contrasts_and_an_instruction() -> None:
    lower, amateur, amateur_lower, told = rows(2), OTHER, rows(3), rows(4)
    given = [lower, amateur, amateur_lower, told]
    p, low, a, a_low, t = (probabilities(one).log() for one in (TARGET, *given))
    expected = p + 0.5 * (p - a) + 0.3 * (low + 0.5 * (low - a_low)) + 0.7 * (t - p)
    expected = expected.masked_fill(~plausible(TARGET, 0.1), -math.inf)
    method = LowerLayerMatters("m", beta=0.5, omega=0.3, refocus=0.7)
    found = method.shape(TARGET, iter(given))
    assert close(found, expected)
    assert not close(method.shape(TARGET, [lower, amateur, told, amateur_lower]), expected)
    assert torch.equal(found > -5000, plausible(TARGET, 0.1))
    assert list(method.companions) == ["model", "prompt"]


def test_lol_collapses() -> None:
    nothing = LowerLayerMatters("m", beta=0.0, omega=0.0, refocus=0.0, alpha=0.0)
    assert torch.equal(nothing.shape(TARGET, [OTHER]), TARGET)
    assert nothing.taps(6) == ()
    assert list(nothing.companions) == ["model"]
    final = LowerLayerMatters("m", beta=0.7, omega=0.0, refocus=0.0)
    assert torch.equal(final.shape(TARGET, [OTHER]), ContrastiveDecoding("m", beta=0.7).shape(TARGET, [OTHER]))
    lower = rows(2)
    itself = LowerLayerMatters("m", beta=0.7, omega=0.4, refocus=0.0, alpha=0.0)
    plain = probabilities(TARGET).log() + 0.4 * probabilities(lower).log()
    found = probabilities(itself.shape(TARGET, [lower, TARGET, lower]))
    assert torch.allclose(found, probabilities(plain), atol=1e-6)
    assert not torch.allclose(probabilities(itself.shape(TARGET, [lower, OTHER, lower])), found, atol=1e-2)
    assert [LowerLayerMatters("m").taps(size) for size in (1, 6, 30)] == [(0,), (2,), (14,)]
    assert LowerLayerMatters("m", layer=6).taps(6) == (5,)
    with pytest.raises(ConfigError, match="layer must be at most 6"):
        LowerLayerMatters("m", layer=7).taps(6)


METHODS: list[dict[str, Any]] = [
    {"method": "dola"},
    {"method": "cfg", "guidance_scale": 1.7},
    {"method": "contrastive", "model": "m"},
    {"method": "svdecode", "mu": 3.0},
    {"method": "lol", "model": "m"},
]
LOOKED_AT = {"dola": 2, "lol": 4}
"""Other rows of each node, where there are more than one."""


@pytest.mark.parametrize("given", METHODS, ids=lambda given: str(given["method"]))
def test_a_row_keeps_its_bits_whatever_is_beside_it(given: dict[str, Any]) -> None:
    method, size = parse_steering(given), 40_000
    target, others = rows(5, 4, size), [rows(6 + i, 4, size) for i in range(LOOKED_AT.get(given["method"], 1))]
    before, threads = target.clone(), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = method.shape(target, others)
        for i in range(4):
            assert torch.equal(method.shape(target[i : i + 1], [one[i : i + 1] for one in others])[0], together[i])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(target, before)
    assert not torch.equal(together[0], together[1])


@pytest.mark.parametrize("given", METHODS, ids=lambda given: str(given["method"]))
def test_what_is_no_number_stays_so(given: dict[str, Any]) -> None:
    others = [OTHER.clone(), *(rows(2 + i) for i in range(LOOKED_AT.get(given["method"], 1) - 1))]
    others[0][1] = math.nan
    shaped = parse_steering(given).shape(TARGET, others)
    if given["method"] != "dola":
        assert shaped[1].isnan().any()
    assert not shaped[0].isnan().any()
    broken = TARGET.clone()
    broken[2] = math.nan
    assert parse_steering(given).shape(broken, [OTHER, *others[1:]])[2].isnan().all()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"method": "doal"}, "unknown steering method 'doal'; did you mean dola"),
    ({"method": "cfg", "scale": 2}, "'scale'"),
    ({"method": "cfg", "guidance_scale": "2"}, "guidance_scale must be in"),
    ({"method": "cfg", "negative_prompt": []}, "negative_prompt must not be empty"),
    ({"method": "cfg", "negative_prompt": [-1]}, "negative_prompt must be an integer of 0 or more"),
    ({"method": "dola", "layers": "middle"}, 'layers must be "low", "high" or a list'),
    ({"method": "dola", "layers": [1.5]}, "layers must hold"),
    ({"method": "dola", "alpha": 2}, "alpha must be in 0..1"),
    ({"method": "contrastive"}, "steering must give 'model' with method 'contrastive'"),
    ({"method": "contrastive", "model": ""}, "model must be a folder or hub id"),
    ({"method": "contrastive", "model": "m", "beta": -1}, "beta must be in"),
    ({"method": "lol"}, "steering must give 'model' with method 'lol'"),
    ({"method": "lol", "model": "m", "omega": -1}, "omega must be in"),
    ({"method": "lol", "model": "m", "layer": 0}, "layer must be an integer of 1 or more"),
    ({"method": "lol", "model": "m", "instruction": ""}, "instruction must not be empty"),
    ({"method": "svdecode", "mu": math.nan}, "mu must be in"),
    ({"method": "math:gcd"}, "is not a steering method class"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_bad_options_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_steering(given)


def test_the_field_takes_a_name_a_dict_or_json() -> None:
    assert SamplingParams(steering="dola").steering == {"method": "dola"}
    assert SamplingParams(steering='{"method": "cfg"}').steering == {"method": "cfg"}
    assert SamplingParams().steering is None
    for wrong in (1, [], {}, {"method": 3}, "{"):
        with pytest.raises(ConfigError, match="steering"):
            SamplingParams(steering=wrong)  # type: ignore[arg-type]  # what is tested
    assert {type(parse_steering(given)).name for given in METHODS} == set(registry.table("steerings"))
