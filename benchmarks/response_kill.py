"""`/v1/responses` under `kill -9` of the server: is every acknowledged response stored once, and is the conversation
that goes on the one that an undisturbed server has?

usage: response_kill.py [--model bundled] [--kills 20] [--conversations 6] [--turns 6] [--seed 0] [--folder FOLDER]

Conversations run side by side, every turn on `previous_response_id`, half of the answers streamed, half drawn with
seeds. When a number of answers drawn at random is there, and up to 0.1 seconds later, the server is killed and started
again on the same file; a client that lost its answer asks again for that turn alone. A response is acknowledged by its
body, or by the event that ends its stream. Counted after each kill: acknowledged responses that are stored as they were
sent, those stored that nobody was told of (at most one for each answer that was lost), answers equal to the calm run's,
and whether SQLite finds its file whole. Exits with 1 if one is missing or differs. Results:
`results/response_kill_MODEL.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sqlite3
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from common import RESULTS, save
from served import Child, Json, Reply, ask, free_port, get, paceline, parsed

from paceline.bench import bundled_prompts

PATH = "/v1/responses"
UNREADY = 503
"""Status of answers while the model is loaded: the server listens before."""

PATIENCE = 300.0
"""Seconds that all conversations may take."""


class Server:
    """`paceline serve` on one port and one file, as often as it is started."""

    def __init__(self, model: str | None, file: Path) -> None:
        self._port = free_port()
        self._command = paceline(model, "auto", port=self._port, threads=2, response_file=file)
        self.start()

    def start(self) -> None:
        process = Popen(self._command, stdout=DEVNULL, stderr=DEVNULL, text=True)
        self.child = Child(process, ("127.0.0.1", self._port))
        self.child.wait_until_ready()

    def kill(self) -> None:
        self.child.process.kill()
        self.child.process.wait()


@contextmanager
def serving(model: str | None, file: Path) -> Iterator[Server]:
    server = Server(model, file)
    try:
        yield server
    finally:
        server.kill()


@dataclass
class Talk:
    """What clients have: bodies by conversation; how many answers were lost on the way, and how many came before the
    kill.
    """

    bodies: list[list[Json]]
    lost: int = 0
    before: int = 0

    @property
    def acknowledged(self) -> list[Json]:
        return [body for one in self.bodies for body in one]

    def texts(self) -> list[list[Any]]:
        """What must be equal in every run."""
        return [[[item["content"] for item in body["output"]] for body in one] for one in self.bodies]


def asked(conversation: int, turn: int, previous: str | None) -> Json:
    """The body of a request."""
    prompts = bundled_prompts()
    text = prompts[(5 * conversation + turn) % len(prompts)].prompt[:300]
    body: Json = {"input": text, "max_output_tokens": 12 + 3 * turn, "ignore_eos": True, "stream": turn % 2 == 0}
    body |= {"temperature": 0.8, "seed": turn} if conversation % 2 else {"temperature": 0}
    return body | ({} if previous is None else {"previous_response_id": previous})


def acknowledged(reply: Reply) -> Json | None:
    """The response that a reply is, or that its last event brings; None where it was cut off before.

    Raises:
        ValueError: it was cut off in the middle of an event or a body.
        ConnectionRefusedError: the server loads its model, and is to be asked again.
    """
    if not reply.raw:
        return None
    if parsed(reply).status == UNREADY:
        raise ConnectionRefusedError
    if reply.status != 200:
        sys.exit(f"a request was refused: {reply.raw[:400]!r}")
    if b"text/event-stream" not in reply.raw.partition(b"\r\n\r\n")[0]:
        return reply.body
    ends = [one["response"] for one in reply.events if one["type"] in ("response.completed", "response.incomplete")]
    return ends[-1] if ends else None


async def converse(server: Server, talk: Talk, conversation: int, turns: int) -> None:
    """All turns of a conversation, each asked for until it is acknowledged."""
    mine = talk.bodies[conversation]
    while len(mine) < turns:
        body = asked(conversation, len(mine), mine[-1]["id"] if mine else None)
        try:
            found = acknowledged(await ask(server.child.address, PATH, body))
        except ConnectionRefusedError:
            await asyncio.sleep(0.05)
            continue
        except (OSError, ValueError):
            found = None
        if found is None:
            talk.lost += 1
        else:
            mine.append(found)


async def talked(server: Server, given: argparse.Namespace, kill_at: int | None = None, delay: float = 0.0) -> Talk:
    """All conversations, with a kill once so many answers are there."""
    talk = Talk([[] for _ in range(given.conversations)])

    async def killing() -> None:
        while kill_at is not None and len(talk.acknowledged) < kill_at:
            await asyncio.sleep(0.001)
        if kill_at is not None:
            await asyncio.sleep(delay)
            server.kill()
            talk.before = len(talk.acknowledged)
            await asyncio.to_thread(server.start)

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(killing(), *(converse(server, talk, i, given.turns) for i in range(given.conversations)))
    return talk


@dataclass
class Kill:
    """What one kill left and what came of it.

    Attributes:
        acknowledged: answers at the kill. lost: answers that clients did not get. untold: responses that are stored and
            that nobody was told of. missing: acknowledged ones that are not stored, or not as they were sent.
    """

    acknowledged: int
    lost: int
    untold: int
    missing: int
    whole: bool
    equal: bool

    @property
    def good(self) -> bool:
        return not self.missing and self.untold <= self.lost and self.whole and self.equal


async def judged(server: Server, file: Path, talk: Talk, told: set[str], wanted: list[list[Any]]) -> Kill:
    """Against the store, over HTTP and in the file, and against the calm run.

    Args:
        told: ids of all responses that anybody knows of; those of the talk are added.
    """
    missing = 0
    for body in talk.acknowledged:
        reply = await get(server.child.address, f"{PATH}/{body['id']}")
        missing += reply.status != 200 or reply.body != body
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as base:
        stored = [row[0] for row in base.execute("SELECT id FROM responses")]
        whole = base.execute("PRAGMA integrity_check").fetchone()[0] == "ok" and len(stored) == len(set(stored))
        whole = whole and base.execute("SELECT sum(r.bytes) = t.bytes FROM responses r, total t").fetchone()[0] == 1
    told |= {body["id"] for body in talk.acknowledged}
    untold = set(stored) - told
    told |= untold
    return Kill(talk.before, talk.lost, len(untold), missing, whole, talk.texts() == wanted)


async def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The calm run and the killed ones."""
    model, chance = None if given.model == "bundled" else given.model, random.Random(given.seed)
    file, told = folder / "responses.db", set[str]()
    with serving(model, file) as server:
        calm = await talked(server, given)
        wanted = calm.texts()
        first = await judged(server, file, calm, told, wanted)
        other = talked_differently(wanted)
        if not first.good or (await judged(server, file, calm, told, other)).good:
            sys.exit(f"the calm run is not what it says, or a wrong answer would not be seen: {first}")
        kills = []
        for number in range(given.kills):
            at = chance.randrange(1, given.conversations * given.turns)
            talk = await talked(server, given, at, chance.uniform(0, 0.1))
            kills.append(await judged(server, file, talk, told, wanted))
            print(f"{number + 1}. {asdict(kills[-1])}", flush=True)
    return {
        "model": given.model,
        "answers": len(calm.acknowledged),
        "distinct_answers": len({json.dumps(text) for one in wanted for text in one}),
        "kills": [asdict(kill) for kill in kills],
        "good": sum(kill.good for kill in kills),
    }


def talked_differently(texts: list[list[Any]]) -> list[list[Any]]:
    """The same with one answer that is another conversation's: the control."""
    return [[texts[1][0], *texts[0][1:]], *texts[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="bundled, or a folder")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--conversations", type=int, default=6)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = asyncio.run(measured(given, Path(place)))
    save(f"response_kill_{Path(given.model).name}", result, given.folder)
    print(f"{result['good']} of {given.kills} kills left every acknowledged response once, and answers as they were")
    sys.exit(0 if result["good"] == given.kills else 1)


if __name__ == "__main__":
    main()
