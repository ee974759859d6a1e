"""What passes of the target's shape cost in each form that could run it: compiled or by PyTorch's operators, in its
dtype or another.

A few layers of random weights run one row and eight, on one thread, whose own CPU time counts: what other programs take
of the processor does not. They slow it down in other ways too, so where they took much of it, nothing is judged.
Everything is measured anew each time, and nothing is stored: which form runs a model does not depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from time import perf_counter, thread_time
from typing import Any, Final, cast

import torch

from paceline.checkpoints import BLOCKS, Form, quantized, targets
from paceline.doctor.facts import FormFacts, PassFacts
from paceline.engine import Probe as PassTimer
from paceline.models import ModelSpec, Runner, available
from paceline.models.passes import eligibility
from paceline.models.runners import NativeRunner, RecurrentRunner, native_of
from paceline.profiles import machine
from paceline.tree import EMPTY_TREE, TokenTree

ROWS: Final = (1, 8)

OTHERS: Final[Mapping[torch.dtype, tuple[torch.dtype, ...]]] = {
    torch.bfloat16: (torch.float32,), torch.float16: (torch.bfloat16, torch.float32), torch.float32: (),
}  # fmt: skip
"""Dtypes that hold the numbers of one and may be computed faster."""

WEIGHTS: Final = 2**24
"""Weights of the layers that run, or more of a single layer."""

BUDGET, TURNS, VOCABULARY, CONTEXT, BLOCK = 0.4, 12, 64, 64, 64
"""Seconds and turns of a measurement; vocabulary and context of the layers; rows that their weights are made of."""

ROOM: Final = 4
"""Times the bytes of the weights in float32, that must be free."""

CROWDED: Final = 1.25
"""Times its CPU time, that a thread takes where others are in its way."""

UNWANTED: Final = "whoever opened it wanted PyTorch's operators"
INSTRUCTIONS: Final = {"avx512vnni": "AVX-512 VNNI", "avx512f": "AVX-512", "avxvnni": "AVX-VNNI", "avx2": "AVX2"}

Pass = Callable[[int], object]
"""Runs a number of rows."""


def pass_facts(runner: Runner) -> PassFacts | None:
    """What runs a model on the CPU and why, and what passes cost; None for one that PyTorch's operators must run."""
    native = native_of(runner)
    if native is None or native.info.device.type != "cpu":
        return None
    info, spec = native.info, native.spec
    form = cast("Form | None", info.quantization)
    compiled = info.passes == "compiled"
    lacks = None if compiled else eligibility.lacks(spec, info.dtype, info.device, quantization=form) or UNWANTED
    covered = eligibility.unsupported(spec, info.dtype, info.device) is None
    part, wanted = measured_part(spec), [(info.dtype, compiled)]
    wanted += [(info.dtype, False)] * compiled + [(other, True) for other in OTHERS[info.dtype] if form is None]
    forms, crowded = list[FormFacts](), False
    if form != BLOCKS and len(wanted) > 1 and weights_of(part) * 4 * ROOM < available(info.device):
        forms, crowded = measured(part, wanted, form)
    fitting = [rows for rows in ROWS if rows <= max(1, info.max_context // 4)]
    return PassFacts(
        passes=info.passes,
        processor=machine(),
        instructions=instructions() if compiled else "",
        lacks=lacks,
        fault=eligibility.machine_lacks(info.dtype, form) if covered and not compiled else None,
        seconds=dict(zip(fitting, PassTimer(runner)(fitting, CONTEXT), strict=True)),
        layers=part.num_layers,
        forms=forms,
        crowded=crowded,
    )


def instructions() -> str:
    """The instruction sets that compiled passes are compiled for here."""
    from paceline.models.cpu import features, has_matrix_unit

    widest = next((name for feature, name in INSTRUCTIONS.items() if features().get(feature)), "")
    return f"{widest}, AMX" if has_matrix_unit() else widest


def weights_of(spec: ModelSpec) -> int:
    """Count the weights of a model."""
    return sum(torch.Size(target.shape).numel() for target in targets(spec))


def measured_part(spec: ModelSpec) -> ModelSpec:
    """The last layers of a model, of `WEIGHTS` weights if it has so many, with a small head."""
    sizes = [0] * spec.num_layers
    for target in targets(spec):
        if target.name.startswith("layers."):
            sizes[int(target.name.split(".")[1])] += torch.Size(target.shape).numel()
    count, held = 1, sizes[-1]
    while held < WEIGHTS and count < spec.num_layers:
        count += 1
        held += sizes[-count]
    return replace(spec, layers=spec.layers[-count:], vocab_size=VOCABULARY, tied=False, max_context=4 * CONTEXT)


def measured(
    spec: ModelSpec, wanted: Sequence[tuple[torch.dtype, bool]], form: Form | None
) -> tuple[list[FormFacts], bool]:
    """Forms of a model of random weights, by dtype and whether they are compiled, on one thread; and whether others
    were in its way.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        passes = [part_pass(spec, dtype, form, compiled=compiled) for dtype, compiled in wanted]
        seconds, crowded = least_seconds([run for _, run in passes])
    finally:
        torch.set_num_threads(threads)
    forms = [
        FormFacts(passes=name, dtype=form or str(dtype).removeprefix("torch."), seconds=form_seconds)
        for (name, _), (dtype, _), form_seconds in zip(passes, wanted, seconds, strict=True)
    ]
    return forms, crowded


def least_seconds(passes: Sequence[Pass], counts: Sequence[int] = ROWS) -> tuple[list[dict[int, float]], bool]:
    """The least CPU time of each form, by rows; they take turns, after one pass that does not count. And whether the
    thread was kept waiting.
    """
    best = [dict.fromkeys(counts, float("inf")) for _ in passes]
    start, spent = perf_counter(), thread_time()
    for turn in range(TURNS + 1):
        for form, run in zip(best, passes, strict=True):
            for rows in counts:
                begin = thread_time()
                run(rows)
                if turn:
                    form[rows] = min(form[rows], thread_time() - begin)
        if turn > 1 and perf_counter() - start > BUDGET:
            break
    return best, perf_counter() - start > CROWDED * (thread_time() - spent)


def part_pass(spec: ModelSpec, dtype: torch.dtype, form: Form | None, *, compiled: bool) -> tuple[str, Pass]:
    """What runs passes of a model of random weights (`ModelInfo.passes`), and one that scores a root and a chain."""
    kind = RecurrentRunner if spec.states else NativeRunner
    runner: Any = kind(  # either takes its own states alone
        spec, dict(random_weights(spec, dtype, form)), name="measured", device=torch.device("cpu"), dtype=dtype,
        cache_slots=2 * CONTEXT, compiled=compiled,
    )  # fmt: skip
    sequence = runner.open()
    runner.extend([sequence], [range(CONTEXT)])

    @cache
    def tree(rows: int) -> TokenTree:
        return TokenTree.chain([i % VOCABULARY for i in range(1, rows)]) if rows > 1 else EMPTY_TREE

    return runner.info.passes, lambda rows: runner.score([sequence], [0], [tree(rows)])


def random_weights(spec: ModelSpec, dtype: torch.dtype, form: Form | None) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical weights, the same few rows over and over: to make and to round all of them would take long."""
    generator = torch.Generator().manual_seed(0)
    for target in targets(spec):
        axis = len(target.shape) - 2
        if axis < 0:
            yield target.name, torch.ones(target.shape, dtype=dtype)
            continue
        *outer, rows, inputs = target.shape
        block = torch.randn(*outer, min(BLOCK, rows), inputs, generator=generator).mul_(inputs**-0.5).to(dtype)
        tensors = quantized(target.name, block, spec, form) if form else [(target.name, block)]
        for name, few in tensors:
            yield name, few.index_select(axis, torch.arange(rows) % BLOCK)
