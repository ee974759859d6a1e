"""Tables that a drafter learns from text: one per tenant, on disk between runs.

A drafter that has them keeps a `TenantTables` under the name `tables`, which `LLM.save_tables` finds.

A file is one method's tables of all tenants: tensors are named "INDEX/NAME" after the tenant's position in the list
`tenants` of the header, beside the method, the vocabulary's size and the tokenizer's fingerprint, which must fit when
it is read. A model may have more rows than its tokenizer has tokens: where the tokenizer is known, and the same, the
size may be another one, and ids beyond the model's own are left out.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from typing import Final, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.drafters.base import Drafter, DrafterArgs, SavedTables
from paceline.drafters.common.part_file import PartFile
from paceline.errors import DrafterError
from paceline.utils import integer, need

logger = logging.getLogger("paceline.drafters")

FORMAT: Final = "paceline-tables-1"
MAX_TENANTS: Final = 64
Arrays = Mapping[str, npt.NDArray[np.generic]]


class OtherOptionError(ValueError):
    """Arrays that are whole, of a table that was configured otherwise."""

    def __init__(self, name: str, kept: object, requested: object) -> None:
        super().__init__(f"with {name} {requested}: they were stored with {name} {kept}")


class TenantTable(Protocol):
    """Holds what one tenant's texts have taught a drafter."""

    def to_arrays(self) -> Arrays:
        """All that must be kept, as NumPy arrays of fixed dtypes; at least one."""

    def read_arrays(self, arrays: Arrays, stored: int | None = None) -> None:
        """Take over what `to_arrays` of an equally configured table gave.

        Args:
            stored: the vocabulary's size that they were stored with; None is the table's own. What has ids beyond the
                own one is left out.
        Raises:
            OtherOptionError: arrays of a table with another option.
            ValueError: arrays that are missing, of another shape or dtype, or out of range.
        """


T = TypeVar("T", bound=TenantTable)


