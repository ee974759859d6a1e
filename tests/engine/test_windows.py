"""A model with sliding windows says what transformers says while its layers give back what is behind their windows, and
needs less memory: prefixes, forks, drafts, batches and sequences that make way included.
"""

from __future__ import annotations

import random
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupts import bytecodes, interrupt
from models.checkpoints import perturb
from tiny_checkpoint import TARGET, TOKENIZER, edit_json

from paceline import LLM, SamplingParams
from paceline.engine import StepRecord, watching
from paceline.engine.scheduler import Scheduler
from paceline.models.runners import native
from paceline.models.state.window_slots import BLOCK, WindowSlots

WINDOW = 16
BEGINNING = [5 + (7 * i) % 90 for i in range(150)]
PROMPTS = [[*BEGINNING, 200 + i, 300 + i] for i in range(4)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.fixture(scope="module")
def oracle() -> Any:
    """A tiny Gemma 3: two of three layers have a window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=6144, hidden_size=64, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, sliding_window=WINDOW, initializer_range=0.2,
        max_position_embeddings=1024, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        bos_token_id=0, eos_token_id=3, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    return perturb(Gemma3ForCausalLM(config).float().eval())


@pytest.fixture(scope="module")
def folder(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    found: Path = tmp_path_factory.mktemp("gemma")
    oracle.save_pretrained(found)
    edit_json(found / "config.json", architectures=["Gemma3ForCausalLM"])
    for name in TOKENIZER:
        shutil.copy(TARGET / name, found)
    return str(found)


def opened(folder: str, **options: Any) -> LLM:
    given = {"speculative_config": None, "threads": 1, "dtype": "float32", "max_num_seqs": 4}
    return LLM(folder, **(given | options))


def tight(folder: str, **options: Any) -> LLM:
    """Layers with a window have no more room than the windows need."""
    llm = opened(folder, max_num_batched_tokens=8, **options)
    windowed(llm).most = 2
    llm.runner.arena.shrink(llm.runner.arena.limit)
    return llm


def windowed(llm: LLM) -> WindowSlots:
    found: WindowSlots = llm.runner.arena.windowed
    return found


def right(oracle: Any, llm: LLM, prompts: list[list[int]], tokens: int, **options: Any) -> list[bool]:
    """Per output whether every token is the one that transformers finds best."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **options)
    found = []
    for out in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params):
        for one in out.outputs:
            ids = [*out.prompt_token_ids, *one.token_ids]
            with torch.inference_mode():
                best = oracle(torch.tensor([ids])).logits[0].argmax(-1).tolist()
            found.append(best[len(ids) - tokens - 1 : -1] == ids[-tokens:])
    return found


@pytest.mark.parametrize("exactness", ["auto", "strict"])
@pytest.mark.parametrize("drafts", [None, NGRAM])
def test_a_long_text_needs_the_room_of_a_window(folder: str, oracle: Any, drafts: Any, exactness: str) -> None:
    llm = tight(folder, speculative_config=drafts, exactness=exactness)
    assert right(oracle, llm, PROMPTS[:1], 250) == [True]
    assert windowed(llm).places * BLOCK <= 2 * WINDOW + 3 * BLOCK


def test_a_block_that_is_given_back_too_early_is_noticed(folder: str, oracle: Any) -> None:
    llm = tight(folder)
    windowed(llm).window -= BLOCK
    assert right(oracle, llm, PROMPTS[:1], 250) == [False]


@pytest.mark.parametrize("drafts", [None, NGRAM])
def test_batches_and_forks(folder: str, oracle: Any, drafts: Any) -> None:
    llm = tight(folder, speculative_config=drafts)
    assert all(right(oracle, llm, PROMPTS, 60))
    assert all(right(oracle, llm, PROMPTS[:2], 60, n=2))
    assert llm.runner.memory.left() == llm.runner.memory.capacity


def cached(llm: LLM, ids: list[int]) -> int:
    (out,) = llm.generate([{"prompt_token_ids": ids}], SamplingParams(temperature=0.0, max_tokens=1))
    return int(out.num_cached_tokens or 0)


def test_a_conversation_goes_on_from_its_end(folder: str, oracle: Any) -> None:
    llm = tight(folder)
    (out,) = llm.generate([{"prompt_token_ids": PROMPTS[0]}], SamplingParams(temperature=0.0, max_tokens=60))
    text = [*PROMPTS[0], *out.outputs[0].token_ids]
    assert cached(llm, [*text, 7, 8, 9]) == (len(text) - 1) // BLOCK * BLOCK
    assert right(oracle, llm, [[*text, 7, 8, 9]], 60) == [True]


