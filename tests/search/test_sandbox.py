"""The sandbox: right programs pass, forgers do not, and nothing that a program tries reaches the machine.

Every attack is also run where it succeeds, so that it is one: forgeries against a plain run of program and test, the
others without isolation.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ConfigError
from paceline.search import Sandbox, run_tests
from paceline.search.sandbox.verdicts import available_isolation

isolated = pytest.mark.skipif(available_isolation() is None, reason="this machine permits no user namespaces")
posix = pytest.mark.skipif(os.name != "posix", reason="programs are run on POSIX systems")

GOOD = """
import math
from collections import Counter

class Stack:
    def __init__(self):
        self.items = []
    def push(self, one):
        self.items.append(one)
        return self
    def __eq__(self, other):
        return True

def counted(items):
    return Counter(items)

def count_up(n):
    yield from range(n)

def power(n):
    return 10 ** n

def fail(kind):
    raise kind_of(kind)("no")

class Odd(ValueError):
    pass

def kind_of(kind):
    return {"odd": Odd, "key": KeyError}[kind]

def same(value):
    return value
"""

RIGHT = (
    "assert counted('aab') == {'a': 2, 'b': 1}",
    "assert Stack().push(3).push('x').items == [3, 'x']",
    "assert list(count_up(4)) == [0, 1, 2, 3]\nassert next(iter(count_up(2))) == 0",
    "assert power(6000) == 10 ** 6000",
    "try:\n    fail('odd')\nexcept ValueError as error:\n    assert 'no' in str(error)\nelse:\n    assert False",
    "assert math.isclose(same(0.1 + 0.2), 0.3)",
    "def check(candidate):\n    assert [candidate(n) for n in (1, 2)] == [10, 100]\ncheck(power)",
    "values = [None, True, -1, 1.5, float('inf'), 2j, 'é\\ud800', b'x', (1, [2]), {3}, frozenset({4}), {(1,): {}}]\n"
    "back = same(values)\nassert back == values\nassert [type(v) for v in back] == [type(v) for v in values]",
)
WRONG = {
    "assert power(2) == 101": "AssertionError",
    "assert Stack() == 3": "cannot be compared",
    "assert Stack()": "neither true nor false",
    "assert missing(2) == 3": "name 'missing' is not defined",
    "assert power(": "SyntaxError",
    "fail('key')": "KeyError",
    "same(lambda: 1)": "cannot be handed to the program",
    "raise SystemExit(0)": "SystemExit",
    "import os; os._exit(0)": "without a verdict",
}


@isolated
def test_tests_that_hold_pass_and_others_say_why_they_do_not() -> None:
    verdict = run_tests(GOOD, [*RIGHT, *WRONG])
    assert verdict.passed == (True,) * len(RIGHT) + (False,) * len(WRONG), verdict.reasons
    for reason, expected in zip(verdict.reasons, ("",) * len(RIGHT) + tuple(WRONG.values()), strict=True):
        assert expected in reason
        assert bool(reason) == bool(expected)
    assert verdict.share == len(RIGHT) / (len(RIGHT) + len(WRONG))


@isolated
def test_no_name_of_the_harness_stands_before_the_programs() -> None:
    program = """
class Box:
    def __init__(self): self._items, self._line, self._number = [1], "a", 7
def told(**more): return sorted(more)
"""
    tests = [
        "one = Box()\nassert (one._items, one._line, one._number) == ([1], 'a', 7)",
        "names = ['function', 'line', 'self', 'verb']\nassert told(**dict.fromkeys(names)) == names",
    ]
    assert run_tests(program, tests).passed == (True, True)


@isolated
def test_a_reason_is_one_line_whatever_the_exception_says() -> None:
    program = """
class Mute(ValueError):
    def __str__(self): raise SystemExit(0)
def f(kind):
    raise Mute if kind == "mute" else ValueError("a\\n\\x1b[31mb\\u2028c\\ud800")
