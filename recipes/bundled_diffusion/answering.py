"""Texts that a model writes: canvases after prompts, filled; a Net in training as what fills them.

The rules and the loop are the package's own. `Batched` computes one pass for all canvases together, which is several
times faster than one by one for a small model on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from paceline.diffusion import Canvas, ConfiguredMethod, FinishedCanvas, decode
from paceline.errors import CapabilityError
from paceline.models import Call, Denoiser
from paceline.models import Ints as Ids
from recipes.bundled_diffusion.model import EOS, Net


def padded(rows: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """(b, n) ids of all rows, end tokens beyond each; (b,) lengths."""
    length = torch.tensor([row.size for row in rows])
    ids = torch.full((len(rows), int(length.max())), EOS)
    for row, found in zip(ids, rows, strict=True):
        row[: found.size] = torch.from_numpy(found)
    return ids, length


def masked_logits(net: Net, ids_bn: Tensor, length_b: Tensor, rows_bn: Tensor) -> Tensor:
    """Logits (rows, v) where `rows_bn` is True, the mask token's at -inf, as in decoding."""
    slots = torch.arange(ids_bn.shape[1]).expand_as(ids_bn)
    states = net.states(ids_bn, slots, (slots < length_b[:, None])[:, None, None, :])[rows_bn]
    with torch.autocast("cpu", enabled=False):  # what is left of bfloat16 logits would be too coarse for ratios
        logits: Tensor = net.head(states.to(net.head.weight.dtype))
    logits[:, net.spec.mask_token_id] = -torch.inf
    return logits


class Batched:
    """A Net as a `Denoiser` that computes whole canvases of a pass together, padded to the longest."""

    attention: Literal["full", "block"] = "full"
    block_length: int | None = None
    needs_left = False
    slot_bytes = 0

    def __init__(self, net: Net) -> None:
        self.net, model = net, net.spec.model
        self.vocab_size, self.mask_token_id = model.vocab_size, net.spec.mask_token_id
        self.eos_token_ids: tuple[int, ...] = (EOS,)
        self.max_length = model.max_context

    def new_cache(self, length: int) -> Any:
        """Not to be had.

        Raises:
            CapabilityError: always.
        """
        raise CapabilityError("caches are for decoding, not for models in training; choose a method without one")

    @torch.no_grad()
    def forward(self, calls: Sequence[Call]) -> list[Tensor]:
        """See `Denoiser.forward`; calls compute whole canvases."""
        ids, length = padded([call.ids for call in calls])
        rows = torch.arange(ids.shape[1]) < length[:, None]
        for row, call in zip(rows, calls, strict=True):
            if call.wanted is not None:
                row[:] = False
                row[torch.from_numpy(call.wanted)] = True
        return list(masked_logits(self.net, ids, length, rows).split(rows.sum(1).tolist()))


def fitting(denoiser: Denoiser, prompt: int, length: int) -> int:
    """At least `length` slots after the prompt, so that the last block is whole."""
    return length if denoiser.block_length is None else length + -(prompt + length) % denoiser.block_length


def fill(
    denoiser: Denoiser, prompts: Sequence[Sequence[int]], method: Mapping[str, Any], *, length: int
) -> list[FinishedCanvas]:
    """Decode a canvas of at least `length` slots after each prompt. Raises the error of the first canvas that
    failed.
    """
    mask, ends = denoiser.mask_token_id, denoiser.eos_token_ids
    canvases = [
        Canvas.of(ids, fitting(denoiser, len(ids), length), mask_token_id=mask, eos_token_ids=ends) for ids in prompts
    ]
    outcomes = decode(canvases, denoiser, [ConfiguredMethod(method).parts(denoiser, canvas) for canvas in canvases])
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return outcomes


def before_end(canvas: Canvas) -> list[int]:
    """The tokens that were written before the end of the text."""
    return list(takewhile(lambda token: token not in canvas.eos_token_ids, canvas.output))


def text_of(outcome: FinishedCanvas, tokenizer: Tokenizer) -> str:
    """What a canvas says before its end."""
    return str(tokenizer.decode(before_end(outcome.canvas)))


def encoded(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each prompt."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(prompts))]
