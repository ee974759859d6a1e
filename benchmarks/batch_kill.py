"""`paceline batch run` under `kill -9`: is every acknowledged line there once, and are the answers those of a calm run?

usage: batch_kill.py [--model bundled] [--kills 20] [--requests 96] [--tokens 32] [--seed 0] [--folder FOLDER]

In turn the run with a model of its own (`run`), the client of a server (`client`) and the server (`server`) are killed,
when a number of answers drawn at random is there, and up to 0.1 seconds later. A killed run or client is started again
with the same command; a killed server is started again, and its client must come through by itself. At every second
kill that hits a run or a client the last line is then cut at a place drawn at random, as a loss of power may leave it.

Half of the requests are greedy, half drawn at temperature 0.8 with seeds; drafting is on (`auto`). Compared are the
answers of every request (texts, reasons, counts of tokens), not ids, times, and what was drafted and cached. Exits with
1 if a line is missing, doubled or changed, or an answer differs. Results: `results/batch_kill_MODEL.json`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, save

from paceline.bench import bundled_prompts

KINDS = ("run", "client", "server")
PATIENCE = 300.0
"""Seconds that anything may take."""


def requests(count: int, tokens: int) -> Iterator[dict[str, Any]]:
    """Conversations that share a long beginning by fours, and completions."""
    texts = [one.prompt for one in bundled_prompts()]
    for number in range(count):
        body: dict[str, Any] = {"max_tokens": tokens // 2 + number % tokens, "ignore_eos": True}
        body |= {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        text = texts[number // 4 % len(texts)]
        if number % 4:
            system = {"role": "system", "content": text}
            body["messages"] = [system, {"role": "user", "content": f"Part {number}, please."}]
        else:
            body["prompt"] = text
        url = "/v1/chat/completions" if number % 4 else "/v1/completions"
        yield {"custom_id": f"request-{number}", "method": "POST", "url": url, "body": body}


class Files:
    """One output and its command.

    Args:
        more: arguments of the command.
    """

    def __init__(self, folder: Path, name: str, source: Path, more: Sequence[str]) -> None:
        self.out = folder / f"{name}.jsonl"
        self._log = folder / f"{name}.log"
        self._command = [sys.executable, "-m", "paceline", "batch", "run", str(source), "-o", str(self.out), *more]

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=self._log.open("ab"))

    def finish(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for its end, which must be a good one."""
        if process.wait(PATIENCE):
            sys.exit(f"{' '.join(self._command)} ended with {process.returncode}: {self._log.read_text()}")

    def data(self) -> bytes:
        return self.out.read_bytes() if self.out.exists() else b""

    def acknowledged(self) -> list[bytes]:
        data = self.data()
        return data[: data.rfind(b"\n") + 1].splitlines()

    def wait_for(self, process: subprocess.Popen[bytes], answers: int) -> None:
        while len(self.acknowledged()) < answers:
            if process.poll() is not None:
                sys.exit(f"it ended before {answers} answers: {self._log.read_text()}")
            time.sleep(0.002)

    def tear(self, chance: random.Random) -> None:
        """Cut the last line."""
        lines = self.data().splitlines(keepends=True)
        if lines:
            self.out.write_bytes(b"".join(lines[:-1]) + lines[-1][: chance.randrange(1, len(lines[-1]))])

    def answers(self) -> dict[str, Any]:
        """custom_id -> what must be equal in every run, in the order of the file."""
        found = {}
        for line in self.acknowledged():
            one = json.loads(line)
            body, usage = one["response"]["body"], one["response"]["body"]["usage"]
            counts = {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
            found[one["custom_id"]] = [one["id"], one["response"]["status_code"], body["choices"], counts]
        return found


class Server:
    """`paceline serve` on one port, as often as it is started."""

    def __init__(self, folder: Path, model: Sequence[str]) -> None:
        self._log, self._model, self._port = folder / "server.log", model, "0"
        self.start()
        while (found := re.search(r"http://\S+:(\d+)/v1", self._log.read_text())) is None:
            time.sleep(0.05)
        self.url, self._port = found[0], found[1]

    def start(self) -> None:
        command = [sys.executable, "-m", "paceline", "serve", *self._model, "--port", self._port]
        self._process = subprocess.Popen(command, stdout=self._log.open("ab"), stderr=subprocess.STDOUT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def serving(folder: Path, model: Sequence[str]) -> Iterator[Server]:
    server = Server(folder, model)
    try:
        yield server
    finally:
        server.kill()


@dataclass
class Kill:
    """What one kill left and what came of it."""

    kind: str
    acknowledged: int
    torn: bool
    kept: bool = False
    once: bool = False
    equal: bool = False

    @property
    def good(self) -> bool:
        return self.kept and self.once and self.equal


def killed(kind: str, files: Files, server: Server, answers: int, chance: random.Random, *, torn: bool) -> Kill:
    """Kill once so many answers are there, and let the batch come to its end."""
    process = files.start()
    files.wait_for(process, answers)
    time.sleep(chance.uniform(0, 0.1))
    if kind == "server":
        server.kill()
        lines = files.acknowledged()
        server.start()
    else:
        process.kill()
        process.wait()
        if torn:
            files.tear(chance)
        lines = files.acknowledged()
        process = files.start()
    files.finish(process)
    after = files.acknowledged()
    return Kill(kind, len(lines), torn, kept=all(after.count(line) == 1 for line in lines))


def check(kill: Kill, files: Files, names: list[str], wanted: dict[str, Any]) -> None:
    """Against the requests and the calm run."""
    found = [json.loads(line)["custom_id"] for line in files.data().splitlines()]
    kill.once = found == names
    kill.equal = files.answers() == wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled", help="bundled, or a folder")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    model = [] if args.model == "bundled" else ["--model", args.model]
    with tempfile.TemporaryDirectory() as place, serving(Path(place), model) as server:
        folder = Path(place)
        source = folder / "in.jsonl"
        lines = list(requests(args.requests, args.tokens))
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        names = [line["custom_id"] for line in lines]
        own, remote = [*model, "--max-num-seqs", "8"], ["--url", server.url, "--concurrency", "16"]

        wanted = {}
        for kind, more in (("run", own), ("client", remote)):
            files = Files(folder, f"calm-{kind}", source, more)
            files.finish(files.start())
            wanted[kind] = files.answers()
        alike = wanted["run"] == wanted["client"]
        distinct = len({json.dumps(answer[2]) for answer in wanted["run"].values()})
        print(f"calm runs with a model and with a server are equal: {alike}", flush=True)

        kills = []
        for number in range(args.kills):
            kind = KINDS[number % len(KINDS)]
            files = Files(folder, f"killed-{number}", source, remote if kind != "run" else own)
            torn = kind != "server" and number % 2 == 1
            kill = killed(kind, files, server, chance.randrange(1, len(names)), chance, torn=torn)
            check(kill, files, names, wanted["run"])
            kills.append(kill)
            print(f"{number + 1}. {asdict(kill)}", flush=True)
    result = {
        "model": args.model,
        "requests": args.requests,
        "distinct_answers": distinct,
        "calm_runs_equal": alike,
        "kills": [asdict(kill) for kill in kills],
        "good": sum(kill.good for kill in kills),
    }
    save(f"batch_kill_{Path(args.model).name}", result, args.folder)
    print(f"{result['good']} of {len(kills)} kills left every acknowledged line once and all answers as they were")
    sys.exit(0 if alike and result["good"] == len(kills) else 1)


if __name__ == "__main__":
    main()
