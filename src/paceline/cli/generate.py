"""`paceline generate`: continue a prompt, streaming.

In: a prompt from the argument, a file or standard input. Out: its continuation, or one JSON object with --json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import check_sampling, open_llm, sampling_params, with_flags
from paceline.cli.prompts import read_prediction, read_prompt
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

    from paceline.engine import RequestOutput, StreamChunk
    from paceline.llm import LLM


@with_flags(sampling=True, diffusion=True)
def command(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from this file.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message (chat template).")] = False,
    prediction: Annotated[
        str | None,
        typer.Option(
            "--prediction", metavar="TEXT", help="What the output is expected to be, to draft from; @FILE reads a file."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object: text, token_ids, finish_reason, metrics.")
    ] = False,
    given: dict[str, Any],
) -> None:
    """Continue a prompt with a model; on a terminal, accepted guesses are coloured by drafter, and a canvas fills in
    place.
    """
    check_sampling(given)
    text, expected = read_prompt(prompt, file), read_prediction(prediction)
    llm = open_llm(given, diffusion=True)
    check_prediction(expected, llm)
    params = sampling_params(given, llm)
    if not as_json and (params.n > 1 or params.logprobs is not None or params.prompt_logprobs is not None):
        raise ConfigError("--n above 1, --logprobs and --prompt-logprobs have no place in streamed text; add --json")
    what = {"prompt_token_ids": llm.chat_ids([{"role": "user", "content": text}])} if chat else {"prompt": text}
    chunks = llm.stream({**what, "prediction": expected}, params)
    finish(_as_json(chunks) if as_json else show(chunks))


def check_prediction(expected: str | None, llm: LLM) -> None:
    """Refuse a prediction that the methods which the user chose do not read; a profile is no such choice.

    Raises:
        ConfigError: with what to add.
    """
    if (
        expected is not None
        and llm.diffusion is None
        and llm.profile is None
        and "prediction" not in llm.drafter_methods
    ):
        methods = ", ".join(llm.drafter_methods) or "none"
        raise ConfigError(
            f"--prediction needs the method prediction or auto in --speculative-config; the methods are: {methods}"
        )


def show(chunks: Generator[StreamChunk]) -> RequestOutput | None:
    """Print a stream as text; Ctrl-C ends it with exit code 130 and keeps what was printed."""
    from paceline.cli.render import StreamPrinter

    printer = StreamPrinter()
    last: RequestOutput | None = None
    try:
        for chunk in chunks:
            last = chunk.output
            printer.show(chunk.segments, getattr(chunk, "pieces", ()) if chunk.finish_reason is None else ())
    except KeyboardInterrupt:
        chunks.close()
        if last is not None:
            printer.rest(last.outputs[0].text)
        raise typer.Exit(130) from None
    finally:
        printer.end()
    if last is not None:
        printer.legend(last.metrics)
    return last


def _as_json(chunks: Generator[StreamChunk]) -> RequestOutput | None:
    last: RequestOutput | None = None
    try:
        for chunk in chunks:
            last = chunk.output
    except KeyboardInterrupt:
        chunks.close()
        nothing: dict[str, Any] = {
            "text": "",
            "token_ids": [],
            "finish_reason": "abort",
            "stop_reason": None,
            "metrics": {},
        }
        print(json.dumps(last.to_dict() if last else nothing))
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
        output.raise_for_error()
