"""DiffuSpec: a diffusion language model drafts many slots at once; a search finds the path that reads well from left to
right.

In: contexts, a denoiser of the target's tokens, texts to count. Out: chains of points. Not here: the pass
(`denoising`), the search (`causal_path`), how long drafts are (controller "diffuspec", the paper's adaptive draft
length).

The likeliest tokens of slots that were predicted side by side need not make a text. A tri-gram model, counted from this
tenant's requests and, where it is named, a file, says how well a token goes after two others. (The paper fits one to
the task's training split.) The path found has no distribution of its own that could be written down: its tokens are
points, exact at every temperature.

Source: DiffuSpec: Unlocking Diffusion Language Models for Speculative Decoding (arXiv:2510.02358).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.chains import chain_tree
from paceline.drafters.common.draft_rows import weights
from paceline.drafters.common.tables import Tables
from paceline.drafters.diffusion.base import DenoisedState, DenoisingDrafter
from paceline.drafters.diffusion.causal_path import best_path, lattice_of
from paceline.drafters.diffusion.trigram_counts import SMALLEST, TrigramCounts
from paceline.errors import DrafterError
from paceline.tree import Scores, Verdict
from paceline.utils import integer, need, number

if TYPE_CHECKING:
    from paceline.tree import TokenTree

MOST_SLOTS: Final = 2**26
MOST_BEAM: Final = 64


class CountedState(DenoisedState):
    """A sequence, and how many of its tokens were counted."""

    __slots__ = ("done",)

    def __init__(self, context: Context, done: int = 0) -> None:
        super().__init__(context)
        self.done = done


class DiffuSpecDrafter(DenoisingDrafter[CountedState]):
    """Drafts with one pass of a diffusion language model and a path search.

    Args:
        model: folder or hub id of a diffusion language model with the target's tokenizer.
        draft_max_length: most tokens of a draft.
        num_speculative_tokens: most tokens to draft, within `draft_max_length`; None leaves it to that.
        path_weight: weight of the diffusion model against the tri-grams, 0..1; the paper's lambda.
        candidate_mass: a slot's candidates hold so much of its distribution, 0..1; the paper's tau.
        max_candidates: most candidates of a slot, besides end tokens.
        path_beam: paths that the search keeps.
        ngram_file: a text that the tri-grams of every tenant are counted from before any request.
        ngram_slots: slots of a tenant's table of tri-grams, rounded up to a power of two; 12 bytes each.
        tables: folder in which tables are kept between runs.
        shared_tables: one table for all tenants.
        draft_masks: fewest masks behind the text, for a denoiser with full attention.
        draft_context: most tokens of the text that a pass sees; None is what the denoiser has room for.
        draft_device: where the denoiser runs: "cpu", "cuda" or "cuda:N"; None is the target's.
    Raises:
        ConfigError: a value outside its range, no denoiser. DrafterError: another tokenizer, a file that cannot be
            read, tables that do not fit or are damaged. UnsupportedModelError: a checkpoint of another kind.
    """

    name = "diffuspec"
    shares_state = True

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        draft_max_length: int = 30,
        num_speculative_tokens: int | None = None,
        path_weight: float = 0.5,
        candidate_mass: float = 0.8,
        max_candidates: int = 15,
        path_beam: int = 3,
        ngram_file: str | None = None,
        ngram_slots: int = 2**18,
        tables: str | None = None,
        shared_tables: bool = False,
        draft_masks: int = 20,
        draft_context: int | None = None,
        draft_device: str | None = None,
    ) -> None:
        number("path_weight", path_weight, 0.0, 1.0, "be in 0..1")
        number("candidate_mass", candidate_mass, 0.0, 1.0, "be in 0..1")
        integer("max_candidates", max_candidates, 1)
        integer("path_beam", path_beam, 1, MOST_BEAM)
        integer("ngram_slots", ngram_slots, SMALLEST, MOST_SLOTS)
        super().__init__(
            args,
            model=model,
            num_speculative_tokens=num_speculative_tokens,
            draft_max_length=draft_max_length,
            draft_masks=draft_masks,
            draft_context=draft_context,
            draft_device=draft_device,
        )
        self.path_weight, self.path_beam = float(path_weight), path_beam
        self.candidate_mass, self.max_candidates = float(candidate_mass), max_candidates
        first = _tokens_of(ngram_file, args)
        new = partial(_counts, 1 << (ngram_slots - 1).bit_length(), args.vocab_size, first)
        self.tables: Tables[TrigramCounts] = Tables("diffuspec", args, new, folder=tables, shared=shared_tables)
        self._compile()

    def _state(self, context: Context) -> CountedState:
        state = CountedState(context)
        self._catch_up(state)
        return state

    def observe(
        self,
        states: Sequence[CountedState],
        trees: Sequence[TokenTree],
        verdicts: Sequence[Verdict],
        scores: Scores | None,
    ) -> None:
        for state in states:
            self._catch_up(state)

    def fork(self, state: CountedState, context: Context) -> CountedState:
        return CountedState(context, state.done)

    def end(self, states: Sequence[CountedState]) -> None:
        for state in states:
            self._catch_up(state)
        super().end(states)

    def _catch_up(self, state: CountedState) -> TrigramCounts:
        """Count what the text has got since the last time."""
        counts, text = self.tables.of(state.context.tenant), state.context.tokens
        if state.done < len(text):
            counts.learn(text, state.done)
            state.done = len(text)
        return counts

    def _tree(self, state: CountedState, logits: torch.Tensor) -> TokenTree:
        context, counts = state.context, self._catch_up(state)
        weights_kv = weights(context, logits, [[]] * len(logits))
        lattice = lattice_of(weights_kv, mass=self.candidate_mass, most=self.max_candidates, ends=self.ends)
        path = best_path(lattice, counts, context.tokens[-2:], lam=self.path_weight, beam=self.path_beam)
        chances = torch.softmax(weights_kv[: len(path)], -1, dtype=torch.float32)
        drafted = torch.tensor(path, device=chances.device)[:, None]
        return chain_tree(path, chances.gather(1, drafted)[:, 0].tolist(), self.index)

    def _compile(self) -> None:
        """Compile, or read what was compiled, before the first request."""
        counts = TrigramCounts(SMALLEST, self.vocab_size)
        counts.learn([0, 0, 0])
        lattice = lattice_of(torch.zeros(1, self.vocab_size), mass=0.0, most=1, ends=())
        best_path(lattice, counts, [0], lam=0.5, beam=1)


def _counts(slots: int, vocab_size: int, first: Sequence[int]) -> TrigramCounts:
    counts = TrigramCounts(slots, vocab_size)
    counts.learn(first)
    return counts


def _tokens_of(file: str | None, args: DrafterArgs) -> list[int]:
    """Of a text file.

    Raises:
        ConfigError: no name of a file. DrafterError: it cannot be read as text.
    """
    need(file is None or (isinstance(file, str) and file != ""), "ngram_file", "be the name of a text file", file)
    if file is None:
        return []
    assert args.models is not None
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DrafterError(f"ngram_file {file!r} cannot be read as UTF-8 text ({error}); name a text file") from None
    return [token for token in args.models.tokenizer.encode(text, add_special_tokens=False) if token < args.vocab_size]
