"""Hidden chain of thought (HCoT): one vector in the place of the thoughts before an answer.

Two models share a checkpoint, each with an adapter of its own. The *thinker* reads the question and a slot behind it;
what it has there behind its final norm is the thought. A linear map of that is what the *answering* model reads at the
slot in the place of an embedding, and it writes the answer at once: no thoughts are written, and both models read the
question.

The slot is a special token of the tokenizer, which stands at the end of every prompt. As the vector follows from the
text before it alone, whatever is cached behind it is that of its tokens; but a text can only go on from a beginning
that the thinker has read, too, so that beginnings of other requests are not shared. Several slots, as in a dialogue,
have a thought each. That the vector enters as an embedding, through a linear map, is an own reading of the paper.

Source: Expediting and Elevating Large Language Model Reasoning via Hidden Chain-of-Thought Decoding (arXiv:2409.08561).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from paceline.errors import CapabilityError, CheckpointError, UnsupportedModelError
from paceline.models.abilities import check_inputs
from paceline.models.base import PartAbilities, Runner
from paceline.models.checks import check_extend
from paceline.models.inputs import NO_INPUTS, Inputs
from paceline.models.runners.native import NativeRunner
from paceline.models.runners.skipping import Opens, PassSkipping
from paceline.models.state.cache import NativeCache
from paceline.models.state.cache_memory import ArenaMemory
from paceline.models.state.parts import CompositeState, StateOperations
from paceline.tree import EMPTY_TREE, Scores, TokenTree
from paceline.utils import replacing

FILE: Final = "hcot.safetensors"
FORMAT: Final = "paceline hcot 1"
THINKER: Final = "thinker"
"""Folder of the thinker's adapter, beside that of the answering model."""


@dataclass(frozen=True, slots=True)
class ThoughtSlot:
    """Where thoughts enter.

    Attributes:
        token: id that stands there.
        embedding: (hidden,) what the thinker reads there.
        projection, bias: (hidden, hidden) and (hidden,), the map from what the thinker has there to what the other
            model reads; None of a thinker alone.
    """

    token: int
    embedding: torch.Tensor
    projection: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def write(self, folder: Path) -> None:
        """Write it into a folder, as float32."""
        tensors = {"embedding": self.embedding, "projection": self.projection, "bias": self.bias}
        kept = {name: one.detach().float().contiguous().cpu() for name, one in tensors.items() if one is not None}
        with replacing(folder / FILE) as fresh:
            save_file(kept, fresh, {"format": FORMAT, "token": str(self.token)})

    @classmethod
    def read(cls, folder: Path, hidden: int, *, name: str, whole: bool) -> ThoughtSlot:
        """Read what `write` wrote, for a model with states of a size.

        Args:
            name: of the model, for messages. whole: with a projection.
        Raises:
            CheckpointError: nothing there, something else, or that of another model.
        """
        file, trainer = folder / FILE, "hcot" if whole else "hcot_thinker"
        if not file.is_file():
            raise CheckpointError(f"no {FILE} in {folder}; `paceline train {trainer}` makes one")
        try:
            with safe_open(file, "pt") as opened:
                about: Mapping[str, str] = opened.metadata() or {}
                found = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118  it is no dict
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} holds no slot of thoughts ({error})") from error
        if about.get("format") != FORMAT or (whole and not {"projection", "bias"} <= found.keys()):
            raise CheckpointError(f"{file} holds no slot of thoughts; `paceline train {trainer}` writes it")
        if found["embedding"].shape != (hidden,):
            raise CheckpointError(f"{file} holds the slot of another model than {name}")
        return cls(int(about["token"]), found["embedding"], found.get("projection"), found.get("bias"))


