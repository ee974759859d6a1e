"""The sampling rules of one sequence as one pipeline, evaluated at every node of a token tree along the node's own
path.

In:  raw logits at the root and the nodes of a tree. Out: float32 log-weights after all rules; softmax of a row gives
the target's p there, and for greedy requests its argmax is the next token. Not here: drawing and verifying
(`verifiers`), text.

Order of the steps, as in vLLM V1's sampler:
    0. raw logprobs are taken before any of this (`constraints.logprobs`)
    1. logits to float32
    2. bad words to -inf
    3. min_tokens: end and stop tokens to -inf;  logit_bias added
    4. penalties: repetition, then frequency, then presence
    -- greedy ends here --
    5. temperature
    6. min_p;  7. top_k;  8. top_p of what is left

Row 0 predicts the token after the root, whose text is the committed state; the row of node i predicts the token after
node i, so the tokens from the first level down to node i count as generated. Every row equals, bit for bit, the root
row of a state that advanced along that path: no operation mixes rows, and sums are exact (see `constraints.filters`).

Contradictory rules (a vocabulary in which everything is forbidden) give rows of nothing but -inf, and NaN in the logits
stays in its row; verifiers raise NumericsError when they meet such a row.

Axes in this file: r = rows, v = vocabulary, n = tree nodes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import torch

from paceline.config import SamplingParams
from paceline.sampling.bad_words import BadWords
from paceline.sampling.filters import filter_rows
from paceline.sampling.penalties import Penalties
from paceline.tree import TokenTree
from paceline.utils import need

__all__ = ["Rules"]

NO_PATH: Sequence[Sequence[int]] = ((),)


class _Constant:
    """Values that are put on each device once."""

    def __init__(self, values: Iterable[float], dtype: torch.dtype) -> None:
        self._host = torch.tensor(list(values), dtype=dtype)
        self._copies = {self._host.device: self._host}

    def __len__(self) -> int:
        return len(self._host)

    def on(self, device: torch.device) -> torch.Tensor:
        if device not in self._copies:
            self._copies[device] = self._host.to(device)
        return self._copies[device]


class Rules:
    """The rules of a request and the state of one of its sequences.

    Args:
        params: the request's parameters.
        vocab_size: number of columns of the logits.
        prompt: the prompt's token ids.
        stop_ids: end and stop tokens, forbidden before `min_tokens`. Ids outside the vocabulary, which some checkpoints
            declare, cannot be generated and are left out.
        bad_word_ids: token sequences that must not be completed (see `bad_word_token_ids`).
    Attributes:
        trivial: greedy without a rule that can change the argmax; `advance` and `apply` may then be left out
        altogether.
    Raises:
        ConfigError: a token id of logit_bias, stop_token_ids or bad_words outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        vocab_size: int,
        prompt: Sequence[int],
        stop_ids: Sequence[int] = (),
        bad_word_ids: Sequence[tuple[int, ...]] = (),
    ) -> None:
        bias = params.logit_bias or {}
        _check_ids("logit_bias", bias, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        for word in bad_word_ids:
            need(len(word) > 0, "bad_words", "have at least one token each", word)
            _check_ids("bad_words", word, vocab_size)
        self._params, self._vocab_size = params, vocab_size
        self._temperature = 1.0 if params.greedy else params.temperature
        self._bias_ids, self._bias = _Constant(bias, torch.int64), _Constant(bias.values(), torch.float32)
        self._stop_ids = _Constant(sorted({t for t in stop_ids if 0 <= t < vocab_size}), torch.int64)
        self._bad_words = BadWords(bad_word_ids)
        self._always_bad = _Constant(self._bad_words.always, torch.int64)
        self._penalties = Penalties(
            params.presence_penalty, params.frequency_penalty, params.repetition_penalty, prompt
        )
        self._generated: list[int] = []
        waits = params.min_tokens > 0 and len(self._stop_ids) > 0
        self._min_tokens = params.min_tokens if waits else 0
        self._needs_paths = waits or self._bad_words.reach > 0 or self._penalties.active
        self._edits = self._needs_paths or len(self._bias_ids) > 0 or len(self._always_bad) > 0
        self._filters = not params.greedy and (
            0 < params.top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0
        )
        self.trivial = params.greedy and not self._edits

    @property
    def num_generated(self) -> int:
        """Number of committed tokens after the prompt."""
        return len(self._generated)

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit generated tokens."""
        self._generated.extend(tokens)
        if self._penalties.active:
            self._penalties.advance(tokens)

    def rewind(self, count: int) -> None:
        """Take back the last `count` generated tokens; the exact inverse of `advance`.

        Raises:
            ValueError: fewer tokens were generated.
        """
        if not 0 <= count <= len(self._generated):
            raise ValueError(f"cannot rewind {count} of {len(self._generated)} generated tokens")
        kept = len(self._generated) - count
        if self._penalties.active:
            self._penalties.rewind(self._generated[kept:])
        del self._generated[kept:]

    def fork(self) -> Rules:
        """An independent state at the same point."""
        twin = copy.copy(self)
        twin._generated = list(self._generated)
        twin._penalties = self._penalties.fork()
        return twin

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
        return self._run(logits, _tree_paths(tree) if self._needs_paths else NO_PATH)

    def by_row(self, logits: torch.Tensor, tree: TokenTree) -> LazyRows:
        """What `apply` returns, each row made when it is asked for: for verifiers that look at few of them."""
        _check_shape(logits, 1 + len(tree), self._vocab_size)
        return LazyRows(self, logits, tree)

    def row(self, logits_1v: torch.Tensor, tree: TokenTree, row: int) -> torch.Tensor:
        """(v,) float32: row number `row` of `apply`, from the raw logits (1, v) of that row alone."""
        path = [int(tree.tokens[node]) for node in tree.path(row - 1)] if row and self._needs_paths else ()
        return self._run(logits_1v, (path,))[0]

    def apply_paths(self, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """Log-weights at explicit paths: row i continues the committed text by `paths[i]` (tokens after the root).

        Args:
            logits: (r, v) raw logits of any float dtype, a drafter's for instance; never written to.
        Returns:
            (r, v) float32, as in `apply`.
        Raises:
            ValueError: logits of another shape.
        """
        _check_shape(logits, len(paths), self._vocab_size)
        return self._run(logits, paths)

    def _run(self, logits: torch.Tensor, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        rows_rv = logits.detach().to(torch.float32)
        scales = self._temperature != 1.0
        if not (self._edits or scales or self._filters):
            return rows_rv
        rows_rv = rows_rv.contiguous()
        if self._edits:
            rows_rv = _own(rows_rv, logits)
            self._edit(rows_rv, paths)
        if scales:
            rows_rv = rows_rv.div_(self._temperature) if _owned(rows_rv, logits) else rows_rv / self._temperature
        if self._filters:
            rows_rv = _own(rows_rv, logits)
            filter_rows(rows_rv, top_k=self._params.top_k, top_p=self._params.top_p, min_p=self._params.min_p)
        return rows_rv

    def _edit(self, rows_rv: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        """Steps 2 to 4, in place."""
        device = rows_rv.device
        if len(self._always_bad):
            rows_rv.index_fill_(1, self._always_bad.on(device), -math.inf)
        if self._bad_words.reach:
            self._forbid_completions(rows_rv, paths)
        if self._min_tokens > len(self._generated):
            self._forbid_stops(rows_rv, paths)
        if len(self._bias_ids):
            rows_rv[:, self._bias_ids.on(device)] += self._bias.on(device)
        if self._penalties.active:
            self._penalties.apply(rows_rv, paths)

    def _forbid_completions(self, rows_rv: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        tail = self._generated[-self._bad_words.reach :]
        pairs = [(row, token) for row, path in enumerate(paths) for token in self._bad_words.after(tail, path)]
        if pairs:
            at = torch.tensor(pairs, device=rows_rv.device)
            rows_rv[at[:, 0], at[:, 1]] = -math.inf

    def _forbid_stops(self, rows_rv: torch.Tensor, paths: Sequence[Sequence[int]]) -> None:
        left = self._min_tokens - len(self._generated)
        short = [row for row, path in enumerate(paths) if len(path) < left]
        stops = self._stop_ids.on(rows_rv.device)
        if len(short) == len(paths):
            rows_rv.index_fill_(1, stops, -math.inf)
        elif short:
            rows_rv[torch.tensor(short, device=rows_rv.device)[:, None], stops] = -math.inf


class LazyRows:
    """Log-weights at the root and the nodes of a tree (`Rules.apply`), a row at a time; true until the rules
    advance.
    """

    __slots__ = ("_logits", "_rules", "_tree")

    def __init__(self, rules: Rules, logits: torch.Tensor, tree: TokenTree) -> None:
        self._rules, self._logits, self._tree = rules, logits, tree

    def __getitem__(self, row: int) -> torch.Tensor:
        return self._rules.row(self._logits[row : row + 1], self._tree, row)


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


def _check_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        need(0 <= token < vocab_size, name, f"hold token ids in 0..{vocab_size - 1}", token)


def _check_shape(logits: torch.Tensor, rows: int, vocab_size: int) -> None:
    if tuple(logits.shape) != (rows, vocab_size):
        raise ValueError(f"logits must have shape ({rows}, {vocab_size}): one row per path, got {tuple(logits.shape)}")
