"""`paceline analyze channels`, and generating with what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Command
from safetensors import safe_open

from paceline import LLM, ConfigError, SamplingParams
from paceline.assembly import open_kv_selection

PROMPT = "def fibonacci(n):\n" * 8


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("channels") / "found.safetensors"


def test_channels_are_found_told_and_taken(run: Command, channels: Path) -> None:
    found = run("analyze", "channels", PROMPT, "--output", str(channels), "--json")
    assert found.code == 0, found.err
    told = json.loads(found.out)
    assert told["path"] == str(channels)
    assert 1 > told["shares"]["4"] > told["shares"]["8"] > told["shares"]["16"] > 1 / 16
    with safe_open(channels, "pt") as opened:
        assert opened.metadata()["tokens"] == str(told["tokens"])
    chosen = {"method": "double_sparsity", "channels": str(channels), "tokens": 24, "recent": 8, "dense_layers": 1}
    flags = (PROMPT, "--temperature", "0", "--max-tokens", "8", "-s", "ngram", "--kv-selection", json.dumps(chosen))
    written = run("generate", *flags)
    assert (written.code, "outputs are approximate" in written.err) == (0, True)
    plain = LLM(kv_selection=chosen, speculative_config=None)
    (answer,) = plain.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    assert written.out.strip() == answer.outputs[0].text.strip()  # drafts write what the selection writes
    assert "kv_selection 'double_sparsity'" in str(plain.exactness)


def test_channels_in_words(run: Command, tmp_path: Path) -> None:
    found = run("analyze", "channels", PROMPT, "--output", str(tmp_path / "c.safetensors"), "--tokens", "32")
    assert found.code == 0, found.err
    assert "from 32 tokens\n1/4 of the channels carries " in found.out


def test_what_is_refused(run: Command, tmp_path: Path) -> None:
    found = run("analyze", "channels", PROMPT, "--output", str(tmp_path / "no" / "folder"))
    assert (found.code, "--output must lie in a folder that exists" in found.err) == (2, True)
    for given, why in (
        ("nothing", "unknown kv_selection method 'nothing'"),
        ("double_sparsity", "kv_selection 'double_sparsity' needs 'channels'; give it beside the method"),
        ('{"method": "double_sparsity", "chanels": "x"}', "chanels"),
        ('{"method": "double_sparsity", "channels": "x", "tokens": "y"}', "tokens must be"),
        ('{"tokens": 3}', "kv_selection must be a dict with a method"),
    ):
        found = run("generate", PROMPT, "--kv-selection", given)
        assert (found.code, why in found.err, found.err.count("\n")) == (2, True, 1), found.err
    for strict in ({"method": "double_sparsity", "channels": "x"}, {"method": "loopserve"}):
        with pytest.raises(ConfigError, match="kv_selection must be left out with exactness='strict'"):
            open_kv_selection(strict, exactness="strict")
    assert open_kv_selection(None, exactness="strict") is None


def test_loopserve_writes_the_same_with_drafts_and_is_approximate_by_name(run: Command) -> None:
    chosen = {"method": "loopserve", "tokens": 24, "interval": 4, "observed": 4}
    flags = (PROMPT, "--temperature", "0", "--max-tokens", "8", "-s", "ngram", "--kv-selection", json.dumps(chosen))
    written = run("generate", *flags)
    assert (written.code, "outputs are approximate" in written.err) == (0, True)
    plain = LLM(kv_selection=chosen, speculative_config=None)
    (answer,) = plain.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))
    assert written.out.strip() == answer.outputs[0].text.strip()
    assert "kv_selection 'loopserve'" in str(plain.exactness)
