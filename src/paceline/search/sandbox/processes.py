"""The two processes of a test, run isolated by a fresh interpreter with nothing but its standard library.

The *program* runs the program and then does what it is asked: call this function, read that attribute. The *judge* runs
the test. In its process the program's names stand for what the other process has (`Remote`); what comes back is plain
data, which JSON has carried, or again a `Remote`, which cannot be compared. So nothing of the program's runs where the
test is decided, and of the test nothing but the arguments of its calls goes to where the program runs.

Run as: ROLE SOCKET LIMITS, the program or {"test", "nonce"} on standard input; the judge writes the nonce where the
test passed, and why it did not elsewhere.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import errno
import importlib
import json
import operator
import os
import resource
import socket
import struct
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

SERIES: Final[Mapping[str, type[Any]]] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
MOST_REASON: Final = 300


def limit(limits: Mapping[str, int]) -> None:
    """Limits by the names of `resource`, without RLIMIT_; none can be raised again."""
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        held = resource.getrlimit(kind)[1]
        allowed = most if held == resource.RLIM_INFINITY else min(most, held)
        resource.setrlimit(kind, (allowed, allowed))


# ------------------------------------------------------------------------------------------------ refused calls

MACHINES: Final = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Linux's number of an architecture, and which of its numbers below are its own."""

REFUSED: Final = {
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
}  # fmt: skip
"""Calls by which a process holds memory that no limit counts, reaches others, or finds seldom-used parts of Linux."""

CLONE, CLONE3, SOCKET = (56, 220), (435, 435), (41, 198)
FAMILIES: Final = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6)
"""Kinds of sockets that stay inside; those to a virtual machine's host, AF_VSOCK, know no namespaces."""

OTHER_TABLE, NEW_USER = 0x40000000, 0x10000000
NUMBER, ARCHITECTURE, ARGUMENT = 0, 4, 16
LOAD, EQUAL, AT_LEAST, ANY_BIT, ANSWER = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, FAIL = 0x7FFF0000, 0x00050000
SET_FILTER: Final = (22, 2)


