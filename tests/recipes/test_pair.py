"""The recipe of the bundled pair, every stage for a few steps on a tiny corpus made here."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import urllib.error
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipes.bundled_pair import corpus as corpus_module
from recipes.bundled_pair import distill, evaluate, lessons, prepare, train, write
from recipes.bundled_pair import sources as sources_module


def tiny_texts(chat: Any) -> dict[str, list[str]]:
    maths = [
        chat(f"Ada has {i} pears and buys {j}. How many now?", f"{i} + {j} = {i + j}\n#### {i + j}")
        for i in range(20)
        for j in range(8)
    ]
    code = [
        f'def add_{i}(left, right):\n    """Add two numbers."""\n    return left + right + {i}\n\n\n' * 8
        for i in range(8)
    ]
    return {"math": maths, "code": code}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with corpus, target, written texts and draft, each stage run through its own command line."""
    build = tmp_path_factory.mktemp("build")
    corpus, target, draft = build / "corpus", build / "target", build / "draft"
    prepare.prepare(tiny_texts(corpus_module.chat), corpus, vocab_size=320)
    small = ["--batch", "4", "--length", "32", "--device", "cpu"]
    shape = ["--width", "64", "--layers", "2", "--heads", "1", "--kv-heads", "1", "--mlp", "64"]
    train.main(
        ["--corpus", str(corpus), "--out", str(target), *shape, *small, "--tokens", "5120", "--measure-every", "10"]
    )
    written = [
        "--out",
        str(build / "written.jsonl"),
        "--prompts",
        "24",
        "--new-tokens",
        "24",
        "--batch",
        "6",
        "--device",
        "cpu",
    ]
    write.main(["--corpus", str(corpus), "--target", str(target), *written])
    sources = ["--corpus", str(corpus), "--target", str(target), "--written", str(build / "written.jsonl")]
    options = [
        "--labels",
        str(build / "labels.safetensors"),
        "--width",
        "32",
        "--heads",
        "1",
        "--mlp",
        "32",
        "--tokens",
        "2560",
    ]
    distill.main([*sources, "--out", str(draft), *options, *small])
    return build


def test_heldout_texts_are_kept_out_of_training(pair: Path) -> None:
    documents = corpus_module.read_documents(pair / "corpus")
    heldout = {d.text for d in documents if d.heldout}
    assert len(heldout) == 3
    tokenizer = corpus_module.load_tokenizer(pair / "corpus")
    stream = train.training_stream(documents, tokenizer, seed=0)
    trained_on = set(tokenizer.decode(stream.tolist()).split("<|endoftext|>"))
    assert not heldout & trained_on
    assert {d.text for d in documents if not d.heldout} <= trained_on