"""
    tests = ["f('loud')", "f('mute')", "try: f('mute')\nexcept ValueError: pass"]
    assert run_tests(program, tests).reasons == ("ValueError: ValueError: a  [31mb c ", "ValueError: Mute: ", "")
    assert "unterminated" in run_tests("x = 'a", ["assert True"]).reasons[0]


@isolated
def test_programs_are_judged_in_their_order_each_test_with_a_fresh_start() -> None:
    programs = [f"seen = []\ndef f(n):\n    seen.append(n)\n    return n + {k} + len(seen)" for k in range(4)]
    tests = ["assert f(1) == 3", "assert f(1) == 4"]
    found = Sandbox(workers=4).judge([*programs, "1 +"], tests)
    assert [one.passed for one in found] == [
        *((False, False), (True, False), (False, True), (False, False), (False, False))
    ]
    assert "SyntaxError" in found[-1].reasons[0]


TEST = "assert answer(6) == 42\nassert isinstance(answer(6), int)"

FORGERIES = {
    "exit": "import os, atexit\ndef answer(n): os._exit(0)",
    "exit at once": "import os\nos._exit(0)",
    "exit by exception": "def answer(n): raise SystemExit(0)",
    "equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def answer(n): return Any(1)""",
    "builtins": """
import builtins
class Free:
    def __eq__(self, other): return True
builtins.isinstance = lambda *args: True
def answer(n): return Free()""",
    "assertion errors that are none": """
import builtins, sys, os
sys.excepthook = lambda *args: os._exit(0)
def answer(n): return 41""",
    "a name of the test's": """
class Free:
    def __eq__(self, other): return True
def isinstance(*args): return True
def answer(n): return Free()""",
    "frames": """
import sys
class Free(int):
    pass
def answer(n):
    frame, right = sys._getframe(), int("4" + "2")
    while frame is not None:
        if right in frame.f_code.co_consts: return right
        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
            if type(value) is str and f"== {right}" in value: return right
        frame = frame.f_back
    return 41""",
    "all objects": """
import gc
def answer(n):
    right = int("4" + "2")
    for one in gc.get_objects():
        for text in one.values() if type(one) is dict else one if type(one) in (tuple, list) else ():
            if type(text) is str and f"== {right}" in text: return right
    return 41""",
    "memory": """
import os
def answer(n):
    right = int("4" + "2")
    for pid in os.listdir("/proc"):
        try:
            if pid.isdigit() and f"== {right}" in open(f"/proc/{pid}/cmdline", errors="replace").read(): return right
        except OSError: pass
    return 41""",
    "modules": """
import sys, types
fake = types.ModuleType("json")
fake.loads = lambda text: {"found": 42}
fake.dumps = lambda *args, **more: '{"found": 42.0}'
sys.modules["json"] = fake
main = sys.modules["__main__"]
main.pack = lambda *args: 42.0
main.judged = lambda *args: "passed"
def answer(n): return 42.0""",
    "words": """
import os, sys
print("passed"); print("- "); sys.stdout.flush()
for file in range(3, 64):
    try: os.write(file, b'{"found": ["answer"]}\\npassed\\n{"found": true}\\n')
    except OSError: pass
def answer(n): return 41""",
    "tracing": """
import sys
def answer(n):
    def trace(frame, event, arg):
        return trace
    sys.settrace(trace)
    sys.setprofile(lambda *args: None)
    return 41""",
    "answers that are no plain data": """
import sys
def answer(n): return 41
main = sys.modules["__main__"]
main.pack = lambda *args: {"object": 0}""",
    "the process tree's memory": """
import os, re
def answer(n):
    right = int("4" + "2")
    for pid in ("self", os.getppid()):
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for low, high in re.findall("([0-9a-f]+)-([0-9a-f]+) rw", maps.read()):
                memory.seek(int(low, 16))
                if f"== {right}".encode() in memory.read(int(high, 16) - int(low, 16)): return right
    return 41""",
    "a raised assertion": "def answer(n): raise AssertionError",
}
OF_THE_HARNESS = {"modules", "words", "tracing", "answers that are no plain data", "a raised assertion"}
"""Attacks on this harness; all others fool a plain run."""


@isolated
@pytest.mark.parametrize("name", FORGERIES)
def test_no_program_can_forge_a_pass(name: str) -> None:
    verdict = run_tests(FORGERIES[name], [TEST])
    assert verdict.passed == (False,)
    plain = subprocess.run(
        [sys.executable, "-I", "-c", f"{FORGERIES[name]}\n{TEST}"], capture_output=True, timeout=30, check=False
    )
    assert (plain.returncode == 0) == (name not in OF_THE_HARNESS)


def test_an_honest_program_passes_where_forgers_do_not() -> None:
    if available_isolation() is None:
        pytest.skip("this machine permits no user namespaces")
    assert run_tests("def answer(n): return 7 * n", [TEST]).passed == (True,)


@isolated
def test_no_exception_of_the_programs_ends_a_loop_of_the_test() -> None:
    program = "def even(n):\n    if n > 2: raise StopIteration\n    return True"
    test = "assert all(map(even, [2, 3, 4]))"
    assert run_tests(program, [test, "assert all(map(even, [1, 2]))"]).passed == (False, True)
    space: dict[str, Any] = {}
    exec(f"{program}\n{test}", space)  # which it does to a plain run


@isolated
def test_a_function_may_be_called_as_a_module_is() -> None:
    program = "def calendar(n): return n + 1\ndef math(n): return n"
    assert run_tests(program, ["assert calendar(2) == 3", "assert math(2) == 2"]).passed == (True, True)
    assert run_tests(program, ["assert math(math.floor(2.5)) == 2"]).passed == (False,)


