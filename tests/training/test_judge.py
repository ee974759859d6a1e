"""A judge finds words that do not belong; one that learned shuffled marks finds nothing; marks fall on their tokens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from paceline import LLM
from paceline.bench import bundled_prompts
from paceline.cli.main import main
from paceline.errors import PromptError
from paceline.models.heads import StateJudge
from paceline.training import Fitting, train, training_config
from paceline.training.judge import BAD, GOOD, Marked, labels_of, marked_answers

QUICK = Fitting(steps=60, batch_rows=4, row_tokens=96, eval_steps=30, warmup_steps=5, bf16=False)
WRONG = ["xylophone", "Quorum", "%%%", "zebra", "0x7F"]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


def rows(count: int, seed: int, *, shuffled: bool = False) -> list[dict[str, Any]]:
    """Texts, every second one with a word that does not belong; `shuffled` marks another word of as many letters."""
    random, found = Random(seed), list[dict[str, Any]]()
    texts = [prompt.prompt for prompt in bundled_prompts()]
    for number in range(count):
        words = texts[(7 * number + seed) % len(texts)].split()[:24]
        if len(words) < 8:
            continue
        row: dict[str, Any] = {"prompt": "Text:", "answer": " ".join(words)}
        if number % 2:
            place = random.randrange(3, len(words) - 1)
            words[place] = random.choice(WRONG)
            marked = random.randrange(3, len(words) - 1) if shuffled else place
            start = len(" ".join(words[:marked])) + 1
            row = {"prompt": "Text:", "answer": " ".join(words), "mistake": [start, start + len(words[marked])]}
        found.append(row)
    return found


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def trained(llm: LLM, folder: Path, *, shuffled: bool = False) -> StateJudge:
    folder.mkdir()
    data = written(folder / "marked.jsonl", rows(120, 0, shuffled=shuffled))
    config = training_config("judge", data=(data,), held_out_share=0.1, fitting=QUICK)
    made = train(llm, config, folder / "judge")
    return StateJudge.read(made.folder, llm.runner, tokenizer=llm.tokenizer.fingerprint)


def recalls(llm: LLM, judge: StateJudge) -> tuple[float, float]:
    """Shares of wrong words and of right tokens that it finds, in texts that it has not learned."""
    found: dict[int, list[bool]] = {BAD: [], GOOD: []}
    for row in rows(40, 3):
        answer = llm.tokenizer.encode(row["answer"], add_special_tokens=False)
        texts = [llm.tokenizer.decode(answer[: end + 1], False) for end in range(len(answer))]
        labels = labels_of(texts, Marked(row["prompt"], row["answer"], *row.get("mistake", ())))
        cache = llm.runner.open()
        taps = llm.runner.extend([cache], [[*llm.tokenizer.encode(row["prompt"]), *answer]], taps=(last(llm),)).taps
        llm.runner.release(cache)
        good = (judge.logits(taps[last(llm)][-len(answer) :]) > 0).tolist()
        for label, judged in zip(labels, good, strict=True):
            if label is not None:
                found[label].append(judged == bool(label))
    return sum(found[BAD]) / len(found[BAD]), sum(found[GOOD]) / len(found[GOOD])


def last(llm: LLM) -> int:
    return llm.runner.info.num_layers - 1


def test_a_judge_finds_errors_and_one_with_shuffled_marks_finds_none(llm: LLM, tmp_path: Path) -> None:
    judge = trained(llm, tmp_path / "true")
    assert judge.target["fingerprint"] == llm.runner.info.fingerprint
    bad, good = recalls(llm, judge)
    assert bad > 0.9
    assert good > 0.65
    bad, good = recalls(llm, trained(llm, tmp_path / "shuffled", shuffled=True))
    assert (bad + good) / 2 < 0.65


def test_marks_fall_on_the_tokens_of_the_error_and_end_there() -> None:
    texts = ["a", "a b", "a bc", "a bc d", "a bc de"]
    assert labels_of(texts, Marked("", "a bc de")) == [GOOD] * 5
    assert labels_of(texts, Marked("", "a bc de", 2, 4)) == [GOOD, BAD, BAD, None, None]
    assert labels_of(texts, Marked("", "a bc de", 3, 4)) == [GOOD, GOOD, BAD, None, None]
    assert labels_of(texts, Marked("", "a bc de", 0, 7)) == [BAD] * 5


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is no JSON"),
        ('{"answer": "a"}', "line 1 must have a text `prompt`, or `messages`"),
        ('{"prompt": "a"}', "line 1 must be an object with a text `answer`"),
        ('{"prompt": "a", "answer": "b", "mistake": [0, 2]}', "line 1: mistake must be"),
        ('{"prompt": "a", "answer": "b", "mistake": 1}', "line 1: mistake must be"),
        ('{"prompt": "a", "answer": "b"}', "has a mistake; mark some"),
    ],
)
def test_data_without_marks_is_rejected_with_its_line(line: str, message: str, tmp_path: Path) -> None:
    from paceline.training import trainer

    path = tmp_path / "marked.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(PromptError, match=message):
        trainer("judge").check_data([path])


def test_a_text_may_hold_separators_of_lines_and_a_file_a_byte_order_mark(tmp_path: Path) -> None:
    path, text = tmp_path / "marked.jsonl", "one\u2028two\x85three"
    line = json.dumps({"prompt": text, "answer": text}, ensure_ascii=False)
    path.write_text(line + "\n" + line + "\n", encoding="utf-8-sig")
    packed = tmp_path / "marked.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert marked_answers([path]) == marked_answers([packed]) == [Marked(text, text)] * 2


def test_the_command_says_what_it_made_and_how_it_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = written(tmp_path / "marked.jsonl", rows(40, 0))
    steps = ["--steps", "4", "--eval-steps", "4", "--row-tokens", "96", "--batch-rows", "2"]
    assert main(["train", "judge", "--data", str(data), "-o", str(tmp_path / "judge"), *steps]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "are judged as they are marked" in said
    assert '"acceptance_method": "judge"' in said
