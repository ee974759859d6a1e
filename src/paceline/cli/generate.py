"""`paceline generate`: continue a prompt, streaming.

In: a prompt from the argument, a file or standard input. Out: its continuation, or one JSON object with --json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import DEFAULT_SPEC, Model, Revision, Spec, Tokenizer, Trust, open_llm, sampling_params, with_flags
from paceline.errors import ConfigError, PacelineError, PromptError

if TYPE_CHECKING:
    from collections.abc import Generator

    from paceline.engine.outputs import RequestOutput, StreamChunk

MAX_PROMPT_BYTES = 64 * 1024 * 1024


@with_flags(sampling=True)
def command(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from this file.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message (chat template).")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object: text, token_ids, finish_reason, metrics.")] = False,
    model: Model = None,
    speculative_config: Spec = DEFAULT_SPEC,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Continue a prompt with a model; accepted guesses are coloured by drafter on a terminal."""
    text = read_prompt(prompt, file)
    llm = open_llm(model, tokenizer, revision, trust_remote_code, speculative_config, given)
    params = sampling_params(given, llm)
    if not as_json and (params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None):
        raise ConfigError("--n above 1, --logprobs and --prompt-logprobs have no place in streamed text; add --json")
    what = {"prompt_token_ids": llm.chat_ids([{"role": "user", "content": text}])} if chat else text
    chunks = llm.stream(what, params)
    finish(_as_json(chunks) if as_json else show(chunks))


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt's text.

    Raises:
        PromptError: an empty prompt, or a file that cannot be read. ConfigError: two prompts.
    """
    if prompt is not None and file is not None:
        raise ConfigError("give the prompt either as an argument or with --file, not both")
    if file is not None:
        return _read_file(file)
    if prompt is None or prompt == "-":
        if sys.stdin.isatty():
            raise PromptError("no prompt was given; pass it as an argument, with --file, or on standard input")
        prompt = sys.stdin.read(MAX_PROMPT_BYTES)
    if not prompt:
        raise PromptError("the prompt is empty; give at least one character")
    return prompt


def _read_file(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_PROMPT_BYTES:
            raise PromptError(f"prompt file {str(file)!r} is larger than {MAX_PROMPT_BYTES} bytes; shorten it")
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read the prompt from {str(file)!r} ({error}); give a UTF-8 text file") from None
    if not text:
        raise PromptError(f"the prompt file {str(file)!r} is empty; give at least one character")
    return text


def show(chunks: Generator[StreamChunk]) -> RequestOutput | None:
    """Print a stream as text; Ctrl-C ends it with exit code 130 and keeps what was printed."""
    from paceline.cli.render import StreamPrinter, remark

    printer = StreamPrinter()
    last: RequestOutput | None = None
    try:
        for chunk in chunks:
            printer.show(chunk.segments)
            last = chunk.output
    except KeyboardInterrupt:
        chunks.close()
        raise typer.Exit(130) from None
    finally:
        print(flush=True)
    if last is not None and printer.console.is_terminal:
        remark(printer.legend(last.metrics))
    return last


def _as_json(chunks: Generator[StreamChunk]) -> RequestOutput | None:
    last: RequestOutput | None = None
    try:
        for chunk in chunks:
            last = chunk.output
    except KeyboardInterrupt:
        chunks.close()
        print(json.dumps(last.to_dict() if last else {"text": "", "token_ids": [], "finish_reason": "abort"}))
        raise typer.Exit(130) from None
    if last is not None:
        print(json.dumps(last.to_dict()))
    return last


def finish(output: RequestOutput | None) -> None:
    """Turn a request that failed into one line; what it produced is already shown.

    Raises:
        PacelineError: the model returned NaN, or something else ended the request.
    """
    if output is not None:
        for one in output.outputs:
            if one.error:
                raise PacelineError(one.error)
