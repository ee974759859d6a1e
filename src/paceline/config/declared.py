"""What is declared of one field of a configuration, in the field itself: default, flag, help, check, documentation.

The command line makes its flags of it, `check_options` runs the checks, and `documented` writes the class's docstring,
of which the tables of the site are made.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, partial
from typing import Any, Final, TypeVar

from paceline.utils import MAX_COUNT, choice, integer, need, number

T = TypeVar("T")
Class = TypeVar("Class", bound=type)

Check = Callable[[str, Any], object]
"""(name, value); it raises ConfigError."""

REQUIRED: Final[Any] = MISSING
"""Default of a field that must be given."""

KEY: Final = "option"
"""Of a field's metadata."""


@dataclass(frozen=True, slots=True)
class Option:
    """Says of a field of a configuration what its flag, help, documentation and check are.

    Attributes:
        help: of its flag; a field without help has no flag.
        doc: what the documentation says in place of it.
        flag: name of the flag with underscores, where it is not the field's. metavar: what stands for its value.
        unit: what is typed counts so many times.
        check: of its value; None, where a field may be None, is not checked.
    """

    help: str
    doc: str
    flag: str
    metavar: str
    unit: int
    check: Check | None


def option(
    default: T, help: str = "", *, doc: str = "", flag: str = "", metavar: str = "", unit: int = 1,
    low: float | None = None, high: float | None = None, rule: str = "", open_low: bool = False,
    choices: Sequence[str] = (), check: Check | None = None, factory: Callable[[], T] | None = None,
) -> T:  # fmt: skip
    """A field of a dataclass with these declarations; True and False are checked where no other check is given.

    Args:
        default: REQUIRED for a field that must be given.
        help, doc, flag, metavar, unit, check: of `Option`.
        low, high: least and greatest value; of an integer where none of default, low and high is a float and there is
            no rule, otherwise of a number. rule: what the error says of a number. open_low: without `low`.
        choices: names. factory: makes the default where objects may not share one; `default` is then REQUIRED.
    """
    if low is not None and (rule or any(isinstance(one, float) for one in (default, low, high))):
        rule = rule or _range_words(low, high, open_low)
        check = partial(number, low=low, high=math.inf if high is None else high, rule=rule, open_low=open_low)
    elif low is not None:
        check = partial(integer, low=int(low), high=MAX_COUNT if high is None else int(high))
    elif choices:
        check = partial(choice, known=choices, optional=default is None)
    elif check is None and isinstance(default, bool):
        check = check_bool
    declared = {KEY: Option(help, doc or help, flag, metavar, unit, check)}
    return (
        field(default=default, metadata=declared)
        if factory is None
        else field(default_factory=factory, metadata=declared)
    )


def _range_words(low: float, high: float | None, open_low: bool) -> str:
    """What an error says of a number's range."""
    if high is None:
        return f"be a number above {low:g}" if open_low else f"be a number of {low:g} or more"
    return f"be a number above {low:g} and at most {high:g}" if open_low else f"be a number in {low:g}..{high:g}"


def check_bool(name: str, value: object) -> None:
    """Reject what is neither True nor False."""
    need(isinstance(value, bool), name, "be True or False", value)


def options_of(config: type) -> Mapping[str, Option]:
    """Field -> what is declared of it, in the order of the fields."""
    return {field.name: field.metadata[KEY] for field in fields(config) if KEY in field.metadata}


@cache
def _checks(config: type) -> Sequence[tuple[str, Check, bool]]:
    """Of each field that is checked: its name, its check, and whether it may be None."""
    optional = {field.name: "None" in str(field.type) for field in fields(config)}
    return [
        (name, option.check, optional[name]) for name, option in options_of(config).items() if option.check is not None
    ]


def check_options(config: object, named: str = "") -> None:
    """Check the fields of a configuration as they declare.

    Args:
        named: what the error puts before a field's name, as "think ".
    Raises:
        ConfigError: the first that is wrong.
    """
    kind: Any = type(config)
    for name, check, optional in _checks(kind):
        value = getattr(config, name)
        if value is not None or not optional:
            check(named + name, value)


def documented(cls: Class) -> Class:
    """The same class; its docstring ends with what its fields declare, as attributes."""
    told = [f"    {name}: {option.doc}" for name, option in options_of(cls).items()]
    cls.__doc__ = "\n".join([inspect.cleandoc(cls.__doc__ or ""), "", "Attributes:", *told])
    return cls
