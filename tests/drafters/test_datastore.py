"""The file: written at once or not at all, read by any safetensors reader, refused where it does not fit."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from datastores import Numbers, write
from forked import Forked
from safetensors.numpy import load_file

from paceline.drafters.retrieval import Datastore, DatastoreWriter, Sources, build_datastore
from paceline.drafters.retrieval.datastore import ROOM
from paceline.drafters.retrieval.datastore_build import TextPiece
from paceline.drafters.retrieval.suffix_arrays import suffix_array
from paceline.errors import ConfigError, DrafterError, PromptError

DOCUMENTS = [[1, 2, 3, 4], [5], [1, 2, 3, 9, 9]]
IDS = [1, 2, 3, 4, -1, 5, -1, 1, 2, 3, 9, 9, -1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "a.datastore", DOCUMENTS, tokenizer=Numbers(words="abc"))


def test_it_holds_the_ids_and_their_suffix_array(path: Path) -> None:
    store = Datastore.of(path, "abc")
    store.check()
    ((tokens, suffixes, n),) = store.shards.tolist()
    assert store.data[tokens : tokens + n].tolist() == IDS
    assert store.data[suffixes : suffixes + n].tolist() == suffix_array(np.array(IDS, np.int32)).tolist()
    assert (store.header.tokens, store.header.documents, store.header.vocab_size, store.header.sources) == (
        13,
        3,
        11,
        1,
    )
    assert not store.data.flags.writeable
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("links", [True, False])
def test_of_two_writers_at_once_one_gets_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def none(*given: object) -> None:
        raise PermissionError(1, "no links on this file system")

    if not links:
        monkeypatch.setattr("os.link", none)
    path, numbers = tmp_path / "both", Numbers()
    with DatastoreWriter(path, numbers, overwrite=False) as one, DatastoreWriter(path, numbers, overwrite=False) as two:
        one.add([1, 2, 3])
        two.add([4, 5, 6, 7])
        two.finish(1)
        with pytest.raises(DrafterError, match=r"^there is a file '.*both' already; choose another --output"):
            one.finish(1)
    assert list(tmp_path.iterdir()) == [path]
    Datastore(path).check()
    assert Datastore(path).header.tokens == 4
    with DatastoreWriter(path, numbers) as third:
        third.add([1])
        third.finish(1)
    assert Datastore(path).header.tokens == 1
    assert list(tmp_path.iterdir()) == [path]


def test_shards_hold_the_same_ids(tmp_path: Path) -> None:
    store = Datastore(write(tmp_path / "b", DOCUMENTS, shard_tokens=5))
    assert store.shards[:, 2].tolist() == [5, 5, 3]
    assert [i for at, _, n in store.shards.tolist() for i in store.data[at : at + n].tolist()] == IDS
    for at, suffixes, n in store.shards.tolist():
        assert store.data[suffixes : suffixes + n].tolist() == suffix_array(store.data[at : at + n]).tolist()


def test_any_safetensors_reader_opens_it(path: Path) -> None:
    found = load_file(path)
    assert sorted(found) == ["0/suffixes", "0/tokens"]
    assert found["0/tokens"].tolist() == IDS


def test_another_tokenizers_file_is_rejected(path: Path) -> None:
    with pytest.raises(
        DrafterError, match=r"built with another tokenizer, that of 'numbers' \(abc\), than the target's \(xyz\)"
    ):
        Datastore.of(path, "xyz")
    for nothing in (None, "", 5):
        with pytest.raises(DrafterError, match="must be the path"):
            Datastore.of(nothing, "abc")
    with pytest.raises(DrafterError, match=r"got 10+\.\.\.$"):
        Datastore.of(10**400, "abc")


@pytest.mark.parametrize("size", [0, 5, 8, 100, 8 + ROOM, 8 + ROOM + 50, -4])
def test_a_truncated_file_is_rejected(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DrafterError, match=r"cannot be read as a datastore \(.*; build it"):
        Datastore(path)


def test_foreign_files_are_rejected(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    other = tmp_path / "other"
    save_file({"0/tokens": np.zeros(3, np.int32)}, other, metadata={"format": "pt"})
    for found in (other, tmp_path, tmp_path / "none"):
        with pytest.raises(DrafterError, match="cannot be read as a datastore"):
            Datastore(found)
    other.write_text("Call me Ishmael. " * 1000)
    with pytest.raises(DrafterError, match="not a safetensors file"):
        Datastore(other)


def change_header(path: Path, **changes: object) -> None:
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + ROOM])
    for key, value in changes.items():
        if value is None:
            del header["__metadata__"][key]
        elif key in header["__metadata__"]:
            header["__metadata__"][key] = value
        else:
            header[key.replace("_", "/", 1)] = value
    path.write_bytes(struct.pack("<Q", ROOM) + json.dumps(header).encode().ljust(ROOM) + data[8 + ROOM :])


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "paceline-datastore-9"},
        {"tokenizer": None},
        {"tokens": "12"},
        {"tokens": "many"},
        {"0_tokens": {"dtype": "I64", "shape": [13], "data_offsets": [0, 52]}},
        {"0_tokens": {"dtype": "I32", "shape": [13], "data_offsets": [-52, 0]}},
        {"0_tokens": {"dtype": "I32", "shape": [12], "data_offsets": [0, 48]}},
        {"0_tokens": [1, 2]},
        {"7_more": {"dtype": "I32", "shape": [0], "data_offsets": [0, 0]}},
    ],
    ids=str,
)
def test_a_wrong_header_is_rejected(path: Path, changes: dict[str, object]) -> None:
    change_header(path, **changes)
    with pytest.raises(DrafterError, match="cannot be read as a datastore"):
        Datastore(path)


def test_changed_content_shows_in_the_sum(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[8 + ROOM + 4] ^= 1
    path.write_bytes(bytes(data))
    store = Datastore(path)
    with pytest.raises(DrafterError, match="damaged"):
        store.check()


def test_a_writer_leaves_nothing_behind_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.write_text("precious")
    with DatastoreWriter(path, Numbers()) as writer:  # never finished
        writer.add([1, 2, 3])
    with pytest.raises(DrafterError, match="no text"):
        write(path, [[], []])
    with pytest.raises(DrafterError, match="cannot be written"):
        write(tmp_path / "no" / "d", DOCUMENTS)
    with pytest.raises(ConfigError, match="shard_tokens"):
        write(path, DOCUMENTS, shard_tokens=1)
    with pytest.raises(ConfigError, match="do not fit the header"):
        write(path, [[1] * 4000], shard_tokens=2)
    assert path.read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from datastores import Numbers
from paceline.drafters.retrieval.datastore_build import DatastoreWriter
with DatastoreWriter(Path(sys.argv[1]), Numbers()) as writer:
    writer.add([1, 2, 3])
    os._exit(9)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs locks of files")
def test_what_a_killed_build_left_is_cleared_by_the_next_one(tmp_path: Path) -> None:
    """But not what another build writes now, nor what is no part of this datastore."""
    path = tmp_path / "a[1].datastore"
    assert Forked([path, Path(__file__).parent.parent], program=KILLED).wait() == 9
    (left,) = tmp_path.iterdir()
    other = tmp_path / "b.datastore.01234567.part"
    other.touch()
    with DatastoreWriter(path, Numbers()) as live:
        assert not left.exists()
        (writing,) = [one for one in tmp_path.iterdir() if one != other]
        write(path, [[1, 2, 3]])
        assert writing.exists()
        live.add([4, 5, 6])
        live.finish(1)
    assert sorted(tmp_path.iterdir()) == [path, other]
    assert Datastore(path).header.tokens == 3


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    """Peaks of the builder for four and sixteen shards; without shards the larger text needs several times as much."""

    def peak(shard_tokens: int, count: int) -> int:
        (tmp_path / "text").write_text("1 2 3 4 5 6 7 8 9 0\n" * count)
        tracemalloc.start()
        build_datastore(Sources.find([tmp_path / "text"]), Numbers(), tmp_path / "e", shard_tokens=shard_tokens)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    few, many, whole = peak(2**15, 15_000), peak(2**15, 60_000), peak(2**24, 60_000)
    assert many < 1.2 * few
    assert whole > 2 * many


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("1 2 3\n")
    stages: list[tuple[int, str]] = []
    header = build_datastore(
        Sources.find([tmp_path / "text"]), Numbers(), tmp_path / "g", progress=lambda *what: stages.append(what)
    )
    assert max(stages)[0] == 6
    assert (-1, "sorting shard 1") in stages
    assert (header.tokens, header.documents) == (4, 1)


def texts(pieces: list[TextPiece]) -> list[str]:
    """Whole documents."""
    found, text = [], ""
    for piece in pieces:
        text += piece.text
        if piece.last:
            found.append(text)
            text = ""
    assert not text
    return [text for text in found if text]


def read(*paths: Path, fields: tuple[str, ...] = ()) -> list[str]:
    return texts(list(Sources.find(paths, fields).pieces()))


@pytest.mark.parametrize(
    ("row", "fields", "expected"),
    [
        ({"text": "a"}, (), ["a"]),
        ({"prompt": "a", "completion": "b", "other": "c"}, (), ["ab"]),
        ({"task_id": 1, "prompt": "a", "canonical_solution": "b"}, (), ["ab"]),
        ({"turns": ["a", "b"], "category": "x"}, (), ["a", "b"]),
        ({"question": "a", "answer": "b"}, (), ["a", "b"]),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, (), ["a", "b"]),
        ({"code": "a", "tests": ["b", "c"], "text": "d"}, ("tests", "code"), ["b", "c", "a"]),
        ({"text": ""}, (), []),
        ("a", (), ["a"]),
    ],
    ids=str,
)
def test_rows_are_read_by_their_keys(tmp_path: Path, row: object, fields: tuple[str, ...], expected: list[str]) -> None:
    lines, whole = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text(json.dumps(row) + "\n\n" + json.dumps({"text": "z", "code": "z"}) + "\n")
    whole.write_text(json.dumps([row]))
    assert read(lines, fields=fields) == [*expected, "z"]
    assert read(whole, fields=fields) == expected


def test_folders_are_read_in_order_without_what_is_no_text(tmp_path: Path) -> None:
    import gzip

    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "b" / "z.txt").write_text("last")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "a.py").write_bytes("\ufefffirst\r\nline\n".encode())
    (tmp_path / "d.json").write_text('{"a": 1}')
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    assert read(tmp_path) == ["first\r\nline\n", '{"a": 1}', "packed", "last"]
    with pytest.raises(PromptError, match="is not UTF-8 text"):
        read(tmp_path / "c.bin")


def test_long_texts_come_in_pieces(tmp_path: Path) -> None:
    text = "\n".join("é" * (n % 90) for n in range(20_000)) + "x" * 600_000
    (tmp_path / "long").write_text(text, encoding="utf-8")
    pieces = list(Sources.find([tmp_path / "long"]).pieces())
    assert len(pieces) > 3
    assert max(len(piece.text) for piece in pieces) < 600_000
    assert texts(pieces) == [text]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "{", "line 1 is not JSON"),
        ("a.jsonl", "[1]", "line 1 is neither an object nor a string"),
        ("a.jsonl", '{"x": 1}', r"line 1 holds no text \(keys x\)"),
        ("a.jsonl", '{"text": "fine"}\n{"text": "a\\ud800"}', "line 2 is not valid Unicode .* character 1.; mend"),
        ("a.jsonl.gz", "plain", "cannot read"),
    ],
)
def test_unreadable_sources_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match=message):
        read(tmp_path / name)


def test_sources_that_are_not_there() -> None:
    with pytest.raises(PromptError, match="no file or folder"):
        Sources.find([Path("/nowhere/at/all")])


def test_an_empty_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no files in"):
        Sources.find([tmp_path])
