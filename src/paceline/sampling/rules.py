"""The sampling rules of one sequence as one pipeline, evaluated at every node of a token tree along the node's own
path.

What comes out are float32 log-weights: softmax of a row gives the target's p there, and for greedy requests its argmax
is the next token.

Order of the steps, as in vLLM V1's sampler:
    0. raw logprobs are taken before any of this (`sampling.logprobs`)
    1. logits to float32;  logits_processors, one after the other (as in V0, which had them)
    2. what structured_outputs forbids, and all but allowed_token_ids, to -inf;  bad words to -inf
    3. min_tokens: end and stop tokens to -inf;  logit_bias added
    4. penalties: repetition, then frequency, then presence
    -- greedy ends here --
    5. temperature
    6. min_p;  7. top_k;  8. top_p of what is left

Row 0 predicts the token after the root, whose text is the committed state; the row of node i predicts the token after
node i, so the tokens from the first level down to node i count as generated. Every row equals, bit for bit, the root
row of a state that advanced along that path: no operation mixes rows, and sums are exact (see `sampling.filters`).

Contradictory rules (a vocabulary in which everything is forbidden) give rows of nothing but -inf, and NaN in the logits
stays in its row; verifiers raise NumericsError when they meet such a row.

Rules may be code of a user's own. Nothing that one raises leaves this module: a row that it cannot be applied to holds
NaN. Off the accepted path nobody looks at that, as plain decoding never comes there; at the root it ends the request.
Where a rule fails to follow the text, no row can be made from then on. `failure` says why.

Axes in this file: r = rows, v = vocabulary, n = tree nodes.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Collection, Iterable, Sequence
from itertools import chain

import torch

from paceline.config import SamplingParams
from paceline.sampling.filters import filter_rows
from paceline.sampling.logit_rules import (
    AllowedTokens,
    BadWords,
    ForbiddenTokens,
    LogitBias,
    LogitRule,
    MinTokens,
    Paths,
    Processors,
)
from paceline.sampling.penalties import Penalties
from paceline.tree import EMPTY_TREE, TokenTree, prune
from paceline.utils import described, need

logger = logging.getLogger("paceline")

NO_PATH: Paths = ((),)


class _RuleError(Exception):
    """A rule has failed; the text says which, and how."""


class Rules:
    """The rules of a request and the state of one of its sequences.

    Args:
        params: the request's parameters.
        vocab_size: number of columns of the logits.
        prompt: the prompt's token ids.
        stop_ids: end and stop tokens, forbidden before `min_tokens`. Ids outside the vocabulary, which some checkpoints
            declare, cannot be generated and are left out.
        bad_word_ids: token sequences that must not be completed (see `bad_word_token_ids`).
        constraint: the rule of structured_outputs.
        absent: ids below `vocab_size` that are no tokens; they are never generated.
    Attributes:
        constraint: its state here; None without.
        trivial: greedy without a rule that can change the argmax; `advance` and `apply` may then be left out
            altogether.
    Raises:
        ConfigError: an id of logit_bias, allowed_token_ids, stop_token_ids or bad_words that is no token.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt: Sequence[int],
        stop_ids: Sequence[int] = (),
        bad_word_ids: Sequence[tuple[int, ...]] = (),
        constraint: LogitRule | None = None,
        absent: Collection[int] = (),
    ) -> None:
        bias = params.logit_bias or {}
        _check_ids("logit_bias", bias, vocab_size, absent)
        _check_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size, absent)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size, absent)
        for word in bad_word_ids:
            need(len(word) > 0, "bad_words", "have at least one token each", word)
            _check_ids("bad_words", word, vocab_size, absent)
        self._params, self._vocab_size = params, vocab_size
        self._temperature = 1.0 if params.greedy else params.temperature
        stops = sorted({token for token in stop_ids if 0 <= token < vocab_size})
        self._edits, self.constraint = _edits(params, prompt, stops, bad_word_ids, constraint), constraint
        if absent:
            self._edits.append(ForbiddenTokens(absent))
        self._needs_paths = any(rule.needs_paths for rule in self._edits)
        self._generated: list[int] = []
        self._filters = not params.greedy and (
            0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        )
        self.trivial = params.greedy and not self._edits
        self._broken: str | None = None  # why no row can be made any more
        self._at_root: str | None = None  # why the root's row, as it was made last, could not be

    @property
    def failure(self) -> str | None:
        """Why the root's row, as it was made last, holds NaN; None where no rule failed."""
        return self._broken or self._at_root

    def fail(self, why: str) -> None:
        """From now on all rows hold NaN; of several reasons the first one counts."""
        self._broken = self._broken or why

    def blame(self, logits_1v: torch.Tensor) -> str | None:
        """Why the root's row holds no distribution; None where the raw one (1, v) does not either, and no rule failed.

        Rules are applied to it once more, up to the one that takes the distribution from it.
        """
        if self.failure is not None or not math.isfinite(float(logits_1v.max())):
            return self.failure
        rows_rv = logits_1v.detach().to(torch.float32, copy=True)
        for rule in chain.from_iterable(one.parts() for one in self._edits):
            try:
                _apply(rule, rows_rv, NO_PATH, self._generated)
            except _RuleError as error:
                return str(error)
            if not math.isfinite(largest := float(rows_rv.max())):
                return _bad_rule(rule.name, largest)
        if not math.isfinite(largest := float(rows_rv.max() / self._temperature)):
            return _bad_rule(f"temperature {self._temperature:g}", largest)
        return None

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit generated tokens."""
        self._generated.extend(tokens)
        for rule in self._edits:
            try:
                rule.advance(tokens)
            except Exception as error:  # of a rule of the user's own, perhaps
                self.fail(_said(rule, error))

    def rewind(self, count: int) -> None:
        """Take back the last `count` generated tokens; the exact inverse of `advance`.

        Raises:
            ValueError: fewer tokens were generated.
        """
        if not 0 <= count <= len(self._generated):
            raise ValueError(f"cannot rewind {count} of {len(self._generated)} generated tokens")
        kept = len(self._generated) - count
        for rule in self._edits:
            try:
                rule.rewind(self._generated[kept:])
            except Exception as error:
                self.fail(_said(rule, error))
        del self._generated[kept:]

    def fork(self) -> Rules:
        """An independent state at the same point."""
        twin = copy.copy(self)
        twin._generated = list(self._generated)
        twin._edits = [twin._forked(rule) for rule in self._edits]
        if self.constraint is not None:
            twin.constraint = twin._edits[self._edits.index(self.constraint)]
        return twin

    def _forked(self, rule: LogitRule) -> LogitRule:
        """A rule's own fork, or where it has none, itself, and no row can be made."""
        try:
            return rule.fork()
        except Exception as error:
            self.fail(_said(rule, error))
            return rule

    def forced(self, most: int) -> list[tuple[int, float]]:
        """What the constraint makes certain, or likely, to come next (`LogitRule.forced`); nothing where it fails."""
        if self.constraint is None or self._broken is not None:
            return []
        try:
            return self.constraint.forced(most)
        except Exception as error:  # drafts alone are lost: plain decoding does not ask
            logger.warning("nothing is drafted from a rule: %s", _said(self.constraint, error))
            return []

    def possible(self, tree: TokenTree) -> TokenTree:
        """The tree without points that the constraint forbids; drawn tokens stay, whatever they are.

        An empty tree where the constraint cannot tell, or no row can be made.
        """
        if not len(tree) or self._broken is not None:
            return EMPTY_TREE
        if self.constraint is None:
            return tree
        try:
            return self._cut(tree, self.constraint)
        except Exception as error:  # as above
            logger.warning("drafts are left out: %s", _said(self.constraint, error))
            return EMPTY_TREE

    @staticmethod
    def _cut(tree: TokenTree, constraint: LogitRule) -> TokenTree:
        rejected = set[int]()
        for leaf in tree.leaves():
            path = tree.path(leaf)
            count = constraint.allowed([int(tree.tokens[node]) for node in path])
            if count < len(path) and int(tree.parents[path[count]]) not in tree.trials:
                rejected.add(path[count])
        if not rejected:
            return tree
        keep = [node for node in range(len(tree)) if rejected.isdisjoint(tree.path(node))]
        return prune(tree, keep)

    def apply(self, logits: torch.Tensor, tree: TokenTree) -> torch.Tensor:
        """Log-weights at the root and the nodes of a tree.

        Args:
            logits: (1 + n, v) raw logits of any float dtype, the root first; never written to.
            tree: n nodes, whose tokens lie in the vocabulary.
        Returns:
            (1 + n, v) float32. It is `logits` itself where no rule changes anything, so do not write to it.
        Raises:
            ValueError: logits of another shape.
        """
        _check_shape(logits, 1 + len(tree), self._vocab_size)
        rows_rv, self._at_root = self._made(logits, _tree_paths(tree) if self._needs_paths else NO_PATH, math.nan)
        return rows_rv

    def by_row(self, logits: torch.Tensor, tree: TokenTree) -> LazyRows:
        """What `apply` returns, each row made when it is needed: for verifiers that look at few of them."""
        _check_shape(logits, 1 + len(tree), self._vocab_size)
        return LazyRows(self, logits, tree)

    def row(self, logits_1v: torch.Tensor, tree: TokenTree, row: int) -> torch.Tensor:
        """(v,) float32: row number `row` of `apply`, from the raw logits (1, v) of that row alone."""
        path = [int(tree.tokens[node]) for node in tree.path(row - 1)] if row and self._needs_paths else ()
        rows_rv, failure = self._made(logits_1v, (path,), math.nan)
        if not row:
            self._at_root = failure
        return rows_rv[0]

    def apply_paths(self, logits: torch.Tensor, paths: Paths) -> torch.Tensor:
        """Log-weights at explicit paths: row i continues the committed text by `paths[i]` (tokens after the root).

        Args:
            logits: (r, v) raw logits of a drafter, of any float dtype; never written to.
        Returns:
            (r, v) float32, as in `apply`; but a row on which a rule fails allows no token, so that no draft follows.
        Raises:
            ValueError: logits of another shape.
        """
        _check_shape(logits, len(paths), self._vocab_size)
        return self._made(logits, paths, -math.inf)[0]

    def _made(self, logits: torch.Tensor, paths: Paths, failed: float) -> tuple[torch.Tensor, str | None]:
        """(r, v) float32, and why the first row could not be made; such rows, and no others, hold `failed`."""
        try:
            if self._broken is not None:
                raise _RuleError(self._broken)
            return self._run(logits, paths), None
        except _RuleError as error:
            if len(logits) == 1:
                return torch.full_like(logits, failed, dtype=torch.float32), str(error)
        each = paths if len(paths) == len(logits) else [*paths] * len(logits)
        made = [self._made(logits[i : i + 1], (path,), failed) for i, path in enumerate(each)]
        return torch.cat([row_1v for row_1v, _ in made]), made[0][1]

    def _run(self, logits: torch.Tensor, paths: Paths) -> torch.Tensor:
        rows_rv = logits.detach().to(torch.float32)
        scales = self._temperature != 1.0
        if not (self._edits or scales or self._filters):
            return rows_rv
        rows_rv = rows_rv.contiguous()
        if self._edits:
            rows_rv = _own(rows_rv, logits)
            for rule in self._edits:
                _apply(rule, rows_rv, paths, self._generated)
        if scales:
            rows_rv = rows_rv.div_(self._temperature) if _owned(rows_rv, logits) else rows_rv / self._temperature
        if self._filters:
            rows_rv = _own(rows_rv, logits)
            filter_rows(rows_rv, top_k=self._params.top_k, top_p=self._params.top_p, min_p=self._params.min_p)
        return rows_rv


