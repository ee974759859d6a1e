"""What retrieval costs: memory and time to build a datastore, to keep it open and to look something up; and the table
of `aded`.

The texts are the Python sources of this interpreter and its packages, in the tokens of the model; every twentieth file
is held out, and lookups are made at positions in these.

usage: datastore.py FOLDER [--model smollm2] [--tokens 1000000 10000000]
       datastore.py FOLDER --calibrate [SOURCES...]

The first measures; FOLDER keeps the ids and the datastores. The second prints how often the next token was seen, by
match length and count.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from common import RESULTS, save
from decoding import add_model, model_of

from paceline.checkpoints import Tokenizer
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.lookup import AdedDrafter
from paceline.drafters.retrieval import (
    BETWEEN,
    LONGEST_MATCH,
    TRUST,
    Datastore,
    DatastoreWriter,
    RestDrafter,
    Sources,
    longest_match,
    suffix_bound,
)
from paceline.tree import EMPTY_TREE, Budget
from paceline.utils import timed

HELD_OUT = 20
NODES, DEPTH, LOOKUPS, MOST = 16, 8, 2000, 128


def prepare(folder: Path, tokenizer: Tokenizer, tokens: int, sources: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Ids of at most `tokens` tokens of text and of the held-out files, -1 after each document."""
    paths = [folder / "ids.npy", folder / "held_out.npy"]
    if not all(path.exists() for path in paths):
        parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        number = count = 0
        texts = Sources.find(sources) if sources else Sources(tuple(python_files()), frozenset())
        for piece in texts.pieces():
            ids = tokenizer.encode(piece.text, add_special_tokens=False) if piece.text else []
            parts[number % HELD_OUT == 0].append(np.array([*ids, BETWEEN] if piece.last else ids, np.int32))
            number, count = number + piece.last, count + len(ids)
            if count > 1.1 * tokens:
                break
        folder.mkdir(parents=True, exist_ok=True)
        for path, found in zip(paths, parts, strict=True):
            np.save(path, np.concatenate(found))
    return np.load(paths[0]), np.load(paths[1])


def python_files() -> list[Path]:
    return [path for name in ("stdlib", "purelib") for path in sorted(Path(sysconfig.get_path(name)).rglob("*.py"))]


