"""`paceline tune --tree`: words, object, page, profile, and one line for what does not fit. What is chosen depends on
the machine; only the form is tested here.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command import Command

from paceline.cli.tune import tree_words
from paceline.llm import BUNDLED
from paceline.tree import best_shapes
from paceline.tune import TREE_MARK, Interval, TreeTuning, Tuning
from paceline.tune.candidates import Arm
from paceline.tune.static_trees import StaticTree

FAST = ("--budget", "1", "--max-tokens", "16", "--dtype", "float32", "--threads", "1")
GAIN = Interval(1.5, 1.4, 1.62, 0.9995, 40, 12)
DRAFT = json.dumps({"method": "draft_model", "model": str(BUNDLED / "draft")})


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\nThe sum of two and two is\n")
    return file


def test_a_tree_that_pays_is_kept_and_used(
    run: Command, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is measured shows a gain, whatever this machine does."""
    monkeypatch.setattr("paceline.tune.tuning.interval", lambda measured: GAIN)
    monkeypatch.setattr("paceline.tune.static_trees.auto_configs", lambda drafts: [])
    found = run("tune", "--tree", "-s", DRAFT, "--prompts", prompts, *FAST, "--html", tmp_path / "tree.html")
    assert (found.code, found.err) == (0, "")
    lines = found.out.splitlines()
    assert TREE_MARK in (tmp_path / "tree.html").read_text()
    assert max(len(line) for line in lines[:-1] if str(tmp_path) not in line) <= 80
    assert sum(line.endswith("  best") for line in lines) == 1
    config = json.loads(lines[-1].removeprefix("-s '").removesuffix("'"))
    assert config["num_speculative_tokens"] == config["speculative_token_tree"].count("(")
    (profile,) = (tmp_path / "cache" / "profiles").glob("*.json")
    assert f"Profile: {profile}" in lines
    assert "Chosen: draft_model (draft, a static tree)" in " ".join(found.out.split())
    used = run("generate", "Once upon a time", "--log-level", "info", *FAST[2:])
    assert str(profile) in used.err
    assert used.out == run("generate", "Once upon a time", "-s", "null", *FAST[2:]).out


def test_json(run: Command, prompts: Path) -> None:
    found = run("tune", "--tree", "-s", DRAFT, "--prompts", prompts, "--dry-run", "--json", *FAST)
    made = json.loads(found.out)
    assert made["path"] is None
    assert made["speculative_config"]["speculative_token_tree"] in [t["speculative_token_tree"] for t in made["trees"]]
    assert "auto" in [one["setting"] for one in made["settings"]]
    assert [tree["nodes"] for tree in made["trees"]] == sorted(tree["nodes"] for tree in made["trees"])


@pytest.mark.parametrize(
    ("config", "low", "high", "says"),
    [
        ({"method": "auto"}, 1.4, 1.6, "auto, which decodes without a profile, was faster than every tree: 1.50 times"),
        ({"method": "hydra"}, 0.9, 1.6, "The best tree is not shown to be faster than plain decoding: 1.50 times"),
        ({"method": "hydra"}, 0.7, 0.9, "The best tree is slower than plain decoding: 1.50 times"),
    ],
)
def test_words_where_no_tree_is_kept(config: dict[str, str], low: float, high: float, says: str) -> None:
    race = Tuning("/m/target", "float32", "cpu", 2, 24, 1, best=Arm(config, 2), gain=replace(GAIN, low=low, high=high))
    race.settings, race.tokens_per_pass = {"auto": (1.25, 7)}, {"auto": 1.75}
    small, large = (StaticTree(best_shapes([0.5, 0.2], nodes), 1.2) for nodes in (2, 5))
    small.gain, small.pairs, small.tokens_per_pass = 1.3, 9, 1.7
    chances = [[0.5, 0.25, 0.0, 0.0]] * 4
    shown = tree_words(TreeTuning({"method": "hydra", "model": "h"}, 50, chances, [small, large], small, race), None)
    flat = " ".join(shown.split())
    assert says in flat
    assert (
        "By 50 steps with large trees, the model takes ranks 0 to 3 of the first drafted token with chances 0.50"
        in flat
    )
    assert "give more --budget, or more prompts" in flat
    assert "2 2 1.75 1.70 1.20 1.30 9 best 5 " in flat
    assert "auto 1.75 1.25 7" in flat
    assert "No profile was written. The best tree has 2 nodes, by level: 1, 1." in flat
    assert '"speculative_token_tree": "[(0,), (0, 0)]", "num_speculative_tokens": 2}' in shown


def test_bad_input_is_rejected_before_the_model_is_loaded(run: Command, tmp_path: Path) -> None:
    other = tmp_path / "notes.html"
    other.write_text("mine")
    for flags, line in {
        ("--tree",): "--tree finds the tree of heads that you name; add -s",
        ("--tree", "-s", "ngram"): "must be a method that drafts static trees",
        ("--tree", "-s", "medusa", "--draft-model", "x"): "--draft-model is not available with --tree",
        ("--html", str(other)): "--html draws the tree that --tree finds",
        ("--tree", "-s", DRAFT, "--html", str(other)): "add --force to overwrite it",
        ("-s", "null"): "leave --speculative-config out",
    }.items():
        found = run("tune", *flags, "--model", "/no/such/model")
        assert (found.code, found.out) == (2, "")
        assert line in found.line


def test_heads_that_are_not_there_are_named(run: Command, prompts: Path) -> None:
    found = run("tune", "--tree", "-s", "medusa", "--prompts", prompts, *FAST)
    assert (found.code, found.out) == (2, "")
    assert "speculative_config model must be the folder or hub id of a head for method 'medusa'" in found.line
