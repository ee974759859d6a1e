"""Models in Marian's own files: read to the byte, and equal to Marian's formulas written down a second time
(tests/marian_reference.py), plain, in chunks, on chains and trees, after forks and side by side.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_marian as tiny
import torch
from marian_reference import MarianReference

from paceline.checkpoints import MarianCheckpoint, marian_path, read_marian
from paceline.errors import CheckpointError, UnsupportedModelError
from paceline.models import Inputs, load_runner
from paceline.models.passes.mixer_tables import MixerTables
from paceline.models.state import recurrent
from paceline.models.state.recurrence import state_after
from paceline.tree import TokenTree

RECURRENT = ("rnn", "compiled rnn")
KINDS = (*RECURRENT, "self-attention")
SOURCE = [5, 17, 30, 80, 41, 9, 0]
TEXT = [0, 10, 20, 30, 40, 50, 61, 62, 63, 64, 65, 66]
"""The first is no token for Marian, whose texts begin with nothing."""

FILLED: dict[str, Any] = {"dim_emb": 64, "transformer_heads": 2, "transformer_dim_ffn": 96}
"""Sizes that fill vectors, so that compiled passes take them."""

CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}


# ------------------------------------------------------------------------------------------------ files


def test_tensors_are_those_of_the_file(tmp_path: Path) -> None:
    """Byte by byte, of a matrix that is not square: turned as it lies in the file, and embeddings as they are."""
    path = tiny.make(tmp_path)
    stored, read = tiny.items(tiny.SIZES, rounded=True), MarianCheckpoint(path)
    for name, ours, turned in (
        ("encoder_l2_ffn_W1", "encoder.layers.1.mlp.up_proj.weight", True),
        ("decoder_l1_ffn_W2", "layers.0.mlp.down_proj.weight", True),
        ("Wemb", "embed_tokens.weight", False),
    ):
        _, (rows, columns), data = stored[name]
        (multiplier,) = struct.unpack_from("<f", data, rows * columns)
        found = read.tensor(ours)
        assert found.shape == read.entries[ours].shape == ((columns, rows) if turned else (rows, columns))
        for place, byte in enumerate(struct.unpack_from(f"<{rows * columns}b", data)):
            row, column = divmod(place, found.shape[1])
            assert found[row, column].item() == np.float32(byte) / np.float32(multiplier)
    assert read.tensor("layers.1.cross_attn_layernorm.bias").tolist() == list(
        struct.unpack("<32f", stored["decoder_l2_context_Wo_ln_bias"][2])
    )


def test_matrices_in_float32_are_turned_too(tmp_path: Path) -> None:
    path = tiny.make(tmp_path, rounded=False)
    kept = np.frombuffer(tiny.items(tiny.SIZES, rounded=False)["decoder_l1_ffn_W1"][2], "<f4").reshape(32, 48)
    assert torch.equal(MarianCheckpoint(path).tensor("layers.0.mlp.up_proj.weight"), torch.from_numpy(kept.T.copy()))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data[:-300], "cut off or none of Marian's files .* ends before"),
        (lambda data: data[:200], "cut off or none of Marian's files"),
        (lambda data: data[:8] + struct.pack("<Q", 2**40) + data[16:], "cut off or none of Marian's files"),
        (lambda data: data[:32] + struct.pack("<Q", 2**40) + data[40:], "cut off or none of Marian's files"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, change: Any, says: str) -> None:
    path = tiny.make(tmp_path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CheckpointError, match=says):
        load_runner(tmp_path)


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    for setting, says in (
        ({"transformer_decoder_autoreg": "average-attention"}, "autoreg='average-attention' is not implemented"),
        ({"dec_cell": "gru"}, "dec-cell='gru' is not implemented"),
        ({"transformer_preprocess": "n"}, "transformer-preprocess='n' is not implemented"),
        ({"dim_vocabs": [96, 90]}, r"dim-vocabs=\[96, 90\] is not implemented"),
    ):
        tiny.make(tmp_path, **setting)
        with pytest.raises(UnsupportedModelError, match=says):
            load_runner(tmp_path)
    path = tmp_path / "model.tiny.bin"
    items = tiny.items(tiny.SIZES, rounded=True)
    path.write_bytes(tiny.packed({name: item for name, item in items.items() if not name.startswith("special")}))
    with pytest.raises(CheckpointError, match=r"lacks special:model\.yml"):
        load_runner(tmp_path)
    path.write_bytes(tiny.packed(items | {"decoder_l1_rnn_bf": (0x402, (1, 32), bytes(64))}))
    with pytest.raises(UnsupportedModelError, match="decoder_l1_rnn_bf has the type 0x402"):
        load_runner(tmp_path)
    path.write_bytes(tiny.packed(items | {"more": tiny.float_item(np.ones((1, 2)))}))
    with pytest.raises(CheckpointError, match="holds more which its architecture does not have"):
        load_runner(tmp_path)


def test_one_file_of_a_folder_is_meant(tmp_path: Path) -> None:
    path = tiny.make(tmp_path)
    (tmp_path / "lex.bin").write_bytes(struct.pack("<2Q", 0xF11A48D5013417F5, 0))
    assert marian_path(tmp_path) == path
    path.with_name("other.bin").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"several of Marian's files \(model\.tiny\.bin, other\.bin\)"):
        load_runner(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert marian_path(tmp_path) is None


# ------------------------------------------------------------------------------------------------ logits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Kind of decoder -> the reference and our runner, each made once."""
    known: dict[str, tuple[Any, Any]] = {}

    def of(kind: str) -> tuple[Any, Any]:
        if kind not in known:
            folder = tmp_path_factory.mktemp("marian")
            sizes = FILLED if kind == "compiled rnn" else {}
            path = tiny.make(folder, transformer_decoder_autoreg=kind.removeprefix("compiled "), **sizes)
            runner: Any = load_runner(folder)
            assert runner.info.passes == ("compiled" if sizes else "operators")
            known[kind] = MarianReference(read_marian(path)), runner
        return known[kind]

    return of


