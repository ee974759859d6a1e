"""`LLM.embed` and `AsyncLLM.embed`: the pooled states that transformers has behind the final norm."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import torch
from transformers import AutoModel, AutoModelForCausalLM, GPTNeoXConfig, MistralConfig

from paceline import LLM, AsyncLLM, CapabilityError, ConfigError, PromptError, SamplingParams
from paceline.models import memory_of

TOLERANCE = 1e-5
"""Between two float32 computations of numbers of vectors of length 1."""

CHUNK = 16
TEXTS = [[5], [7, 8, 9], [*range(4, 54)], [11, 12], [*range(60, 60 + CHUNK)], [13] * 17]
"""Shorter and longer than a pass, and of just its size."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose final norm does more than to change lengths."""
    written = tiny_checkpoint.write(tmp_path_factory.mktemp("decoder"))

    def uneven(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = torch.linspace(0.2, 2.0, len(weights["model.norm.weight"]))

    tiny_checkpoint.edit_weights(written, uneven)
    return written


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, dtype="float32", profile=False, max_num_batched_tokens=CHUNK) as model:
        yield model


class Reference:
    """The states that transformers computes of a text, behind the final norm and before it."""

    def __init__(self, folder: Path) -> None:
        self._model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self._model.norm.register_forward_pre_hook(self._note)

    def _note(self, _: Any, inputs: Any) -> None:
        self.before = inputs[0][0]

    @torch.inference_mode()
    def pooled(self, tokens: list[int], pooling: str, *, norm: bool = True) -> torch.Tensor:
        behind = self._model(torch.tensor([tokens])).last_hidden_state[0]
        states = behind if norm else self.before
        return states[-1] if pooling == "last" else states.mean(0)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def unit(vector: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(vector, dim=-1)


def numbers(found: list[Any]) -> torch.Tensor:
    return torch.tensor([one.outputs.embedding for one in found])


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_pooled_states_of_transformers(llm: LLM, reference: Reference, pooling: str) -> None:
    found = llm.embed(TEXTS, pooling=pooling)
    assert [one.prompt_token_ids for one in found] == TEXTS
    expected = torch.stack([unit(reference.pooled(text, pooling)) for text in TEXTS])
    assert off(numbers(found), expected) < TOLERANCE
    raw = numbers(llm.embed(TEXTS, pooling=pooling, normalize=False))
    assert off(raw, torch.stack([reference.pooled(text, pooling) for text in TEXTS])) < 10 * TOLERANCE
    other = "mean" if pooling == "last" else "last"  # controls: these differ
    for wrong in (
        [unit(reference.pooled(text, other)) for text in TEXTS],
        [unit(reference.pooled(text, pooling, norm=False)) for text in TEXTS],
    ):
        assert off(numbers(found), torch.stack(wrong)) > 100 * TOLERANCE


def write_family(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in tiny_checkpoint.TOKENIZER:
        shutil.copy(tiny_checkpoint.TARGET / name, folder)
    return folder


SHAPE: dict[str, Any] = {
    "vocab_size": 6144, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 128, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=8), {}),
        (MistralConfig(**SHAPE, num_key_value_heads=1, sliding_window=8), {"exactness": "strict"}),
        (GPTNeoXConfig(**SHAPE), {}),
    ],
    ids=["sliding windows", "strict", "transformers"],
)
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_other_runners_give_the_same_states(tmp_path: Path, config: Any, options: Any, pooling: str) -> None:
    folder = write_family(tmp_path, config)
    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with LLM(folder, dtype="float32", profile=False, max_num_batched_tokens=CHUNK, **options) as llm:
        found = numbers(llm.embed(TEXTS, pooling=pooling))
    with torch.inference_mode():
        states = [model(torch.tensor([text])).last_hidden_state[0] for text in TEXTS]
    expected = torch.stack([unit(one[-1] if pooling == "last" else one.mean(0)) for one in states])
    assert off(found, expected) < TOLERANCE


