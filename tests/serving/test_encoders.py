"""Encoders beside the served model, on a tiny BERT: transformers' states, pooled as the checkpoint's files say."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import fake_hub
import pytest
import tiny_bert
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from paceline.errors import CheckpointError, PromptError, UnsupportedModelError
from paceline.serving import encoders
from paceline.serving.encoders import CrossEncoder, Encoder, PoolingSpec

TOLERANCE = 1e-5
TEXTS = ["word1", "word2 word3 word4", " ".join(f"word{i}" for i in range(30)), "word5 word1", "unknown word9"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert.write(tmp_path_factory.mktemp("encoder"))


@cache
@torch.inference_mode()
def states(folder: Path, text: str) -> torch.Tensor:
    """(t, d) of a text alone, without padding."""
    model, tokenizer = AutoModel.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    found: torch.Tensor = model.eval()(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return found


def pooled(encoder: Encoder, texts: Sequence[Any]) -> torch.Tensor:
    async def ask() -> torch.Tensor:
        return await encoder.pooled(await encoder.thread.tokens(texts, None))

    return asyncio.run(ask())


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


MEANS: dict[str, Any] = {
    "cls": lambda found: found[0],
    "mean": lambda found: found.mean(0),
    "max": lambda found: found.amax(0),
    "mean_sqrt_len": lambda found: found.sum(0) / len(found) ** 0.5,
    "weightedmean": lambda found: (
        (found * torch.arange(1.0, len(found) + 1)[:, None]).sum(0) / sum(range(1, len(found) + 1))
    ),
    "lasttoken": lambda found: found[-1],
}


@pytest.mark.parametrize("mode", MEANS)
@pytest.mark.parametrize("most", [4096, 40])
def test_embeddings_are_the_pooled_states_of_transformers(
    folder: Path, mode: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "MOST_PADDED", most)
    switch = next(key for key, name in encoders.SWITCHES.items() if name == mode)
    tiny_bert.write_modules(folder, normalize=True, **{switch: True})
    encoder = Encoder(str(folder))
    assert encoder.pooling == PoolingSpec((mode,), normalize=True)
    found = pooled(encoder, TEXTS)
    assert off(found, torch.stack([MEANS[mode](states(folder, text)) for text in TEXTS])) < TOLERANCE
    other = "cls" if mode != "cls" else "mean"
    assert off(found, torch.stack([MEANS[other](states(folder, text)) for text in TEXTS])) > 100 * TOLERANCE  # control
    assert off(pooled(encoder, TEXTS[::-1]).flip(0), found) < TOLERANCE
    encoder.thread.close()


def test_files_of_sentence_transformers(folder: Path, tmp_path: Path) -> None:
    plain = tiny_bert.write(tmp_path / "plain")
    assert PoolingSpec.read(plain) == PoolingSpec(("mean",), normalize=False)
    tiny_bert.write_modules(plain, normalize=False, pooling_mode="cls")
    assert PoolingSpec.read(plain) == PoolingSpec(("cls",), normalize=False)
    tiny_bert.write_modules(plain, normalize=False, pooling_mode_cls_token=True, pooling_mode_mean_tokens=True)
    encoder = Encoder(str(plain))
    one = states(plain, TEXTS[1])
    assert encoder.size == 48
    assert off(pooled(encoder, [TEXTS[1]])[0], torch.cat([one[0], one.mean(0)])) < TOLERANCE
    encoder.thread.close()
    tiny_bert.write_modules(plain, normalize=True, others=("Dense",), pooling_mode="cls")
    with pytest.raises(UnsupportedModelError, match="a module 'Dense'"):
        PoolingSpec.read(plain)
    tiny_bert.write_modules(plain, normalize=True, pooling_mode="attention")
    with pytest.raises(UnsupportedModelError, match="the pooling 'attention'"):
        PoolingSpec.read(plain)
    (plain / "1_Pooling" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        PoolingSpec.read(plain)
    (plain / "modules.json").write_text("{}")
    with pytest.raises(CheckpointError, match="must hold a list"):
        PoolingSpec.read(plain)


def test_an_encoder_of_the_hub_comes_with_its_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_bert.write(tmp_path / "encoder")
    tiny_bert.write_modules(folder, normalize=True, pooling_mode="lasttoken")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    (folder / "modeling.py").write_text("raise SystemExit")
    with fake_hub.serve("org/encoder", folder) as address:
        fake_hub.ask(monkeypatch, address, tmp_path / "cache")
        encoder = Encoder("org/encoder")
    encoder.thread.close()
    assert encoder.pooling == PoolingSpec(("lasttoken",), normalize=True)
    found = {str(file.relative_to(encoder.thread.folder)) for file in encoder.thread.folder.rglob("*")}
    assert "1_Pooling/config.json" in found
    assert not {"onnx", "modeling.py"} & found


def test_lengths_and_lower_case_are_as_the_files_say(tmp_path: Path) -> None:
    folder = tiny_bert.write(tmp_path)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 7, "do_lower_case": true}')
    encoder = Encoder(str(folder))
    long = " ".join(["word3"] * 20)

    async def cut(kept: int | None) -> list[int]:
        (fields,) = await encoder.thread.tokens([long], kept)
        found: list[int] = fields["input_ids"]
        return found

    assert encoder.thread.most_tokens == 7
    with pytest.raises(PromptError, match="22 tokens, and the model takes 7"):
        asyncio.run(cut(None))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert asyncio.run(cut(7)) == tokenizer(long, truncation=True, max_length=7)["input_ids"]
    assert off(pooled(encoder, ["WORD3"]), pooled(encoder, ["word3"])) == 0
    ids = tokenizer("word3")["input_ids"]
    assert off(pooled(encoder, [ids]), pooled(encoder, ["word3"])) < TOLERANCE
    for wrong in ([], [10**6]):
        with pytest.raises(PromptError):
            pooled(encoder, [wrong])
    encoder.thread.close()


@pytest.mark.parametrize("named", [None, "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"])
def test_scores_of_pairs_are_those_of_transformers(tmp_path: Path, named: str | None) -> None:
    changes = {} if named is None else {"sentence_transformers": {"activation_fn": named}}
    folder = tiny_bert.write(tmp_path, labels=1, **changes)
    judge = CrossEncoder(str(folder))
    pairs = [(TEXTS[0], text) for text in TEXTS]

    async def ask(given: list[tuple[str, str]]) -> list[float]:
        return await judge.scores(await judge.thread.tokens(given, None))

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        logits = torch.cat([model(**tokenizer(*pair, return_tensors="pt")).logits[:, 0] for pair in pairs])
    expected = logits if named is not None and "Identity" in named else logits.sigmoid()
    found = asyncio.run(ask(pairs))
    assert off(torch.tensor(found), expected) < TOLERANCE
    assert off(torch.tensor(found), expected.flip(0)) > 100 * TOLERANCE  # control
    assert asyncio.run(ask(pairs[::-1]))[::-1] == pytest.approx(found, abs=TOLERANCE)
    judge.thread.close()


def test_what_is_no_encoder_is_said(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="2 labels"):
        CrossEncoder(str(tiny_bert.write(tmp_path / "two", labels=2)))
    with pytest.raises(CheckpointError, match="lacks weights of AutoModelForSequenceClassification"):
        CrossEncoder(str(tiny_bert.write(tmp_path / "none", num_labels=1)))
    odd = tiny_bert.write(tmp_path / "odd", labels=1, sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    with pytest.raises(UnsupportedModelError, match=r"the activation 'torch\.nn\.Tanh'"):
        CrossEncoder(str(odd))
    pickled = tiny_bert.write(tmp_path / "pickled")
    torch.save({}, pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded as an encoder"):
        Encoder(str(pickled))
    with pytest.raises(CheckpointError, match="no folder"):
        Encoder(str(tmp_path / "nowhere"))
    foreign = tiny_bert.write(tmp_path / "foreign")
    (foreign / "modeling.py").write_text("raise SystemExit('code of a checkpoint has run')")
    (foreign / "config.json").write_text(
        '{"model_type": "x", "auto_map": {"AutoConfig": "modeling.C", "AutoModel": "modeling.M"}}'
    )
    with pytest.raises(CheckpointError, match="cannot be loaded as an encoder"):
        Encoder(str(foreign))