@isolated
@pytest.mark.parametrize("name", ["math", "isclose", "all", "sorted"])
def test_names_that_a_test_relies_on_are_not_the_programs(name: str) -> None:
    """A program that brings its own `math` or `sorted` does not decide with it."""
    program = f"""
class Free:
    def __getattr__(self, name): return lambda *args, **more: True
    def __call__(self, *args, **more): return [3, 4]
{name} = Free()
def f(n): return [4, 3]"""
    tests = {
        "math": "assert math.isclose(f(1)[0], 5.0)",
        "isclose": "from math import isclose\nassert isclose(f(1)[0], 5.0)",
        "all": "assert all(n == 3 for n in f(1))",
        "sorted": "assert sorted(f(1)) == [4, 3]",
    }
    assert run_tests(program, [tests[name]]).passed == (False,)
    assert run_tests(program, ["assert sorted(f(1)) == [3, 4]"]).passed == (True,)


# ------------------------------------------------------------------------------------------------ the machine


def both(program: str, test: str, **more: Any) -> tuple[bool, bool]:
    """Whether a test passes isolated, and not."""
    return tuple(run_tests(program, [test], unsafe_execution=u, **more).passed[0] for u in (False, True))


@isolated
def test_files_are_neither_read_nor_written(tmp_path: Path) -> None:
    secret, made = tmp_path / "secret", tmp_path / "made"
    secret.write_text("a secret")
    os.chmod(tmp_path, 0o777)
    program = f"""
import os
def read():
    return open({str(secret)!r}).read()
def write(where):
    open(where, "w").write("x")
    return os.path.exists(where)
def seen():
    return sorted(set(os.listdir("/")) - {{"usr", "bin", "sbin", "lib", "lib32", "lib64", "dev", "tmp"}})
"""
    assert both(program, "assert read() == 'a secret'") == (False, True)
    run_tests(program, [f"write({str(made)!r})"])
    assert not made.exists()
    run_tests(program, [f"write({str(made)!r})"], unsafe_execution=True)
    assert made.exists()
    places = ["/x", "/usr/x", f"{sys.base_prefix}/x", "/dev/x"]
    assert not any(run_tests(program, [f"assert write({place!r})" for place in places]).passed)
    assert run_tests(program, ["assert write('/tmp/x')", "assert write('x')"]).passed == (True, True)
    prefix = Path(sys.base_prefix).parts[1]
    assert run_tests(program, [f"assert set(seen()) <= {{{prefix!r}}}"]).passed == (True,)


@isolated
def test_no_socket_leads_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = f"""
import socket
def connect():
    socket.create_connection({server.getsockname()!r}, timeout=2).close()
    return "connected"
"""
        assert both(program, "assert connect() == 'connected'") == (False, True)
        server.settimeout(2)
        server.accept()[0].close()
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


DAEMON = """
import ctypes, os, time
def leave():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, b"left-behind", 0, 0, 0)
            time.sleep(60)
        os._exit(0)
    os.wait()
    return "left"
"""


def left_behind() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):
            if path.read_text().strip() == "left-behind":
                found.append(int(path.parent.name))
    return found


@isolated
def test_what_a_program_starts_dies_with_it() -> None:
    test = "assert leave() == 'left'\nimport time; time.sleep(0.2)"
    assert run_tests(DAEMON, [test]).passed == (True,)
    assert not until_none()
    assert run_tests(DAEMON, [test], unsafe_execution=True).passed == (True,)
    survivors = left_behind()
    for pid in survivors:
        os.kill(pid, signal.SIGKILL)
    assert survivors


def until_none() -> list[int]:
    """What is left behind after ten seconds at most: a namespace takes a moment to die."""
    end = time.monotonic() + 10
    while left_behind() and time.monotonic() < end:
        time.sleep(0.02)
    return left_behind()


@isolated
@pytest.mark.parametrize(("test", "limit"), [("stay()", 1.0), ("stay(0)", 10.0)], ids=["at the limit", "at the end"])
def test_no_program_can_undo_what_makes_it_die(test: str, limit: float) -> None:
    program = """
import ctypes, os, time
def stay(seconds=60):
    libc = ctypes.CDLL(None)
    libc.prctl(1, 0, 0, 0, 0)
    libc.prctl(15, b"left-behind", 0, 0, 0)
    os.setsid()
    if seconds == 0 and os.fork(): return
    time.sleep(60)
"""
    assert run_tests(program, [test], seconds=limit).passed == (test == "stay(0)",)
    assert not until_none()


