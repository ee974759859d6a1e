"""The flags of `paceline bench`, as annotations, and what their texts mean.

In: what the user typed. Out: numbers, `bench.records.Options`. Not here: the command (`cli.bench`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.bench.run import Options

DEFAULT: dict[str, Any] = {"limit": None, "max_tokens": 128, "repeats": 3}
QUICK: dict[str, Any] = {"limit": 8, "max_tokens": 64, "repeats": 3}


def _flag(kind: Any, panel: str | None, *names: str, metavar: str | None = None, help: str, **limits: Any) -> Any:
    return Annotated[kind, typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **limits)]


WORKLOAD_HELP = (
    "PATH, FORMAT=PATH, synthetic:prompt=128,output=64,entropy=8 or bundled; may be repeated. Formats: spec-bench, "
    "mt-bench, mt-redundant, humaneval, gsm8k, jsonl, text, trace. Default: the prompts that ship with the package."
)
SHAPE_HELP = "A random-weights model: 291m, 1b, 8b or llama:hidden=1024,layers=24,...; also --model random:SHAPE."
PEERS_HELP = (
    "Other engines on the same prompts, in turn with ours: all, NAME, NAME:METHOD between commas, or JSON with "
    "options; may be repeated. `paceline bench peers list` shows them."
)
DIAL_TOKENS_HELP = "Speculative tokens of the dial; default: the controller's choice."
SETTING_HELP = (
    'A setting to measure, as ngram or {"method": "ngram"}; may be repeated. Default: auto and all that run here.'
)

Workloads = _flag(list[str] | None, "Workload", "--workload", "-w", metavar="WORKLOAD", help=WORKLOAD_HELP)
Limit = _flag(int | None, "Workload", "--limit", metavar="N", min=1, help="Conversations per workload.")
Raw = _flag(bool, "Workload", "--raw", help="No chat template.")
MaxTokens = _flag(
    int | None, "Workload", "--max-tokens", metavar="N", min=1, max=65536, help="Most new tokens; default 128."
)
IgnoreEos = _flag(bool, "Workload", "--ignore-eos", help="Go on after an end token.")
DraftModel = _flag(
    str | None, "Settings", "--draft-model", metavar="MODEL", help="Draft model for methods that take one."
)
Dial = _flag(
    str, "Settings", "--dial", metavar="P,P", help="Acceptance dial: measure at these acceptances, as 0.6,0.8."
)
DialTokens = _flag(int | None, "Settings", "--dial-tokens", metavar="N", min=1, max=64, help=DIAL_TOKENS_HELP)
RandomShape = _flag(str | None, "Model", "--random-shape", metavar="SHAPE", help=SHAPE_HELP)
Peers = _flag(list[str] | None, "Peers", "--peers", metavar="all|NAME,NAME", help=PEERS_HELP)
PeerUrl = _flag(
    str | None, "Peers", "--peer-url", metavar="URL", help="An OpenAI-compatible endpoint, as http://host:8000/v1."
)
PeerModel = _flag(str | None, "Peers", "--peer-model", metavar="NAME", help="Name of the model at that endpoint.")
Batch = _flag(str, "Sweep", "--batch", metavar="N,N", help="Batch sizes.")
Temperature = _flag(str, "Sweep", "--temperature", metavar="T,T", help="Temperatures.")
Load = _flag(str, "Sweep", "--load", metavar="R,R", help="Rates of a trace's replay: 2 is twice as fast as recorded.")
Repeats = _flag(
    int | None, "Sweep", "--repeats", metavar="N", min=1, max=1000, help="Timed runs of every prompt; default 3."
)
Quick = _flag(bool, "Sweep", "--quick", help="8 conversations, 64 tokens: under a minute on the bundled model.")
Seed = _flag(int, None, "--seed", metavar="INT", min=0, max=2**53, help="Of sampling and of synthetic prompts.")
Output = _flag(Path | None, None, "--json", "--output", "-o", metavar="FILE", help="Write the JSON document there.")
Html = _flag(Path | None, None, "--html", metavar="FILE", help="Write the report there, one self-contained page.")


def repeated_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Make -s / --speculative-config of a command repeatable, none being allowed."""
    signature, made = inspect.signature(command), []
    repeatable = _flag(list[str] | None, "Settings", "--speculative-config", "-s", metavar="JSON", help=SETTING_HELP)
    for parameter in signature.parameters.values():
        own = parameter.name != "speculative_config"
        made.append(parameter if own else parameter.replace(default=None, annotation=repeatable))
    command.__signature__ = signature.replace(parameters=made)  # type: ignore[attr-defined]  # read by typer
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in made}
    return command


def options(
    *, quick: bool, batch: str, temperature: str, load: str, seed: int, ignore_eos: bool, raw: bool, **sizes: int | None
) -> Options:
    """How the benchmark runs; what was not typed takes its default, a smaller one with --quick.

    Args:
        sizes: limit, max_tokens, repeats.
    Raises:
        ConfigError: a list with something else than numbers in their range.
    """
    from paceline.bench.run import Options

    chosen = (QUICK if quick else DEFAULT) | {name: value for name, value in sizes.items() if value is not None}
    return Options(
        **chosen,
        batches=tuple(int(n) for n in numbers("--batch", batch, 1, 1024, whole=True)) or (1,),
        temperatures=numbers("--temperature", temperature, 0.0, 10.0) or (0.0,),
        rates=numbers("--load", load, 1e-6, 1e6) or (1.0,),
        seed=seed,
        ignore_eos=ignore_eos,
        chat=not raw,
        quick=quick,
    )


def numbers(flag: str, text: str, low: float, high: float, *, whole: bool = False) -> tuple[float, ...]:
    """Numbers between commas, each once.

    Raises:
        ConfigError: no number, or one outside low..high.
    """
    found: list[float] = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        try:
            value = int(part) if whole else float(part)
        except ValueError:
            value = float("nan")
        if not low <= value <= high:
            kind = "integers" if whole else "numbers"
            raise ConfigError(f"{flag} must be {kind} in {low:g}..{high:g} between commas, got {text[:100]!r}")
        if value not in found:
            found.append(value)
    return tuple(found)
