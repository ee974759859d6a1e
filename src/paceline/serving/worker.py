"""A process that works on data of strangers, so that what hangs or crashes takes nothing else along.

It reads a line of JSON from standard input and writes one. Where that takes it more "seconds" of a processor, which
stand beside each question, it ends.

Questions and answers:
{"grammar": text in llguidance's notation} -> {"error": text}, empty where it compiles;
{"notation": text of a grammar as a user gives it} -> the same;
{"schema": ..., "text": ...} -> {"errors": [text, ...]}, what the text violates;
{"template": fields of `ChatTemplate`, "messages": ..., "more": ...} -> fields of `Rendered`, "error": "".
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from paceline.grammar import library_text, with_references

MOST_ERRORS: Final = 8
STACK_BYTES: Final = 2**21
"""Less than the server has, so that what nests too deeply ends this process and not that one."""

MEMORY_BYTES: Final = 2**32
"""The process may use so many bytes of addresses, where the system can limit them."""


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Answer one question."""
    if "template" in asked:
        return _rendered(**asked) | {"error": ""}
    if "grammar" in asked or "notation" in asked:
        import llguidance

        return {"error": llguidance.LLMatcher.validate_grammar(asked.get("grammar") or library_text(asked["notation"]))}
    return {"errors": _violations(**asked) if asked else []}


def _rendered(template: dict[str, Any], messages: Any, more: dict[str, Any]) -> dict[str, Any]:
    from paceline.checkpoints import ChatTemplate

    return asdict(ChatTemplate(**template).apply_tracked(messages, **more))


def _violations(schema: Any, text: str) -> list[str]:
    """Return what a text violates of a JSON schema, at most `MOST_ERRORS` of it."""
    import jsonschema
    import referencing

    try:
        value = json.loads(text)
    except ValueError as error:
        return [f"not JSON: {error}"]
    schema = with_references(schema, strict=False)
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = kind(schema, registry=referencing.Registry())  # which follows no reference to elsewhere
    errors = zip(checker.iter_errors(value), range(MOST_ERRORS), strict=False)
    return [f"{violation.json_path}: {violation.message[:200]}" for violation, _ in errors]


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """End this process where the block takes longer. The time that others have the processor does not count, since a
    busy machine makes nothing more difficult. Where the system cannot count it, there is no limit here.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def as_line(value: dict[str, Any]) -> bytes:
    """Write a question or an answer as it is sent; halves of characters, which JSON may hold, stay what they are."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def main() -> None:
    """Answer lines until there are none."""
    for line in sys.stdin.buffer:
        try:
            asked = json.loads(line)
            with _limited(asked.pop("seconds")):
                reply = answer(asked)
        except Exception as error:
            why = str(error) if "paceline" in type(error).__module__ else f"{type(error).__name__}: {error}"
            reply = {"error": why, "errors": [why]}
        sys.stdout.buffer.write(as_line(reply))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