def test_texts_in_any_order_and_company_have_the_same_embeddings(llm: LLM) -> None:
    found = numbers(llm.embed(TEXTS))
    assert off(numbers(llm.embed(TEXTS[::-1])).flip(0), found) < TOLERANCE
    assert off(torch.cat([numbers(llm.embed([text])) for text in TEXTS]), found) < TOLERANCE
    assert off(found[0], found[1]) > 100 * TOLERANCE


def test_texts_are_read_as_prompts_are(llm: LLM) -> None:
    (text,) = llm.embed("One day")
    assert text.prompt == "One day"
    assert text.prompt_token_ids == llm.tokenizer.encode("One day")
    (ids,) = llm.embed({"prompt_token_ids": text.prompt_token_ids})
    assert off(numbers([text]), numbers([ids])) < TOLERANCE
    assert text.finished


def test_dimensions_are_cut_and_then_normalised(llm: LLM, reference: Reference) -> None:
    found = numbers(llm.embed(TEXTS, dimensions=5))
    expected = torch.stack([unit(reference.pooled(text, "last")[:5]) for text in TEXTS])
    assert off(found, expected) < TOLERANCE
    assert off(found, numbers(llm.embed(TEXTS))[:, :5]) > 100 * TOLERANCE  # control: cut behind it
    with pytest.raises(ConfigError, match=r"dimensions must be an integer in 1\.\.32"):
        llm.embed(TEXTS, dimensions=33)


def test_truncation_keeps_the_end_of_a_text(llm: LLM) -> None:
    long = [*range(4, 204)]
    with pytest.raises(PromptError, match="200 tokens, and the model takes 128"):
        llm.embed([long])
    for kept, tokens in ((-1, long[-128:]), (9, long[-9:])):
        (found,) = llm.embed([long], truncate_prompt_tokens=kept)
        assert found.prompt_token_ids == tokens
        assert off(numbers([found]), numbers(llm.embed([tokens]))) < TOLERANCE


def test_what_cannot_be_embedded_is_said_before_anything_runs(llm: LLM) -> None:
    for given, line in (
        ([[]], "the text is empty"),
        ([[10**6]], "token ids must be integers"),
        ({"prompt": "x", "prediction": "y"}, "prediction must be left out"),
        ({"prompt": "x", "speculative_config": None}, "speculative_config must be left out"),
    ):
        with pytest.raises(PromptError, match=line):
            llm.embed(given)
    for more, line in (
        ({"pooling": "cls"}, "pooling must be"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"normalize": 1}, "normalize"),
        ({"dimensions": 0}, "dimensions"),
    ):
        with pytest.raises(ConfigError, match=line):
            llm.embed("x", **more)
    with (
        LLM("bundled/diffusion", dtype="float32") as diffusion,
        pytest.raises(CapabilityError, match="embed is only available for autoregressive models"),
    ):
        diffusion.embed("x")
    closed = llm.with_speculative_config(None)
    closed.close()
    with pytest.raises(ConfigError, match="this LLM is closed"):
        closed.embed("x")


