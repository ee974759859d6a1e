"""Drafts by part of a model's own layers in compiled passes: whole greedy chains in one call, single steps in the shortest way.

In: sequences whose caches lie in one piece, a LayerPlan. Out: what `models.layer_drafts.LayerDrafts` promises. Not here: compiled
code (models.kernels.exit_chain); windows, rotations by length, scattered sequences, which take `SteppedDrafts`.

A plan becomes a list of layer records of its own, in which layers that are skipped as a whole do not occur. The target's own
passes never see it: their place in the frame is put back after every draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from paceline.models.kernels import exit_chain as of
from paceline.models.kernels import frame as at
from paceline.models.kernels.program import ROWS, Table
from paceline.models.kernels.vectors import LANES
from paceline.models.kernels.visible import address
from paceline.models.layer_drafts import MOST_PLANS, Chain, Found, SteppedDrafts, Stop, begun, states_of

if TYPE_CHECKING:
    from paceline.models.base import SequenceCache
    from paceline.models.cache import NativeCache
    from paceline.models.decoder import LayerPlan
    from paceline.models.kernels.fused import FusedDecoder
    from paceline.models.kernels.quick import QuickRows
    from paceline.models.native import NativeRunner

PAUSE = 0.3
"""Compiled code asks whether to go on only where the chance of the path so far is no greater: above, the answer is nearly always
yes, and a token drafted in vain costs about as much as the question."""

_PROGRAM, _LAYERS, _RESULT = (offset // at.FIELD for offset in (at.PROGRAM, at.LAYERS, at.RESULT))
_STEPS, _DONE, _PAUSE, _LEAST = (offset // at.FIELD for offset in (of.STEPS, of.DONE, of.PAUSE, of.LEAST))


class Program:
    """The layer records of one plan."""

    def __init__(self, layers: Table, plan: LayerPlan) -> None:
        self._layers, self._version = layers, -1
        stop = len(layers.fields) if plan.stop is None else plan.stop
        runs = [(i, int(i not in plan.skip_attention), int(i not in plan.skip_mlp)) for i in range(stop)]
        self._runs = [run for run in runs if run[1] or run[2]]
        self.count = len(self._runs)
        self._records = Table(at.LAYER_FIELDS, max(self.count, 1))

    def address(self, version: int) -> int:
        """Of the first record, up to date with the cache's arena."""
        if version != self._version:
            self._version = version
            for record, (index, attention, mlp) in enumerate(self._runs):
                self._records.fields[record] = self._layers.fields[index]
                self._records.put({at.ATTENTION: attention, at.MLP: mlp, at.TAP: 0}, record)
        return self._records.address


