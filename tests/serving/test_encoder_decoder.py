"""`/v1/completions` on an encoder-decoder model for texts: the prompt is what its encoder reads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_encoder_decoder
from serving.conftest import Live, serve

from paceline import LLM, AsyncLLM, PromptError, SamplingParams
from paceline.llm import BUNDLED
from paceline.serving import warm_up

VOCABULARY = json.loads((BUNDLED / "target" / "config.json").read_text())["vocab_size"]
PATH = "/v1/completions"
SOURCES = ["Once upon a time", "In the morning the cat went out"]


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder: Path = tmp_path_factory.mktemp("t5")
    tiny_encoder_decoder.make("t5", folder, vocab_size=VOCABULARY, eos_token_id=1)
    for file in (BUNDLED / "target").glob("tokenizer*"):
        shutil.copy(file, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return LLM(folder, dtype="float32", speculative_config={"method": "prediction"})


@pytest.fixture(scope="module")
def translating(translator: LLM) -> Iterator[Live]:
    yield from serve(AsyncLLM(translator))


def texts(translator: LLM, sources: list[str]) -> list[str]:
    params = SamplingParams(temperature=0, max_tokens=8)
    found = translator.generate([{"encoder_prompt": source} for source in sources], params)
    return [one.outputs[0].text for one in found]


GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0}


def test_prompts_are_sources(translating: Live, translator: LLM) -> None:
    want = texts(translator, SOURCES)
    assert want[0] != want[1]
    answer = translating.ok(PATH, prompt=SOURCES, **GREEDY)
    assert [choice["text"] for choice in answer["choices"]] == want
    ids = [translator.tokenizer.encode(source) for source in SOURCES]
    by_ids = translating.ok(PATH, prompt=ids, **GREEDY)
    assert [choice["text"] for choice in by_ids["choices"]] == want
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids)) + 2, "sources, and what each text begins with"
    lines = translating.post(PATH, prompt=SOURCES[0], stream=True, **GREEDY).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == want[0]


def test_llama_servers_counts_have_the_source(translating: Live, translator: LLM) -> None:
    want = len(translator.tokenizer.encode(SOURCES[0])) + 1
    assert translating.ok(PATH, prompt=SOURCES[0], **GREEDY)["usage"]["prompt_tokens"] == want
    whole = translating.ok("/completion", prompt=SOURCES[0], n_predict=4)
    assert (whole["tokens_evaluated"], whole["timings"]["prompt_n"]) == (want, want)
    lines = translating.post("/completion", prompt=SOURCES[0], n_predict=4, stream=True).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert {event["tokens_evaluated"] for event in events} == {want}


def test_predictions_are_drafted_from(translating: Live, translator: LLM) -> None:
    (want,) = texts(translator, SOURCES[:1])
    answer = translating.ok(PATH, prompt=SOURCES[0], prediction=want, **GREEDY)
    assert answer["choices"][0]["text"] == want
    assert answer["usage"]["speculative"]["drafters"]["prediction"]["num_draft_tokens"] > 0
    assert not translating.ok(PATH, prompt=SOURCES[0], **GREEDY)["usage"]["speculative"]["drafters"], "the control"


def test_what_does_not_suit_is_named(translating: Live) -> None:
    for name, value, nothing in (
        ("echo", True, False), ("truncate_prompt_tokens", 1, None), ("prompt_logprobs", 0, None)
    ):  # fmt: skip
        error = translating.error(PATH, prompt="x", **{name: value})
        wanted = f"{name} cannot be used with an encoder-decoder model; leave it out"
        assert (error["param"], error["message"]) == (name, wanted)
        translating.ok(PATH, prompt="x", **GREEDY, **{name: nothing})
    for body in ({"prompt": "", "add_special_tokens": False}, {"prompt": "x", "encoder_prompt": "y"}):
        error = translating.error(PATH, **body)
        assert error["param"] == ("encoder_prompt" if "encoder_prompt" in body else "prompt")
        assert "give a prompt, which is the source" in error["message"]
    outside = translating.error(PATH, prompt=[VOCABULARY])
    assert (outside["param"], "token ids of a prompt must lie in" in outside["message"]) == ("prompt", True)
    messages = [{"role": "user", "content": "Hi"}]
    error = translating.error("/v1/chat/completions", messages=messages)
    assert error["param"] == "messages"
    assert "bundled " in error["message"]
    assert "/v1/completions takes the source" in error["message"]


@pytest.mark.parametrize("made", ["bart", "moonshine"])
def test_what_an_encoder_cannot_read_is_told_in_words_of_requests(made: str, tmp_path: Path) -> None:
    """With the name that the model is served under, and neither its folder nor an argument of Python."""
    tiny_encoder_decoder.make(made, tmp_path, vocab_size=VOCABULARY)
    for file in (BUNDLED / "target").glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    llm = LLM(tmp_path, dtype="float32", speculative_config=None)
    if made == "bart":
        wrong, told = (
            list(range(65)),
            "the prompt, which is the source, has 65 tokens, which become 65 rows of the encoder of bundled, ",
        )
        assert str(tmp_path) in str(raised(llm, wrong)), "the control: the library names the folder"
    else:
        wrong, told = [7], "bundled reads no text; it reads input_values, which no request of this server holds; "
    for live in serve(AsyncLLM(llm)):
        for path, more in ((PATH, {}), (PATH, {"stream": True}), ("/completion", {})):
            error = live.error(path, prompt=wrong, **more)
            assert (error["param"], error["message"].startswith(told)) == ("prompt", True)
            assert str(tmp_path) not in error["message"]
        other = live.error(PATH, 404, model=str(tmp_path), prompt="x")["message"]
        assert str(tmp_path)[:40] in other, "what a client has written is told as it is"


def raised(llm: LLM, tokens: list[int]) -> PromptError:
    with pytest.raises(PromptError) as error:
        llm.generate({"encoder_prompt": tokens})
    return error.value


def test_conversations_are_refused_whether_there_is_a_template_or_none(translator: LLM, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    messages = [{"role": "user", "content": "Hi"}]
    for live in serve(AsyncLLM(translator), chat_template=str(template)):
        message: dict[str, Any] = {"model": "bundled", "messages": messages}
        for path, body, param in (
            ("/v1/chat/completions", {"messages": messages}, "messages"),
            ("/v1/responses", {"input": "Hi"}, "input"),
            ("/v1/messages", {"max_tokens": 9, **message}, None),
            ("/v1/messages/count_tokens", message, None),
        ):
            error = live.error(path, **body)
            assert error.get("param") == param
            assert "bundled takes no conversations; /v1/completions takes the source" in error["message"]
        assert live.ok("/apply-template", messages=messages) == {"prompt": "Hi"}, "which may be a source"


def test_embeddings_need_another_model(translating: Live) -> None:
    error = translating.error("/v1/embeddings", input="One day")
    assert error["param"] == "model"
    assert error["message"] == "a model with an encoder does not embed; serve an embedding model"


def test_warming_up_reads_a_source(translator: LLM) -> None:
    before = translator.runner.sources_read
    warm_up(translator)
    assert translator.runner.sources_read > before
