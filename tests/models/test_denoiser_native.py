"""The native denoisers against a plain float64 transformer that reads the stored tensors itself."""

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.models import Call, load_denoiser
from paceline.models.runners import NativeDenoiser
from paceline.models.runners.denoiser import left_rows
from tests.diffusion.toys import t4
from tests.models.denoiser_reference import VOCAB, Reference
from tests.models.denoiser_references import FAMILIES

LENGTH = 11
FULL = ("llada", "dream", "llada_moe")


def text(seed: int = 0, length: int = LENGTH) -> np.ndarray:
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, VOCAB - 1, length)
    ids[rng.random(length) < 0.5] = VOCAB - 1
    return ids


def block_mask(slots: np.ndarray, keys: np.ndarray, length: int) -> np.ndarray:
    return keys[None] // length <= slots[:, None] // length


def seen_by(model: NativeDenoiser, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
    if model.block_length is None:
        return np.ones((slots.size, keys.size), bool)
    return block_mask(slots, keys, model.block_length)


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    finite = torch.isfinite(b)
    assert (torch.isfinite(a) == finite).all()
    return float((a[finite] - b[finite]).abs().max())


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[NativeDenoiser, Reference]:
    folder = tmp_path_factory.mktemp(request.param)
    reference = FAMILIES[request.param](folder)
    return load_denoiser(folder, dtype="float64", device="cpu"), reference


def test_families_say_what_they_are(pair: tuple[NativeDenoiser, Reference]) -> None:
    model, reference = pair
    assert (model.vocab_size, model.mask_token_id, model.eos_token_ids) == (VOCAB, VOCAB - 1, (3,))
    assert model.needs_left == reference.shifted
    assert (model.attention, model.block_length) == (("full", None) if model.block_length is None else ("block", 4))


def test_wanted_rows_are_those_of_a_full_pass(pair: tuple[NativeDenoiser, Reference]) -> None:
    model, _ = pair
    ids, slots, wanted = text(), np.arange(LENGTH), np.array([2, 7, 3, 0])
    whole, some = (model.forward([Call(ids, slots, wanted=rows)])[0] for rows in (None, wanted))
    assert some.shape == (4, VOCAB)
    assert far(some, whole[torch.from_numpy(wanted)]) < 1e-12
    assert far(some, whole[torch.from_numpy(wanted + 1)]) > 1e-3


def test_a_full_pass(pair: tuple[NativeDenoiser, Reference]) -> None:
    model, reference = pair
    ids, slots = text(), np.arange(LENGTH)
    [ours] = model.forward([Call(ids, slots)])
    assert far(ours, reference(ids, slots, seen_by(model, slots, slots))) < 1e-9
    assert float(ours[:, : VOCAB - 1].std()) > 0.5  # a mistake would show


def test_a_few_slots_against_stored_ones(pair: tuple[NativeDenoiser, Reference]) -> None:
    model, reference = pair
    if reference.shifted:
        reference.shifted = False  # rows of the slot at the left; compared by hand below
    ids, slots = text(1), np.arange(LENGTH)
    now, read = np.array([4, 5, 6]), np.array([0, 1, 2, 3, 8])
    cache = model.new_cache(LENGTH)
    model.forward([Call(ids, slots, cache, None, True)])
    reference(ids, slots, seen_by(model, slots, slots))
    past = [(k[read], v[read]) for k, v in reference.stored]
    later = text(2)[now]
    [ours] = model.forward([Call(later, now, cache, read)])
    theirs = reference(later, now, seen_by(model, now, np.concatenate([read, now])), past)
    if model.needs_left:
        assert bool(torch.isnan(ours[0]).all())
        ours, theirs = ours[1:], theirs[:-1]
        reference.shifted = True
    assert far(ours, theirs) < 1e-9


def test_copies_of_a_window_side_by_side(pair: tuple[NativeDenoiser, Reference]) -> None:
    """Two drafts of slots 4..6 in one pass, each seeing slots 0..3 and itself: as two passes of their own."""
    model, _ = pair
    prefix, window = np.arange(4), np.array([4, 5, 6])
    first, second = text(3, 7), text(4, 7)
    second[:4] = first[:4]
    slots = np.concatenate([prefix, window, window])
    group = np.array([0] * 4 + [1] * 3 + [2] * 3)
    seen = (group[None] == group[:, None]) | (group[None] == 0) & (group[:, None] > 0)
    [both] = model.forward([Call(np.concatenate([first, second[4:]]), slots, mask=seen)])
    for ids, rows in ((first, [4, 5, 6]), (second, [7, 8, 9])):
        own = (group[:7, None] >= group[None, :7]) & ((group[:7, None] > 0) | (group[None, :7] == 0))
        [alone] = model.forward([Call(ids, np.arange(7), mask=own)])
        assert far(both[rows], alone[4:]) < 1e-9


def test_the_reference_notices_a_wrong_mask(tmp_path: Path) -> None:
    reference = FAMILIES["sdar"](tmp_path)
    model = load_denoiser(tmp_path, dtype="float64", device="cpu")
    ids, slots = text(), np.arange(LENGTH)
    [ours] = model.forward([Call(ids, slots)])
    assert far(ours, reference(ids, slots, np.ones((LENGTH, LENGTH), bool))) > 1e-3


def test_shifted_rows_come_from_the_left() -> None:
    model = t4("shifted")
    ids = np.random.default_rng(0).integers(0, 20, 8)
    [whole] = model.forward([Call(ids, np.arange(8))])
    cache = model.new_cache(8)
    model.forward([Call(ids, np.arange(8), cache, None, True)])
    order = np.array([3, 5, 6])  # 5 has no neighbour in the call, 3 neither
    [part] = model.forward([Call(ids[order], order, cache, np.array([0, 1, 2, 4, 7]))])
    assert torch.isnan(part[:2]).all()
    assert far(part[2], whole[6]) < 1e-9
    assert list(left_rows(np.array([4, 5, 6, 5, 6, 9]))) == [-1, 0, 1, 0, 3, -1]


@pytest.mark.parametrize("kind", ["full", "shifted", "block"])
def test_a_canvas_does_not_depend_on_its_company(kind: str) -> None:
    model = t4(kind, dtype=torch.float32)  # type: ignore[arg-type]
    rng = np.random.default_rng(5)
    calls = [Call(rng.integers(0, 24, n), np.arange(n)) for n in (3, 17, 8, 40)]
    together = model.forward(calls)
    for call, ours in zip(calls, together, strict=True):
        [alone] = model.forward([call])
        assert torch.equal(alone, ours) or torch.equal(alone.nan_to_num(7), ours.nan_to_num(7))


@pytest.mark.parametrize("family", ["t4", "sdar", "sdar_moe", "llada2"])
def test_the_exact_block_cache_keeps_every_bit(family: str, tmp_path: Path) -> None:
    """In float32: a block against stored blocks gives the bits of the pass that computes them all."""
    if family == "t4":
        model = t4("block", dtype=torch.float32)
    else:
        FAMILIES[family](tmp_path)
        model = load_denoiser(tmp_path, dtype="float32", device="cpu")
    ids, slots = text(6, 30) % model.vocab_size, np.arange(30)
    cache = model.new_cache(30)
    for low in range(0, 30, 4):
        here = slots[low : low + 4]
        [whole] = model.forward([Call(ids[: low + 4], slots[: low + 4])])
        [block] = model.forward([Call(ids[here], here, cache, slots[:low])])
        assert torch.equal(whole[low:], block)
        model.forward([Call(ids[here], here, cache, slots[:low], True)])
    prefill = model.new_cache(30)
    model.forward([Call(ids[:20], slots[:20], prefill, None, True)])
    assert torch.equal(prefill.keys[:, :20], cache.keys[:, :20])


def test_full_attention_has_no_exact_cache() -> None:
    """The control of the test above: with every slot seen by every other, stored states go stale."""
    model = t4("full", dtype=torch.float32)
    ids, slots = np.arange(8) % 20, np.arange(8)
    cache = model.new_cache(8)
    model.forward([Call(ids[:4], slots[:4], cache, None, True)])
    [whole] = model.forward([Call(ids, slots)])
    [block] = model.forward([Call(ids[4:], slots[4:], cache, slots[:4])])
    assert float((whole[4:] - block)[:, :20].abs().max()) > 1e-3


def test_the_cache_forgets() -> None:
    model = t4()
    cache = model.new_cache(6)
    model.forward([Call(np.arange(5), np.arange(5), cache, None, True)])
    assert list(cache.stored) == [0, 1, 2, 3, 4]
    cache.truncate(2)
    assert list(cache.stored) == [0, 1]
    with pytest.raises(AssertionError, match="only stored"):
        model.forward([Call(np.array([5]), np.array([5]), cache, np.array([2]))])
    cache.clear()
    assert cache.stored.size == 0


def test_stored_slots_are_overwritten() -> None:
    model = t4()
    cache, other = model.new_cache(6), model.new_cache(6)
    slots = np.arange(6)
    model.forward([Call(np.arange(6), slots, cache, None, True)])
    model.forward([Call(np.array([9, 10]), np.array([2, 3]), cache, np.array([0, 1, 4, 5]), True)])
    model.forward([Call(np.arange(6), slots, other, None, True)])
    assert not torch.equal(cache.keys[:, 2], other.keys[:, 2])
    assert torch.equal(cache.keys[:, [0, 1, 4, 5]], other.keys[:, [0, 1, 4, 5]])


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_bfloat16_is_near_float32(device: str, tmp_path: Path) -> None:
    FAMILIES["llada"](tmp_path)
    exact, coarse = (load_denoiser(tmp_path, dtype=dtype, device=device) for dtype in ("float32", "bfloat16"))
    call = Call(text(), np.arange(LENGTH))
    a, b = (model.forward([call])[0] for model in (exact, coarse))
    assert b.dtype is torch.float32
    assert 0 < far(a, b) < 0.35
