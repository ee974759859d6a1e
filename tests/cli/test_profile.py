"""`paceline profile`: what is there, what it says, what goes away; and the commands that say which one they use."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command import Command

from paceline.llm import BUNDLED, LLM
from paceline.profiles import Conditions, Profile

FAST = ("--dtype", "float32", "--threads", "1")
GAIN = {"median": 1.5, "low": 1.4, "high": 1.6, "confidence": 0.999, "pairs": 40, "items": 12}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path))


def profile(config: Any = NGRAM, **where: Any) -> Profile:
    here = {"model": "m", "device": "cpu", "dtype": "float32", "passes": "compiled"}
    here |= {"threads": 1, "machine": "x", "versions": {}} | where
    measured = {"created": "2026-01-02T03:04:05", "model": "models/SmolLM2", "gain": GAIN}
    return Profile(conditions=Conditions(**here), speculative_config=config, threads=1, measured=measured)


@pytest.fixture
def mine() -> Profile:
    """One that fits the bundled model in this process."""
    llm = LLM(**{"dtype": "float32", "threads": 1})
    made = Profile(
        conditions=Conditions.of(llm.runner.info, BUNDLED / "target"),
        speculative_config=NGRAM,
        threads=1,
        measured={"created": "2026-01-02T03:04:05", "model": str(BUNDLED / "target"), "gain": GAIN},
    )
    made.save()
    return made


def test_list_and_show(run: Command) -> None:
    one, other = profile(), profile(None, dtype="bfloat16")
    one.save()
    path = other.save()
    found = run("profile", "list")
    assert (found.code, found.err) == (0, "")
    assert f"{one.name}: method ngram, 3 tokens a draft (tuned 2026-01-02; float32 on cpu, 1 thread)" in " ".join(
        found.out.split()
    )
    assert f"{other.name}: plain decoding (tuned 2026-01-02;" in found.out
    shown = run("profile", "show", other.name)
    assert shown.code == 0
    assert str(path) in "".join(shown.out.split())
    assert "1.50 times plain decoding (95 % interval 1.40 to 1.60, 40 paired runs on 12 prompts)" in " ".join(
        shown.out.split()
    )
    few = replace(other, measured={**other.measured, "gain": GAIN | {"items": 3}, "batch_size": 4})
    few.save()
    flat = " ".join(run("profile", "show", few.name).out.split())
    assert "decoding (6 batches or more are needed for an interval, 40 paired runs on 3 batches)" in flat
    made = json.loads(run("profile", "show", one.path.stem, "--json").out)
    assert (made["name"], made["speculative_config"]) == (one.name, NGRAM)
    assert len(json.loads(run("profile", "list", "--json").out)["profiles"]) == 2


def test_remove(run: Command) -> None:
    one, other = profile(), profile(None, dtype="bfloat16")
    one.save()
    other.save()
    assert run("profile", "remove", one.name).out == f"profile {one.name} removed\n"
    assert not one.path.exists()
    assert other.path.exists()
    assert run("profile", "remove", "all").out == "1 profile removed\n"
    assert not other.path.exists()
    assert "no profiles in" in run("profile", "list").out


@pytest.mark.parametrize("command", ["show", "remove"])
def test_a_name_that_is_not_there(run: Command, command: str) -> None:
    found = run("profile", command, "nobody")
    assert (found.code, found.out) == (2, "")
    assert found.line == "there is no profile 'nobody'; `paceline tune` makes one"
    profile().save()
    assert f"known are {profile().name}" in run("profile", command, "nobody").line
    assert run("profile", command).code == 2


def test_a_file_that_cannot_be_read_is_listed_and_removed(run: Command) -> None:
    path = profile().save()
    path.write_text("{}")
    assert "cannot be read" in run("profile", "list").out
    found = run("profile", "show", path.stem)
    assert (found.code, "cannot be read" in found.line) == (2, True)
    assert run("profile", "remove", "all").code == 0
    assert not path.exists()


def test_commands_say_which_profile_they_use(run: Command, mine: Profile, tmp_path: Path) -> None:
    line = f"{mine.name} (tuned 2026-01-02): method ngram, 3 tokens a draft, from `paceline tune`"
    found = run("generate", "Once upon a time", "--max-tokens", "4", *FAST)
    assert " ".join(found.err.split()) == f"profile {line}"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time\n")
    few = ("--prompts", prompts, *FAST)
    assert f"profile {line}" in " ".join(run("verify", "--max-tokens", "4", "--samples", "1", *few).out.split())
    assert f"profile {line}" in " ".join(run("doctor", *few).out.split())
    page = tmp_path / "page.html"
    explained = run("explain", "Once upon a time", "--max-tokens", "4", "-o", page, *FAST)
    assert f"profile {line}" in " ".join(explained.out.split())


def test_a_method_of_the_users_own_is_no_profiles(run: Command, mine: Profile) -> None:
    found = run("generate", "Once upon a time", "--max-tokens", "4", "-s", '{"method": "auto"}', *FAST)
    assert (found.code, found.err) == (0, "")
    assert mine.path.exists()
