"""Options of controllers in speculative_config: whose a key is, and what is refused."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from toys import ToyRunner

from paceline import ConfigError, registry
from paceline.assembly import build_parts, check_methods, split_options
from paceline.assembly.build import single_methods
from paceline.assembly.controller_setup import GIVEN
from paceline.checkpoints import BUNDLED_FOLDER
from paceline.config import SpeculativeConfig
from paceline.controllers import Signal
from paceline.models.heads import HeadConfig, head_methods

HEAD = HeadConfig(method="medusa", hidden_size=8, vocab_size=11, draft_vocab_size=11, num_heads=2)


def controller(given: dict[str, Any]) -> Any:
    config = SpeculativeConfig.parse(given)
    check_methods(config)
    _, parts = build_parts(ToyRunner(), config, load=lambda name: ToyRunner(), default_draft="toy")
    return parts.controller


def test_options_reach_the_controller_and_the_drafter() -> None:
    built = controller(
        {"method": "ngram", "controller": "kangaroo", "threshold": 0.4, "steps": 3, "prompt_lookup_max": 2}
    )
    assert (built.name, built.threshold, built.levels) == ("kangaroo", 0.4, 3)
    built = controller(
        {"method": "ngram", "controller": "online_acceptance", "bound": [1, 9], "num_speculative_tokens": 7}
    )
    assert (built.bound, built.num_speculative_tokens) == ((1, 9), 7)
    assert controller({"method": "auto", "controller": "swift", "stop_threshold": 0.5}).threshold == 0.5
    assert controller({"method": "ngram", "max_depth": 3}).max_depth == 3


def test_beside_a_list_of_methods_they_are_the_controllers() -> None:
    given = {
        "method": [{"method": "ngram", "prompt_lookup_max": 2}, "draft_model"],
        "controller": "diffuspec",
        "k_max": 25,
    }
    assert controller(given).k_max == 25


def test_defaults_stay() -> None:
    assert controller({"method": "ngram"}).num_speculative_tokens == 10, "named alone: as published"
    assert controller({"method": "ngram", "controller": "auto"}).name == "auto"
    assert controller({"method": ["ngram", "draft_model"]}).name == "auto"
    assert controller({"method": "ngram", "num_speculative_tokens": 3}).num_speculative_tokens == 3
    assert controller({"method": "ngram", "controller": "heuristic"}).num_speculative_tokens is None


def test_what_is_published_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Methods are checked before the model is loaded, and again when the engine is built."""
    caplog.set_level("INFO", logger="paceline")
    controller({"method": "ngram"})
    assert caplog.text.count("drafts as published") == 1
    controller({"method": "ngram", "num_speculative_tokens": 3})
    assert caplog.text.count("drafts as published") == 1


