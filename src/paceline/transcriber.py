"""Speech to text: audio of any length, window by window, through a loaded Whisper model and its engine.

Windows are requests like all others, so that they are drafted, batched and scheduled with everything else. Each audio
goes on from window to window, since the next one begins where the last one was understood; several audios, and the
pieces of one that is cut, go side by side.
Source: Robust Speech Recognition via Large-Scale Weak Supervision (arXiv:2212.04356), and its code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import torch

from paceline.config import SamplingParams
from paceline.engine import ReadPrompt
from paceline.errors import ConfigError, PacelineError, PromptError
from paceline.models import AttendsToSource, Inputs
from paceline.speech import (
    FRAMES_PER_SECOND,
    SAMPLE_RATE,
    TASKS,
    TEMPERATURES,
    Attempt,
    LogMel,
    PreviousText,
    Samples,
    Segment,
    Thresholds,
    Transcript,
    WhisperRule,
    WhisperTokens,
    average_logprob,
    cut_pieces,
    expected_tokens,
    join_pieces,
    language_code,
    language_probabilities,
    no_speech_probability,
    text_starts,
    timed_words,
    window_segments,
)
from paceline.utils import choice, integer, need, number, reject_unknown

if TYPE_CHECKING:
    from pathlib import Path

    from paceline.checkpoints import Tokenizer
    from paceline.engine import Backend, Request, SourceReader, Turns
    from paceline.models import Runner, SequenceCache
    from paceline.utils import Advance

MAX_TEMPERATURE: Final = 2.0


class SpeechModel(Protocol):
    """What is used of an `LLM`."""

    folder: Path
    tokenizer: Tokenizer
    runner: Runner
    source: SourceReader | None
    backend: Backend
    turns: Turns
    drafter_methods: list[str]

    def request(self, prompt: ReadPrompt, sampling_params: SamplingParams) -> tuple[Request, Backend]:
        """A request, checked and not begun, and what decodes it."""

    def with_speculative_config(self, speculative_config: dict[str, Any]) -> Self:
        """The same model, drafted for by other methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionParams:
    """What is wanted of an audio.

    Attributes:
        language: its code or English name; None listens to the first window.
        task: "transcribe", or "translate" to English.
        prompt: a text before the audio: names and spellings that are to be expected.
        temperature: of the first attempt at a window; where its text is doubtful, higher ones follow
            (`speech.fallback`). A sequence gives all attempts.
        timestamps: segments are cut where the model says, rather than one for a window.
        words: each word has its times.
        condition_on_previous_text: a window is told of the text before it.
        pieces: an audio is cut into so many, at quiet places, which are read side by side.
        seed: of temperatures above 0.
        thresholds: when a text is doubtful, and a window silent.
    Raises:
        ConfigError: a value outside its range.
    """

    language: str | None = None
    task: str = "transcribe"
    prompt: str = ""
    temperature: float | Sequence[float] = 0.0
    timestamps: bool = True
    words: bool = False
    condition_on_previous_text: bool = True
    pieces: int = 1
    seed: int = 0
    thresholds: Thresholds = field(default_factory=Thresholds)

    def __post_init__(self) -> None:
        need(self.language is None or isinstance(self.language, str), "language", "be a code or name", self.language)
        choice("task", self.task, TASKS)
        need(isinstance(self.prompt, str), "prompt", "be a text", self.prompt)
        given = self.temperature if isinstance(self.temperature, list | tuple) else [self.temperature]
        need(len(given) > 0, "temperature", "hold at least one number", self.temperature)
        for temperature in given:
            number("temperature", temperature, 0.0, MAX_TEMPERATURE, f"be a number in 0..{MAX_TEMPERATURE:g}")
        for name in ("timestamps", "words", "condition_on_previous_text"):
            need(isinstance(getattr(self, name), bool), name, "be True or False", getattr(self, name))
        integer("pieces", self.pieces, 1, 1024)
        integer("seed", self.seed, -(2**63), 2**63 - 1)
        need(isinstance(self.thresholds, Thresholds), "thresholds", "be Thresholds", self.thresholds)

    @classmethod
    def of_call(cls, method: str, given: Mapping[str, Any]) -> TranscriptionParams:
        """Those that a call of `method` gives.

        Raises:
            ConfigError: an argument that is unknown, or its value wrong.
        """
        reject_unknown(method, given, [field.name for field in fields(cls)])
        return cls(**given)

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Of the attempts, in order."""
        if isinstance(self.temperature, Sequence):
            return tuple(self.temperature)
        first = float(self.temperature)
        return (first, *(higher for higher in TEMPERATURES if higher > first))


@dataclass(frozen=True, slots=True)
class HeardWindow:
    """What one more window of an audio has brought.

    Attributes:
        segments: that it adds; none where it is silent.
        until: seconds of the audio that have been understood.
        language: see `Transcript.language`.
    """

    segments: tuple[Segment, ...]
    until: float
    language: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """For whom windows are decoded, as of `AsyncLLM.stream`, and what is told meanwhile.

    Attributes:
        owner, priority, max_running: of its requests.
        advance: called after every step of the engine; what it raises ends the request.
    """

    owner: str = ""
    priority: int = 0
    max_running: int | None = None
    advance: Advance | None = None


ANYBODY: Final = Caller()


@dataclass(frozen=True, slots=True)
class DecodingCost:
    """What it took to decode windows.

    Attributes:
        attempts: at windows, each of which may have several.
        tokens: that were sampled. passes: of the decoder.
    """

    attempts: int = 0
    tokens: int = 0
    passes: int = 0

    def __add__(self, other: DecodingCost) -> DecodingCost:
        return DecodingCost(self.attempts + other.attempts, self.tokens + other.tokens, self.passes + other.passes)


@dataclass(slots=True)
class _Window:
    """What is asked of a window, and what came of it.

    Attributes:
        prompt: tokens before the sampled ones; `draft`: what may follow.
        sampled: n tokens, the end included. logits: (n, v) raw, that each of them was sampled from.
    """

    inputs: Inputs
    prompt: list[int]
    temperature: float
    draft: Sequence[int] = ()
    seed: int = 0
    sampled: list[int] = field(default_factory=list)
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Spoken:
    """What a window holds: its language, the task, and its first frame."""

    language: str
    task: str
    seek: int


class Transcriber:
    """Transcribes audios with a Whisper model.

    Args:
        llm: has loaded it.

    Attributes:
        tokens: the checkpoint's special ids.
        cost: of everything so far, on all threads.
    Raises:
        ConfigError: another model.
    """

    def __init__(self, llm: SpeechModel) -> None:
        runner = getattr(llm, "runner", None)  # a diffusion language model has none
        if not isinstance(runner, AttendsToSource) or llm.source is None or llm.source.reads != "input_features":
            raise ConfigError(f"{llm.folder} reads no speech; load a Whisper model to transcribe")
        self._llm, self._runner = llm, runner
        self.tokens, self._mel = WhisperTokens.load(llm.folder), LogMel.load(llm.folder)
        most = runner.info.max_context
        rule = f"be {self.tokens.context} for speech, which a window and the text before it may take"
        need(most >= self.tokens.context, "max_model_len", rule, most)
        self._drafting: SpeechModel | None = None
        self.cost, self._counting = DecodingCost(), Lock()

    def check(self, params: TranscriptionParams) -> None:
        """Reject what this model cannot do, before an audio is read.

        Raises:
            ConfigError: a language or task that the model does not know.
        """
        language = params.language
        if language is None and self.tokens.multilingual:
            language = next(iter(self.tokens.languages))
        self.tokens.prompt(language=language, task=params.task)

    def transcribe(self, audios: Sequence[Samples], params: TranscriptionParams | None = None) -> list[Transcript]:
        """The transcripts of mono audios at 16 kHz (`speech.load_audio`), side by side.

        Raises:
            PromptError: an empty audio.
            ConfigError: a language or task that the model does not know.
        """
        params = params or TranscriptionParams()
        for samples in audios:
            _check_audio(samples)
        pieces = [cut_pieces(samples, params.pieces) for samples in audios]
        found = iter(self._side_by_side([self._piece(one, params) for many in pieces for one in many]))
        return [join_pieces(many, [next(found) for _ in many]) for many in pieces]

    def stream(
        self, samples: Samples, params: TranscriptionParams | None = None, caller: Caller = ANYBODY
    ) -> Generator[HeardWindow]:
        """The transcript of one audio as it comes, a window each; closing the iterator ends it.

        Args:
            params: as of `transcribe`; it is read in one piece, so that the text comes in order.
        Raises:
            PromptError, ConfigError: as `transcribe`, with the first window.
        """
        _check_audio(samples)
        heard: list[HeardWindow] = []
        with closing(self._piece(samples, params or TranscriptionParams(), told=heard.append)) as running:
            for window in running:
                yield from heard
                heard.clear()
                self._decode([window], caller)
            yield from heard

    def hear(self, samples: Samples, params: TranscriptionParams, draft: Sequence[Segment] = ()) -> Transcript:
        """The transcript of an audio that nearly repeats an earlier one, such as a recording that has grown since.

        The text is that of `transcribe`, in fewer passes the more of the draft is right.

        Args:
            draft: segments that are expected, with times from the beginning of `samples`.
        Raises:
            PromptError, ConfigError: as `transcribe`.
        """
        _check_audio(samples)
        return self._side_by_side([self._piece(samples, params, draft)])[0]

    def _side_by_side(self, running: Sequence[Generator[_Window, None, Transcript]]) -> list[Transcript]:
        """Let all go on until they have ended, a window each at a time."""
        results: dict[int, Transcript] = {}
        try:
            while left := [number for number in range(len(running)) if number not in results]:
                windows = []
                for number in left:
                    try:
                        windows.append(next(running[number]))
                    except StopIteration as end:
                        results[number] = end.value
                self._decode(windows)
        finally:
            for piece in running:
                piece.close()
        return [results[number] for number in range(len(running))]

    # -------------------------------------------------------------------------------------------- one audio

    def _piece(
        self,
        samples: Samples,
        params: TranscriptionParams,
        draft: Sequence[Segment] = (),
        told: Callable[[HeardWindow], None] | None = None,
    ) -> Generator[_Window, None, Transcript]:
        """Asks window after window, each of which is filled in before it goes on.

        Args:
            draft: see `hear`. told: is given each window that has been understood.
        """
        mel, tokens = self._mel, self.tokens
        count, seek, segments = mel.frame_count(samples), 0, list[Segment]()
        language = None if params.language is None else language_code(params.language)
        start = self._llm.tokenizer.encode_plain(f" {params.prompt.strip()}") if params.prompt.strip() else []
        before = PreviousText(start, kept=params.condition_on_previous_text)
        while seek < count:
            inputs = Inputs(features={"input_features": mel.window(samples, seek)})
            frames = min(mel.frames, count - seek)
            with self._read_once(inputs) as cache:
                if language is None:
                    language = self._language(cache)
                prompt = tokens.prompt(
                    language=language if tokens.multilingual else None,
                    task=params.task, timestamps=params.timestamps, previous=before.tokens,
                )  # fmt: skip
                begun = self._extended(cache, prompt[: prompt.index(tokens.start) + 1])
                silence = no_speech_probability(begun[-1], tokens)
                asked = _Window(inputs, prompt, 0.0, expected_tokens(draft, tokens, seek), params.seed)
                attempt, hottest = yield from self._attempts(asked, params, silence)
                if params.thresholds.is_silent(attempt):
                    new, step = list[Segment](), frames
                else:
                    new, step = window_segments(attempt, tokens, self._text, seek, frames)
                    if params.words:
                        new = self._with_words(cache, new, frames, _Spoken(language, params.task, seek))
                    before.add(new, hottest)
            segments += new
            seek += step
            if told is not None:
                until = min(seek * mel.samples_per_frame, len(samples)) / SAMPLE_RATE
                told(HeardWindow(tuple(new), until, language))
        return Transcript(
            language=language or "en", duration=len(samples) / SAMPLE_RATE, segments=tuple(segments), task=params.task
        )

    @contextmanager
    def _read_once(self, inputs: Inputs) -> Iterator[SequenceCache]:
        """In this block the encoder has read a window's features once, for all that is asked of them."""
        with self._llm.turns.turn():
            cache = self._runner.open(0, inputs)
        try:
            with self._llm.turns.turn():
                self._runner.encode([cache])
            yield cache
        finally:
            with self._llm.turns.turn():
                self._runner.release(cache)

    def _language(self, cache: SequenceCache) -> str:
        if not self.tokens.multilingual:
            return "en"
        return next(iter(language_probabilities(self._extended(cache, [self.tokens.start])[-1], self.tokens)))

    def _attempts(
        self, asked: _Window, params: TranscriptionParams, silence: float
    ) -> Generator[_Window, None, tuple[Attempt, float]]:
        """The attempt that is kept, and the last temperature that was tried.

        Args:
            asked: of each attempt, but for its temperature. silence: see `no_speech_probability`.
        """
        attempts, tokens = list[Attempt](), self.tokens
        for temperature in params.temperatures:
            window = replace(asked, temperature=temperature)
            yield window
            assert window.logits is not None
            sampled, rule = window.sampled, WhisperRule(tokens, timestamps=params.timestamps)
            attempt = Attempt(
                tokens=tuple(token for token in sampled if token != tokens.end),
                text=self._text([token for token in sampled if token < tokens.end]),
                temperature=temperature,
                avg_logprob=average_logprob(rule, window.logits, sampled, tokens),
                no_speech_prob=silence,
            )
            if params.thresholds.is_last(attempt, attempts):
                return attempt, temperature
            attempts.append(attempt)
        return params.thresholds.best(attempts), temperature

    def _text(self, tokens: Sequence[int]) -> str:
        return self._llm.tokenizer.decode(tokens)

    # -------------------------------------------------------------------------------------------- passes

    def _extended(self, cache: SequenceCache, tokens: list[int], *, all_logits: bool = False) -> torch.Tensor:
        """Logits behind the last of the tokens, (1, v), or behind each; the cache is empty before and after."""
        with self._llm.turns.turn():
            logits = self._runner.extend([cache], [tokens], all_logits=all_logits).logits
            self._runner.truncate(cache, 0)
        return logits

    def _decode(self, windows: Sequence[_Window], caller: Caller = ANYBODY) -> None:
        """Decode windows side by side."""
        llm = self._expecting() if any(window.draft for window in windows) else self._llm
        requests = []
        for window in windows:
            timestamps = self.tokens.no_timestamps not in window.prompt
            read = ReadPrompt(
                None, window.prompt, list(window.draft), inputs=window.inputs,
                rule=WhisperRule(self.tokens, timestamps=timestamps),
            )  # fmt: skip
            room = self._runner.info.max_context - len(window.prompt)
            params = SamplingParams(
                temperature=window.temperature, max_tokens=min(self.tokens.max_sampled, room), detokenize=False,
                seed=window.seed,
            )  # fmt: skip
            request = llm.request(read, params)[0]
            request.owner, request.priority, request.max_running = caller.owner, caller.priority, caller.max_running
            request.kept_logits = []
            requests.append(request)
        llm.backend.run(requests, caller.advance)
        for window, request in zip(windows, requests, strict=True):
            output = request.result()
            if (error := output.outputs[0].error) is not None:
                raise PacelineError(f"a window could not be decoded: {error}")
            assert request.kept_logits is not None
            window.sampled, window.logits = list(output.outputs[0].token_ids), torch.cat(request.kept_logits)
            with self._counting:
                self.cost += DecodingCost(1, len(window.sampled), output.metrics.num_steps)

    def _expecting(self) -> SpeechModel:
        """The same model with a drafter that reads predictions."""
        if "prediction" in self._llm.drafter_methods:
            return self._llm
        if self._drafting is None:
            self._drafting = self._llm.with_speculative_config({"method": "prediction"})
        return self._drafting

    def _with_words(self, cache: SequenceCache, segments: list[Segment], frames: int, spoken: _Spoken) -> list[Segment]:
        """Segments of a window with the times of their words.

        Args:
            frames: of audio in the window.
        """
        tokens, language = self.tokens, spoken.language
        texts = [[token for token in segment.tokens if token < tokens.end] for segment in segments]
        text = [token for one in texts for token in one]
        if not text:
            return segments
        heads = tokens.alignment_heads or self._later_heads()
        prompt = tokens.prompt(language=language if tokens.multilingual else None, task=spoken.task, timestamps=False)
        fed = [*prompt, *text, tokens.end]
        with self._llm.turns.turn():
            weights = self._runner.attention_to_source(cache, fed, heads)
            self._runner.truncate(cache, 0)
        logits = self._extended(cache, fed, all_logits=True)
        rows = logits[len(prompt) - 1 : -2, : tokens.end].float().softmax(-1)
        chances = rows.gather(1, torch.tensor(text, dtype=torch.int64)[:, None])[:, 0].tolist()
        words = timed_words(
            texts, text_starts(weights, len(prompt), frames), chances, self._text,
            language=language, offset=spoken.seek / FRAMES_PER_SECOND,
        )  # fmt: skip
        return [replace(segment, words=those) for segment, those in zip(segments, words, strict=True)]

    def _later_heads(self) -> list[tuple[int, int]]:
        """All heads of the later half of the layers, as published for checkpoints that name none."""
        half = self._runner.info.num_layers // 2
        return [(layer, head) for layer, head in self._runner.source_heads if layer >= half]


def _check_audio(samples: Samples) -> None:
    if not len(samples):
        raise PromptError("the audio is empty; give at least one sample")