def test_a_pass_reads_no_more_than_a_piece_of_a_prompt(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    extend, sizes = llm.runner.extend, list[int]()

    def counted(caches: Any, tokens: Any, **more: Any) -> Any:
        sizes.append(sum(map(len, tokens)))
        return extend(caches, tokens, **more)

    monkeypatch.setattr(llm.runner, "extend", counted)
    llm.embed([[5] * 3] * 20 + [[6] * 40])
    assert sum(sizes) == 100
    assert max(sizes) == CHUNK
    assert min(sizes[:3]) == 15, "what does not fit whole waits for the next pass, with no memory of its own"


def test_memory_is_given_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(llm.runner)
    assert memory is not None
    llm.reset_prefix_cache()
    before = memory.used
    llm.embed(TEXTS)
    assert memory.used == before
    extend, calls = llm.runner.extend, list[int]()

    def fails(*arguments: Any, **more: Any) -> Any:
        calls.append(memory.used)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return extend(*arguments, **more)

    monkeypatch.setattr(llm.runner, "extend", fails)
    with pytest.raises(RuntimeError, match="out of luck"):
        llm.embed([[6] * 60])
    assert calls[2] > before, "a control: a text on its way holds some"
    assert memory.used == before


def test_a_stream_has_the_same_tokens_while_texts_are_embedded(folder: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    texts = [[*range(4 + i, 44 + i)] for i in range(12)]

    async def both() -> tuple[list[int], list[Any], list[bool]]:
        async with AsyncLLM(folder, dtype="float32", profile=False, max_num_batched_tokens=CHUNK) as model:
            tokens, ended = list[int](), list[bool]()

            async def stream() -> None:
                async for chunk in model.stream([5, 6, 7], params):
                    tokens.extend(chunk.token_ids)
                    ended.append(embedding.done())

            embedding = asyncio.create_task(model.embed(texts, pooling="mean"))
            await stream()
            return tokens, await embedding, ended

    with LLM(folder, dtype="float32", profile=False, max_num_batched_tokens=CHUNK) as alone:
        expected = alone.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
        vectors = numbers(alone.embed(texts, pooling="mean"))
    tokens, found, ended = asyncio.run(both())
    assert tokens == list(expected)
    assert off(numbers(found), vectors) < TOLERANCE
    assert not all(ended), "a control: they ran side by side"


def test_calls_side_by_side_have_one_long_text_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_at_once() -> tuple[int, int, list[torch.Tensor]]:
        async with AsyncLLM(folder, dtype="float32", profile=False, max_num_batched_tokens=CHUNK) as model:
            memory, most = memory_of(model.llm.runner), list[int]()
            assert memory is not None
            extend = model.llm.runner.extend

            def counted(*arguments: Any, **more: Any) -> Any:
                found = extend(*arguments, **more)
                most.append(memory.used)
                return found

            monkeypatch.setattr(model.llm.runner, "extend", counted)
            found = await asyncio.gather(*(model.embed([[5 + i] * 120] * 2) for i in range(4)))
            return max(most), memory.blocks_for(120), [numbers(one) for one in found]

    most, of_one, found = asyncio.run(all_at_once())
    assert 0 < most <= 3 * of_one  # a sequence may keep room to grow in
    assert most < 4 * of_one, "what four texts would need"
    assert off(found[0], found[1]) > 100 * TOLERANCE


def test_a_text_must_fit_into_the_memory(folder: Path) -> None:
    with LLM(folder, dtype="float32", profile=False, kv_cache_memory_bytes=2**14) as small:
        memory = memory_of(small.runner)
        assert memory is not None
        room = memory.capacity * memory.block_size
        assert 8 <= room < 120
        with pytest.raises(PromptError, match="kv_cache_memory_bytes"):
            small.embed([[5] * 120])
        params, text = SamplingParams(temperature=0.0, max_tokens=room - 8, ignore_eos=True), [7] * room
        expected, alone = small.generate([[5, 6, 7]], params)[0].outputs[0].token_ids, numbers(small.embed([text]))
        tokens = list[int]()
        for chunk in small.stream([5, 6, 7], params):  # which fills the memory by itself
            tokens += chunk.token_ids
            assert off(numbers(small.embed([text])), alone) < TOLERANCE
        assert tokens == list(expected)


def test_a_cancelled_call_gives_its_memory_back(folder: Path) -> None:
    async def cancelled() -> tuple[int, int]:
        async with AsyncLLM(folder, dtype="float32", profile=False, max_num_batched_tokens=2) as model:
            memory = memory_of(model.llm.runner)
            assert memory is not None
            task, most = asyncio.create_task(model.embed([[5] * 120] * 50)), 0
            while not most:
                await asyncio.sleep(0.001)
                most = memory.used
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            await model.embed("x")  # one that comes behind it
            return most, memory.used

    most, left = asyncio.run(cancelled())
    assert most > 0
    assert left == 0
