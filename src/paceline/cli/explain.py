"""`paceline explain`: a page that replays a generation step by step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import outputs
from paceline.cli.interrupts import INTERRUPTED, TerminatedToo
from paceline.cli.methods import in_use, left_out
from paceline.cli.options import check_sampling, open_llm, sampling_params, with_flags
from paceline.cli.prompts import read_prompt
from paceline.cli.terminal import counted, progress_bar, say
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.explain import Recorder

DEFAULT_OUTPUT = Path("explain.html")


Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help=f"Where the page goes; default: {DEFAULT_OUTPUT}."),
]


@with_flags(sampling=True)
def command(
    *,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from this file.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message (chat template).")] = False,
    output: Output = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE even if it is not such a page.")] = False,
    open_page: Annotated[bool, typer.Option("--open", help="Show the page in a browser.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the data as JSON; the page is written only with --output.")
    ] = False,
    flag_values: dict[str, Any],
) -> None:
    """Replay a generation step by step: token trees, what was accepted and why not, the controller's plans, time."""
    _check(flag_values)
    text = read_prompt(prompt, file)
    page = None if as_json and output is None and not open_page else output or DEFAULT_OUTPUT
    if page is not None:
        from paceline.explain import EXPLAIN_MARK

        outputs.must_be_page("--output", page, mark=EXPLAIN_MARK, command="explain", force=force)
    recorder, interrupted, used = _recorded(flag_values, text, chat)
    if recorder.output is None:
        raise typer.Exit(INTERRUPTED)
    from paceline.explain import Replay

    replay = Replay(recorder.data())
    if page is not None:
        _write(page, replay.to_html(), open_page)
    if as_json:
        print(json.dumps(replay.to_dict()))
    else:
        print(f"{page}: {counted(recorder.steps, 'step')}")
        say(*used, *replay.sentences, indent="  ")
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    recorder.output.raise_for_error()


def _check(flag_values: dict[str, Any]) -> None:
    check_sampling(flag_values)
    if "logprobs" in flag_values or "prompt_logprobs" in flag_values:
        raise ConfigError(
            "--logprobs and --prompt-logprobs are not available in a replay; use `paceline generate --json`"
        )


def _recorded(flag_values: dict[str, Any], text: str, chat: bool) -> tuple[Recorder, bool, list[str]]:
    """Decode once to warm up and once for the record; returns also whether Ctrl-C came before the
    end, and what decoded, in words.
    """
    llm = open_llm(flag_values, timed=True)
    from paceline.explain import Recorder, warm_up

    params = sampling_params(flag_values, llm)
    what = {"prompt_token_ids": llm.chat_ids([{"role": "user", "content": text}])} if chat else {"prompt": text}
    try:
        warm_up(llm, what, params)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    recorder = Recorder(llm.with_speculative_config(llm.speculative))  # its cost model reads what the warm-up measured
    return (
        recorder,
        _record(recorder, recorder.run(what, params)),
        [*in_use(llm), *(left_out() if llm.speculative and llm.speculative.method == "auto" else [])],
    )


def _write(page: Path, html: str, show: bool) -> None:
    """Put the page there, and show it in a browser if asked to."""
    with outputs.writing("--output", page):
        page.write_text(html, encoding="utf-8")
    if show:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


def _record(recorder: Recorder, chunks: Any) -> bool:
    """Decode to the end; returns whether Ctrl-C or SIGTERM came first, which leaves what there is."""
    with TerminatedToo(), progress_bar() as bar:
        task = bar.add_task("decoding", total=None)
        try:
            for chunk in chunks:
                bar.update(task, completed=len(chunk.output.outputs[0].token_ids))
        except KeyboardInterrupt:
            chunks.close()
            return True
    return False