def memory() -> dict[str, int]:
    """Bytes of this process: its peak, its own memory, and pages of mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) * 1024 for name in ("VmHWM", "RssAnon", "RssFile")}


def build(folder: Path, tokenizer: Tokenizer, tokens: int) -> dict[str, Any]:
    """Build a datastore of so many tokens from ids."""
    ids = np.load(folder / "ids.npy", mmap_mode="r")[:tokens]
    with DatastoreWriter(folder / "warm", tokenizer) as writer:
        writer.add([1, 2, 3])
        writer.finish(1)

    def write() -> None:
        with DatastoreWriter(folder / str(tokens), tokenizer) as writer:
            for document in documents(ids):
                writer.add(document)
                writer.end_document()
            writer.finish(1)

    before = memory()
    seconds, peak = timed(write)[1], memory()["VmHWM"]
    size = (folder / str(tokens)).stat().st_size
    return {
        "seconds": seconds,
        "peak_bytes": peak,
        "peak_bytes_over_start": peak - before["RssAnon"] - before["RssFile"],
        "file_bytes": size,
    }


def documents(ids: np.ndarray) -> Iterator[np.ndarray]:
    ends = np.flatnonzero(ids == BETWEEN)
    for first, last in zip([0, *(ends + 1)], [*ends, len(ids)], strict=True):
        if last > first:
            yield ids[first:last]


def look_up(folder: Path, tokenizer: Tokenizer, tokens: int) -> dict[str, Any]:
    """Open a datastore and draft at places of held-out text, one at a time and sixteen at a time."""
    held_out = np.load(folder / "held_out.npy")
    args = DrafterArgs(vocab_size=tokenizer.vocab_size, index=0, max_context=2048, fingerprint=tokenizer.fingerprint)
    RestDrafter(args, datastore=str(folder / "warm"))
    before = memory()
    drafter, opened = timed(lambda: RestDrafter(args, datastore=str(folder / str(tokens))))
    rng = np.random.default_rng(0)
    places = [int(i) for i in rng.integers(64, len(held_out) - 1, LOOKUPS) if held_out[i - 64 : i + 1].min() >= 0]
    contexts = [Context("r", held_out[i - 64 : i].tolist(), 64) for i in places]
    found: dict[str, Any] = {"open_seconds": opened, "shards": len(drafter.store.shards)}
    for batch in (1, 16):
        groups = [drafter.begin(contexts[i : i + batch]) for i in range(0, len(contexts) - batch + 1, batch)]
        for turn in ("first", "again"):
            seconds = [proposing(drafter, group) / batch for group in groups]
            quantiles = np.quantile(seconds, [0.5, 0.99]) * 1e6
            found[f"microseconds_batch_{batch}_{turn}"] = {"median": quantiles[0], "p99": quantiles[1]}
    now = memory()
    return found | {name: now[name] - before[name] for name in ("RssAnon", "RssFile")}


def proposing(drafter: Any, states: Sequence[Any]) -> float:
    """Seconds of one proposal for all states."""
    budgets, so_far = [Budget(NODES, DEPTH)] * len(states), [EMPTY_TREE] * len(states)
    return timed(lambda: drafter.propose(states, budgets, so_far))[1]


def table(folder: Path, tokenizer: Tokenizer, tokens: int) -> dict[str, Any]:
    """Teach the table of `aded` so many tokens, then draft at places of held-out text."""
    ids, held_out = np.load(folder / "ids.npy", mmap_mode="r")[:tokens].tolist(), np.load(folder / "held_out.npy")
    ids = [token for token in ids if token != BETWEEN]
    drafter = AdedDrafter(DrafterArgs(vocab_size=tokenizer.vocab_size, index=0, max_context=2048))
    before, learned = memory(), drafter.tables.of("default")
    _, seconds = timed(lambda: learned.learn(ids))
    states = drafter.begin(
        [
            Context("r", held_out[i - 3 : i].tolist(), 3)
            for i in range(3, min(LOOKUPS, len(held_out)))
            if held_out[i - 3 : i].min() >= 0
        ]
    )
    spent = np.quantile([proposing(drafter, [state]) for state in states], [0.5, 0.99]) * 1e6
    return {
        "tokens": len(ids),
        "microseconds_per_token_learned": 1e6 * seconds / len(ids),
        "table_bytes": learned.nbytes,
        "RssAnon": memory()["RssAnon"] - before["RssAnon"],
        "rows_used": int((learned.rows[0] >= 0).sum()),
        "microseconds_batch_1": {"median": spent[0], "p99": spent[1]},
    }


def calibrate(folder: Path) -> None:
    """How often the next token of held-out text was among those seen after the longest match, by its length and their
    count.
    """
    store, held_out = Datastore(folder / "calibration"), np.load(folder / "held_out.npy")
    hits, asked = np.zeros((len(TRUST), LONGEST_MATCH + 1)), np.zeros((len(TRUST), LONGEST_MATCH + 1))
    rng = np.random.default_rng(0)
    for i in rng.permutation(np.arange(LONGEST_MATCH, len(held_out)))[:40_000].tolist():
        tail = np.ascontiguousarray(held_out[i - LONGEST_MATCH : i])
        tail = tail[int(np.flatnonzero(tail == BETWEEN).max(initial=-1)) + 1 :]
        if held_out[i] == BETWEEN or not len(tail):
            continue
        length = longest_match(store.data, store.shards, tail, 1)
        after = next_tokens(store, tail, length) if length else []
        if after:
            bucket = min(len(after).bit_length() - 1, len(TRUST) - 1)
            asked[bucket, length] += 1
            hits[bucket, length] += held_out[i] in after
    for bucket in range(len(TRUST)):
        spans = [(1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 31), (32, 32)]
        row = [(hits[bucket, a : b + 1].sum(), asked[bucket, a : b + 1].sum()) for a, b in spans]
        print(
            f"seen {2**bucket}+: "
            + ", ".join(f"{a}..{b}: {h / max(n, 1):.2f} of {n:.0f}" for (a, b), (h, n) in zip(spans, row, strict=True))
        )


def next_tokens(store: Datastore, tail: np.ndarray, length: int) -> list[int]:
    found: list[int] = []
    for text, order, n in store.shards.tolist():
        tokens, suffixes = store.data[text : text + n], store.data[order : order + n]
        first, last = (suffix_bound(tokens, suffixes, tail, length, above) for above in (0, 1))
        found += tokens[suffixes[first:last] + length].tolist()
    return found if len(found) <= MOST else [found[(2 * k + 1) * len(found) // (2 * MOST)] for k in range(MOST)]


def apart(folder: Path, model: str, step: str, tokens: int) -> Any:
    """One measurement in a process of its own, so that memory is its own."""
    done = subprocess.run(
        [sys.executable, __file__, str(folder), "--model", model, "--step", step, str(tokens)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    add_model(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--calibrate", type=Path, nargs="*")
    parser.add_argument("--prepare", action="store_true", help="only collect the ids")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    model = model_of(given.model)
    tokenizer = Tokenizer.load(model.tokenizer)
    if given.step:
        step, tokens = {"build": build, "look_up": look_up, "table": table}[given.step[0]], int(given.step[1])
        print(json.dumps(step(given.folder, tokenizer, tokens)))
        return
    ids, _ = prepare(given.folder, tokenizer, max(given.tokens), given.calibrate or [])
    if given.calibrate is not None:
        with DatastoreWriter(given.folder / "calibration", tokenizer) as writer:
            writer.add(ids)
            writer.finish(1)
        calibrate(given.folder)
    elif not given.prepare:
        sizes = {
            str(n): {step: apart(given.folder, given.model, step, n) for step in ("build", "look_up")}
            for n in given.tokens
            if n <= 1.05 * len(ids)
        }
        table_of_aded = apart(given.folder, given.model, "table", min(given.tokens[0], 1_000_000))
        result = {"tokenizer": model.name, "nodes": NODES, "depth": DEPTH, "sizes": sizes, "aded": table_of_aded}
        print(json.dumps(result, indent=1))
        save(f"datastore_{model.name}", result, given.results)


if __name__ == "__main__":
    main()