class TenantTables(Generic[T]):
    """One table per tenant, the least recently used dropped beyond `max_tenants`.

    Args:
        method: the drafter's name.
        args: of the drafter.
        new: makes an empty table.
        folder: where tables lie between runs, or None; what lies there for this method is read now.
        shared: one table for all tenants.
        max_tenants: most tables at a time.
    Raises:
        ConfigError: a value outside its range, or a `folder` that is a file or cannot be one.
        DrafterError: a file there is damaged, of another method, or made with another tokenizer.
    """

    def __init__(
        self,
        method: str,
        args: DrafterArgs,
        new: Callable[[], T],
        *,
        folder: str | None = None,
        shared: bool = False,
        max_tenants: int = MAX_TENANTS,
    ) -> None:
        need(isinstance(shared, bool), "shared_tables", "be True or False", shared)
        integer("max_tenants", max_tenants, 1)
        self.method, self.new, self.shared, self.max_tenants = method, new, shared, max_tenants
        self.folder = None if folder is None else _folder(folder)
        self._args = args
        self._of: OrderedDict[str, T] = OrderedDict()
        if self.folder is not None and (self.folder / self.file_name).exists():
            self._read(self.folder / self.file_name)

    def __len__(self) -> int:
        return len(self._of)

    def of(self, tenant: str) -> T:
        """This tenant's table; an empty one at first."""
        key = "" if self.shared else tenant
        table = self._of.get(key)
        if table is None:
            table = self._of[key] = self.new()
            while len(self._of) > self.max_tenants:
                dropped, _ = self._of.popitem(last=False)
                logger.info(
                    "the %s table of tenant %r is dropped: more than %d tenants", self.method, dropped, self.max_tenants
                )
        else:
            self._of.move_to_end(key)
        return table

    def save(self, folder: str | Path | None = None) -> Path:
        """Write all tables, at once or not at all; returns the file.

        Args:
            folder: made if need be; None takes the one given at the start.
        Raises:
            DrafterError: no folder, or it cannot be written.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save

        where = self.folder if folder is None else Path(folder)
        if where is None:
            raise DrafterError(
                f"the tables of {self.method!r} have no folder; give one, or set 'tables' in speculative_config"
            )
        tensors = {
            f"{index}/{name}": np.ascontiguousarray(array)
            for index, table in enumerate(self._of.values())
            for name, array in table.to_arrays().items()
        }
        header = {"tenants": json.dumps(list(self._of)), "shared": json.dumps(self.shared), **self._header()}
        path = where / self.file_name
        half = PartFile(path)
        try:
            where.mkdir(parents=True, exist_ok=True)
            with half.open() as file:
                file.write(save(tensors, metadata=header))
            half.path.replace(path)
        except (OSError, ValueError, SafetensorError) as error:
            with suppress(OSError, ValueError):
                half.path.unlink(missing_ok=True)
            raise DrafterError(f"the tables of {self.method!r} cannot be written to {str(path)!r}: {error}") from None
        finally:
            half.release()
        return path

    @property
    def file_name(self) -> str:
        """In its folder."""
        return f"{self.method}.safetensors"

    def _header(self) -> dict[str, str]:
        vocabulary, words = str(self._args.vocab_size), self._args.fingerprint()
        return {"format": FORMAT, "method": self.method, "vocab_size": vocabulary, "tokenizer": words}

    def _read(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as file:
                header: Mapping[str, str] = file.metadata() or {}
                self._check(path, header)
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            self._fill(self._tenants(header, arrays), arrays, int(header["vocab_size"]))
        except OtherOptionError as error:
            raise DrafterError(
                f"the tables in {str(path)!r} cannot be read {error}; set the same value or choose another folder"
            ) from None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise DrafterError(
                f"the tables in {str(path)!r} cannot be read ({why}); delete the file to start from scratch"
            ) from None

    def _check(self, path: Path, header: Mapping[str, str]) -> None:
        expected = self._header()
        if expected["tokenizer"] and header.get("vocab_size", "").isdecimal():
            del expected["vocab_size"]
        for key, wanted in expected.items():
            if header.get(key) != wanted:
                got = header.get(key, "none")
                what = f"{key} {got!r} instead of {wanted!r}"
                raise DrafterError(
                    f"the tables in {str(path)!r} do not fit this model and method: {what}; choose another folder"
                )
        if header.get("shared") != json.dumps(self.shared):
            raise DrafterError(
                f"the tables in {str(path)!r} were stored with another 'shared_tables'; set the same value or delete "
                "them"
            )

    def _tenants(self, header: Mapping[str, str], arrays: Arrays) -> list[str]:
        """Whose the tables are, in their order.

        Raises:
            ValueError: no list of names, or not one for each table.
            RecursionError: thousands of brackets.
        """
        tenants = json.loads(header.get("tenants", "null"))
        if (
            not isinstance(tenants, list)
            or not all(isinstance(name, str) for name in tenants)
            or len(set(tenants)) < len(tenants)
        ):
            raise ValueError("tenants must be a list of different names")
        if {name.partition("/")[0] for name in arrays} != {str(index) for index in range(len(tenants))}:
            raise ValueError(f"tenants must name every table once, and there are {len(tenants)} names")
        if self.shared and any(tenants):
            raise ValueError("tenants must have no names where tables are shared")
        return tenants

    def _fill(self, tenants: list[str], arrays: Arrays, stored: int) -> None:
        for index, tenant in enumerate(tenants[-self.max_tenants :], start=max(0, len(tenants) - self.max_tenants)):
            table, prefix = self.new(), f"{index}/"
            table_arrays = {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
            table.read_arrays(table_arrays, stored)
            self._of[tenant] = table


def _folder(name: str) -> Path:
    """The path of a folder that is there or may be made; any other is rejected before anything is learned."""
    need(isinstance(name, str) and name != "", "tables", "be a folder", name)
    path, why = Path(name), ""
    try:
        why = "" if S_ISDIR(path.stat().st_mode) else "and a file is there"
    except FileNotFoundError:
        why = "and a broken link is there" if path.is_symlink() else ""
    except (OSError, ValueError) as error:
        why = f"and this is none ({getattr(error, 'strerror', None) or error})"
    need(not why, "tables", f"be a folder {why}; give another path", name)
    return path


def tables_of(drafters: Iterable[Drafter], folder: str | Path | None = None) -> list[SavedTables]:
    """The tables of those that have any.

    Args:
        folder: all will be saved there; None leaves each to its own.
    Raises:
        ConfigError: two of them would be saved to one file.
    """
    saved = [drafter.tables for drafter in drafters if drafter.tables is not None]
    files: set[Path] = set()
    for tables in saved:
        where = Path(folder) if folder is not None else tables.folder and tables.folder.resolve()
        if where is not None:
            path = where / tables.file_name
            rule = f"be a folder for each {tables.method!r} apart: two of them would be saved to one file"
            remedy = (
                "give one of them another folder" if folder is None else "leave it out, and give each its own 'tables'"
            )
            need(path not in files, "tables" if folder is None else "folder", f"{rule}; {remedy}", str(path))
            files.add(path)
    return saved
