"""`python -m lab peers`: install, list, remove and run other engines."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import raise_from_now_on
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from rich.status import Status

    from lab.peers import PeerRun

app = typer.Typer(
    name="peers", help="Other engines on the same weights: install, list, remove, run.", add_completion=False
)

STRUCTURED = "structured outputs"
"""What a peer without methods of decoding does."""

Name = Annotated[str, typer.Argument(metavar="NAME", help="A peer of `python -m lab peers list`.")]
NameOrAll = Annotated[str, typer.Argument(metavar="NAME|all", help="A peer, or all that can run on this machine.")]


@app.command("install")
def install(
    name: NameOrAll,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Interpreter to build on. Default: this one.")
    ] = None,
) -> None:
    """Make a peer's own virtual environment; some compile for minutes."""
    from rich.console import Console

    from lab.peers import install_peer, wanted_peers

    raise_from_now_on()
    console = Console(stderr=True, highlight=False)
    for one in wanted_peers(name):
        with console.status(f"{one}: starting") as status:
            folder = install_peer(one, python=python, say=partial(_say, status, one))
        print(f"{one}: ready in {folder}")


def _say(status: Status, name: str, line: str) -> None:
    status.update(f"{name}: {line[:100]}")


@app.command("list")
def show(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Peers, their methods, and which have an environment of their own."""
    from lab.peers import PEERS, peer_state

    rows: list[dict[str, Any]] = []
    for name, entry in PEERS.items():
        found = peer_state(name) if entry.driver else None
        rows.append(
            {
                "name": name,
                "installed": bool(found and found.ready),
                "packages": list(entry.packages),
                "methods": list(entry.modes),
                "dtypes": list(entry.dtypes),
                "folder": str(found.folder) if found else None,
            }
        )
    if as_json:
        print(json.dumps({"peers": rows}))
        return
    for row in rows:
        status = "by URL" if row["folder"] is None else "installed" if row["installed"] else "no environment"
        how = f"; `python -m lab peers install {row['name']}`" if status == "no environment" else ""
        print(f"{row['name']:<18} {status:<14} {', '.join(row['methods']) or STRUCTURED}{how}")


@app.command("remove")
def remove(name: NameOrAll) -> None:
    """Delete a peer's environment; all deletes the converted weights, too."""
    from lab.peers import PEERS, remove_converted, remove_peer, wanted_peers

    for one in [key for key, entry in PEERS.items() if entry.driver] if name == "all" else wanted_peers(name):
        print(f"{one}: {'removed' if remove_peer(one) else 'was not installed'}")
    if name == "all" and remove_converted():
        print("converted weights: removed")


@app.command("run")
def run(
    *,
    name: Name,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="FOLDER", help="Checkpoint. Default: the bundled target.")
    ] = None,
    method: Annotated[str, typer.Option("--method", help="plain, ngram or draft_model.")] = "plain",
    options: Annotated[
        str, typer.Option("--options", metavar="JSON", help="More options of the peer, as a JSON object.")
    ] = "{}",
    dtype: Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or int8.")] = "bfloat16",
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 1,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of the random prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="New tokens.")] = 128,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Timed runs, after one warm-up.")] = 3,
    compare: Annotated[bool, typer.Option("--compare/--no-compare", help="Compare the tokens with ours.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run one peer on a random prompt, greedily, and say its speed and whether its tokens are ours."""
    from statistics import median

    from lab.peers import open_peer
    from paceline.bench import BUNDLED_TARGET

    folder = Path(model) if model is not None else Path(BUNDLED_TARGET)
    given = _options(name, options) | {"method": method}
    prompt = random_prompt(folder if name != "openai" else Path(BUNDLED_TARGET), prompt_tokens)
    raise_from_now_on()
    with open_peer(name, model or folder, dtype=dtype, threads=threads, options=given) as peer:
        runs = [peer.generate(prompt, max_tokens) for _ in range(repeats + 1)][1:]
    report: dict[str, Any] = {
        "name": name,
        "version": runs[-1].version,
        "settings": dict(runs[-1].settings),
        "tokens": len(runs[-1].token_ids),
        "tokens_per_second": median(len(one.token_ids) / one.seconds for one in runs),
        "ttft": runs[-1].ttft,
        "agreement": _agreement(folder, dtype, prompt, runs[-1]) if compare and name != "openai" else None,
    }
    print(json.dumps(report) if as_json else words(report))


def words(report: dict[str, Any]) -> str:
    """The report of `run` in a line or two."""
    line = (
        f"{report['name']} ({report['version']}): {report['tokens_per_second']:.1f} tokens/s, {report['tokens']} "
        f"new tokens"
    )
    if report["agreement"] is None:
        return line
    found = report["agreement"]
    if found["first_difference"] is None:
        return f"{line}\ntokens: all {found['length']} equal ours"
    where = f"first difference at token {found['first_difference']}, {found['equal_share']:.1%} equal"
    return f"{line}\ntokens: {where} of {found['length']} (16-bit precisions may part at a near tie)"


def random_prompt(folder: Path, length: int) -> list[int]:
    """The same token ids for every peer and run, without the few first, special ones.

    Raises:
        ConfigError: no readable config.json with a vocab_size.
    """
    from random import Random

    try:
        size = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder} holds no config.json with a vocab_size; give the folder of a checkpoint"
        ) from error
    generator = Random(1)
    return [generator.randrange(min(4, size - 1), size) for _ in range(length)]


def _options(name: str, text: str) -> dict[str, Any]:
    """What --options holds.

    Raises:
        ConfigError: no JSON object, a key twice, or one that this peer does not read.
    """
    from lab.peers import peer_entry
    from paceline.utils import json_object, reject_unknown

    found = json_object("--options", text) or {}
    if "method" in found:
        raise ConfigError("--options holds a method; give it as --method")
    reject_unknown(f"--options of peer {name}", found, peer_entry(name).options)
    return found


def _agreement(folder: Path, dtype: str, prompt: list[int], run: PeerRun) -> dict[str, Any]:
    from dataclasses import asdict

    from lab.peers import agreement_with
    from paceline.bench import BUNDLED_TARGET
    from paceline.config import SamplingParams
    from paceline.llm import LLM

    rounded = dtype if dtype in ("int8", "int4") else None
    llm = LLM(
        str(folder),
        speculative_config=None,
        tokenizer=str(BUNDLED_TARGET),
        dtype="bfloat16" if rounded else dtype,
        quantization=rounded,
    )
    rule = SamplingParams(temperature=0.0, max_tokens=len(run.token_ids), ignore_eos=True)
    (found,) = llm.generate({"prompt_token_ids": prompt}, rule)
    return asdict(agreement_with(found.outputs[0].token_ids, run.token_ids))
