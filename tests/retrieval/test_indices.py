"""Indices: what is found, that a local cache ranks by the very same scores, and folders that are read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.checkpoints import Tokenizer
from paceline.errors import CapabilityError, ConfigError
from paceline.llm import BUNDLED
from paceline.retrieval import (
    Bm25Index,
    DenseIndex,
    Hits,
    TokenStore,
    VectorSearch,
    open_index,
    opened,
    passages_of,
)
from paceline.retrieval.encoders import TokenEncoder

RNG = np.random.default_rng(5)
WORDS = [f"w{i}" for i in range(60)]
PASSAGES = [" ".join(RNG.choice(WORDS, size=RNG.integers(5, 30))) for _ in range(80)]
QUERIES = [" ".join(RNG.choice(WORDS, size=8)) for _ in range(40)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED / "target")


def same_ranking(index: Any, queries: list[Any], kept: int = 12) -> None:
    """A cache with the best and others ranks them as the index does, by scores with the same bits."""
    for place, (query, hits) in enumerate(zip(queries, index.search(queries, 5), strict=True)):
        cache = index.cache()
        cache.add([(place * 7 + i) % index.size for i in range(kept)])
        cache.add(reversed(hits.ids))
        cache.add(hits.ids)
        assert cache.search(query, 5) == hits
        assert index.search([query], 5) == [hits], "whatever is asked beside it"
        assert len(cache) == len(set(cache.ids))


def test_hits_are_ranked_by_score_and_then_number() -> None:
    hits = Hits.of(np.array([9, 2, 5, 4]), np.array([1.0, 3.0, 1.0, 3.0], np.float32), 3)
    assert (hits.ids, hits.best) == ((2, 4, 5), 2)
    assert Hits().best is None


def test_bm25_ranks_as_its_definition_and_so_does_its_cache() -> None:
    index = Bm25Index.build(PASSAGES)
    queries = [index.words(text) for text in QUERIES]
    same_ranking(index, queries)
    texts = [passage.split() for passage in PASSAGES]
    mean = np.mean([len(words) for words in texts])
    for text, (hits,) in zip(QUERIES[:10], [index.search([query], 80) for query in queries[:10]], strict=True):
        for number, got in zip(hits.ids, hits.scores, strict=True):
            words, total = texts[number], 0.0
            for word in text.split():
                frequency, having = words.count(word), sum(word in one for one in texts)
                idf = np.log(1 + (len(texts) - having + 0.5) / (having + 0.5))
                total += idf * frequency / (frequency + 1.5 * (1 - 0.75 + 0.75 * len(words) / mean))
            assert got == pytest.approx(total, rel=1e-4)
    assert index.search([index.words("nothing known")], 3) == [Hits()]
    assert index.cache().search(queries[0], 3) == Hits()


def test_statistics_of_the_cached_passages_alone_would_rank_otherwise() -> None:
    index, other = Bm25Index.build(PASSAGES), 0
    for place, text in enumerate(QUERIES):
        kept = [(place * 3 + 7 * i) % 80 for i in range(10)]
        cache = index.cache()
        cache.add(kept)
        alone = Bm25Index.build([PASSAGES[number] for number in kept])
        found = alone.search([alone.words(text)], 1)[0].best
        other += cache.search(index.words(text), 1).best != (None if found is None else kept[found])
    assert other > 4


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("kind", ["exact", "hnsw", "ivf"])
def test_vectors_are_found_and_ranked_alike(kind: str, inner: bool) -> None:
    vectors = RNG.normal(size=(400, 16)).astype(np.float32)
    search = VectorSearch.build(vectors, kind, inner=inner)
    queries = RNG.normal(size=(30, 16)).astype(np.float32)
    every = vectors @ queries.T if inner else -np.square(vectors[:, None] - queries[None]).sum(-1)
    best = every.argmax(0).tolist()
    found = [hits.best for hits in search.search(queries, 5)]
    right = sum(map(int.__eq__, found, best))
    assert right == 30 if kind == "exact" else right >= 20
    store = TokenStore(search, kind, np.zeros(400, np.int32), layer=0, model="")
    assert store.approximate is (kind != "exact")
    same_ranking(store, list(queries), kept=12 if kind == "exact" else 0)  # what is missed is not found


def test_tokens_that_most_passages_have_weigh_little() -> None:
    table = torch.eye(6)
    encode = TokenEncoder.of([[0, 1], [0, 2], [0, 3]], lambda tokens: table[list(tokens)], 6)
    one = encode([0, 0, 0, 1])
    assert one[1] > 0.9 > one[0] > 0.0
    assert float(np.linalg.norm(one)) == pytest.approx(1.0)
    assert not encode([5]).any(), "no passage has it"


def test_a_dense_index_finds_the_passage_with_the_words_of_the_query(tokenizer: Tokenizer) -> None:
    table = torch.from_numpy(RNG.normal(size=(len(tokenizer.tokens()), 32)).astype(np.float32))

    def embed(tokens: Any) -> torch.Tensor:
        return table[list(tokens)]

    texts = ["The fox ate the hen.", "Rain fell on the hills.", "The king opened the box."]
    index = DenseIndex.build(texts, tokenizer=tokenizer, embed=embed, vocab_size=len(table))
    read = index.reader(tokenizer, embed)
    queries = [read(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    assert [hits.best for hits in index.search(queries, 1)] == [0, 1, 2]
    same_ranking(index, queries, kept=3)
    with pytest.raises(CapabilityError, match="takes embeddings"):
        index.reader(tokenizer, None)
    index.model = "another"
    with pytest.raises(ConfigError, match="built with another tokenizer"):
        index.reader(tokenizer, embed)


def lengths(texts: Any) -> list[list[float]]:
    """An encoder: the length of a text, and a one."""
    return [[float(len(text)), 1.0] for text in texts]


def test_a_function_may_encode_and_must_give_vectors(tokenizer: Tokenizer) -> None:
    index = DenseIndex.build(["a", "a" * 50], encoder=lengths)
    (query,) = [index.reader(tokenizer, None)(tokenizer.encode("x"))]
    assert query.shape == (2,)
    for wrong in (lambda texts: [1.0] * len(texts), lambda texts: [["x"]], lambda texts: [[float("nan")]] * len(texts)):
        with pytest.raises(ConfigError, match="encoder must make 2 vectors"):
            DenseIndex.build(["a", "b"], encoder=wrong)
    with pytest.raises(ConfigError, match="encoder: cannot import 'nowhere:none'"):
        DenseIndex.build(["a"], encoder="nowhere:none")


def test_indices_are_read_from_their_folders(tmp_path: Path) -> None:
    vectors = VectorSearch.build(RNG.normal(size=(60, 8)).astype(np.float32), "ivf", inner=False)
    made: dict[str, Any] = {
        "words": Bm25Index.build(PASSAGES),
        "dense": DenseIndex.build(PASSAGES[:9], encoder="tests.retrieval.test_indices:lengths"),
        "tokens": TokenStore(vectors, "ivf", np.arange(60, dtype=np.int32), layer=2, model="m"),
    }
    for name, index in made.items():
        folder = tmp_path / name
        folder.mkdir()
        index.save(folder)
        read: Any = open_index(folder)
        query = index.words(QUERIES[0]) if name == "words" else np.full(read.vectors.dimension, 0.3, np.float32)
        assert read.search([query], 4) == index.search([query], 4)
        assert opened(str(folder)) is read
        assert (read.kind, read.size, read.approximate) == (index.kind, index.size, index.approximate)
        if name != "tokens":
            assert read.passage(3) == PASSAGES[3]
    assert open_index(tmp_path / "tokens").tokens.tolist() == list(range(60))  # type: ignore[attr-defined]


def test_what_is_no_index_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="index: cannot read"):
        open_index(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"kind": "words"}))
    with pytest.raises(ConfigError, match="index must be of kind bm25, dense, knn"):
        open_index(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"kind": "knn", "form": "exact"}))
    with pytest.raises(ConfigError, match=r"cannot be read .*; build it again"):
        open_index(tmp_path)
    with pytest.raises(ConfigError, match="passages must hold words"):
        Bm25Index.build(["...", ""])


def test_passages_are_so_many_words_at_most() -> None:
    assert list(passages_of(["a  b\nc d e", "", " f "], 2)) == ["a  b", "c d", "e", "f"]
