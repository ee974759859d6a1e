"""Flags of diffusion language models, under the names that LMDeploy and SGLang use.

In: what was typed after them. Out: one `diffusion_config`. Not here: methods and their options (`diffusion.methods`).
"""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Final

import typer

from paceline.errors import ConfigError
from paceline.utils import shortened

KINDS: Final = {
    "dllm_unmasking_strategy": (
        "NAME",
        "Which slots are written: a method of `paceline methods`, low_confidence_dynamic, ...",
    ),
    "dllm_block_length": ("INT", "Slots of a block; default: the model's, or the whole text."),
    "dllm_denoising_steps": ("INT", "Rounds for a block, where the method has a fixed number."),
    "dllm_confidence_threshold": ("FLOAT", "Slots at least this sure are written, where the method has a threshold."),
    "diffusion_config": ("JSON", 'All of it, as {"method": "factor", "cache": "dual"}, or the name of a method.'),
}
PANEL: Final = "Diffusion language models"


def _flag(name: str, metavar: str, text: str) -> inspect.Parameter:
    option = typer.Option("--" + name.replace("_", "-"), metavar=metavar, help=text, rich_help_panel=PANEL)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


FLAGS: Final = tuple(_flag(name, *rest) for name, rest in KINDS.items())


def merged(typed: dict[str, str]) -> dict[str, Any] | str | None:
    """One `diffusion_config` of the flags that were typed; None where none was.

    Raises:
        ConfigError: no number, or JSON that says the same as a flag.
    """
    whole = typed.get("diffusion_config")
    single = {name: _value(name, text) for name, text in typed.items() if name != "diffusion_config"}
    if whole is None or not single:
        return whole if whole is not None else single or None
    from paceline.diffusion import canonical, parse_config

    config = parse_config(whole)
    known = {canonical(key): key for key in config}
    for name in single:
        if (other := known.get(canonical(name))) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} and {other!r} in --diffusion-config say the same thing; give one of them"
            )
    return config | single


def _value(name: str, text: str) -> int | float | str:
    metavar = KINDS[name][0]
    if metavar == "NAME":
        return text
    try:
        return int(text) if metavar == "INT" else float(text)
    except ValueError:
        kind = "an integer" if metavar == "INT" else "a number"
        raise ConfigError(f"--{name.replace('_', '-')} must be {kind}, got {shortened(text)}") from None
