"""`paceline generate` as a user calls it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import tiny_encoder_decoder
import tiny_whisper
import typer
from command import Command, Terminal

from paceline import LLM, CompletionOutput, RequestOutput, SamplingParams, StreamChunk
from paceline.cli.generate import StreamPrinter, show_all
from paceline.controllers.auto import Costs
from paceline.controllers.auto.costs import DraftLine
from paceline.engine import DrafterMetrics, RequestMetrics
from paceline.llm import BUNDLED
from paceline.profiles import Conditions, Profile

PROMPT = "Once upon a time"
VOCABULARY = json.loads((BUNDLED / "target" / "config.json").read_text())["vocab_size"]
FAST = ("--dtype", "float32", "--threads", "1")


@pytest.fixture(scope="module")
def expected() -> str:
    llm = LLM(speculative_config=None, dtype="float32", threads=1)
    return llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0].text


def test_the_text_is_the_models(run: Command, expected: str) -> None:
    found = run("generate", PROMPT, "--max-tokens", 16, *FAST)
    assert (found.code, found.out, found.err) == (0, expected + "\n", "")


@pytest.mark.parametrize("arguments", [(), ("-",)])
@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_standard_input(run: Command, expected: str, arguments: tuple[str, ...], ending: str) -> None:
    assert run("generate", *arguments, "--max-tokens", 16, *FAST, stdin=PROMPT + ending).out == expected + "\n"


def test_a_file(run: Command, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbf" + PROMPT.encode() + b"\n")
    assert run("generate", "--file", file, "--max-tokens", 16, *FAST).out == expected + "\n"


def test_json(run: Command, expected: str) -> None:
    found = run("generate", PROMPT, "--max-tokens", 16, "--json", *FAST)
    made = json.loads(found.out)
    assert {"text", "token_ids", "finish_reason", "metrics"} <= set(made)
    assert (made["text"], len(made["token_ids"]), made["finish_reason"]) == (expected, 16, "length")
    assert made["metrics"]["num_generation_tokens"] == 16


def test_json_with_several_outputs_and_logprobs(run: Command) -> None:
    arguments = ("--n", 2, "--temperature", 1, "--seed", 3, "--logprobs", 2, "--prompt-logprobs", 1, "--max-tokens", 4)
    made = json.loads(run("generate", PROMPT, *arguments, "--json", *FAST).out)
    assert len(made["outputs"]) == 2
    assert len(made["logprobs"]) == 4
    assert made["prompt_logprobs"][0] is None


def test_plain_decoding_and_a_named_method(run: Command, expected: str) -> None:
    for config in ("null", '{"method": "ngram", "num_speculative_tokens": 4}'):
        assert run("generate", PROMPT, "--max-tokens", 16, "-s", config, *FAST).out == expected + "\n"


def test_a_zero_is_something_that_was_typed(run: Command, tiny: Path, tmp_path: Path) -> None:
    """Zeros are falsy, but `--temperature 0` must not leave a sampling checkpoint at its own temperature."""
    tiny = shutil.copytree(tiny, tmp_path / "sampling")
    (tiny / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 5.0}))
    greedy = [
        run("generate", PROMPT, "-m", tiny, "--temperature", 0, "--max-tokens", 8, "--seed", s, *FAST).out
        for s in (1, 2)
    ]
    sampled = [run("generate", PROMPT, "-m", tiny, "--max-tokens", 8, "--seed", s, *FAST).out for s in (1, 2)]
    assert greedy[0] == greedy[1]
    assert sampled[0] != sampled[1]


@pytest.fixture
def free_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scoring a draft and making one cost nothing, so that what `auto` does is not up to how busy the machine is."""
    monkeypatch.setattr(
        Costs,
        "table",
        lambda self, batch, context, rows, *, hopeful=False: [1e-3 + 1e-7 * row for row in range(rows + 1)],
    )
    monkeypatch.setattr(Costs, "line", lambda self, drafter, batch=1: DraftLine(1e-7, 1e-7, 9))


