"""Marian's own files behind the engine: texts in and out, drafted or not, and equal to Marian's formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiny_marian as tiny
from marian_reference import MarianReference
from tiny_tokenizers import CORPUS

from paceline import LLM, SamplingParams
from paceline.checkpoints import Tokenizer, read_marian
from paceline.engine.scheduler import Scheduler
from paceline.errors import CheckpointError

KINDS = ("rnn", "self-attention")
METHODS = (None, "ngram", "suffix", "copyspec", "token_recycling", "auto")
MOST = 24
GREEDY = SamplingParams(max_tokens=MOST, temperature=0)
TEXTS = ("hello world, hello there", "The end of the world.", "it's quick, doesn't it?", "hello")


def vocabulary(folder: Path) -> int:
    """Write a SentencePiece model as Marian trains them, for both languages; returns its size."""
    stem = str(folder / "vocab")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=stem, vocab_size=150, hard_vocab_limit=False, eos_id=0, unk_id=1,
        bos_id=-1, minloglevel=2,
    )  # fmt: skip
    (folder / "vocab.model").rename(folder / "vocab.spm")
    (folder / "vocab.vocab").unlink()
    return int(sentencepiece.SentencePieceProcessor(str(folder / "vocab.spm")).get_piece_size())


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MarianReference]:
    folder = tmp_path_factory.mktemp("marian")
    size = vocabulary(folder)
    path = tiny.make(folder, transformer_decoder_autoreg=request.param, dim_vocabs=[size, size])
    return folder, MarianReference(read_marian(path))


def prompts() -> list[dict[str, str]]:
    return [{"encoder_prompt": text} for text in TEXTS]


@pytest.mark.parametrize("method", METHODS)
def test_texts_are_marians(method: str | None, made: tuple[Path, Any]) -> None:
    folder, reference = made
    llm = LLM(folder, speculative_config=method and {"method": method})
    for text, output in zip(TEXTS, llm.generate(prompts(), GREEDY), strict=True):
        source = llm.tokenizer.encode(text)
        assert output.encoder_prompt_token_ids == source
        assert output.outputs[0].token_ids == reference.translate(source, MOST)


def test_drafts_are_accepted_and_change_nothing(made: tuple[Path, Any]) -> None:
    """What is expected takes few passes, and what is not costs passes and no token."""
    folder, _ = made
    plain = LLM(folder, speculative_config=None).generate(prompts(), GREEDY)
    llm = LLM(folder, speculative_config={"method": "prediction", "num_speculative_tokens": 32})
    for prompt, want in zip(prompts(), plain, strict=True):
        tokens = want.outputs[0].token_ids
        right, wrong = (llm.generate({**prompt, "prediction": text}, GREEDY)[0] for text in (tokens, [5] * 8))
        assert right.outputs[0].token_ids == wrong.outputs[0].token_ids == tokens
        assert right.metrics.num_steps < wrong.metrics.num_steps


def test_drawn_texts_are_those_without_drafts(made: tuple[Path, Any]) -> None:
    params = SamplingParams(max_tokens=MOST, temperature=1.0, top_k=5, n=3, seed=7, ignore_eos=True)
    texts = []
    for method in (None, {"method": "ngram"}):
        llm = LLM(made[0], speculative_config=method)
        (output,) = llm.generate(prompts()[0], params)
        texts.append([one.token_ids for one in output.outputs])
    assert texts[0] == texts[1]
    assert len({tuple(text) for text in texts[0]}) == 3


def test_a_vocabulary_reads_as_sentencepiece_does(made: tuple[Path, Any]) -> None:
    folder, _ = made
    tokenizer = Tokenizer.load(folder)
    original = sentencepiece.SentencePieceProcessor(str(folder / "vocab.spm"))
    for text in (*TEXTS, *CORPUS, "  two  spaces ", "größer 東京 ﬁne", "tab\tand\nline", ""):
        ids = original.encode(text)
        assert tokenizer.encode(text) == [*ids, 0]
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        if 1 not in ids:
            assert tokenizer.decode([*ids, 0]) == original.decode(ids)
    assert (tokenizer.eos_id, tokenizer.special_ids) == (0, {0, 1})


def test_a_tokenizer_json_counts_first(made: tuple[Path, Any], tmp_path: Path) -> None:
    for file in made[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    wanted = Tokenizer.load(tmp_path)
    wanted.to_transformers().backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "vocab.spm").unlink()
    assert Tokenizer.load(tmp_path).encode(TEXTS[0]) == wanted.encode(TEXTS[0])


def test_missing_vocabularies_are_named(made: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = made
    (tmp_path / "model.bin").write_bytes((folder / "model.tiny.bin").read_bytes())
    with pytest.raises(CheckpointError, match=r"one SentencePiece model \(\.spm\).* and holds neither"):
        Tokenizer.load(tmp_path)
    for name in ("vocab.en.spm", "vocab.pt.spm"):
        (tmp_path / name).write_bytes((folder / "vocab.spm").read_bytes())
    with pytest.raises(CheckpointError, match=r"and holds vocab\.en\.spm, vocab\.pt\.spm"):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.pt.spm").unlink()
    (tmp_path / "vocab.en.spm").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match="is no SentencePiece model"):
        Tokenizer.load(tmp_path)


def test_paused_sequences_go_on_with_their_states(made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where not all fit into the cache, some make way and are read anew: the same texts."""
    pauses, pause = [], Scheduler.pause

    def noting(scheduler: Scheduler, sequence: Any) -> None:
        pauses.append(sequence)
        pause(scheduler, sequence)

    monkeypatch.setattr(Scheduler, "pause", noting)
    params = SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)
    free = LLM(made[0], speculative_config=None)
    texts = [one.outputs[0].token_ids for one in free.generate(prompts(), params)]
    memory = free.runner.memory
    tight = LLM(made[0], speculative_config=None, kv_cache_memory_bytes=10 * memory.block_bytes)
    assert [one.outputs[0].token_ids for one in tight.generate(prompts(), params)] == texts
    assert pauses