class CompiledDrafts(SteppedDrafts):
    """See `models.layer_drafts.LayerDrafts`."""

    def __init__(self, runner: NativeRunner) -> None:
        super().__init__(runner)
        self._arena, self._decoder = runner.arena, cast("FusedDecoder", runner.passes)
        decoder, spec = self._decoder, runner.spec
        self._programs: dict[int, tuple[LayerPlan, Program]] = {}  # by identity: the plans are kept, so that none gets another's
        self._frame = decoder.frame.fields.reshape(-1).data.cast("B").cast("q")
        self._table, self._width = Table(of.TABLE_FIELDS), -(-spec.vocab_size // LANES) * LANES
        self._data = self._table.fields.reshape(-1).data.cast("B").cast("q")
        self._floats = self._table.fields.reshape(-1).data.cast("B").cast("f")
        self._tokens, self._chances = np.zeros((ROWS, of.OUT), np.int64), np.zeros((ROWS, of.OUT), np.int64)
        self._sure = self._chances.reshape(-1).view(np.float32)
        self._logits, self._parts = torch.zeros(0, dtype=decoder.dtype), torch.zeros(0, dtype=torch.uint8)
        self._embedded, self._row_bytes = decoder.embedding.data_ptr(), spec.hidden_size * decoder.dtype.itemsize
        rows = int(decoder.frame.fields[0, at.SOURCE // at.FIELD])
        self._table.put({
            of.FRAME: decoder.frame.address, of.EMBEDDING: self._embedded, of.ROW_BYTES: self._row_bytes,
            of.TOKENS: address(self._tokens), of.CHANCES: address(self._chances), of.OUT_PITCH: 8 * of.OUT,
            of.PLACES: rows + 16 * ROWS, of.SEEN: address(decoder.seen),
        })  # fmt: skip
        self._chain = of.compiled()

    def best(self, hidden: torch.Tensor) -> list[int]:
        """See `LayerDrafts.best`; the passes look for it anyway."""
        self._decoder.head(hidden)
        return self._decoder.best

    def step(
        self,
        caches: Sequence[SequenceCache],
        inputs: Sequence[Sequence[int]],
        plan: LayerPlan,
        *,
        states: bool = False,
        logits: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `LayerDrafts.step`."""
        own = cast("Sequence[NativeCache]", caches)
        rows = len(own)
        if rows > ROWS or (quick := self._lay(own, [each[-1] for each in inputs], [len(each) - 1 for each in inputs], 1)) is None:
            return super().step(caches, inputs, plan, states=states, logits=logits)
        dtype, spec = self._decoder.dtype, self._decoder.spec
        scored = torch.empty(rows if logits else 0, self._width, dtype=dtype)
        found = torch.empty(rows if states else 0, spec.hidden_size, dtype=dtype)
        quick.aim(len(scored), scored.data_ptr())
        self._run(self._decoder.entry, self._decoder.frame.address, plan, found.data_ptr() if states else 0)
        return scored[:, : spec.vocab_size], found

    def chains(
        self,
        caches: Sequence[SequenceCache],
        roots: Sequence[int],
        steps: Sequence[int],
        stops: Sequence[Stop | None],
        *,
        plan: LayerPlan,
        least: Sequence[float],
        states: list[torch.Tensor] | None = None,
    ) -> list[Found]:
        """See `LayerDrafts.chains`."""
        made = begun(caches, roots, steps, stops, least)
        active = [chain for chain in made if chain.steps > 0]
        pause = PAUSE if any(stop is not None for stop in stops) else 0.0
        while active:
            now, later = active[:ROWS], active[ROWS:]
            burst = min([of.MOST_STEPS, *(1 + one.steps - len(one.inputs) for one in now)])
            done, found = self._once(now, burst, pause, plan, keep=states is not None)
            if not done:
                return super().chains(caches, roots, steps, stops, plan=plan, least=least, states=states)
            for row, one in enumerate(now):
                one.states.append(found[:done, row])
            active = [one for row, one in enumerate(now) if self._take(one, row, done)] + later
        if states is not None:
            states += map(states_of, made)
        return [chain.found for chain in made]

    def _take(self, chain: Chain, row: int, done: int) -> bool:
        """Add what was drafted for a row, as far as it is wanted; whether it goes on."""
        tokens = self._tokens[row, :done].tolist()
        chances = self._sure[2 * of.OUT * row : 2 * (of.OUT * row + done) : 2].tolist()
        return all(chain.add(token, chance) for token, chance in zip(tokens, chances, strict=True))

    def _once(
        self, chains: Sequence[Chain], steps: int, pause: float, plan: LayerPlan, *, keep: bool
    ) -> tuple[int, torch.Tensor]:  # fmt: skip
        """Draft up to `steps` tokens more of each chain; how many there are now, 0 where this form does not fit. With `keep`, also
        (steps, rows, hidden) the states behind the layers."""
        caches = cast("list[NativeCache]", [one.cache for one in chains])
        quick = self._lay(caches, [one.inputs[-1] for one in chains], [len(one.inputs) - 1 for one in chains], steps)
        rows = len(chains)
        states = torch.empty(steps if keep else 0, rows, self._decoder.spec.hidden_size, dtype=self._decoder.dtype)
        if quick is None:
            return 0, states
        if rows > len(self._logits):
            self._logits = torch.empty(rows, self._width, dtype=self._decoder.dtype)
        team = torch.get_num_threads()
        if self._parts.numel() < team * ROWS * of.PART_BYTES:
            self._parts = torch.zeros(team * ROWS * of.PART_BYTES, dtype=torch.uint8)
            self._table.put({of.PARTS: self._parts.data_ptr(), of.PARTS_SIZE: ROWS * of.PART_BYTES})
        data = self._data
        data[_STEPS], data[_DONE] = steps, 0
        self._floats[2 * _PAUSE], self._floats[2 * _LEAST] = pause, min(one.least for one in chains)
        quick.aim(rows, self._logits.data_ptr())
        self._run(self._chain, self._table.address, plan, states.data_ptr() if keep else 0)
        return data[_DONE], states

    def _lay(
        self, caches: Sequence[NativeCache], tokens: Sequence[int], depths: Sequence[int], more: int
    ) -> QuickRows | None:  # fmt: skip
        """Describe one row a sequence, with room for `more` inputs from it on; None where this form does not fit."""
        longest = 0
        for cache, depth in zip(caches, depths, strict=True):
            cache.reserve(depth + more)
            cache.scratch = depth + more
            longest = max(longest, cache.length + depth + more)
        quick = self._decoder.quick_rows(longest)
        if quick is None:
            return None
        for row, (cache, token, depth) in enumerate(zip(caches, tokens, depths, strict=True)):
            if not quick.place(row, cache, self._embedded + self._row_bytes * token, depth):
                return None
        quick.count(len(caches))
        return quick

    def _run(self, function: Any, table: int, plan: LayerPlan, states: int) -> None:
        """Run a compiled function over the plan's layers, and put the frame back."""
        if id(plan) not in self._programs:
            self._programs[id(plan)] = plan, Program(self._decoder.layers, plan)
            if len(self._programs) > MOST_PLANS:
                del self._programs[next(iter(self._programs))]
        _, program = self._programs[id(plan)]
        frame, team = self._frame, self._decoder.team
        kept = frame[_PROGRAM], frame[_LAYERS]
        frame[_PROGRAM], frame[_LAYERS], frame[_RESULT] = program.address(self._arena.version), program.count, states
        try:
            if team is None:
                function.ctypes(table)
            else:
                team.run(function.address, table)
        finally:
            frame[_PROGRAM], frame[_LAYERS], frame[_RESULT] = *kept, 0
