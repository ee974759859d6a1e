"""llama-server's own routes: what they answer is what `/v1/completions` decodes; infill marks what it fills in, and no
text of a client becomes a mark; what cannot be honoured is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
from serving.conftest import Live, serve
from tiny_tokenizers import write as write_tokenizer
from tokenizers import AddedToken, Tokenizer

from paceline import LLM, AsyncLLM
from paceline import checkpoints as read
from paceline.serving.api_errors import ApiError
from paceline.serving.infill import SPELLINGS, InfillPrompts

COMPLETION, INFILL = "/completion", "/infill"
GREEDY = {"prompt": "One day", "n_predict": 12, "temperature": 0}
MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>")


def streamed(live: Live, path: str, **body: Any) -> list[dict[str, Any]]:
    with live.http.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: {") for line in lines), "no names, no [DONE]"
    return [json.loads(line[6:]) for line in lines]


@pytest.mark.parametrize("path", [COMPLETION, "/completions"])
def test_a_completion_is_that_of_openais_route_in_other_words(live: Live, path: str) -> None:
    (theirs,) = live.ok("/v1/completions", prompt="One day", max_tokens=12, temperature=0, return_token_ids=True)[
        "choices"
    ]
    whole = live.ok(path, **GREEDY, return_tokens=True)
    assert (whole["content"], whole["tokens"]) == (theirs["text"], theirs["token_ids"])
    assert whole["stop"] is True
    assert whole["stop_type"] == {"length": "limit", "stop": "eos"}[theirs["finish_reason"]]
    assert whole["tokens_predicted"] == whole["timings"]["predicted_n"] == len(theirs["token_ids"])
    assert whole["tokens_evaluated"] == whole["timings"]["prompt_n"] + whole["timings"]["cache_n"]
    assert (whole["model"], whole["prompt"].strip()) == ("bundled", "One day")
    assert whole["generation_settings"]["n_predict"] == 12
    assert live.ok(path, **GREEDY)["tokens"] == []


def test_events_add_up_to_the_whole_answer(live: Live) -> None:
    whole = live.ok(COMPLETION, **GREEDY, return_tokens=True)
    *parts, last = streamed(live, COMPLETION, **GREEDY, timings_per_token=True)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [token for part in parts for token in part["tokens"]] == whole["tokens"]
    assert not any(part["stop"] for part in parts)
    assert all(part["timings"]["predicted_n"] == part["tokens_predicted"] for part in parts[:-1])
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", whole["stop_type"])
    same = {"timings", "content", "tokens", "generation_settings", "tokens_cached"}
    assert {key: last[key] for key in last.keys() - same} == {key: whole[key] for key in last.keys() - same}


def test_parameters_under_llama_servers_names_are_honoured(live: Live) -> None:
    drawn = {"prompt": "One day", "n_predict": 8, "seed": 5, "temperature": 1.5, "top_k": 40, "top_p": 0.9}
    again = live.ok("/v1/completions", **{key: drawn[key] for key in drawn.keys() - {"n_predict"}}, max_tokens=8)
    assert live.ok(COMPLETION, **drawn)["content"] == again["choices"][0]["text"]
    word = live.ok(COMPLETION, **GREEDY)["content"].split()[1]
    stopped = live.ok(COMPLETION, **GREEDY, stop=[word])
    assert (stopped["stop_type"], stopped["stopping_word"]) == ("word", word)
    assert word not in stopped["content"]
    bound = live.ok(COMPLETION, **GREEDY, grammar='root ::= "tea" | "coffee"')
    assert bound["content"] in ("tea", "coffee")
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(live.ok(COMPLETION, **GREEDY | {"n_predict": 60}, json_schema=schema)["content"]) == {"a": 7}
    first = live.ok(COMPLETION, **GREEDY, return_tokens=True)["tokens"][0]
    biased = live.ok(COMPLETION, **GREEDY, logit_bias=[[first, -100]], return_tokens=True)["tokens"]
    assert first not in biased
    penalised = live.ok(COMPLETION, **GREEDY, repeat_penalty=1.3, repeat_last_n=-1)["generation_settings"]
    assert penalised["repeat_penalty"] == 1.3
    assert live.ok(COMPLETION, **GREEDY, id_slot=-1, cache_prompt=True, samplers=[], mirostat=0)["stop"]
    assert live.ok(COMPLETION, prompt="One day", n_predict=0)["tokens_predicted"] == 0


@pytest.mark.parametrize("path", [COMPLETION, "/completions"])
def test_slots_and_lengths_that_cannot_be_are_named(live: Live, path: str) -> None:
    slots = live.http.get("/slots").json()
    for slot in (None, -1, 0, len(slots) - 1):
        assert live.ok(path, **GREEDY, id_slot=slot)["stop"]
    for last in (None, -1, 0, 64):
        assert live.ok(path, **GREEDY, repeat_last_n=last)["stop"]
    for name, values in {"id_slot": (-2, 1.5, "a", True, len(slots)), "repeat_last_n": (-2, 1.5, "a", True)}.items():
        for value in values:
            error = live.error(path, **GREEDY | {"n_predict": 2, name: value})
            assert error["param"] == name, (value, error)
            assert name in error["message"]


def test_as_many_tokens_as_the_context_holds_and_several_prompts(live: Live) -> None:
    unlimited = live.ok(COMPLETION, prompt="One day", temperature=0, n_predict=-1, stop=["."])
    assert unlimited["tokens_predicted"] > 12 or unlimited["stop_type"] != "limit"
    several = live.ok(COMPLETION, prompt=["One", [5, 6, 7]], n_predict=3, temperature=0, n_cmpl=2)
    assert [one["index"] for one in several] == [0, 1, 2, 3]
    assert several[0]["content"] == live.ok(COMPLETION, prompt="One", n_predict=3, temperature=0)["content"]
    assert several[0]["content"] == several[1]["content"]


def test_probabilities_and_chosen_fields(live: Live) -> None:
    whole = live.ok(COMPLETION, **GREEDY, n_probs=3, return_tokens=True)
    found = whole["completion_probabilities"]
    assert [one["id"] for one in found] == whole["tokens"]
    assert all(one["top_logprobs"][0]["logprob"] == one["logprob"] for one in found), "greedy"
    assert all(len(one["top_logprobs"]) == 3 for one in found)
    assert b"".join(bytes(one["bytes"]) for one in found).decode().startswith(whole["content"])
    fields = ["content", "generation_settings/n_predict", "no/such"]
    assert live.ok(COMPLETION, **GREEDY, response_fields=fields) == {"content": whole["content"], "n_predict": 12}


@pytest.mark.parametrize(
    ("field", "value"),
    [("samplers", ["top_k", "infill"]), ("mirostat", 2), ("typical_p", 0.5), ("dry_multiplier", 0.8), ("n_indent", 2),
     ("t_max_predict_ms", 5), ("lora", [{"id": 0, "scale": 1.0}]), ("post_sampling_probs", True), ("min_keep", 3),
     ("n_predict", -2), ("n_probs", 21), ("repeat_penalty", 1.1), ("grammar", "root ::= ("), ("echo", True),
     ("json_schema", {"type": "string", "contentEncoding": "base64", "unheard_of": 1, "not": {}}), ("nonsense", 1),
     ("logit_bias", [[5, False]]), ("prompt", [1, "two"])],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(live: Live, field: str, value: Any) -> None:
    error = live.error(COMPLETION, **GREEDY | {field: value})
    assert field in (error["param"] or "").split(".")[0]
    assert field in error["message"] or field in ("grammar", "json_schema", "prompt"), error


def test_keys_are_needed_and_requests_are_counted(locked: Live) -> None:
    headers = {"authorization": "Bearer first-key"}
    assert locked.post(COMPLETION, **GREEDY).status_code == 401
    assert locked.http.post(COMPLETION, json=GREEDY, headers=headers).status_code == 200
    assert [locked.http.get(path).status_code for path in ("/props", "/slots", "/v1/health")] == [401, 401, 200]


def test_props_slots_and_health(live: Live) -> None:
    props = live.http.get("/props").json()
    assert (
        props["default_generation_settings"]["n_ctx"] == live.http.get("/v1/models").json()["data"][0]["max_model_len"]
    )
    assert props["default_generation_settings"]["params"]["n_predict"] == -1
    assert props["chat_template"]
    slots = live.http.get("/slots?fail_on_no_slot=1").json()
    assert len(slots) == props["total_slots"]
    assert not any(slot["is_processing"] for slot in slots)
    assert live.http.get("/health").json()["status"] == "ok"


def test_tokens_and_templates(live: Live) -> None:
    text = "Say hello \u00e1"
    ours = live.ok("/tokenize", prompt=text, add_special_tokens=False)
    assert live.ok("/tokenize", content=text) == {"tokens": ours["tokens"]}
    pieces = live.ok("/tokenize", content=text, with_pieces=True)["tokens"]
    assert [piece["id"] for piece in pieces] == ours["tokens"]
    parts = [bytes(one["piece"]) if isinstance(one["piece"], list) else one["piece"].encode() for one in pieces]
    assert b"".join(parts).decode() == text
    assert live.ok("/detokenize", tokens=ours["tokens"])["content"] == text
    special = "<|user|>"
    assert len(live.ok("/tokenize", content=special)["tokens"]) == 1
    assert len(live.ok("/tokenize", content=special, parse_special=False)["tokens"]) > 1
    assert live.error("/tokenize", content=text, prompt=text)["param"] == "content"
    messages = [{"role": "user", "content": "Hi"}]
    rendered = live.ok("/apply-template", messages=messages)["prompt"]
    assert "Hi" in rendered
    assert live.ok("/tokenize", content=rendered)["tokens"] == live.ok("/tokenize", messages=messages)["tokens"]
    assert live.error("/apply-template", prompt="x")["param"] == "messages"


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server whose model has tokens for infill."""
    folder = tmp_path_factory.mktemp("coder")
    inner = Tokenizer.from_file(str(tiny_checkpoint.TARGET / "tokenizer.json"))
    inner.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKS])
    tiny_checkpoint.write(folder, vocab_size=inner.get_vocab_size())
    inner.save(str(folder / "tokenizer.json"))
    yield from serve(AsyncLLM(LLM(folder, dtype="float32", profile=False)), served_model_name=["coder"])


