"""Made-up libraries of structured outputs that run in processes of their own, and a folder of made-up schemas."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from lab.peers import DRIVERS

HEAD = """
import time
from lab.peers.drivers.structured import FORBIDDEN, StructuredDriver, token_bytes

class Library:
    version, settings = "made up 1", {}

    def __init__(self, request):
        self.texts, self.ends = token_bytes(request), request["ends"]

def open_peer(request):
    return StructuredDriver(Library(request), request)
"""
EVERYTHING = (
    HEAD
    + """
class Text:
    def mask(self, row_v):
        pass

    def take(self, token):
        pass

Library.compile = lambda self, schema: Text
"""
)
NOTHING = (
    HEAD
    + """
def compile(self, schema):
    if "slow" in schema:
        time.sleep(60)
    raise ValueError("no schema is good enough")

Library.compile = compile
"""
)
SEVEN = (
    HEAD
    + """
class Text:
    def __init__(self, library):
        self.library, self.left = library, [library.texts.index(b"7")]

    def mask(self, row_v):
        left = self.left or self.library.ends
        row_v[[token for token in range(len(row_v)) if token not in left]] = FORBIDDEN

    def take(self, token):
        self.left = []

Library.compile = lambda self, schema: lambda: Text(self)
"""
)
MADE = {"xgrammar_peer": EVERYTHING, "outlines_peer": NOTHING, "lmfe_peer": SEVEN}
"""Driver -> what stands in for it."""

SEVENS = [
    {"description": "is 7", "schema": {"const": 7}, "tests": [{"data": 7, "valid": True}, {"data": 8, "valid": False}]},
    {
        "description": "is 7 or 7",
        "schema": {"enum": [7]},
        "tests": [{"data": 7, "valid": True}, {"data": "7", "valid": False}, {"data": 7.5, "valid": False}],
    },
    {"description": "anything, which decides nothing", "schema": {}, "tests": [{"data": 1, "valid": True}]},
]
WORKED = "There are <<3+4=7>>7 of them.\n#### 7"


def drivers(folder: Path) -> Path:
    """The real start-up, wire and walk, with made-up libraries; the folder that Python runs."""
    folder.mkdir()
    for name in ("__init__", "__main__", "wire", "structured"):
        shutil.copy(DRIVERS / f"{name}.py", folder)
    for name, text in MADE.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def command(folder: Path, name: str) -> tuple[str | Path, ...]:
    """Starts one of them."""
    return (sys.executable, folder, name)


def data(folder: Path) -> Path:
    """Three cases in the suite's layout, two schemas of Iglu (one more that refers elsewhere), three questions."""
    suite = folder / "json-schema-test-suite" / "tests" / "draft2020-12"
    suite.mkdir(parents=True)
    (suite / "const.json").write_text(json.dumps(SEVENS))
    iglu = [{"path": f"schemas/{i}", "schema": {"const": 7, "self": {"name": str(i)}}} for i in range(2)]
    iglu.append({"path": "schemas/2", "schema": {"$ref": "http://elsewhere/schema"}})
    questions = [{"question": f"How many are {i}?", "answer": WORKED} for i in range(3)]
    for name, rows in (("iglu-central/part", iglu), ("gsm8k/test", questions)):
        (folder / name).parent.mkdir()
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
