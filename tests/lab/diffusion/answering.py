"""A denoiser that knows the answers, as sure of them as it is told: for tests of the diffusion benchmark."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from lab.diffusion import TASKS, items
from paceline.checkpoints import Tokenizer
from paceline.llm import BUNDLED
from paceline.models import Call

END = 3


class Answering:
    """Full attention, no cache; the chance of a slot's right token falls from left to right.

    Args:
        wrong: tasks that are answered with an end of text at once.
    """

    attention = "full"
    block_length = None
    needs_left = False
    max_length = 512
    eos_token_ids = (END,)

    def __init__(self, count: int, *, wrong: Sequence[str] = (), sure: float = 0.95) -> None:
        self.tokenizer = Tokenizer.load(BUNDLED / "target")
        self.mask_token_id = len(self.tokenizer.tokens())
        self.vocab_size = self.mask_token_id + 1
        self.dtype = torch.float32
        self.sure, self.calls = sure, 0
        self.answers: dict[tuple[int, ...], list[int]] = {}
        for task in TASKS:
            for item in items(task, split="test", count=count):
                answer = [] if task in wrong else self.tokenizer.encode(item.answer)
                self.answers[tuple(self.tokenizer.encode(item.prompt))] = answer

    def new_cache(self, length: int) -> None:
        """There is none."""

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        self.calls += 1
        return [self.logits_of(call) for call in calls]

    def logits_of(self, call: Call) -> torch.Tensor:
        ids = tuple(call.ids.tolist())
        prompt = max((p for p in self.answers if ids[: len(p)] == p), key=len)
        after = np.arange(call.slots.size) - len(prompt)
        text = [*self.answers[prompt], *[END] * call.slots.size]
        logits = torch.zeros(call.slots.size, self.vocab_size)
        for row, slot in enumerate(after.tolist()):
            chance = self.sure - 0.01 * slot
            if slot >= 0:
                logits[row, text[slot]] = float(np.log(chance / (1 - chance) * (self.vocab_size - 2)))
        logits[:, self.mask_token_id] = -torch.inf
        return logits if call.wanted is None else logits[call.wanted]
