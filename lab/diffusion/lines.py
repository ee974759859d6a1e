"""Which decoding methods of diffusion language models a benchmark compares: what the user names, or all that need no
training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.diffusion import METHODS, Canvas, ConfiguredMethod, TokenText, options_of, part
from paceline.errors import PacelineError
from paceline.models import Denoiser
from paceline.utils import json_object, need

BASELINE = "static"
LOSSLESS = ("freedave",)
"""Verifications that reproduce the canvas of the same method without them."""
UNTRAINED = ("", "full attention")
"""What a method may need of a model and still be measured by default."""


@dataclass(frozen=True, slots=True)
class DiffusionLine:
    """One line of a benchmark.

    Attributes:
        name: the method with the options that were given.
        config: a `diffusion_config`, complete.
        recipe: made of it.
        reference: of a lossless line, the recipe whose canvases it must reproduce; None otherwise.
    """

    name: str
    config: Mapping[str, Any]
    recipe: ConfiguredMethod
    reference: ConfiguredMethod | None

    @classmethod
    def of(cls, given: Mapping[str, Any] | str, block_length: int | None = None) -> DiffusionLine:
        """A line from a `diffusion_config`.

        Blocks are of `block_length` where it names no length and its schedule takes one.

        Raises:
            ConfigError: an unknown method, part or option.
        """
        config: dict[str, Any] = {"method": given} if isinstance(given, str) else dict(given)
        name = title(config)
        schedule = ConfiguredMethod(config).names["schedule"]
        if block_length is not None and "block_length" in options_of(part("schedule", schedule)):
            config.setdefault("block_length", block_length)
        recipe = ConfiguredMethod(config)
        return cls(name, config, recipe, _reference(config, recipe))

    @property
    def family(self) -> str:
        """What is special about it, in a word or two: for colours of a plot."""
        names = self.recipe.names
        if names["verification"] != "none":
            return "verified drafts"
        if "edit" in names:
            return "remasking"
        if names["cache"] != "none":
            return "cache"
        if "stop" in names:
            return "early end"
        return "fixed number a round" if names["commit"] == "quota" else "adaptive number a round"


def title(config: Mapping[str, Any]) -> str:
    """The method, then its options as key=value."""
    method = str(config.get("method", "threshold"))
    return " ".join([method, *(f"{key}={_short(value)}" for key, value in config.items() if key != "method")])


def _short(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _reference(config: Mapping[str, Any], recipe: ConfiguredMethod) -> ConfiguredMethod | None:
    if recipe.names["verification"] not in LOSSLESS:
        return None
    own = options_of(part("verification", recipe.names["verification"]))
    return ConfiguredMethod({key: value for key, value in config.items() if key not in own} | {"verification": "none"})


def parse_lines(texts: Sequence[str], block_length: int | None = None) -> list[DiffusionLine]:
    """Names or JSON objects, each a line; the static baseline comes first, whether it is named or not.

    Raises:
        ConfigError: what is neither, an unknown method or option, a line given twice.
    """
    lines = [DiffusionLine.of(_config(text), block_length) for text in texts]
    names = [line.name for line in lines]
    for name in names:
        need(names.count(name) == 1, "--method", "name every method once", name)
    return [DiffusionLine.of(BASELINE, block_length), *(line for line in lines if line.name != BASELINE)]


def _config(text: str) -> dict[str, Any] | str:
    if not text.lstrip().startswith("{"):
        return text.strip()
    return json_object("--method", text) or {}


def must_fit(
    lines: Sequence[DiffusionLine], denoiser: Denoiser, canvas: Canvas, token_text: TokenText | None = None
) -> None:
    """Reject lines that this model cannot run on such a canvas.

    Raises:
        ConfigError: the first line's reason.
    """
    for line in lines:
        line.recipe.parts(denoiser, canvas, token_text=token_text)


def default_lines(
    denoiser: Denoiser, canvas: Canvas, block_length: int | None = None
) -> tuple[list[DiffusionLine], list[dict[str, str]]]:
    """All methods of the catalogue that need no training, and some settings of theirs, as far as the model takes them.

    Args:
        canvas: one as they will decode.
    Returns:
        Lines, the static baseline first; name and reason of what was left out.
    Raises:
        ConfigError: blocks that do not fit the text.
    """
    lines: list[DiffusionLine] = []
    skipped: list[dict[str, str]] = []
    must_fit([DiffusionLine.of(BASELINE, block_length)], denoiser, canvas)
    wanted: list[Mapping[str, Any] | str] = [*_catalogue(skipped), *_extras(denoiser, canvas, block_length)]
    for given in wanted:
        line, reason = _fitting(given, block_length, denoiser, canvas)
        if reason:
            skipped.append({"name": line.name, "reason": reason})
        else:
            lines.append(line)
    return lines, skipped


def _fitting(
    given: Mapping[str, Any] | str, block_length: int | None, denoiser: Denoiser, canvas: Canvas
) -> tuple[DiffusionLine, str]:
    """A line, over the whole text where its method takes no blocks; and why it cannot run, if it cannot."""
    reason = ""
    for length in dict.fromkeys((block_length, None)):
        line = DiffusionLine.of(given, length)
        try:
            line.recipe.parts(denoiser, canvas)
        except PacelineError as error:
            reason = reason or str(error)
        else:
            return line, ""
    return DiffusionLine.of(given, block_length), reason


def _catalogue(skipped: list[dict[str, str]]) -> list[str]:
    for name, method in METHODS.items():
        if method.needs not in UNTRAINED:
            skipped.append({"name": name, "reason": f"needs {method.needs}"})
    return [name for name, method in METHODS.items() if method.needs in UNTRAINED]


def _extras(denoiser: Denoiser, canvas: Canvas, block_length: int | None) -> list[dict[str, Any]]:
    """Further points of the curves: fewer steps of the baseline, lower thresholds, more drafts, the exact cache."""
    own = denoiser.block_length if denoiser.attention == "block" else None
    size = block_length or own or canvas.masked().size
    found: list[dict[str, Any]] = [
        {"method": "static", "denoising_steps": size // share} for share in (2, 4) if size % share == 0
    ]
    found += [{"method": "threshold", "confidence_threshold": value} for value in (0.95, 0.7, 0.5)]
    found += [{"method": "freedave", "drafts": 8}, {"method": "freedave", "layout": "tree"}]
    if own is not None:
        found += [{"method": method, "cache": "block"} for method in ("static", "threshold", "freedave")]
    return found
