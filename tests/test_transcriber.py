"""Speech to text on a made Whisper model: windows, several audios, drafts, fallback, languages, wrong values."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_whisper
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_whisper import sound, wav

from paceline import LLM
from paceline.errors import ConfigError, PromptError
from paceline.speech import LogMel, Segment, Thresholds, Transcript
from paceline.transcriber import Caller, DecodingCost, Transcriber, TranscriptionParams

ALL = Thresholds(compression_ratio=None, avg_logprob=None, no_speech_prob=None)
"""Nothing is doubtful, nothing silent: the texts of a random model are both."""

PARAMS = TranscriptionParams(language="en", thresholds=ALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper.write(tmp_path_factory.mktemp("whisper"), seed=1)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, dtype="float32", speculative_config=None)


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_whisper.write(tmp_path_factory.mktemp("english"), multilingual=False, seed=1)
    return LLM(folder, dtype="float32", speculative_config=None)


def tokens_of(transcript: Transcript) -> list[int]:
    return [token for segment in transcript.segments for token in segment.tokens]


def check_same(one: Transcript, other: Transcript) -> None:
    """Nothing differs but how the sums of log-probabilities were rounded, which depends on what is read in one pass."""
    sums = [[segment.avg_logprob for segment in transcript.segments] for transcript in (one, other)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    bare = [
        replace(transcript, segments=tuple(replace(segment, avg_logprob=0.0) for segment in transcript.segments))
        for transcript in (one, other)
    ]
    assert bare[0] == bare[1]


# ------------------------------------------------------------------------------------------------ one audio


@pytest.mark.parametrize("seed", [0, 2])
def test_the_tokens_of_a_window_are_those_of_transformers(seed: int, llm: LLM, folder: Path) -> None:
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    samples = sound(30, seed)
    features = transformers.WhisperFeatureExtractor()(samples, sampling_rate=16_000, return_tensors="pt")
    (want,) = model.generate(
        features.input_features, language="en", task="transcribe", return_timestamps=True, max_new_tokens=32
    ).tolist()
    params = replace(PARAMS, condition_on_previous_text=False)
    (found,) = Transcriber(llm).transcribe([samples], params)
    first = [token for segment in found.segments if segment.seek == 0 for token in segment.tokens]
    assert len(first) > 8
    assert first == want[: len(first)]


def test_windows_follow_each_other_to_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    window = LogMel.window

    def noted(self: LogMel, samples: Any, first_frame: int = 0) -> Any:
        begun.append(first_frame)
        return window(self, samples, first_frame)

    monkeypatch.setattr(LogMel, "window", noted)
    samples = sound(95)
    heard = list(Transcriber(llm).stream(samples, PARAMS))
    assert begun[0] == 0
    assert [round(one.until * 100) for one in heard] == [*begun[1:], 9500]
    assert all(0 < later - earlier <= 3000 for earlier, later in pairwise(begun))
    segments = [segment for one in heard for segment in one.segments]
    assert {segment.seek for segment in segments} <= set(begun)
    (whole,) = Transcriber(llm).transcribe([samples], PARAMS)
    check_same(whole, replace(whole, segments=tuple(segments)))
    assert (whole.duration, whole.language, whole.task) == (95.0, "en", "transcribe")


def test_a_window_is_read_by_the_encoder_once(llm: LLM) -> None:
    transcriber, before = Transcriber(llm), llm.runner.sources_read
    params = TranscriptionParams(words=True, thresholds=replace(ALL, avg_logprob=0.0))
    list(transcriber.stream(sound(20), replace(params, thresholds=params.thresholds)))
    windows = transcriber.cost.attempts // 6  # all temperatures are tried
    assert llm.runner.sources_read - before == windows, "for its language, six attempts and the times of its words"
    assert not llm.runner.sources_held


def test_closing_a_stream_ends_it(llm: LLM) -> None:
    stream = Transcriber(llm).stream(sound(95), PARAMS)
    next(stream)
    stream.close()
    gauges = llm.backend.gauges()
    assert (gauges.running, gauges.waiting, llm.runner.sources_held) == (0, 0, 0)


def test_what_advance_raises_ends_a_request(llm: LLM) -> None:
    steps: list[tuple[int, int]] = []

    def advance(done: int, tokens: int) -> None:
        steps.append((done, tokens))
        if tokens == 5:
            raise InterruptedError("enough")

    with pytest.raises(InterruptedError, match="enough"):
        list(Transcriber(llm).stream(sound(5), PARAMS, Caller(advance=advance)))
    assert steps[-1] == (0, 5)
    assert (llm.backend.gauges().running, llm.runner.sources_held) == (0, 0)


def test_short_audio_and_silence(llm: LLM) -> None:
    (short,) = Transcriber(llm).transcribe([sound(0.1)], PARAMS)
    assert short.duration == 0.1
    silence = np.zeros(16_000 * 40, np.float32)
    never = replace(PARAMS, thresholds=replace(ALL, no_speech_prob=0.0), temperature=(0.0,))
    transcriber = Transcriber(llm)
    assert transcriber.transcribe([silence], never)[0].segments == ()
    assert transcriber.cost.attempts == 2, "silent windows are passed over whole"
    assert transcriber.transcribe([silence], PARAMS)[0].segments, "the control: nothing is silent"
    with pytest.raises(PromptError, match="the audio is empty"):
        transcriber.transcribe([np.zeros(0, np.float32)])


def test_what_windows_take_is_one_sum(llm: LLM) -> None:
    """However many there were, so that a transcriber may be kept for good."""
    transcriber = Transcriber(llm)
    transcriber.transcribe([sound(4)], PARAMS)
    first = transcriber.cost
    assert first == DecodingCost(1, first.tokens, first.tokens), "the control: without drafts a pass for each token"
    transcriber.transcribe([sound(4)] * 3, PARAMS)
    assert transcriber.cost == DecodingCost(4, 4 * first.tokens, 4 * first.passes)


@pytest.mark.parametrize("sign", ["<|notimestamps|>", "<|startoftranscript|>", "<|endoftext|>"])
def test_a_prompt_is_text_whatever_it_spells(sign: str, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []
    make = llm.request

    def noted(prompt: Any, params: Any) -> Any:
        asked.append(prompt.tokens)
        return make(prompt, params)

    monkeypatch.setattr(llm, "request", noted)
    transcriber = Transcriber(llm)
    transcriber.transcribe([sound(2)], replace(PARAMS, prompt=sign))
    before = asked[0][1 : asked[0].index(transcriber.tokens.start)]
    assert llm.tokenizer.decode(before, skip_special_tokens=False) == f" {sign}"
    assert max(before) < transcriber.tokens.end <= max(llm.tokenizer.encode(sign)), "the control: it spells a token"


# ------------------------------------------------------------------------------------------------ several audios


def test_audios_side_by_side_are_those_alone(llm: LLM) -> None:
    audios = [sound(seconds, seed) for seed, seconds in enumerate((4, 40, 13))]
    together = Transcriber(llm).transcribe(audios, replace(PARAMS, words=True))
    alone = [Transcriber(llm).transcribe([one], replace(PARAMS, words=True))[0] for one in audios]
    assert [tokens_of(one) for one in together] == [tokens_of(one) for one in alone]
    assert [one.text for one in together] == [one.text for one in alone]
    assert len({one.text for one in alone}) == 3
    for one, other in zip(together, alone, strict=True):
        for word, same in zip(one.words, other.words, strict=True):
            assert (word.text, word.start, word.end) == (same.text, same.start, same.end)


def test_pieces_are_moved_to_where_they_lie(llm: LLM) -> None:
    samples = sound(50)
    samples[16_000 * 24 : 16_000 * 24 + 8000] = 0.0  # a pause near the middle, where it is cut
    params = replace(PARAMS, pieces=2, words=True)
    (cut,) = Transcriber(llm).transcribe([samples], params)
    (second,) = Transcriber(llm).transcribe([samples[round(16_000 * 24.025) :]], replace(params, pieces=1))
    assert cut.duration == 50.0
    later = [segment for segment in cut.segments if segment.start >= 24.0]
    assert len(later) >= len(second.segments) > 0
    for moved, one in zip(later[-len(second.segments) :], second.segments, strict=True):
        assert moved.tokens == one.tokens
        offset = moved.start - one.start
        assert 24.0 <= offset <= 24.5
        assert moved.end - one.end == pytest.approx(offset)
        assert [word.start - offset for word in moved.words] == pytest.approx([word.start for word in one.words])


def test_one_audio_or_a_list(llm: LLM, tmp_path: Path) -> None:
    samples = sound(3)
    file = tmp_path / "talk.wav"
    file.write_bytes(wav(samples))
    given = {"language": "en", "thresholds": ALL}
    one = llm.transcribe(file, **given)
    assert isinstance(one, Transcript)
    for same in llm.transcribe([str(file), file.read_bytes()], **given):
        check_same(same, one)
    by_samples = llm.transcribe(np.repeat(samples, 2), sample_rate=32_000, **given)
    assert isinstance(by_samples, Transcript)
    assert by_samples.duration == pytest.approx(3.0)


# ------------------------------------------------------------------------------------------------ drafts


@pytest.fixture(scope="module")
def heard(llm: LLM) -> dict[str, Any]:
    """A sound whose window ends in a segment, its transcript and what that cost."""
    transcriber, samples = Transcriber(llm), sound(20, 2)
    return {"samples": samples, "transcript": transcriber.hear(samples, PARAMS), "cost": transcriber.cost}


def cost_with(llm: LLM, heard: dict[str, Any], draft: list[Segment]) -> DecodingCost:
    """Of the same sound with a draft; what comes of it must be the same."""
    transcriber = Transcriber(llm)
    check_same(transcriber.hear(heard["samples"], PARAMS, draft), heard["transcript"])
    assert transcriber.cost.tokens == heard["cost"].tokens
    return transcriber.cost


def edited(transcript: Transcript, change: int) -> list[Segment]:
    """The segments with so many text tokens changed, from the beginning on."""
    left, found = change, []
    for segment in transcript.segments:
        tokens = list(segment.tokens)
        for place, token in enumerate(tokens):
            if token < 256 and left:
                tokens[place], left = (token + 1) % 256, left - 1
        found.append(replace(segment, tokens=tuple(tokens)))
    return found


def test_a_right_draft_is_read_in_a_few_passes(llm: LLM, heard: dict[str, Any]) -> None:
    plain = heard["cost"]
    assert plain.passes == plain.tokens > 20
    right = cost_with(llm, heard, list(heard["transcript"].segments))
    assert right.passes <= 3
    edit = cost_with(llm, heard, edited(heard["transcript"], 1))
    assert right.passes < edit.passes <= right.passes + 4
    wrong = cost_with(llm, heard, [replace(one, tokens=(5,) * len(one.tokens)) for one in heard["transcript"].segments])
    assert plain.passes - 3 <= wrong.passes <= plain.passes, "the control: nothing is gained, nothing changes"


def test_a_draft_has_the_times_of_the_window(llm: LLM, heard: dict[str, Any]) -> None:
    """As after audio was cut off in front: segments from a window that began 4 s before this one."""
    earlier = [
        replace(one, seek=-400, tokens=tuple(token + 200 if token > 266 else token for token in one.tokens))
        for one in heard["transcript"].segments
    ]
    shifted = cost_with(llm, heard, earlier)
    unshifted = cost_with(llm, heard, [replace(one, seek=0) for one in earlier])
    assert shifted.passes + 4 < unshifted.passes


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 3), st.floats(0.2, 35), st.floats(0, 1), st.integers(0, 6))
def test_any_draft_leaves_the_text_as_it_is(llm: LLM, seed: int, seconds: float, share: float, change: int) -> None:
    """Captions of a growing recording: the text of a part of it is the draft of the whole, be it right or wrong."""
    samples, transcriber = sound(36, seed)[: int(16_000 * seconds)], Transcriber(llm)
    part = transcriber.transcribe([samples[: max(1, int(share * len(samples)))]], PARAMS)[0]
    (whole,) = transcriber.transcribe([samples], PARAMS)
    check_same(transcriber.hear(samples, PARAMS, edited(part, change)), whole)


# ------------------------------------------------------------------------------------------------ fallback


@pytest.mark.parametrize(
    ("temperature", "tried"),
    [(0.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0.5, [0.5, 0.6, 0.8, 1.0]), ((0.0, 0.7), [0.0, 0.7]), ((0.0,), [0.0])],
)
def test_doubtful_windows_are_read_at_higher_temperatures(
    temperature: Any, tried: list[float], llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    make = llm.request

    def noted(prompt: Any, params: Any = None, search: Any = None) -> Any:
        asked.append(params.temperature)
        return make(prompt, params, search)

    monkeypatch.setattr(llm, "request", noted)
    doubtful = replace(PARAMS, temperature=temperature, thresholds=replace(ALL, avg_logprob=0.0))
    found = next(iter(Transcriber(llm).stream(sound(3), doubtful)))
    assert asked[: len(tried)] == tried
    alone = [next(iter(Transcriber(llm).stream(sound(3), replace(doubtful, temperature=(one,))))) for one in tried]
    surest = max(alone, key=lambda window: window.segments[0].avg_logprob)
    check_same(*(Transcript(language="en", duration=3.0, segments=one.segments) for one in (found, surest)))
    assert len({window.segments[0].avg_logprob for window in alone}) == len(tried)
    asked.clear()
    next(Transcriber(llm).stream(sound(3), replace(PARAMS, temperature=temperature)))
    assert asked == tried[:1], "the control: nothing is doubtful"


def test_the_seed_decides_what_is_drawn(llm: LLM) -> None:
    params = replace(PARAMS, temperature=(1.0,))
    texts = [Transcriber(llm).transcribe([sound(3)], replace(params, seed=seed))[0] for seed in (1, 1, 2)]
    assert tokens_of(texts[0]) == tokens_of(texts[1]) != tokens_of(texts[2])


# ------------------------------------------------------------------------------------------------ languages, values


def test_languages(llm: LLM, english: LLM) -> None:
    samples = sound(3)
    (unsaid,) = Transcriber(llm).transcribe([samples], replace(PARAMS, language=None))
    assert unsaid.language in tiny_whisper.LANGUAGES
    said = Transcriber(llm).transcribe([samples], replace(PARAMS, language=unsaid.language))[0]
    check_same(unsaid, said)
    german = Transcriber(llm).transcribe([samples], replace(PARAMS, language="German"))[0]
    assert german.language == "de"
    english_text = Transcriber(llm).transcribe([samples], PARAMS)[0]
    assert tokens_of(german) != tokens_of(english_text)
    task = Transcriber(llm).transcribe([samples], replace(PARAMS, task="translate"))[0]
    assert task.task == "translate"
    assert tokens_of(task) != tokens_of(english_text)
    assert Transcriber(english).transcribe([samples], replace(PARAMS, language=None))[0].language == "en"
    for wrong in (replace(PARAMS, language="de"), replace(PARAMS, task="translate")):
        with pytest.raises(ConfigError, match="only transcribes English"):
            Transcriber(english).check(wrong)
    Transcriber(english).check(PARAMS)
    with pytest.raises(ConfigError, match="language must be one of de, en, haw, got 'fr'"):
        Transcriber(llm).check(replace(PARAMS, language="fr"))
    with pytest.raises(ConfigError, match="language must be one of de, en, haw, got ''"):
        Transcriber(llm).check(replace(PARAMS, language=""))
    Transcriber(llm).check(replace(PARAMS, language=None))


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"languge": "en"}, "languge"),
        ({"language": 3}, "language must be a code or name"),
        ({"task": "sing"}, "task must be one of transcribe, translate"),
        ({"prompt": None}, "prompt must be a text"),
        ({"temperature": -0.1}, "temperature must be a number in 0..2"),
        ({"temperature": ()}, "temperature must hold at least one number"),
        ({"temperature": (0.0, "x")}, "temperature must be a number in 0..2"),
        ({"words": 1}, "words must be True or False"),
        ({"pieces": 0}, "pieces must be an integer in 1..1024"),
        ({"seed": 1.5}, "seed must be an integer"),
        ({"thresholds": 1}, "thresholds must be Thresholds"),
    ],
)
def test_values_that_are_wrong_are_named(wrong: dict[str, Any], line: str, llm: LLM) -> None:
    with pytest.raises(ConfigError, match=line):
        llm.transcribe(sound(1), **wrong)


def test_models_that_read_no_speech_say_so() -> None:
    with pytest.raises(ConfigError, match="reads no speech; load a Whisper model"):
        LLM(dtype="float32", profile=False).transcribe(sound(1))
