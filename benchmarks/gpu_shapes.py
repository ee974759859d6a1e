"""Random-weights Llamas of 1B and 8B in bfloat16: plain decoding, the acceptance dial and transformers, in turn, in one
run.

usage: gpu_shapes.py [--device cuda] [--shapes 8b,1b] [--batches 1,8] [--acceptance 0.8,0.95,0.5] [--fixed 3,7,15]
                     [--tokens 64] [--repeats 3] [--budget 240] [--folder results]

plain         tokens/s of whole calls and seconds of a step, each with its share of the memory-bandwidth limit
dial          `auto` and fixed lengths against plain decoding, drafts being right with a chosen probability (see
              dial.py)
transformers  `generate` with a dynamic cache, a static one, and a static one compiled, against plain decoding

The weights are made on the device; transformers gets views of them and we a second copy of those of attention. In a
random model the best two tokens are often nearly tied, and where engines round differently their texts part at once;
here the embedding outweighs the layers, and every token follows from the one before. Outputs must equal those of plain
decoding, or differ first at a near tie (counted); otherwise a cell keeps the reason in place of times, as it does where
transformers fails. transformers rounds differently at every layer: a tie is twice as wide there, and equal tokens are
counted.

Every cell is written when it is done, those that say most first, and a run that was stopped goes on where it was, on
the same device. Ends with 0 when all is done, 75 when the budget of seconds is spent before, 1 where outputs were
wrong. The shape `tiny` tries everything on the CPU. Results: `results/gpu_shapes_DEVICE.json`.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, cast

import torch
from common import RESULTS, alternate, kept, ratio, read_bandwidth, save
from decoding import decode, must_agree
from dial import REQUESTS, Dial, words
from given_weights import GivenLLM, open_transformers, random_weights, transformers_names

from paceline import SamplingParams
from paceline.bench import RandomShape, parse_shape, shape_config
from paceline.bench.run import dial_registered
from paceline.checkpoints import spec_from_config
from paceline.tree import EMPTY_TREE
from paceline.utils import repeated, timed
from paceline.verify import TIE_UNITS, first_difference

TINY = RandomShape(hidden=64, layers=2, heads=4, kv_heads=2, mlp=128, vocab=6200, context=512)
PROMPT = 64
COMPILE_SECONDS = 75.0
"""What compiling a shape takes at most on a GPU; it is not begun with less of the budget left."""

COMPILED = "static cache, compiled"
FORMS: dict[str, dict[str, Any]] = {
    COMPILED: {"cache_implementation": "static"},
    "dynamic cache": {"disable_compile": True},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
}
"""Forms of transformers' `generate` -> its options; by itself it compiles what has a static cache."""

UNFINISHED = 75

Tokens = list[list[int]]
Part = tuple[str, float | str | None]


def compiled_frames() -> int:
    """How many frames were given to torch.compile so far."""
    from torch._dynamo.utils import counters

    return int(counters["frames"]["total"])


