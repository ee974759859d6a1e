"""Models beside a toy target, without files: a draft of the same letters, one of another vocabulary, copies.

They keep what `drafters.Models` promises. The other vocabulary has some of the letters
under other ids and pairs of letters as tokens of their own, which its tokenizer takes where it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from toy_numbers import normal
from toys import ToyCache, ToyRunner

from paceline import registry
from paceline.checkpoints import Tokenizer
from paceline.drafters import DrafterArgs
from paceline.models import Call, LayerPlan, MappedRunner, PassResult
from paceline.models.heads import DraftExits
from paceline.models.runners.remapped_tokens import HeadRows

LETTERS = "abcdefghij"
OTHER = ["<end>", "j", "i", "h", "g", "f", "e", "d", "c", "b", "a", "z", "ab", "cd", "fg"]
"""The other vocabulary: "</s>" of the target and "<end>" here are the ends."""


def _load(backend: Backend, end: str) -> Tokenizer:
    folder = Path(mkdtemp(prefix="paceline-letters-"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([end])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{end}"}}')
    return Tokenizer.load(folder)


@cache
def letters() -> Tokenizer:
    """A letter a token; id 0 is the end token."""
    backend = Backend(
        models.WordLevel({"</s>": 0} | {letter: i for i, letter in enumerate(LETTERS, start=1)}, unk_token="</s>")
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return _load(backend, "</s>")


@cache
def others() -> Tokenizer:
    """The other vocabulary."""
    vocabulary = {token: index for index, token in enumerate(OTHER)}
    merges = [(token[0], token[1]) for token in OTHER if len(token) == 2]
    return _load(Backend(models.BPE(vocab=vocabulary, merges=merges)), "<end>")


def pairing(tokens: Sequence[str], pairs: Sequence[tuple[str, str]]) -> Tokenizer:
    """Those tokens behind the end token, whose usual texts join these pairs alone."""
    vocabulary = {token: index for index, token in enumerate(["</s>", *tokens])}
    return _load(Backend(models.BPE(vocab=vocabulary, merges=list(pairs))), "</s>")


@cache
def strangers() -> Tokenizer:
    """A vocabulary with nothing of the target's but an end token."""
    return _load(Backend(models.WordLevel({"<end>": 0, "one": 1, "two": 2}, unk_token="<end>")), "<end>")


class OnSourcesToy(ToyRunner):
    """A draft on a target's sources, where there are none."""

    source_bytes = 0


class OtherToy(ToyRunner):
    """A draft model of the other vocabulary whose letters follow what `like` says of the same text."""

    def __init__(self, like: ToyRunner, **options: Any) -> None:
        super().__init__(len(OTHER), order=None, **options)
        self.like = like

    def _row(self, key: tuple[int, ...]) -> np.ndarray:
        row = self._rows.get(key)
        if row is None:
            text = "".join(OTHER[token] if token else "." for token in key)
            wanted = self.like.logits([LETTERS.find(letter) + 1 for letter in text]).numpy()
            row = super()._row(key).copy() * 0.3
            for index, token in enumerate(OTHER[: len(row)]):
                position = LETTERS.find(token) + 1 if len(token) == 1 else 0
                row[index] += wanted[position] if (position or index == 0) and position < len(wanted) else 0.0
            self._rows[key] = row
        return row


class ToyModels:
    """See `drafters.base.Models`: "toy" is a draft with the target's letters, "other" one with the other vocabulary."""

    def __init__(self, target: ToyRunner, draft: ToyRunner, tokenizer: Tokenizer | None = None) -> None:
        self.target, self.draft, self.tokenizer = target, draft, tokenizer or letters()
        self.folder = Path("toy")
        self.other = OtherToy(draft, max_context=draft.info.max_context, trees=draft.capabilities.trees)
        self.exits = ExitToy(
            draft.vocab_size, order=draft.order, seed=draft.seed, sharpness=draft.sharpness, noise=draft.noise,
            pad=draft.pad, max_context=draft.info.max_context,
        )  # fmt: skip
        self.groups = GroupToy(
            draft.vocab_size, order=draft.order, seed=draft.seed, sharpness=draft.sharpness, noise=draft.noise,
            pad=draft.pad, max_context=draft.info.max_context,
        )  # fmt: skip
        self.opened: list[tuple[str, Any]] = []
        self.counted: Path | None = None
        self.trained_exits: DraftExits | None = None

    def open(
        self,
        model: str,
        *,
        head_rows: Sequence[int] | None = None,
        other_tokens: bool = False,
        layers: bool = False,
        device: str | None = None,
        group_size: int | None = None,
    ) -> Any:
        self.opened.append((model, head_rows))
        if layers:
            return self.exits
        if group_size is not None:
            return self.groups
        return self._trimmed(self.other if model == "other" else self.draft, head_rows)

    def denoiser(self, model: str, *, device: str | None = None) -> Any:
        self.opened.append((model, None))
        return ToyDenoiser(self.draft)

    def tokenizer_of(self, model: str) -> Tokenizer:
        return {"other": others, "strangers": strangers}.get(model, letters)()

    def mask_token_of(self, model: str) -> int | None:
        """The last id of the draft's, which the target has too where it has as many."""
        return self.draft.info.vocab_size - 1

    def exits_of(self, model: str) -> DraftExits | None:
        """What a test says of the draft's."""
        return self.trained_exits

    def embedding_of(self, token: int) -> torch.Tensor:
        raise AssertionError(f"toys have no files to read token {token} from")

    def copy_of_target(self, quantization: str, *, head_rows: Sequence[int] | None = None) -> Any:
        self.opened.append((quantization, head_rows))
        return self._trimmed(self.draft, head_rows)

    def on_sources_of(self, target: Any, model: str, *, quantization: str | None = None) -> Any:
        assert target is self.target
        return OnSourcesToy(
            self.draft.vocab_size, order=self.draft.order, seed=self.draft.seed, sharpness=self.draft.sharpness,
            noise=self.draft.noise, pad=self.draft.pad, max_context=self.draft.info.max_context,
        )  # fmt: skip

    def counts_file(self) -> Path | None:
        return self.counted

    def head_share(self, model: str | None = None) -> float:
        return 0.3

    @staticmethod
    def _trimmed(runner: ToyRunner, head_rows: Sequence[int] | None) -> Any:
        if head_rows is None:
            return runner
        rows = HeadRows.of(head_rows, runner.info.vocab_size)
        return MappedRunner(runner, np.arange(runner.info.vocab_size), rows.kept, rows.kept, runner.info.vocab_size)  # type: ignore[arg-type]


