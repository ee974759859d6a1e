"""Checks of values and of calls, with one clear line each: what is wrong, what we got, what is allowed.

Single values, the options of a constructor against the types that it declares for them, and the arguments of a call.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, wraps
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from paceline.errors import ConfigError, PacelineError

logger = logging.getLogger("paceline")

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type)

MAX_NUMBER = 1e30
"""Finite in float32 with room to multiply; nothing larger means anything as a temperature, penalty or threshold."""

TINY = 1 / MAX_NUMBER
"""Smaller numbers are 0 in float32, by which logits cannot be divided."""

MAX_COUNT = 2**62
"""No count in use comes near; larger integers are typing mistakes that would overflow somewhere."""

Ranges = Mapping[str, tuple[float, float]]

WORDS: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    Path: "a path",
    Sequence: "a list",
    Mapping: "a dict",
    Callable: "a function",
}
"""The kinds of values that are checked; an option that may hold another one is left to its owner."""

PLURALS: Mapping[Any, str] = {int: "integers", float: "numbers", str: "strings"}


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


def one_line(error: BaseException, most: int = 200) -> str:
    """The text of an error of code that is not ours, on one line; the name of its kind where it has none to give."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # of a class of a user's own
        text = ""
    text = text or type(error).__name__
    return text if len(text) <= most else f"{text[: most - 3]}..."


def described(error: BaseException) -> str:
    """The kind of such an error and its text, on one line."""
    kind, text = type(error).__name__, one_line(error)
    return kind if text == kind else f"{kind}: {text}"


def number(name: str, value: object, low: float, high: float, rule: str, *, open_low: bool = False) -> None:
    """Raise ConfigError unless `value` is a number in low..high (without `low` itself if `open_low`)."""
    _plain(name, value, rule)
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    need(
        not isinstance(value, int) or abs(value) <= MAX_COUNT,
        name,
        f"be at most {MAX_COUNT:.0e} where it is an integer",
        value,
    )
    if fine and low <= value <= high and value > MAX_NUMBER:  # type: ignore[operator]
        need(False, name, f"be at most {MAX_NUMBER:g}", value)
    need(fine and low <= value <= high and not (open_low and value == low), name, rule, value)  # type: ignore[operator]


def integer(name: str, value: object, low: int, high: int = MAX_COUNT) -> None:
    """Raise ConfigError unless `value` is an integer in low..high."""
    unbounded = high == MAX_COUNT and not (isinstance(value, int) and value > high)
    rule = f"be an integer of {low} or more" if unbounded else f"be an integer in {low}..{high}"
    _plain(name, value, rule)
    need(isinstance(value, int) and not isinstance(value, bool) and low <= value <= high, name, rule, value)


def _plain(name: str, value: object, rule: str) -> None:
    """Name what would look right in a message: a number of NumPy or PyTorch, or one in quotes."""
    foreign = hasattr(value, "item") and not isinstance(value, int | float)
    need(not foreign, name, "be a plain number of Python's (x.item() makes one)", value)
    if isinstance(value, str) and _is_number(value):
        raise ConfigError(f"{name} must {rule}, got the text {shortened(value)}; leave the quotes out")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def choice(name: str, value: object, known: Sequence[str], *, optional: bool = False) -> None:
    """Raise ConfigError unless `value` is one of the known names, or None where it is optional."""
    fine = (value is None and optional) or (isinstance(value, str) and value in known)
    need(fine, name, f"be {'None or ' * optional}one of {', '.join(known)}", value)


