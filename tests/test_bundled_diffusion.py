"""The diffusion models that ship with the package: they load, and do the tasks that their cards say they do."""

import re

import pytest

from lab.diffusion import items
from paceline import LLM
from paceline.checkpoints import GenerationDefaults, Tokenizer, same_tokenizer
from paceline.cli.options import sampling_params
from paceline.diffusion import Canvas, ConfiguredMethod, decode
from paceline.llm import BUNDLED
from paceline.models import load_denoiser
from paceline.models.runners import NativeDenoiser

KINDS = {"diffusion": "full", "block_diffusion": "block"}
MOST_BYTES = 6_000_000


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest) -> tuple[str, NativeDenoiser, Tokenizer]:
    folder = BUNDLED / request.param
    return request.param, load_denoiser(folder, dtype="float32", device="cpu"), Tokenizer.load(folder)


def test_they_load(model: tuple[str, NativeDenoiser, Tokenizer]) -> None:
    name, denoiser, tokenizer = model
    assert denoiser.attention == KINDS[name]
    assert tokenizer.encode("<|mask|>") == [denoiser.mask_token_id]
    assert denoiser.eos_token_ids == (3,)
    assert sum(path.stat().st_size for path in (BUNDLED / name).iterdir()) < MOST_BYTES


@pytest.mark.parametrize("name", KINDS)
def test_where_nothing_is_said_they_write_as_much_as_they_were_trained_on(name: str) -> None:
    llm = LLM(f"bundled/{name}", dtype="float32", seed=0)
    assert llm.default_sampling_params().max_tokens == sampling_params({}, llm).max_tokens == 32
    assert sampling_params({"max_tokens": 5}, llm).max_tokens == 5
    assert "max_tokens" not in GenerationDefaults.load(BUNDLED / "target").sampling
    [item] = items("copy", split="test", count=1, seed=3)
    [answer, whole] = [
        out.outputs[0]
        for out in llm.generate([item.prompt] * 2, [sampling_params({"ignore_eos": end}, llm) for end in (False, True)])
    ]
    assert item.right(answer.text)
    assert (answer.finish_reason, len(whole.token_ids)) == ("stop", 32)


def test_they_write_the_tokens_of_the_bundled_target(model: tuple[str, NativeDenoiser, Tokenizer]) -> None:
    _, denoiser, tokenizer = model
    target = Tokenizer.load(BUNDLED / "target")
    assert denoiser.vocab_size == len(target.tokens()) + 1
    assert {i: text for i, text in tokenizer.tokens().items() if i != denoiser.mask_token_id} == dict(target.tokens())
    assert same_tokenizer(tokenizer, target) is None, "so that they can draft for it"


def texts(denoiser: NativeDenoiser, tokenizer: Tokenizer, prompts: list[str]) -> list[str]:
    encoded = [tokenizer.encode(prompt) for prompt in prompts]
    whole = [16 + -(len(ids) + 16) % (denoiser.block_length or 1) for ids in encoded]
    ends, mask = denoiser.eos_token_ids, denoiser.mask_token_id
    canvases = [
        Canvas.of(ids, n, mask_token_id=mask, eos_token_ids=ends) for ids, n in zip(encoded, whole, strict=True)
    ]
    outcomes = decode(canvases, denoiser, [ConfiguredMethod("static").parts(denoiser, canvas) for canvas in canvases])
    outputs = [outcome.canvas.output for outcome in outcomes]
    return [tokenizer.decode(output[: output.index(3)] if 3 in output else output) for output in outputs]


@pytest.mark.parametrize("task", ["copy", "reverse", "insert_index", "remove_index", "replace_index"])
def test_they_do_the_tasks_of_their_cards(task: str, model: tuple[str, NativeDenoiser, Tokenizer]) -> None:
    name, denoiser, tokenizer = model
    chosen = items(task, split="test", count=6, seed=7)
    right = sum(
        item.right(text)
        for item, text in zip(chosen, texts(denoiser, tokenizer, [i.prompt for i in chosen]), strict=True)
    )
    card = (BUNDLED / name / "README.md").read_text(encoding="utf-8")
    [claimed] = re.findall(rf"\| {task} \| \w+ \| (\d+)% \|", card)
    assert right >= 6 * int(claimed) / 100 - 2
