"""Opening peers: the real wire loop over a fake driver, and what is rejected."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from lab.peers import DRIVERS, PEERS, PeerError, agreement_with, catalogue, open_peer, peer, peer_names
from paceline.errors import ConfigError

FAKE = """
import os, sys

class Fake:
    version, settings = "fake 1", {"threads": 3}

    def generate(self, prompts, max_tokens, ignore_eos):
        print("a library that prints")
        os.write(1, b"and one that writes to the descriptor\\n")
        if max_tokens == 13:
            raise ValueError("unlucky")
        if max_tokens == 14:
            return {"tokens": [], "seconds": 1}
        return {"tokens": [[p[0] + i for i in range(max_tokens)] for p in prompts], "seconds": 0.5, "ttft": None,
                "passes": [max_tokens - 1 for _ in prompts]}

def open_peer(request):
    if "paceline.errors" in sys.modules:
        raise RuntimeError("Paceline itself was imported")
    if request["options"].get("broken"):
        raise OSError("no weights")
    return Fake()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The real start-up and wire loop, with a driver of the test's own; returns a checkpoint folder."""
    drivers = tmp_path / "drivers"
    drivers.mkdir()
    for name in ("__init__.py", "__main__.py", "wire.py"):
        shutil.copy(peer.DRIVERS / name, drivers / name)
    (drivers / "llama_cpp_peer.py").write_text(FAKE)
    (drivers / "transformers_peer.py").write_text(FAKE)
    monkeypatch.setattr(peer, "DRIVERS", drivers)
    monkeypatch.setattr(catalogue, "python_of", lambda _name: Path(sys.executable))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def test_ids_in_and_ids_out_whatever_libraries_print(fake: Path) -> None:
    with open_peer("llama.cpp", fake, dtype="float16", threads=3) as opened:
        run = opened.generate([5, 6], max_tokens=3)
        assert (run.token_ids, run.seconds, run.ttft, run.version) == ([5, 6, 7], 0.5, None, "fake 1")
        assert (run.settings, run.passes) == ({"threads": 3}, 2)
        with pytest.raises(ConfigError, match="one prompt at a time, got 2"):
            opened.generate_batch([[1], [2]], 1)


def test_a_batch_gives_a_run_a_prompt(fake: Path) -> None:
    with open_peer("transformers", fake) as opened:
        assert [one.token_ids for one in opened.generate_batch([[1], [8]], 2)] == [[1, 2], [8, 9]]


@pytest.mark.parametrize(
    ("tokens", "message"), [(13, "failed: ValueError: unlucky"), (14, "one list of tokens per prompt")]
)
def test_a_driver_that_fails_or_answers_wrongly(fake: Path, tokens: int, message: str) -> None:
    with open_peer("llama.cpp", fake, dtype="float16") as opened, pytest.raises(PeerError, match=message):
        opened.generate([1], tokens)


def test_a_driver_that_cannot_open(fake: Path) -> None:
    with pytest.raises(PeerError, match=r"peer llama\.cpp failed: OSError: no weights"):
        open_peer("llama.cpp", fake, options={"broken": 1})


def test_bad_arguments_are_named(fake: Path, tmp_path: Path) -> None:
    for call, message in (
        (lambda: open_peer("llamacpp", fake), "unknown peer 'llamacpp'; did you mean llama.cpp"),
        (lambda: open_peer("nope", fake), "unknown peer 'nope'; known are transformers, llama.cpp,"),
        (
            lambda: open_peer("llama.cpp", fake, options={"method": "draft_model"}),
            "no method 'draft_model'; it has plain, ngram",
        ),
        (lambda: open_peer("transformers", fake, options={"method": "draft_model"}), "needs the option model"),
        (lambda: open_peer("transformers", fake, dtype="int8"), "no dtype 'int8'"),
        (lambda: open_peer("llama.cpp", tmp_path), "holds no config.json"),
        (lambda: open_peer("openai", "x"), "needs the option url"),
        (lambda: open_peer("xgrammar", fake), "xgrammar decodes nothing; it is for `python -m lab structured`"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()


def test_a_peer_that_is_not_installed_says_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PeerError, match=r"run `python -m lab peers install openvino-genai`$"):
        open_peer("openvino-genai", tmp_path)


def test_conversions_belong_to_a_state_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"1")
    before = catalogue.converted(tmp_path)
    assert catalogue.converted(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"12")
    assert catalogue.converted(tmp_path) != before


def test_the_table_names_what_each_driver_reads() -> None:
    for name, entry in PEERS.items():
        if entry.driver and entry.modes:
            source = (DRIVERS / f"{entry.driver}.py").read_text(encoding="utf-8")
            read = set(re.findall(r'options"?\]?(?:\.get\(|\[)"(\w+)"', source)) | set(
                re.findall(r'"(\w+)" in options', source)
            )
            assert read == {"method", *entry.options}, name


def test_every_driver_of_the_table_exists() -> None:
    for name in peer_names():
        driver = catalogue.peer_entry(name).driver
        assert not driver or (peer.DRIVERS / f"{driver}.py").is_file()


@pytest.mark.parametrize(
    ("ours", "theirs", "first", "share"),
    [
        ([1, 2, 3], [1, 2, 3], None, 1.0),
        ([1, 2, 3, 4], [1, 9, 3, 4], 1, 0.75),
        ([1, 2], [1], 1, 0.5),
        ([], [], None, 1.0),
    ],
)
def test_agreement_counts_first_difference_and_share(
    ours: list[int], theirs: list[int], first: int | None, share: float
) -> None:
    found = agreement_with(ours, theirs)
    assert (found.first_difference, found.equal_share) == (first, share)
