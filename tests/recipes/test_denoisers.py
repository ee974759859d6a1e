"""The recipe of the bundled denoisers: masks, losses, layouts, and every stage for a few steps on a tiny corpus made
here.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from lab.diffusion import NAMES
from paceline.checkpoints import GenerationDefaults, Tokenizer
from paceline.models import Call, load_denoiser
from recipes.bundled_diffusion import card, losses, model, train, write
from recipes.common.options import BUNDLED
from tests.recipes.test_pair import tiny_texts

TINY = {"width": 16, "layers": 2, "heads": 4, "mlp": 24}


def net_of(kind: str, seed: int = 0, **changes: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    net = model.Net(model.make_spec(kind, **(TINY | {"vocab_size": 20} | changes)))
    with torch.no_grad():
        for weight in net.parameters():
            weight.copy_(weight * 2 if weight.ndim > 1 else 1 + 0.3 * torch.randn_like(weight))
    return net


@pytest.mark.parametrize("kind", ["plain", "block"])
def test_what_learns_is_what_runs(kind: str) -> None:
    """The trainable form and the native runner give the same logits; under the block mask of a plain pass, too."""
    net = net_of(kind).double()
    ids, slots = torch.randint(0, 20, (1, 13)), torch.arange(13)[None]
    blocks = slots // 8
    seen = (blocks[:, None, :] <= blocks[:, :, None])[:, None] if kind == "block" else None
    with torch.no_grad():
        theirs = net(ids, slots, seen, torch.ones_like(ids, dtype=torch.bool))
    [ours] = net.denoiser(torch.float64).forward([Call(ids[0].numpy(), slots[0].numpy())])
    assert torch.allclose(ours[:, :-1], theirs[:, :-1], atol=1e-5)  # angles are float32 where a model learns


def two_halves_pass(net: torch.nn.Module, clean: np.ndarray, noisy: np.ndarray, length: int) -> torch.Tensor:
    """(n, v) logits of the noisy half of one pass over both."""
    n = clean.size
    ids = torch.from_numpy(np.concatenate([clean, noisy]))[None]
    slots = torch.arange(n).repeat(2)[None]
    is_noisy = torch.arange(2 * n)[None] >= n
    seen = losses.two_halves(slots, torch.ones_like(is_noisy), is_noisy, length)
    with torch.no_grad():
        return net(ids, slots, seen, is_noisy)


def cached_blocks(net: torch.nn.Module, clean: np.ndarray, noisy: np.ndarray, length: int) -> torch.Tensor:
    """(n, v) logits of each noisy block alone, against stored clean blocks before it."""
    denoiser = net.denoiser(torch.float64)
    cache, rows = denoiser.new_cache(clean.size), []
    for low in range(0, clean.size, length):
        here = np.arange(low, min(low + length, clean.size))
        rows += denoiser.forward([Call(noisy[here], here, cache, np.arange(low))])
        denoiser.forward([Call(clean[here], here, cache, np.arange(low), True)])
    return torch.cat(rows)


def test_one_pass_over_both_halves_is_every_block_alone() -> None:
    """BD3-LM's check (a): the mask over [clean ; noisy] gives block b the logits of a run with the clean prefix
    stored.
    """
    net = net_of("block").double()
    rng = np.random.default_rng(0)
    clean = rng.integers(0, 19, 21)
    noisy = np.where(rng.random(21) < 0.5, 19, clean)
    ours, theirs = two_halves_pass(net, clean, noisy, 8), cached_blocks(net, clean, noisy, 8)
    assert torch.allclose(ours[:, :-1], theirs[:, :-1], atol=1e-5)
    leaking = two_halves_pass(net, clean, noisy, 16)  # noisy blocks of 16 see what blocks of 8 do not
    assert not torch.allclose(leaking[:, :-1], theirs[:, :-1], atol=1e-2)


def test_blocks_of_one_slot_are_a_causal_model() -> None:
    """BD3-LM's check (b): the prediction of a masked slot depends on the slots before it alone."""
    net = net_of("block").double()
    clean = np.arange(9) % 19
    other = clean.copy()
    other[5:] = 7
    mask = np.full(9, 19)
    first, second = (two_halves_pass(net, text, mask, 1) for text in (clean, other))
    assert torch.allclose(first[:6], second[:6], atol=1e-12)
    assert not torch.allclose(first[6:], second[6:], atol=1e-3)


