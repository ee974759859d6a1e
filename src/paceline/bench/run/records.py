"""The records of a benchmark: options, prompts as they are decoded, runs, cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.bench.run.measures import Totals
from paceline.bench.run.settings import BenchSetting
from paceline.config import SamplingParams
from paceline.engine import RequestOutput
from paceline.sampling import draw_seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a benchmark runs; see the flags of `paceline bench`."""

    max_tokens: int = 128
    repeats: int = 3
    batches: tuple[int, ...] = (1,)
    temperatures: tuple[float, ...] = (0.0,)
    rates: tuple[float, ...] = (1.0,)
    seed: int = 0
    limit: int | None = None
    ignore_eos: bool = False
    chat: bool = True
    quick: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Give its entry in the document."""
        names = ("max_tokens", "repeats", "limit", "ignore_eos", "chat", "quick")
        lists = {name: list(getattr(self, name)) for name in ("batches", "temperatures", "rates")}
        return {**{name: getattr(self, name) for name in names}, **lists}


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One turn of a conversation as all settings decode it.

    Attributes:
        token_ids: the prompt, earlier answers included; empty if it never came to be.
        reference: what plain decoding at temperature 0 and batch 1 says.
        error: why the recording pass could not decode it.
    """

    workload: str
    prompt: str
    turn: int
    task: str
    token_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool
    reference: tuple[int, ...] = ()
    error: str | None = None


@dataclass(slots=True)
class TimedRun:
    """Records one setting's timed run of one group of prompts.

    Attributes:
        outputs: token ids per prompt of the group; None for a failure.
        rows: entries of the document, in the order of the group.
    """

    group: int
    repeat: int
    seconds: float
    rows: list[dict[str, Any]]
    outputs: list[list[int] | None]

    @property
    def tokens(self) -> int:
        return sum(row["tokens"] for row in self.rows)


@dataclass(slots=True)
class MeasuredCell:
    """All runs of one setting on one workload at one temperature and batch size."""

    setting: BenchSetting
    workload: str
    temperature: float
    batch: int
    claimed: str
    groups: list[list[BenchPrompt]]
    failed: list[BenchPrompt]
    runs: list[TimedRun] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    rss: int | None = None
    cuda: int | None = None
    joules: float | None = None
    notes: set[str] = field(default_factory=set)


@dataclass(slots=True)
class BenchResults:
    """Holds what was measured, before any figure is made of it."""

    pieces: list[BenchPrompt] = field(default_factory=list)
    cells: list[MeasuredCell] = field(default_factory=list)
    load: list[dict[str, Any]] = field(default_factory=list)
    interrupted: bool = False


def prompts_of(pieces: Sequence[BenchPrompt], turn: str = "once") -> list[Any]:
    """The pieces as `LLM.generate` takes them.

    Args:
        turn: names the pass over the workload. Tables and caches that outlive a request are kept apart by it, so that a
            drafter may learn from other prompts, but never from its own answer in an earlier repeat.
    """
    return [{"prompt_token_ids": list(piece.token_ids), "cache_salt": turn} for piece in pieces]


def waking(piece: BenchPrompt) -> BenchPrompt:
    """A little of it, to be decoded uncounted before a turn where another process had the one before.

    It has emptied the caches of the processor, and put the threads to sleep.
    """
    return replace(piece, token_ids=piece.token_ids[:8], max_tokens=min(piece.max_tokens, 4))


def seed_of(piece: BenchPrompt, seed: int) -> int:
    """The seed of a request, the same for every setting."""
    return draw_seed(seed, *piece.prompt.encode(), piece.turn)


def params_of(pieces: Sequence[BenchPrompt], temperature: float, seed: int | None) -> list[SamplingParams]:
    """Their sampling parameters; `seed` is the run\'s, None for none of their own."""
    return [
        SamplingParams(
            temperature=temperature,
            max_tokens=piece.max_tokens,
            ignore_eos=piece.ignore_eos,
            seed=None if seed is None else seed_of(piece, seed),
        )
        for piece in pieces
    ]


def row_of(
    piece: BenchPrompt, out: RequestOutput | None, *, group: int, repeat: int, seconds: float, error: str | None
) -> dict[str, Any]:
    """The document's entry of one prompt in one run."""
    row: dict[str, Any] = {
        "prompt": piece.prompt,
        "turn": piece.turn,
        "repeat": repeat,
        "group": group,
        "seconds": seconds,
    }
    row |= {
        "latency": None,
        "time_to_first_token": None,
        "prompt_tokens": len(piece.token_ids),
        "tokens": 0,
        "steps": 0,
    }
    row |= {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0, "finish_reason": None, "error": error}
    if out is None:
        return row
    metrics, first = out.metrics, out.outputs[0]
    waited = (metrics.first_step_time or metrics.arrival_time) - metrics.arrival_time
    return row | {
        "latency": waited + metrics.generation_time,
        "time_to_first_token": metrics.time_to_first_token,
        "tokens": 0 if first.error else len(first.token_ids),
        "steps": metrics.num_steps,
        "drafts": metrics.num_drafts,
        "draft_tokens": metrics.num_draft_tokens,
        "accepted_tokens": metrics.num_accepted_tokens,
        "finish_reason": first.finish_reason,
        "error": first.error,
    }
