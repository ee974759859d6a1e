"""`paceline chat`: a conversation through the checkpoint's own chat template."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.generate import finish, show
from paceline.cli.options import check_sampling, open_llm, sampling_params, with_flags
from paceline.cli.prompts import MAX_PROMPT_BYTES, decode
from paceline.cli.terminal import remark
from paceline.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from paceline.llm import LLM


@with_flags(sampling=True, diffusion=True)
def command(
    *,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message.")] = None,
    flag_values: dict[str, Any],
) -> None:
    """Chat with a model: one message per line; an empty line or Ctrl-D ends."""
    check_sampling(flag_values)
    if "logprobs" in flag_values or "prompt_logprobs" in flag_values:
        raise ConfigError(
            "--logprobs and --prompt-logprobs are not available in a conversation; use `paceline generate --json`"
        )
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
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (line := _read()) is not None:
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(llm, messages, params)
        except PromptError as error:
            if len(messages) == len(start) + 1:
                raise
            print(f"paceline: {error}; the conversation starts over with this message", file=sys.stderr)
            messages = [*start, messages[-1]]
            answer = _answer(llm, messages, params)
        messages.append({"role": "assistant", "content": answer})


def _read() -> str | None:
    """The next message; None at the end of the input or at an empty line."""
    if sys.stdin is None:
        return None
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = decode(sys.stdin.buffer.readline(MAX_PROMPT_BYTES + 1), "standard input")
    return line.rstrip("\r\n") or None


def _answer(llm: LLM, messages: list[dict[str, str]], params: Any) -> str:
    chunks = llm.stream({"prompt_token_ids": llm.chat_ids(messages)}, params)
    output = show(chunks)
    finish(output)
    return output.outputs[0].text if output is not None else ""
