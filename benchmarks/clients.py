"""Published clients against `paceline serve`: what each of their calls gets.

usage: clients.py [--model smollm2] [--only openai,litellm] [--fresh] [--folder FOLDER] [--timeout 600]

Every client is installed by its name, in the newest version that runs on this Python or Node, into an environment of
its own in the user cache (PyPI and npm are asked once; --fresh: again), and speaks to one server on this machine. The
programs are in `clients/`: chats, streams, tools (left to the model, required, named, strict, parallel, in loops with
results), answers as pydantic and zod models, both together, errors, responses, Anthropic's messages. A call holds if
the client accepts all of the answer and what it got is what was asked for: arguments of required and strict calls fit
their schema, parsed answers theirs. Where the choice is left to the model, text is as good as a call; which one it was
is told. Exits with 1 if a call does not hold.

--model: a file of `real_models.py`, with a chat template that knows tools, or a file or folder with one of its own.

Results: `results/clients.json`, and by `clients_table.py` the table in `docs/serving.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from clients_table import main as write_table
from common import RESULTS, save
from real_models import FILES, gguf_file
from served import child, free_port, paceline

from paceline.utils import user_cache

PROGRAMS = Path(__file__).parent / "clients"
NAME = "local"
"""Of the model, as clients ask for it: no name from which they conclude what it can do."""

VERSIONS = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"


@dataclass(frozen=True, slots=True)
class Client:
    """A client.

    Attributes:
        program: in `clients/`.
        packages: of PyPI, or of npm where the program is for Node.
    """

    program: str
    packages: tuple[str, ...]

    @property
    def for_node(self) -> bool:
        return self.program.endswith(".mjs")


CLIENTS = {
    "openai": Client("call_openai.py", ("openai",)),
    "openai (Node)": Client("call_openai.mjs", ("openai", "zod")),
    "anthropic": Client("call_anthropic.py", ("anthropic",)),
    "langchain": Client("call_langchain.py", ("langchain-openai", "langchain")),
    "instructor": Client("call_instructor.py", ("instructor",)),
    "openai-agents": Client("call_agents.py", ("openai-agents",)),
    "litellm": Client("call_litellm.py", ("litellm",)),
    "ai-sdk": Client("call_ai_sdk.mjs", ("ai", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "zod")),
}
Json = dict[str, Any]


# ------------------------------------------------------------------------------------------- environments


def environment(name: str, *, fresh: bool = False) -> Path:
    """The folder of a client's environment, made if it is not there yet.

    Raises:
        SystemExit: a package cannot be installed.
    """
    client = CLIENTS[name]
    folder = user_cache("clients") / name.replace(" ", "_")
    made, wanted = folder / "packages.json", json.dumps(client.packages)
    if fresh or not made.exists() or made.read_text() != wanted:
        print(f"installing {', '.join(client.packages)}", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for command in _installing(client, folder):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{' '.join(map(str, command))} failed: {done.stderr[-600:]}")
        made.write_text(wanted)
    return folder


def _installing(client: Client, folder: Path) -> list[list[Any]]:
    if client.for_node:
        (folder / "package.json").write_text('{"private": true}\n')
        return [["npm", "install", "--no-audit", "--no-fund", *client.packages]]
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *client.packages]
    return [[sys.executable, "-m", "venv", folder], pip]


def versions(client: Client, folder: Path) -> dict[str, str]:
    """Package -> version."""
    if client.for_node:
        packages = folder / "node_modules"
        return {n: json.loads((packages / n / "package.json").read_text())["version"] for n in client.packages}
    command = [folder / "bin" / "python", "-c", VERSIONS, *client.packages]
    found: dict[str, str] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


# ---------------------------------------------------------------------------------------------- running


def started(client: Client, folder: Path, address: str) -> subprocess.Popen[str]:
    """The program of a client, which sees nothing of this process's environment and cannot reach a hub."""
    given = {
        **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
        "CLIENTS_ADDRESS": address,
        "CLIENTS_MODEL": NAME,
        "NO_PROXY": "127.0.0.1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "ANONYMIZED_TELEMETRY": "False",
    }
    if client.for_node:
        for one in PROGRAMS.glob("*.mjs"):  # packages are looked for beside the program
            shutil.copy(one, folder)
        command = ["node", folder / client.program]
    else:
        command = [folder / "bin" / "python", PROGRAMS / client.program]
    errors = (folder / "errors.txt").open("w")
    return subprocess.Popen(
        [str(word) for word in command], env=given, text=True, stdout=subprocess.PIPE, stderr=errors, cwd=folder
    )


def calls_of(name: str, folder: Path, address: str, timeout: float) -> Iterator[Json]:
    """What each call of a client got; one more if its program did not end as it should."""
    program, number = started(CLIENTS[name], folder, address), 0
    clock = Timer(timeout, program.kill)
    clock.start()
    assert program.stdout is not None
    for line in program.stdout:
        if line.startswith('{"call"'):
            number += 1
            yield json.loads(line)
    program.wait()
    clock.cancel()
    if program.returncode or not number:
        why = (folder / "errors.txt").read_text()[-600:]
        yield {"call": "program", "result": "failed", "ok": False, "detail": f"exit {program.returncode}: {why}"}


def measured(name: str, folder: Path, address: str, timeout: float) -> Json:
    """A client's versions and calls."""
    calls = []
    for one in calls_of(name, folder, address, timeout):
        calls.append(one)
        print(f"{name}: {one['call']}: {one['result']} {one['detail']}", flush=True)
    return {"versions": versions(CLIENTS[name], folder), "calls": calls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="of real_models.py, or a file or folder")
    parser.add_argument("--only", help="clients, with commas between them; nothing is written then")
    parser.add_argument("--fresh", action="store_true", help="install the newest versions again")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--timeout", type=float, default=600, help="seconds that a client may take")
    given = parser.parse_args()
    names = given.only.split(",") if given.only else list(CLIENTS)
    if unknown := set(names) - set(CLIENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(CLIENTS)}")
    folders = {name: environment(name, fresh=given.fresh) for name in names}
    port, own = free_port(), given.model in FILES
    more: Json = {"chat_template": PROGRAMS / "tools.jinja"} if own else {}
    model = gguf_file(given.model) if own else given.model
    command = paceline(model, "auto", port=port, threads=2, served_model_name=NAME, **more)
    with child(command, threads=2, port=port) as server:
        address = f"http://127.0.0.1:{server.address[1]}"
        found = {name: measured(name, folder, address, given.timeout) for name, folder in folders.items()}
    if names == list(CLIENTS):
        save("clients", {"model": Path(model).name, "clients": found}, given.folder)
        if given.folder == RESULTS:
            write_table()
    failed = [f"{name}: {one['call']}" for name in names for one in found[name]["calls"] if not one["ok"]]
    total = sum(len(found[name]["calls"]) for name in names)
    print(f"{total - len(failed)} of {total} calls hold", *failed, sep="\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
