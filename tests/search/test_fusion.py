"""What a model thinks of bytes, whatever its tokens, and beam search by what two models think of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoint
import tiny_tokenizers
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from paceline import LLM, SamplingParams
from paceline.checkpoints import Tokenizer
from paceline.errors import ConfigError
from paceline.models import Runner, load_runner
from paceline.search.scoring import ByteScorer
from paceline.search.scoring.byte_scores import ByteVocabulary

PROMPT = "Once upon a time"
TEXTS = [b" there was", b" there wa", b" ther", b" a caf\xc3\xa9", b" a caf\xc3", b"\n\n  x = 1"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models with tokenizers of other kinds; "bytes" has a token for every byte and no others."""
    root, found = tmp_path_factory.mktemp("models"), dict[str, Path]()
    for kind in ("byte_level", "metaspace"):
        found[kind] = tiny_checkpoint.write(root / kind, vocab_size=600)
        tiny_tokenizers.write(found[kind], kind)
    found["bytes"] = tiny_checkpoint.write(root / "bytes", vocab_size=270)
    tiny_tokenizers.write(found["bytes"], "byte_level")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*tiny_tokenizers.SPECIAL, *alphabet]
    plain = Backend(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(tiny_tokenizers.SPECIAL)
    plain.save(str(found["bytes"] / "tokenizer.json"))
    return found


def opened(folder: Path) -> tuple[Runner, Tokenizer]:
    return load_runner(folder, dtype="float32", device="cpu"), Tokenizer.load(folder)


def chain(runner: Runner, prompt: Sequence[int], tokens: Sequence[int]) -> list[torch.Tensor]:
    """log P of the next token after 0, 1, ... tokens, each computed alone."""
    rows = []
    for size in range(len(tokens) + 1):
        cache = runner.open()
        rows.append(runner.extend([cache], [[*prompt, *tokens[:size]]]).logits[0].float().log_softmax(-1))
        runner.release(cache)
    return rows


# ------------------------------------------------------------------------------------------------ bytes


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "bytes"])
def test_every_string_is_spelled_and_what_goes_on_is_found(folders: dict[str, Path], kind: str) -> None:
    vocabulary = ByteVocabulary(Tokenizer.load(folders[kind]), 600)
    for text in [*TEXTS, "東京 🙂".encode(), "東".encode()[:2], b"quick"]:
        tokens, rest = vocabulary.spelled(text)
        assert b"".join(vocabulary.written[one] or b"" for one in tokens) + rest == text
        assert rest == b""
    for beginning in (b" t", b"q", b" the"):
        ids = set(vocabulary.longer(beginning).tolist())
        texts = {one for one in vocabulary.written if one and one.startswith(beginning) and one != beginning}
        assert {vocabulary.written[one] for one in ids} == texts
        assert len(ids) == len(texts)


