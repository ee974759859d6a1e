"""`paceline transcribe` as a user calls it, on a made Whisper model."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import soundfile
import tiny_whisper
from command import Command, Terminal, arrive
from tiny_whisper import sound, wav

from paceline import LLM
from paceline.cli.live_audio import AudioSource
from paceline.cli.main import main
from paceline.speech import AudioLimits, Transcript, write_transcript
from paceline.transcriber import HeardWindow, Transcriber

FAST = ("--dtype", "float32", "--threads", "1", "-s", "null")


@pytest.fixture(autouse=True, scope="module")
def _one_temperature() -> Iterator[None]:
    """Of the temperatures 0 is tried alone: all windows of a random model are doubtful."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("paceline.transcriber.TEMPERATURES", (0.0,))
        yield


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper.write(tmp_path_factory.mktemp("whisper"), seed=1)


@pytest.fixture(scope="module")
def talk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("audio") / "talk.wav"
    file.write_bytes(wav(sound(4, 2)))
    return file


@pytest.fixture(scope="module")
def expected(whisper: Path, talk: Path) -> Transcript:
    """With the words' times."""
    llm = LLM(whisper, dtype="float32", threads=1, speculative_config=None)
    found = llm.transcribe(talk, language="en", words=True)
    assert isinstance(found, Transcript)
    assert found.text
    return found


@pytest.mark.parametrize("form", ["txt", "srt", "vtt", "json", "verbose_json"])
def test_formats(run: Command, form: str, whisper: Path, talk: Path, expected: Transcript) -> None:
    found = run("transcribe", talk, "-m", whisper, "--language", "en", "--format", form, *FAST)
    assert (found.code, found.err) == (0, "")
    if form == "verbose_json":
        told = json.loads(found.out)
        assert (told["text"], told["language"], told["duration"]) == (expected.text, "english", 4.0)
        assert "words" not in told
    else:
        assert found.out == write_transcript(expected, form).removesuffix("\n") + "\n"


def test_words_and_files(run: Command, whisper: Path, talk: Path, expected: Transcript, tmp_path: Path) -> None:
    file = tmp_path / "out.srt"
    given = ("-m", whisper, "--language", "en", "--words", *FAST)
    found = run("transcribe", talk, *given, "--format", "srt", "-o", file)
    assert (found.code, found.out, found.err) == (0, "", "")
    assert file.read_text() == write_transcript(expected, "srt", words=True)
    found = run("transcribe", talk, *given, "--format", "verbose_json", "-o", tmp_path)
    assert found.code == 0
    assert len(json.loads((tmp_path / "talk.json").read_text())["words"]) == len(expected.words)


def test_several_audios(run: Command, whisper: Path, talk: Path, expected: Transcript, tmp_path: Path) -> None:
    other = tmp_path / "other.wav"
    other.write_bytes(wav(sound(3, 1)))
    given = ("transcribe", talk, other, "-m", whisper, "--language", "en", *FAST)
    found = run(*given)
    assert found.out.startswith(f"--- {talk} ---\n{write_transcript(expected, 'txt')}--- {other} ---\n")
    lines = run(*given, "--format", "json").out.splitlines()
    assert [json.loads(line).keys() for line in lines] == [{"text"}, {"text"}]
    assert run(*given, "-o", tmp_path).out == ""
    assert (tmp_path / "talk.txt").read_text() == write_transcript(expected, "txt")
    assert (tmp_path / "other.txt").exists()


def test_one_of_several_that_cannot_be_read_is_passed_over(
    run: Command, whisper: Path, talk: Path, expected: Transcript, tmp_path: Path
) -> None:
    (tmp_path / "text.wav").write_text("no audio at all")
    found = run("transcribe", tmp_path / "text.wav", talk, "-m", whisper, "--language", "en", *FAST)
    assert found.out == f"--- {talk} ---\n{write_transcript(expected, 'txt')}"
    told = "cannot be read as audio (Format not recognised); wav, flac, ogg and mp3 can"
    assert (found.code, found.line) == (2, f"{tmp_path / 'text.wav'} {told}")
    assert run("transcribe", talk, talk, "-m", whisper, *FAST).code == 0, "the control"


