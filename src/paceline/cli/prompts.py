"""Where prompts come from: an argument, a file, standard input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.terminal import say
from paceline.config import SamplingParams
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.utils import near_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.engine import Prompt
    from paceline.llm import LLM

MAX_PROMPT_BYTES = 64 * 1024 * 1024
MAX_PROMPTS = 10_000

Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="FILE", help="Text with one prompt per line, or JSONL with the key prompt."),
]
"""The flag of the commands that take a file of prompts."""


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """One prompt's text; of a file or a pipe, the newline that ends it is left out.

    Raises:
        PromptError: an empty prompt, or one that cannot be read.
        ConfigError: two prompts.
    """
    if prompt is not None and file is not None:
        raise ConfigError("give the prompt either as an argument or with --file, not both")
    if file is not None:
        return _whole(read_file(file), f"the prompt file {str(file)!r}")
    if prompt is None or prompt == "-":
        return _whole(_standard_input(), "the prompt on standard input")
    if not prompt:
        raise PromptError("the prompt is empty; give at least one character")
    return prompt


def text_or_file(flag: str, text: str) -> str:
    """What a flag means: `@FILE` is the whole text of a file, `@@...` a text that begins with one @.

    Raises:
        PromptError: a file that cannot be read.
    """
    if not text.startswith("@"):
        if text and len(text) < 255 and "\n" not in text and Path(text).is_file():
            say(f"{flag} {text} is taken as the text itself; @{text} reads the file.")
        return text
    return text[1:] if text.startswith("@@") else read_file(Path(text[1:]))


def read_file(file: Path) -> str:
    """Read the text of a file.

    Raises:
        PromptError: it cannot be read, is too large, or is not UTF-8.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_PROMPT_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise PromptError(f"cannot read {str(file)!r} ({why}); give a UTF-8 text file{near_file(file)}") from None
    return decode(data, repr(str(file)))


def _standard_input() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise PromptError("no prompt was given; pass it as an argument, with --file, or on standard input")
    return decode(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1), "standard input")


def decode(data: bytes, name: str) -> str:
    """The text of some bytes, a byte order mark left out.

    Raises:
        PromptError: too many, or not UTF-8.
    """
    if len(data) > MAX_PROMPT_BYTES:
        raise PromptError(f"{name} holds more than {MAX_PROMPT_BYTES} bytes; shorten it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{name} is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start}); convert it"
        ) from None


def _whole(text: str, name: str) -> str:
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise PromptError(f"{name} is empty; give at least one character")
    return text


def read_prompts(file: Path) -> dict[int, str]:
    """Many prompts: per line of a .json or .jsonl file a string or an object with key "prompt", else one per line.

    Lines end with a line feed, or with carriage return and line feed, and with nothing else: the other characters that
    Unicode calls line ends may be in a prompt.

    Returns:
        Number of a line, from 1 -> its prompt, in order.
    Raises:
        PromptError: a file that cannot be read, or holds no prompt or too many.
    """
    lines = (line.removesuffix("\r") for line in read_file(file).split("\n"))
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise PromptError(f"no prompts in {str(file)!r}; give at least one line")
    if len(numbered) > MAX_PROMPTS:
        raise PromptError(f"{str(file)!r} holds {len(numbered)} prompts, more than {MAX_PROMPTS}; split it")
    if file.suffix not in (".jsonl", ".json"):
        return dict(numbered)
    return {number: _json_prompt(line, f"{str(file)!r} line {number}") for number, line in numbered}


def checked_prompts(llm: LLM, file: Path, prompts: Mapping[int, str], *, chat: bool = False) -> list[Prompt]:
    """Prompts of a file as `LLM.generate` takes them, each of which the model can go on with.

    Args:
        prompts: by their lines. chat: they are messages of a user, for the chat template.
    Raises:
        PacelineError: one that it cannot, with the number of its line.
    """
    given: list[Prompt] = []
    for line, text in prompts.items():
        try:
            asked = {"prompt_token_ids": llm.chat_ids([{"role": "user", "content": text}])} if chat else text
            llm.request(asked, SamplingParams(max_tokens=1))
        except PacelineError as error:
            raise type(error)(f"{str(file)!r} line {line}: {error}") from error
        given.append(asked)
    return given


def _json_prompt(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON ({error}); give an object with a key 'prompt' on each line") from None
    prompt = row.get("prompt") if isinstance(row, dict) else row
    if not isinstance(prompt, str) or not prompt:
        raise PromptError(f"{where} has no text under 'prompt'; give an object with a key 'prompt' on each line")
    return prompt