class LazyRows:
    """Log-weights at the root and the nodes of a tree (`Rules.apply`), a row at a time.

    True until the rules advance.
    """

    __slots__ = ("_logits", "_rules", "_tree")

    def __init__(self, rules: Rules, logits: torch.Tensor, tree: TokenTree) -> None:
        self._rules, self._logits, self._tree = rules, logits, tree

    def __getitem__(self, row: int) -> torch.Tensor:
        return self._rules.row(self._logits[row : row + 1], self._tree, row)


def _apply(rule: LogitRule, rows_rv: torch.Tensor, paths: Paths, generated: Sequence[int]) -> None:
    try:
        rule.apply(rows_rv, paths, generated)
    except Exception as error:
        raise _RuleError(_said(rule, error)) from error


def _said(rule: LogitRule, error: Exception) -> str:
    """What a request that the rule ends is told."""
    logger.debug("the error of %s", rule.name, exc_info=error)
    return f"{rule.name} failed ({described(error)})"


def _bad_rule(name: str, largest: float) -> str:
    """What a request is told of a rule behind which a row has no finite largest entry."""
    if largest == -math.inf:
        return f"no token is allowed: {name} leaves none of those that were possible; loosen the sampling rules"
    kind = "NaN" if math.isnan(largest) else "infinity"
    return f"{name} made {kind} of the model's logits, which are finite; correct it"