def test_bytes_without_a_token_wait_for_one_that_goes_on(folders: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(tiny_tokenizers.write(tmp_path, "unigram"))
    vocabulary = ByteVocabulary(tokenizer, 600)
    assert vocabulary.spelled("hello 東".encode()[:-1])[1] == "東".encode()[:-1]
    runner, _ = opened(tiny_checkpoint.write(tmp_path / "model", vocab_size=600))
    scorer = ByteScorer(runner, tokenizer, [1, 2])
    (score,) = scorer.scores(["東".encode()[:-1]])
    ids = vocabulary.longer("東".encode()[:-1])
    assert score[0] == pytest.approx(float(chain(runner, [1, 2], [])[0][ids].logsumexp(0)), rel=1e-5)
    assert len(ids) == 1


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer lacks most signs, and has no bytes."""
    folder = tmp_path_factory.mktemp("narrow")
    tiny_tokenizers.write(tiny_checkpoint.write(folder, vocab_size=600), "unigram")
    return folder


@pytest.mark.parametrize(("text", "known"), [("hello ж there", "hello  there"), ("жhello", "hello"), ("жж", "")])
def test_bytes_that_are_in_no_token_come_up_by_chance(narrow: Path, text: str, known: str) -> None:
    """The rest is what it is without them."""
    runner, tokenizer = opened(narrow)
    scorer, unknown = ByteScorer(runner, tokenizer, [1, 2]), len(text.encode()) - len(known)
    (score, size) = scorer.scores([text.encode()])[0]
    (rest, tokens) = scorer.scores([known.encode()])[0] if known else (0.0, 0)
    assert (score, size) == (pytest.approx(rest - unknown * math.log(600)), tokens + unknown)
    assert scorer.vocabulary.spelled(text.encode()) == scorer.vocabulary.spelled(known.encode())


def test_a_text_with_a_sign_that_the_second_model_lacks_is_ranked(llm: LLM, narrow: Path) -> None:
    """It had no chance behind any text without one, whatever both models think of the rest."""
    digits = {str(i): llm.tokenizer.encode(f"{i}")[-1] for i in range(10)}
    given: dict[str, Any] = {"method": "gfd", "model": str(narrow), "beam_width": 4}
    how = SamplingParams(temperature=0.0, max_tokens=3, n=4, ignore_eos=True, allowed_token_ids=[*digits.values()])
    (found,) = llm.generate(PROMPT, how, search=given)
    assert not all(set(one.text) <= set("123 ") for one in found.outputs), "the first model likes other digits"
    assert [one.score is not None and math.isfinite(one.score) for one in found.outputs] == [True] * 4


def test_a_strings_probability_is_that_of_its_tokens_and_of_those_that_go_on(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(PROMPT)
    scorer = ByteScorer(llm.runner, llm.tokenizer, prompt)
    vocabulary = scorer.vocabulary
    for text, (score, size) in zip(TEXTS, scorer.scores(TEXTS), strict=True):
        tokens, _ = vocabulary.spelled(text)
        rows = chain(llm.runner, prompt, tokens)
        before = [0.0]
        for row, token in zip(rows, tokens, strict=False):
            before.append(before[-1] + float(row[token]))
        total, paths = math.exp(before[-1]), {len(tokens): before[-1]}
        for place in range(len(tokens)):
            ahead = b"".join(vocabulary.written[one] or b"" for one in tokens[place:])
            going_on = {one: i for i, one in reversed(list(enumerate(vocabulary.written)))
                        if one and one.startswith(ahead) and one != ahead}  # fmt: skip
            if going_on:
                part = float(rows[place][list(going_on.values())].logsumexp(0)) + before[place]
                total += math.exp(part)
                paths[place + 1] = max(paths.get(place + 1, part), part)
        assert score == pytest.approx(math.log(total), rel=1e-4)
        assert score >= before[-1] - 1e-6
        assert size == max(paths, key=paths.__getitem__)
    (cut,), (whole,) = scorer.scores([b" ther"]), scorer.scores([b" there"])
    assert cut[0] > whole[0]  # the first may become the second


def test_with_a_token_for_each_byte_it_is_the_product_of_the_chain(folders: dict[str, Path]) -> None:
    runner, tokenizer = opened(folders["bytes"])
    prompt, text = tokenizer.encode(PROMPT), "naïve 東".encode()
    scorer = ByteScorer(runner, tokenizer, prompt)
    (score,) = scorer.scores([text])
    tokens, _ = scorer.vocabulary.spelled(text)
    rows = chain(runner, prompt, tokens)
    assert len(tokens) == len(text) == score[1]
    assert score[0] == pytest.approx(sum(float(row[one]) for row, one in zip(rows, tokens, strict=False)), rel=1e-5)
    following = scorer.scores([text + bytes([byte]) for byte in range(256)])
    ids = [i for i, one in enumerate(scorer.vocabulary.written) if one]
    chance = sum(math.exp(one - score[0]) for one, _ in following)
    assert chance == pytest.approx(float(rows[-1][ids].exp().sum()), rel=1e-4)
    scorer.close()


def test_scores_do_not_depend_on_what_was_scored_before(folders: dict[str, Path]) -> None:
    runner, tokenizer = opened(folders["metaspace"])
    prompt, text = tokenizer.encode(PROMPT), b" there was a quick fox over the lazy dog"
    growing = ByteScorer(runner, tokenizer, prompt)
    for size in range(1, len(text) + 1):
        (found,) = growing.scores([text[:size]])
        if size % 5 == 0:
            (alone,) = ByteScorer(runner, tokenizer, prompt).scores([text[:size]])
            assert found == pytest.approx(alone, rel=1e-4)
    (warmer,) = ByteScorer(runner, tokenizer, prompt, 1.7).scores([text])
    assert abs(warmer[0] - found[0]) > 0.1


# ------------------------------------------------------------------------------------------------ the search


def texts_of(llm: LLM, count: int = 3, **search: Any) -> list[tuple[list[int], float]]:
    how = SamplingParams(temperature=0.0, max_tokens=10, n=count, ignore_eos=True)
    (result,) = llm.generate(PROMPT, how, search={"beam_width": 4, **search})
    result.raise_for_error()
    return [(list(one.token_ids), one.score or 0.0) for one in result.outputs]


def test_without_weight_it_is_beam_search(llm: LLM, folders: dict[str, Path]) -> None:
    beams = [tokens for tokens, _ in texts_of(llm, method="beam")]
    gfd = {"method": "gfd", "model": str(folders["metaspace"])}
    assert [tokens for tokens, _ in texts_of(llm, **gfd, weight=0.0)] == beams
    assert [tokens for tokens, _ in texts_of(llm, **gfd, weight=0.9)] != beams


@pytest.mark.parametrize("second", [{}, {"model_prompt": "lazy dog", "model_temperature": 1.7}])
def test_scores_are_of_both_models(llm: LLM, folders: dict[str, Path], second: dict[str, Any]) -> None:
    runner, tokenizer = opened(folders["byte_level"])
    asked = tokenizer.encode(second.get("model_prompt", PROMPT))
    scorer = ByteScorer(runner, tokenizer, asked, second.get("model_temperature", 1.0))
    written = ByteVocabulary(llm.tokenizer, llm.runner.info.vocab_size).written
    prompt = llm.tokenizer.encode(PROMPT)
    for tokens, score in texts_of(llm, method="gfd", model=str(folders["byte_level"]), weight=0.4, **second):
        ((total, size),) = scorer.scores([b"".join(written[one] or b"" for one in tokens)])
        rows = chain(llm.runner, prompt, tokens)
        own = sum(float(row[one]) for row, one in zip(rows, tokens, strict=False)) / len(tokens)
        assert score == pytest.approx(0.6 * own + 0.4 * total / size, rel=1e-4)


def likes_o(texts: Sequence[bytes]) -> list[float]:
    """A recogniser that hears nothing but o."""
    return [10.0 * one.count(b"o") for one in texts]


def test_a_function_in_the_second_models_place(llm: LLM) -> None:
    heard = texts_of(llm, method="gfd", scorer=likes_o, weight=0.5)
    plain = texts_of(llm, method="beam")
    counts = [llm.tokenizer.decode(found[0][0]).count("o") for found in (heard, plain)]
    assert counts[0] > counts[1] + 3
    assert texts_of(llm, method="gfd", scorer=f"{__name__}:likes_o", weight=0.5) == heard


def test_so_many_candidates_are_tried_of_each_text(llm: LLM) -> None:
    """With one there is nothing to choose: greedy decoding, a text."""
    (plain,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True))
    how = SamplingParams(temperature=0.0, max_tokens=10, n=3, stop_token_ids=[min(llm.defaults.eos_ids)])
    (found,) = llm.generate(PROMPT, how, search={"method": "gfd", "scorer": likes_o, "candidates": 1})
    assert [one.token_ids for one in found.outputs] == [plain.outputs[0].token_ids]


def test_what_a_function_says_is_divided_by_the_tokens(llm: LLM) -> None:
    written = ByteVocabulary(llm.tokenizer, llm.runner.info.vocab_size).written
    prompt, found = llm.tokenizer.encode(PROMPT), texts_of(llm, method="gfd", scorer=likes_o, weight=0.3)
    for tokens, score in found:
        rows = chain(llm.runner, prompt, tokens)
        own = sum(float(row[one]) for row, one in zip(rows, tokens, strict=False)) / len(tokens)
        (heard,) = likes_o([b"".join(written[one] or b"" for one in tokens)])
        assert score == pytest.approx(0.7 * own + 0.3 * heard / len(tokens), rel=1e-4)
    assert likes_o([b"oo"]) == [20.0]


def test_the_search_ends_where_beams_differ_by_more_than_twenty_tokens(llm: LLM) -> None:
    """One text ends after two tokens, another never does."""
    end = min(llm.defaults.eos_ids)
    a, b = (llm.tokenizer.encode(letter)[-1] for letter in "ab")

    def process(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        chances = {a: 0.6, b: 0.4} if not output else {end: 1.0} if output == [a] else {a: 0.999, b: 0.001}
        row = torch.full_like(logits, -math.inf)
        for token, chance in chances.items():
            row[token] = math.log(chance)
        return row

    for most, passes in ((60, 23), (20, 20)):
        how = SamplingParams(temperature=0.0, max_tokens=most, n=3, logits_processors=[process])
        search = {"method": "gfd", "scorer": likes_o, "weight": 0.0, "beam_width": 3, "candidates": 2}
        (result,) = llm.generate(PROMPT, how, search=search)
        result.raise_for_error()
        assert result.search is not None
        assert result.search.num_passes == passes
        assert [a, end] in [list(one.token_ids) for one in result.outputs]


def test_an_end_counts_only_where_it_is_the_likeliest(llm: LLM) -> None:
    end, prompt = min(llm.defaults.eos_ids), llm.tokenizer.encode("def fib(n):")
    how = SamplingParams(temperature=0.0, max_tokens=40, n=4, logit_bias={end: 12.0})
    (result,) = llm.generate("def fib(n):", how, search={"method": "gfd", "scorer": likes_o, "weight": 0.0})
    ended = [list(one.token_ids) for one in result.outputs if one.token_ids[-1] == end]
    assert len(ended) == 4
    for tokens in ended:
        rows = chain(llm.runner, prompt, tokens[:-1])
        for row in rows:
            row[end] += 12.0
        assert [int(row.argmax()) == end for row in rows] == [False] * (len(rows) - 1) + [True]
    (beams,) = llm.generate("def fib(n):", how, search={"method": "beam", "beam_width": 4})
    assert [one.token_ids for one in beams.outputs] != [one.token_ids for one in result.outputs]


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({}, "model must be given, or else scorer"),
        ({"model": "x", "scorer": likes_o}, "model must be given, or else scorer"),
        ({"model": "x", "weight": 2}, "weight must be in 0..1"),
        ({"scorer": "nothing:here"}, "scorer: cannot import"),
    ],
)
def test_bad_settings_get_one_line(llm: LLM, search: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        texts_of(llm, method="gfd", **search)
