"""What a drafter is: it proposes tokens and never decides which are accepted.

To write one, derive from `Drafter` and give it a `name`, `begin`, `propose` and `fork`; everything else has a default
that says "not this". The engine makes one object from `DrafterArgs` and the user's options, calls `begin` once per
request after prefill, then `propose` and `observe` in turn, and `end` when the request ends. One object serves many
sequences, so everything per sequence lives in the state that `begin` returns; states may be of any type. A drafter that
raises, or proposes an invalid tree, is dropped for that request, which goes on without it.

Drafters that read the text alone start from `common.bases.SingleDrafter`, those with a model from `ModelDrafter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, TypeVar

from paceline.errors import DrafterError
from paceline.models import NO_INPUTS, AddedRows, Inputs

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from paceline.checkpoints import Tokenizer
    from paceline.models import Denoiser, Runner, SequenceCache
    from paceline.models.heads import DraftExits
    from paceline.models.runners import SourceDraftRunner
    from paceline.tree import Budget, Scores, TokenTree, Verdict

NO_TENANT: Final = ""
"""Of requests without a `cache_salt`, which is never empty: nobody can ask for their caches and tables by name."""

ApplyRules = Callable[["torch.Tensor", Sequence[Sequence[int]]], "torch.Tensor"]


@dataclass(slots=True)
class Context:
    """What a drafter may know of one sequence.

    Attributes:
        request_id: unique name.
        tokens: the text, prompt and output; grows in place. Its last entry is the tree's root. Read only: each drafter
            has a copy of its own, and one that writes into it is dropped.
        prompt_length: how many of `tokens` are prompt.
        temperature: 0 for greedy requests.
        seed: base of the drafter's own draws.
        seeded: the user gave the seed and expects the same tokens again, whatever was drafted; points give that, draws
            do not.
        apply_rules: the request's sampling rules on raw logits (r, v) at the given paths (tokens after the root, one
            path per row), as float32 log-weights (r, v); so q can follow the target's rules. None where there are none.
        taps: layer -> (n, hidden) states of the prompt's last n tokens but the very last, for drafters with `taps`: all
            of them, or at least `tap_window`, or `tap_reread` where the prompt began in the prefix cache; empty where n
            is 0. They are there in `begin` and `fork`, and given up behind these.
        tenant: tables learned from text are shared within one tenant only.
        prediction: tokens that the caller expects as output; may be empty, and may hold ids beyond the vocabulary.
        forced: gives up to so many tokens that structured_outputs makes certain, or likely, to come next, with their
            chances; None without such a constraint.
        source: a second text, which an encoder has read and the output follows; None where there is none.
        inputs: what the sequence has beside its tokens, for draft models with an encoder of their own.
        cache: gives the target's own cache of this sequence, for drafters with `runs_target`, which may use its scratch
            slots while they propose, and for those with `reads_target`; it may be another one in every step.
    """

    request_id: str
    tokens: list[int]
    prompt_length: int
    temperature: float = 0.0
    seed: int = 0
    seeded: bool = False
    apply_rules: ApplyRules | None = None
    taps: Mapping[int, torch.Tensor] = field(default_factory=dict)
    tenant: str = NO_TENANT
    prediction: Sequence[int] = ()
    forced: Callable[[int], list[tuple[int, float]]] | None = None
    source: Sequence[int] | None = None
    inputs: Inputs = NO_INPUTS
    cache: Callable[[], SequenceCache] | None = None

    @property
    def length_with_source(self) -> int:
        """Tokens of the source, if there is one, and of the text."""
        return len(self.source or ()) + len(self.tokens)

    def with_source(self, start: int = 0) -> Sequence[int]:
        """The source, if there is one, and the text behind it, as one text from a position on: what to copy from."""
        before = len(self.source or ())
        return self.tokens[start - before :] if start >= before else [*(self.source or ())[start:], *self.tokens]

    def target_cache(self) -> SequenceCache:
        """The target's cache of the sequence, which lacks the text's last token.

        Raises:
            DrafterError: the engine gave none.
        """
        if self.cache is None:
            raise DrafterError("the drafter needs the target's cache, which this engine does not give")
        return self.cache()


H = TypeVar("H")


class Models(Protocol):
    """Opens models beside the target; each is loaded once for all engines around the target's weights."""

    folder: Path
    """Of the target's checkpoint."""
    tokenizer: Tokenizer
    """Of the target."""

    def open(
        self,
        model: str,
        *,
        head_rows: Sequence[int] | None = None,
        other_tokens: bool = False,
        layers: bool = False,
        device: str | None = None,
        group_size: int | None = None,
    ) -> Runner:
        """Another checkpoint by folder or hub id.

        Args:
            head_rows: tokens that its head keeps; the logits of all others are -inf.
            other_tokens: do not check that its tokenizer is the target's.
            layers: the runner must be able to run parts of the stack.
            device: where it runs; "auto" takes the one where its levels take the least time, None the target's.
            group_size: layers of a group that fuzzy passes feed the same state (models.runners.grouped).
        """

    def placed(self, model: str, device: str, load: Callable[[torch.device], H], seconds: Callable[[H], float]) -> H:
        """What drafts beside the target, such as a head, on a device.

        Args:
            model: its name. device: where it runs; "auto" takes the one where its levels take the least time.
            load: makes it there. seconds: times a level of it.
        """

    def denoiser(self, model: str, *, device: str | None = None) -> Denoiser:
        """A diffusion language model by folder or hub id, whose tokenizer must be the target's.

        Args:
            device: where it runs; None is the target's.
        """

    def tokenizer_of(self, model: str) -> Tokenizer:
        """The tokenizer of another checkpoint."""

    def mask_token_of(self, model: str) -> int | None:
        """The mask token of another checkpoint, a parallel draft model; None where its config.json names none."""

    def exits_of(self, model: str) -> DraftExits | None:
        """The exits of another checkpoint, a sorted draft model; None where its config.json names none."""

    def embedding_of(self, token: int) -> torch.Tensor:
        """(hidden,) the embedding of a token in the target's files, which may be one that they have a row for and that
        is no token, such as a mask.
        """

    def copy_of_target(self, quantization: str, *, head_rows: Sequence[int] | None = None) -> Runner:
        """The target with rounded weights, "int8" or "int4", made from its own files."""

    def on_sources_of(self, target: Runner, model: str, *, quantization: str | None = None) -> SourceDraftRunner:
        """A draft of some of an encoder-decoder target's own decoder layers, trained further, which attends to what the
        target's encoder has read.

        Args:
            model: folder or hub id of what `paceline train encdec_draft` has written.
            quantization: a key of `config.QUANTIZATIONS`, or "none"; None is the target's.
        """

    def forget(self, model: str) -> None:
        """Keep models that were opened by this folder no longer; who has one goes on with it."""

    def counts_file(self) -> Path | None:
        """The file in which the target's tokens were counted (`paceline count-tokens`); None where they were not."""

    def head_share(self, model: str | None = None) -> float:
        """The head's share of the weights that a step of a model reads; of the target for None, 0 where the head cannot
        be cut.
        """

    def base_of_target(self) -> Runner:
        """The target without the LoRA adapter that it was loaded with."""

    def target_with(self, lora: str | None) -> Runner:
        """The target with the LoRA adapter in a folder in place of its own; None is without any."""


