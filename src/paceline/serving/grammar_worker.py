"""A process that reads schemas and grammars of strangers, so that one that hangs or crashes takes nothing else along.

It reads a line of JSON from standard input and writes one: {"grammar": text} -> {"error": text}, empty where it
compiles; {"schema": ..., "text": ...} -> {"errors": [text, ...]}, what the text violates.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

MOST_ERRORS = 8
STACK_BYTES = 2**21
"""Less than the server has, so that what nests too deeply ends this process and not that one."""


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """To one line."""
    if "grammar" in asked:
        import llguidance

        return {"error": llguidance.LLMatcher.validate_grammar(asked["grammar"])}
    import jsonschema
    import referencing

    try:
        found = json.loads(asked["text"])
    except ValueError as error:
        return {"errors": [f"not JSON: {error}"]}
    kind = jsonschema.validators.validator_for(asked["schema"], default=jsonschema.Draft202012Validator)
    checker = kind(asked["schema"], registry=referencing.Registry())  # which follows no reference to elsewhere
    errors = [
        f"{one.json_path}: {one.message[:200]}"
        for one, _ in zip(checker.iter_errors(found), range(MOST_ERRORS), strict=False)
    ]
    return {"errors": errors}


def main() -> None:
    """Answer lines until there are none."""
    for line in sys.stdin.buffer:
        try:
            found = answer(json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}", "errors": [f"{type(error).__name__}: {error}"]}
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
