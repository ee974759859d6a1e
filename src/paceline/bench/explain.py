"""A generation replayed step by step: as data, and as one HTML page that needs nothing else.

In: an LLM, a prompt. Out: Replay. Not here: recording (`bench.replay`), sentences (`bench.advice`), drawing (`pages`).

The page carries its data as JSON in a script element of a type that no browser runs. `<`, `>` and `&` are written as escapes there,
so no text of a model can end the element, and the scripts of the page put text into the document as text only. A content security
policy keeps the page from loading anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.bench.advice import summarize

if TYPE_CHECKING:
    from paceline.config import SamplingParams
    from paceline.llm import LLM, Prompt

PAGES = Path(__file__).parent / "pages"
MARK = '<meta name="generator" content="paceline explain">'
"""Stands in every page, so that one may be told from a file that is something else."""

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


class Replay:
    """What happened in one generation.

    Args:
        data: the layout of `bench.replay`; `summary` (see `advice.summarize`) is added.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data if "summary" in data else data | {"summary": summarize(data)}

    @property
    def text(self) -> str:
        """The generated text."""
        return str(self.data["output"]["text"])

    @property
    def sentences(self) -> list[str]:
        """What was found, and what would help."""
        return [*self.data["summary"]["found"], *self.data["summary"]["advice"]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return self.data

    def to_html(self) -> str:
        """One page without any outside part, ASCII in its data, for every current browser.

        It takes a theme from its address (`?theme=dark`, `?theme=light`) and a step (`#12`).
        """
        from jinja2 import Environment, FileSystemLoader
        from markupsafe import Markup

        pages = Environment(loader=FileSystemLoader(PAGES), autoescape=True)
        return pages.get_template("explain.html").render(data=Markup(embedded(self.data)), mark=Markup(MARK))


def explain(
    llm: LLM, prompt: Prompt, params: SamplingParams | None = None, *, progress: Callable[[int], None] = lambda tokens: None
) -> Replay:
    """Decode a prompt and keep every step of it.

    Args:
        params: None takes the checkpoint's generation_config.json; one output only.
        progress: told the number of tokens so far after every step.
    Raises:
        ConfigError, PromptError: as `LLM.stream`, and for more than one output.
    """
    from paceline.bench.replay import Recorder

    recorder = Recorder(llm)
    for chunk in recorder.run(prompt, llm.default_sampling_params() if params is None else params):
        progress(len(chunk.output.outputs[0].token_ids))
    return Replay(recorder.data())


def embedded(data: Any) -> str:
    """JSON for a script element: ASCII, without a character that HTML could take for markup.

    Raises:
        ValueError: NaN or infinity in the data.
    """
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
