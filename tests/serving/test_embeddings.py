"""The server's routes that read texts: embeddings by the served model or an encoder, rankings, scores."""

from __future__ import annotations

import base64
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_bert
import torch
from serving.conftest import Live, comes, serve
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from paceline import LLM, AsyncLLM
from paceline.serving.encoders import EncoderThread, PoolingSpec

PATH = "/v1/embeddings"
TOLERANCE = 1e-5
TEXTS = ["One day", "In the morning the cat went out", "x"]
WORDS = ["word1", "word2 word3 word4", "word5 word1 word7 word8"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_bert.write(tmp_path_factory.mktemp("encoder"))
    tiny_bert.write_modules(folder, normalize=True, pooling_mode_cls_token=True)
    return folder


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.write(tmp_path_factory.mktemp("cross"), labels=1, seed=1)


@pytest.fixture(scope="module")
def full(llm: LLM, encoder: Path, cross: Path) -> Iterator[Live]:
    yield from serve(AsyncLLM(llm), embedding_model=str(encoder), rerank_model=str(cross))


@pytest.fixture(scope="module")
def cosines(llm: LLM, encoder: Path) -> Iterator[Live]:
    yield from serve(AsyncLLM(llm), embedding_model=str(encoder), embedding_pooling="mean", max_embedding_texts=4)


def vectors(answer: Any) -> torch.Tensor:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return torch.tensor([one["embedding"] for one in answer["data"]])


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


def unit(found: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(found, dim=-1)


@torch.inference_mode()
def first_states(folder: Path, texts: list[str]) -> torch.Tensor:
    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    return torch.stack([model(**tokenizer(one, return_tensors="pt")).last_hidden_state[0, 0] for one in texts])


# ------------------------------------------------------------------------------------------------ embeddings


def test_the_served_model_embeds_as_the_library_does(live: Live, cosines: Live, llm: LLM) -> None:
    answer = live.ok(PATH, input=TEXTS, model="bundled", user="me")
    expected = llm.embed(TEXTS)
    assert off(vectors(answer), torch.tensor([one.outputs.embedding for one in expected])) < TOLERANCE
    tokens = sum(len(one.prompt_token_ids) for one in expected)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (answer["object"], answer["model"]) == ("list", "bundled")
    mean = vectors(cosines.ok(PATH, input=TEXTS, model="other-name"))
    assert off(mean, torch.tensor([one.outputs.embedding for one in llm.embed(TEXTS, pooling="mean")])) < TOLERANCE
    assert off(mean, vectors(answer)) > 100 * TOLERANCE


def test_forms_of_inputs(live: Live, llm: LLM) -> None:
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    expected = vectors(live.ok(PATH, input=TEXTS))
    assert off(vectors(live.ok(PATH, input=ids)), expected) < TOLERANCE
    assert off(vectors(live.ok(PATH, input=TEXTS[::-1])).flip(0), expected) < TOLERANCE
    assert off(vectors(live.ok(PATH, input=TEXTS[1]))[0], expected[1]) < TOLERANCE
    assert off(vectors(live.ok(PATH, input=ids[1]))[0], expected[1]) < TOLERANCE
    bare = vectors(live.ok(PATH, input=llm.tokenizer.encode(TEXTS[1], add_special_tokens=False)))
    assert off(vectors(live.ok(PATH, input=TEXTS[1], add_special_tokens=False)), bare) < TOLERANCE


def test_base64_holds_the_same_numbers(live: Live) -> None:
    floats = live.ok(PATH, input=TEXTS, encoding_format="float")
    packed = live.ok(PATH, input=TEXTS, encoding_format="base64")
    for one, other in zip(floats["data"], packed["data"], strict=True):
        data = base64.b64decode(other["embedding"])
        assert list(struct.unpack(f"<{len(data) // 4}f", data)) == one["embedding"]


def test_dimensions_and_truncation(live: Live, llm: LLM) -> None:
    whole = vectors(live.ok(PATH, input=TEXTS))
    assert off(vectors(live.ok(PATH, input=TEXTS, dimensions=6)), unit(whole[:, :6])) < TOLERANCE
    assert live.error(PATH, input="x", dimensions=10**5)["param"] == "dimensions"
    ids = llm.tokenizer.encode(TEXTS[1])
    cut = live.ok(PATH, input=TEXTS[1], truncate_prompt_tokens=3)
    assert cut["usage"]["prompt_tokens"] == 3
    assert off(vectors(cut), vectors(live.ok(PATH, input=ids[-3:]))) < TOLERANCE
    long = [5] * (llm.backend.info.max_context + 1)
    assert "truncate_prompt_tokens" in live.error(PATH, input=long)["message"]
    live.ok(PATH, input=long, truncate_prompt_tokens=-1)
    for wrong in (0, -2):
        assert live.error(PATH, input="x", truncate_prompt_tokens=wrong)["param"] == "truncate_prompt_tokens"


def test_what_cannot_be_honoured_is_named(live: Live, cosines: Live) -> None:
    for body, param in (
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [10**7]}, "input"),
        ({"input": [1, "x"]}, "input"),
        ({}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "input_type": "query"}, "input_type"),
        ({"input": "x", "stream": True}, "stream"),
    ):
        assert str(live.error(PATH, **body)["param"]).startswith(param), body
    assert live.error(PATH, 404, input="x", model="unknown")["code"] == "model_not_found"
    assert "1 to 4 texts" in cosines.error(PATH, input=["x"] * 5)["message"]


