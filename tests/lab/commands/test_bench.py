"""`python -m lab bench`: the flags of `paceline bench`, and peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import Command

from paceline import bench


def test_peers_that_are_not_installed_are_left_out(
    run: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        bench, "read_bandwidth", lambda device: {"bytes_per_second": 1e9, "method": "made up", "samples": [1e9]}
    )
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    prompts, path = tmp_path / "mine.jsonl", tmp_path / "run.json"
    prompts.write_text('{"prompt": "one two one two one", "task": "a"}\n')
    few = ("--threads", "1", "--max-tokens", "4", "--repeats", "1", "--ignore-eos", "-s", "ngram", "-o", path)
    peers = ("--peers", "transformers,llama.cpp:ngram")
    found = run("bench", "--model", tiny, "-w", prompts, *few, *peers)
    assert found.code == 0, found.err
    made = json.loads(path.read_text())
    assert made["peers"] == []
    assert [one["name"] for one in made["peers_skipped"]] == ["transformers", "llama.cpp"]
    assert {cell["setting"] for cell in made["cells"]} == {"plain", "ngram"}
    assert made["provenance"]["command"].startswith("python -m lab bench --model ")
    assert "left out: llama.cpp: no environment; run `python -m lab peers install llama.cpp`" in found.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--peers", "lama.cpp"], "unknown peer 'lama.cpp'"),
        (["--peers", "llama.cpp", "--lora", "adapter"], "peer llama.cpp loads the checkpoint without --lora"),
        (["--peer-model", "x"], "give --peer-url too"),
        (["--peer-url", "ftp://x"], "url must begin with http:// or https:// and name a host, got 'ftp://x'"),
        (["--peer-url", "http://x:99999"], "url must begin with http"),
        (["--batch", "0"], "--batch must be integers in 1..1024"),
        (["--nonsense"], "see `python -m lab bench --help`"),
    ],
)
def test_bad_input_gets_one_line(run: Command, flags: list[str], message: str) -> None:
    found = run("bench", *flags)
    assert found.code == 2
    assert message in found.line