def test_standard_input_and_figures(run: Command, whisper: Path, talk: Path, expected: Transcript) -> None:
    given = ("-m", whisper, "--language", "en", "--stats", *FAST)
    found = run("transcribe", *given, stdin=talk.read_bytes())
    assert found.out == write_transcript(expected, "txt")
    assert "real-time factor" in found.err
    assert "tokens a pass" in found.err


def test_the_seed_decides_what_is_drawn(run: Command, whisper: Path, talk: Path) -> None:
    given = ("transcribe", talk, "-m", whisper, "--language", "en", "--temperature", 1, *FAST)
    texts = [run(*given, *seed).out for seed in ((), ("--seed", 0), ("--seed", 7))]
    assert texts[0] == texts[1] != texts[2]


def test_what_was_understood_before_ctrl_c_is_kept(
    run: Command, whisper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, out = tmp_path / "long.wav", tmp_path / "long.txt"
    file.write_bytes(wav(sound(95)))
    stream = Transcriber.stream

    def interrupted(self: Transcriber, *arguments: Any) -> Iterator[HeardWindow]:
        for number, window in enumerate(stream(self, *arguments)):
            if number == 2:
                arrive(signal.SIGINT)
            yield window

    given = ("transcribe", file, "-m", whisper, "--language", "en", "--temperature", 1, "-o", out, *FAST)
    assert run(*given).code == 0
    whole = out.read_text()
    monkeypatch.setattr(Transcriber, "stream", interrupted)
    found = run(*given)
    assert (found.code, found.line) == (130, "interrupted")
    kept = out.read_text()
    assert 0 < len(kept) < len(whole)
    assert whole.startswith(kept)


@pytest.mark.parametrize("to_file", [True, False])
def test_ctrl_c_before_anything_is_understood_writes_nothing(
    run: Command, to_file: bool, whisper: Path, talk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Iterator[HeardWindow]:
        arrive(signal.SIGINT)
        yield from ()

    out = tmp_path / "talk.srt"
    out.write_text("of an earlier run")
    monkeypatch.setattr(Transcriber, "stream", interrupted)
    more = ("-o", out) if to_file else ()
    found = run("transcribe", talk, "-m", whisper, "--format", "srt" if to_file else "json", *more, *FAST)
    assert (found.code, found.out, found.line) == (130, "", "interrupted")
    assert out.read_text() == "of an earlier run"


def test_a_file_is_replaced_as_a_whole(
    run: Command, whisper: Path, talk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "talk.txt"
    out.write_text("of an earlier run")

    def full(path: Path, *arguments: Any, **more: Any) -> int:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    found = run("transcribe", talk, "-m", whisper, "-o", out, *FAST)
    assert found.code == 2
    assert "No space left on device" in found.line
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("talk.txt", "of an earlier run")]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("nowhere.wav",), "'nowhere.wav' must be an audio file, got no file"),
        (("TALK", "--format", "doc"), "--format must be one of txt, srt, vtt, json, verbose_json, got 'doc'"),
        (("TALK", "--task", "sing"), "task must be one of transcribe, translate, got 'sing'"),
        (("TALK", "--language", "fr"), "language must be one of de, en, haw, got 'fr'"),
        (("TALK", "--temperature", "9"), "temperature must be a number in 0..2, got 9.0"),
        (("TALK", "TALK", "--format", "srt"), "--format srt of several audios needs --output FOLDER"),
        (("TALK", "TALK", "-o", "."), "several texts would go to 'talk.txt'"),
        (("TALK", "-o", "TALK"), "is an audio that is to be read; name another file"),
        (("TALK", "TALK", "-o", "new.txt"), "--output must be a folder for several audios, got 'new.txt'"),
        (("-", "-"), "standard input can be read once"),
        (("TALK", "--live", "--format", "srt"), "--format must be one of txt, json, got 'srt'"),
        (("TALK", "TALK", "--live"), "--live takes one audio, got 2"),
        (("TALK", "--live", "-o", "x.txt"), "--live prints words as they come"),
        (("TALK", "--live", "--cpu-share", "0"), "cpu_share must be a number above 0 and up to 1"),
        (("nowhere.wav", "--live"), "'nowhere.wav' must be an audio file that grows"),
        (("TALK", "--live", "--live-wait", "-1"), "--live-wait must be a number of seconds of 0 or more, got -1.0"),
        (("TALK", "--live", "--live-wait", "nan"), "--live-wait must be a number of seconds of 0 or more, got nan"),
        (("TALK", "--cpu-share", "0.3"), "--cpu-share is for captions; add --live"),
        (("TALK", "--live-wait", "5"), "--live-wait is for captions; add --live"),
        (("TALK", "--words"), "--words has no effect on txt; add --format srt, vtt or verbose_json"),
        (("TALK", "--words", "--format", "json"), "--words has no effect on json; add"),
        (("TALK", "--words", "--live"), "--words has no effect on a text; add --format json"),
        ((), "name files, as in `paceline transcribe talk.wav`"),
    ],
)
def test_wrong_values(
    arguments: tuple[str, ...], line: str, run: Command, whisper: Path, talk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(talk.parent)
    words = [str(talk) if one == "TALK" else one for one in arguments]
    found = run("transcribe", *words, "-m", whisper, *FAST)
    assert found.code == 2
    assert line in found.line


@pytest.mark.parametrize("live", [(), ("--live",)])
def test_standard_input_that_is_closed_and_what_is_no_file(
    live: tuple[str, ...], run: Command, talk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, got in (
        (tmp_path / "pipe", "a pipe or a device; send what it holds to standard input"),
        (tmp_path, "a folder"),
        ("", "no file"),
    ):
        assert f"{str(name)!r} must be an audio file" in (line := run("transcribe", name, *live, "-m", talk).line)
        assert line.endswith(f", got {got}")
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["transcribe", *live, "-m", str(talk)]) == 2


class Endless(io.RawIOBase):
    """Zeros, as long as they are read, but not for ever."""

    count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.count += len(buffer)
        assert self.count < 10**7
        buffer[:] = bytes(len(buffer))
        return len(buffer)


def test_no_more_of_standard_input_is_read_than_may_be_used(
    whisper: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Endless())))
    monkeypatch.setattr("paceline.speech.AudioLimits", partial(AudioLimits, max_bytes=10**6))
    assert main(["transcribe", "-m", str(whisper), *FAST]) == 2
    assert capsys.readouterr().err == "paceline: the audio has 1000001 bytes; 1000000 at most are read\n"


