"""Checks of single values, with one clear line each: what is wrong, what we got, what is allowed.

In: a value, its name, a rule in words. Out: nothing, or a ConfigError. Not here: which values exist (`config`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from paceline.errors import ConfigError

MAX_NUMBER = 1e30
"""Finite in float32 with room to multiply; nothing larger means anything as a temperature, penalty or threshold."""

MAX_COUNT = 2**62
"""No count in use comes near; larger integers are typing mistakes that would overflow somewhere."""


def need(condition: bool, name: str, rule: str, got: object) -> None:
    """Raise ConfigError "NAME must RULE, got VALUE" unless `condition` holds; a long value is cut."""
    if not condition:
        raise ConfigError(f"{name} must {rule}, got {shortened(got)}")


def shortened(value: object, most: int = 200) -> str:
    """The repr of what a user gave, short enough for one line of a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"an enormous {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def number(name: str, value: object, low: float, high: float, rule: str, *, open_low: bool = False) -> None:
    """Raise ConfigError unless `value` is a number in low..high (without `low` itself if `open_low`)."""
    _plain(name, value)
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    need(not isinstance(value, int) or abs(value) <= MAX_COUNT, name, f"be at most {MAX_COUNT:.0e} where it is an integer", value)
    if fine and low <= value <= high and value > MAX_NUMBER:  # type: ignore[operator]
        need(False, name, f"be at most {MAX_NUMBER:g}", value)
    need(fine and low <= value <= high and not (open_low and value == low), name, rule, value)  # type: ignore[operator]


def integer(name: str, value: object, low: int, high: int = MAX_COUNT) -> None:
    """Raise ConfigError unless `value` is an integer in low..high."""
    _plain(name, value)
    fine = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    unbounded = high == MAX_COUNT and not (isinstance(value, int) and value > high)
    need(fine, name, f"be an integer of {low} or more" if unbounded else f"be an integer in {low}..{high}", value)


def _plain(name: str, value: object) -> None:
    """Name what would look right in a message: a number of NumPy or PyTorch."""
    foreign = hasattr(value, "item") and not isinstance(value, int | float)
    need(not foreign, name, "be a plain number of Python's (x.item() makes one)", value)


def reject_unknown(kind: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise ConfigError for the first unknown key of `given`, with near matches."""
    for key in given:
        if key not in known:
            near = get_close_matches(str(key), known, n=2)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(known))}"
            raise ConfigError(f"{kind} does not know {key!r}; {hint}")


def strings(name: str, value: object) -> tuple[str, ...]:
    """One string or several, none empty, as a tuple; None is none of them."""
    rule = "be a string or a list of non-empty strings"
    found = (value,) if isinstance(value, str) and value else items(name, value, rule)
    need(all(isinstance(item, str) and item for item in found), name, rule, value)
    return found


def items(name: str, value: object, rule: str) -> tuple[Any, ...]:
    """Any iterable but text and mappings, as a tuple; None is empty."""
    if value is None:
        return ()
    if isinstance(value, Iterable) and not isinstance(value, str | Mapping):
        try:
            return tuple(value)
        except TypeError:  # an array without dimensions claims to be iterable
            pass
    raise ConfigError(f"{name} must {rule}, got {shortened(value)}")
