"""`paceline generate`: continue a prompt, streaming.

On a terminal accepted drafts are coloured by drafter, and the canvas of a diffusion language model fills in place.
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.figures import loading, memory, request_figures, search_figures
from paceline.cli.methods import left_out
from paceline.cli.options import check_sampling, open_llm, sampling_params, with_flags
from paceline.cli.prompts import read_prompt, text_or_file
from paceline.cli.terminal import HARMLESS, console, counted, remark, tell_once
from paceline.errors import ConfigError
from paceline.utils import json_value

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from rich.live import Live
    from rich.text import Text

    from paceline.diffusion import DiffusionMetrics, Pieces
    from paceline.engine import RequestMetrics, RequestOutput, StreamChunk
    from paceline.llm import LLM


Prompt = Annotated[str | None, typer.Argument(help="The prompt; - or nothing reads standard input.")]
PromptFile = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from this file.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Treat the prompt as a user's message (chat template).")]
Prediction = Annotated[
    str | None,
    typer.Option(
        "--prediction", metavar="TEXT", help="What the output is expected to be, to draft from; @FILE reads a file."
    ),
]
EncoderPrompt = Annotated[
    str | None,
    typer.Option(
        "--encoder-prompt",
        metavar="TEXT",
        help="For encoder-decoder models: the text that the encoder reads; the prompt is what the output begins with. "
        "@FILE reads a file.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object: text, token_ids, finish_reason, metrics.")]
Search = Annotated[
    str | None,
    typer.Option(
        "--search",
        metavar="METHOD",
        help='Search for the --n best texts: a method, as beam, or JSON, as {"method": "beam", "beam_width": 4}.',
    ),
]
Retrieval = Annotated[
    str | None,
    typer.Option(
        "--retrieval",
        metavar="INDEX",
        help='Write with what an index finds (`paceline retrieval build`): its folder, or JSON, as {"index": FOLDER, '
        '"interval": 4}.',
    ),
]
ShowTree = Annotated[bool, typer.Option("--tree", help="Draw the branches of a search.")]
Stats = Annotated[bool, typer.Option("--stats", help="Print on standard error what loading, prompt and decoding took.")]
UnsafeExecution = Annotated[
    bool,
    typer.Option(
        "--unsafe-execution",
        help="Where --search tries the programs it finds: run them without a sandbox, with resource limits alone.",
    ),
]


@with_flags(sampling=True, diffusion=True)
def command(
    *,
    prompt: Prompt = None,
    file: PromptFile = None,
    chat: Chat = False,
    encoder_prompt: EncoderPrompt = None,
    prediction: Prediction = None,
    as_json: Json = False,
    search: Search = None,
    retrieval: Retrieval = None,
    show_tree: ShowTree = False,
    stats: Stats = False,
    unsafe_execution: UnsafeExecution = False,
    flag_values: dict[str, Any],
) -> None:
    """Continue a prompt with a model; on a terminal, accepted drafts are coloured by drafter."""
    check_sampling(flag_values)
    check_search(search, flag_values, as_json, show_tree, unsafe_execution)
    check_retrieval(retrieval, search, flag_values)
    source = None if encoder_prompt is None else text_or_file("--encoder-prompt", encoder_prompt)
    text = "" if source is not None and prompt is None and file is None else read_prompt(prompt, file)
    expected = None if prediction is None else text_or_file("--prediction", prediction)
    start = perf_counter()
    llm = open_llm(flag_values, diffusion=True)
    load = loading(perf_counter() - start)
    check_prediction(expected, llm)
    check_source(source, llm, flag_values)
    tell_setting(llm, chat=chat)
    params = sampling_params(flag_values, llm)
    if not as_json and (params.logprobs is not None or params.prompt_logprobs is not None):
        raise ConfigError("--logprobs and --prompt-logprobs are not available in streamed text; add --json")
    what: dict[str, Any] = (
        {"prompt_token_ids": llm.chat_ids([{"role": "user", "content": text}])} if chat else {"prompt": text}
    )
    if source is not None:
        what |= {"encoder_prompt": source}
    wanted = None if search is None else searching(search, unsafe_execution)
    chunks = llm.stream({**what, "prediction": expected}, params, search=wanted, retrieval=retrieval)
    if "max_tokens" in flag_values and search is None and retrieval is None:
        chunks = with_cut_told(chunks, flag_values["max_tokens"], llm)
    if as_json:
        output = _as_json(chunks)
    elif search is not None or retrieval is not None:
        output = show_search(llm, chunks, params.n, show_tree)
    else:
        output = show(chunks) if params.n == 1 else show_all(chunks)
    if output is not None:
        tell_cut(output, llm)
        for line in (load, *request_figures(output), memory()) if stats else ():
            remark(line)
    finish(output)


def tell_setting(llm: LLM, *, chat: bool) -> None:
    """Say what a user may not know of the model that is loaded: that it wants messages, what drafts for it."""
    if not chat and llm.tokenizer.has_chat_template:
        tell_once("chat", "this model follows instructions: --chat treats the prompt as a message (told once)")
    if llm.profile is not None:
        remark(str(llm.profile))
    if llm.speculative is not None and llm.speculative.method == "auto":
        for line in left_out():
            logger.info("%s", line)


def check_search(
    search: str | None, flag_values: Mapping[str, Any], as_json: bool, show_tree: bool, unsafe_execution: bool
) -> None:
    """Reject flags that say nothing with, or without, a search.

    Raises:
        ConfigError: naming them.
    """
    if show_tree and (search is None or as_json):
        raise ConfigError("--tree draws what --search has made; give --search, and leave --json out")
    if unsafe_execution and search is None:
        raise ConfigError("--unsafe-execution is for programs that --search tries; give --search")
    if search is not None and flag_values.get("speculative_config") not in (None, "null"):
        raise ConfigError("--search drafts nothing; leave --speculative-config out")


def check_retrieval(retrieval: str | None, search: str | None, flag_values: Mapping[str, Any]) -> None:
    """Reject what does not go with retrieval.

    Raises:
        ConfigError: naming it.
    """
    if retrieval is not None and search is not None:
        raise ConfigError("--retrieval and --search write in different ways; give one of them")
    if retrieval is not None and flag_values.get("speculative_config") not in (None, "null"):
        raise ConfigError("--retrieval guesses passages and drafts no tokens; leave --speculative-config out")


def searching(search: str, unsafe_execution: bool) -> dict[str, Any] | str:
    """The search that was typed, which runs programs without a sandbox where that was asked for."""
    if not unsafe_execution:
        return search
    read: Any = json_value("search", search) if search.lstrip().startswith("{") else {"method": search}
    return {**read, "unsafe_execution": True}


def show_search(llm: LLM, chunks: Generator[StreamChunk], count: int, show_tree: bool) -> RequestOutput | None:
    """Print what a search finds, best first: a single text as it comes, as far as the method can tell; several texts,
    or one below its tree, at the end.
    """
    printer, last = StreamPrinter(), None
    if count == 1 and not show_tree:
        last, stopped = print_stream(chunks, printer)
        if stopped:
            raise typer.Exit(130)
    else:
        last = _at_end(chunks)
    if last is None or last.outputs[0].error is not None:
        return last
    if count > 1 or show_tree:
        _print_found(llm, last, printer, show_tree=show_tree)
    if printer.console.is_terminal and last.search is not None:
        remark(search_figures(last.search))
    return last


def _at_end(chunks: Generator[StreamChunk]) -> RequestOutput | None:
    """The output of a stream; Ctrl-C ends it with exit code 130."""
    last: RequestOutput | None = None
    try:
        for chunk in chunks:
            last = chunk.output
    except KeyboardInterrupt:
        chunks.close()
        raise typer.Exit(130) from None
    return last


def _print_found(llm: LLM, result: RequestOutput, printer: StreamPrinter, *, show_tree: bool) -> None:
    """Print the texts that a search has found, under headings where there are several."""
    if show_tree:
        draw_tree(llm, result)
    for output in result.outputs:
        if len(result.outputs) > 1:
            printer.heading(f"--- {output.index + 1} of {len(result.outputs)}, score {output.score:.3f} ---")
        printer.show([(output.text, None)])
        printer.end()


def draw_tree(llm: LLM, result: RequestOutput) -> None:
    """The branches of a search as a tree of texts, its outputs with their scores."""
    from rich.text import Text
    from rich.tree import Tree

    drawn = [Tree(Text("the prompt", style="dim"), guide_style="dim")]
    for above, tokens, rank in result.search.runs() if result.search is not None else ():
        text = json.dumps(llm.tokenizer.decode(tokens, False), ensure_ascii=False)[1:-1].translate(HARMLESS)
        line = Text(text, style="bold" if rank == 0 else "")
        if rank >= 0:
            line.append(f"  [{rank + 1}: {result.outputs[rank].score:.3f}]", style="green")
        drawn.append(drawn[above + 1].add(line))
    console(soft_wrap=True).print(drawn[0])


def check_prediction(expected: str | None, llm: LLM) -> None:
    """Reject a prediction that the methods which the user chose do not read; a profile is no such choice.

    Raises:
        ConfigError: with what to add.
    """
    if expected is None or llm.profile is not None or not llm.backend.can_draft:
        return
    if "prediction" not in llm.drafter_methods:
        methods = ", ".join(llm.drafter_methods) or "none"
        raise ConfigError(
            f"--prediction needs the method prediction or auto in --speculative-config; the methods are: {methods}"
        )


def check_source(source: str | None, llm: LLM, flag_values: Mapping[str, Any]) -> None:
    """Reject a text for an encoder where there is none.

    Raises:
        ConfigError: with what to do.
    """
    name = flag_values.get("model", "the bundled model")
    if llm.source is None and source is not None:
        raise ConfigError(f"--encoder-prompt is for encoder-decoder models, and {name} has no encoder; leave it out")


def with_cut_told(chunks: Generator[StreamChunk], max_tokens: int, llm: LLM) -> Generator[StreamChunk]:
    """The same chunks; before the first, a line on standard error where the context holds fewer tokens than wanted."""
    context = llm.backend.info.max_context
    with closing(chunks):
        for number, chunk in enumerate(chunks):
            room = context - len(chunk.output.prompt_token_ids)
            if not number and max_tokens > room:
                remark(f"--max-tokens {max_tokens} was cut to {room}: prompt and output share {context} tokens")
            yield chunk


def tell_cut(output: RequestOutput, llm: LLM) -> None:
    """Say where standard error is a terminal that a limit has cut answers off, and what raises it."""
    cut = [len(one.token_ids) for one in output.outputs if one.finish_reason == "length"]
    if not cut or not sys.stderr.isatty():
        return
    number, most, context = len(output.outputs), max(cut), llm.backend.info.max_context
    which = "the answer was" if number == 1 else f"{len(cut)} of {number} answers were"
    full = len(output.prompt_token_ids) + most >= context
    why = f"the context of {context} tokens is full" if full else "--max-tokens raises the limit"
    remark(f"{which} cut off at {counted(most, 'token')}: {why}")


def show_all(chunks: Generator[StreamChunk]) -> RequestOutput | None:
    """Print the outputs of a request one after the other, under headings, once all are there; Ctrl-C prints what is."""
    segments: dict[int, list[tuple[str, str | None]]] = {}
    thoughts: dict[int, str] = {}
    last: RequestOutput | None = None
    code = 0
    try:
        for chunk in chunks:
            last = chunk.output
            segments.setdefault(chunk.index, []).extend(chunk.segments)
            thoughts[chunk.index] = thoughts.get(chunk.index, "") + chunk.reasoning
    except KeyboardInterrupt:
        chunks.close()
        code = 130
    printer = StreamPrinter()
    for index in sorted(segments):
        printer.heading(f"--- {index + 1} of {len(last.outputs) if last else len(segments)} ---")
        printer.thought(thoughts[index])
        printer.show(segments[index])
        printer.end()
    if code:
        raise typer.Exit(code)
    if last is not None:
        printer.legend(last.metrics)
    return last


def show(chunks: Generator[StreamChunk]) -> RequestOutput | None:
    """Print a stream as text; Ctrl-C ends it with exit code 130 and keeps what was printed."""
    printer = StreamPrinter()
    last, stopped = print_stream(chunks, printer)
    if stopped:
        raise typer.Exit(130)
    if last is not None:
        printer.legend(last.metrics)
    return last


def print_stream(
    chunks: Generator[StreamChunk], printer: StreamPrinter | None = None
) -> tuple[RequestOutput | None, bool]:
    """Print a stream as text until it ends or Ctrl-C ends it; the output so far, and whether it was stopped."""
    printer = printer or StreamPrinter()
    last: RequestOutput | None = None
    stopped = False
    try:
        for chunk in chunks:
            last = chunk.output
            printer.thought(chunk.reasoning)
            printer.show(chunk.segments, getattr(chunk, "pieces", ()) if chunk.finish_reason is None else ())
    except KeyboardInterrupt:
        stopped = True
        chunks.close()
        if last is not None:
            printer.rest(last.outputs[0].text)
    finally:
        printer.end()
    return last, stopped


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


logger = logging.getLogger("paceline")

COLOURS = {"green": 32, "cyan": 36, "magenta": 35, "yellow": 33, "blue": 34, "red": 31}
"""Colours of drafters in order, with their codes: rich would expand tabs, without knowing the column."""

CANVAS = {"masked": "dim", "written": "", "new": "green"}
"""Styles of a canvas' slots by state."""


