"""Constraints of clients are compiled, and texts checked, in processes that can be killed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections import OrderedDict
from typing import Any, Final

from paceline.config import StructuredOutputsParams
from paceline.errors import ConfigError
from paceline.grammar import grammar_text
from paceline.serving.protocol import ApiError

WORKERS: Final = 2
COMPILE_SECONDS, CHECK_SECONDS, START_SECONDS = 2.0, 1.0, 20.0
MAX_GRAMMAR: Final = 256 * 1024
"""Characters of a constraint in the library's notation."""

MAX_QUEUE: Final = 64
KNOWN: Final = 1024
"""Constraints that are remembered to compile."""


class Grammars:
    """Asks the processes, which start with the first constraint and are replaced when one is killed."""

    def __init__(self) -> None:
        self._free: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.Queue()
        for _ in range(WORKERS):
            self._free.put_nowait(None)
        self._waiting = 0
        self._known: OrderedDict[str, str] = OrderedDict()

    async def check(self, params: StructuredOutputsParams, param: str) -> None:
        """Compile a constraint.

        Args:
            param: the field that it is in.
        Raises:
            ApiError: it does not compile, is too large, or takes too long.
        """
        try:
            text = grammar_text(params)
        except (ConfigError, RecursionError) as error:
            raise ApiError(str(error) or "the constraint is nested too deeply", param=param) from None
        if len(text) > MAX_GRAMMAR:
            raise ApiError(f"the constraint must have at most {MAX_GRAMMAR} characters", param=param)
        key = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
        if key in self._known:
            self._known.move_to_end(key)
            return
        found = await self._ask({"grammar": text}, COMPILE_SECONDS)
        if found is None:
            raise ApiError("the constraint takes too long to compile, or too much memory; make it simpler", param=param)
        if not found["error"]:  # what the error is, the engine says in its own words
            self._known[key] = ""
            while len(self._known) > KNOWN:
                self._known.popitem(last=False)

    async def errors(self, schema: Any, text: str) -> list[str]:
        """What a text violates of a JSON schema."""
        found = await self._ask({"schema": schema, "text": text}, CHECK_SECONDS)
        return ["the schema takes too long to check"] if found is None else list(found["errors"])

    async def _ask(self, asked: dict[str, Any], seconds: float) -> dict[str, Any] | None:
        if self._waiting >= MAX_QUEUE:
            raise ApiError("too many constraints are compiled; try again later", status=429, code="queue_full",
                           headers={"Retry-After": "1"})  # fmt: skip
        self._waiting += 1
        try:
            process = await self._free.get()
        finally:
            self._waiting -= 1
        try:
            process = process or await self._started()
            return await asyncio.wait_for(self._line(process, asked), seconds)
        except (TimeoutError, ConnectionError, ValueError):
            if process is not None:
                await _ended(process)
            process = None
            return None
        except asyncio.CancelledError:  # with an answer to come that nobody waits for
            if process is not None and process.returncode is None:
                process.kill()
            process = None
            raise
        finally:
            self._free.put_nowait(process)

    async def _started(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "paceline.serving.grammar_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=2**22,
        )
        await asyncio.wait_for(self._line(process, {"grammar": 'start: "a"'}), START_SECONDS)
        return process

    @staticmethod
    async def _line(process: asyncio.subprocess.Process, asked: dict[str, Any]) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        found: dict[str, Any] = json.loads(line)  # an empty line of a process that has died is no JSON
        return found

    async def close(self) -> None:
        """End the processes that are idle; others end with their questions."""
        while not self._free.empty():
            process = self._free.get_nowait()
            if process is not None:
                await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()
