"""Compiled passes or PyTorch's packed products: for large models a short measurement chooses, once a machine.

A few layers of the model's shape, of random weights, run one row and eight in both forms. Which form serves decides the
bits of a model's logits, so the choice is kept on disk, and falls on compiled passes unless PyTorch's are clearly
faster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Final

import torch

from paceline.models.cpu.compilation import source_number
from paceline.models.cpu.processor import name
from paceline.models.loading.quantization import Form, quantized
from paceline.models.loading.weights import targets
from paceline.models.model_spec import ModelSpec
from paceline.tree import EMPTY_TREE, TokenTree
from paceline.utils import Store, user_cache

log = logging.getLogger("paceline")

ROWS: Final = (1, 8)
CLEARLY: Final = 0.9
"""PyTorch's passes serve where they take less than this part of the time of compiled ones."""

WEIGHTS: Final = 2**24
"""Weights of the layers that are measured, or more of a single layer. Smaller models run in compiled passes."""

BUDGET, TURNS, VOCABULARY, PROMPT, BLOCK = 0.4, 12, 64, 16, 64
"""Seconds and turns of a measurement; its vocabulary and prompt; rows that its weights are made of."""

Pass = Callable[[int], object]
"""Runs a number of rows."""

Make = Callable[..., Any]
"""models.decoder.native.NativeRunner, which imports this module."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a choice belongs to: the measured model, the form of its weights, processor, threads and versions."""

    model: str
    dtype: str
    quantization: str | None
    processor: str
    threads: int
    torch: str
    sources: int


def compiled_serves(spec: ModelSpec, dtype: torch.dtype, quantization: Form | None, make: Make) -> bool:
    """Whether compiled passes are to run a model that they can run: kept from an earlier process, or measured.

    Args:
        make: the class of the model's runner.
    """
    part = measured_part(spec)
    if part is None:
        return True
    key = Conditions(
        repr(part), str(dtype), quantization, name(), torch.get_num_threads(), torch.__version__, source_number()
    )
    store = Store(key, user_cache("passes"))
    kept = store.load()
    if kept is None:
        compiled, operators = least_seconds(part_passes(part, dtype, quantization, make))
        kept = {"compiled": not operators < CLEARLY * compiled, "seconds": [compiled, operators]}
        store.save(kept)
    compiled, operators = kept["seconds"]
    log.debug(
        "%s model: %s passes (%.1f ms compiled, %.1f ms by PyTorch's operators, for %s layers)",
        spec.family, "compiled" if kept["compiled"] else "PyTorch's", 1e3 * compiled, 1e3 * operators, part.num_layers,
    )  # fmt: skip
    return bool(kept["compiled"])


def measured_part(spec: ModelSpec) -> ModelSpec | None:
    """The last layers of a model with a small head, or None where the model is too small to be measured."""
    sizes = [0] * spec.num_layers
    for target in targets(spec):
        if target.name.startswith("layers."):
            sizes[int(target.name.split(".")[1])] += torch.Size(target.shape).numel()
    count, held = 0, 0
    while held < WEIGHTS:
        if count == spec.num_layers:
            return None
        count += 1
        held += sizes[-count]
    return replace(spec, layers=spec.layers[-count:], vocab_size=VOCABULARY, tied=False, max_context=4 * PROMPT)


def least_seconds(passes: tuple[Pass, Pass]) -> list[float]:
    """The least time of each form, summed over `ROWS`; they take turns, after one pass that does not count."""
    best = [dict.fromkeys(ROWS, float("inf")) for _ in passes]
    start = perf_counter()
    for turn in range(TURNS + 1):
        for form, run in zip(best, passes, strict=True):
            for rows in ROWS:
                begin = perf_counter()
                run(rows)
                if turn:
                    form[rows] = min(form[rows], perf_counter() - begin)
        if turn > 1 and perf_counter() - start > BUDGET:
            break
    return [sum(form.values()) for form in best]


def part_passes(spec: ModelSpec, dtype: torch.dtype, quantization: Form | None, make: Make) -> tuple[Pass, Pass]:
    """Compiled passes of a model of random weights, and PyTorch's."""
    weights, device = dict(random_weights(spec, dtype, quantization)), torch.device("cpu")

    def runs(*, compiled: bool) -> Pass:
        own = dict(weights)
        runner = make(spec, own, name="measured", device=device, dtype=dtype, cache_slots=64, compiled=compiled)
        cache = runner.open()
        runner.extend([cache], [range(PROMPT)])
        trees: Mapping[int, TokenTree] = {n: TokenTree.chain(range(1, n)) if n > 1 else EMPTY_TREE for n in ROWS}
        return lambda rows: runner.score([cache], [0], [trees[rows]])

    return runs(compiled=True), runs(compiled=False)


def random_weights(
    spec: ModelSpec, dtype: torch.dtype, quantization: Form | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical weights, the same few rows over and over: to make and to round all of them would take long."""
    generator = torch.Generator().manual_seed(0)
    for target in targets(spec):
        axis = len(target.shape) - 2
        if axis < 0:
            yield target.name, torch.ones(target.shape, dtype=dtype)
            continue
        *outer, rows, inputs = target.shape
        block = torch.randn(*outer, min(BLOCK, rows), inputs, generator=generator).mul_(inputs**-0.5).to(dtype)
        found = quantized(target.name, block, spec, quantization) if quantization else [(target.name, block)]
        for own, few in found:
            yield own, few.index_select(axis, torch.arange(rows) % BLOCK)
