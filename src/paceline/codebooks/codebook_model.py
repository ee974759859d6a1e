"""A model with codebooks: what fires on a text, what it predicts, what it writes where codes are forced."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.checkpoints import GenerationDefaults, Tokenizer, read_config
from paceline.codebooks.books import Books, read_books
from paceline.errors import PromptError
from paceline.models.runners.fallback import quiet
from paceline.utils import integer, number

Force = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Firing:
    """Codes that fired on a text.

    Attributes:
        tokens: of the text, as text.
        codes: name of a book -> for each token the ids that fired, the nearest first.
    """

    tokens: list[str]
    codes: dict[str, list[list[int]]]


class CodebookModel:
    """A model and its codebooks, in float32.

    Args:
        model: a causal model of transformers. books: in it. ends: tokens that end a text.
    """

    def __init__(self, model: Any, books: Books, tokenizer: Tokenizer, ends: Sequence[int] = ()) -> None:
        self.model, self.books, self.tokenizer, self.ends = model.eval(), books.eval(), tokenizer, frozenset(ends)
        known = inspect.signature(model.forward).parameters
        self._key = "cache" if "cache" in known else "past_key_values"

    @classmethod
    def load(cls, folder: str | Path) -> CodebookModel:
        """What `paceline train codebooks` wrote.

        Raises:
            CheckpointError: no such folder, no model, or no codebooks in it.
        """
        from transformers import AutoModelForCausalLM

        place = Path(folder)
        read_config(place)
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                place, dtype=torch.float32, use_safetensors=True, local_files_only=True
            )
        books = read_books(place, model.model.layers, model.config.hidden_size)
        tokenizer = Tokenizer.load(place)
        return cls(model, books, tokenizer, GenerationDefaults.load(place, tokenizer).eos_ids)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], force: Force | None = None, *, start: int = 0) -> Tensor:
        """(t, v) float32 logits of the tokens behind these.

        Args:
            force: name of a book -> codes that fire there from position `start` on.
        Raises:
            ConfigError: no such book or code.
        """
        self._check(ids)
        rows, cache = [], None
        for part, forced in ((ids[:start], {}), (ids[start:], force or {})):
            if part:
                with self.books.forcing(forced):
                    found, cache = self._passed(part, cache)
                rows.append(found)
        return torch.cat(rows)

    def loss(self, ids: Sequence[int]) -> float:
        """The mean cross-entropy in nats of the tokens of a text, each given those before it."""
        return float(F.cross_entropy(self.logits(ids)[:-1], torch.tensor(list(ids[1:]))))

    def firing(self, text: str) -> Firing:
        """The codes that fire on a text, in every book.

        Raises:
            PromptError: an empty text, or one beyond the context.
        """
        ids = self.tokenizer.encode(text)
        self.logits(ids)
        tokens = [self.tokenizer.decode([one]) for one in ids]
        return Firing(tokens, {name: book.ids.tolist() for name, book in self.books.items()})

    def generate(
        self, prompt: str, *, force: Force | None = None, max_tokens: int = 64, temperature: float = 0.0, seed: int = 0
    ) -> str:
        """What follows a prompt.

        Args:
            force: name of a book -> codes that fire there, from the prompt's last token on: those before it are as
                without.
            temperature: 0 takes the likeliest tokens.
        Raises:
            ConfigError: no such book or code, or a value outside its range. PromptError: as above.
        """
        integer("max_tokens", max_tokens, 1)
        number("temperature", temperature, 0.0, 1e3, "be in 0..1000")
        ids = self.tokenizer.encode(prompt)
        self._check(ids)
        room = self.model.config.max_position_embeddings - len(ids)
        generator, made = torch.Generator().manual_seed(seed), list[int]()
        with torch.inference_mode():
            cache = self._passed(ids[:-1], None)[1] if len(ids) > 1 else None
            last = ids[-1]
            with self.books.forcing(force or {}):
                while len(made) < min(max_tokens, room) and last not in (self.ends if made else ()):
                    found, cache = self._passed([last], cache)
                    last = _chosen(found[-1], temperature, generator)
                    made.append(last)
        return self.tokenizer.decode(made)

    def _passed(self, ids: Sequence[int], cache: Any) -> tuple[Tensor, Any]:
        """(t, v) float32 logits behind these tokens, and the cache with them in it."""
        made = self.model(torch.tensor([list(ids)]), use_cache=True, **{self._key: cache})
        return made.logits[0].float(), getattr(made, self._key)

    def _check(self, ids: Sequence[int]) -> None:
        most = self.model.config.max_position_embeddings
        if not 0 < len(ids) <= most:
            raise PromptError(f"a text of 1 to {most} tokens is needed, got {len(ids)}")


def _chosen(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))
