"""The compiled part of Token Recycling: the best tokens of scored rows, and the tree that a table of them gives.

In: logits as integers, a table of candidates. Out: the table's new rows; columns of a tree. Not here: tenants, budgets,
files.

Floats of one sign are ordered as their bits are, so a row is looked through as integers, whatever its type: 64 logits
at a time for their largest, and token by token only where that is among the best so far, which soon becomes rare; the
token's former candidates say at once how good that is at least. A row of 6,144 logits takes less than a microsecond.

Axes in this file: r = scored rows, v = vocabulary, k = candidates of a token (CANDIDATES), n = nodes of the template.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from paceline.utils import compiled

if TYPE_CHECKING:
    import torch

CANDIDATES: Final = 8
NOBODY: Final = -1
BLOCK: Final = 64
LOWEST: Final = -(2**40)

Ints = npt.NDArray[np.int32]
Bits = npt.NDArray[np.signedinteger[Any]]


@compiled
def _rank_of(bits: int, flip: int) -> int:
    """A number that is larger for a larger float; `flip` has all bits of the type but the sign."""
    return bits if bits >= 0 else bits ^ flip


@compiled
def _floor(known_k: Ints, bits: Bits, span: tuple[int, int], flip: int) -> int:
    """Least rank among the logits of CANDIDATES tokens: the row's best are no worse. LOWEST where fewer are known."""
    least = -LOWEST
    for token in known_k:
        if not 0 <= token < span[1] - span[0]:
            return LOWEST
        least = min(least, _rank_of(bits[span[0] + token], flip))
    return least


@compiled
def _extreme(bits: Bits, begin: int, flip: int) -> int:
    """The largest rank of BLOCK logits. Unsigned places and selections without branches: so this loop becomes vector
    code.
    """
    first = np.uint64(begin)
    high = low = bits[first]
    for step in range(np.uint64(BLOCK)):
        one = bits[first + step]
        high = one if one > high else high
        low = one if one < low else low
    return _rank_of(high if high >= 0 else low, flip)


@compiled
def _best_of(bits: Bits, span: tuple[int, int], floor: int, flip: int, ids_k: Ints) -> None:
    """Fill `ids_k` with the tokens of the largest logits; `floor` as `_floor` gives it."""
    ranks_k, last = np.full(CANDIDATES, floor - 1, np.int64), CANDIDATES - 1
    ids_k[:] = NOBODY
    for begin in range(span[0], span[1], BLOCK):
        end = min(begin + BLOCK, span[1])
        if end - begin == BLOCK and _extreme(bits, begin, flip) <= ranks_k[last]:
            continue
        for at in range(begin, end):
            rank, place = _rank_of(bits[at], flip), last
            if rank > ranks_k[last]:
                while place > 0 and rank > ranks_k[place - 1]:
                    ranks_k[place], ids_k[place] = ranks_k[place - 1], ids_k[place - 1]
                    place -= 1
                ranks_k[place], ids_k[place] = rank, at - span[0]


@compiled
def learn_rows(table_vk: Ints, tokens_r: Ints, bits: Bits, pitch: int, width: int) -> None:
    """Write the best tokens of row i to `table_vk[tokens_r[i]]`, best first, lower ids first among equals; the last row
    wins.

    Args:
        table_vk: (v, k) int32.
        tokens_r: (r,) int32, the token that each row was computed from.
        bits: (..,) the rows' logits as signed integers of their size; row i begins at i * pitch.
        width: how many logits of a row count.
    """
    flip, ids_k = 32767 if bits.itemsize == 2 else 2147483647, np.empty(CANDIDATES, np.int32)
    for row in range(len(tokens_r)):
        known_k, base = table_vk[tokens_r[row]], row * pitch
        _best_of(bits, (base, base + width), _floor(known_k, bits, (base, base + width), flip), flip, ids_k)
        known_k[:] = ids_k


@compiled
def grow_tree(table_vk: Ints, root: int, shape_cn: Ints, most: tuple[int, int], columns_cn: Ints) -> int:
    """Fill a template with the table's candidates; returns how many nodes there are.

    Args:
        root: the last committed token.
        shape_cn: (3, n) parent in the template, rank, depth; in the order in which nodes are worth taking, parents
        first.
        most: nodes to use, levels to use.
        columns_cn: (4, n) out: tokens, parents, depths, ranks.
    """
    count = 0
    where_n = np.empty(shape_cn.shape[1], np.int32)
    for node in range(shape_cn.shape[1]):
        where_n[node] = NOBODY
        if count >= most[0]:
            break
        parent, rank = shape_cn[0, node], shape_cn[1, node]
        if shape_cn[2, node] > most[1] or (parent >= 0 and where_n[parent] < 0):
            continue
        above = where_n[parent] if parent >= 0 else -1
        token = table_vk[columns_cn[0, above] if above >= 0 else root, rank]
        if token >= 0:
            columns_cn[0, count], columns_cn[1, count] = token, above
            columns_cn[2, count], columns_cn[3, count] = shape_cn[2, node], rank
            where_n[node] = count
            count += 1
    return count


def learn(table_vk: Ints, tokens_r: Ints, logits_rv: torch.Tensor) -> None:
    """Keep the best tokens of every row as the candidates of the token that the row was computed from.

    Args:
        table_vk: (v, k) int32, changed in place; columns of the logits beyond v do not count.
        tokens_r: (r,) int32; where a token comes twice, its last row stays.
        logits_rv: (r, v) of any floating type, on any device.
    """
    import torch

    width = min(logits_rv.shape[1], len(table_vk))
    if logits_rv.device.type != "cpu":
        best_rk = logits_rv[:, :width].topk(min(CANDIDATES, width)).indices.cpu().numpy()
        for token, best_k in zip(tokens_r.tolist(), best_rk, strict=True):
            table_vk[token, : len(best_k)] = best_k
        return
    if logits_rv.dtype not in (torch.bfloat16, torch.float16, torch.float32) or logits_rv.stride(1) != 1:
        logits_rv = logits_rv.float().contiguous()
    rows, pitch = logits_rv.shape[0], logits_rv.stride(0)
    flat = logits_rv.detach().as_strided(((rows - 1) * pitch + width,), (1,))
    kind = torch.int32 if flat.element_size() == 4 else torch.int16
    learn_rows(table_vk, tokens_r, flat.view(kind).numpy(), pitch, width)