SYSTEM_CALLS = """
import ctypes, socket
libc = ctypes.CDLL(None, use_errno=True)
def shared_memory(): return libc.shmget(0, ctypes.c_size_t(2**20), 0o1600) >= 0
def messages(): return libc.msgget(0, 0o1600) >= 0
def keyring(): return libc.syscall({"x86_64": 250, "aarch64": 219}[__import__("os").uname().machine], 0, -3, 1) >= 0
def io_uring(): return libc.syscall(425, 8, ctypes.create_string_buffer(256)) >= 0
def nameless_file():
    try: __import__("os").memfd_create("x")
    except OSError: return False
    return True
def family(number):
    try: socket.socket(number, socket.SOCK_STREAM).close()
    except OSError: return False
    return True
"""


@isolated
def test_what_no_namespace_holds_is_refused() -> None:
    """Memory that no limit counts, keys of the user's, sockets to the host of a virtual machine."""
    asked = ("shared_memory()", "messages()", "keyring()", "io_uring()", "family(40)", "nameless_file()")
    tests = [f"assert {one} is {{}}" for one in asked]
    assert run_tests(SYSTEM_CALLS, [one.format(False) for one in tests]).passed == (True,) * len(asked)
    assert run_tests(SYSTEM_CALLS, ["assert family(1) and family(2)"]).passed == (True,)
    free = run_tests(SYSTEM_CALLS, [one.format(True) for one in tests[:2]], unsafe_execution=True)
    assert free.passed == (True, True)


@isolated
def test_a_program_is_nobody_without_rights_secrets_or_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "x")
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def who():
    return [os.getuid(), os.getgid(), os.getgroups()]
def variables():
    return sorted(set(os.environ) - {"LC_CTYPE", "PWD"})
def neighbours():
    return [pid for pid in range(1, 70000) if pid != os.getpid() and pid != 1 and libc.kill(pid, 0) == 0]
def rights():
    if os.fork() == 0: os._exit(0)
    return [libc.unshare(0x10000000), libc.sethostname(b"x", 1), libc.mount(b"t", b"/tmp", b"tmpfs", 0, None)]
def root():
    os.setuid(0)
"""
    tests = [
        "user, group, groups = who()\nassert user == group == 65534\nassert set(groups) <= {65534}",
        "assert variables() == []",
        "assert neighbours() == []",
        "assert rights() == [-1, -1, -1]",
        "try: root()\nexcept OSError: pass\nelse: assert False",
    ]
    assert run_tests(program, tests).passed == (True,) * 5


@isolated
def test_limits_hold() -> None:
    program = """
import os, time
def memory(n): return len(bytearray(n))
def file(n):
    with open("/tmp/x", "wb") as out: out.write(bytes(n))
    return os.path.getsize("/tmp/x")
def flood(n): return "x" * n
def printed(n):
    for _ in range(n): print("x" * 1000)
    return n
def forks():
    made = 0
    try:
        while made < 100:
            if os.fork() == 0: time.sleep(5); os._exit(0)
            made += 1
    except OSError: pass
    return made
def hang():
    while True: pass
def sleep(): time.sleep(60)
"""
    small = {"memory_bytes": 2**28, "file_bytes": 2**16, "output_bytes": 2**16, "processes": 6}
    tests = ["memory(2**29)", "file(2**17)", "flood(2**17)", "assert forks() >= 10"]
    assert run_tests(program, tests, **small).passed == (False,) * 4
    fine = ["memory(2**26)", "assert file(2**15) == 2**15", "flood(2**15)", "printed(10**5)", "assert forks() >= 2"]
    assert run_tests(program, fine, **small).passed == (True,) * 5
    found = run_tests(program, ["hang()", "sleep()", "while True: pass"], seconds=0.4)
    assert found.reasons == ("no verdict within 0.4 s",) * 3


@posix
def test_interrupted_it_begins_no_more_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, popen = list[Any](), subprocess.Popen

    def counting(command: Any, **more: Any) -> Any:
        begun.append(command)
        if len(begun) == 6:
            os.kill(os.getpid(), signal.SIGINT)
        return popen(command, **more)

    box = Sandbox(seconds=0.3, workers=2, unsafe_execution=True)
    monkeypatch.setattr(subprocess, "Popen", counting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a suite in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            box.judge(["while True: pass"] * 40, ["assert True"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert 6 <= len(begun) <= 12


@posix
def test_without_isolation_nothing_runs_unless_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.search.sandbox.verdicts.available_isolation", lambda: None)
    with pytest.raises(ConfigError, match=r"permits no sandbox .* unsafe_execution \(--unsafe-execution\)"):
        run_tests("def f(): return 1", ["assert f() == 1"])
    found = run_tests("def f(): return 1", ["assert f() == 1", "assert f() == 2"], unsafe_execution=True)
    assert found.passed == (True, False)


@posix
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seconds", 0),
        ("memory_bytes", 1),
        ("processes", 0),
        ("output_bytes", 1),
        ("file_bytes", -1),
        ("unsafe_execution", "no"),
    ],
)
def test_bad_limits_get_one_line(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{option} must be"):
        run_tests("", ["pass"], **{option: value})