def nested(config: Mapping[str, Any], args: DrafterArgs) -> Any:
    """A drafter inside another, made with the same arguments."""
    options = dict(config)
    return registry.load("drafters", options.pop("method"))(args, **options)


class ToyDenoiser:
    """A diffusion language model that says of each mask what `like` says behind the text and its own likeliest tokens
    before.
    """

    attention, block_length, needs_left = "full", None, False
    eos_token_ids, max_length = (0,), 4096

    def __init__(self, like: ToyRunner) -> None:
        self.like = like
        self.mask_token_id = like.info.vocab_size
        self.vocab_size = self.mask_token_id + 1
        self.passes = list[int]()
        self._made: dict[tuple[int, ...], torch.Tensor] = {}

    def new_cache(self, length: int) -> None:
        raise AssertionError("a pass under full attention stores nothing")

    def forward(self, calls: Sequence[Call]) -> list[torch.Tensor]:
        self.passes.append(len(calls))
        return [self._known(call.ids.tolist())[slice(None) if call.wanted is None else call.wanted] for call in calls]

    def _known(self, ids: list[int]) -> torch.Tensor:
        if tuple(ids) not in self._made:
            self._made[tuple(ids)] = self._rows(ids)
        return self._made[tuple(ids)].clone()

    def _rows(self, ids: list[int]) -> torch.Tensor:
        rows = torch.full((len(ids), self.vocab_size), float("nan"))
        text = ids[: ids.index(self.mask_token_id)]
        for slot in range(len(text), len(ids)):
            assert ids[slot] == self.mask_token_id, "a token behind a mask"
            rows[slot, :-1], rows[slot, -1] = self.like.logits(text), float("-inf")
            text.append(int(rows[slot].argmax()))
        return rows


class ExitToy(ToyRunner):
    """A toy whose layers can be run apart: hidden states say which text they belong to, and how many layers they have
    seen.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._texts: list[list[int]] = []
        self.ran: list[tuple[int, int, int]] = []

    def run_layers(
        self,
        caches: Sequence[ToyCache],
        roots: Sequence[int],
        trees: Sequence[Any],
        *,
        plan: LayerPlan,
        hidden: torch.Tensor | None,
        computed: Sequence[int],
    ) -> PassResult:
        self._check(caches, roots, trees, computed)
        rows: list[list[int]] = []
        for each in zip(caches, roots, trees, computed, strict=True):
            rows += self._score_one(*each)
        if hidden is not None:
            assert len(hidden) == len(rows)
            assert hidden[:, 0].tolist() == [plan.first] * len(rows), "states of other layers"
            assert [self._texts[int(i)] for i in hidden[:, 1]] == rows, "states of other texts"
        assert (hidden is None) == (plan.first == 0)
        stop = self.info.num_layers if plan.stop is None else plan.stop
        self.ran.append((plan.first, stop, len(rows)))
        self._texts += rows
        first = len(self._texts) - len(rows)
        states = torch.tensor([[stop, first + i] for i in range(len(rows))], dtype=torch.float64)
        return PassResult(states.new_empty(0, self.info.vocab_size), states)

    def at(self, text: Sequence[int], layers: int) -> torch.Tensor:
        """(v,) logits of an exit."""
        noise = normal(self.info.vocab_size, (self.seed, 91, layers, *text))
        return self.logits(text) + torch.from_numpy(noise.copy()) * (1 - layers / self.info.num_layers)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.at(self._texts[int(i)], int(layers)) for layers, i in hidden.tolist()])


class GroupToy(ToyRunner):
    """A toy with a fuzzy pass: other logits, in caches that remember which tokens went through it.

    Attributes:
        fuzzy: as of `models.runners.grouped.GroupedRunner`.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fuzzy, self.passes = False, list[bool]()

    def score(
        self,
        caches: Sequence[ToyCache],
        roots: Sequence[int],
        trees: Sequence[Any],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Any:
        found = super().score(caches, roots, trees, taps=taps, computed=computed)
        done = [0] * len(caches) if computed is None else computed
        self.passes.append(self.fuzzy and all(done))
        for one, before, tree in zip(caches, done, trees, strict=True):
            if self.passes[-1]:
                one.exact = min(one.exact, before)
            elif before == 0 or one.exact >= before:
                one.exact = 1 + len(tree)
        if self.passes[-1]:
            noise = np.random.default_rng(self.seed + 5).standard_normal(found.logits.shape[1])
            found.logits.add_(torch.from_numpy(noise.astype(np.float32)))
        return found

    def commit(self, caches: Sequence[ToyCache], paths: Sequence[Sequence[int]]) -> None:
        for one, path in zip(caches, paths, strict=True):
            assert all(1 + node < one.exact for node in path), "keys and values of a fuzzy pass were kept"
        super().commit(caches, paths)
