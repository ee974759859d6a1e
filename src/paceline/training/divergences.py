"""How far a draft's distributions are from the target's: losses by the names that the `speculators` package has.

p (r, v) are the target's distributions, q the softmax of the draft's logits (r, v); each gives (r,) float32, in nats
but for `tv`. a = sum of min(p, q) is the chance that a token drawn from q is accepted.

    kl_div     sum of p log(p / q)                   rkl        sum of q log(q / p)
    jsd        mean of both to (p + q) / 2           ce         -log q of the likeliest token of p
    tv         1 - a                                 nla        -log a
    lk_hybrid  l kl_div + (1 - l) tv with l = exp(-3 a), not differentiated

Source: Hinton et al. 2015 (arXiv:1503.02531); LK losses: direct acceptance rate optimization for speculative decoding
(arXiv:2602.23881).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST: Final = 1e-5
"""Chance of acceptance below which `nla` does not rise."""

ETA: Final = 3.0
"""How fast `lk_hybrid` turns to `tv` where more is accepted."""


def kl_div(logits: Tensor, p: Tensor) -> Tensor:
    return F.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)


def rkl(logits: Tensor, p: Tensor) -> Tensor:
    log_q, tiny = logits.log_softmax(-1), torch.finfo(p.dtype).tiny
    return (log_q.exp() * (log_q - p.clamp_min(tiny).log())).sum(-1)


def jsd(logits: Tensor, p: Tensor) -> Tensor:
    q = logits.softmax(-1)
    middle = ((p + q) / 2).clamp_min(torch.finfo(p.dtype).tiny).log()
    return (F.kl_div(middle, p, reduction="none").sum(-1) + F.kl_div(middle, q, reduction="none").sum(-1)) / 2


def ce(logits: Tensor, p: Tensor) -> Tensor:
    return F.cross_entropy(logits, p.argmax(-1), reduction="none")


def tv(logits: Tensor, p: Tensor) -> Tensor:
    return 1.0 - accepted(logits, p)


def nla(logits: Tensor, p: Tensor) -> Tensor:
    return -accepted(logits, p).clamp_min(LEAST).log()


def lk_hybrid(logits: Tensor, p: Tensor) -> Tensor:
    accepts = accepted(logits, p)
    share = (-ETA * accepts.detach()).exp()
    return share * kl_div(logits, p) + (1.0 - share) * (1.0 - accepts)


def accepted(logits: Tensor, p: Tensor) -> Tensor:
    """(r,) chance that a token drawn from q is accepted."""
    return torch.minimum(logits.softmax(-1), p).sum(-1)


DIVERGENCES: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    one.__name__: one for one in (kl_div, rkl, jsd, ce, tv, nla, lk_hybrid)
}
"""By name; of logits (r, v) float32 and distributions (r, v) float32."""
