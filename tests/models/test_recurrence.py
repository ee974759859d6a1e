"""One formula for all recurrences of mixers against states that are carried from node to node, over random trees."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.models.state.recurrence import (
    Recurrence,
    Written,
    apply,
    nothing_written,
    read_of,
    state_after,
)

PARENTS = (-1, 0, 0, 1, 1, 2, 3, 3, 5, 6, 4, 8, 8, 9)
HEADS, KEY, VALUE = 3, 5, 4
KINDS = {
    "mamba2": {"by_channel": False, "delta": False},
    "gated delta": {"by_channel": False, "delta": True},
    "kda": {"by_channel": True, "delta": True},
    "mamba": {"by_channel": True, "delta": False},
}
TOLERANCES = {torch.float32: 4e-6, torch.float64: 1e-13}
by_kind = pytest.mark.parametrize("kind", KINDS)


def drawn(rows: int, kind: str, dtype: torch.dtype, seed: int = 0, *, fast: float = 1.0) -> Recurrence:
    """Random rows; `fast` is how fast states decay."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(rows, HEADS, *shape, generator=generator, dtype=torch.float64)

    keys = torch.nn.functional.normalize(normal(KEY), dim=-1)
    decays = -fast * normal(KEY if KINDS[kind]["by_channel"] else 1).abs()
    betas = normal().sigmoid().to(dtype) if KINDS[kind]["delta"] else None
    return Recurrence(normal(KEY).to(dtype), keys.to(dtype), normal(VALUE).to(dtype), decays.to(dtype), betas)


def drawn_state(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(HEADS, KEY, VALUE, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def sees(parents: Sequence[int]) -> torch.Tensor:
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def by_node(state: torch.Tensor, rows: Recurrence, parents: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs, and the state behind every node, each made of its parent's."""
    outputs, states = [], list[torch.Tensor]()
    for node, parent in enumerate(parents):
        held = (state if parent < 0 else states[parent]) * rows.decays[node].exp().unsqueeze(-1)
        update = rows.values[node]
        if rows.betas is not None:
            read = torch.einsum("hk,hkv->hv", rows.keys[node], held)
            update = rows.betas[node].unsqueeze(-1) * (update - read)
        states.append(held + torch.einsum("hk,hv->hkv", rows.keys[node], update))
        outputs.append(torch.einsum("hk,hkv->hv", rows.queries[node], states[-1]))
    return torch.stack(outputs), states


def nothing(state: torch.Tensor, kind: str) -> Written:
    return nothing_written(state, by_channel=KINDS[kind]["by_channel"])


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@by_kind
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("first", [0, 1, 6])
def test_a_tree_is_what_its_nodes_are_one_by_one(kind: str, dtype: torch.dtype, first: int) -> None:
    """In one piece, or in two of which the second stands behind the first."""
    state, rows, seen = drawn_state(dtype), drawn(len(PARENTS), kind, dtype), sees(PARENTS)
    wanted, states = by_node(state, rows, PARENTS)
    written, found = nothing(state, kind), []
    for start, stop in ((0, first), (first, len(PARENTS))):
        if stop > start:
            out, more = apply(state, written, rows.part(start, stop), seen[start:stop, :stop])
            written, found = written.and_then(more), [*found, out]
    assert (torch.cat(found) - wanted).abs().max() < TOLERANCES[dtype]
    for node in range(len(PARENTS)):
        path = torch.tensor(path_to(node, PARENTS))
        assert (state_after(state, written.path(path)) - states[node]).abs().max() < TOLERANCES[dtype]


@by_kind
def test_the_comparison_catches_a_tree_that_is_read_as_a_chain(kind: str) -> None:
    state, rows = drawn_state(torch.float64), drawn(len(PARENTS), kind, torch.float64)
    wanted, states = by_node(state, rows, PARENTS)
    below = torch.ones(len(PARENTS), len(PARENTS), dtype=torch.bool).tril()
    found, written = apply(state, nothing(state, kind), rows, below)
    assert (found - wanted).abs().max() > 0.1
    last = torch.arange(len(PARENTS))
    assert (state_after(state, written.path(last)) - states[-1]).abs().max() > 0.1


@by_kind
def test_states_that_decay_at_once_overflow_nothing(kind: str) -> None:
    """Exponents of rows that do not see each other would be far above what a float32 holds."""
    state, rows = drawn_state(torch.float32), drawn(len(PARENTS), kind, torch.float32, fast=200.0)
    wanted, _ = by_node(state, rows, PARENTS)
    found, written = apply(state, nothing(state, kind), rows, sees(PARENTS))
    assert torch.isfinite(found).all()
    assert (found - wanted).abs().max() < 1e-5
    assert torch.isfinite(state_after(state, written.path(torch.tensor(path_to(13, PARENTS))))).all()


@by_kind
def test_a_text_is_read_in_pieces_with_the_gradients_of_its_tokens(kind: str) -> None:
    rows = drawn(20, kind, torch.float64)
    leaves = [part.requires_grad_() for part in rows if part is not None]
    expected, _ = by_node(torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64), rows, range(-1, 19))
    found = read_of(rows, 8)
    torch.testing.assert_close(found, expected)
    weights = torch.randn(found.shape, dtype=torch.float64)
    gradients = [torch.autograd.grad((read * weights).sum(), leaves) for read in (found, expected)]
    torch.testing.assert_close(*gradients)
    apart = torch.cat([read_of(rows.part(0, 8)), read_of(rows.part(8, 20))])
    assert not torch.allclose(apart, expected, atol=1e-2)