@pytest.mark.parametrize("kind", ["plain", "block"])
def test_the_loss_of_a_uniform_model_is_log_v(kind: str) -> None:
    """Card MDM, check (d), whatever is masked."""
    net = net_of(kind)
    with torch.no_grad():
        net.head.weight.zero_()
    ids = torch.randint(0, 19, (6, 20))
    batch = losses.Batch(ids, torch.tensor([3, 4, 5, 6, 7, 0]), torch.tensor([20, 12, 18, 7, 20, 19]))
    loss = losses.plain_loss if kind == "plain" else losses.block_loss
    for seed in range(3):
        value = loss(net, batch, torch.Generator().manual_seed(seed))
        assert value.item() == pytest.approx(np.log(20), rel=1e-5)


def test_masks_are_uniform_in_number_and_never_in_the_prompt() -> None:
    free = torch.zeros(3000, 6, dtype=torch.bool)
    free[:, 2:] = True
    group = torch.tensor([0, 0, 0, 1, 1, 1]).expand(3000, 6)
    masked, weight = losses.draw_masks(free, group, 2, torch.Generator().manual_seed(0))
    assert not masked[:, :2].any()
    assert bool((masked[:, 2]).all())  # the only free slot of its group
    counts = masked[:, 3:].sum(1)
    assert set(counts.tolist()) == {1, 2, 3}
    assert all(abs(int((counts == k).sum()) - 1000) < 120 for k in (1, 2, 3))
    assert torch.allclose(weight.sum(1), torch.tensor(4.0))
    each = masked[:, 3:].float().mean(0)
    assert bool(((each - 2 / 3).abs() < 0.04).all())


def test_every_name_and_word_is_one_token() -> None:
    tokenizer = Tokenizer.load(BUNDLED / "target")
    assert all(len(tokenizer.encode(f" {name}")) == 1 for name in NAMES)


def corpus(folder: Path) -> Path:
    folder.mkdir()
    texts = tiny_texts(lambda user, answer: f"<|user|>\n{user}\n<|assistant|>\n{answer}\n<|end|>")
    rows = [{"source": "math", "text": text, "heldout": i % 8 == 0} for i, text in enumerate(texts["math"])]
    (folder / "documents.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return folder


def test_all_stages(tmp_path: Path) -> None:
    """Train, go on where a run was cut short, start a block-causal model from the plain one, write both, load them,
    decode.
    """
    texts = corpus(tmp_path / "corpus")
    small = ["--corpus", str(texts), "--width", "16", "--layers", "1", "--mlp", "16", "--items", "12", "--batch", "4"]
    small += ["--most-steps", "3", "--count", "1", "--exact", "remove_index"]
    train.main(["plain", "--out", str(tmp_path / "plain"), *small])
    train.main(["plain", "--out", str(tmp_path / "plain"), *small, "--most-steps", "5"])
    state = tmp_path / "plain" / "state.safetensors"
    train.main(["block", "--out", str(tmp_path / "block"), "--start", str(state), *small])
    for kind in ("plain", "block"):
        history = json.loads((tmp_path / kind / "history.json").read_text())
        assert history[-1]["step"] == (5 if kind == "plain" else 3)
        assert set(history[-1]["exact"]) == {"remove_index"}
        folder = tmp_path / f"{kind}-model"
        write.main([str(tmp_path / kind / "state.safetensors"), str(folder)])
        card.main([str(folder), "--history", str(tmp_path / kind / "history.json"), "--count", "1", "--tasks", "copy"])
        assert "| copy | one | 0% |" in (folder / "README.md").read_text()
        assert GenerationDefaults.load(folder) == GenerationDefaults.load(BUNDLED / "diffusion")
        denoiser = load_denoiser(folder, dtype="float32")
        assert denoiser.attention == ("full" if kind == "plain" else "block")
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.encode("<|mask|>") == [denoiser.mask_token_id]
        net = model.read_state(tmp_path / kind / "state.safetensors").to(torch.bfloat16)
        call = Call(np.arange(9) + 5, np.arange(9))
        assert torch.allclose(denoiser.forward([call])[0], net.denoiser().forward([call])[0])
