"""Speculative retrieval beside the plain loop, on questions about passages, with indices that take their time.

usage: retrieval.py --data FOLDER [--model smollm2] [--questions 12] [--tokens 48] [--repeats 3]
                    [--query-tokens 16] [--indices exact,ivf,bm25,knn] [--entries 1000000] [--latency 0.1]
                    [--threads 2] [--folder results]

`FOLDER` holds `wiki-questions/WikiQuestions.json` and `wikitext-2/valid.txt.gz`, which is divided into further
passages. The indices:

    exact, ivf   the passages' vectors among random ones, `--entries` together; faiss compares all, or some lists
    bm25         the passages alone, where each search waits for `--latency` seconds, and a tenth of it for each
                 further query: that is made up, for an index that is large or far away
    knn          states before the tokens of the passages among random ones, `--entries` together; kNN-LM

Texts are greedy and of `--tokens` tokens. Every way to retrieve writes the texts of the plain loop, or nothing is
timed. The control is the same way without taking back: it must write other texts. Results:
`results/retrieval_MODEL.json`; an index that is not asked for stays as it is.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import sleep
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from common import RESULTS, estimated, kept, save
from decoding import add_model, model_of

from paceline import LLM, SamplingParams
from paceline.retrieval import Bm25Index, DenseIndex, Hits, Index, TokenStore, VectorSearch, passages_of
from paceline.search import states_of
from paceline.search.methods.knn_lm import KnnLm
from paceline.search.methods.ralm import Ralm
from paceline.utils import median_ratio, time_in_turn

PLAIN = "plain loop"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"speculate": False},
    "stride 1": {"stride": 1},
    "stride 3": {"stride": 3},
    "OS3": {},
    "OS3, asynchronous": {"asynchronous": True},
    "OS3, chance up to 0.95, asynchronous": {"asynchronous": True, "most_chance": 0.95},
    "OS3, asynchronous, prefetch 1": {"asynchronous": True, "prefetch": 1},
}
KNN_OPTIONS = {"distance_temperature": 100.0}


class Slow(Bm25Index):
    """Takes its time. Attributes: latency: seconds of a search."""

    latency = 0.0

    def search(self, queries: Sequence[Any], most: int) -> list[Hits]:
        sleep(self.latency * (1.0 + 0.1 * (len(queries) - 1)))
        return super().search(queries, most)


def questions_of(data: Path) -> list[dict[str, Any]]:
    """Rows with passage (`context`) and question.

    Raises:
        SystemExit: the folder does not hold the set.
    """
    path = data / "wiki-questions" / "WikiQuestions.json"
    if not path.exists():
        raise SystemExit(f"{data} holds no wiki-questions/WikiQuestions.json; give --data a folder that does")
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [row for row in rows if row["answerable"]]


def passages_in(data: Path, rows: list[dict[str, Any]]) -> list[str]:
    """Those of the questions, each once, and those of WikiText-2.

    Raises:
        SystemExit: the folder does not hold it.
    """
    path = data / "wikitext-2" / "valid.txt.gz"
    if not path.exists():
        raise SystemExit(f"{data} holds no wikitext-2/valid.txt.gz; give --data a folder that does")
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    others = passages_of(line for line in lines if line.strip() and not line.strip().startswith("="))
    return list(dict.fromkeys([*(row["context"] for row in rows), *others]))


def among_random(vectors: np.ndarray[Any, Any], entries: int, *, unit: bool) -> np.ndarray[Any, Any]:
    """(entries, d) float32: the vectors, then random ones of like size."""
    rng = np.random.default_rng(0)
    whole = np.empty((entries, vectors.shape[1]), np.float32)
    whole[: len(vectors)] = vectors
    scale = float(vectors.std())
    for start in range(len(vectors), entries, 65536):
        part = whole[start : start + 65536]
        part[:] = rng.standard_normal(part.shape, np.float32) * scale
        if unit:
            part /= np.linalg.norm(part, axis=1, keepdims=True)
    return whole


def index_of(name: str, llm: LLM, passages: list[str], args: argparse.Namespace) -> Index[Any]:
    """The index of that name."""
    if name == "bm25":
        slow = Slow.build(passages)
        slow.latency = args.latency
        return slow
    runner: Any = llm.runner
    if name == "knn":
        layer, states, tokens = runner.info.num_layers, [], list[int]()
        for passage in passages[: args.store_passages]:
            ids = llm.tokenizer.encode(passage)
            states.append(states_of(runner, ids[:-1], layer))
            tokens += ids[1:]
        found = among_random(np.concatenate(states), args.entries, unit=False)
        tokens += np.random.default_rng(1).integers(100, runner.info.vocab_size, len(found) - len(tokens)).tolist()
        return TokenStore.build(found, tokens, layer=layer, model=llm.tokenizer.fingerprint())
    small = DenseIndex.build(passages, tokenizer=llm.tokenizer, embed=runner.embed, vocab_size=runner.info.vocab_size)
    own = small.vectors.vectors(np.arange(small.size))
    search = VectorSearch.build(among_random(own, args.entries, unit=True), name, inner=True)
    return DenseIndex(passages, search, name, "tokens", weights=small.weights, model=small.model)


@contextmanager
def without_taking_back() -> Iterator[None]:
    """The control: every guess stands."""
    with patch.object(Ralm, "agrees", lambda *_: True), patch.object(KnnLm, "agrees", lambda *_: True):
        yield


def writer(llm: LLM, given: dict[str, Any], params: SamplingParams) -> Callable[[str], Any]:
    """Writes the answer to a question."""

    def write(question: str) -> Any:
        (result,) = llm.generate(question, params, retrieval=given)
        result.raise_for_error()
        return result

    return write


def measured(llm: LLM, index: Index[Any], questions: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One index: speed of each way over the plain loop, and what its rounds were."""
    params = SamplingParams(temperature=0.0, max_tokens=args.tokens, ignore_eos=True)
    ways = {name: way for name, way in WAYS.items() if not (index.kind == "knn" and "prefetch" in way)}
    more = KNN_OPTIONS if index.kind == "knn" else {"query_tokens": args.query_tokens}
    writers = {name: writer(llm, {"index": index, **more, **way}, params) for name, way in ways.items()}
    seen = {name: [write(question) for question in questions] for name, write in writers.items()}
    ids = {name: [one.outputs[0].token_ids for one in results] for name, results in seen.items()}
    different = {name: sum(map(list.__ne__, ids[PLAIN], one)) for name, one in ids.items()}
    if any(different.values()):
        raise SystemExit(f"texts differ from the plain loop's, nothing is timed: {different}")
    with without_taking_back():
        control = [writers["stride 3"](question).outputs[0].token_ids for question in questions]
    caught = sum(map(list.__ne__, ids[PLAIN], control))
    if not caught:
        raise SystemExit("texts without taking back are those of the plain loop: the comparison shows nothing")
    seconds = time_in_turn(
        writers, questions, args.repeats,
        differs=lambda _, base, other: None if base.outputs[0].token_ids == other.outputs[0].token_ids else "text",
    )  # fmt: skip
    return {
        "entries": index.size,
        "questions": len(questions),
        "texts that differ": different,
        "texts that differ without taking back": caught,
        "ways": {name: row(seen[name], seconds[name], seconds[PLAIN]) for name in writers},
    }