def _owned(rows_rv: torch.Tensor, logits: torch.Tensor) -> bool:
    return rows_rv.data_ptr() != logits.data_ptr()


def _own(rows_rv: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """`rows_rv` itself, or a copy if it is the caller's memory."""
    return rows_rv if _owned(rows_rv, logits) else rows_rv.clone()


def _tree_paths(tree: TokenTree) -> list[tuple[int, ...]]:
    """The tokens from the first level down to each position, the root's empty path first."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


def _check_ids(name: str, ids: Iterable[int], vocab_size: int, absent: Collection[int]) -> None:
    for token in ids:
        need(0 <= token < vocab_size, name, f"hold token ids in 0..{vocab_size - 1}", token)
        need(token not in absent, name, "hold ids of the tokenizer's tokens", token)


def _check_shape(logits: torch.Tensor, rows: int, vocab_size: int) -> None:
    if tuple(logits.shape) != (rows, vocab_size):
        raise ValueError(f"logits must have shape ({rows}, {vocab_size}): one row per path, got {tuple(logits.shape)}")


def _edits(
    params: SamplingParams,
    prompt: Sequence[int],
    stops: Sequence[int],
    bad_words: Sequence[tuple[int, ...]],
    constraint: LogitRule | None,
) -> list[LogitRule]:
    """Steps 1 to 4, as far as the parameters ask for them."""
    rules: list[LogitRule] = []
    if params.logits_processors:
        rules.append(Processors(params.logits_processors, prompt))
    if constraint is not None:
        rules.append(constraint)
    if params.allowed_token_ids is not None:
        rules.append(AllowedTokens(params.allowed_token_ids))
    if bad_words:
        rules.append(BadWords(bad_words))
    if params.min_tokens > 0 and stops:
        rules.append(MinTokens(params.min_tokens, stops))
    if params.logit_bias:
        rules.append(LogitBias(params.logit_bias))
    numbers = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    if numbers != (0.0, 0.0, 1.0):
        rules.append(Penalties(*numbers, prompt))
    return rules