def test_all_files_are_checked_before_the_model(
    run: Command, talk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda name, mode: Path(name) != tmp_path / "b.wav" and access(name, mode))
    (tmp_path / "b.wav").write_bytes(b"RIFF")
    found = run("transcribe", talk, tmp_path / "b.wav", "-m", tmp_path / "no model")
    assert (found.code, "b.wav' may not be read by you" in found.line) == (2, True)


def test_a_terminal_without_names(
    talk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["transcribe", "-m", str(talk)]) == 2
    assert capsys.readouterr().err.startswith("paceline: name files")


def test_models_that_read_no_speech(run: Command, talk: Path, tiny: Path) -> None:
    assert "--model must name a Whisper model" in run("transcribe", talk).line
    assert "reads no speech; load a Whisper model" in run("transcribe", talk, "-m", tiny).line


def test_files_that_are_no_audio(run: Command, whisper: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.wav"
    file.write_text("no audio at all")
    found = run("transcribe", file, "-m", whisper, *FAST)
    assert found.code == 2
    assert "cannot be read as audio" in found.line


def test_decoders_say_nothing_beside_us(whisper: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talk.mp3"
    soundfile.write(file, sound(4, 2), 16_000, format="MP3")
    file.write_bytes(file.read_bytes()[:4000])
    assert main(["transcribe", str(file), "-m", str(whisper), *FAST]) == 2
    line = r"paceline: \S*talk.mp3 is cut off or damaged: [0-9.]+ of 4.00 s can be read; get the whole file\n"
    assert re.fullmatch(line, capfd.readouterr().err)


# ------------------------------------------------------------------------------------------------ live


def raw(seconds: float, seed: int = 2) -> bytes:
    return (sound(seconds, seed) * 32767).astype("<i2").tobytes()


LIVE = ("--live", "--language", "en", "--cpu-share", 1)


@pytest.mark.parametrize("form", ["txt", "json"])
def test_captions_of_standard_input(run: Command, form: str, whisper: Path) -> None:
    found = run("transcribe", *LIVE, "-m", whisper, "--format", form, "--stats", *FAST, stdin=raw(4))
    assert found.code == 0
    assert "real-time factor" in found.err
    assert "transcript" in found.err
    words = found.out.split() if form == "txt" else [json.loads(line)["word"] for line in found.out.splitlines()]
    assert words
    assert f"{len(words)} word" in found.err


def test_captions_of_a_file_that_grows(run: Command, whisper: Path, tmp_path: Path) -> None:
    """Written while it is read: its words are those of the whole, whatever came when."""
    file, data = tmp_path / "growing.wav", wav(sound(6, 2))
    file.write_bytes(data[:40_000])

    def write() -> None:
        for start in range(40_000, len(data), 40_000):
            time.sleep(0.2)
            with file.open("ab") as stream:
                stream.write(data[start : start + 40_000])

    writer = threading.Thread(target=write)
    writer.start()
    found = run("transcribe", file, *LIVE, "--live-wait", 1, "-m", whisper, "--stats", *FAST)
    writer.join()
    assert found.code == 0
    assert "audio        6.0 s" in found.err, "all of it was read"
    assert found.out.split()


def test_standard_input_that_waits_is_left_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that stays in its buffer makes Python abort at its end."""
    reader, writer = os.pipe()
    before = threading.active_count()
    with os.fdopen(writer, "wb", 0) as stream, os.fdopen(reader) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        source = AudioSource("-", 5.0)
        with source.reading():
            stream.write(raw(0.1))
            assert len(source.come(0.5)) == 1600
        left = threading.active_count()
    assert left == before


def test_a_stream_that_is_no_audio(run: Command, whisper: Path) -> None:
    found = run("transcribe", *LIVE, "-m", whisper, *FAST, stdin=b"RIFF\0\0\0\0AVI LIST" + bytes(100))
    assert found.code == 2
    assert "begins like a WAV file" in found.line


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("talk.mp3", b"ID3\4" + bytes(4000), "of the kind mp3"),
        ("talk.wav", b"no audio at all", "not its header"),
        ("talk.raw", b"", "before any sample came"),
        ("talk.WAV", b"RIFF\0\0\0\0WAVEfmt ", "within the header"),
    ],
)
def test_captions_of_files_that_are_no_audio(
    run: Command, name: str, data: bytes, line: str, whisper: Path, tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_bytes(data)
    found = run("transcribe", file, *LIVE, "--live-wait", 0.2, "-m", whisper, *FAST)
    assert (found.code, found.out) == (2, "")
    assert line in found.line


def test_other_commands_and_models_that_read_speech(run: Command, whisper: Path) -> None:
    for command in (("verify", *FAST), ("bench", *FAST[:4])):
        found = run(command[0], "-m", whisper, *command[1:])
        assert (found.code, "reads speech, no text" in found.line) == (2, True)
    run("warmup", "-m", whisper, *FAST[:-2])  # says what it compiles, where nothing has been compiled yet
    found = run("warmup", "-m", whisper, *FAST[:-2])
    assert (found.code, "paceline: " in found.err) == (0, False)
