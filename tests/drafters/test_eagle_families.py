"""An EAGLE head drafts for every native family: its embeddings and head are the family's own, with their factors."""

from __future__ import annotations

from pathlib import Path

import eagle_reference as reference
import pytest
import torch
from models import checkpoints

from benchmarks.stand_ins import head_weights, written_head
from paceline.drafters import Context, DrafterArgs
from paceline.drafters.heads.eagle import EagleDrafter
from paceline.models import load_runner
from paceline.models.heads import HeadConfig
from paceline.tree import EMPTY_TREE, Budget

TEXT = [3 + (11 * i) % 90 for i in range(20)]
FAMILIES = {case.model_type: name for name, case in reversed(checkpoints.CASES.items())}
LAYER = {"num_attention_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES)
def test_it_drafts_what_the_targets_head_makes_of_a_plain_pass(name: str, tmp_path: Path) -> None:
    target = load_runner(str(checkpoints.write(name, "new", tmp_path)), dtype="float32")
    info = target.info
    config = HeadConfig(
        method="eagle", hidden_size=info.hidden_size, vocab_size=info.vocab_size, draft_vocab_size=50, layer=LAYER
    )
    weights = head_weights(config) | {"draft_to_target": torch.arange(50) * 2 + 1}
    args = DrafterArgs(vocab_size=info.vocab_size, index=0, max_context=64, target=target)
    drafter = EagleDrafter(args, model=written_head(config, weights))
    cache = target.open()
    taps = target.extend([cache], [TEXT[:-1]], taps=drafter.taps).taps
    (state,) = drafter.begin([Context("a", list(TEXT), 20, temperature=1.0, taps=taps)])
    (tree,) = drafter.propose([state], [Budget(3, 3)], [EMPTY_TREE])
    embedded, (states,) = target.embed(TEXT[1:]), taps.values()  # type: ignore[attr-defined]  # of native runners
    _, made = reference.forward(config, weights, torch.zeros(1, info.hidden_size), embedded, states)
    want = target.head(made[-1:], norm=False)[0, weights["draft_to_target"]]  # type: ignore[attr-defined]
    found = tree.trials_of(-1)[0].row[weights["draft_to_target"]]
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-5)
    capped = target.spec.logit_softcap is not None  # type: ignore[attr-defined]  # the head's own logits are not
    assert torch.equal(found.argsort(), want.argsort()) if capped else torch.allclose(found, want.softmax(0), atol=1e-4)
    assert not torch.allclose(found, want.roll(1).softmax(0), atol=1e-4)
