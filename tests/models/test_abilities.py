"""A runner has an ability where it has the method or attribute that shows it, or declares what none shows."""

from __future__ import annotations

import pytest
from lacking import without
from tiny_llama import runner_of, tiny_llama

from paceline.models import MappedRunner, abilities_of, has_ability, memory_of
from paceline.models.abilities import FLAGS
from paceline.models.runners import NativeRunner
from paceline.models.runners.remapped_tokens import HeadRows
from paceline.registry import ABILITIES


@pytest.fixture(scope="module")
def runner() -> NativeRunner:
    return runner_of(tiny_llama())


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("head", {"head"}),
        ("embed", {"input_embeddings"}),
        ("run_layers", {"layer_subsets", "early_exit"}),
        ("memory", {"blocks"}),
        ("last_keys", {"last_keys"}),
        ("score_added", {"added_rows"}),
        ("spec", set()),
    ],
)
def test_without_the_method_the_ability_is_gone(runner: NativeRunner, name: str, lost: set[str]) -> None:
    assert abilities_of(runner) == set(ABILITIES)
    assert set(ABILITIES) - abilities_of(without(runner, name)) == lost


def test_a_runner_around_another_has_what_it_passes_on(runner: NativeRunner) -> None:
    mapped = MappedRunner.of_head(runner, HeadRows.of(range(8), runner.info.vocab_size))  # type: ignore[arg-type]
    assert abilities_of(mapped) == FLAGS
    assert memory_of(mapped) is None


def test_an_unknown_ability_is_an_error(runner: NativeRunner) -> None:
    with pytest.raises(KeyError, match="flight"):
        has_ability(runner, "flight")  # type: ignore[arg-type]
