"""The benchmark of large shapes, on a tiny one: both engines hold the same weights, cells are kept, wrong outputs give
no times.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmark_scripts
import pytest
import torch

from paceline.bench import RandomShape
from paceline.bench.run import dial_registered
from paceline.tree import TokenTree

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
TOKENS = 8


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with dial_registered(), benchmark_scripts.imported("gpu_shapes") as (found,):
        yield found


def shape_of(script: ModuleType, device: str, **changes: int) -> Any:
    sizes = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 128, "vocab": 6200, "context": 512}
    return script.Shape("tiny", RandomShape(**(sizes | changes)), device, 2, TOKENS)


@pytest.fixture(scope="module", params=DEVICES)
def tied(script: ModuleType, request: pytest.FixtureRequest) -> Any:
    return shape_of(script, request.param)


def logits_of_both(shape: Any) -> tuple[torch.Tensor, torch.Tensor]:
    runner, prompt = shape.plain.runner, shape.prompts[0]
    cache = runner.open()
    ours = runner.extend([cache], [prompt], all_logits=True).logits.float()
    runner.release(cache)
    with torch.no_grad():
        theirs = shape.peer(torch.tensor([prompt], device=shape.device)).logits[0].float()
    return ours, theirs


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).std() / theirs.std())


@pytest.fixture(params=DEVICES)
def deep(script: ModuleType, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """With weights that give the layers their say."""
    monkeypatch.setattr(sys.modules["given_weights"], "EMBEDDING", 0.5)
    monkeypatch.setattr(sys.modules["given_weights"], "DEVIATION", 0.15)
    return shape_of(script, request.param, tie=0)


def test_both_engines_have_the_same_weights(deep: Any) -> None:
    assert far(*logits_of_both(deep)) < 0.05
    for layer in deep.peer.model.layers:
        layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight = layer.mlp.up_proj.weight, layer.mlp.gate_proj.weight
    assert far(*logits_of_both(deep)) > 0.1


def test_a_token_decides_the_next(script: ModuleType, tied: Any) -> None:
    for prompt, made in zip(tied.prompts, tied.reference, strict=True):
        assert made == [prompt[-1] ^ (1 - i % 2) for i in range(TOKENS)]
    untied = shape_of(script, tied.device, tie=0, vocab=6300)
    for prompt, made in zip(untied.prompts, untied.reference, strict=True):
        assert made == [(prompt[-1] + 1 + i) % 6300 for i in range(TOKENS)]


def test_cells_are_written_and_kept(
    script: ModuleType, tied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[str] = []
    monkeypatch.setattr(script, "Shape", lambda name, *rest: made.append(name) or tied)
    monkeypatch.setattr(script, "read_bandwidth", lambda device: 1e9)
    words = f"gpu_shapes.py --device {tied.device} --shapes tiny --batches 1,2 --acceptance 0.8 --fixed 1 --repeats 1"
    monkeypatch.setattr(
        sys, "argv", [*words.split(), "--tokens", str(TOKENS), "--folder", str(tmp_path), "--budget", "0"]
    )
    with pytest.raises(SystemExit) as spent:
        script.main()
    assert (spent.value.code, made) == (script.UNFINISHED, [])
    monkeypatch.setattr(
        script, "parts", lambda *all_: [(1, ("plain", None)), (2, ("dial", 0.8)), (2, ("transformers", "static cache"))]
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "600"])
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            script.main()
        assert ended.value.code == 0
    assert made == ["tiny"]  # the second time all cells are there
    plain, dial, peer = json.loads((tmp_path / f"gpu_shapes_{tied.device}.json").read_text(encoding="utf-8"))["cells"]
    assert plain["share_of_limit"] == pytest.approx(plain["weight_bytes"] / 1e9 / plain["step_seconds"])
    assert set(dial["tokens_per_second"]) == {"plain", "auto", "fixed 1"}
    assert peer["agreement"] == {"prompts": 2, "identical": 2, "equal_tokens": 2 * TOKENS, "tokens": 2 * TOKENS}
    assert all(value > 0 for cell in (plain, dial, peer) for value in cell["tokens_per_second"].values())


def test_wrong_outputs_give_no_times(script: ModuleType, tied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = tied.reference
    wrong = [[*made[:3], made[3] ^ 2, *made[4:]] for made in right]
    for part in (("plain", None), ("dial", 0.8), ("transformers", "dynamic cache")):
        monkeypatch.setattr(tied, "reference", wrong)
        cell = tied.measure(1, part, [1], 1)
        assert cell["wrong"]
        assert "outside near ties" in cell["reason"]
        assert "tokens_per_second" not in cell
        monkeypatch.setattr(tied, "reference", right)
    assert "wrong" not in tied.measure(1, ("transformers", "dynamic cache"), [1], 1)


def test_what_transformers_raises_is_kept_as_the_reason(tied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object, **options: object) -> None:
        raise RuntimeError("no kernel\nand more")

    monkeypatch.setattr(tied.peer, "generate", fails)
    assert tied.peer_cell(1, "static cache", 1) == {"reason": "RuntimeError: no kernel"}


def test_the_cells_that_say_most_come_first(script: ModuleType) -> None:
    found = list(script.parts([1, 8], [0.8, 0.5]))
    assert found[:3] == [(1, ("plain", None)), (1, ("dial", 0.8)), (1, ("transformers", script.COMPILED))]
    assert found[-1] == (8, ("transformers", script.COMPILED))
    assert len(found) == len(set(found)) == 2 * (1 + 2 + len(script.FORMS))


@pytest.mark.parametrize("deep", DEVICES[1:], indirect=True)
def test_captured_graphs_score_like_the_eager_path(deep: Any) -> None:
    """Every bucket is captured at its first call and replayed at the second, after others have run."""
    runner = deep.plain.runner
    graphs, trees = (
        runner.graphs,
        [TokenTree.build([3, 4, 5, 6], [-1, 0, 0, 1]), TokenTree.chain([7]), TokenTree.chain(range(8, 15))],
    )
    assert graphs is not None
    both = []
    for runner.graphs in (graphs, None):
        caches, found = [runner.open() for _ in range(2)], []
        runner.extend(caches, [[5, 6, 7] * 9, [8, 9] * 20])
        for tree in trees * 2:
            found.append(runner.score(caches, [1, 2], [tree, tree]).logits.float().cpu())
            runner.commit(caches, [(0,), ()])
        for cache in caches:
            runner.release(cache)
        both.append(found)
    assert all(far(replayed, eager) < 0.05 for replayed, eager in zip(*both, strict=True))
    assert far(both[0][0], both[1][3]) > 0.1  # another text, other logits
