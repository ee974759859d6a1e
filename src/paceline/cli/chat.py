"""`paceline chat`: a conversation through the checkpoint's own chat template."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.conversation import Ended, TerminalConversation
from paceline.cli.figures import loading
from paceline.cli.generate import finish, print_stream, tell_cut
from paceline.cli.interrupts import GoesOn
from paceline.cli.line_editor import LineEditor, is_terminal
from paceline.cli.options import check_sampling, open_llm, sampling_params, with_flags
from paceline.cli.terminal import remark
from paceline.errors import ConfigError, PacelineError, PromptError

if TYPE_CHECKING:
    from collections.abc import Generator

    from paceline.config import SamplingParams
    from paceline.engine import RequestOutput, StreamChunk
    from paceline.llm import LLM


@with_flags(sampling=True, diffusion=True)
def command(
    *,
    system: Annotated[str | None, typer.Option("--system", "-sys", metavar="TEXT", help="System message.")] = None,
    flag_values: dict[str, Any],
) -> None:
    """Chat with a model: one message per line, /help for commands; Ctrl-D ends, in a pipe an empty line does too."""
    check_sampling(flag_values)
    if "logprobs" in flag_values or "prompt_logprobs" in flag_values:
        raise ConfigError(
            "--logprobs and --prompt-logprobs are not available in a conversation; use `paceline generate --json`"
        )
    start = perf_counter()
    llm = open_llm(flag_values, diffusion=True)
    if not llm.tokenizer.has_chat_template:
        name = flag_values.get("model", "the bundled model")
        raise ConfigError(
            f"{name} has no chat template; use `paceline generate`, or a chat ('-Instruct') version of the model"
        )
    if llm.profile is not None:
        remark(str(llm.profile))
    params = sampling_params(flag_values, llm)
    if params.n > 1:
        raise ConfigError(f"n must be 1 in a conversation, got {params.n}")
    talk = TerminalConversation(system or "", loading(perf_counter() - start), llm.backend.info.max_context)
    if is_terminal():
        name = flag_values.get("model", "the bundled model")
        remark(f"{name}: /help lists commands, Ctrl-C stops an answer, Ctrl-D ends")
    editor = LineEditor()
    try:
        with GoesOn() if is_terminal() else nullcontext():
            while _turn(llm, talk, params, editor):
                pass
    finally:
        editor.close()


def _turn(llm: LLM, talk: TerminalConversation, params: SamplingParams, editor: LineEditor) -> bool:
    """Read a line and do what it says; whether there may be another. At a terminal Ctrl-C ends a line, not the chat."""
    try:
        return _done(llm, talk, params, editor)
    except Ended:
        return False
    except KeyboardInterrupt:
        if not is_terminal():
            raise
        print()
        remark("/exit or Ctrl-D ends")
        return True


def _done(llm: LLM, talk: TerminalConversation, params: SamplingParams, editor: LineEditor) -> bool:
    """The same.

    Raises:
        Ended: by /exit.
    """
    line = editor.read()
    if line is None or not (line or is_terminal()):  # an empty line ends what comes through a pipe
        return False
    try:
        told = talk.command(line)
    except ConfigError as error:
        told = [str(error)]
    for one in told or ():
        remark(one)
    if told is None and line.strip():
        talk.ask(line)
        _answer(llm, talk, params)
    return True


def _answer(llm: LLM, talk: TerminalConversation, params: SamplingParams) -> None:
    """Answer the last message; a conversation that has become too long starts over with it.

    At a terminal errors are told, and Ctrl-C ends the answer, while the conversation goes on with what was written.
    """
    patient, output, stopped = is_terminal(), None, False
    try:
        output, stopped = _printed(llm, talk, params)
    except KeyboardInterrupt:
        stopped = True
        if not patient:
            raise
    except PacelineError as error:
        if not patient:
            raise
        remark(f"paceline: {error}")
    talk.answered("" if output is None else output.outputs[0].text, None if output is None else output.metrics)
    if stopped and not patient:
        raise typer.Exit(130)
    if stopped:
        remark("stopped; the conversation goes on")


def _printed(llm: LLM, talk: TerminalConversation, params: SamplingParams) -> tuple[RequestOutput | None, bool]:
    try:
        output, stopped = print_stream(_stream(llm, talk, params))
    except PromptError as error:
        if len(talk.turns) == 1 or not talk.fits_alone(llm):
            raise
        print(f"paceline: {error}; the conversation starts over with this message", file=sys.stderr)
        talk.start_over()
        output, stopped = print_stream(_stream(llm, talk, params))
    finish(output)
    if output is not None:
        tell_cut(output, llm)
    return output, stopped


def _stream(llm: LLM, talk: TerminalConversation, params: SamplingParams) -> Generator[StreamChunk]:
    return llm.stream({"prompt_token_ids": llm.chat_ids(talk.messages)}, params)