def opened(runner: Any, source: list[int] = SOURCE) -> Any:
    cache = runner.open(len(TEXT), Inputs(encoder_tokens=source))
    runner.encode([cache])
    return cache


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_marians(kind: str, made: Any) -> None:
    """In chunks and along a chain; the source counts, and so does where a token stands."""
    reference, runner = made(kind)
    cache = opened(runner)
    chunks = [runner.extend([cache], [part], all_logits=True).logits for part in (TEXT[:5], TEXT[5:7])]
    chain = runner.score([cache], [TEXT[7]], [TokenTree.chain(TEXT[8:])]).logits
    want = reference.text_logits(SOURCE, TEXT[1:])
    torch.testing.assert_close(torch.cat([*chunks, chain]), want, **CLOSE)
    assert (reference.text_logits([7, *SOURCE], TEXT[1:]) - want).abs().max() > 0.01
    assert (reference.text_logits(SOURCE, [TEXT[2], TEXT[1], *TEXT[3:]]) - want)[-1].abs().max() > 0.001


def test_compiled_passes_begin_with_nothing_too(tmp_path: Path) -> None:
    """Of decoders that attend to themselves."""
    reference = MarianReference(
        read_marian(tiny.make(tmp_path, transformer_decoder_autoreg="self-attention", **FILLED))
    )
    runner: Any = load_runner(tmp_path)
    assert runner.info.passes == "compiled"
    cache = opened(runner)
    chunk = runner.extend([cache], [TEXT[:5]], all_logits=True).logits
    chain = runner.score([cache], [TEXT[5]], [TokenTree.chain(TEXT[6:])]).logits
    torch.testing.assert_close(torch.cat([chunk, chain]), reference.text_logits(SOURCE, TEXT[1:]), **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_begins_with_nothing(kind: str, made: Any) -> None:
    """Whatever token stands first; behind it, it counts."""
    _, runner = made(kind)
    logits = [runner.extend([opened(runner)], [tokens], all_logits=True).logits for tokens in (TEXT, [9, *TEXT[1:]])]
    assert torch.equal(*logits)
    other = runner.extend([opened(runner)], [[TEXT[0], 9, *TEXT[2:]]], all_logits=True).logits
    assert not torch.allclose(other[1], logits[0][1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_of_a_tree_sees_its_path_alone(kind: str, made: Any) -> None:
    """Accepted nodes are committed, forks part, and each goes on from its own text."""
    reference, runner = made(kind)
    cache = opened(runner)
    runner.extend([cache], [TEXT[:4]])
    tree = TokenTree.build([7, 8, 9, 11, 12], [-1, -1, 0, 1, 3])
    for _ in range(2):  # what was scored and not accepted leaves nothing behind
        logits = runner.score([cache], [TEXT[4]], [tree]).logits
        for node, path in {0: [7], 1: [8], 2: [7, 9], 3: [8, 11], 4: [8, 11, 12]}.items():
            want = reference.text_logits(SOURCE, [*TEXT[1:5], *path])[-1]
            torch.testing.assert_close(logits[1 + node], want, **CLOSE)
    runner.commit([cache], [[1, 3]])
    fork = runner.fork(cache)
    for one, more in ((cache, 33), (fork, 44)):
        got = runner.score([one], [more], [TokenTree.chain([5])]).logits
        torch.testing.assert_close(got, reference.text_logits(SOURCE, [*TEXT[1:5], 8, 11, more, 5])[-2:], **CLOSE)
        runner.commit([one], [[]])
    got = runner.score([cache], [6], [TokenTree.chain([])]).logits
    torch.testing.assert_close(got, reference.text_logits(SOURCE, [*TEXT[1:5], 8, 11, 33, 6])[-1:], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_nothing(kind: str, made: Any) -> None:
    """Sources and texts of mixed lengths side by side, with trees of their own."""
    reference, runner = made(kind)
    sources, texts = [SOURCE, SOURCE[3:], [33, *SOURCE, 0]], [TEXT[:4], TEXT[:9], TEXT[:6]]
    caches = [runner.open(0, Inputs(encoder_tokens=source)) for source in sources]
    runner.encode(caches)
    scores = runner.extend(caches, texts, all_logits=True)
    trees = [TokenTree.build([7, 8, 9], [-1, -1, 1]), TokenTree.chain([]), TokenTree.chain([5, 6])]
    paths = [[8, 9], [], [5]]
    for i, (source, text) in enumerate(zip(sources, texts, strict=True)):
        torch.testing.assert_close(scores.of(i), reference.text_logits(source, text[1:]), **CLOSE)
    runner.score(caches, [3, 3, 3], trees)
    runner.commit(caches, [[1, 2], [], [0]])
    scores = runner.score(caches, [4, 4, 4], [TokenTree.chain([])] * 3)
    for i, (source, text, path) in enumerate(zip(sources, texts, paths, strict=True)):
        want = reference.text_logits(source, [*text[1:], 3, *path, 4])[-1:]
        torch.testing.assert_close(scores.of(i), want, **CLOSE)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_commit_of_other_nodes_is_seen(kind: str, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of what is compared here: without its last node, what a path leaves behind gives other logits."""
    reference, runner = made(kind)

    def commit() -> torch.Tensor:
        cache = opened(runner)
        runner.extend([cache], [TEXT[:4]])
        runner.score([cache], [TEXT[4]], [TokenTree.build([7, 8, 11], [-1, -1, 1])])
        runner.commit([cache], [[1, 2]])
        logits: torch.Tensor = runner.score([cache], [33], [TokenTree.chain([])]).logits
        return logits

    want = reference.text_logits(SOURCE, [*TEXT[1:5], 8, 11, 33])[-1:]
    torch.testing.assert_close(commit(), want, **CLOSE)
    monkeypatch.setattr(recurrent, "state_after", lambda state, path: state_after(state, path.first(1)))
    settle = MixerTables.settle
    monkeypatch.setattr(
        MixerTables, "settle", lambda self, states, nodes, *rest: settle(self, states, nodes[:1], *rest)
    )
    assert (commit() - want).abs().max() > 10 * CLOSE["atol"]


def test_swapped_gates_are_seen(made: Any) -> None:
    """The gate weighs the old state, and what it leaves weighs the new input."""
    reference, runner = made("rnn")
    swapped = MarianReference(reference.file, swapped=True)
    got = runner.extend([opened(runner)], [TEXT], all_logits=True).logits
    assert (got - swapped.text_logits(SOURCE, TEXT[1:])).abs().max() > 0.1


@pytest.mark.parametrize("kind", RECURRENT)
def test_what_heads_ask_of_a_source_moves_the_state_on(kind: str, made: Any) -> None:
    reference, runner = made(kind)
    cache = opened(runner)
    weights = runner.attention_to_source(cache, TEXT[:5], [(0, 1), (1, 0)])
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5))
    got = runner.extend([cache], [TEXT[5:]], all_logits=True).logits
    torch.testing.assert_close(got, reference.text_logits(SOURCE, TEXT[1:])[5:], **CLOSE)


@pytest.mark.parametrize("kind", RECURRENT)
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_narrower_weights_are_near(kind: str, options: dict[str, str], made: Any) -> None:
    reference, runner = made(kind)
    narrow: Any = load_runner(runner.info.name, **options)
    want = reference.text_logits(SOURCE, TEXT[1:])
    got = narrow.extend([opened(narrow)], [TEXT], all_logits=True).logits
    assert 1e-5 < (got.float() - want).abs().max() / want.std() < 0.1


def test_what_a_state_cannot_do_is_refused(made: Any) -> None:
    """It does not go back, and is no beginning for other texts; a decoder that attends to itself can do both."""
    for kind, able in (("rnn", False), ("compiled rnn", False), ("self-attention", True)):
        _, runner = made(kind)
        assert (runner.capabilities.truncate, runner.memory.can_share_prefixes) == (able, able)
