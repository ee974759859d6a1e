"""The wire between Paceline and a peer: JSON lines over standard input and output.

A request is `{"op": "open", ...}` once, then `{"op": NAME, ...}` any number of times, where NAME is a method of the
driver and the rest its arguments: `generate` of a `Driver`, or those of `structured.StructuredDriver`. The end of the
input ends the process. An answer is one line, `{"ok": true, ...}` or `{"ok": false, "error": "..."}`. Times are
seconds, tokens are ids.

Whatever a library prints goes to standard error: the real standard output is kept for the wire alone.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, TextIO


class Driver(Protocol):
    """What a driver's `open_peer(request)` returns; `request` is the whole open message.

    Attributes:
        version: of the peer's library.
        settings: what the peer really runs with, as a JSON-able dict.
    """

    version: str
    settings: dict[str, Any]

    def generate(self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Decode greedily; returns `tokens` (a list per prompt), `seconds`, `ttft` (seconds, or None) and, where the
        library lets it be counted, `passes`: how often the target ran for each prompt, the pass over the prompt
        included.
        """


def serve(module: str) -> None:
    """Answer requests from standard input with the named driver module until the input ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    driver: Any = None

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal driver
        if request["op"] == "open":
            driver = import_module(module).open_peer(request)
            return {"version": driver.version, "settings": driver.settings}
        if driver is None:
            raise RuntimeError("the first request must be open")
        found: dict[str, Any] = getattr(driver, request.pop("op"))(**request)
        return found

    for line in sys.stdin:
        _reply(out, answer, line)


def _reply(out: TextIO, answer: Callable[[dict[str, Any]], dict[str, Any]], line: str) -> None:
    try:
        message = {"ok": True, **answer(json.loads(line))}
    except Exception as error:
        traceback.print_exc()
        message = {"ok": False, "error": f"{type(error).__name__}: {error}"}
    out.write(json.dumps(message) + "\n")
    out.flush()
