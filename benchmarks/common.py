"""What the benchmark scripts share: provenance, paired alternation with bootstrap intervals, a random-weights model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numba import njit

from paceline import bench
from paceline.bench import model_folder
from paceline.errors import ConfigError
from paceline.models.cpu import features
from paceline.utils import bootstrap, median_ratio, time_in_turn

RESULTS = Path(__file__).parent / "results"
sys.path.append(str(Path(__file__).parents[1]))  # of the laboratory
AVX2 = {
    "NUMBA_CPU_NAME": "haswell",
    "NUMBA_CPU_FEATURES": "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+movbe,+sse4.2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
"""Settings under which a process uses no instruction beyond AVX2; `keep_to_avx2` and `avx2.py` apply them."""

SEEN = """
import torch
from paceline.models.cpu import features
print("numba", *(name for name, has in features().items() if has))
print("PyTorch", torch.backends.cpu.get_cpu_capability())
torch.ones(64, 64).to_mkldnn()  # oneDNN says what it sees at its first use
"""
WIDER = {
    "AVX-VNNI": "avxvnni",
    "AVX-512": "avx512f",
    "VNNI": "avx512vnni",
    "BF16": "avx512bf16",
    "AMX": "amx-int8",
}
"""Instructions beyond AVX2 that kernels use, and LLVM's names of them."""

DIGITS = 8
"""Of a stored figure."""


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files; call it before anything is measured.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        return bench.pyplot()
    except ConfigError as error:
        sys.exit(str(error))


def provenance() -> dict[str, Any]:
    """Machine, versions, command, commit: what a figure must come with."""
    made = bench.provenance(seed=0)
    here, script = made["machine"], f"python benchmarks/{Path(sys.argv[0]).name}"
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "command": made["command"].replace("paceline", script, 1),
        "date": made["date"],
        "commit": commit,
        "python": made["python"],
        "packages": {"paceline": made["paceline"], **made["packages"]},
        **{name: here[name] for name in ("cpu", "cores", "threads", "gpu")},
        "instructions": instructions(),
    }


def instructions() -> str:
    """What the kernels of this process may use, in words."""
    has = features()
    wider = [name for name, feature in WIDER.items() if has.get(feature)]
    return ", ".join(["AVX2", *wider]) if wider else "AVX2 alone" if has.get("avx2") else "less than AVX2"


def keep_to_avx2() -> None:
    """Start this script anew under `AVX2`, unless it runs so already; programs that it starts then run so too.

    To be called before anything is computed.

    Raises:
        SystemExit: the settings did not take hold.
    """
    if any(os.environ.get(name) != value for name, value in AVX2.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | AVX2)
    if wrong := beyond_avx2():
        sys.exit(f"the settings for AVX2 did not take hold: {wrong}; a newer numba or PyTorch may have other ones")


def beyond_avx2() -> str:
    """Asks numba, PyTorch and oneDNN what they see under `AVX2`: what is not AVX2 alone, and empty if all is."""
    command = [sys.executable, "-c", SEEN]
    environment = os.environ | AVX2 | {"ONEDNN_VERBOSE": "1"}
    return wider(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def wider(seen: str) -> str:
    """Of what `SEEN` prints the lines that are not of AVX2 alone."""
    lines = seen.splitlines()
    said = {line.split()[0]: line for line in lines if line.startswith(("numba ", "PyTorch "))}
    said["oneDNN"] = next((line for line in lines if ",cpu,isa:" in line), "oneDNN says nothing")
    has = set(said["numba"].split())
    right = {
        "numba": "avx2" in has and not has & set(WIDER.values()),
        "PyTorch": said["PyTorch"].endswith(" AVX2"),
        "oneDNN": said["oneDNN"].endswith(" AVX2"),
    }
    return "; ".join(said[name] for name in said if not right[name])


def alternate(runs: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each callable, in turn, after one warm-up of each."""
    calls = {name: lambda _, call=call: call() for name, call in runs.items()}
    return {name: one[0].tolist() for name, one in time_in_turn(calls, [None], repeats).items()}


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Median of the paired ratios slow / fast with its 95 % bootstrap interval."""
    made = estimated([(np.array(slow) / np.array(fast))[:, None]], median_ratio)
    return {"median": made["value"], "low": made["low"], "high": made["high"]}


def estimated(columns: Sequence[Any], statistic: Callable[..., Any]) -> dict[str, float]:
    """A statistic of columns (prompts, repeats) with its 95 % bootstrap interval."""
    found = bootstrap(columns, statistic)
    if found is None:
        raise SystemExit("nothing was measured")
    return {key: getattr(found, key) for key in ("value", "low", "high")}


def read_bandwidth(device: str = "cpu") -> float:
    """Bytes per second of summing a large float32 tensor: the measured speed of reading memory."""
    return float(bench.read_bandwidth(torch.device(device))["bytes_per_second"])


@njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _sum_of(data: Any) -> int:
    """From four places at once: faster than from one on every processor seen so far."""
    part, found = len(data) // 4, 0
    for i in range(part):
        found ^= data[i] ^ data[i + part] ^ data[i + 2 * part] ^ data[i + 3 * part]
    return found


def reading_limit(size: int, threads: int, repeats: int = 15) -> float:
    """Bytes per second of reading an array of `size` bytes, each thread its share; the best of `repeats`.

    What a step of a model of this size cannot exceed, caches included.
    """
    data = np.ones(size // 8, np.int64)
    shares, times = np.array_split(data, threads), []
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(repeats + 1):
            start = perf_counter()
            list(pool.map(_sum_of, shares))
            times.append(perf_counter() - start)
    return data.nbytes / min(times[1:])


def random_llama(folder: Path) -> Path:
    """A randomly initialised 291M Llama (1024 wide, 24 layers, 16/8 heads, MLP 2816, vocabulary 8192 tied) in
    bfloat16.
    """
    return model_folder("291m", folder)


def kept(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """What a result file holds already, so that a part can be made anew by itself; without what says who made it."""
    return {key: value for key, value in _stored(folder / f"{name}.json").items() if key not in ("provenance", "parts")}


def save(name: str, result: Mapping[str, Any], folder: Path = RESULTS, *, parts: Iterable[str] = ()) -> Path:
    """Write a result with its provenance, in one piece.

    Args:
        name: of the file, without its ending.
        result: what it holds, beside what is added here: `provenance`, of this run, and `parts`, part -> provenance of
            the run that made it; "earlier" for what was there before parts were told apart.
        folder: where it lies.
        parts: what this run made, where the rest comes from the file (`kept`) and keeps the provenance that it has
            there. Without any, this run made everything.
    """
    folder.mkdir(exist_ok=True)
    path, made = folder / f"{name}.json", provenance()
    head: dict[str, Any] = {"provenance": made}
    if here := dict.fromkeys(parts, made):
        old = _stored(path)
        head["parts"] = old.get("parts", {"earlier": old["provenance"]} if old else {}) | here
        if all(key in head["parts"] for key in result):
            head["parts"].pop("earlier", None)
    draft = path.with_suffix(".part")
    rounded = json.loads(json.dumps({**head, **result}), parse_float=lambda text: float(f"{float(text):.{DIGITS}g}"))
    draft.write_text(json.dumps(rounded, indent=1) + "\n")
    draft.replace(path)
    print(f"wrote {path}")
    return path


def _stored(path: Path) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return known