class ThinkerPart:
    """What the thinker has read of a text, and its thoughts.

    Attributes:
        cache: of the thinker. vectors: by position, what the other model reads at slots.
    """

    abilities: ClassVar = PartAbilities()

    def __init__(self, cache: NativeCache, vectors: Mapping[int, torch.Tensor]) -> None:
        self.cache, self.vectors = cache, dict(vectors)

    def commit(self, path: Sequence[int]) -> None:
        """See `StatePart.commit`; the thinker reads prompts alone."""

    def check_truncate(self, length: int) -> None:
        """See `StatePart.check_truncate`."""
        self.cache.check_truncate(min(length, self.cache.length))

    def truncate(self, length: int) -> None:
        """See `StatePart.truncate`."""
        self.cache.truncate(min(length, self.cache.length))
        self.vectors = {place: vector for place, vector in self.vectors.items() if place < length}

    def fork(self) -> ThinkerPart:
        """See `StatePart.fork`."""
        return ThinkerPart(self.cache.fork(), self.vectors)

    def release(self) -> None:
        """See `StatePart.release`."""
        self.cache.release()
        self.vectors = {}


def _part(state: CompositeState) -> ThinkerPart:
    return next(part for part in state.others if isinstance(part, ThinkerPart))


class ThoughtRunner(StateOperations[CompositeState]):
    """See `models.base.Runner`; it runs no part of its layers alone, and takes no rows beside those of a tree.

    Args:
        native: answers. thinker: the other model. slot: where thoughts enter.

    Attributes:
        native: as given. prompt_end: see `EndsPrompts`. method: its name.
    """

    method = "hcot"

    def __init__(self, native: NativeRunner, thinker: NativeRunner, slot: ThoughtSlot) -> None:
        assert slot.projection is not None and slot.bias is not None, "the slot of a thinker alone"  # noqa: PT018
        self.native, self.spec, self._thinker = native, native.spec, thinker
        self._token, self.prompt_end = slot.token, (slot.token,)
        self._embedding, self._projection, self._bias = (
            one.to(native.info.device, native.info.dtype) for one in (slot.embedding, slot.projection, slot.bias)
        )
        self.info = replace(native.info, fingerprint=f"{native.info.fingerprint}-{self.method}")
        self.capabilities = native.capabilities
        self.memory = ArenaMemory(native.arena, replace(NativeCache.abilities, shared=False))
        self.embed, self.head = native.embed, native.head

    def open(self, prompt_length: int = 0, inputs: Inputs = NO_INPUTS) -> CompositeState:
        """See `Runner.open`."""
        check_inputs(self, inputs)
        thinking = ThinkerPart(self._thinker.open(prompt_length), {})
        return CompositeState(self.native.open(prompt_length), [thinking])

    def extend(
        self,
        caches: Sequence[CompositeState],
        tokens: Sequence[Sequence[int]],
        *,
        taps: Sequence[int] = (),
        all_logits: bool = False,
    ) -> Scores:
        """See `Runner.extend`.

        Raises:
            CapabilityError: a slot in a text whose beginning the thinker has not read.
        """
        check_extend(self.info, caches, [len(new) for new in tokens])
        self._think(caches, tokens)
        if not any(self._token in new for new in tokens):
            return self.native.extend(caches, tokens, taps=taps, all_logits=all_logits)
        rows = [self._embedded(state, new) for state, new in zip(caches, tokens, strict=True)]
        return self.native.extend_embeddings(caches, rows, taps=taps, all_logits=all_logits)

    def score(
        self,
        caches: Sequence[CompositeState],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        *,
        taps: Sequence[int] = (),
        computed: Sequence[int] | None = None,
    ) -> Scores:
        """See `Runner.score`; drafted slots are tokens like others.

        Raises:
            CapabilityError: see `extend`.
        """
        slots = [i for i, root in enumerate(roots) if root == self._token]
        if not slots:
            return self.native.score(caches, roots, trees, taps=taps, computed=computed)
        new = [i for i in slots if caches[i].length not in _part(caches[i]).vectors]
        self._think([caches[i] for i in new], [[self._token] for _ in new])
        return self._score_with_thoughts(caches, roots, trees, taps, computed)

    @torch.inference_mode()
    def _score_with_thoughts(
        self,
        caches: Sequence[CompositeState],
        roots: Sequence[int],
        trees: Sequence[TokenTree],
        taps: Sequence[int],
        computed: Sequence[int] | None,
    ) -> Scores:
        done, found = computed or [0] * len(caches), list[torch.Tensor]()
        for state, root, tree, skip in zip(caches, roots, trees, done, strict=True):
            rows = self.embed([root, *(() if tree is EMPTY_TREE else tree.tokens.tolist())])
            if root == self._token:
                rows[0] = _part(state).vectors[state.length]
            found.append(rows[skip:])
        offsets = [0]
        for rows in found:
            offsets.append(offsets[-1] + len(rows))
        result = self.native.run_states(caches, trees, done, torch.cat(found), taps=taps)
        return Scores(result.logits, tuple(offsets), result.taps, result.best)

    @torch.inference_mode()
    def _think(self, caches: Sequence[CompositeState], tokens: Sequence[Sequence[int]]) -> None:
        """Have the thinker read what the other model is about to, where it can."""
        pairs = [
            (state, new) for state, new in zip(caches, tokens, strict=True) if _part(state).cache.length == state.length
        ]
        if sum(self._token in new for _, new in pairs) < sum(self._token in new for new in tokens):
            raise CapabilityError(
                f"{self.info.name} has a thought at the end of a prompt, and can have no other one behind tokens that "
                "it has written itself; begin a new prompt with them"
            )
        if not pairs:
            return
        rows = [self._thinkers_rows(new) for _, new in pairs]
        parts = [_part(state) for state, _ in pairs]
        last = self.info.num_layers
        result = self._thinker.extend_embeddings([part.cache for part in parts], rows, taps=(last,))
        states = result.taps[last].split([len(new) for _, new in pairs])
        for (state, new), part, read in zip(pairs, parts, states, strict=True):
            for place, token in enumerate(new):
                if token == self._token:
                    part.vectors[state.length + place] = self._projection @ read[place] + self._bias

    def _thinkers_rows(self, tokens: Sequence[int]) -> torch.Tensor:
        rows = self._thinker.embed(tokens)
        rows[torch.tensor(tokens, device=rows.device) == self._token] = self._embedding
        return rows

    @torch.inference_mode()
    def _embedded(self, state: CompositeState, tokens: Sequence[int]) -> torch.Tensor:
        """(tokens, hidden) what the answering model reads."""
        rows, vectors = self.embed(tokens), _part(state).vectors
        for place, token in enumerate(tokens):
            if token == self._token:
                rows[place] = vectors[state.length + place]
        return rows