def test_tokens_of_a_request_are_limited(llm: LLM) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for live in serve(AsyncLLM(llm), max_embedding_tokens=10):
            live.ok(PATH, input=[[5] * 5, [6] * 5])
            extend = llm.runner.extend
            patched.setattr(llm.runner, "extend", lambda *_, **__: pytest.fail("a text was read"))
            assert "at most 10 tokens together, got 11" in live.error(PATH, input=[[5] * 5, [6] * 6])["message"]
            patched.setattr(llm.runner, "extend", extend)


def test_keys_and_slots_hold(locked: Live) -> None:
    assert locked.error(PATH, 401, input="x")["code"] == "invalid_api_key"
    answer = locked.http.post(PATH, json={"input": "x"}, headers={"Authorization": "Bearer first-key"})
    assert answer.status_code == 200
    assert locked.error("/rerank", 401, query="x", documents=["y"])["code"] == "invalid_api_key"


def test_openais_client(openai: Any, full: Live, encoder: Path, llm: LLM) -> None:
    client = openai.OpenAI(base_url=f"{full.url}/v1", api_key="none", max_retries=0, timeout=60)
    found = client.embeddings.create(model="bundled", input=TEXTS)  # asks for base64
    assert isinstance(found, openai.types.CreateEmbeddingResponse)
    expected = torch.tensor([one.outputs.embedding for one in llm.embed(TEXTS)])
    assert off(torch.tensor([one.embedding for one in found.data]), expected) < TOLERANCE
    floats = client.embeddings.create(model="bundled", input=TEXTS, encoding_format="float", dimensions=4)
    assert off(torch.tensor([one.embedding for one in floats.data]), unit(expected[:, :4])) < TOLERANCE
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model="bundled", input="")
    words = client.embeddings.create(model=str(encoder), input=WORDS)
    assert off(torch.tensor([one.embedding for one in words.data]), unit(first_states(encoder, WORDS))) < TOLERANCE


