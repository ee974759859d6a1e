"""Why Bergamot's engine writes other texts in int8 than in float32: its rounding, by PyTorch's operators.

usage: bergamot_rounding.py --data FOLDER [--engine PYTHON] [--count 50]

The sentences, model and short lists of `bergamot.py`; PYTHON as there. The engine rounds what a matrix multiplies to
int8, by one factor that the file holds for each matrix, whatever the numbers of the sentence are; what lies beyond 127
is cut off. As shipped it adds 127 first, so that bytes are unsigned, and takes that away with the bias. Here PyTorch's
operators do the same with numbers that are whole:

as shipped, unshifted
                 the engine's rounding in both forms, which in exact arithmetic are the same
sums of 16 bits  as shipped, where sums of two products are cut off at 16 bits: as the engine does on processors
                 without VNNI
by rows          inputs are rounded by the largest of their row, as ours are in the encoder
nudged           unshifted, each input by a millionth larger or smaller before it is rounded: what other orders of sums
                 do. A control: whatever changes no more texts than this is nothing but rounding

The engine runs on the instructions at hand, and kept to AVX2 (INTGEMM_CPUID). Results:
`results/bergamot_rounding.json`: how many texts each two have in common, and the share of inputs that are cut off.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from bergamot import PRECISIONS, by_engine, by_ours, sentences
from common import RESULTS, save
from real_models import MARIAN, model_folder

from paceline.checkpoints import read_marian

MOST, INTGEMM8 = 127, (0x4101, 0x10001)
Map = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How inputs become whole numbers.

    Attributes:
        shifted: 127 is added to them. narrow: sums of two products are cut at 16 bits. by_rows: by the largest of each
            row. nudge: by which share of themselves they are moved before.
    """

    shifted: bool = False
    narrow: bool = False
    by_rows: bool = False
    nudge: float = 0.0


ROUNDINGS: Mapping[str, Rounding] = {
    "as shipped": Rounding(shifted=True),
    "unshifted": Rounding(),
    "sums of 16 bits": Rounding(shifted=True, narrow=True),
    "by rows": Rounding(by_rows=True),
    "nudged": Rounding(nudge=1e-6),
}


@dataclass(slots=True)
class Counted:
    """Inputs that were rounded, and those of them that were cut off."""

    inputs: int = 0
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class Rows:
    """Some outputs of a map that come from one of the file's matrices.

    Attributes:
        places: (n,) which outputs. whole: (n, inputs), the file's numbers, negated where the map has them so.
        inputs, weights: the factors by which both were multiplied.
    """

    places: torch.Tensor
    whole: torch.Tensor
    inputs: float
    weights: float

    def product(self, x: torch.Tensor, bias: torch.Tensor, how: Rounding, counted: Counted) -> torch.Tensor:
        """(r, inputs) -> (r, n) float32; every step is rounded as in the engine."""
        if how.nudge:
            x = x * (1 + how.nudge * torch.randn(x.shape).sign())
        one, inputs, weights = (torch.tensor(number) for number in (1.0, self.inputs, self.weights))
        factor = MOST / x.abs().amax(1, keepdim=True).clamp_min(1e-30) if how.by_rows else inputs
        rounded = (x * factor).round()
        counted.inputs += rounded.numel()
        counted.beyond += int((rounded.abs() > MOST).sum())
        rounded = rounded.clamp(-MOST, MOST)
        scale = one / (factor * weights)
        if not how.shifted:
            return rounded @ self.whole.T * scale + bias
        offset = self.whole.sum(1) * (-((MOST / inputs) * (MOST / weights)) / MOST) + bias
        return self._sums(rounded + MOST, how) * scale + offset

    def _sums(self, rounded: torch.Tensor, how: Rounding) -> torch.Tensor:
        """Whole numbers, which float32 holds exactly below 2^24."""
        if not how.narrow:
            return rounded @ self.whole.T
        even, odd = (rounded[:, None, i::2] * self.whole[None, :, i::2] for i in (0, 1))
        return (even + odd).clamp(-(2**15), 2**15 - 1).sum(-1)


