"""`paceline chat`: a conversation through the checkpoint's own chat template."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.generate import finish, show
from paceline.cli.options import DEFAULT_SPEC, Model, Revision, Spec, Tokenizer, Trust, open_llm, sampling_params, with_flags
from paceline.errors import ConfigError, PromptError

if TYPE_CHECKING:
    from paceline.llm import LLM


@with_flags(sampling=True)
def command(
    system: Annotated[str | None, typer.Option("--system", help="System message.")] = None,
    model: Model = None,
    speculative_config: Spec = DEFAULT_SPEC,
    tokenizer: Tokenizer = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
    given: dict[str, Any] = {},  # noqa: B006 - filled by the decorator
) -> None:
    """Talk with a model: one message a line; an empty line or Ctrl-D ends."""
    llm = open_llm(model, tokenizer, revision, trust_remote_code, speculative_config, given)
    if not llm.tokenizer.has_chat_template:
        raise ConfigError(
            f"{llm.runner.info.name} has no chat template; use `paceline generate`, or a checkpoint whose tokenizer_config.json has one"
        )
    params = sampling_params(given, llm)
    if params.n > 1:
        raise ConfigError(f"n must be 1 in a conversation, got {params.n}")
    messages = [{"role": "system", "content": system}] if system else []
    while (line := _read()) is not None:
        messages.append({"role": "user", "content": line})
        try:
            answer = _answer(llm, messages, params)
        except PromptError as error:
            if len(messages) == 1 + bool(system):
                raise
            print(f"paceline: {error}; the conversation starts over", file=sys.stderr)
            messages = messages[: bool(system)]
            continue
        messages.append({"role": "assistant", "content": answer})


def _read() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") or None


def _answer(llm: LLM, messages: list[dict[str, str]], params: Any) -> str:
    chunks = llm.stream({"prompt_token_ids": llm.chat_ids(messages)}, params)
    output = show(chunks)
    finish(output)
    return output.outputs[0].text if output is not None else ""
