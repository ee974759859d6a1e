"""Heads for a target with more rows than tokens: none drafts what is no token, and other engines get all rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_padded import ROWS, TOKENS, write

from benchmarks.stand_ins import head_weights, written_head
from paceline import LLM, SamplingParams
from paceline.errors import CheckpointError
from paceline.models.heads import HeadConfig, read_head
from paceline.training import convert

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
LAYER = {"num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128}
BLOCK = {"layer": LAYER, "taps": (0, 1), "num_layers": 2, "block_size": 3, "mask_token_id": 9}
METHODS: dict[str, dict[str, Any]] = {
    "medusa": {"num_heads": 2},
    "hydra": {"num_heads": 2},
    "clover": {"num_heads": 2, "layer": LAYER},
    "chimera": {"num_heads": 2, "layer": LAYER},
    "eagle": {"layer": LAYER},
    "fspad": {"layer": LAYER, "inner_size": 32},
    "eagle3": {"layer": LAYER, "taps": (0, 1, 2)},
    "p_eagle": {"layer": LAYER, "taps": (0, 1, 2), "mask_token_id": 3},
    "falcon": {"layer": LAYER, "block_size": 2},
    "longspec": {"layer": LAYER | {"num_key_value_heads": 1}, "sliding_window": 512},
    "mlp_speculator": {"num_heads": 2, "inner_size": 32},
    "dflash": BLOCK,
    "dspark": BLOCK | {"markov_rank": 8, "sample_from_anchor": True},
}
FORMATS = [
    ("medusa", "medusa", False),
    ("medusa", "medusa_vllm", False),
    ("medusa", "medusa_vllm", True),
    ("hydra", "hydra", False),
    ("eagle", "eagle", False),
    ("eagle3", "eagle", True),
    ("eagle3", "speculators", True),
    ("p_eagle", "speculators", True),
    ("eagle3", "speculators", False),
    ("falcon", "falcon", False),
    ("mlp_speculator", "mlp_speculator", False),
    ("dflash", "dflash", False),
    ("dspark", "deepspec", False),
    ("dspark", "speculators", True),
]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return opened(write(tmp_path_factory.mktemp("padded")))


def opened(folder: Path) -> LLM:
    return LLM(folder, speculative_config=None, dtype="float32", threads=1, profile=False)


def config(method: Any, size: int, drafted: int | None = None) -> HeadConfig:
    return HeadConfig(
        method=method, hidden_size=64, vocab_size=size, draft_vocab_size=drafted or size, **METHODS[method]
    )


def drafts(llm: LLM, method: str, head: str | Path) -> tuple[list[int], int, int]:
    """The tokens with a head, and how many were drafted and accepted."""
    given = {"method": method, "model": str(head), "num_speculative_tokens": 2}
    (found,) = llm.with_speculative_config(given).generate("abc abc abc", GREEDY)
    assert not found.metrics.dropped_drafters
    return found.outputs[0].token_ids, found.metrics.num_draft_tokens, found.metrics.num_accepted_tokens


@pytest.mark.parametrize("method", METHODS)
def test_draft_ids_that_are_no_tokens_are_left_out(method: str, llm: LLM) -> None:
    """The head is the one that was made without them, token by token."""
    ids = torch.tensor([*range(40, 120), TOKENS, ROWS - 1])
    own = config(method, ROWS, len(ids))
    weights = head_weights(own, shared=False) | {"draft_to_target": ids}
    for one in weights.values():
        if len(one) == len(ids) and one.is_floating_point():
            one[-2:] = 100.0 * one[:2]  # the best of all, or the worst
    rows = {name: one[:-2] if len(one) == len(ids) else one for name, one in weights.items()}
    known = written_head(replace(own, draft_vocab_size=len(ids) - 2), rows)
    found, expected = (drafts(llm, method, head) for head in (written_head(own, weights), known))
    assert found == expected
    assert found[0] == llm.generate("abc abc abc", GREEDY)[0].outputs[0].token_ids
    assert found[1]


def test_a_head_that_drafts_no_token_is_one_line(llm: LLM) -> None:
    own = config("medusa", ROWS, 2)
    weights = head_weights(own) | {"draft_to_target": torch.tensor([TOKENS, TOKENS + 3])}
    with pytest.raises(CheckpointError, match=rf"drafts ids from {TOKENS}, and those of .* lie in 0\.\.{TOKENS - 1}"):
        llm.with_speculative_config({"method": "medusa", "model": written_head(own, weights)})


@pytest.mark.parametrize(("method", "to", "reduced"), FORMATS)
@pytest.mark.parametrize(("size", "shared"), [(TOKENS, False), (ROWS, True)])
def test_other_engines_get_as_many_rows_as_the_target_has(
    method: str, to: str, reduced: bool, size: int, shared: bool, llm: LLM, tmp_path: Path
) -> None:
    own = config(method, size, 80 if reduced else None)
    weights = head_weights(own, shared=shared)
    for name in [one for one in weights if one in ("embed.weight", "layers.0.input_layernorm.weight")]:
        if method in ("hydra", "eagle") and (method, name) != ("eagle", "embed.weight"):
            weights.pop(name)  # which the format has no place for
    if to == "dflash":
        weights = {name: one for name, one in weights.items() if name not in ("head.weight", "embed.weight")}
    if to == "falcon":
        weights.pop("head.weight", None)
    if reduced:
        weights["draft_to_target"] = torch.arange(40, 120)
    head = written_head(own, weights)
    there = convert(llm, head, to, tmp_path / "there")
    assert sizes(there) <= {ROWS, 80 if reduced else ROWS}
    made, _ = read_head(there, llm.runner.info)
    assert (made.vocab_size, made.draft_vocab_size) == (ROWS, 80 if reduced else ROWS)
    back = convert(llm, there, "paceline", tmp_path / "back")
    expected = drafts(llm, method, head)
    assert [drafts(llm, method, one) for one in (there, back)] == [expected] * 2


def sizes(folder: Path) -> set[int]:
    """What the files say of the vocabulary: their config, and the rows of every tensor that has some."""
    found = json.loads((folder / "config.json").read_text())
    found |= found.get("transformer_layer_config", {})
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: one for name, one in tensors.items() if not name.startswith("lstm.")}  # of gates
    counted = {len(one) for name, one in tensors.items() if len(one) > 192 or name in ("t2d", "d2t")}
    if "t2d" in tensors:
        assert len(tensors["t2d"]) == ROWS
        assert tensors["t2d"].nonzero().squeeze(1).tolist() == list(range(40, 120))
    return counted | ({found["vocab_size"]} if "vocab_size" in found else set())


def test_a_target_without_such_rows_gives_as_many_as_it_has_tokens(tmp_path: Path) -> None:
    llm = opened(write(tmp_path / "target", vocab_size=TOKENS))
    there = convert(llm, written_head(config("eagle3", TOKENS)), "speculators", tmp_path / "there")
    assert sizes(there) == {TOKENS}
