"""Reflective verification: the target judges a draft as it reads it, and once more behind a prompt that asks it to
check the draft, in one pass. Approximate by design.

For a chain y_1..y_n behind a text the pass scores

    y_1 .. y_n   reflective prompt   last k tokens of the text   y_1 .. y_n

as one causal chain, of which all behind the first copy are probes: they are never accepted, and their keys and values
are dropped. The rows before each y_i of the first copy are the target's own logits o_i (n + 1 of them, with what
follows y_n), those of the second copy the reflective logits r_i of the same tokens, from a target that has seen the
whole draft. Verification goes by f = (1 - alpha) * o + alpha * r: equal or reject at temperature 0, recursive rejection
above it. A token that takes a rejected draft's place, or follows the last one, comes from f too. Without a draft there
is nothing to reflect on, and the token is the target's own. alpha = 0 is the exact rule, at the cost of it; alpha = 1
judges by reflection alone.

A target that is shown a text leans to repeat it: what it accepts more is not all insight. Source: Think Before You
Accept: Semantic Reflective Verification for Faster Speculative Decoding (arXiv:2505.18629); its prompt and alpha are
not known here, and those below are this package's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from paceline.errors import ConfigError
from paceline.verifiers.base import ArgmaxVerifier, AtZero
from paceline.verifiers.recursive_rejection import RecursiveRejection
from paceline.verifiers.reflection import CUE, Reflection

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.models import Runner

PROMPT: Final = "\n[BACK] Read the last part again and correct what is wrong in it:\n"
"""What asks to check a draft."""


class Reflective(RecursiveRejection):
    """Judges drafts by the target's logits mixed with those behind a prompt that asks it to check them; chains alone.

    Args:
        reflective_alpha: share of the reflective logits, 0..1.
        reflective_prompt: text, or token ids, that asks to check the draft; None is a short one in English.
        reflective_context: tokens of the text's end that are repeated before the second copy of the draft.
    Raises:
        ConfigError: a prompt without tokens, or of half of the context.
        CapabilityError: on a tree with branches.
    """

    name = "reflective"
    chains_only = True

    def __init__(
        self,
        reflective_alpha: float = 0.3,
        reflective_prompt: str | Sequence[int] | None = None,
        reflective_context: int = CUE,
    ) -> None:
        self._prompt = PROMPT if reflective_prompt is None else reflective_prompt
        self._alpha, self._cue = reflective_alpha, reflective_context
        if not isinstance(self._prompt, str):
            self.reflection = self._reflection(self._prompt)

    def prepare(self, runner: Runner, tokenizer: Tokenizer | None) -> None:
        """See `Verifier.prepare`."""
        if isinstance(self._prompt, str):
            if tokenizer is None:
                raise ConfigError(
                    f"reflective_prompt must be token ids where there is no tokenizer, got {self._prompt!r}"
                )
            self.reflection = self._reflection(tokenizer.encode(self._prompt, add_special_tokens=False))
        size = runner.info.vocab_size
        if self.reflection is not None and (most := max(self.reflection.prompt)) >= size:
            raise ConfigError(f"reflective_prompt must have token ids in 0..{size - 1}, got {most}")
        if self.reflection is not None and len(self.reflection.prompt) >= runner.info.max_context // 2:
            raise ConfigError(
                f"reflective_prompt must have less than half of the context's {runner.info.max_context} tokens, got "
                f"{len(self.reflection.prompt)}"
            )

    def _reflection(self, prompt: Sequence[int]) -> Reflection | None:
        if not prompt:
            raise ConfigError("reflective_prompt must have one token or more, got none")
        return Reflection(self._alpha, tuple(prompt), self._cue) if self._alpha else None

    def at_zero(self) -> ArgmaxVerifier:
        """Equal or reject, by the mixed logits."""
        return AtZero(self)
