"""The tables, third parties' methods, and the errors of names that do not exist."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from adversaries import Adversary

from paceline import LLM, ConfigError, SamplingParams, registry
from paceline.bench.run import DIAL, dial_registered
from paceline.drafters import Drafter
from paceline.errors import DrafterError
from paceline.verifiers import RecursiveRejection

OWN = """
from paceline.verifiers import GreedyVerifier

class Own(GreedyVerifier):
    name = "own"
"""


def test_a_module_of_the_current_folder_is_found_and_only_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rule.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    registry.load("drafters", "ngram")
    assert str(tmp_path) not in sys.path
    assert registry.load("verifiers", "own_rule:Own").name == "own"
    assert sys.path[-1] == str(tmp_path)


def test_rules_of_verification_of_other_modules_are_taken_and_strangers_are_not() -> None:
    config = {"method": "ngram", "acceptance_method": "paceline.verifiers:RecursiveRejection"}
    params = SamplingParams(max_tokens=4, seed=1)
    found = [LLM(speculative_config=one).generate("a b a b", params)[0] for one in (config, None)]
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids
    with pytest.raises(ConfigError, match="is not a verifier class"):
        LLM(speculative_config={"method": "ngram", "acceptance_method": "paceline.tree:TokenTree"})


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_every_entry_loads_and_declares_itself(family: str) -> None:
    for name, entry in registry.table(family).items():
        loaded = registry.load(family, name)
        assert getattr(loaded, "name", name) == name
        assert loaded.__doc__
        assert entry.paper


def test_unknown_names_get_near_matches() -> None:
    with pytest.raises(ConfigError, match="did you mean ngram"):
        registry.lookup("drafters", "ngrm")
    with pytest.raises(ConfigError, match=r"known are .*, ngram"):
        registry.lookup("drafters", "xyz")
    with pytest.raises(ConfigError, match=r"unknown drafter 'perl'; did you mean pearl\?"):
        registry.lookup("drafters", "perl")
    with pytest.raises(ConfigError, match="cannot import drafter"):
        registry.load("drafters", "paceline.drafters.nowhere:Drafter")


class Stranger:
    """Has the methods of a drafter and does not derive from it."""

    def begin(self) -> None: ...
    def propose(self) -> None: ...
    def fork(self) -> None: ...


class Unfinished(Drafter):
    """Cannot be forked."""

    def begin(self, contexts: Any) -> Any: ...
    def propose(self, states: Any, budgets: Any, so_far: Any) -> Any: ...


class Mine(RecursiveRejection):
    """The default rule, which counts its calls."""

    name, calls = "mine", 0

    def verify(self, *given: Any, **more: Any) -> Any:
        Mine.calls += 1
        return super().verify(*given, **more)


class Nameless(Adversary):
    """Forgets its name."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        self.name = ""


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Stranger, ConfigError, "does not derive from paceline.drafters.base.Drafter; give module:Class"),
        (Unfinished, ConfigError, "is not a drafter class: .*Unfinished.* has no fork"),
        (Nameless, DrafterError, "is not a drafter: it has no name"),
    ],
)
def test_third_parties_derive_from_the_base_class(kind: type, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(speculative_config={"method": f"{__name__}:{kind.__name__}"})


@pytest.mark.parametrize("name", registry.LEARNED_HEADS)
def test_learned_heads_are_rejected_with_an_error_that_names_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"drafter '{name}': heads of this kind are not available; use") as caught:
        registry.lookup("drafters", name)
    assert "did you mean" not in str(caught.value)
    point = EntryPoint(name, "adversaries:Adversary", "paceline.drafters")
    monkeypatch.setattr(registry, "installed", lambda family: [point] if family == "drafters" else [])
    assert registry.lookup("drafters", name).kind == "plugin"


def test_entry_points_add_methods_and_may_not_replace_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def points(value: str, name: str) -> Any:
        return lambda family: [EntryPoint(name, value, f"paceline.{family}")] if family == "drafters" else []

    monkeypatch.setattr(registry, "installed", points("adversaries:Adversary", "quiet"))
    assert registry.lookup("drafters", "quiet").kind == "plugin"
    assert registry.load("drafters", "quiet").__name__ == "Adversary"
    monkeypatch.setattr(registry, "installed", points("adversaries:Adversary", "ngram"))
    with pytest.raises(ConfigError, match="two drafters are called 'ngram'"):
        registry.table("drafters")


def test_entry_points_add_verifiers_that_a_config_names(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", f"{__name__}:Mine", "paceline.verifiers")
    config = {"method": "ngram", "acceptance_method": "mine"}
    with pytest.raises(ConfigError, match="unknown verifier 'mine'"):
        LLM(speculative_config=config)
    monkeypatch.setattr(registry, "installed", lambda family: [point] if family == "verifiers" else [])
    params = SamplingParams(temperature=1.0, max_tokens=8, seed=1)
    llm = LLM(speculative_config=config, dtype="float32")
    (found,) = llm.generate("a b a b", params)
    (plain,) = llm.with_speculative_config(None).generate("a b a b", params)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert Mine.calls > 0
    with pytest.raises(ConfigError, match="temperature 0 always has 'greedy'"):
        LLM(speculative_config={"acceptance_method": "greedy"})


def test_temporary_entries_are_gone_behind_their_block() -> None:
    entry = registry.Entry("adversaries:Garbage", "table")
    with registry.temporary("drafters", {"gauge": entry}):
        with registry.temporary("drafters", {"other": entry}):
            assert {"gauge", "other", "ngram"} <= set(registry.table("drafters"))
        assert registry.lookup("drafters", "gauge") is entry
        with pytest.raises(ConfigError, match="unknown drafter 'other'"):
            registry.lookup("drafters", "other")
    with pytest.raises(ConfigError, match="unknown drafter 'gauge'"):
        registry.lookup("drafters", "gauge")


def test_the_acceptance_dial_is_known_to_bench_alone() -> None:
    with dial_registered():
        assert registry.load("drafters", DIAL).name == DIAL
    with pytest.raises(ConfigError, match=f"unknown drafter '{DIAL}'"):
        LLM(speculative_config={"method": DIAL, "continuations": {}})


def test_a_third_partys_drafter_serves_by_module_and_class() -> None:
    plain = LLM(speculative_config=None, dtype="float32")
    other = plain.with_speculative_config({"method": ["adversaries:Garbage", "ngram"], "num_speculative_tokens": 5})
    params = SamplingParams(temperature=0.0, max_tokens=20)
    (a,), (b,) = plain.generate("def f(x): return", params), other.generate("def f(x): return", params)
    assert a.outputs[0].token_ids == b.outputs[0].token_ids
    assert b.metrics.drafters["garbage"].num_draft_tokens > 0