def turns(folder: str, oracle: Any) -> tuple[int, bool]:
    """How much of a beginning is taken over after other texts, and whether what follows is right."""
    llm = tight(folder)
    assert all(right(oracle, llm, [PROMPTS[0], [*range(9, 200)]], 60))
    return cached(llm, [*BEGINNING[:100], 11, 12]), right(oracle, llm, [[*BEGINNING[:100], 11, 12]], 60) == [True]


def test_a_beginning_whose_window_is_gone_is_computed_again(
    folder: str, oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert turns(folder, oracle) == (0, True)
    monkeypatch.setattr(WindowSlots, "usable", lambda self, blocks: len(blocks))
    found, fine = turns(folder, oracle)
    assert found > 0
    assert not fine


def test_a_beginning_is_taken_over_while_nobody_needs_the_room(folder: str, oracle: Any) -> None:
    llm = opened(folder)
    assert all(right(oracle, llm, PROMPTS, 60))
    assert cached(llm, [*BEGINNING[:100], 11, 12]) == 96
    assert right(oracle, llm, [[*BEGINNING[:100], 11, 12]], 60) == [True]


def test_the_same_memory_admits_more_sequences(folder: str, oracle: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def life() -> tuple[int, int, int]:
        """Most sequences at once, how often one made way, most bytes."""
        llm = opened(folder, kv_cache_memory_bytes=62 * block, max_num_batched_tokens=32, enable_prefix_caching=False)
        side_by_side, pauses, pause = [0], [0], Scheduler.pause

        def look(record: StepRecord) -> None:
            side_by_side.append(len(record.trees))

        def noting(self: Scheduler, sequence: Any) -> None:
            pauses.append(sequence.key)
            pause(self, sequence)

        monkeypatch.setattr(Scheduler, "pause", noting)
        with watching(llm.engine, look):
            assert all(right(oracle, llm, PROMPTS, 100))
        monkeypatch.setattr(Scheduler, "pause", pause)
        return max(side_by_side), len(pauses) - 1, llm.runner.arena.nbytes

    block = opened(folder).runner.memory.block_bytes
    most, pauses, size = life()
    assert (most, pauses) == (4, 0)
    assert size <= 62 * block
    monkeypatch.setattr(native, "windows_of", lambda *args: [])
    most, pauses, size = life()
    assert most < 4 or pauses
    assert size <= 62 * block


PLACES = ("models/state/window_slots.py",)
FILES = (*PLACES, "models/state/arena.py", "models/state/cache.py", "models/state/cache_memory.py",
         "models/runners/native.py", "engine/scheduler.py", "engine/prefix_cache.py")  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside __del__
@pytest.mark.parametrize("files", [FILES, PLACES], ids=["anywhere", "while places change hands"])
def test_an_interrupt_spoils_nothing(folder: str, files: tuple[str, ...]) -> None:
    llm = opened(folder, max_num_batched_tokens=8)
    arena, versions = llm.runner.arena, count(1000, 1000)

    def fresh() -> None:
        """An arena of few blocks and places, with none of the versions there were."""
        arena.__init__(3, 1, 32, dtype=torch.float32, device=arena.kv.device, slots=32, windows=(WINDOW, None, WINDOW))
        arena.version, arena.windowed.most = next(versions), 2

    def generation() -> list[Any]:
        params = [SamplingParams(temperature=0.0, max_tokens=18, ignore_eos=True, n=n) for n in (1, 2)]
        found = llm.generate([{"prompt_token_ids": ids[-40:]} for ids in PROMPTS[:2]], params)
        return [[one.token_ids for one in out.outputs] for out in found]

    expected = generation()
    fresh()
    total = bytecodes(generation, files)
    for at in random.Random(0).sample(range(1, total), 30):
        fresh()
        where = interrupt(generation, files, at)
        assert not llm.engine.has_work, where
        assert llm.runner.memory.left() == llm.runner.memory.capacity, where
        assert generation() == expected, where


def test_searches_share_no_beginning_whose_keys_may_be_gone(folder: str) -> None:
    llm, alone = opened(folder), opened(folder, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm.generate(prompts[0], params)
    found, wanted = (one.generate(prompts, params, search="beam") for one in (llm, alone))
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]
    assert [one.num_cached_tokens or 0 for one in found] == [0] * len(PROMPTS)