def call_filter(machine: str) -> bytes:
    """The program of Linux's seccomp that refuses calls.

    Raises:
        KeyError: a machine whose numbers are not known here.
    """
    architecture, column = MACHINES[machine]
    refuse = (ANSWER, 0, 0, FAIL | errno.EPERM)
    steps = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, architecture), refuse, (LOAD, 0, 0, NUMBER)]
    steps += [(AT_LEAST, 0, 1, OTHER_TABLE), refuse]
    for numbers in REFUSED.values():
        steps += [(EQUAL, 0, 1, numbers[column]), refuse]
    steps += [(EQUAL, 0, 1, CLONE3[column]), (ANSWER, 0, 0, FAIL | errno.ENOSYS)]  # its flags cannot be read
    steps += [(EQUAL, 0, 4, CLONE[column]), (LOAD, 0, 0, ARGUMENT), (ANY_BIT, 0, 1, NEW_USER), refuse]
    steps += [(ANSWER, 0, 0, ALLOW), (EQUAL, 0, len(FAMILIES) + 2, SOCKET[column]), (LOAD, 0, 0, ARGUMENT)]
    steps += [(EQUAL, len(FAMILIES) - place, 0, family) for place, family in enumerate(FAMILIES)]
    steps += [(ANSWER, 0, 0, FAIL | errno.EAFNOSUPPORT), (ANSWER, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


def refuse_calls() -> None:
    """Let Linux refuse calls of this process, and of all that it starts.

    Raises:
        OSError: it has no such filters. KeyError: see `call_filter`.
    """
    steps = ctypes.create_string_buffer(call_filter(os.uname().machine))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(steps) // 8, ctypes.addressof(steps)))
    if ctypes.CDLL(None, use_errno=True).prctl(*SET_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no filter of system calls")


# ------------------------------------------------------------------------------------------------ what crosses over


def pack(value: Any, keep: Callable[[Any], int]) -> Any:
    """As JSON has it: plain data by their kinds, everything else as a number that `keep` gives it."""
    if isinstance(value, int) and value.bit_length() > 64:
        return {"int": hex(value)}  # of which Python reads any number of digits
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return {"dict": [[pack(key, keep), pack(item, keep)] for key, item in value.items()]}
    for name, kind in SERIES.items():
        if isinstance(value, kind):
            return {name: [pack(item, keep) for item in value]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    return {"complex": [value.real, value.imag]} if isinstance(value, complex) else {"object": keep(value)}


def unpack(packed: Any, find: Callable[[int], Any]) -> Any:
    """Back from JSON, every value of exactly a built-in type but for what `find` makes of a number.

    Raises:
        ValueError, TypeError, AttributeError, KeyError: it is not of this form.
    """
    if packed is None or isinstance(packed, bool | int | float | str):
        return packed
    ((kind, content),) = packed.items()
    if kind == "dict":
        return {unpack(key, find): unpack(item, find) for key, item in content}
    if kind in SERIES:
        return SERIES[kind](unpack(item, find) for item in content)
    single: Mapping[str, Callable[[Any], Any]] = {
        "int": lambda digits: int(digits, 16), "bytes": bytes.fromhex, "complex": lambda parts: complex(*parts),
        "object": lambda number: find(int(number)),
    }  # fmt: skip
    return single[kind](content)


class JsonChannel:
    """Messages of one line of JSON each way.

    Args:
        most: bytes that are read altogether.
    """

    def __init__(self, file: int, most: int) -> None:
        self.stream = socket.socket(fileno=file).makefile("rwb")
        self.left = most

    def send(self, message: Any) -> None:
        self.stream.write(json.dumps(message).encode() + b"\n")
        self.stream.flush()

    def receive(self) -> Any:
        """Raises:
        EOFError: the other side has ended, or sent too much.
        """
        line = self.stream.readline(self.left + 1)
        self.left -= len(line)
        if self.left < 0:
            raise EOFError("the program returned more than output_bytes")
        if not line.endswith(b"\n"):
            raise EOFError("the program's process ended")
        return json.loads(line)


def said(error: BaseException) -> str:
    """An exception in one line, its own words left out where they cannot be had."""
    try:
        words = str(error)
    except BaseException:
        words = ""
    line = f"{type(error).__name__}: {words[:MOST_REASON]}"
    return "".join(character if character.isprintable() else " " for character in line)[:MOST_REASON]


# ------------------------------------------------------------------------------------------------ the program


class Program:
    """What a program has defined, and the objects of its that a test holds."""

    def __init__(self) -> None:
        self.module = types.ModuleType("program")
        self.objects: list[Any] = []
        self.verbs: Mapping[str, Callable[..., Any]] = {
            "name": self.module.__dict__.__getitem__,
            "attribute": getattr,
            "call": lambda function, /, *args, **more: function(*args, **more),
            "item": operator.getitem,
            "iterator": iter,
            "next": next,
            "length": len,
            "text": str,
        }

    def run(self, source: str) -> list[str]:
        """Execute it; the names that it defines."""
        sys.modules["program"] = self.module
        exec(compile(source, "program.py", "exec"), self.module.__dict__)
        return [name for name in self.module.__dict__ if not name.startswith("__")]

    def answer(self, asked: Any) -> Any:
        verb, args, more = unpack(asked, self.objects.__getitem__)
        return pack(self.verbs[verb](*args, **more), self._keep)

    def _keep(self, value: Any) -> int:
        self.objects.append(value)
        return len(self.objects) - 1


def serve(line: JsonChannel, source: str) -> None:
    """Run a program, then answer until nobody asks."""
    program, asked = Program(), None
    while True:
        try:
            result = program.run(source) if asked is None else program.answer(asked)
            line.send({"found": result})
        except BaseException as error:  # whatever it raises is its answer
            kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
            line.send({"raised": kind, "why": said(error)})
        asked = line.receive()


# ------------------------------------------------------------------------------------------------ the judge


class Names(dict[str, Any]):
    """Global names of a test: its own, else built-in ones, else the program's; where the test takes an attribute of a
    name of the standard library (`math.isclose`), that module.
    """

    def __init__(self, line: JsonChannel, test: ast.AST) -> None:
        super().__init__()
        self._line, self._programs = line, set(answered(line))
        bases = {
            node.value.id for node in ast.walk(test) if isinstance(node, ast.Attribute) and type(node.value) is ast.Name
        }
        self._modules = bases & sys.stdlib_module_names

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        if name in self._modules:
            return importlib.import_module(name)
        if name not in self._programs:
            raise KeyError(name)
        return ask(self._line, "name", name)


class Remote:
    """An object of the program's that is not plain data."""

    __slots__ = ("__line", "__number")  # names that no attribute of the program's has
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, line: JsonChannel, number: int) -> None:
        self.__line, self.__number = line, number

    def __getattr__(self, name: str) -> Any:
        return ask(self.__line, "attribute", self, name)

    def __call__(self, /, *args: Any, **more: Any) -> Any:
        return ask(self.__line, "call", self, *args, **more)

    def __getitem__(self, key: Any) -> Any:
        return ask(self.__line, "item", self, key)

    def __iter__(self) -> Iterator[Any]:
        iterator = ask(self.__line, "iterator", self)
        while True:
            try:
                yield next(iterator)
            except StopIteration:
                return

    def __next__(self) -> Any:
        return ask(self.__line, "next", self)

    def __len__(self) -> int:
        return int(ask(self.__line, "length", self))

    def __str__(self) -> str:
        return str(ask(self.__line, "text", self))

    def __bool__(self) -> bool:
        raise TypeError("an object of the program's is neither true nor false; test plain values")

    def __eq__(self, other: object) -> bool:
        raise TypeError("an object of the program's cannot be compared; test plain values")


def ask(line: JsonChannel, verb: str, /, *args: Any, **more: Any) -> Any:
    """What the program's process makes of a request.

    Raises:
        Exception: as it was raised there, of the built-in kind that it derives from. RuntimeError: StopIteration, which
            would end the loop of a test that it does not come from.
    """
    line.send(pack([verb, args, more], number_of))
    try:
        return unpack(answered(line), lambda number: Remote(line, number))
    except StopIteration as error:
        if verb == "next":
            raise
        raise RuntimeError(f"StopIteration: {error}") from error


def number_of(value: Any) -> int:
    if type(value) is not Remote:
        raise TypeError(f"{type(value).__name__} cannot be handed to the program; hand plain values")
    return object.__getattribute__(value, "_Remote__number")  # type: ignore[no-any-return]


def answered(line: JsonChannel) -> Any:
    answer = line.receive()
    if "found" in answer:
        return answer["found"]
    kind, why = getattr(builtins, str(answer["raised"]), None), str(answer["why"])[:MOST_REASON]
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        raise RuntimeError(why)
    try:
        error = kind(why)
    except TypeError:  # it takes more than words
        error = kind.__new__(kind, why)
        error.args = (why,)
    raise error


def judged(line: JsonChannel, test: str, nonce: str) -> str:
    """The nonce, where the test ends without an exception; else why it does not."""
    try:
        parsed = ast.parse(test, "test.py")
        exec(compile(parsed, "test.py", "exec"), Names(line, parsed))
    except BaseException as error:
        return f"- {said(error)}"
    return nonce


# ------------------------------------------------------------------------------------------------ both


def main(role: str, file: str, limits: str) -> None:
    """Be one of the two; standard input and output are used up before anything given runs."""
    wanted = json.loads(limits)
    line, isolated = JsonChannel(int(file), wanted.pop("output_bytes")), wanted.pop("isolated")
    source = sys.stdin.buffer.read().decode()
    report = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    limit(wanted)
    if isolated:
        refuse_calls()
    if role == "judge":
        os.write(report, judged(line, **json.loads(source)).encode(errors="replace"))
        os._exit(0)
    os.close(report)
    serve(line, source)


if __name__ == "__main__":
    main(*sys.argv[1:])