def reject_unknown(
    kind: str, keys: Iterable[str], known: Sequence[str], *, meant: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise ConfigError for the unknown keys of `keys`, with near matches.

    Args:
        meant: names of other libraries -> what to write instead, or a sentence.
    """
    if text := unknown_names(kind, keys, known, meant=meant):
        raise ConfigError(text)


def unknown_names(
    kind: str, keys: Iterable[str], known: Sequence[str], *, meant: Mapping[str, str] = MappingProxyType({})
) -> str:
    """What `reject_unknown` says, or "" where all are known."""
    hints: dict[str, str] = {}
    for key in keys:
        if key not in known:
            near = [meant[key]] if key in meant else get_close_matches(str(key), known, n=2)
            hints[key] = near[0] if near and " " in near[0] else f"did you mean {' or '.join(near)}?" if near else ""
    if not hints:
        return ""
    listed = "" if all(hints.values()) else f"known are {', '.join(sorted(known))}"
    if len(hints) == 1:
        ((key, hint),) = hints.items()
        return f"{kind} does not know {key!r}; {hint or listed}"
    names = ", ".join(f"{key!r} ({hint})" if hint else repr(key) for key, hint in hints.items())
    return f"{kind} does not know {names}" + (f"; {listed}" if listed else "")


@contextmanager
def about_item(argument: str, number: int, count: int) -> Iterator[None]:
    """Errors within begin with the item of a list that they are about, where it has several.

    Args:
        argument: the list's name. number: of the item, from 0. count: of all items.
    """
    try:
        yield
    except PacelineError as error:
        if count == 1:
            raise
        raise type(error)(f"{argument}[{number}]: {error}") from error


def strings(name: str, value: object) -> tuple[str, ...]:
    """One string or several, none empty, as a tuple; None is none of them."""
    rule = "be a string or a list of non-empty strings"
    texts = (value,) if isinstance(value, str) and value else items(name, value, rule)
    need(all(isinstance(item, str) and item for item in texts), name, rule, value)
    return texts


def tokens(name: str, value: object) -> tuple[int, ...]:
    """Any iterable of token ids, as a tuple; None is empty."""
    ids = tuple(_integers(token) for token in items(name, _integers(value), "be a list of token ids"))
    for token in ids:
        integer(name, token, 0)
    return ids


def _integers(value: Any) -> Any:
    """An array of integers, or a scalar of one, of NumPy or PyTorch as Python's; all else as it is."""
    return value.tolist() if hasattr(value, "tolist") and "int" in str(getattr(value, "dtype", "")) else value


def items(name: str, value: object, rule: str) -> tuple[Any, ...]:
    """Any iterable but text and mappings, as a tuple; None is empty."""
    if value is None:
        return ()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | bytearray | Mapping):
        try:
            return tuple(value)
        except TypeError:  # an array without dimensions claims to be iterable
            pass
    raise ConfigError(f"{name} must {rule}, got {shortened(value)}")


def json_object(name: str, text: str, *, hint: str = "") -> dict[str, Any] | None:
    """The object, or None for null, that a JSON text holds.

    Args:
        name: of the argument.
        hint: what to write instead, where the text is a bare word.
    Raises:
        ConfigError: it is no JSON, or holds something else.
    """
    value = json_value(name, text, hint=hint)
    need(value is None or isinstance(value, dict), name, "be a JSON object or null", text)
    return cast("dict[str, Any] | None", value)


def json_value(name: str, text: str, *, hint: str = "") -> object:
    """What a JSON text holds. A key that an object has twice is rejected, since JSON drops the first.

    Raises:
        ConfigError: it is no JSON.
    """
    try:
        return json.loads(text, object_pairs_hook=keys_once(name, text))
    except json.JSONDecodeError as error:
        got = shortened(text)
        if hint and text.replace("_", "").isalnum():
            raise ConfigError(f"{name} must be a JSON object, as {hint}, got {got}") from None
        raise ConfigError(f"{name} is not JSON ({error.msg} at character {error.pos}), got {got}") from None
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:  # integers of thousands of digits, thousands of brackets
        raise ConfigError(f"{name} cannot be read ({error}), got {shortened(text)}") from None


