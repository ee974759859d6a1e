"""Codebooks: what they replace, that training makes them cost less, and that a forced code changes what follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline import LLM
from paceline.bench import BUNDLED_TARGET, bundled_prompts
from paceline.cli.main import main
from paceline.codebooks import Books, CodebookModel
from paceline.codebooks.books import Codebook
from paceline.errors import CapabilityError, CheckpointError, ConfigError
from paceline.training import Fitting, TrainConfig, train, training_config

SIZE, CODES = 32, 2
STEPS = 25


# ------------------------------------------------------------------------------------------------ one codebook


def book(codes: torch.Tensor, firing: int) -> Codebook:
    made = Codebook(len(codes), codes.shape[1], firing)
    with torch.no_grad():
        made.take(codes)
    return made.eval()


def test_a_book_of_the_states_changes_nothing() -> None:
    states = torch.randn(7, 5)
    assert torch.allclose(book(states, 1)(states), states, atol=1e-6)
    assert not torch.allclose(book(states[1:], 1)(states), states, atol=1e-2)


def test_all_codes_make_one_vector() -> None:
    codes, states = torch.randn(6, 5), torch.randn(9, 5)
    found = book(codes, 6)(states)
    assert torch.allclose(found, codes.mean(0).expand(9, 5), atol=1e-6)
    assert not torch.allclose(book(codes, 5)(states), codes.mean(0).expand(9, 5), atol=1e-2)


def test_the_nearest_codes_fire_and_have_the_gradient() -> None:
    codes, states = torch.randn(12, 4), torch.randn(3, 4, requires_grad=True)
    made = book(codes, 2)
    out = made(states)
    expected = torch.cdist(states.detach(), codes).topk(2, largest=False).indices
    assert torch.equal(made.ids, expected)
    assert torch.allclose(out, codes[expected].mean(1), atol=1e-6)
    weights = torch.randn(3, 4)
    (out * weights).sum().backward()
    assert states.grad is not None
    assert torch.equal(states.grad, weights)
    assert made.units.grad is not None
    assert set(made.units.grad.abs().sum(1).nonzero().flatten().tolist()) == set(expected.flatten().tolist())


def test_codes_that_never_fire_are_moved() -> None:
    codes = torch.cat([torch.randn(4, 3), torch.full((2, 3), 1e3)])
    made = book(codes, 1).train()
    made(codes[:4])
    assert made.revive(torch.Generator().manual_seed(0)) == 2
    assert made.codes.abs().max() < 10
    made(codes[:4])
    made.revive(torch.Generator().manual_seed(0))
    assert torch.allclose(made.codes[:4], codes[:4])


# ------------------------------------------------------------------------------------------------ a trained model


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": one.prompt[:200]}) + "\n" for one in bundled_prompts()))
    return path


def config(data: Path, steps: int) -> TrainConfig:
    fitting = Fitting(
        steps=steps, batch_rows=2, row_tokens=64, eval_steps=steps, warmup_steps=5, bf16=False, learning_rate=2e-4
    )
    return training_config(
        "codebooks",
        data=(data,),
        texts=True,
        held_out_share=0.1,
        codebook_size=SIZE,
        codes=CODES,
        fitting=fitting,
    )


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(dtype="float32", speculative_config=None)


@pytest.fixture(scope="module")
def untrained(llm: LLM, data: Path, tmp_path_factory: pytest.TempPathFactory) -> CodebookModel:
    """Clusters of the model's states, after one step."""
    return CodebookModel.load(train(llm, config(data, 1), tmp_path_factory.mktemp("untrained")).folder)


