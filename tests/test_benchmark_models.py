"""The model of a benchmark script: names, folders, prompts and drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import benchmark_scripts
import pytest
import tiny_checkpoint

from paceline import SamplingParams
from paceline.bench.bundled import smollm2_folder


@pytest.fixture(scope="module")
def decoding() -> Iterator[ModuleType]:
    with benchmark_scripts.imported("decoding") as (found,):
        yield found


@pytest.fixture
def real_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tiny model where the real one of the benchmarks would be."""
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    return tiny_checkpoint.write(smollm2_folder())


def test_the_real_model_is_taken_from_the_cache(decoding: ModuleType, real_model: Path) -> None:
    model = decoding.model_of("smollm2")
    assert (model.name, model.folder) == ("smollm2", real_model)
    assert "Q4_1" in model.weights
    assert model.draft["method"] == "quantized_copy"
    assert "Q4_1" not in decoding.model_of("bundled").weights


def test_a_folder_is_named_after_itself(decoding: ModuleType, tmp_path: Path) -> None:
    assert decoding.model_of(str(tiny_checkpoint.write(tmp_path / "mine"))).name == "mine"
    with pytest.raises(SystemExit, match="must be smollm2, bundled, 291m or the folder of a checkpoint, got 'nothing'"):
        decoding.model_of("nothing")


def test_outputs_must_agree(decoding: ModuleType, real_model: Path) -> None:
    llm = decoding.model_of(str(real_model)).open(dtype="float32")
    prompts = [ids[-40:] for ids in decoding.prompts_of(llm, 2)]
    made = decoding.decode(llm, prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert [len(tokens) for tokens in made] == [6, 6]
    assert decoding.must_agree(llm, prompts, made, made) == {"prompts": 2, "identical": 2}
    wrong = [made[0], [*made[1][:3], made[1][3] ^ 1, *made[1][4:]]]
    with pytest.raises(SystemExit, match="that: outputs differ outside near ties"):
        decoding.must_agree(llm, prompts, made, wrong, what="that")


def test_a_set_that_is_not_there_is_named(decoding: ModuleType, real_model: Path, tmp_path: Path) -> None:
    llm = decoding.model_of(str(real_model)).open()
    with pytest.raises(SystemExit, match=r"holds no gsm8k/test\*\.jsonl; give --data a folder that does"):
        decoding.published(llm, tmp_path, "gsm8k", 1)
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * 4)
    assert len(decoding.published(llm, tmp_path, "gsm8k", 2)) == 2
