"""`paceline count-tokens`: how often a target writes each token, so that draft models read only the rows of their heads
that pay (`draft_vocab_size`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli import outputs
from paceline.cli.interrupts import INTERRUPTED
from paceline.cli.options import check_sampling, open_llm, sampling_params, with_flags
from paceline.cli.prompts import Prompts, checked_prompts, read_prompts
from paceline.cli.terminal import counted, progress_bar, wrapped
from paceline.cli.verify import bundled
from paceline.errors import ConfigError

if TYPE_CHECKING:
    from paceline.checkpoints import Tokenizer
    from paceline.drafters.vocab import TokenCounts

TOGETHER = 8
"""Prompts that are decoded at once, where that is faster than one after the other."""

SHOWN = (16, 8, 4, 2)
"""Of the vocabulary one part in so many, whose coverage is printed."""


SourceFiles = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="SOURCE",
        help="Texts that it wrote: text, JSONL or JSON files (.gz too), or folders. Default: it writes some.",
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Treat each prompt as a user's message (chat template).")]
Fields = Annotated[
    list[str] | None, typer.Option("--field", metavar="NAME", help="Field of JSON rows to read; may be repeated.")
]
Add = Annotated[bool, typer.Option("--add", help="Add to the counts that are there.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="Where counts are kept; default: where draft models look for them."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print the findings as one JSON object.")]


@with_flags(sampling=True)
def command(
    *,
    sources: SourceFiles = None,
    prompts: Prompts = None,
    chat: Chat = False,
    field: Fields = None,
    add: Add = False,
    output: Output = None,
    as_json: Json = False,
    flag_values: dict[str, Any],
) -> None:
    """Count the tokens that a model writes, from which its draft models choose the rows of their heads."""
    check_sampling(flag_values)
    if sources and (prompts is not None or chat):
        raise ConfigError("--prompts and --chat are for texts that the model is to write; leave them out, or SOURCE")
    if field and not sources:
        raise ConfigError("--field chooses among the fields of SOURCE; name files to read, or leave it out")
    if output is not None:
        from paceline.drafters.vocab import FORMAT

        outputs.must_be_own("--output", output, mark=FORMAT, what="a file of counts")
    path, before = _kept(flag_values, output, add=add)
    if sources:
        counts, interrupted = _read(flag_values, sources, field or ()), False
    else:
        counts, interrupted = _written(flag_values, prompts, chat=chat)
    if not counts.tokens:
        raise typer.Exit(INTERRUPTED) if interrupted else ConfigError("there is no token to count; give longer texts")
    counts = counts if before is None else before.plus(counts)
    counts.save(path)
    print(json.dumps(_facts(counts, path)) if as_json else "\n".join(wrapped(_lines(counts, path))))
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _kept(flag_values: dict[str, Any], output: Path | None, *, add: bool) -> tuple[Path, TokenCounts | None]:
    """Where the counts go, and those that are to be added to."""
    from paceline.drafters.vocab import TokenCounts, counts_path

    path = counts_path(_folder(flag_values)) if output is None else output
    return path, TokenCounts.load(path) if add and path.exists() else None


def _folder(flag_values: dict[str, Any]) -> Path:
    from paceline.checkpoints import BUNDLED_FOLDER, resolve

    return resolve(
        flag_values.get("model", BUNDLED_FOLDER / "target"), revision=flag_values.get("revision"),
        code=flag_values.get("trust_remote_code", False), gguf_file=flag_values.get("gguf_file"),
    )  # fmt: skip


def _read(flag_values: dict[str, Any], sources: Sequence[Path], field: Sequence[str]) -> TokenCounts:
    """Counts of texts in files, for which no model is loaded."""
    from paceline.checkpoints import Tokenizer
    from paceline.drafters.retrieval import Sources

    files, named = Sources.find(sources, field), flag_values.get("tokenizer")
    tokenizer = Tokenizer.load(
        _folder(flag_values if named is None else flag_values | {"model": named, "gguf_file": None})
    )
    with progress_bar() as bar:
        task = bar.add_task("reading", total=files.total)

        def texts() -> Iterator[list[int]]:
            text = ""
            for piece in files.pieces():
                text += piece.text
                if piece.last and text:
                    yield tokenizer.encode(text, add_special_tokens=False)
                    text = ""
                bar.update(task, completed=piece.done)

        names = ", ".join(str(source) for source in sources)
        return _counts(texts(), tokenizer, str(flag_values.get("model", "the bundled model")), names)


def _written(flag_values: dict[str, Any], prompts: Path | None, *, chat: bool) -> tuple[TokenCounts, bool]:
    """Counts of texts that the model writes here; and whether Ctrl-C ended that early."""
    read = {} if prompts is None else read_prompts(prompts)
    llm = open_llm(flag_values)
    params, texts, interrupted = sampling_params(flag_values, llm), list[list[int]](), False
    asked = bundled(llm) if prompts is None else checked_prompts(llm, prompts, read, chat=chat)
    with progress_bar() as bar:
        task = bar.add_task("writing texts", total=len(asked))
        try:
            for start in range(0, len(asked), TOGETHER):
                for output in llm.generate(asked[start : start + TOGETHER], params, use_tqdm=False):
                    output.raise_for_error()
                    texts += [list(choice.token_ids) for choice in output.outputs]
                bar.update(task, completed=min(start + TOGETHER, len(asked)))
        except KeyboardInterrupt:
            interrupted = True
    return _counts(texts, llm.tokenizer, llm.runner.info.name, "texts that it wrote"), interrupted


def _counts(texts: Iterable[Sequence[int]], tokenizer: Tokenizer, model: str, origin: str) -> TokenCounts:
    from paceline.drafters.vocab import TokenCounts

    size = max(tokenizer.tokens()) + 1
    return TokenCounts.of(texts, size, tokenizer=tokenizer.fingerprint(), model=model, origin=origin)


def _coverage(counts: TokenCounts) -> dict[int, float]:
    """Tokens of a head -> what they cover of texts that did not choose them."""
    from paceline.drafters.vocab import STEP

    covered, size = counts.coverage(set()), counts.halves.shape[1]
    steps = sorted({max(1, round(size / part / STEP)) for part in SHOWN})
    return {STEP * step: covered[step] for step in steps if step < len(covered)}


def _facts(counts: TokenCounts, path: Path) -> dict[str, Any]:
    return {
        "path": str(path),
        "model": counts.model,
        "texts": counts.texts,
        "tokens": counts.tokens,
        "different": int((counts.total > 0).sum()),
        "vocab_size": counts.halves.shape[1],
        "coverage": {str(size): round(share, 5) for size, share in _coverage(counts).items()},
    }


def _lines(counts: TokenCounts, path: Path) -> list[str]:
    facts = _facts(counts, path)
    covered = ", ".join(f"{100 * share:.1f} % by {size:,}" for size, share in _coverage(counts).items())
    return [
        f"{counted(counts.tokens, 'token')} in {counted(counts.texts, 'text')}, {facts['different']:,} different ones "
        f"of {facts['vocab_size']:,}",
        *([f"The most frequent ones cover of texts that were not counted: {covered}."] if covered else []),
        f"Counts: {path}",
    ]
