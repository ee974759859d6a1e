"""Attention over a part of the keys, with the logarithm of its sum of weights, and the merge of such parts.

Sources: online softmax (arXiv:1805.02867), Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch

from paceline.models.spec import AttentionShape

CHUNK = 1024
"""Positions of a chunk."""

PartialOutput = tuple[torch.Tensor, torch.Tensor]

log = logging.getLogger("paceline")


def merged(parts: Sequence[PartialOutput]) -> torch.Tensor:
    """One attention output (b, h, r, d) float32 from its parts' outputs and log-sums (b, h, r, 1), added in order."""
    sums = torch.stack([own for _, own in parts])
    weights = (sums - sums.amax(0)).exp_()
    out = parts[0][0] * weights[0]
    for i in range(1, len(parts)):
        out = torch.addcmul(out, parts[i][0].float(), weights[i])
    return out.div_(weights.cumsum(0)[-1])


def by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, shape: AttentionShape
) -> PartialOutput:
    """softmax(scale * q k^T [soft-capped] + mask) v over (x, h, r, d) and (x, h, s, d), and the log-sums (x, h, r, 1)
    float32.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)).float().mul_(shape.scale)
    if shape.softcap is not None:
        scores = scores.div_(shape.softcap).tanh_().mul_(shape.softcap)
    scores = scores.add_(mask)
    sums = scores.logsumexp(-1, keepdim=True)
    return torch.matmul(scores.sub_(sums).exp_().to(v.dtype), v), sums


def prefix_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, shape: AttentionShape
) -> PartialOutput:
    """`by_definition` by PyTorch's kernel that keeps no scores, where it was found to agree."""
    if shape.softcap is None and kernel_agrees(q.device, q.dtype, q.shape[-1], mask.shape[2] == 1):
        return by_kernel(q, k, v, mask, shape)
    return by_definition(q, k, v, mask, shape)


def by_kernel(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, shape: AttentionShape
) -> PartialOutput:
    """`by_definition` without soft cap, by an operator that also gives log-sums."""
    aten, scale = torch.ops.aten, shape.scale
    full = mask.expand(*q.shape[:3], k.shape[2])
    if q.device.type == "cuda":
        out, sums, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, full, True, 0.0, False, scale=scale)
    else:
        out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=full, scale=scale)
    return out, sums[..., : q.shape[2]].float().unsqueeze(-1)


@functools.cache
def kernel_agrees(device: torch.device, dtype: torch.dtype, head_dim: int, one_mask: bool) -> bool:
    """Whether `by_kernel` gives what the definition gives, for one mask for all rows or one each."""
    generator = torch.Generator().manual_seed(0)
    shape = AttentionShape(1, 2, head_dim, head_dim**-0.5, None, (None,), (0,))
    q, k, v = (torch.randn(3, 2, n, head_dim, generator=generator).to(device, dtype) for n in (5, CHUNK, CHUNK))
    seen = torch.rand(3, 1, 1 if one_mask else 5, CHUNK, generator=generator) < 0.5
    seen[1] = False
    mask = torch.zeros(seen.shape).masked_fill_(~seen, far(dtype)).to(device, dtype)
    try:
        (out, sums), (want, wanted) = by_kernel(q, k, v, mask, shape), by_definition(q, k, v, mask, shape)
    except (RuntimeError, AttributeError, NotImplementedError, TypeError) as reason:
        log.debug("attention kernel with log-sums is not used: %s", reason)
        return False
    near, some = 1e-4 if dtype is torch.float32 else 2e-2, [0, 2]
    pairs = ((out[some], want[some]), (sums[some], wanted[some]))
    same = all(torch.allclose(ours.float(), theirs.float(), rtol=near, atol=near) for ours, theirs in pairs)
    return same and bool((sums[1] < far(dtype) / 2).all()) and bool(out.isfinite().all())


def far(dtype: torch.dtype) -> float:
    """The mask value of a dtype: finite, so that a chunk of which a row sees nothing gets the weight 0 and no NaN."""
    return max(-1e30, torch.finfo(dtype).min / 2)
