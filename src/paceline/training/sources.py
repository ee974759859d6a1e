"""What an encoder-decoder model reads while drafts for it are trained: lines of texts, or speech.

A source is known by a digest of its contents, and read again whenever it is wanted: features of speech are large.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.engine import ReadPrompt
from paceline.errors import ConfigError, PromptError
from paceline.models import Inputs
from paceline.speech import LogMel, Samples, WhisperRule, WhisperTokens, load_audio
from paceline.training.answers import SourcePrompt
from paceline.utils import read_prompts

if TYPE_CHECKING:
    from paceline.llm import LLM

AUDIO: Final = (".wav", ".flac", ".ogg", ".mp3")
"""Ends of the names of files of speech."""


def source_prompts(llm: LLM, data: Sequence[Path], *, most: int | None, language: str) -> dict[str, SourcePrompt]:
    """The sources in files or folders, by their ids, each once.

    Args:
        data: for a model that reads texts, files as `paceline bench` reads them, a source each prompt; for Whisper,
            files of speech and folders of such files, a source each window of 30 s.
        most: sources of each entry. language: of speech.
    Raises:
        ConfigError: a model that reads neither, or a language that it does not know.
        PromptError: what cannot be read, or holds no source.
    """
    reads = None if llm.source is None else llm.source.reads
    if reads not in ("encoder_tokens", "input_features"):
        raise ConfigError(f"{llm.folder} reads {reads or 'no sources'}; drafts are trained for texts and for Whisper")
    each = partial(_texts, llm) if reads == "encoder_tokens" else _Speech(llm, language).of
    prompts: dict[str, SourcePrompt] = {}
    for path in data:
        found = list(each(path))
        prompts |= dict(found[:most])
    if not prompts:
        raise PromptError(f"no source in {', '.join(map(str, data))}; give files of texts, or folders of speech")
    return prompts


def check_sources(data: Sequence[Path]) -> None:
    """Reject at once what cannot be read as sources; whether it suits the model is known with the model.

    Raises:
        PromptError: a folder without speech, or a file that is neither speech nor prompts.
    """
    for path in data:
        if path.is_dir():
            audio_files(path)
        elif path.suffix.lower() not in AUDIO and not read_prompts(path).conversations:
            raise PromptError(f"{str(path)!r} holds lengths of prompts and no texts; give a file of texts")


def audio_files(path: Path) -> list[Path]:
    """Files of speech: the file itself, or those in a folder and below it, by name.

    Raises:
        PromptError: there are none.
    """
    files = sorted(one for one in path.rglob("*") if one.suffix.lower() in AUDIO) if path.is_dir() else [path]
    if not files:
        raise PromptError(f"{str(path)!r} holds no speech; give a folder of files that end in {', '.join(AUDIO)}")
    return files


def _texts(llm: LLM, path: Path) -> Iterator[tuple[str, SourcePrompt]]:
    assert llm.source is not None
    start = list(llm.source.start)
    for conversation in read_prompts(path).conversations:
        ids = llm.source.encode(conversation.turns[0])
        name = sha256(json.dumps([ids, start]).encode()).hexdigest()
        inputs = Inputs(encoder_tokens=ids)
        if _fits(llm, inputs):
            yield name, SourcePrompt(start, partial(ReadPrompt, None, start, [], inputs=inputs))


def _fits(llm: LLM, inputs: Inputs) -> bool:
    try:
        llm.runner.most_tokens(inputs)  # type: ignore[attr-defined]  # of runners that take inputs
    except PromptError:
        return False
    return True


class _Speech:
    """Windows of files of speech, as Whisper reads them.

    Args:
        language: what is spoken; a model of English alone is not told.
    """

    def __init__(self, llm: LLM, language: str) -> None:
        self._tokens, self._mel = WhisperTokens.load(llm.folder), LogMel.load(llm.folder)
        self._prompt = self._tokens.prompt(language=language if self._tokens.multilingual else None)

    def of(self, path: Path) -> Iterator[tuple[str, SourcePrompt]]:
        for file in audio_files(path):
            samples, digest = load_audio(file), sha256(file.read_bytes()).hexdigest()
            for first in range(0, self._mel.frame_count(samples), self._mel.frames):
                name = sha256(json.dumps([digest, first, self._prompt]).encode()).hexdigest()
                yield name, SourcePrompt(self._prompt, partial(self._read, partial(load_audio, file), first))

    def _read(self, samples: Callable[[], Samples], first: int) -> ReadPrompt:
        inputs = Inputs(features={"input_features": self._mel.window(samples(), first)})
        return ReadPrompt(None, list(self._prompt), [], inputs=inputs, rule=WhisperRule(self._tokens))
