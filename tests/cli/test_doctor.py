"""`paceline doctor`: lines, object, exit code."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command import Command
from tiny_checkpoint import edit_weights

from paceline.doctor import PassFacts, gather
from paceline.doctor.checks import CHECKS
from paceline.doctor.facts import FormFacts, MachineFacts
from paceline.llm import BUNDLED

FAST = ("--dtype", "float32", "--threads", "1")


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has time for us, and drafters that are fast; what the real one does is not the subject."""
    monkeypatch.setattr(gather, "gather", lambda seconds: MachineFacts(threads=1))
    monkeypatch.setattr(gather, "pass_seconds", lambda runner, threads: {})
    monkeypatch.setattr(gather, "pass_facts", lambda runner: None)
    real = gather.probe

    def fast(llm: object, prompts: object, **more: object) -> object:
        return [replace(one, draft_seconds=0.0) for one in real(llm, prompts, tokens=20, **more)]  # type: ignore[arg-type]

    monkeypatch.setattr(gather, "probe", fast)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draft = Path(shutil.copytree(BUNDLED / "draft", tmp_path_factory.mktemp("shuffled") / "draft"))

    def shuffle(weights: dict[str, torch.Tensor]) -> None:
        for name, tensor in weights.items():
            if tensor.dim() == 2:
                weights[name] = tensor[torch.randperm(len(tensor))].contiguous()

    edit_weights(draft, shuffle)
    return draft


def test_a_fine_setup(run: Command) -> None:
    found = run("doctor", *FAST)
    assert (found.code, found.err) == (0, "")
    assert f"{len(CHECKS)} checks: nothing is wrong" in found.out.splitlines()
    assert "probe of draft_model: " in found.out


def test_every_check_has_a_line(run: Command) -> None:
    found = run("doctor", "-s", "null", *FAST)
    assert found.code == 0
    assert all(f"OK     {check.name}" in found.out.splitlines() for check in CHECKS)


def test_a_report_has_what_it_needs_and_no_secrets(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "sk-secret")
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(Path.home() / "somewhere"))
    block = run("doctor", "-s", "null", *FAST).out.split("To report a problem, paste this:")[1]
    named = [line.split()[0] for line in block.splitlines() if line.strip()]
    assert named == ["paceline", "processor", "memory", "GPU", "packages", "model", "kernels", "cache", "switches"]
    assert "bundled/target (llama), float32 on cpu" in block
    assert "~/somewhere" in block
    assert "PACELINE_API_KEY=..." in block
    assert "sk-secret" not in block
    about = json.loads(run("doctor", "--json", "-s", "null", *FAST).out)["about"]
    assert list(about) == named


def test_heading_and_report_name_the_same_form_of_the_weights(run: Command) -> None:
    for flags, form in ((FAST, "float32"), (("--quantization", "int8", *FAST), "int8")):
        found = run("doctor", "-s", "null", *flags)
        (heading,) = [line for line in found.out.splitlines() if line.endswith("on cpu, 1 thread)")]
        assert heading == f"bundled/target ({form} on cpu, 1 thread)"
        assert f"bundled/target (llama), {form} on cpu, " in found.out


def test_a_fault_is_said_in_80_columns(run: Command, shuffled: Path) -> None:
    found = run("doctor", "-s", json.dumps({"method": "draft_model", "model": str(shuffled)}), *FAST)
    assert found.code == 1
    shown = " ".join(found.out.split())
    assert "WRONG acceptance: draft_model: " in shown
    assert "To do: check that its weights are whole and of the target's family." in shown
    assert "checks: 1 thing is wrong" in shown
    assert max(map(len, found.out.split("To report")[0].splitlines())) <= 80


def test_json(run: Command, shuffled: Path) -> None:
    found = run("doctor", "--json", "-s", json.dumps({"method": "draft_model", "model": str(shuffled)}), *FAST)
    made = json.loads(found.out)
    assert (found.code, made["healthy"]) == (1, False)
    (finding,) = made["findings"]
    assert (finding["check"], finding["level"]) == ("acceptance", "wrong")
    assert made["probes"][0]["drafted_tokens"] > 10
    assert len(made["checks"]) == len(CHECKS)


def test_prompts_of_the_user(run: Command, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("Once upon a time\n")
    assert run("doctor", "--prompts", file, *FAST).code == 0


def test_a_method_that_does_not_exist_is_a_finding(run: Command) -> None:
    found = run("doctor", "-s", '{"method": "ngrm"}', *FAST)
    assert found.code == 1
    assert "did you mean ngram?" in " ".join(found.out.split())


def test_bad_input(run: Command, tmp_path: Path) -> None:
    found = run("doctor", "-s", "{nonsense", "--model", "/no/such/model")
    assert (found.code, "not JSON" in found.line) == (2, True)
    assert run("doctor", "--prompts", tmp_path / "none.txt", "--model", "/no/such/model").code == 2
    assert run("doctor", "--model", "/no/such/model").code == 2


FORMS = [
    FormFacts(passes="compiled", dtype="bfloat16", seconds={1: 4e-3, 8: 9e-3}),
    FormFacts(passes="operators", dtype="bfloat16", seconds={1: 0.01, 8: 0.0245}),
]
FACTS = PassFacts(
    passes="compiled", processor="Zen, 2 CPUs", instructions="AVX2", seconds={1: 0.016, 8: 0.061}, layers=5, forms=FORMS
)


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        (
            FACTS,
            "compiled passes on Zen, 2 CPUs (AVX2, self-test passed; PACELINE_COMPILED=off has PyTorch's operators run "
            "it): 16 ms for 1 row, 61 ms for 8 rows CPU time of 5 layers of this shape on one thread, ms for 1 and 8 "
            "rows: compiled bfloat16 4 and 9; operators bfloat16 10 and 24.5 probe",
        ),
        (
            replace(FACTS, crowded=True),
            "operators bfloat16 10 and 24.5 (other programs were in the way: not judged) probe",
        ),
        (
            replace(FACTS, passes="operators", lacks="PACELINE_COMPILED is off", forms=()),
            "PyTorch's operators on Zen, 2 CPUs (compiled passes do not run it: PACELINE_COMPILED is off): 16 ms for "
            "1 row, 61 ms for 8 rows probe",
        ),
    ],
)
def test_what_runs_the_model_is_said_with_its_figures(
    facts: PassFacts, lines: str, run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "pass_facts", lambda runner: facts)
    found = run("doctor", "-s", "ngram", *FAST)
    assert lines in " ".join(found.out.split())
    shown = json.loads(run("doctor", "--json", "-s", "ngram", *FAST).out)["passes"]
    assert (shown["passes"], shown["seconds"]) == (facts.passes, {"1": 0.016, "8": 0.061})
