"""Small parts: files of the package under 300 lines, functions under 40, nine in ten under 30."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [
    *sorted((ROOT / "src").rglob("*.py")),
    *sorted((ROOT / "benchmarks").glob("*.py")),
    *sorted((ROOT / "recipes").rglob("*.py")),
]
MOST_LINES, MOST, MOSTLY = 300, 40, 30


def functions(source: str) -> dict[str, int]:
    """Name and line of every function -> its lines from `def` to the last one; decorators are not counted."""
    return {
        f"{node.name}:{node.lineno}": (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert not {name: count for name, count in lengths.items() if count >= MOST_LINES}


def test_functions_are_short() -> None:
    lengths = {
        f"{path.relative_to(ROOT)}:{name}": count
        for path in FILES
        for name, count in functions(path.read_text(encoding="utf-8")).items()
    }
    assert not {name: count for name, count in lengths.items() if count > MOST}
    assert sum(count < MOSTLY for count in lengths.values()) >= 0.9 * len(lengths)


def test_a_long_function_would_show() -> None:
    head = "@decorated\n@again\ndef long(\n    one: int,\n) -> None:\n"
    source = head + '    """Says."""\n' + "    pass\n" * (MOST - 4)
    assert list(functions(source).values()) == [MOST]
    assert list(functions(source + "    pass\n").values()) == [MOST + 1]