def drafted(run: Command, *arguments: object) -> dict[str, dict[str, int]]:
    """The drafters' counts of a run that says what it always says."""
    found = run("generate", PROMPT, "--max-tokens", 16, "--json", *arguments, *FAST)
    assert found.code == 0, found.err
    drafters: dict[str, dict[str, int]] = json.loads(found.out)["metrics"]["drafters"]
    return drafters


@pytest.mark.usefixtures("free_rows")
def test_a_prediction_is_drafted_from(run: Command, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "expected.txt"
    file.write_text(expected)
    fixed = ("-s", '{"method": "prediction", "num_speculative_tokens": 15}')
    for config, given in ((fixed, expected), (fixed, f"@{file}"), ((), expected)):
        counts = drafted(run, "--prediction", given, *config)["prediction"]
        assert counts["num_accepted_tokens"] > 8, "16 tokens in a few steps"
    counts = drafted(run, "--prediction", "zebra zebra zebra zebra", *fixed)["prediction"]
    assert counts["num_accepted_tokens"] == 0 < counts["num_draft_tokens"]
    assert "prediction" not in drafted(run)


def test_a_prediction_that_begins_with_an_at_sign(run: Command) -> None:
    fixed = ("-s", '{"method": "prediction", "num_speculative_tokens": 4}')
    assert drafted(run, "--prediction", "@@property", *fixed)["prediction"]["num_draft_tokens"] > 0
    found = run("generate", PROMPT, "--prediction", "@/no/such/file", *FAST)
    assert (found.code, found.out) == (2, "")
    assert "cannot read '/no/such/file'" in found.line


@pytest.mark.usefixtures("free_rows")
@pytest.mark.parametrize("config", [None, {"method": "ngram"}])
def test_a_profile_without_prediction_is_no_reason_to_refuse_one(
    run: Command, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: Any
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    llm = LLM(dtype="float32", threads=1)
    Profile(conditions=Conditions.of(llm.runner.info, llm.folder), speculative_config=config, threads=1).save()
    assert LLM(dtype="float32", threads=1).drafter_methods == ([] if config is None else ["ngram"])
    assert drafted(run, "--prediction", expected)["prediction"]["num_accepted_tokens"] > 8
    assert "prediction" not in drafted(run)


@pytest.mark.parametrize(("config", "methods"), [('{"method": "ngram"}', "ngram"), ("null", "none")])
def test_a_prediction_that_nobody_reads_is_rejected(run: Command, config: str, methods: str) -> None:
    found = run("generate", PROMPT, "--prediction", "x", "-s", config, *FAST)
    assert (found.code, found.out) == (2, "")
    assert f"the methods are: {methods}" in found.line


def test_a_message_in_the_chat_template(run: Command) -> None:
    found = run("generate", "What is two plus two?", "--chat", "--max-tokens", 8, *FAST)
    assert found.code == 0
    assert found.out.strip()


def test_stop_strings_are_cut(run: Command, expected: str) -> None:
    stop = expected.strip()[4:8]
    assert (
        run("generate", PROMPT, "--max-tokens", 16, "--stop", stop, *FAST).out
        == expected[: expected.index(stop)] + "\n"
    )


def test_several_texts(run: Command) -> None:
    sampled = ("--temperature", 1, "--seed", 3, "--max-tokens", 8, *FAST)
    made = json.loads(run("generate", PROMPT, "--n", 3, "--json", *sampled).out)
    found = run("generate", PROMPT, "--n", 3, *sampled)
    texts = [one["text"] for one in made["outputs"]]
    assert len(set(texts)) == 3
    assert found.out == "".join(f"--- {i} of 3 ---\n{text}\n" for i, text in enumerate(texts, 1))


def test_several_texts_that_are_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    whole = RequestOutput("r", None, [1], [CompletionOutput(0), CompletionOutput(1)], RequestMetrics())

    def chunks() -> Generator[StreamChunk]:
        for index, text in ((1, "b"), (0, "a"), (1, "c")):
            yield StreamChunk(index, ((text, None),), (1,), None, whole)
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit) as caught:
        show_all(chunks())
    assert caught.value.exit_code == 130
    assert capsys.readouterr().out == "--- 1 of 2 ---\na\n--- 2 of 2 ---\nbc\n"


@pytest.mark.parametrize("arguments", [(), ("--json",), ("--n", 2, "--temperature", 1)])
def test_max_tokens_that_the_context_does_not_hold(run: Command, arguments: tuple[object, ...]) -> None:
    few = ("--max-model-len", 16, "--speculative-config", "null", *FAST, *arguments)
    size = len(LLM(speculative_config=None, threads=1).tokenizer.encode(PROMPT))
    found = run("generate", PROMPT, "--max-tokens", 50, *few)
    assert (found.code, found.err) == (
        0,
        f"--max-tokens 50 was cut to {16 - size}: prompt and output share 16 tokens\n",
    )
    assert run("generate", PROMPT, "--max-tokens", 16 - size, *few).err == ""
    assert run("generate", PROMPT, *few).err == "", "nobody asked for more"


@pytest.mark.parametrize("config", ["suffix", '["ngram", "suffix"]', '"ngram"'])
def test_methods_by_their_bare_names(run: Command, expected: str, config: str) -> None:
    assert run("generate", PROMPT, "--max-tokens", 16, "-s", config, *FAST).out == expected + "\n"


@pytest.mark.parametrize("flag", [("--logprobs", 1), ("--prompt-logprobs", 1)])
def test_what_needs_json_says_so(run: Command, flag: tuple[str, int]) -> None:
    found = run("generate", PROMPT, *flag, "--temperature", 1, *FAST)
    assert (found.code, found.out) == (2, "")
    assert "add --json" in found.line


@pytest.mark.parametrize(
    ("redirection", "why"),
    [
        ("<&-", "no prompt was given"),
        ("</dev/null", "standard input is empty"),
        ("<{}/binary", "is not UTF-8 text"),
    ],
)
def test_no_prompt_is_one_line(tmp_path: Path, redirection: str, why: str) -> None:
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    command = f"{sys.executable} -m paceline generate {redirection.format(tmp_path)}"
    found = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith("paceline: ")
    assert why in found.stderr


@pytest.mark.parametrize(
    ("name", "why"), [("empty", "is empty"), ("binary", "is not UTF-8 text"), (".", "Is a directory")]
)
def test_a_file_without_a_prompt_is_one_line(run: Command, tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    found = run("generate", "--file", tmp_path / name)
    assert (found.code, found.out) == (2, "")
    assert why in found.line


def watch(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Both streams are a terminal from here on (a fixture is too early: pytest sets them again before the test)."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    return stream


def test_colours_by_drafter_and_a_legend(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    printer = StreamPrinter()
    printer.show([("I", None), (" am", "ngram"), (" here", "draft_model"), (" now", "ngram")])
    printer.end()
    text = terminal.getvalue()
    assert text == "I\x1b[32m am\x1b[0m\x1b[36m here\x1b[0m\x1b[32m now\x1b[0m\n"
    drafters = {"ngram": DrafterMetrics(9, 2), "draft_model": DrafterMetrics(4, 1)}
    printer.legend(RequestMetrics(num_generation_tokens=4, num_steps=2, num_accepted_tokens=3, drafters=drafters))
    legend = terminal.getvalue().removeprefix(text)
    assert "mean acceptance length 2.50" in legend
    assert "\x1b[2;32m■ ngram\x1b[0m" in legend
    assert "\x1b[2;36m■ draft_model\x1b[0m" in legend
    assert "2 of 9 accepted" in legend


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    printer = StreamPrinter()
    printer.show([(" am", "ngram")])
    assert terminal.getvalue() == " am"
    printer.legend(RequestMetrics(num_generation_tokens=4, drafters={"ngram": DrafterMetrics(9, 2)}))
    assert "2 of 9 accepted" in terminal.getvalue()
    assert "\x1b[" not in terminal.getvalue()


def test_a_model_cannot_steer_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    StreamPrinter().show([("a\x1b[2J\x07\tb\n", None)])
    assert terminal.getvalue() == "a␛[2J␇\tb\n"


def test_a_pipe_gets_the_bare_text(capsys: pytest.CaptureFixture[str]) -> None:
    printer = StreamPrinter()
    printer.show([("a\x1b\t", "ngram"), ("b", None)])
    printer.rest("a\x1b\tbcd")
    printer.end()
    printer.legend(RequestMetrics())
    assert capsys.readouterr() == ("a\x1b\tbcd\n", "")


def test_a_finished_line_is_not_ended_twice_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = watch(monkeypatch)
    printer = StreamPrinter()
    printer.show([("a\n", None)])
    printer.end()
    assert terminal.getvalue() == "a\n"


def test_what_a_search_finds_is_printed_as_it_comes_and_as_json(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (PROMPT, "--search", '{"method": "beam", "beam_width": 2}', "--temperature", 0, "--max-tokens", 40, *FAST)
    whole = json.loads(run("generate", *asked, "--json").out)
    pieces, show = list[str](), StreamPrinter.show
    monkeypatch.setattr(
        StreamPrinter, "show", lambda self, found, *more: (pieces.append(str(found)), show(self, found, *more))
    )
    assert run("generate", *asked).out == whole["text"] + "\n"
    assert len([piece for piece in pieces if piece not in ("()", "[]")]) > 2
    both = run("generate", *asked, "--n", 2).out
    assert both.startswith(f"--- 1 of 2, score {whole['score']:.3f} ---\n{whole['text']}")
    tree = run("generate", *asked, "--tree").out
    assert tree.startswith("the prompt")
    assert tree.endswith(whole["text"] + "\n")


def test_a_search_takes_no_drafters(run: Command) -> None:
    found = run("generate", PROMPT, "--search", "beam", "-s", "ngram", *FAST)
    assert (found.code, found.err) == (2, "paceline: --search drafts nothing; leave --speculative-config out\n")
    assert run("generate", PROMPT, "--search", "beam", "-s", "null", "--max-tokens", 2, *FAST).code == 0


def test_only_searches_that_run_programs_can_run_them_unsafely(run: Command) -> None:
    found = run("generate", PROMPT, "--unsafe-execution", *FAST)
    assert found.code == 2
    assert "give --search" in found.err
    found = run("generate", PROMPT, "--search", "beam", "--unsafe-execution", *FAST)
    assert found.code == 2
    assert "unsafe_execution" in found.err
    search = json.dumps({"method": "pg_td", "tests": ["assert add(1, 2) == 3"], "rollouts": 2})
    arguments = ("--search", search, "--unsafe-execution", "--temperature", 0, "--max-tokens", 6, *FAST)
    assert run("generate", "def add(a, b):\n    return", *arguments).code == 0


def test_stats_say_what_it_took(run: Command) -> None:
    shown = run("generate", "one two three", *FAST, "--stats")
    plain = run("generate", "one two three", *FAST)
    assert shown.out == plain.out
    for name in ("load", "first token", "prompt", "decoding", "drafts", "memory"):
        assert any(line.startswith(f"{name} ") for line in shown.err.splitlines()), name
        assert not any(line.startswith(f"{name} ") for line in plain.err.splitlines()), name


def test_stats_of_a_search_say_what_it_computed(run: Command) -> None:
    shown = run("generate", PROMPT, "--search", "beam", "--max-tokens", 4, *FAST, "--stats")
    assert shown.code == 0
    for name in ("load", "prompt", "decoding", "search", "memory"):
        assert any(line.startswith(f"{name} ") for line in shown.err.splitlines()), name
    assert re.search(r"^search +beam: \d+ tokens in \d+ passes, \d", shown.err, re.MULTILINE)
    assert "drafts" not in shown.err


def test_an_answer_that_a_limit_cut_off_says_so_at_a_terminal(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("generate", PROMPT, "--max-tokens", 4, "--ignore-eos", *FAST)
    bare = run(*asked)
    assert "cut off" not in bare.err  # no terminal reads it
    for more, told in (
        ((), "the answer was cut off at 4 tokens: --max-tokens raises the limit"),
        (("--n", 3, "--temperature", 1), "3 of 3 answers were cut off at 4 tokens: --max-tokens raises"),
        (("--search", "beam"), "the answer was cut off at 4 tokens: --max-tokens raises the limit"),
        (("--max-model-len", 16, "--max-tokens", 90), "tokens: the context of 16 tokens is full"),
        (("--stop", bare.out[1:3]), ""),
    ):
        monkeypatch.setattr(sys, "stderr", screen := Terminal())
        assert run(*asked, *more).code == 0
        assert told in screen.getvalue()
        assert ("cut off" in screen.getvalue()) is bool(told), more


def test_a_chat_model_hints_at_chat_once(
    run: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Path
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    assert "--chat" not in run("generate", "one two three", *FAST).err  # no terminal reads it
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    run("generate", "one two three", *FAST, "--chat")
    assert "--chat" not in screen.getvalue()
    run("generate", "one two three", *FAST)
    run("generate", "one two three", *FAST)
    assert screen.getvalue().count("--chat treats the prompt as a message") == 1


# ------------------------------------------------------------------------------------------------ encoders


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made T5 with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("t5")
    tiny_encoder_decoder.make("t5", folder, vocab_size=VOCABULARY, eos_token_id=1)
    for file in (BUNDLED / "target").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def test_encoder_prompts(run: Command, translator: Path, tmp_path: Path) -> None:
    llm = LLM(translator, speculative_config=None, dtype="float32", threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=8)

    def text(prompt: Any) -> str:
        return llm.generate(prompt, params)[0].outputs[0].text + "\n"

    given = ("-m", translator, "--max-tokens", 8, *FAST)
    assert run("generate", "--encoder-prompt", PROMPT, *given).out == text({"encoder_prompt": PROMPT})
    assert run("generate", PROMPT, *given).out == text({"encoder_prompt": PROMPT}), "a prompt alone is the source"
    begun = run("generate", "A", "--encoder-prompt", PROMPT, *given).out
    assert begun == text({"encoder_prompt": PROMPT, "prompt": "A"}) != text({"encoder_prompt": PROMPT})
    file = tmp_path / "source.txt"
    file.write_text(PROMPT)
    assert run("generate", "--encoder-prompt", f"@{file}", *given).out == text({"encoder_prompt": PROMPT})


def test_a_prediction_of_an_encoder_decoder_model_is_drafted_from(run: Command, translator: Path) -> None:
    given = ("generate", PROMPT, "-m", translator, "--max-tokens", 8, "--json", *FAST)
    plain = json.loads(run(*given).out)
    expected = LLM(translator, dtype="float32", profile=False).tokenizer.decode(plain["token_ids"])
    found = json.loads(run(*given, "-s", "prediction", "--prediction", expected).out)
    assert found["token_ids"] == plain["token_ids"]
    assert found["metrics"]["drafters"]["prediction"]["num_draft_tokens"] > 0


def test_models_that_a_command_does_not_suit(run: Command, tmp_path_factory: pytest.TempPathFactory) -> None:
    whisper = tiny_whisper.write(tmp_path_factory.mktemp("whisper"))
    for name in ("generate", "chat"):
        found = run(name, *((PROMPT,) if name == "generate" else ()), "-m", whisper, *FAST)
        assert (found.code, "reads speech, no text; `paceline transcribe` and" in found.line) == (2, True)
    found = run("generate", "--encoder-prompt", PROMPT, *FAST)
    assert (found.code, found.line) == (
        2,
        "--encoder-prompt is for encoder-decoder models, and the bundled model has no encoder; leave it out",
    )
