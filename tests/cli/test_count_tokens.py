"""`paceline count-tokens`: of texts in files, of texts that the model writes, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from command import Command

from paceline import LLM, SamplingParams
from paceline.bench import bundled_prompts
from paceline.checkpoints import Tokenizer
from paceline.drafters.vocab import TokenCounts, counts_path
from paceline.llm import BUNDLED

TARGET = BUNDLED / "target"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where counts of the bundled model go."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return counts_path(TARGET)


def test_texts_in_files_are_counted_without_a_model(run: Command, kept: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": "Why?", "answer": f"The dog {i}"}) + "\n" for i in range(4)))
    found = run("count-tokens", rows, "--field", "answer", "--json")
    assert found.code == 0
    tokenizer = Tokenizer.load(TARGET)
    ids = [i for n in range(4) for i in tokenizer.encode(f"The dog {n}", add_special_tokens=False)]
    counts = TokenCounts.load(kept)
    assert counts.total.tolist() == np.bincount(ids, minlength=6144).tolist()
    facts = json.loads(found.out)
    assert (facts["texts"], facts["tokens"], facts["path"]) == (4, len(ids), str(kept))
    assert facts["coverage"]["1024"] == pytest.approx(counts.coverage(set())[1], abs=1e-5)
    assert run("count-tokens", rows, "--field", "question", "--add").code == 0
    both = TokenCounts.load(kept)
    assert (both.texts, both.tokens > counts.tokens) == (8, True)
    assert run("count-tokens", rows, "--field", "question").code == 0
    assert TokenCounts.load(kept).texts == 4, "without --add they are counted anew"


def test_the_model_writes_texts(run: Command, kept: Path, tmp_path: Path) -> None:
    """What is counted is what `LLM.generate` gives, and nothing of the prompts."""
    prompts, output = tmp_path / "prompts.txt", tmp_path / "counts.json"
    asked = [prompt.prompt.replace("\n", " ") for prompt in bundled_prompts()[:3]]
    prompts.write_text("\n".join(asked))
    flags = ("--prompts", prompts, "--chat", "--max-tokens", 6, "-o", output, "--dtype", "float32")
    found = run("count-tokens", *flags)
    assert found.code == 0
    assert found.out.startswith("18 tokens in 3 texts, ")
    llm = LLM(dtype="float32", speculative_config=None)
    params = SamplingParams(temperature=0.0, max_tokens=6)
    messages = [{"prompt_token_ids": llm.chat_ids([{"role": "user", "content": text}])} for text in asked]
    ids = [token for out in llm.generate(messages, params) for token in out.outputs[0].token_ids]  # type: ignore[arg-type]
    assert TokenCounts.load(output).total.tolist() == np.bincount(ids, minlength=6144).tolist()
    assert not kept.exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("SOURCE", "--prompts", "x"), "--prompts and --chat are for texts that the model is to write"),
        (("SOURCE", "--chat"), "--prompts and --chat are for texts that the model is to write"),
        (("--field", "x"), "--field chooses among the fields of SOURCE"),
        (("/no/such/file",), "no file or folder"),
        (("EMPTY",), "there is no token to count"),
        (("SOURCE", "-o", "SOURCE"), "is not a file of counts"),
        (("SOURCE", "-m", "/no/model"), "/no/model"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    run: Command, kept: Path, tmp_path: Path, arguments: tuple[str, ...], why: str
) -> None:
    source, empty = tmp_path / "text.txt", tmp_path / "empty.txt"
    source.write_text("The dog")
    empty.write_text("")
    named = {"SOURCE": str(source), "EMPTY": str(empty)}
    found = run("count-tokens", *(named.get(word, word) for word in arguments))
    assert found.code == 2
    assert why in found.line
    assert source.read_text() == "The dog"
    assert not kept.exists()


def test_what_was_damaged_is_not_added_to(run: Command, kept: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The dog")
    kept.parent.mkdir(parents=True)
    kept.write_text("{")
    found = run("count-tokens", tmp_path / "text.txt", "--add")
    assert found.code == 2
    assert "run `paceline count-tokens` again" in found.line
    assert run("count-tokens", tmp_path / "text.txt").code == 0