def test_a_stream_keeps_its_tokens_while_texts_are_embedded(live: Live, llm: LLM) -> None:
    asked = {"prompt": "def f(n):", "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    expected = live.ok("/v1/completions", **asked)["choices"][0]["text"]
    ended, during, over = threading.Event(), list[int](), threading.Event()

    def embed() -> None:
        with httpx.Client(base_url=live.url, timeout=60) as http:
            while not ended.is_set():
                answer = http.post(PATH, json={"input": [[5 + i] * 700 for i in range(4)]})
                during.append(answer.status_code)
        over.set()

    thread = threading.Thread(target=embed)
    thread.start()
    assert comes(lambda: bool(during))
    before = len(during)
    text = ""
    with live.http.stream("POST", "/v1/completions", json=asked | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["text"]
    while len(during) == before:  # a control: they were side by side
        assert not over.wait(0.01)
    ended.set()
    thread.join(60)
    assert text == expected
    assert set(during) == {200}
    assert comes(lambda: live.model.llm.backend.gauges().running == 0)


def test_metrics_count_the_requests(full: Live) -> None:
    def counted(kind: str) -> tuple[float, float]:
        page = full.http.get("/metrics").text
        found = []
        for name in ("text_requests", "text_tokens"):
            lines = [line for line in page.splitlines() if line.startswith(f'paceline:{name}_total{{kind="{kind}"}}')]
            found.append(float(lines[0].split()[-1]) if lines else 0.0)
        return found[0], found[1]

    before = {kind: counted(kind) for kind in ("embeddings", "rerank", "score")}
    tokens = full.ok(PATH, input=TEXTS, model="bundled")["usage"]["prompt_tokens"]
    full.ok("/rerank", query="word1", documents=["word2"])
    full.ok("/score", text_1="word1", text_2="word2")
    full.error(PATH, input=[])
    assert counted("embeddings") == (before["embeddings"][0] + 1, before["embeddings"][1] + tokens)
    assert counted("rerank") == (before["rerank"][0] + 1, before["rerank"][1] + 5)
    assert counted("score") == (before["score"][0] + 1, before["score"][1] + 5)


# ------------------------------------------------------------------------------------------------ encoders


def test_an_encoder_embeds_where_no_model_is_named(full: Live, encoder: Path) -> None:
    expected = unit(first_states(encoder, WORDS))
    answer = full.ok(PATH, input=WORDS)
    assert off(vectors(answer), expected) < TOLERANCE
    assert answer["model"] == str(encoder)
    assert answer["usage"]["prompt_tokens"] == sum(len(text.split()) + 2 for text in WORDS)
    assert off(vectors(full.ok(PATH, input=WORDS, dimensions=7)), unit(expected[:, :7])) < TOLERANCE
    assert full.error(PATH, input=WORDS, dimensions=25)["param"] == "dimensions"
    long = " ".join(["word3"] * 60)
    assert full.error(PATH, input=long)["param"] == "input"
    assert full.ok(PATH, input=long, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == tiny_bert.MOST
    names = [one["id"] for one in full.http.get("/v1/models").json()["data"]]
    assert names[:2] == ["bundled", "other-name"]
    assert str(encoder) in names
    assert full.error("/v1/completions", 404, model=str(encoder), prompt="x")["code"] == "model_not_found"


def test_a_checkpoint_that_does_not_normalise_is_not_normalised(llm: LLM, tmp_path: Path) -> None:
    folder = tiny_bert.write(tmp_path)
    tiny_bert.write_modules(folder, normalize=False, pooling_mode_cls_token=True)
    for live in serve(AsyncLLM(llm), embedding_model=str(folder)):
        found, expected = vectors(live.ok(PATH, input=WORDS)), first_states(folder, WORDS)
        assert off(found, expected) < TOLERANCE
        assert off(found, unit(expected)) > 100 * TOLERANCE


# ------------------------------------------------------------------------------------------------ rankings


@torch.inference_mode()
def judged(folder: Path, pairs: list[tuple[str, str]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [float(model(**tokenizer(*pair, return_tensors="pt")).logits[0, 0].sigmoid()) for pair in pairs]


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_the_cross_encoder(full: Live, cross: Path, path: str) -> None:
    expected = judged(cross, [("word1 word2", text) for text in WORDS])
    order = sorted(range(3), key=lambda i: -expected[i])
    answer = full.ok(path, model=str(cross), query="word1 word2", documents=[WORDS[0], {"text": WORDS[1]}, WORDS[2]])
    assert [one["index"] for one in answer["results"]] == order
    assert [one["relevance_score"] for one in answer["results"]] == pytest.approx(
        [expected[i] for i in order], abs=1e-5
    )
    assert [one["document"]["text"] for one in answer["results"]] == [WORDS[i] for i in order]
    assert answer["model"] == str(cross)
    assert answer["usage"]["total_tokens"] == sum(2 + len(text.split()) + 3 for text in WORDS)
    few = full.ok(path, query="word1 word2", documents=WORDS, top_n=1, return_documents=False)
    assert [one["index"] for one in few["results"]] == order[:1]
    assert "document" not in few["results"][0]


def test_pairs_are_scored(full: Live, cross: Path) -> None:
    expected = judged(cross, [(WORDS[0], text) for text in WORDS])
    for path, body in (
        ("/v1/score", {"text_1": WORDS[0], "text_2": WORDS}),
        ("/score", {"queries": [WORDS[0]], "documents": WORDS}),
        ("/score", {"text_1": [WORDS[0]] * 3, "text_2": WORDS}),
    ):
        answer = full.ok(path, **body)
        assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=TOLERANCE)
        assert [one["index"] for one in answer["data"]] == [0, 1, 2]
    assert expected[0] != pytest.approx(expected[1], abs=100 * TOLERANCE)
    for body, param in (
        ({"text_1": "x"}, "text_2"),
        ({"text_1": "x", "queries": "y", "text_2": "z"}, "text_1"),
        ({"text_1": ["x", "y"], "text_2": ["z"]}, "text_1"),
        ({"text_1": "x", "text_2": []}, "text_2"),
    ):
        assert full.error("/score", **body)["param"] == param, body
    assert full.error("/rerank", query="x", documents=[])["param"] == "documents"
    assert full.error("/rerank", query="x", documents=["y"], max_tokens_per_doc=5)["param"] == "max_tokens_per_doc"
    assert full.error("/rerank", 404, query="x", documents=["y"], model="bundled")["code"] == "model_not_found"


def test_half_a_character_is_rejected_with_the_field_that_has_it(full: Live) -> None:
    half, kind = "a\ud800", {"Content-Type": "application/json"}
    for path, body, param in (
        (PATH, {"input": ["x", half]}, "input"),
        ("/rerank", {"query": half, "documents": ["x"]}, "query"),
        ("/rerank", {"query": "x", "documents": ["x", half]}, "documents"),
        ("/score", {"text_1": half, "text_2": "x"}, "text_1"),
        ("/score", {"text_1": "x", "text_2": half}, "text_2"),
        ("/score", {"queries": ["x", half], "documents": ["x", "y"]}, "queries"),
    ):
        answer = full.http.post(path, content=json.dumps(body), headers=kind)
        assert answer.status_code == 400, (body, answer.text)
        assert answer.json()["error"]["param"] == param, body
        assert "lone surrogate at character 1" in answer.json()["error"]["message"]


def test_a_long_query_beside_many_documents_is_counted_with_each(full: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncoderThread, "tokens", lambda *_, **__: pytest.fail("a tokenizer was asked"))
    query = "word1 " * 5000
    error = full.error("/rerank", query=query, documents=["x"] * 600)
    assert "16777216 characters together, got 18000600" in error["message"]
    assert error["param"] == "documents"


def test_without_a_cross_encoder_cosines_rank(cosines: Live, encoder: Path) -> None:
    found = first_states(encoder, [*WORDS[:1], *WORDS])
    expected = torch.nn.functional.cosine_similarity(found[:1], found[1:]).tolist()
    answer = cosines.ok("/score", text_1=WORDS[0], text_2=WORDS)
    assert [one["score"] for one in answer["data"]] == pytest.approx(expected, abs=TOLERANCE)
    ranked = cosines.ok("/rerank", query=WORDS[0], documents=WORDS)["results"]
    assert ranked[0]["index"] == 0
    assert ranked[0]["relevance_score"] == pytest.approx(1.0, abs=TOLERANCE)


def test_without_any_model_for_it_the_flags_are_named(live: Live) -> None:
    for path, body in (("/rerank", {"query": "x", "documents": ["y"]}), ("/score", {"text_1": "x", "text_2": "y"})):
        error = live.error(path, 404, **body)
        assert "--rerank-model" in error["message"]
        assert error["code"] == "no_rerank_model"


def test_encoding_does_not_hold_up_decoding(full: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, pooled = threading.Event(), threading.Event(), PoolingSpec.pooled

    def held(*arguments: Any) -> torch.Tensor:
        begun.set()
        assert goes_on.wait(30)
        return pooled(*arguments)

    monkeypatch.setattr(PoolingSpec, "pooled", held)
    with httpx.Client(base_url=full.url, timeout=60) as http:
        thread = threading.Thread(target=http.post, args=(PATH,), kwargs={"json": {"input": "word1"}})
        thread.start()
        assert begun.wait(30)
        full.ok("/v1/completions", prompt="x", max_tokens=4)  # decoded, and answered, meanwhile
        assert thread.is_alive()
        goes_on.set()
        thread.join(30)