def keys_once(name: str, text: str | None = None) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """An `object_pairs_hook` of `json.loads` that rejects a key that an object has twice, since JSON drops the first.

    Args:
        name: of the argument or file.
        text: what was given, where it is short enough to be shown.
    Returns:
        A function from pairs to a dict, which raises ConfigError with the key.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        mapping = dict(pairs)
        if len(mapping) < len(pairs):
            key, times = Counter(key for key, _ in pairs).most_common(1)[0]
            got = "" if text is None else f", got {shortened(text)}"
            raise ConfigError(f"{name} must have each key once, and {key!r} occurs {times} times{got}")
        return mapping

    return once


def check_types(factory: Any, options: Mapping[str, Any], ranges: Ranges | None = None) -> None:
    """Check the values of those options that a constructor takes.

    Args:
        ranges: least and most value of options that are numbers, or lists of them.
    Raises:
        ConfigError: one of another type than declared, or outside its range. The default is fine whatever its type.
    """
    for key, (hint, default) in declared(factory).items():
        if key in options and options[key] is not default:
            kinds = [kind for kind in _kinds(hint) if kind is not NoneType]
            bounded = ranges is not None and key in ranges
            low, high = ranges[key] if ranges is not None and bounded else (-MAX_NUMBER, MAX_NUMBER)
            words = " or ".join(dict.fromkeys(_words(kind) for kind in kinds)) + f" in {low:g}..{high:g}" * bounded
            need(any(_fits(options[key], kind, low, high) for kind in _kinds(hint)), key, f"be {words}", options[key])


@cache
def declared(factory: Any) -> dict[str, tuple[Any, Any]]:
    """Type and default of each keyword argument whose type consists of kinds that are checked."""
    is_class = isinstance(factory, type)
    function = inspect.unwrap(factory.__init__ if is_class else factory)
    ranges: dict[str, tuple[Any, Any]] = {}
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # one that is not written in Python
        return ranges
    for key, parameter in parameters.items():
        try:
            hint = (
                eval(parameter.annotation, function.__globals__)
                if isinstance(parameter.annotation, str)
                else parameter.annotation
            )
        except Exception:  # a name that is imported for type checkers only, or whatever a third party wrote
            continue
        if all(_checked(kind) for kind in _kinds(hint)):
            ranges[key] = (hint, parameter.default)
    return ranges


def _kinds(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (NoneType,) if hint is None else (hint,)


def _checked(kind: Any) -> bool:
    origin = get_origin(kind)
    if origin is Sequence:
        return all(_checked(inner) for inner in get_args(kind))
    return kind is NoneType or origin is Literal or kind in WORDS or origin in WORDS


def _words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(repr(name) for name in get_args(kind))
    inner = get_args(kind)[0] if get_origin(kind) is Sequence else None
    return f"a list of {PLURALS[inner]}" if inner in PLURALS else WORDS[get_origin(kind) or kind]


def _fits(value: object, kind: Any, low: float, high: float) -> bool:
    """Whether a value is of one kind, and where it is a number, in the range."""
    origin = get_origin(kind)
    if origin is Literal:
        return isinstance(value, str)  # its owner names those that it knows
    if origin is Sequence:
        (inner,) = get_args(kind)
        ways, listed = _kinds(inner), isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return listed and all(
            any(_fits(item, way, low, high) for way in ways) for item in cast("Sequence[object]", value)
        )
    if origin is Callable:
        return callable(value)
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, int | kind) or not low <= value <= high:
            return False
        return isinstance(value, float) or abs(value) <= MAX_COUNT  # an integer
    return isinstance(value, origin or kind)


def same(value: object, neutral: object) -> bool:
    """Whether both are the same plain value; 1 is not True, but 1.0."""
    plain = isinstance(value, bool | int | float | str | list | tuple | dict)
    return plain and isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def say_ignored(arguments: Mapping[str, Any]) -> None:
    """One warning for all arguments that change nothing; None says that one is not given."""
    if shown := [f"{key}={shortened(value, 30)}" for key, value in arguments.items() if value is not None]:
        logger.warning("ignored, since it changes nothing here: %s", ", ".join(shown))


Neutral = Mapping[str, tuple[Any, ...]]
"""Argument of another library -> the values beside None under which it asks for nothing."""


def clear_arguments(
    function: Function,
    example: str = "",
    meant: Mapping[str, str] = MappingProxyType({}),
    neutral: Neutral = MappingProxyType({}),
) -> Function:
    """The same function, which answers arguments that it does not have with one line in place of a TypeError.

    Args:
        example: of a keyword argument, for functions that take no other.
        meant: arguments of other libraries -> what to write instead.
        neutral: arguments of other libraries that are left out, with a warning, where they ask for nothing.
    Raises:
        ConfigError: where it is called with an unknown argument (near matches are named), too many or too few. A
            TypeError from within the function stays what it is.
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")
    listed = {key: parameter.kind for key, parameter in signature.parameters.items() if key not in ("self", "cls")}
    known = [key for key, kind in listed.items() if kind is not inspect.Parameter.VAR_KEYWORD]
    takes_all = len(known) < len(listed)
    by_name = f"all arguments are keyword-only{example and f', e.g. {example}'}"
    nothing_by_place = all(
        kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD) for kind in listed.values()
    )

    def idles(key: str, value: object) -> bool:
        return key in neutral and (value is None or any(same(value, idle) for idle in neutral[key]))

    @wraps(function)
    def clear(*positional: Any, **named: Any) -> Any:
        try:
            return function(*positional, **named)
        except TypeError:
            try:
                signature.bind(*positional, **named)
            except TypeError as error:
                idle = {key: value for key, value in named.items() if key not in known and idles(key, value)}
                if idle:
                    say_ignored(idle)
                    return clear(*positional, **{key: value for key, value in named.items() if key not in idle})
                reject_unknown(name, {} if takes_all else named, known, meant=meant)
                what = by_name if nothing_by_place and "positional" in str(error) else error
                raise ConfigError(f"{name}: {what}{'; its arguments are ' * bool(known)}{', '.join(known)}") from None
            raise

    return cast("Function", clear)


def clear_calls(
    example: str = "",
    meant: Mapping[str, str] = MappingProxyType({}),
    neutral: Neutral = MappingProxyType({}),
) -> Callable[[Class], Class]:
    """Makes the same class, with `clear_arguments` at its constructor, its public methods and class methods.

    Args:
        example: of a keyword argument of the constructor, where it takes no other.
        meant, neutral: see `clear_arguments`.
    """

    def clear(cls: Class) -> Class:
        for key, value in list(vars(cls).items()):
            if key == "__init__" and inspect.isfunction(value):
                setattr(cls, key, clear_arguments(value, example, meant, neutral))
            elif not key.startswith("_") and inspect.isfunction(value):
                setattr(cls, key, clear_arguments(value, "", meant, neutral))
            elif not key.startswith("_") and isinstance(value, classmethod):
                setattr(cls, key, classmethod(clear_arguments(value.__func__, "", meant, neutral)))
        return cls

    return clear
