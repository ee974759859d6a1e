"""What heads share with their target: its embedding, and the rows of its head, read off what it makes of unit vectors,
so that any runner with a head can give them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from paceline.errors import CapabilityError
from paceline.models.abilities import HasEmbedding, HasHead
from paceline.models.base import ModelInfo, Runner

AT_ONCE: Final = 64
"""Unit vectors that the head is asked of at once."""


@torch.inference_mode()
def target_rows(target: HasHead, info: ModelInfo, tokens: torch.Tensor) -> torch.Tensor:
    """(n, hidden) rows of the tokens (n,), in the target's dtype, without the head's bias."""
    units = torch.eye(info.hidden_size, device=info.device, dtype=info.dtype)
    columns = torch.cat([target.head(block, norm=False)[:, tokens] for block in units.split(AT_ONCE)])
    bias = target_bias(target, info, tokens)
    return (columns if bias is None else columns - bias).T.contiguous()


@torch.inference_mode()
def target_bias(target: HasHead, info: ModelInfo, tokens: torch.Tensor) -> torch.Tensor | None:
    """(n,) what the head adds to the logits of the tokens (n,) whatever the state; None where that is nothing."""
    zero = torch.zeros(1, info.hidden_size, device=info.device, dtype=info.dtype)
    bias = target.head(zero, norm=False)[0, tokens]
    return bias if bool(bias.any()) else None


def head_of(target: Runner, name: str) -> HasHead:
    """The target, whose head can be used.

    Args:
        name: of the head that needs it, for messages.
    Raises:
        CapabilityError: it cannot.
    """
    if not isinstance(target, HasHead):
        raise _lacking(target, name, "head")
    return target


def embedding_of(rows: torch.Tensor | None, target: Runner, name: str) -> Callable[[Sequence[int]], torch.Tensor]:
    """(r, hidden) embeddings of tokens, from rows (v, hidden) or the target.

    Args:
        name: of the head that needs it, for messages.
    Raises:
        CapabilityError: there are no rows, and the target cannot embed.
    """
    if rows is not None:
        return lambda tokens: rows[torch.tensor(tokens, device=rows.device)]
    if not isinstance(target, HasEmbedding):
        raise _lacking(target, name, "input embeddings")
    return target.embed


def _lacking(target: Runner, name: str, what: str) -> CapabilityError:
    return CapabilityError(
        f"the head {name} takes its {what} from the target, which {target.info.name} does not give as it runs here; "
        "use a head with its own, or another method"
    )
