"""Attention to a part of a long text: what share of a step attention has, what a step costs that chooses what it reads,
and how far what it predicts is from the model.

usage: kv_selection.py --text FILE [--method double_sparsity | loopserve] [--model smollm2 | FILE.gguf]
                       [--lengths 2048 4096 8000] [--tokens 256]
                       [--label-channels N] [--channels FILE] [--positions 64] [--repeats 15] [--threads 2]
                       [--name kv_selection] [--folder FOLDER]

Per length, after the text's first tokens: plain steps with full attention, with the selection, and of a text of 16
tokens, in turn, so that a busy machine hits all alike. The share of attention is what a step takes beyond that of the
short text. Of loopserve a step that chooses anew is timed beside one that does not. Then the text's next --positions
tokens are fed one by one, with full attention and with the selection: the mean divergence KL(full || selected) of the
next token's distributions in nats, and how often both have the same likeliest token. Controls: of double_sparsity a
selection of as many tokens by the channels that carry least, of loopserve one that is made once, by the text's last
queries, and never again.

Keys and values of the text are computed once and copied, but for the last 64 tokens, which each reads itself (loopserve
along lines). Without --channels these are found on 16,384 tokens from behind those that are measured. What a model is
run by differs: loopserve runs by PyTorch's operators; to have full attention do so too, set PACELINE_COMPILED=0.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import RESULTS, alternate, ratio, save
from decoding import add_model, model_of
from safetensors.torch import load_file, save_file

from paceline.assembly import open_kv_selection
from paceline.checkpoints import Tokenizer, resolve
from paceline.models import ChannelStatistics, load_runner
from paceline.tree import EMPTY_TREE

SHORT, BLOCK, LEARNED, OWN = 16, 512, 16384, 64
FULL, SELECTED, LEAST, ONCE, CHOOSING = "full", "selected", "least channels", "chosen once", "choosing"


def channels_of(model: str, tokens: list[int], path: Path) -> None:
    """Find the channels of a model on a text."""
    statistics = ChannelStatistics()
    runner: Any = load_runner(model, kv_selection=statistics)
    for start in range(0, len(tokens), BLOCK):
        cache = runner.open()
        runner.extend([cache], [tokens[start : start + BLOCK]])
        runner.release(cache)
    statistics.save(path, name=model)


def reversed_file(path: Path, target: Path) -> None:
    """The same with the channels first that carry least."""
    save_file(
        {name: one.flip(-1).contiguous() for name, one in load_file(path).items()},
        target,
        {"format": "paceline channels 1"},
    )


@torch.inference_mode()
def with_keys_of(runner: Any, other: Any, tokens: list[int]) -> Any:
    """A sequence of a runner with the keys and values of another runner's, but for the last tokens of these."""
    cache, length = runner.open(), other.length - OWN
    cache.reserve(length)
    for mine, theirs in zip(cache.arena.layers, other.arena.layers, strict=True):
        mine[torch.from_numpy(cache.slot_index(0, length))] = theirs[torch.from_numpy(other.slot_index(0, length))]
    cache.length = length
    runner.extend([cache], [tokens[length : other.length]])
    return cache


def departures(runners: Mapping[str, Any], caches: Mapping[str, Any], tokens: list[int]) -> dict[str, dict[str, float]]:
    """Of each selection beside full attention, while tokens are fed one by one."""
    found: dict[str, list[tuple[float, bool]]] = {name: [] for name in runners if name != FULL}
    for token in tokens:
        rows = {}
        for name, runner in runners.items():
            rows[name] = runner.score([caches[name]], [token], [EMPTY_TREE]).logits[0].float().log_softmax(-1)
            runner.commit([caches[name]], [()])
        for name, seen in found.items():
            full, other = rows[FULL], rows[name]
            divergence = float((full.exp() * (full - other)).sum())
            seen.append((divergence, int(full.argmax()) == int(other.argmax())))
    return {
        name: {"KL": float(np.mean([one for one, _ in seen])), "same": float(np.mean([same for _, same in seen]))}
        for name, seen in found.items()
    }


def steps(runners: Mapping[str, Any], caches: Mapping[str, Any], repeats: int) -> dict[str, Any]:
    """Median milliseconds of plain steps, attention's share of a full one, and full over selected with its interval."""
    short = runners[FULL].open()
    runners[FULL].extend([short], [list(range(7, 7 + SHORT))])

    def step(name: str) -> Any:
        runner, cache = (runners[FULL], short) if name == "short" else (runners[name], caches[name])
        return lambda: runner.score([cache], [7], [EMPTY_TREE])

    def choosing() -> None:
        caches[SELECTED].choices.clear()
        step(SELECTED)()

    timed = {name: step(name) for name in ("short", FULL, SELECTED)}
    if hasattr(caches[SELECTED], "choices"):
        timed[CHOOSING] = choosing
    times = alternate(timed, repeats)
    runners[FULL].release(short)
    median = {name: 1e3 * float(np.median(one)) for name, one in times.items()}
    return {
        "milliseconds": median,
        "share of attention": 1 - median["short"] / median[FULL],
        "full over selected": ratio(times[FULL], times[SELECTED]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--method", choices=("double_sparsity", "loopserve"), default="double_sparsity")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8000])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--label-channels", type=int)
    parser.add_argument("--channels", type=Path)
    parser.add_argument("--positions", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--name", default="kv_selection")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = args.model if args.model.endswith(".gguf") else str(model_of(args.model).folder)
    with TemporaryDirectory() as folder:
        save(args.name, measured(args, model, Path(folder)), args.folder)


def chosen_by(args: argparse.Namespace, model: str, learned: list[int], folder: Path) -> dict[str, dict[str, Any]]:
    """The options of the selection and of its control."""
    if args.method == "loopserve":
        return {SELECTED: {}, ONCE: {"interval": None}}
    channels = args.channels or folder / "channels.safetensors"
    if args.channels is None:
        channels_of(model, learned, channels)
    reversed_file(channels, folder / "least.safetensors")
    files = {SELECTED: channels, LEAST: folder / "least.safetensors"}
    return {name: {"channels": str(file), "label_channels": args.label_channels} for name, file in files.items()}


def measured(args: argparse.Namespace, model: str, folder: Path) -> dict[str, Any]:
    """All lengths."""
    longest = max(args.lengths)
    tokens = Tokenizer.load(resolve(model)).encode(args.text.read_text(encoding="utf-8"))
    runners: dict[str, Any] = {FULL: load_runner(model)}
    for name, chosen in chosen_by(args, model, tokens[longest + args.positions :][:LEARNED], folder).items():
        method = open_kv_selection({"method": args.method, "tokens": args.tokens, **chosen}, exactness="auto")
        runners[name] = load_runner(model, kv_selection=method)
    about = {"model": Path(args.model).name, "method": args.method, "tokens": args.tokens, "text": args.text.name}
    found: dict[str, Any] = about | {"passes": {name: runner.info.passes for name, runner in runners.items()}}
    whole = runners[FULL].open()
    for length in sorted(args.lengths):
        while whole.length < length:
            runners[FULL].extend([whole], [tokens[whole.length : min(whole.length + BLOCK, length)]])
        caches = {name: with_keys_of(runner, whole, tokens) for name, runner in runners.items()}
        one = steps(runners, caches, args.repeats)
        one["departures"] = departures(runners, caches, tokens[length : length + args.positions])
        found[str(length)] = one
        print(length, one, flush=True)
        for name, cache in caches.items():
            runners[name].release(cache)
    return found


if __name__ == "__main__":
    main()
