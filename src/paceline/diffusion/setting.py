"""What parts of a method are told when they are made: the canvas they will work on, facts of the model.

In: a canvas and a denoiser. Out: `Setting`. Not here: options of a part, which are its own keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.diffusion.canvas import Canvas
from paceline.models.denoiser import Denoiser, SlotCache

if TYPE_CHECKING:
    from paceline.diffusion.base import Cache, Schedule
    from paceline.diffusion.transition import Transition

TokenText = Callable[[int], str | None]
"""What a token writes into a text, a leading space included; None for tokens that write nothing (special tokens)."""


@dataclass(slots=True)
class Setting:
    """Made once for each canvas, filled in the order in which parts are made: schedule, rules, transition, cache,
    verification.

    Attributes:
        canvas: as it is before the first round; it is replaced in decoding, so parts keep facts of it, not the object.
        denoiser: the model, for its facts.
        store: keys and values of this canvas, where the cache policy keeps any.
        seed: of the request.
        temperature: of the tokens predicted; 0 takes the most probable.
        token_text: of the vocabulary, for constraints on the text.
    """

    canvas: Canvas
    denoiser: Denoiser
    seed: int = 0
    store: SlotCache | None = None
    temperature: float = 0.0
    token_text: TokenText | None = None
    schedule: Schedule | None = None
    transition: Transition | None = None
    cache: Cache | None = None