class Judge(Protocol):
    """Verifies trees for a drafter that is built on another one."""

    def verify(
        self, trees: Sequence[TokenTree], rows: Sequence[torch.Tensor], seeds: Sequence[int | None]
    ) -> list[Verdict]:
        """The exact verdicts of the model behind `rows` on each tree.

        Args:
            rows: (1 + n, v) log-weights at the root and the nodes.
            seeds: of the noise of each, to be used once; None takes likeliest tokens.
        Raises:
            DrafterError: a root's row that holds no distribution.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterArgs:
    """What the engine hands to a drafter's constructor, before its options as keyword arguments.

    Most drafters need the first two alone.

    Attributes:
        vocab_size: of the target; proposed ids lie below it.
        index: this drafter's position in the list, the value of `TokenTree.sources` for its nodes.
        max_context: of the target.
        target: the target's runner, for drafters that use it.
        load_runner: opens another checkpoint by name, after checking that its tokenizer is the target's.
        models: the same, and more ways to open models.
        nested: makes a drafter from a `speculative_config` of one method, for drafters built on others.
        nested_for: the same for a model in the place of the target.
        judge: verifies for these.
        chains_only: the rule of acceptance judges chains alone.
        fingerprint: names the tokenizer, so that tables and datastores made with another one are rejected; called only
            by drafters that read such files, since it takes a pass over the vocabulary.
    """

    vocab_size: int
    index: int
    max_context: int
    target: Runner | None = None
    load_runner: Callable[[str], Runner] | None = None
    models: Models | None = None
    nested: Callable[[Mapping[str, Any] | str], Drafter] | None = None
    nested_for: Callable[[Mapping[str, Any] | str, Runner], Drafter] | None = None
    judge: Judge | None = None
    fingerprint: Callable[[], str] = str
    chains_only: bool = False

    @property
    def branches(self) -> bool:
        """Whether drafts may branch: the rule of acceptance and the target's runner both take trees."""
        return not self.chains_only and (self.target is None or self.target.capabilities.trees)