def test_the_draft_is_an_ordinary_one_layer_llama_with_the_targets_tokenizer(pair: Path) -> None:
    config = json.loads((pair / "draft" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_hidden_layers"] == 1
    assert (pair / "draft" / "tokenizer.json").read_bytes() == (pair / "target" / "tokenizer.json").read_bytes()
    assert json.loads((pair / "draft" / "generation_config.json").read_text())["eos_token_id"] == [3, 0]
    tokenizer = corpus_module.load_tokenizer(pair / "draft")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert text == corpus_module.chat("Hi") == "<|user|>\nHi\n<|assistant|>\n"


def test_the_written_texts_continue_training_prompts_and_end_once(pair: Path) -> None:
    rows = [json.loads(line) for line in (pair / "written.jsonl").read_text().splitlines()]
    assert {row["temperature"] for row in rows} == {0.0, 0.4, 0.7}
    heldout = {corpus_module.prompt_of(d.text) for d in corpus_module.read_documents(pair / "corpus") if d.heldout}
    tokenizer = corpus_module.load_tokenizer(pair / "target")
    assert not heldout & {tokenizer.decode(row["prompt"]) for row in rows}
    assert all(not {0, 3} & set(row["ids"][:-1]) for row in rows)


def test_evaluation_reports_loss_and_falling_agreement(pair: Path) -> None:
    out = pair / "report.json"
    models = ["--target", str(pair / "target"), "--draft", str(pair / "draft"), "--corpus", str(pair / "corpus")]
    evaluate.main([*models, "--new-tokens", "16", "--device", "cpu", "--json", str(out)])
    row = json.loads(out.read_text())["math"]
    assert 0 < row["target_loss"] < math.log(6144), "no better than a uniform guess"
    depths = [row["agreement"][str(k)] for k in (1, 2, 3, 4)]
    assert depths == sorted(depths, reverse=True)


def test_agreement_counts_runs_of_matches() -> None:
    match = torch.tensor([True, True, False, True, True, True, True, False])
    depths = evaluate.agreement([match])
    assert depths == pytest.approx({1: 6 / 8, 2: 4 / 7, 3: 2 / 6, 4: 1 / 5})
    assert evaluate.agreement([~match]) != pytest.approx(depths)


def test_a_model_agrees_with_itself_and_not_with_another(pair: Path) -> None:
    target = corpus_module.load_model(pair / "target", dtype=torch.float32)
    prompt = corpus_module.encode(
        corpus_module.load_tokenizer(pair / "target"), [corpus_module.chat("Ada has 3 pears")]
    )[0]
    ((_, answer),) = evaluate.target_answers(target, [prompt], 24)
    assert evaluate.matches(target, prompt, answer).all()
    wrong = [(token + 1) % 320 for token in answer]
    assert not evaluate.matches(target, prompt, wrong).all()


def test_the_start_is_already_close_to_the_target(pair: Path) -> None:
    """Before any step, the draft's logits are nearer to the target's likeliest tokens than a random draft's are."""
    target = corpus_module.load_model(pair / "target", dtype=torch.float32)
    school = lessons.load_school(pair / "labels.safetensors")
    config = corpus_module.llama_config(width=32, layers=1, heads=1, kv_heads=1, mlp=32, tied=False)
    lesson = next(lessons.mixed_batches(school.written, school.corpus, batch=4, length=32, written_share=0.5, seed=0))
    losses = []
    for started in (True, False):
        torch.manual_seed(0)
        draft = distill.LlamaForCausalLM(config)
        if started:
            distill.start_from(target, draft, school.reached)
        losses.append(distill.loss_and_agreement(draft, lesson, 0.5)[0].item())
    assert losses[0] < losses[1]


def test_the_loss_is_least_where_the_draft_equals_the_target() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    log_p, best = logits.log_softmax(-1).topk(16)
    exact = distill.distillation_loss(logits, best, log_p, 0.0)
    assert exact.item() == pytest.approx(0.0, abs=1e-5)
    assert distill.distillation_loss(logits * 0.5, best, log_p, 0.0) > exact + 0.01


def test_gutenbergs_header_and_licence_are_stripped() -> None:
    marks = "*** START OF THIS EBOOK ***", "*** END OF THIS EBOOK ***"
    book = "\r\n".join(
        ["Header, licence", marks[0], "", "Produced by N. N.", "", "The text.", marks[1], "More licence", ""]
    )
    assert sources_module.gutenberg(book) == ["The text."]
    with pytest.raises(SystemExit, match="START OF"):
        sources_module.gutenberg("The text without marks.")


def test_files_are_checked_against_their_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"a": 1}\n'
    source = replace(sources_module.SOURCES["math"], sha256=hashlib.sha256(content).hexdigest())
    fetched: list[str] = []
    monkeypatch.setattr(sources_module, "fetch", lambda url: fetched.append(url) or content)
    assert sources_module.read_source(source, None, tmp_path) == content.decode()
    assert sources_module.read_source(source, None, tmp_path) == content.decode()
    assert fetched == [source.url], "the second read comes from the cache"
    local = tmp_path / "data"
    path = local / source.local
    path.parent.mkdir(parents=True)
    path.with_name(path.name + ".gz").write_bytes(gzip.compress(content))
    assert sources_module.read_source(source, local, tmp_path) == content.decode()
    with pytest.raises(SystemExit, match="SHA-256"):
        sources_module.read_source(replace(source, sha256="0" * 64), None, tmp_path)
    with pytest.raises(SystemExit, match="is missing"):
        sources_module.read_source(sources_module.SOURCES["mbpp"], local, tmp_path)


def test_a_failed_download_names_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(sources_module.urllib.request, "urlopen", refuse)
    with pytest.raises(SystemExit, match=r"cannot fetch https://example\.org/x: .*no route"):
        sources_module.fetch("https://example.org/x")


def test_a_missing_corpus_and_a_missing_model_are_one_line_each(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"run recipes\.bundled_pair\.prepare"):
        corpus_module.read_documents(tmp_path)
    with pytest.raises(SystemExit, match=r"run recipes\.bundled_pair\.train"):
        corpus_module.load_model(tmp_path)


def test_bad_options_stop_a_stage_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        prepare.main(["--no-such-option"])
    assert stopped.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err
