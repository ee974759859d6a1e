"""llama.cpp's server on a checkpoint's weights as F16, for `serving_load.py`.

usage: llama_server.py install | FOLDER

`install` makes an environment beside those of `python -m lab peers`, with the package xllamacpp, whose wheel holds the
server as it is, compiled for AVX2. A file `bin/llama-server` that is put there, built for this processor, is
preferred. `FOLDER` serves a checkpoint, to try it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import common  # noqa: F401  # puts the laboratory on the path
from served import Child, child, free_port

from lab.peers import open_peer, peers_home

PACKAGE = "xllamacpp==2026.10.11549"
HOME = peers_home() / "llama-server"
PYTHON, BINARY = HOME / "bin" / "python", HOME / "bin" / "llama-server"
COMPLETION = "/completion"
CONTEXT = 1024
"""Tokens of a slot."""

START = """
import json, sys, threading
import xllamacpp as x
given = json.loads(sys.argv[1])
params = x.CommonParams()
params.model.path, params.hostnames, params.port = given["file"], ["127.0.0.1"], given["port"]
params.n_parallel, params.n_ctx, params.kv_unified = given["slots"], given["slots"] * given["context"], False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given["threads"]
params.n_gpu_layers, params.warmup = 0, True
server = x.Server(params)
threading.Event().wait()
"""


def f16_file(folder: Path) -> Path:
    """The weights as llama.cpp reads them, with a vocabulary without words: prompts are token ids."""
    with open_peer("llama.cpp", folder, dtype="float16", threads=1, options={"method": "plain"}):
        pass
    return max((peers_home() / "converted").glob("*/f16.gguf"), key=lambda path: path.stat().st_atime)


@contextmanager
def serve_llama(folder: Path, *, slots: int, threads: int) -> Iterator[Child]:
    """A running server.

    Raises:
        SystemExit: it is not installed.
    """
    if not PYTHON.exists():
        raise SystemExit("llama-server is not installed; run `python benchmarks/llama_server.py install`")
    file, port = f16_file(folder), free_port()
    if BINARY.exists():
        words = [BINARY, "-m", file, "--port", port, "-np", slots, "-c", slots * CONTEXT, "-t", threads, "-ngl", 0]
    else:
        given = {"file": str(file), "port": port, "slots": slots, "context": CONTEXT, "threads": threads}
        words = [PYTHON, "-c", START, json.dumps(given)]
    with child(words, threads=threads, port=port, kind="llama") as found:
        yield found


def llama_version() -> str:
    if BINARY.exists():
        done = subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=False)
        return next(line for line in (done.stderr + done.stdout).splitlines() if line.startswith("version"))
    return PACKAGE


def main() -> None:
    (word,) = sys.argv[1:] or ("",)
    if word == "install":
        subprocess.run([sys.executable, "-m", "venv", HOME], check=True)
        subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", PACKAGE], check=True)
    elif word:
        with serve_llama(Path(word), slots=4, threads=2) as found:
            print("listens on", found.address)
            found.process.wait()
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
