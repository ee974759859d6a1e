"""One formula for all recurrences of mixers, over chains and trees, without a state for every node.

With c the decay summed along a node's ancestors and itself, A the mask of these, M that of its ancestors alone:

    (I + diag(b) (Wk * M)) U = diag(b) (V - e^c (K S0))     Wk[i,j] = sum_d k_i k_j e^(c_i - c_j)    (no delta: U = V)
    y = e^c (Q S0) + (Wq * A) U                            Wq alike with q_i
    state behind a node n:  S = e^(c_n) S0 + sum over the path of (e^(c_n - c_j) k_j) u_j'

Keys, U and c of the nodes are all that has to be kept of them, until it is known which are accepted. Exponents of pairs
that are not ancestor and descendant could overflow; they are never taken.

Sources: STree (arXiv:2505.14969), Mamba-2 (arXiv:2405.21060), Gated Delta Networks (arXiv:2412.06464).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MOST_PAIRS = 2**22
"""Most numbers of a table of pairs of rows."""


class Recurrence(NamedTuple):
    """What rows bring, in float32 or float64.

    Attributes:
        queries, keys: (rows, heads, key dim). values: (rows, heads, value dim).
        decays: (rows, heads, key dim), or (rows, heads, 1) of one for all dimensions of a head; 0 or less.
        betas: (rows, heads) of the delta rule; None without.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    decays: torch.Tensor
    betas: torch.Tensor | None = None

    def part(self, start: int, stop: int) -> Recurrence:
        """Rows start .. stop - 1."""
        queries, keys, values, decays, betas = self
        rows = slice(start, stop)
        return Recurrence(queries[rows], keys[rows], values[rows], decays[rows], None if betas is None else betas[rows])


class Written(NamedTuple):
    """What rows have written behind a state, as far as a later state can be made of it.

    Attributes:
        keys: (rows, heads, key dim). updates: (rows, heads, value dim), the U of the formula.
        sums: decays summed along the path to each row, as `Recurrence.decays`.
    """

    keys: torch.Tensor
    updates: torch.Tensor
    sums: torch.Tensor

    def first(self, rows: int) -> Written:
        """Those of the first rows."""
        return Written(self.keys[:rows], self.updates[:rows], self.sums[:rows])

    def path(self, nodes: torch.Tensor | slice) -> Written:
        """Those of some rows."""
        return Written(self.keys[nodes], self.updates[nodes], self.sums[nodes])

    def and_then(self, more: Written) -> Written:
        """These, and others behind them."""
        keys, updates, sums = (torch.cat(pair) for pair in zip(self, more, strict=True))
        return Written(keys, updates, sums)


def rows_at_once(new: Recurrence, before: int) -> int:
    """How many rows one application of the formula takes behind so many that were read before."""
    numbers = new.decays[0].numel() * (before + 64)
    return max(1, min(64, MOST_PAIRS // max(numbers, 1)))


def apply(state: torch.Tensor, before: Written, new: Recurrence, sees: torch.Tensor) -> tuple[torch.Tensor, Written]:
    """Read rows behind a state and rows that were read before.

    Args:
        state: (heads, key dim, value dim), behind which all rows stand.
        sees: (new rows, rows before + new rows) bool, a row's ancestors and itself; ancestors stand before it.
    Returns:
        Outputs (rows, heads, value dim), and what the new rows have written.
    """
    done = len(before.keys)
    sums = _summed(before.sums, new.decays, sees)
    keys, pairs = torch.cat([before.keys, new.keys]), _pairs(sums, torch.cat([before.sums, sums]), sees)
    from_state, updates = sums.exp(), new.values
    if new.betas is not None:
        held = torch.einsum("rhk,hkv->hrv", new.keys * from_state, state)
        weights, betas = _weights(new.keys, keys, pairs), new.betas.t().unsqueeze(-1)
        if done:
            held = held + torch.einsum("hrj,jhv->hrv", weights[:, :, :done], before.updates)
        wanted = betas * (new.values.transpose(0, 1) - held)
        own = betas * weights[:, :, done:]
        updates = torch.linalg.solve_triangular(own, wanted, upper=False, unitriangular=True).transpose(0, 1)
    outputs = torch.einsum("rhk,hkv->rhv", new.queries * from_state, state)
    read = _weights(new.queries, keys, pairs)
    outputs = outputs + torch.einsum("hrj,jhv->rhv", read, torch.cat([before.updates, updates]))
    return outputs, Written(new.keys, updates, sums)


def state_after(state: torch.Tensor, path: Written) -> torch.Tensor:
    """(heads, key dim, value dim): the state behind the last row of a path, which begins behind `state`."""
    last = path.sums[-1]
    keys = path.keys * (last - path.sums).exp()
    return (state * last.exp().unsqueeze(-1)).baddbmm_(keys.permute(1, 2, 0), path.updates.transpose(0, 1))


def read_of(new: Recurrence, at_once: int = 64) -> torch.Tensor:
    """(rows, heads, value dim): what the rows of a text read from its beginning on, so many at a time; its gradients
    are those of the formula.
    """
    heads, by_channel = new.keys.shape[1], new.decays.shape[-1] > 1
    state = new.keys.new_zeros(heads, new.keys.shape[-1], new.values.shape[-1])
    nothing = nothing_written(state, by_channel=by_channel)
    below = torch.ones(at_once, at_once, dtype=torch.bool, device=state.device).tril()
    outputs = []
    for start in range(0, len(new.keys), at_once):
        part = new.part(start, min(start + at_once, len(new.keys)))
        count = len(part.keys)
        read, written = apply(state, nothing, part, below[:count, :count])
        state = state_after(state, written)
        outputs.append(read)
    return torch.cat(outputs)


def nothing_written(state: torch.Tensor, *, by_channel: bool) -> Written:
    """That of no rows."""
    heads, keys, values = state.shape
    return Written(
        state.new_empty(0, heads, keys),
        state.new_empty(0, heads, values),
        state.new_empty(0, heads, keys if by_channel else 1),
    )


def _summed(before: torch.Tensor, decays: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """Decays summed along the path to each new row: over its ancestors among the new ones, and to the last one before
    these.
    """
    done = len(before)
    sums = torch.einsum("rj,jhk->rhk", sees[:, done:].to(decays.dtype), decays)
    if not done:
        return sums
    last = (sees[:, :done] * torch.arange(1, done + 1, device=sees.device)).amax(1)
    return sums + torch.cat([torch.zeros_like(before[:1]), before])[last]


def _pairs(sums: torch.Tensor, all_sums: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
    """(rows, all rows, heads, key dim or 1): what is left at a row of what each row wrote, 0 where it cannot see it."""
    apart = sums.unsqueeze(1) - all_sums.unsqueeze(0)
    return apart.masked_fill_(~sees[:, :, None, None], -torch.inf).exp_()


def _weights(rows: torch.Tensor, keys: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    """(heads, rows, all rows): products of rows and keys (.., heads, key dim), decayed."""
    if pairs.shape[-1] == 1:
        return torch.einsum("rhk,jhk->hrj", rows, keys) * pairs.squeeze(-1).permute(2, 0, 1)
    return torch.einsum("rhk,jhk,rjhk->hrj", rows, keys, pairs)