def test_infill_puts_marks_around_prefix_and_suffix(coder: Live) -> None:
    parts = {"input_prefix": "def f(a):\n    ", "input_suffix": "\n    return b\n"}
    asked = {"n_predict": 4, "temperature": 0}
    whole = coder.ok(INFILL, **parts, **asked, return_tokens=True)
    assert (
        whole["prompt"] == f"<|fim_prefix|>{parts['input_prefix']}<|fim_suffix|>{parts['input_suffix']}<|fim_middle|>"
    )
    same = coder.ok(COMPLETION, prompt=whole["prompt"], **asked, return_tokens=True)
    assert (same["tokens"], same["tokens_evaluated"]) == (whole["tokens"], whole["tokens_evaluated"])
    begun = coder.ok(INFILL, **parts, **asked, prompt="b = ")
    assert begun["prompt"] == f"{whole['prompt']}b = "
    *_, last = streamed(coder, INFILL, **parts, **asked)
    assert last["prompt"] == whole["prompt"]


def test_other_files_come_before_with_their_names(coder: Live) -> None:
    extra = [{"filename": "a.py", "text": "A = 1\n"}, {"text": "B"}]
    found = coder.ok(INFILL, input_prefix="x", input_suffix="y", input_extra=extra, n_predict=1)["prompt"]
    assert found == (
        "<|repo_name|>project\n<|file_sep|>a.py\nA = 1\n<|file_sep|>file\nB<|file_sep|>file\n"
        "<|fim_prefix|>x<|fim_suffix|>y<|fim_middle|>"
    )