def row(results: list[Any], seconds: Any, plain: Any) -> dict[str, Any]:
    """Of one way."""
    reports = [one.retrieval for one in results]
    made = sum(one.speculated for one in reports)
    strides = [stride for one in reports for stride in one.strides]
    return {
        "seconds": float(np.median(seconds)),
        "over plain": estimated([plain / seconds], median_ratio),
        "searches": float(np.mean([one.searches for one in reports])),
        "queries": float(np.mean([one.queries for one in reports])),
        "waited for": float(np.mean([one.seconds for one in reports])),
        "guesses right": None if not made else 1.0 - sum(one.taken_back for one in reports) / made,
        "stride": None if not strides else float(np.mean(strides)),
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(f"{name}: {found['entries']:,} entries, {found['questions']} questions, texts equal; without taking back "
          f"{found['texts that differ without taking back']} differ")  # fmt: skip
    for way, one in found["ways"].items():
        gain, right = one["over plain"], one["guesses right"]
        said = "" if right is None else f", {right:.0%} right, stride {one['stride']:.1f}"
        print(f"  {way:32} {one['seconds']:7.2f} s  {gain['value']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})  "
              f"{one['searches']:.1f} searches, waited {one['waited for']:.2f} s{said}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--questions", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--query-tokens", type=int, default=16)
    parser.add_argument("--store-passages", type=int, default=200, help="of which the store of tokens is made")
    parser.add_argument("--indices", default="exact,ivf,bm25,knn")
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--latency", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = model_of(args.model)
    rows = questions_of(args.data)
    passages = passages_in(args.data, rows)
    chosen = rows[:: max(1, len(rows) // args.questions)][: args.questions]
    questions = [f"Question: {one['question']}\nAnswer:" for one in chosen]
    names = args.indices.split(",")
    name = f"retrieval_{model.name}"
    result = kept(name, args.folder) | {
        "weights": model.weights, "tokens": args.tokens, "query_tokens": args.query_tokens, "latency": args.latency,
        "passages": len(passages),
    }  # fmt: skip
    with model.open() as llm:
        for one in names:
            result[one] = measured(llm, index_of(one, llm, passages, args), questions, args)
            show(one, result[one])
            save(name, result, args.folder, parts=names[: names.index(one) + 1])


if __name__ == "__main__":
    main()
