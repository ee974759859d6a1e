"""What `generate --stats` and the chat's /stats print: what a request took, and with how much memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.cli.terminal import counted
from paceline.errors import ConfigError
from paceline.utils import shortened

if TYPE_CHECKING:
    from paceline.engine import RequestMetrics, RequestOutput
    from paceline.search import RetrievalReport, SearchTree
    from paceline.transcriber import DecodingCost


def loading(seconds: float) -> str:
    """What loading the model took."""
    return f"load         {seconds:.2f} s"


def request_figures(output: RequestOutput) -> list[str]:
    """Lines on what a prompt took: first token, prompt, decoding, and the drafts or the search."""
    last = f"drafts       {drafts([output.metrics])}"
    if output.search is not None:
        last = f"search       {search_figures(output.search)}"
    return [*decoding_figures(output.metrics), last]


def search_figures(search: SearchTree) -> str:
    """What a search computed, and whether its budget ended it."""
    ended = "; its budget ended it" if search.budget_spent else ""
    asked = "" if search.retrieval is None else f"; {retrieval_figures(search.retrieval)}"
    passes = f"{search.num_tokens} tokens in {search.num_passes} passes, {search.seconds:.1f} s"
    return f"{search.method}: {passes}{ended}{asked}"


def retrieval_figures(retrieval: RetrievalReport) -> str:
    """How often an index was asked, and how many guesses of what it finds were wrong."""
    asked = f"index asked {retrieval.searches} times for {retrieval.seconds:.1f} s"
    if not retrieval.speculated:
        return asked
    return f"{asked}, {retrieval.taken_back} of {retrieval.speculated} guesses taken back"


def decoding_figures(metrics: RequestMetrics) -> list[str]:
    """Lines on one answer, whatever drafts for it: first token, prompt, decoding."""
    lines = []
    if metrics.time_to_first_token is not None:
        lines.append(f"first token  {metrics.time_to_first_token:.2f} s")
    prompt = counted(metrics.num_prompt_tokens, "token")
    if metrics.scheduled_time is not None and metrics.first_step_time is not None:
        seconds = metrics.first_step_time - metrics.scheduled_time
        prompt += f", {metrics.num_prompt_tokens / max(seconds, 1e-9):,.0f} tokens/s (kept beginnings count as read)"
    rate = f"{counted(metrics.num_generation_tokens, 'token')}, {metrics.tokens_per_second:.1f} tokens/s"
    return [*lines, f"prompt       {prompt}", f"decoding     {rate}"]


def drafts(answers: Sequence[RequestMetrics]) -> str:
    """How many drafted tokens were accepted, and what that made of a pass, over some answers."""
    drafted = sum(metrics.num_draft_tokens for metrics in answers)
    accepted = sum(metrics.num_accepted_tokens for metrics in answers)
    steps = sum(metrics.num_steps for metrics in answers)
    if not drafted:
        return "none"
    return (
        f"{accepted} of {drafted} accepted ({accepted / drafted:.0%}), {1 + accepted / max(1, steps):.2f} tokens a pass"
    )


def speech_figures(cost: DecodingCost, audio: float, seconds: float) -> list[str]:
    """Lines on what transcripts took.

    Args:
        cost: of their windows. audio: seconds of it. seconds: that were worked.
    """
    attempts, tokens = counted(cost.attempts, "attempt"), counted(cost.tokens, "token")
    return [
        f"audio        {audio:.1f} s in {seconds:.1f} s, real-time factor {seconds / max(audio, 1e-9):.2f}",
        f"decoding     {attempts} at windows, {tokens} in {cost.passes} passes, "
        f"{cost.tokens / max(cost.passes, 1):.2f} tokens a pass",
    ]


def size_words(size: int) -> str:
    """Bytes for people."""
    return f"{size / 1e9:.2f} GB" if size >= 10**9 else f"{size / 1e6:,.1f} MB"


def bytes_of(name: str, text: str) -> int:
    """Bytes from a text as 2GB, 1.5GiB or 500MB.

    Raises:
        ConfigError: something else.
    """
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,6})?)\s*([KMG])(i?)B\s*", text, re.IGNORECASE)
    if found is None or not float(found[1]):
        raise ConfigError(f"{name} must be a size as 2GB, 1.5GiB or 500MB, got {shortened(text)}")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** (1 + "KMG".index(found[2].upper())))


def memory() -> str:
    """What this process holds, and held at most, in main memory."""
    import psutil

    held, most = psutil.Process().memory_info().rss, peak()
    return f"memory       {held / 1e6:,.0f} MB" + (f", at most {most / 1e6:,.0f} MB" if most else "")


def peak() -> int:
    """Most bytes that this process held; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    import sys

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most