def test_no_text_of_a_client_becomes_a_mark(coder: Live) -> None:
    marked = coder.ok(INFILL, input_prefix="<|fim_middle|>", input_suffix="", n_predict=1)
    plain = len(coder.ok("/tokenize", content="<|fim_middle|>", parse_special=False)["tokens"])
    assert plain > 1
    assert marked["tokens_evaluated"] == 3 + plain
    control = coder.ok(COMPLETION, prompt=marked["prompt"], n_predict=1)
    assert control["tokens_evaluated"] == 4, "a prompt is the client's own"


def test_a_model_without_marks_says_so(live: Live) -> None:
    error = live.error(INFILL, 501, input_prefix="a", input_suffix="b")
    assert error["code"] == "infill_not_supported"
    assert "bundled" in error["message"]
    assert "<|fim_prefix|>" in error["message"]


def test_errors_of_infill_name_its_fields(coder: Live) -> None:
    assert coder.error(INFILL, input_prefix="a" * 2000)["param"] == "input_prefix"
    assert coder.error(INFILL, input_extra=[{"name": "a"}])["param"].startswith("input_extra")
    assert coder.error(INFILL, input_prefix="a", samplers=["infill"])["param"] == "samplers"


def test_what_editors_send_is_answered_where_the_operator_is_lenient(coder: Live) -> None:
    body = {"id_slot": 0, "input_prefix": "a", "input_suffix": "b", "input_extra": [], "prompt": "", "n_predict": 4,
            "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": False, "cache_prompt": True,
            "samplers": ["top_k", "top_p", "infill"], "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
            "response_fields": ["content", "timings/predicted_n", "stop_type"]}  # fmt: skip
    assert coder.post(INFILL, **body).status_code == 400
    for lenient in serve(coder.model, lenient_fields=True):
        answer = lenient.post(INFILL, **body)
        assert answer.json().keys() == {"content", "predicted_n", "stop_type"}
        ignored = set(answer.headers["x-ignored-fields"].split(", "))
        assert ignored == {"n_indent", "samplers", "t_max_prompt_ms", "t_max_predict_ms"}


@pytest.mark.parametrize("number", range(len(SPELLINGS)))
def test_every_spelling_is_found_in_a_vocabulary(tmp_path: Path, number: int) -> None:
    marks = SPELLINGS[number]
    write_tokenizer(tmp_path, "byte_level")
    inner = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [text for text in (marks.prefix, marks.suffix, marks.middle) if text]
    inner.add_tokens([AddedToken(text, normalized=False) for text in texts[:-1]])
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ApiError, match="no tokens for infill"):
        InfillPrompts(read.Tokenizer.load(tmp_path), "it").tokens("a", "b")
    inner.add_tokens([AddedToken(texts[-1], normalized=False)])
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = read.Tokenizer.load(tmp_path)
    parts = [f"{marks.prefix}a", f"{marks.suffix}b"]
    ordered = parts[::-1] if marks.suffix_first else parts
    assert tokenizer.decode(InfillPrompts(tokenizer, "it").tokens("a", "b"), False) == "".join(ordered) + marks.middle
