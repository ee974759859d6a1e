"""Tables per tenant: kept apart, bounded, saved, read again, and refused where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from toys import ToyRunner

from paceline.assembly import build_parts
from paceline.config import SpeculativeConfig
from paceline.drafters import DrafterArgs
from paceline.drafters.common.tables import Arrays, TenantTables
from paceline.drafters.diffusion.trigram_counts import SMALLEST, TrigramCounts
from paceline.drafters.lookup.aded import TrigramTable
from paceline.drafters.lookup.token_recycling import CandidateTable
from paceline.drafters.suffix.tree import SuffixCache
from paceline.engine import DrafterSet
from paceline.errors import ConfigError, DrafterError


class Counts:
    """A table of eight counters."""

    def __init__(self) -> None:
        self.count_n = np.zeros(8, np.int64)

    def to_arrays(self) -> Arrays:
        return {"count": self.count_n}

    def read_arrays(self, arrays: Arrays, stored: int | None = None) -> None:
        count_n = arrays["count"]
        if count_n.shape != (8,):
            raise ValueError(f"count has shape {count_n.shape}")
        self.count_n = count_n.astype(np.int64)


def args(vocab: int = 11, words: str = "abc") -> DrafterArgs:
    return DrafterArgs(vocab_size=vocab, index=0, max_context=64, fingerprint=lambda: words)


def make(
    folder: Path | None = None, *, shared: bool = False, most: int = 4, given: DrafterArgs | None = None
) -> TenantTables[Counts]:
    where = None if folder is None else str(folder)
    return TenantTables("counts", given or args(), Counts, folder=where, shared=shared, max_tenants=most)


def test_tenants_are_kept_apart_unless_shared() -> None:
    apart, shared = make(), make(shared=True)
    for tables in (apart, shared):
        tables.of("a").count_n[0] = 5
    assert apart.of("b").count_n[0] == 0
    assert shared.of("b").count_n[0] == 5


def test_the_least_recently_used_tenant_goes_first() -> None:
    tables = make(most=2)
    for name in ("a", "b", "a", "c"):
        tables.of(name).count_n[0] += 1
    assert len(tables) == 2
    assert (tables.of("a").count_n[0], tables.of("c").count_n[0]) == (2, 1)
    assert tables.of("b").count_n[0] == 0


@pytest.mark.parametrize("shared", [False, True])
def test_what_was_saved_is_read_again(tmp_path: Path, shared: bool) -> None:
    tables = make(tmp_path / "new", shared=shared)
    tables.of("a").count_n[3] = 7
    tables.of("b/ü").count_n[1] = 2
    path = tables.save()
    assert path.parent == tmp_path / "new"
    again = make(tmp_path / "new", shared=shared)
    assert again.of("a").count_n[3] == 7
    assert again.of("b/ü").count_n[1] == 2
    fewer = make(tmp_path / "new", shared=shared, most=1)
    assert fewer.of("b/ü").count_n[1] == 2


def test_what_does_not_fit_is_rejected_in_one_line(tmp_path: Path) -> None:
    tables = make(tmp_path)
    tables.of("a")
    path = tables.save()
    with pytest.raises(DrafterError, match="tokenizer 'abc' instead of 'xyz'"):
        make(tmp_path, given=args(words="xyz"))
    with pytest.raises(DrafterError, match="shared_tables"):
        make(tmp_path, shared=True)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) - 3], whole[:20], b"", b"\x80\x04pickle"):
        path.write_bytes(damaged)
        with pytest.raises(DrafterError, match="cannot be read") as caught:
            make(tmp_path)
        assert "\n" not in str(caught.value)


def test_a_table_that_rejects_its_arrays(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tables = make(tmp_path)
    tables.of("a").count_n = np.zeros(5, np.int64)
    tables.save()
    with pytest.raises(DrafterError, match="shape"):
        make(tmp_path)
    save_file({"count": np.zeros(8)}, tmp_path / "counts.safetensors", metadata={"format": "other"})
    with pytest.raises(DrafterError, match="format 'other'"):
        make(tmp_path)


def test_saves_at_once_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One begins and ends while the other writes; what a killed one has left is cleared away."""
    first, second = make(tmp_path), make(tmp_path)
    first.of("a").count_n[0], second.of("a").count_n[0] = 1, 2
    (tmp_path / "counts.safetensors.0123abcd.part").write_bytes(b"half")
    begun, whole = [], safetensors.numpy.save

    def slow(tensors: Any, metadata: Any) -> bytes:
        begun.append(len(begun))
        if len(begun) == 1:
            second.save()
        return whole(tensors, metadata)

    monkeypatch.setattr("safetensors.numpy.save", slow)
    first.save()
    assert len(begun) == 2
    assert make(tmp_path).of("a").count_n[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["counts.safetensors"]


def test_saving_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(DrafterError, match="no folder"):
        make().save()
    (tmp_path / "file").write_text("x")
    with pytest.raises(DrafterError, match="cannot be written"):
        make().save(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="tables must be a folder"):
        TenantTables("counts", args(), Counts, folder="")


def test_a_folder_that_cannot_be_is_rejected_before_anything_is_learned(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "there").mkdir()
    for name, why in (
        ("file", "a file is there"),
        ("file/below", "Not a directory"),
        ("nul\0", "null"),
        ("long" * 200, "too long"),
        ("link", "broken link"),
    ):
        with pytest.raises(ConfigError, match=f"tables must be a folder and .*{why}") as caught:
            make(tmp_path / name)
        assert "\n" not in str(caught.value)
    for name in ("there", "new", "new/er"):
        assert make(tmp_path / name).save().parent == tmp_path / name


def rewritten(path: Path, tenants: str | None, *, shared: bool = False) -> None:
    """Put another list of tenants into a file of tables; None takes it out."""
    with safetensors.safe_open(path, framework="np") as file:
        header, arrays = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    header.pop("tenants", None)
    added = {} if tenants is None else {"tenants": tenants}
    path.write_bytes(safetensors.numpy.save(arrays, metadata={**header, **added, "shared": json.dumps(shared)}))


@pytest.mark.parametrize(
    ("tenants", "why"),
    [
        (None, "list of different names"),
        ('"t0"', "list of different names"),
        ('{"a": 1, "b": 2}', "list of different names"),
        ("[1, 2]", "list of different names"),
        ('["a", null]', "list of different names"),
        ('["a", "a"]', "list of different names"),
        ("[]", "every table once, and there are 0 names"),
        ('["a"]', "every table once, and there are 1 names"),
        ('["a", "b", "c"]', "every table once, and there are 3 names"),
        ('["a", "b"', "delimiter"),
        ("[" * 100_000, "recursion"),
        ("[" * 100_000 + "]" * 100_000, "recursion"),
    ],
    ids=lambda value: str(value)[:16],
)
def test_whose_the_tables_are_must_be_clear(tmp_path: Path, tenants: str | None, why: str) -> None:
    tables = make(tmp_path)
    tables.of("a").count_n[0], tables.of("b").count_n[0] = 1, 2
    path = tables.save()
    rewritten(path, tenants)
    with pytest.raises(DrafterError, match=f"{path.name}.* cannot be read .*{why}.*; delete the file") as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)
    rewritten(path, '["b", "a"]')
    assert make(tmp_path).of("a").count_n[0] == 2