class Shape(Dial):
    """One shape for both engines, its requests, and what plain decoding says to them; see `Dial`, whose attributes it
    makes itself.

    Args:
        most: the largest batch.
    """

    def __init__(self, name: str, shape: RandomShape, device: str, most: int, tokens: int) -> None:
        config, place = shape_config(shape), torch.device(device)
        spec = spec_from_config(config.to_dict())
        weights = random_weights(spec, place)
        self.device, self._peer = device, partial(open_transformers, config, transformers_names(spec, weights), place)
        self.plain = GivenLLM(spec, weights, name=name, device=device, most=most)
        self.tokens, self.params = tokens, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        generator = torch.Generator().manual_seed(1)
        self.prompts = [
            torch.randint(0, shape.vocab, (PROMPT,), generator=generator).tolist() for _ in range(max(most, REQUESTS))
        ]
        self.reference = [decode(self.plain, [prompt], self.params)[0] for prompt in self.prompts]
        self.records = {tuple(ids): made for ids, made in zip(self.prompts, self.reference, strict=True)}

    @cached_property
    def peer(self) -> Any:
        """transformers' model, opened where it is first used, so that what it raises concerns its own cells only."""
        return self._peer()

    def plain_cell(self, batch: int, repeats: int) -> dict[str, Any]:
        """Plain decoding of one batch, and a step of it, beside the limit that reading the weights sets."""
        prompts, limits, steps, seconds = self.prompts[:batch], [], [], []
        agreement = must_agree(self.plain, prompts, self.reference[:batch], decode(self.plain, prompts, self.params))
        for _ in range(repeats):
            limits.append(read_bandwidth(self.device))
            steps.append(self.step_seconds(prompts))
            seconds.append(timed(lambda: decode(self.plain, prompts, self.params))[1])
        read, rate = self.plain.runner.info.weight_bytes, batch * self.tokens / median(seconds)
        return {
            "agreement": agreement,
            "tokens_per_second": {"plain": rate},
            "weight_bytes": read,
            "read_bandwidth": median(limits),
            "step_seconds": median(steps),
            "share_of_limit": read / median(limits) / median(steps),
            "share_of_limit_generate": read / median(limits) * rate / batch,
            "seconds": {"plain": seconds, "step": steps},
        }

    def step_seconds(self, prompts: Tokens, repeats: int = 20) -> float:
        """Median seconds of scoring one token of every sequence, without the engine around it."""
        runner = self.plain.runner
        caches = [runner.open() for _ in prompts]
        runner.extend(caches, prompts)
        roots, trees = [1] * len(caches), [EMPTY_TREE] * len(caches)

        def score() -> None:
            runner.score(caches, roots, trees).logits[-1, 0].item()

        seconds = repeated(score, repeats, warm_up=3)
        for cache in caches:
            runner.release(cache)
        return median(seconds)

    def peer_cell(self, batch: int, form: str, repeats: int) -> dict[str, Any]:
        """transformers against plain decoding, or the reason why not."""
        prompts, frames = self.prompts[:batch], compiled_frames()
        if form == COMPILED:
            torch.compiler.reset()
        try:
            made, first = timed(lambda: self.theirs(prompts, FORMS[form]))
            agreement = self.compare(prompts, made)
            if form == COMPILED and compiled_frames() == frames:
                return {"agreement": agreement, "reason": f"generate compiles nothing on {self.device}"}
            runs: dict[str, Callable[[], Any]] = {
                "plain": lambda: decode(self.plain, prompts, self.params),
                "transformers": lambda: self.theirs(prompts, FORMS[form]),
            }
            seconds = alternate(runs, repeats)
        except torch.AcceleratorError:  # the device is lost, and nothing after it would be right
            raise
        except Exception as error:  # whatever transformers or the compiler may raise is the result of this cell
            return {"reason": f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:300]}"}
        tokens = batch * self.tokens
        return {
            "agreement": agreement,
            "first_call_seconds": first,
            "tokens_per_second": {name: tokens / median(values) for name, values in seconds.items()},
            "plain over transformers": ratio(seconds["transformers"], seconds["plain"]),
            "seconds": seconds,
        }

    def theirs(self, prompts: Tokens, options: dict[str, Any]) -> Tokens:
        """What transformers' generate says."""
        inputs = torch.tensor(prompts, device=self.device)
        out = self.peer.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=self.tokens, do_sample=False, **options
        )
        return cast(Tokens, out[:, inputs.shape[1] :].tolist())

    def compare(self, prompts: Tokens, made: Tokens) -> dict[str, Any]:
        """How far outputs of transformers equal those of plain decoding.

        Raises:
            SystemExit: they differ first where nothing is nearly tied.
        """
        pairs = list(zip(prompts, self.reference, made, strict=False))
        found = [first_difference(self.plain.runner, prompt, ours, own, 2 * TIE_UNITS) for prompt, ours, own in pairs]
        if wrong := [one for one in found if one is not None and not one.near_tie]:
            raise SystemExit(f"transformers differs outside near ties, nothing is timed: {wrong[:2]}")
        equal = sum(a == b for _, ours, own in pairs for a, b in zip(ours, own, strict=True))
        return {
            "prompts": len(pairs),
            "identical": found.count(None),
            "equal_tokens": equal,
            "tokens": sum(map(len, made)),
        }

    def measure(self, batch: int, part: Part, fixed: list[int], repeats: int) -> dict[str, Any]:
        """One cell; where outputs are wrong, the reason and no times."""
        kind, setting = part
        try:
            if kind == "plain":
                return self.plain_cell(batch, repeats)
            if kind == "dial":
                return self.cell(batch, float(cast(float, setting)), fixed, repeats)
            return self.peer_cell(batch, str(setting), repeats)
        except SystemExit as wrong:
            return {"reason": str(wrong), "wrong": True}


