"""`paceline warmup`: compiles for this processor and packs a model's weights ahead, so that the first request need not
wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Annotated, Any, Final

import typer

from paceline.cli.options import open_llm, with_flags
from paceline.cli.terminal import counted, progress_bar, say
from paceline.errors import ConfigError

TOKENS: Final = 24
"""That each method generates: enough for all of its functions to be called."""

Step = tuple[str, Callable[[], object]]
"""What is done, in words, and what does it."""


@with_flags(sampling=False, diffusion=True)
def command(
    *,
    positional: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder or hub id of a model to prepare too.")
    ] = None,
    flag_values: dict[str, Any],
) -> None:
    """Compile all kernels for this processor, and prepare a model: pack its weights, test its passes."""
    if positional is not None and "model" in flag_values:
        raise ConfigError("give the model as an argument or with --model, not both")
    flag_values |= {"model": positional} if positional is not None else {}
    steps = [
        *_kernels(),
        *_methods(),
        *([(str(flag_values["model"]), lambda: _generate(flag_values))] if "model" in flag_values else []),
    ]
    begin = perf_counter()
    with progress_bar() as bar:
        task = bar.add_task("compiling", total=len(steps))
        for number, (what, work) in enumerate(steps, 1):
            bar.update(task, description=what)
            start = perf_counter()
            result = work()
            words = f"{perf_counter() - start:.1f} s" if result is None else str(result)
            say(f"[{number}/{len(steps)}] {what}: {words}")
            bar.update(task, advance=1)
    say(f"{counted(len(steps), 'step')} in {perf_counter() - begin:.1f} s; `paceline cache list` says what is kept")


def _kernels() -> list[Step]:
    """The passes of CPUs, each tested."""
    import torch

    from paceline.config import QUANTIZATIONS
    from paceline.models.cpu import compiled_latent, packer
    from paceline.models.passes import attention_agrees, machine_lacks, products_agree

    def tested() -> str | None:
        forms = [None, *(form for form in QUANTIZATIONS.values() if form), "blocks"]
        lacking = {machine_lacks(dtype, form) for dtype in (torch.float32, torch.bfloat16) for form in forms} - {None}
        return f"not used here, which lacks {lacking.pop()}" if lacking else None

    def more() -> str | None:
        if machine_lacks(torch.float32):
            return "not used here"
        packer()
        compiled_latent()
        products_agree(torch.int8)
        for dtype in (torch.float32, torch.bfloat16):
            products_agree(dtype)
            attention_agrees(dtype)
        return None

    return [
        ("the CPU kernels", lambda: machine_lacks(torch.float32) and "not used here"),
        ("packing of blocks, latent attention, encoders", more),
        ("self-tests of all forms of weights", tested),
    ]


def _methods() -> list[Step]:
    """The tables that draft, on the bundled model."""
    from paceline import registry
    from paceline.config import SamplingParams
    from paceline.llm import LLM

    opened: list[LLM] = []

    def draft(method: str) -> None:
        if not opened:
            opened.append(LLM(speculative_config=None, profile=False))
        llm = opened[0].with_speculative_config({"method": method})
        llm.generate("1 2 3 1 2 3 1 2", SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))

    names = [
        name
        for name, entry in registry.table("drafters").items()
        if entry.kind == "table" and set(entry.needs) <= {"trees"}
    ]
    return [(f"the method {name}", partial(draft, name)) for name in names]


def _generate(flag_values: dict[str, Any]) -> None:
    """Load the model and let it say something, or hear a second of silence."""
    import numpy as np

    from paceline.config import SamplingParams
    from paceline.speech import SAMPLE_RATE

    llm = open_llm(flag_values, diffusion=True, speech=True)
    if llm.source is not None and llm.source.reads == "input_features":
        llm.transcribe(np.zeros(SAMPLE_RATE, np.float32), temperature=[0.0])
    else:
        llm.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=TOKENS))
    llm.close()