class HiddenThoughts(PassSkipping):
    """Answers at once behind a vector that stands for the thoughts.

    Args:
        path: the folder that `paceline train hcot` has written for this model.
    Raises:
        CheckpointError: nothing there, or what belongs to another model.
    """

    name = "hcot"

    def __init__(self, *, path: str) -> None:
        self._folder = Path(path).expanduser()

    def open(self, load: Opens, *, name: str) -> Runner:
        """See `PassSkipping`."""
        if not (self._folder / FILE).is_file():
            raise CheckpointError(f"no {FILE} in {self._folder}; `paceline train hcot` makes one")
        native = self._native(load, self._folder, name)
        slot = ThoughtSlot.read(self._folder, native.info.hidden_size, name=name, whole=True)
        thinker = self._native(load, self._folder / THINKER, name)
        made: Any = ThoughtRunner(native, thinker, slot)
        return made  # type: ignore[no-any-return]  # it takes only handles of its own kind

    def _native(self, load: Opens, adapter: Path, name: str) -> NativeRunner:
        runner = load(lora=adapter)
        if not isinstance(runner, NativeRunner) or runner.rotary.depends_on_length:
            raise UnsupportedModelError(
                f"{name} has an encoder, recurrent states, angles that depend on the length of the text, or no native "
                f"runner, for which skipping={self.name!r} is not there; leave it out"
            )
        return runner