def parts(batches: Sequence[int], acceptance: Sequence[float]) -> Iterator[tuple[int, Part]]:
    """Batch size, kind and setting of all cells, those that say most first, and of several batch sizes the first."""
    first, *others = acceptance
    for batch in batches:
        yield batch, ("plain", None)
        yield batch, ("dial", first)
        if batch == batches[0]:
            yield batch, ("transformers", COMPILED)
        yield batch, ("transformers", "dynamic cache")
        yield from ((batch, ("dial", one)) for one in others)
    yield from ((batch, ("transformers", "static cache")) for batch in batches)
    yield from ((batch, ("transformers", COMPILED)) for batch in batches[1:])


def line(cell: dict[str, Any]) -> str:
    """One line on a cell."""
    place = (
        f"{cell['shape']} batch {cell['batch']} {cell['kind']} {cell['setting'] if cell['setting'] is not None else ''}"
    ).strip()
    if "reason" in cell:
        return f"{place}: {cell['reason']}"
    if cell["kind"] == "dial":
        return f"{cell['shape']} {words(cell)}"
    rates = ", ".join(f"{name} {rate:.1f} tokens/s" for name, rate in cell["tokens_per_second"].items())
    shares = f"; share of the limit {cell['share_of_limit']:.2f}" if cell["kind"] == "plain" else ""
    return f"{place}: {rates}{shares}"


class Run:
    """What was asked for, what is known, and the time that is left."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.name, self.end = given, f"gpu_shapes_{given.device}", monotonic() + given.budget
        self.cells: list[dict[str, Any]] = kept(self.name, given.folder).get("cells", [])
        self.here = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        self.left = self.wrong = 0

    def shape(self, name: str) -> None:
        """All cells of a shape that are not known yet, as far as the time goes."""
        given, shape = self.given, None
        batches = [int(batch) for batch in given.batches.split(",")]
        for batch, part in parts(batches, [float(one) for one in given.acceptance.split(",")]):
            key = {"device": self.here, "shape": name, "batch": batch, "kind": part[0], "setting": part[1]}
            key |= {"tokens": given.tokens, "repeats": given.repeats}
            if any(key.items() <= cell.items() for cell in self.cells):
                continue
            slow = COMPILE_SECONDS if part[1] == COMPILED and given.device == "cuda" else 0.0
            if monotonic() + slow > self.end:
                self.left += 1
                continue
            sizes = TINY if name == "tiny" else parse_shape(name)
            shape = shape or Shape(name, sizes, given.device, max(batches), given.tokens)
            self.keep(
                {**shape.measure(batch, part, [int(one) for one in given.fixed.split(",")], given.repeats), **key}
            )

    def keep(self, cell: dict[str, Any]) -> None:
        """Write a cell beside those that are known, in place of an older one of the same name."""
        names = ("device", "shape", "batch", "kind", "setting")
        self.cells = [old for old in self.cells if any(old[one] != cell[one] for one in names)] + [cell]
        self.wrong += cell.get("wrong", False)
        save(self.name, {"cells": self.cells}, self.given.folder, parts=[", ".join(str(cell[one]) for one in names)])
        print(line(cell), flush=True)


@dial_registered()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shapes", default="8b,1b")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--acceptance", default="0.8,0.95,0.5")
    parser.add_argument(
        "--fixed", default="3,7,15", help="fixed lengths; with the last token they fill fixed shapes of 4, 8, 16"
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no cell is begun")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    run = Run(parser.parse_args())
    for name in run.given.shapes.split(","):
        run.shape(name)
        gc.collect()
        if run.given.device == "cuda":
            torch.cuda.empty_cache()
    if run.left:
        print(f"the budget is spent, {run.left} cells are left; the same command goes on with them")
    sys.exit(1 if run.wrong else UNFINISHED if run.left else 0)


if __name__ == "__main__":
    main()