def test_shared_tables_have_no_name(tmp_path: Path) -> None:
    tables = make(tmp_path, shared=True)
    tables.of("a").count_n[0] = 1
    path = tables.save()
    rewritten(path, '["a"]', shared=True)
    with pytest.raises(DrafterError, match="no names where tables are shared"):
        make(tmp_path, shared=True)
    rewritten(path, '[""]', shared=True)
    assert make(tmp_path, shared=True).of("b").count_n[0] == 1


def drafter_set_of(*methods: dict[str, Any]) -> DrafterSet:
    config = SpeculativeConfig.parse({"method": list(methods)})
    return build_parts(ToyRunner(), config, load=lambda name: ToyRunner())[1].drafter_set


@pytest.mark.parametrize(
    ("method", "option"), [("aded", {"table_width": 3}), ("suffix", {"suffix_decoding_max_tree_depth": 9})], ids=str
)
def test_two_of_a_method_must_not_save_to_one_file(tmp_path: Path, method: str, option: dict[str, int]) -> None:
    folder, other = str(tmp_path / "one"), str(tmp_path / "other")
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    first = {"method": method, "tables": folder}
    for same in (folder, f"{folder}/", f"{folder}/../one", str(tmp_path / "link")):
        with pytest.raises(
            ConfigError, match=f"tables must be a folder for each '{method}' .* another folder, got .*{method}.safe"
        ):
            drafter_set_of(first, {"method": method, "tables": same, **option})
    drafter_set = drafter_set_of(first, {"method": method, "tables": other, **option})
    assert [path.parent for path in drafter_set.save_tables()] == [Path(folder), Path(other)]
    with pytest.raises(
        ConfigError, match=r"folder must be a folder for each .*; leave it out, and give each its own 'tables'"
    ):
        drafter_set.save_tables(tmp_path / "third")
    assert not (tmp_path / "third").exists()