@pytest.mark.parametrize("method", ["auto", "draft_model"])
def test_a_trained_head_is_no_draft_model(method: str, tmp_path: Path) -> None:
    own, foreign = tmp_path / "own", tmp_path / "foreign"
    for folder, config in ((own, {"paceline_head": HEAD.as_json()}), (foreign, {"hydra_num_heads": 4})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    for folder, heads in ((own, ["medusa"]), (foreign, ["hydra"])):
        words = re.escape(f"is a trained head and no draft model; write {{'method': '{heads[0]}', 'model': '{folder}'")
        with pytest.raises(ConfigError, match=words):
            controller({"method": method, "model": str(folder)})
    assert not head_methods(BUNDLED_FOLDER / "draft"), "an ordinary model is none"


def test_what_holds_no_weights_of_a_head_is_left_to_those_who_open_draft_models(tmp_path: Path) -> None:
    """A GGUF file beside a config.json, as many repositories have it; paths that cannot be looked at."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert not head_methods(tmp_path)
    assert not head_methods("~nobody-of-this-name/draft")
    assert not head_methods("x" * 5000)
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"hydra_num_heads": 4}')
    assert "hydra" in head_methods(tmp_path), "the control"


@pytest.mark.parametrize("method", ["ngram", ["ngram", "draft_model"]])
@pytest.mark.parametrize("name", ["auto", "heuristic", "online_acceptance", "ppd", None])
def test_no_speculative_tokens_are_none_whatever_the_controller(method: Any, name: str | None) -> None:
    built = controller({"method": method, "num_speculative_tokens": 0} | ({"controller": name} if name else {}))
    assert not built.plan([Signal(0, 10, 20, 0.0)]).drafts


def test_fewer_nodes_than_speculative_tokens_are_fine() -> None:
    given = {"method": "ngram", "controller": "auto", "num_speculative_tokens": 5}
    assert controller(given | {"max_nodes": 3}).max_nodes == 3
    assert controller(given).max_nodes == 5


@pytest.mark.parametrize("methods", [["ngram", "tli"], ["tli", {"method": "draft_model", "model": "other"}]])
def test_a_model_beside_a_list_is_that_of_the_methods_that_take_one(methods: list[Any]) -> None:
    config = SpeculativeConfig.parse({"method": methods, "model": "toy"})
    assert config is not None
    assert [one.model for one in single_methods(config, "default")] == [
        {"ngram": None, "tli": "toy", "draft_model": "other"}[one.method if isinstance(one.method, str) else ""]
        for one in config.method
    ]


@pytest.mark.parametrize(
    "given", [{"method": "draft_model", "controller": "fixed"}, {"method": "auto"}, {"controller": "auto"}]
)
def test_vllms_name_for_another_tokenizer_stands_beside_controllers(given: dict[str, Any]) -> None:
    config = SpeculativeConfig.parse(
        {"model": "toy", "num_speculative_tokens": 3, "use_heterogeneous_vocab": True} | given
    )
    assert config is not None
    check_methods(config)
    assert [one.method for one in single_methods(split_options(config)[0], None)][-1] == "tli"


KANGAROO = {"method": "ngram", "controller": "kangaroo"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (KANGAROO | {"treshold": 0.4}, "with controller 'kangaroo' does not know 'treshold'; did you mean threshold"),
        (
            KANGAROO | {"k_max": 4},
            "does not know 'k_max'; known are prompt_lookup_max, prompt_lookup_min, steps, threshold",
        ),
        (
            KANGAROO | {"method": ["ngram"], "treshold": 0.4},
            "controller 'kangaroo' does not know 'treshold'; did you mean",
        ),
        (
            KANGAROO | {"method": ["ngram"], "prompt_lookup_max": 2},
            "'prompt_lookup_max' is given beside a list of methods",
        ),
        ({"method": "ngram", "threshold": 0.4}, "'ngram' does not know 'threshold'"),
        (KANGAROO | {"method": [{"method": "ngram", "threshold": 0.4}]}, "'ngram' does not know 'threshold'"),
        ({"metod": "ngram"}, r"speculative_config does not know 'metod'; did you mean method\?"),
        ({"Method": "ngram"}, r"speculative_config does not know 'Method'; did you mean method\?"),
        (
            {"method": "auto", "prompt_lookup_mx": 3},
            "speculative_config does not know 'prompt_lookup_mx'; did you mean prompt_lookup",
        ),
        (
            {"nonsense": 1},
            "speculative_config does not know 'nonsense'; known are .*; with every method also method, num_spec",
        ),
        (
            {"nonsense": 1},
            r"max_nodes, max_tenants and \d+ more \(listed in the documentation\); with",
        ),
        ({"modl": "toy"}, r"speculative_config does not know 'modl'; did you mean model"),
        ({"method": "ngram", "controler": "fixed"}, r"of 'ngram' does not know 'controler'; did you mean controller\?"),
        ({"method": "ngram", "acceptance_methd": "k_seq"}, "'acceptance_methd'; did you mean acceptance_method"),
        (
            {"method": "ngram", "controller": "auto", "max_nods": 3},
            r"does not know 'max_nods'; did you mean max_nodes\?",
        ),
        (
            {"method": ["ngram"], "controler": "fixed"},
            r"speculative_config does not know 'controler'; did you mean controller\?",
        ),
        ({"method": [{"method": "ngram", "num_speculative_token": 3}]}, r"did you mean num_speculative_tokens\?"),
        (
            {"prompt_lookup_max": 3, "suffix_decoding_max_tree_depth": 3},
            "no single method of 'auto' has all of the options",
        ),
        (KANGAROO | {"threshold": "low"}, "threshold must be in 0..1, got 'low'"),
        (KANGAROO | {"controller": "kangroo", "threshold": 0.4}, "unknown controller 'kangroo'; did you mean kangaroo"),
        ({"method": "ngram", "max_nodes": "many"}, "max_nodes must be an integer in 1..1024, got 'many'"),
        (
            {"method": "ngram", "controller": "fixed"},
            "num_speculative_tokens must be given with controller 'fixed', got None",
        ),
        (
            {"method": "ngram", "controller": "auto", "num_speculative_tokens": 2, "max_nodes": 3},
            "max_nodes must be at most num_speculative_tokens, 2, got 3",
        ),
        ({"method": "ngram", "max_nodes": 2.5}, r"max_nodes must be an integer in 1..1024, got 2\.5"),
        ({"method": "ngram", "max_depth": True}, "max_depth must be an integer in 1..1024, got True"),
        (
            {"method": ["ngram", "suffix"], "model": "toy"},
            "model must be left out, since 'ngram', 'suffix' use no draft model",
        ),
        (
            {"method": ["swift", "ngram", "swift"]},
            "method must be a list without repetition: 'swift' would draft the same twice",
        ),
        (
            {"method": ["ngram", "ngram"]},
            "'ngram' would draft the same twice; leave it out once, or vary its options, got",
        ),
        (
            {"method": ["draft_model", {"method": "draft_model"}], "model": "toy"},
            "method must be a list without repetition: 'draft_model' would draft the same twice",
        ),
        (
            {"method": "specmquant", "draft": {"method": "ngram", "controller": "fixed"}},
            "controller must be given beside method 'specm",
        ),
        (
            {"method": "specmquant", "draft": {"method": "ngram", "num_speculative_tokens": 0}},
            "inside method 'specmquant' must be 1",
        ),
    ],
)
def test_wrong_options_are_rejected_with_an_error_that_names_them(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        controller(given)


@pytest.mark.parametrize("name", ["layer_skip", "ngram"])
def test_repetition_with_other_options_is_no_mistake(name: str) -> None:
    other = {"layer_skip": {"exit_layer": 1}, "ngram": {"prompt_lookup_max": 2}}[name]
    parsed = SpeculativeConfig.parse({"method": [name, {"method": name, **other}]})
    assert parsed is not None
    assert len(single_methods(split_options(parsed)[0], None)) == 2


class Greedy(registry.load("controllers", "kangaroo")):  # type: ignore[misc]
    """Has an option that a drafter has too."""

    def __init__(self, *, prompt_lookup_max: int = 3, disable_by_batch_size: int | None = None) -> None:
        super().__init__(steps=prompt_lookup_max, disable_by_batch_size=disable_by_batch_size)


def test_an_option_that_both_have_must_say_whose_it_is() -> None:
    mine = f"{__name__}:Greedy"
    with pytest.raises(
        ConfigError, match=r"both method 'ngram' and controller .* have an option 'prompt_lookup_max'; for the drafter"
    ):
        controller({"method": "ngram", "controller": mine, "prompt_lookup_max": 4})
    beside = controller(
        {"method": [{"method": "ngram", "prompt_lookup_max": 5}], "controller": mine, "prompt_lookup_max": 4}
    )
    assert beside.levels == 4


def parameters(family: str, name: str, without: tuple[str, ...]) -> set[str]:
    return set(inspect.signature(registry.load(family, name)).parameters) - set(without)


def test_no_option_of_ours_is_both_a_drafters_and_a_controllers() -> None:
    drafters = {n: parameters("drafters", n, ("args", "num_speculative_tokens")) for n in registry.DRAFTERS}
    for name in registry.CONTROLLERS:
        own = parameters("controllers", name, GIVEN)
        assert not {other: own & theirs for other, theirs in drafters.items() if own & theirs}, name
