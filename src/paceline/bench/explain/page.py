"""A generation replayed step by step: as data, and as one HTML page that needs nothing else.

In: an LLM, a prompt. Out: Replay. Not here: recording (`bench.replay`), sentences (`bench.advice`), drawing (`pages`).

The page carries its data as JSON in a script element of a type that no browser runs. `<`, `>` and `&` are written as
escapes there, so no text of a model can end the element, and the scripts of the page put text into the document as text
only. A content security policy keeps the page from loading anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from paceline.bench.explain.advice import summarize_replay

if TYPE_CHECKING:
    from paceline.config import SamplingParams
    from paceline.engine import Prompt
    from paceline.llm import LLM

WARM_UP: Final = 48
"""Most tokens of the run before the recorded one."""

APART: Final = "paceline explain: warm-up"
"""The tenant of that run."""

PAGES = Path(__file__).parent.parent / "pages"
EXPLAIN_MARK = '<meta name="generator" content="paceline explain">'
"""Stands in every page, so that one may be told from a file that is something else."""

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


class Replay:
    """What happened in one generation.

    Args:
        data: the layout of `bench.replay`; `summary` (see `advice.summarize`) is added.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data if "summary" in data else data | {"summary": summarize_replay(data)}

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
        return pages.get_template("explain.html").render(data=Markup(embedded(self.data)), mark=Markup(EXPLAIN_MARK))


def explain(
    llm: LLM,
    prompt: Prompt,
    params: SamplingParams | None = None,
    *,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Replay:
    """Decode a prompt and keep every step of it, after a warm-up.

    Args:
        params: None takes the checkpoint's generation_config.json; one output only.
        progress: told the number of tokens so far after every step.
    Raises:
        ConfigError, PromptError: as `LLM.stream`, and for more than one output.
    """
    from paceline.bench.explain.recorder import Recorder

    params = llm.default_sampling_params() if params is None else params
    warm_up(llm, prompt, params)
    recorder = Recorder(llm)
    for chunk in recorder.run(prompt, params):
        progress(len(chunk.output.outputs[0].token_ids))
    return Replay(recorder.data())


def warm_up(llm: LLM, prompt: Prompt, params: SamplingParams) -> None:
    """Decode the beginning of an answer once, so that what happens at first use only (compiling, measured costs) is
    over.

    That is done by an engine of its own around the same weights, and for a tenant of its own: no table, no cache and no
    controller of the run to come learns from it.

    Raises:
        ConfigError, PromptError: as `Recorder.run`.
    """
    from paceline.bench.explain.recorder import check

    check(params)
    apart = (
        dict(prompt)
        if isinstance(prompt, Mapping)
        else {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    )
    most = WARM_UP if params.max_tokens is None else min(params.max_tokens, WARM_UP)
    short = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
    other = llm.with_speculative_config(llm.speculative)
    with closing(other.stream({**apart, "cache_salt": APART}, short)) as chunks:
        for _ in chunks:
            pass


def embedded(data: Any) -> str:
    """JSON for a script element: ASCII, without a character that HTML could take for markup.

    Raises:
        ValueError: NaN or infinity in the data.
    """
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)