def test_methods_of_different_names_share_a_folder(tmp_path: Path) -> None:
    drafter_set = drafter_set_of(
        {"method": "aded", "tables": str(tmp_path)}, {"method": "suffix", "tables": str(tmp_path)}
    )
    assert sorted(path.name for path in drafter_set.save_tables()) == ["aded.safetensors", "suffix.safetensors"]
    assert (
        len(drafter_set_of({"method": "aded"}, {"method": "aded", "table_width": 3}, {"method": "ngram"}).drafters) == 3
    )


# ---------------------------------------------------------------------------------------- rows that are no tokens

WIDE, NARROW = 14, 11
KINDS: dict[str, Callable[[int], Any]] = {
    "token_recycling": CandidateTable,
    "aded": partial(TrigramTable, 64, 3),
    "suffix": partial(SuffixCache, 6, 9, 99),
}


def taught(kind: str, size: int) -> Any:
    """A table of a model with so many rows; the last one stands in it too, in every way that an id can."""
    table, last = KINDS[kind](size), size - 1
    if kind == "token_recycling":
        table.candidates_vk[2] = [last, 5, size - 2, 3, 1, 0, 4, 6]
        table.candidates_vk[last] = [1, *[-1] * 7]
    for text in ([1, 2, 3, 1, 2, last], [last, 2, 3], [4, 5, 6, 4]) if kind != "token_recycling" else ():
        table.learn(text) if kind == "aded" else table.add(np.array(text, np.int32))
    return table


def saved(kind: str, size: int, folder: Path, words: str = "abc") -> TenantTables[Any]:
    """Tables in a file, read again."""
    return TenantTables(kind, args(size, words), partial(KINDS[kind], size), folder=str(folder))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_with_more_rows_learned_is_read_without_ids_that_are_no_tokens(kind: str, tmp_path: Path) -> None:
    for size in (WIDE, NARROW):  # the second is the control: its last id is a token
        folder = tmp_path / str(size)
        wide = TenantTables(kind, args(size), lambda size=size: taught(kind, size), folder=str(folder))  # type: ignore[misc]
        wide.of("")
        wide.save()
    cut, whole = ({n: a.tolist() for n, a in saved(kind, NARROW, tmp_path / str(size)).of("").to_arrays().items()}
                  for size in (WIDE, NARROW))  # fmt: skip
    if kind == "token_recycling":
        assert cut == {"tokens": [2], "candidates": [[5, 3, 1, 0, 4, 6, -1, -1]]}
        assert whole == {"tokens": [2, 10], "candidates": [[10, 5, 9, 3, 1, 0, 4, 6], [1, *[-1] * 7]]}
    elif kind == "aded":
        pairs = [(pair >> 32, pair & 0xFFFFFFFF) for pair in cut["pairs"]]
        assert sorted(pairs) == [(1, 2), (2, 3), (3, 1), (4, 5), (5, 6)]
        assert cut["followers"][pairs.index((1, 2))] == [3, -1, -1]
        assert cut["weights"][pairs.index((1, 2))][1] == 0.0
        assert len(whole["pairs"]) == 6
    else:
        assert (cut["tokens"], cut["lengths"]) == ([4, 5, 6, 4], [4])
        assert whole["lengths"] == [6, 3, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_another_size_is_no_damage_and_damage_is_found(kind: str, tmp_path: Path) -> None:
    unknown = TenantTables(kind, args(WIDE, ""), lambda: taught(kind, WIDE), folder=str(tmp_path / "unknown"))
    torn = TenantTables(kind, args(NARROW), lambda: taught(kind, WIDE), folder=str(tmp_path / "torn"))
    for tables in (unknown, torn):
        tables.of("")
        tables.save()
    with pytest.raises(DrafterError, match=f"vocab_size '{WIDE}' instead of '{NARROW}'; choose another folder"):
        saved(kind, NARROW, tmp_path / "unknown", "")
    with pytest.raises(DrafterError, match=rf"must lie in .*\.\.{NARROW - 1}\); delete the file"):
        saved(kind, NARROW, tmp_path / "torn")


def test_hashes_of_other_ids_are_never_looked_up(tmp_path: Path) -> None:
    """Those of diffuspec do not say which ids they are of."""
    wide = TrigramCounts(SMALLEST, WIDE)
    wide.learn([1, 2, 3, 1, 2, WIDE - 1])
    narrow = TrigramCounts(SMALLEST, NARROW)
    narrow.read_arrays(wide.to_arrays(), WIDE)
    assert narrow.chance(1, 2, 3) == pytest.approx(wide.chance(1, 2, 3), abs=0.05)
    assert narrow.chance(1, 2, 3) > narrow.chance(1, 2, 4)
