"""The recipe of an adapter: a few steps on a tiny random target, whose files stay as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch
from torch.nn import functional as F

from paceline import LLM, SamplingParams
from recipes.bundled_pair import adapter, corpus, exits


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target with sharp distributions, and a corpus beside it."""
    folder = tiny_checkpoint.write(tmp_path_factory.mktemp("target"), initializer_range=0.3, num_hidden_layers=3)
    texts = [f"Ada has {i} pears and buys {i % 7}. How many now? {i + i % 7}" for i in range(200)]
    rows = [{"source": "math", "text": text, "heldout": i % 10 == 0} for i, text in enumerate(texts)]
    (folder / "documents.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def made(target: Path, out: Path, *more: str) -> list[float]:
    paths = ["--corpus", str(target), "--target", str(target), "--out", str(out)]
    small = ["--batch", "4", "--length", "32", "--device", "cpu", "--tokens", "5120", "--rate", "1e-2"]
    seen: list[float] = []
    fit = adapter.fit

    def fitted(model: Any, stream_n: Any, heldout_bt: Any, options: Any) -> Any:
        found = fit(model, stream_n, heldout_bt, options)
        for one in (adapter.Adapter(model), found[0]):
            own, distribution = adapter.logits_of(model, one, heldout_bt, options.exit_layer)
            seen.append(
                F.kl_div(own.log_softmax(-1), distribution.log_softmax(-1), log_target=True, reduction="sum").item()
                / own[..., 0].numel()
            )
        return found

    adapter.fit = fitted
    try:
        adapter.main([*paths, *small, *more])
    finally:
        adapter.fit = fit
    return seen


def test_an_adapter_comes_nearer_to_the_target_and_drafts(target: Path, tmp_path: Path) -> None:
    before = (target / "model.safetensors").read_bytes()
    bare, trained = made(target, tmp_path, "--exit-layer", "1")
    assert trained < 0.8 * bare
    assert (target / "model.safetensors").read_bytes() == before
    plain = LLM(str(target), speculative_config=None, dtype="float32")
    config: dict[str, Any] = {
        "method": "kangaroo",
        "model": str(tmp_path),
        "exit_layer": 1,
        "draft_stop_threshold": 0.0,
        "controller": "fixed",
    }
    config["num_speculative_tokens"] = 3
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    (mine,), (theirs,) = (llm.generate(["Ada has"], params) for llm in (plain.with_speculative_config(config), plain))
    assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
    assert mine.metrics.num_draft_tokens > 0
    assert not mine.metrics.dropped_drafters


def test_the_adapter_begins_as_the_plain_exit(target: Path) -> None:
    model = corpus.load_model(target, dtype=torch.float32)
    x_bt = torch.randint(4, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        own, distribution = adapter.logits_of(model, adapter.Adapter(model), x_bt, 2)
        states = list(exits.states_by_layer(model, x_bt))
    assert torch.allclose(own, model.lm_head(model.model.norm(states[1])), atol=1e-5)
    assert torch.allclose(distribution, model(input_ids=x_bt).logits, atol=1e-4)
    assert not torch.allclose(own, distribution, atol=1e-1)


def test_an_adapter_behind_the_last_layer_is_rejected(target: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"--exit-layer must lie in 1\.\.2, the target's layers but the last, got 3"):
        made(target, tmp_path, "--exit-layer", "3")
