"""`paceline generate` and `paceline chat` with a diffusion checkpoint: flags, text, the canvas on a terminal,
refusals.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command import Command, Terminal

from paceline import LLM, SamplingParams
from paceline.cli.main import main
from paceline.diffusion.outputs import DOT
from tests.tiny_diffusion import write

PROMPT = "a1: "
FAST = ("--dtype", "float32", "--threads", "1", "--max-tokens", "12", "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("llada"))


def expected(folder: Path, config: dict[str, object] | None = None) -> str:
    llm = LLM(folder, diffusion_config=config, dtype="float32", threads=1)
    return llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))[0].outputs[0].text


def test_the_text_is_the_models(run: Command, folder: Path) -> None:
    found = run("generate", PROMPT, "-m", folder, *FAST)
    assert (found.code, found.out, found.err) == (0, expected(folder) + "\n", "")


def test_the_flags_are_one_configuration(run: Command, folder: Path) -> None:
    flags = (
        "--dllm-unmasking-strategy",
        "low_confidence_static",
        "--dllm-block-length",
        4,
        "--dllm-denoising-steps",
        2,
    )
    made = json.loads(run("generate", PROMPT, "-m", folder, *flags, "--json", *FAST).out)
    same = {"method": "static", "block_length": 4, "denoising_steps": 2}
    assert made["text"] == expected(folder, same)
    assert (made["metrics"]["method"], made["metrics"]["num_calls"], made["metrics"]["tokens_per_call"]) == (
        "static",
        6,
        2.0,
    )
    whole = run("generate", PROMPT, "-m", folder, "--diffusion-config", json.dumps(same), "--json", *FAST)
    assert json.loads(whole.out)["token_ids"] == made["token_ids"]
    mixed = ("--diffusion-config", '{"method": "static", "block_length": 4}', "--dllm-denoising-steps", 2)
    assert (
        json.loads(run("generate", PROMPT, "-m", folder, *mixed, "--json", *FAST).out)["token_ids"] == made["token_ids"]
    )
    named = json.loads(run("generate", PROMPT, "-m", folder, "--diffusion-config", "leftmost", "--json", *FAST).out)
    assert named["metrics"]["method"] == "leftmost"
    high = ("--dllm-confidence-threshold", 0.999)
    low = ("--dllm-confidence-threshold", 0.01)
    calls = [
        json.loads(run("generate", PROMPT, "-m", folder, *t, "--json", *FAST).out)["metrics"]["num_calls"]
        for t in (high, low)
    ]
    assert calls[0] > calls[1]


WRONG = [
    (("--dllm-block-length", "x"), "--dllm-block-length must be an integer, got 'x'"),
    (("--dllm-confidence-threshold", "x"), "--dllm-confidence-threshold must be a number, got 'x'"),
    (("--dllm-unmasking-strategy", "stattic"), "unknown diffusion method 'stattic'; did you mean static"),
    (
        ("--dllm-denoising-steps", 3, "--diffusion-config", '{"denoising_steps": 3}'),
        "--dllm-denoising-steps and 'denoising_steps' in --diffusion-config mean the same; give one of them",
    ),
    (("--diffusion-config", "{"), "diffusion_config is not JSON"),
    (
        ("--dllm-unmasking-strategy", "static", "--dllm-block-length", 12, "--dllm-denoising-steps", 13),
        "denoising_steps must lie in 1..12",
    ),
    (("--top-p", 0.5), "top_p=0.5 cannot be used with a diffusion language model; leave it out"),
    (("--prediction", "ab"), "a prediction cannot be used with a diffusion language model; leave it out"),
    (("--speculative-config", '{"method": "ngram"}'), "speculative_config cannot be used with"),
    (("--diffusion-config", '{"regex": "z"}'), "no text of the constraint fits 12 slots"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=str)
def test_wrong_use_gets_one_line(run: Command, folder: Path, arguments: tuple[object, ...], message: str) -> None:
    plain = [flag for flag in FAST if flag != "--ignore-eos"]
    found = run("generate", PROMPT, "-m", folder, *arguments, *plain)
    assert found.code == 2
    assert found.line.startswith(message)


def test_other_models_and_other_verbs(run: Command, folder: Path, tiny: Path) -> None:
    found = run("generate", PROMPT, "-m", tiny, "--dllm-block-length", 4)
    assert (found.code, "diffusion_config needs a diffusion language model" in found.line) == (2, True)
    for command in (("verify",), ("explain", PROMPT), ("demo",), ("bench", "--quick")):
        found = run(*command, "-m", folder)
        assert (found.code, "is a diffusion language model, which only" in found.line) == (2, True)


def test_a_terminal_sees_the_canvas_fill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen, remarks = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", remarks)
    code = main(["generate", PROMPT, "-m", str(folder), "--dllm-unmasking-strategy", "static", *FAST])
    seen = screen.getvalue()
    assert code == 0
    assert seen.count(DOT) == sum(range(2, 12))  # the last two slots come together
    assert "\x1b[2m" in seen  # dim
    assert "\x1b[32m" in seen  # green
    assert seen.endswith(expected(folder, {"method": "static"}) + "\n")
    assert "12 calls of the model, 1.00 tokens per call (static)" in remarks.getvalue()


def test_chat(run: Command, folder: Path) -> None:
    found = run("chat", "-m", folder, *FAST, stdin="ab\n")
    llm = LLM(folder, dtype="float32")
    answer = llm.chat(
        [{"role": "user", "content": "ab"}], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    )
    assert (found.code, found.out) == (0, answer[0].outputs[0].text + "\n")