class SavedTables(Protocol):
    """What a drafter has learned from text and can save; `common.tables.TenantTables` is one."""

    method: str
    folder: Path | None

    @property
    def file_name(self) -> str:
        """In its folder."""

    def save(self, folder: str | Path | None = None) -> Path:
        """Write all of it; returns the file."""


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A drafted token and the (v,) row that it was drawn from, None where it is a point."""

    token: int
    row: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Ahead:
    """Work for a second thread while the target scores.

    Attributes:
        run: does it, and returns for each sequence the token that comes first behind its scored tree, or None. A drawn
            one is tried in the row of the tree's last node; if accepted it is the verdict's next token. A point needs
            no trial.
        threads: of PyTorch on the CPU that it takes from the scoring pass; 0 where the two do not share a device.
    """

    run: Callable[[], Sequence[DraftedToken | None]]
    threads: int = 0


class Drafter(ABC):
    """Proposes token trees for many sequences; every drafter derives from it.

    Required: `name`, `begin`, `propose`, `fork`. All else is an ability: leave it alone and the drafter lacks it.

    Attributes:
        name: what logs and metrics call it.
        taps: layers of the target whose hidden states it wants, in the prompt and in every score.
        tap_window: of how many tokens at the end of a prompt it wants them, so that beginnings of prompts that are
            known need not be computed again; None is all.
        tap_reread: of how many it wants them where the prefix cache holds more of the prompt: so many tokens are read
            again. None is `tap_window`.
        catches_up: it needs no `observe` after a step without drafts, since it reads new tokens from its contexts when
            it next drafts.
        plain_every: without `catches_up`, it needs `observe` after one in so many of those steps; it may change this in
            `observe`.
        shares_state: it learns from all sequences of a tenant for all of them, so that its proposals for one depend on
            the others.
        keeps_trajectory: its proposals depend on its own earlier ones, not on the text alone.
        runs_target: it finds the target's cache in its contexts; `resume` is called.
        reads_target: it finds the target's cache in its contexts and only reads what is committed there.
        works_ahead: `ahead` is called.
        adds_rows: it has rows of its own in scoring passes: `added_rows` is called before each pass of a step in which
            it had a budget, and `read_rows` behind it.
        reads_prediction: it drafts from what a request says that it expects (`Context.prediction`).
        foretells: it passes `ACCEPTANCE` to `Budget.go_on`.
        rewinds: `rewind` may be called, so that other drafters can be built on it.
        takes_back: its models must be able to forget any of the tokens that they have read; without it, they only read
            what the text confirms.
        tree_policy: name of the policy by which it grows trees; "chain" where there is none.
        tables: what it learns from text, to be saved on request.
        note: what people should know of how it was set up, which `doctor` and `explain` show.
        learns: the trainer by whose loss what it drafts with can be trained further while it is served
            (`drafters.learning`); "" where it cannot.
    """

    name: str = ""
    note: str = ""
    taps: Sequence[int] = ()
    tap_window: int | None = None
    tap_reread: int | None = None
    catches_up: bool = False
    plain_every: int = 1
    shares_state: bool = False
    keeps_trajectory: bool = False
    runs_target: bool = False
    reads_target: bool = False
    works_ahead: bool = False
    adds_rows: bool = False
    reads_prediction: bool = False
    foretells: bool = False
    rewinds: bool = False
    takes_back: bool = True
    tree_policy: str = "chain"
    tables: SavedTables | None = None
    learns: ClassVar[str] = ""

    @abstractmethod
    def begin(self, contexts: Sequence[Context]) -> list[Any]:
        """One new state per sequence, right after prefill; None for a sequence that it will not draft for."""

    @abstractmethod
    def propose(self, states: Sequence[Any], budgets: Sequence[Budget], so_far: Sequence[TokenTree]) -> list[TokenTree]:
        """One tree per sequence within its budget, EMPTY_TREE where it has nothing to propose.

        Where this or `catch_up` raises for several sequences, or a tree is invalid, both are called again for each of
        them alone, so that only those are dropped that raise again. So a state must bear a second call in a step, and
        one that was cut short: also by `budget.go_on`, whose errors must pass.

        Args:
            states: as `begin` gave them.
            budgets: of each sequence.
            so_far: merged trees of the drafters before this one, read only.
        """

    @abstractmethod
    def fork(self, state: Any, context: Context) -> Any:
        """A state for a copy of the sequence (n > 1, search)."""

    def catch_up(self, states: Sequence[Any]) -> None:  # noqa: B027  # a default, as are those below
        """Read what was not seen of these texts, such as their prompts, but for the little that a draft takes along.

        Called before `propose`, again where that is called again, and timed apart.
        """

    def observe(  # noqa: B027
        self, states: Sequence[Any], trees: Sequence[TokenTree], verdicts: Sequence[Verdict], scores: Scores | None
    ) -> None:
        """What became of the merged trees that were scored; contexts already hold the new tokens."""

    def end(self, states: Sequence[Any]) -> None:  # noqa: B027
        """The sequences are finished or dropped; free what they hold."""

    @property
    def draws_tokens(self) -> bool:
        """Whether it draws tokens from distributions of its own above temperature 0."""
        return False

    @property
    def score_taps(self) -> Sequence[int]:
        """Layers whose hidden states it wants of the next scoring pass, beside `taps`; called in each step."""
        return ()

    def ahead(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> Ahead | None:
        """Work for a second thread while the target scores the chosen trees; called before every scoring pass.

        Verdicts wait for it, so that no outcome depends on which of the two was faster. Work that raises is requested
        again, sequence by sequence.
        """
        return None

    def rows_beside(self, inputs: int) -> int:
        """Most rows that it adds to a pass beside so many inputs of a sequence, its root and nodes."""
        return 0

    def added_rows(
        self, states: Sequence[Any], trees: Sequence[TokenTree], rooms: Sequence[int]
    ) -> Sequence[AddedRows]:
        """Rows beside the trees that are about to be scored, by ascending layer.

        Args:
            trees: merged ones, of each sequence. rooms: most rows of each.
        """
        return ()

    def read_rows(self, states: Sequence[Any], logits: Sequence[torch.Tensor]) -> None:  # noqa: B027
        """(m, v) raw logits of each sequence's added rows, in their order; before `observe` says what was accepted."""

    def resume(
        self, states: Sequence[Any], caches: Sequence[SequenceCache], roots: Sequence[int], trees: Sequence[TokenTree]
    ) -> Scores | None:
        """The scores of these trees, computed from what its drafts left; None leaves that to the target."""
        return None

    def rewind(self, state: Any, kept: int) -> None:
        """The text behind its first `kept` tokens was taken back; the context holds the new one."""
        raise NotImplementedError(f"drafter {self.name!r} cannot go back")

    def runners(self) -> Sequence[Runner]:
        """The models that it runs beside the target and whose caches grow with the text."""
        return ()

    def held_bytes(self, tokens: int) -> int:
        """Most bytes that it keeps for a sequence of so many tokens (drafted ones too), besides `runners`' caches."""
        return 0

    @property
    def learned_tokens(self) -> torch.Tensor | None:
        """(n,) int64 ids of the tokens that it can draft, ascending, where it `learns`; None is all of them."""
        return None

    def close(self) -> None:  # noqa: B027
        """Nothing is drafted any more; end processes and threads of its own."""

    @property
    def row_bytes(self) -> int:
        """Memory of a drafted token's logits, where those of all tokens are held at once."""
        return 0
