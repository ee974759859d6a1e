"""A request on its way: one prompt with its parameters, whose n outputs are decoded as n sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.config import ALL_DRAFTS, DraftChoice, SamplingParams
from paceline.drafters import NO_TENANT
from paceline.engine.companion import Companion
from paceline.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paceline.errors import PromptError
from paceline.models import NO_INPUTS, CacheMemory, Inputs, Runner, context_of
from paceline.sampling import LogitRule, Logprob, Rules
from paceline.utils import MAX_COUNT, integer, items, need, shortened

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Request:
    """One prompt and what becomes of it.

    Attributes:
        id: unique name.
        prompt: its text, or None.
        prompt_ids: its tokens, at least one.
        params: with a seed.
        seed: base of all its noise.
        max_tokens: most new tokens, parameters and context considered.
        tenant: whose tables its text may teach, and whose cached prefixes it may use.
        prediction: tokens that the caller expects as output; empty without such.
        num_cached_tokens: prompt tokens that were found in the prefix cache; None without one, or before the request
            begins.
        rules: made when the request was checked, for its first output; None where that has begun.
        companion: what its outputs are steered by, found when it was checked; None where they are not.
        drafts: which drafters may draft for it, and how much.
        streamed: somebody reads the text while it grows; else it is made at the end.
        park_at: an output that has so many tokens is parked (`Scheduler.resume`); None lets all go on.
        owner: who takes turns with others (`engine.fairness`).
        priority: of the owner's requests that wait, the one with the lowest number begins first.
        max_running: outputs of its owner, oldest first, that take part in a step; None is all.
        inputs: what it has beside its tokens.
        rule: what its outputs keep to, at their beginning; each has a fork of it. None for none, or for that of
            `structured_outputs`.
        kept_logits: (n, v) each, raw, that the n tokens of each step were sampled from; of a request with one output.
            None keeps none.
    """

    id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    tenant: str = NO_TENANT
    prediction: list[int] = field(default_factory=list)
    drafts: DraftChoice = ALL_DRAFTS
    streamed: bool = True
    park_at: int | None = None
    owner: str = ""
    priority: int = 0
    max_running: int | None = None
    inputs: Inputs = NO_INPUTS
    rule: LogitRule | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    kept_logits: list[torch.Tensor] | None = None
    _block_keys: list[bytes] | None = field(default=None, init=False, repr=False)
    rules: Rules | None = field(default=None, init=False, repr=False)
    companion: Companion | None = field(default=None, init=False, repr=False)
    _view: RequestOutput | None = field(default=None, init=False, repr=False)

    @property
    def prefix_key(self) -> str:
        """Who may share the keys and values of its text: its tenant, among requests with the same inputs.

        A digest holds no slash, so that no tenant's name stands for another tenant with inputs.
        """
        return f"{self.inputs.digest}/{self.tenant}"

    def block_keys(self, memory: CacheMemory) -> list[bytes]:
        """The prompt's full blocks as `memory` looks them up. Without the last token, which is always computed."""
        if self._block_keys is None:
            self._block_keys = memory.pieces(self.prompt_ids[:-1])
        return self._block_keys

    @property
    def finished(self) -> bool:
        """Whether every output has ended; a request that has not started has none."""
        return bool(self.outputs) and all(output.finished() for output in self.outputs)

    def result(self) -> RequestOutput:
        """A live view of the request; the same object until the request starts, and from then on."""
        view = self._view
        if view is None or view.outputs is not self.outputs or view.prompt_logprobs is not self.prompt_logprobs:
            view = RequestOutput(
                self.id, self.prompt, self.prompt_ids, self.outputs, self.metrics, self.prompt_logprobs
            )
            view.num_cached_tokens = self.num_cached_tokens
            view.encoder_prompt_token_ids = list(self.inputs.encoder_tokens) or None
            self._view = view
        return view

    def note_cached(self, tokens: int) -> None:
        """Note how many tokens of the prompt were found in the prefix cache; the first time counts."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = tokens
            self.result().num_cached_tokens = tokens


def check_prompt(
    tokens: Sequence[int],
    vocab_size: int,
    max_context: int,
    max_tokens: int | None,
    prediction: Sequence[int] = (),
    *,
    longest: int | None = None,
    rope_border: int | None = None,
) -> int:
    """Check a prompt's token ids and return how many new tokens fit.

    Args:
        longest: most that `max_context` could be; None where it cannot be more.
        rope_border: see `models.ModelInfo`.
    Raises:
        PromptError: empty, ids outside the vocabulary, no room in the context, or a text that would outgrow the border.
    """
    if not len(tokens):
        raise PromptError("the prompt is empty; give at least one token (or a tokenizer that adds a start token)")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise PromptError(f"prompt token ids must be integers in 0..{vocab_size - 1}, got {shortened(token)}")
    if prediction and (most := max(prediction)) >= vocab_size:
        raise PromptError(f"prediction token ids must be integers in 0..{vocab_size - 1}, got {shortened(most)}")
    room = max_context - len(tokens)
    if room < 1:
        raise PromptError(
            f"the prompt has {len(tokens)} tokens, but the context holds {max_context} including at least one new "
            f"token; shorten the prompt"
            + (f" or raise max_model_len (at most {longest})" if longest is not None and longest > max_context else "")
        )
    most = room if max_tokens is None else min(room, max_tokens)
    return most if rope_border is None else _within_border(len(tokens), most, max_tokens, rope_border)


def check_inputs(runner: Runner, request: Request) -> None:
    """Reject what a request has beside its tokens where the model cannot take it.

    Raises:
        PromptError: kinds that the model does not take, a source that is missing or does not fit, embeddings behind the
            prompt, or no room for one new token.
    """
    if not request.inputs and not runner.info.source:
        return
    size, most = len(request.prompt_ids), context_of(runner, request.inputs)
    if size >= most:
        raise PromptError(
            f"the prompt has {size} tokens, but with these inputs the context of {runner.info.name} holds {most} "
            "including at least one new token; shorten the prompt"
        )
    behind = max((span.stop for span in request.inputs.embeddings), default=0)
    if behind > size:
        raise PromptError(f"embeddings must lie within the prompt of {size} tokens, got some up to {behind - 1}")


def _within_border(size: int, most: int, max_tokens: int | None, border: int) -> int:
    """How many new tokens fit where a prompt of `size` tokens must not outgrow the border; the last is never fed."""
    room = border + 1 - size
    if size > border or most <= room:
        return most
    if max_tokens is None:
        return room
    raise PromptError(
        f"max_tokens must be at most {room} for this prompt of {size} tokens, got {max_tokens}: the model's rotary "
        f"embedding is dynamic, and beyond {border} tokens the angles of the whole text would be others; lower "
        f"max_tokens, or give a prompt of more than {border} tokens"
    )


def set_priorities(requests: Sequence[Request], priorities: Sequence[int]) -> None:
    """Give each request its own.

    Raises:
        ConfigError: another number of them, or one that is no integer.
    """
    given = items("priority", priorities, "be a list of integers, one for each prompt")
    need(len(given) == len(requests), "priority", f"be a list of {len(requests)} integers", priorities)
    for request, one in zip(requests, given, strict=True):
        integer("priority", one, -MAX_COUNT)
        request.priority = one