class StreamPrinter:
    """Prints chunks as they come; the bare text when standard output is not a terminal."""

    def __init__(self) -> None:
        self.console = console()
        self.colours: dict[str, str] = {}
        self._shown = 0
        self._at_start = True
        self._live: Live | None = None
        self._held: list[tuple[str, str | None]] = []
        self._thoughts = ""

    def heading(self, text: str) -> None:
        """A line before one of several texts."""
        print(text)
        self._at_start = True

    def thought(self, text: str) -> None:
        """Keep a piece of the thoughts before a text: a terminal shows them dim, in front of it."""
        self._thoughts += text

    def show(self, segments: Iterable[tuple[str, str | None]], canvas: Pieces = ()) -> None:
        """Print pieces of text, each with the drafter that proposed it, or None.

        Args:
            canvas: of a diffusion language model that still fills: drawn in place on a terminal, text comes when it is
                full.
        """
        self._held += segments
        if canvas and self.console.is_terminal:
            self._draw(canvas)
            return
        self._wipe()
        held, self._held = self._held, []
        if self._thoughts and self.console.is_terminal and (held or not canvas):
            thoughts, self._thoughts = self._thoughts.strip("\n").translate(HARMLESS), ""
            sys.stdout.write((thoughts if self.console.no_color else f"\x1b[2m{thoughts}\x1b[0m") + "\n\n")
        for text, source in held:
            if not text:
                continue
            self._shown, self._at_start = self._shown + len(text), text.endswith("\n")
            sys.stdout.write(self._painted(text.translate(HARMLESS), source) if self.console.is_terminal else text)
        sys.stdout.flush()

    def rest(self, text: str) -> None:
        """Print what of the whole text was held back so far."""
        self._held = []
        self.show([(text[self._shown :], None)])

    def end(self) -> None:
        """End the last line; on a terminal only if it is not ended already."""
        self.show([])
        if not (self.console.is_terminal and self._at_start):
            sys.stdout.write("\n")
        sys.stdout.flush()

    def _draw(self, canvas: Pieces) -> None:
        if self.console.is_dumb_terminal:
            return
        from rich.live import Live
        from rich.text import Text

        text = Text()
        for piece, state in canvas:
            text.append(piece.translate(HARMLESS), style=CANVAS[state])
        if self._live is None:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
            self._live.start()
        self._live.update(text, refresh=True)

    def _wipe(self) -> None:
        """Take the canvas away, in whose place the text is printed."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _painted(self, text: str, source: str | None) -> str:
        if source is None or self.console.no_color or self.console.color_system in (None, "windows"):
            return text
        colour = self.colours.setdefault(source, list(COLOURS)[len(self.colours) % len(COLOURS)])
        return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"

    def legend(self, metrics: RequestMetrics) -> None:
        """On a terminal: figures of the request, and what the colours mean."""
        if not self.console.is_terminal:
            return
        from rich.text import Text

        from paceline.diffusion import DiffusionMetrics

        if isinstance(metrics, DiffusionMetrics):
            remark(_of_diffusion(metrics))
            return
        plural = "s" if metrics.num_generation_tokens != 1 else ""
        line = Text(
            f"{metrics.num_generation_tokens} token{plural}, {metrics.tokens_per_second:.0f} tokens/s, "
            f"mean acceptance length {metrics.mean_acceptance_length:.2f}",
            style="dim",
        )
        if metrics.drafters:
            line.append("\ndrafted by")
            for name, counts in metrics.drafters.items():
                line.append(" ")
                line.append(f"■ {name}", style=self.colours.get(name, "dim"))
                line.append(f" {counts.num_accepted_tokens} of {counts.num_draft_tokens} accepted,")
            line.append(" the rest by the model")
        remark(line)


def _of_diffusion(metrics: DiffusionMetrics) -> Text:
    from rich.text import Text

    tokens, calls = metrics.num_generation_tokens, metrics.num_calls
    numbers = f"{tokens} token{'s' if tokens != 1 else ''}, {metrics.tokens_per_second:.0f} tokens/s"
    passes = f"{calls} call{'s' if calls != 1 else ''} of the model, {metrics.tokens_per_call:.2f} tokens per call"
    return Text(f"{numbers}, {passes} ({metrics.method})", style="dim")