@pytest.fixture(scope="module")
def folder(llm: LLM, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(llm, config(data, STEPS), tmp_path_factory.mktemp("trained")).folder


@pytest.fixture(scope="module")
def model(folder: Path) -> CodebookModel:
    return CodebookModel.load(folder)


def loss(model: CodebookModel, data: Path) -> float:
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    each = [model.loss(model.tokenizer.encode(text)) for text in texts]
    return sum(each) / len(each)


def test_training_lowers_what_codes_cost(untrained: CodebookModel, model: CodebookModel, data: Path) -> None:
    with untrained.books.off():
        plain = loss(untrained, data)
    before, after = loss(untrained, data) - plain, loss(model, data) - plain
    assert before > 1.0
    assert after < 0.8 * before


def test_without_books_it_is_a_model_like_any_other(folder: Path, model: CodebookModel) -> None:
    ids = model.tokenizer.encode(bundled_prompts()[0].prompt)[:40]
    own = LLM(str(folder), dtype="float32", speculative_config=None).runner
    cache = own.open()
    expected = own.extend([cache], [ids], taps=(own.info.num_layers,))
    with model.books.off():
        found = model.logits(ids)
    states = expected.taps[own.info.num_layers]
    assert torch.allclose(found, own.head(states, norm=False).float(), atol=1e-3)
    assert not torch.allclose(model.logits(ids), found, atol=1e-1)


def test_a_forced_code_changes_only_what_follows(model: CodebookModel) -> None:
    ids = model.tokenizer.encode(bundled_prompts()[0].prompt)[:20]
    plain = model.logits(ids)
    assert torch.allclose(model.logits(ids, start=12), plain, atol=1e-4)
    forced = model.logits(ids, {"2.mlp": [5]}, start=12)
    assert torch.allclose(forced[:12], plain[:12], atol=1e-4)
    assert (forced[12:] - plain[12:]).abs().amax(-1).min() > 1e-2
    usual = {name: book.ids for name, book in model.books.items()}
    assert usual["2.mlp"][:, 0].tolist() == [5] * 8


def test_generation_with_codes_forced(model: CodebookModel) -> None:
    prompt = bundled_prompts()[0].prompt
    plain = model.generate(prompt, max_tokens=12)
    assert model.generate(prompt, max_tokens=12, force={}) == plain
    ids = model.tokenizer.encode(prompt)
    assert model.tokenizer.decode([int(model.logits(ids)[-1].argmax())]) == model.generate(prompt, max_tokens=1)
    texts = {model.generate(prompt, max_tokens=12, force={"4.mlp": [code, code]}) for code in range(6)}
    assert len(texts - {plain}) > 1
    made = list[int]()
    for _ in range(4):  # from the prompt's last token on, and not before
        made.append(int(model.logits([*ids, *made], {"4.mlp": [3, 3]}, start=len(ids) - 1)[-1].argmax()))
    assert model.generate(prompt, max_tokens=4, force={"4.mlp": [3, 3]}) == model.tokenizer.decode(made)
    drawn = [model.generate(prompt, max_tokens=12, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_fires_is_listed(folder: Path, model: CodebookModel, capsys: pytest.CaptureFixture[str]) -> None:
    text = "def f(x):\n    return x"
    found = model.firing(text)
    assert "".join(found.tokens) == text
    assert all(len(ids) == CODES for rows in found.codes.values() for ids in rows)
    assert main(["codebooks", "show", str(folder), text, "--json", "--book", "0.mlp"]) == 0
    assert json.loads(capsys.readouterr().out) == {"tokens": found.tokens, "codes": {"0.mlp": found.codes["0.mlp"]}}
    assert main(["codebooks", "show", str(folder), text, "--book", "0.mlp", "--most", "1"]) == 0
    name, line = capsys.readouterr().out.splitlines()
    count = [sum(code in ids for ids in found.codes["0.mlp"]) for code in range(SIZE)]
    assert name == "0.mlp"
    assert line.split()[:2] == [str(count.index(max(count))), str(max(count))]
    assert main(["codebooks", "generate", str(folder), text, "--max-tokens", "5", "--force", "4.mlp=3"]) == 0
    assert capsys.readouterr().out == model.generate(text, max_tokens=5, force={"4.mlp": [3]}) + "\n"


def test_bad_input_is_named(
    folder: Path, model: CodebookModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for force, why in [
        ({"9.mlp": [0]}, "force must be one of"),
        ({"0.mlp": [SIZE]}, f"0..{SIZE - 1}"),
        ({"0.mlp": [1] * 3}, "1 to 2 codes"),
    ]:
        with pytest.raises(ConfigError, match=why):
            model.generate("x", force=force)
    with pytest.raises(CheckpointError, match="codebooks"):
        CodebookModel.load(BUNDLED_TARGET)
    with pytest.raises(ConfigError, match="codes"):
        training_config("codebooks", data=(tmp_path,), texts=True, codebook_size=4, codes=5)
    assert main(["codebooks", "generate", str(folder), "x", "--force", "0.mlp"]) == 2
    assert "--force must be as 3.mlp=17" in capsys.readouterr().err
    assert main(["codebooks", "show", str(folder), "x", "--book", "99.mlp"]) == 2
    assert "--book must be one of 0.attention to 5.mlp" in capsys.readouterr().err
    assert main(["codebooks", "show", str(tmp_path), "x"]) == 2


def test_layers_without_these_modules_are_rejected() -> None:
    with pytest.raises(CapabilityError, match="codebooks need layers with self_attn"):
        Books(nn.ModuleList([nn.Linear(3, 3)]), 3, size=4, firing=1, sites=("attention",))