@dataclass(slots=True)
class Matrices:
    """The int8 matrices of one of Marian's files, found again by their rows' values."""

    rows: dict[bytes, tuple[str, torch.Tensor]] = field(default_factory=dict)
    factors: dict[str, tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(cls, file: Any) -> Matrices:
        found = cls()
        for name, item in file.items.items():
            if item.kind in INTGEMM8 and not name.endswith("_QuantMultA"):
                whole = file.integers(name).float()
                whole = whole if name == "Wemb" else whole.T
                weights = file.multiplier(name)
                of_inputs = file.tensor(f"{'none' if name == 'Wemb' else name}_QuantMultA")
                found.factors[name] = float(of_inputs.flatten()[0]), weights
                for sign in (1, -1):
                    for row in whole:
                        found.rows[(sign * row / weights).numpy().tobytes()] = name, sign * row
        return found

    def parts(self, weight: torch.Tensor) -> list[Rows]:
        """What of a weight (out, in) comes from which matrix; empty where it is none of the file's."""
        places: dict[str, list[int]] = {}
        whole: dict[str, list[torch.Tensor]] = {}
        for place, row in enumerate(weight.contiguous()):
            if (known := self.rows.get(row.numpy().tobytes())) is None:
                return []
            places.setdefault(known[0], []).append(place)
            whole.setdefault(known[0], []).append(known[1])
        return [Rows(torch.tensor(places[name]), torch.stack(whole[name]), *self.factors[name]) for name in places]


@contextmanager
def rounding(matrices: Matrices, how: Rounding, counted: Counted) -> Iterator[None]:
    """While models are loaded and run: PyTorch's operators, whose maps round as the engine does."""
    from paceline.models.layers import decoder, own_weights

    plain = own_weights.make_linear

    def rounded(weight: torch.Tensor, bias: torch.Tensor | None = None, **options: object) -> Map:
        parts = matrices.parts(weight)
        if not parts:
            raise SystemExit(f"a map of {tuple(weight.shape)} is none of the file's matrices")
        biases = torch.zeros(len(weight)) if bias is None else bias

        def product(x: torch.Tensor) -> torch.Tensor:
            out = torch.empty(len(x), len(weight))
            for part in parts:
                out[:, part.places] = part.product(x, biases[part.places], how, counted)
            return out

        return product

    assert plain is decoder.make_linear
    with (
        mock.patch.dict(os.environ, {"PACELINE_COMPILED": "0"}),
        mock.patch.object(own_weights, "make_linear", rounded),
        mock.patch.object(decoder, "make_linear", rounded),
    ):
        yield


def by_engines(python: str, folder: Path, given: Sequence[str]) -> dict[str, list[str]]:
    """Texts of the engine's two forms, on all instructions and on AVX2."""
    texts = {}
    for kind in ("int8", "unshifted"):
        for isa, told in {"": {}, ", AVX2": {"INTGEMM_CPUID": "AVX2"}}.items():
            with mock.patch.dict(os.environ, told):
                texts[f"engine, {kind}{isa}"], _ = by_engine(python, folder / MARIAN, folder, PRECISIONS[kind], given)
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of published data")
    parser.add_argument("--engine", metavar="PYTHON")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    folder, sources = model_folder("bergamot-en-pt"), sentences(given.data, given.count)
    matrices, texts, beyond = Matrices.of(read_marian(folder / MARIAN)), dict[str, list[str]](), dict[str, float]()
    texts["float32"], _ = by_ours(folder, sources)
    for name, how in ROUNDINGS.items():
        counted = Counted()
        torch.manual_seed(0)
        with rounding(matrices, how, counted):
            texts[name], _ = by_ours(folder, sources)
        beyond[name] = counted.beyond / counted.inputs
    if given.engine is not None:
        texts |= by_engines(given.engine, folder, sources)
    equal = {one: {other: sum(map(str.__eq__, texts[one], texts[other])) for other in texts} for one in texts}
    for one, others in equal.items():
        print(f"{one:28}", *(f"{count:3}" for count in others.values()), beyond.get(one, ""))
    save("bergamot_rounding", {"sentences": len(sources), "equal": equal, "cut_off": beyond}, given.folder)


if __name__ == "__main__":
    main()
