"""`paceline transcribe`: speech to text by a Whisper model, of files or, live, of what is still being said."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from paceline.cli import outputs
from paceline.cli.figures import loading, memory, speech_figures
from paceline.cli.interrupts import INTERRUPTED, TerminatedToo
from paceline.cli.options import open_llm, with_flags
from paceline.cli.terminal import HARMLESS, counted, progress_bar, remark, report
from paceline.errors import ConfigError, PromptError
from paceline.utils import choice, near_file, number, replacing

if TYPE_CHECKING:
    from paceline.speech import Samples, Transcript
    from paceline.transcriber import Transcriber, TranscriptionParams

ENDINGS: Final = {"txt": "txt", "srt": "srt", "vtt": "vtt", "json": "json", "verbose_json": "json"}
"""Formats -> how names of their files end."""

LIVE_FORMATS: Final = ("txt", "json")
SHARE: Final = 0.5
WAIT: Final = 5.0
"""Defaults of --cpu-share and --live-wait."""

NO_NAMES: Final = "name files, as in `paceline transcribe talk.wav`, or send one to standard input, which has none"
CLOSED: Final = "standard input is closed; name a file, as in `paceline transcribe talk.wav`"
UNREADABLE: Final = 2
"""Exit code where one of several audios cannot be read, as of all that is wrong with what is given."""

LONG: Final = 30.0
"""Seconds of audio from which on progress is shown."""

AudioFiles = Annotated[
    list[str] | None, typer.Argument(metavar="AUDIO", help="Files: wav, flac, ogg, mp3, ...; - is standard input.")
]
Language = Annotated[
    str | None, typer.Option("--language", metavar="NAME", help="Spoken language, as en; default: the model listens.")
]
Task = Annotated[str, typer.Option("--task", metavar="TASK", help="transcribe, or translate to English.")]
Prompt = Annotated[str, typer.Option("--prompt", metavar="TEXT", help="Text before the audio: names to be expected.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", metavar="FLOAT", help="Of the first attempt at a window; default: 0.")
]
Seed = Annotated[int | None, typer.Option("--seed", metavar="INT", help="Of temperatures above 0; default: 0.")]
Format = Annotated[
    str, typer.Option("--format", metavar="FORMAT", help="txt, srt, vtt, json or verbose_json; live: txt or json.")
]
Words = Annotated[
    bool,
    typer.Option("--words", help="Time each word: srt and vtt show a word at a time, verbose_json lists them."),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="Where the text goes; of several audios, a folder."),
]
Live = Annotated[
    bool,
    typer.Option(
        "--live",
        help="Captions of standard input (16 kHz mono s16le, or WAV of 16-bit samples), or of a file that grows.",
    ),
]
CpuShare = Annotated[
    float | None,
    typer.Option("--cpu-share", metavar="FLOAT", help="Share of the time that --live may work; default: 0.5."),
]
LiveWait = Annotated[
    float | None,
    typer.Option(
        "--live-wait", metavar="SECONDS", help="For --live: a file that has not grown so long has ended; default: 5."
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Print on standard error what it took.")]


@with_flags(sampling=False)
def command(
    *,
    audios: AudioFiles = None,
    language: Language = None,
    task: Task = "transcribe",
    prompt: Prompt = "",
    temperature: Temperature = None,
    seed: Seed = None,
    form: Format = "txt",
    words: Words = False,
    output: Output = None,
    live: Live = False,
    cpu_share: CpuShare = None,
    live_wait: LiveWait = None,
    stats: Stats = False,
    flag_values: dict[str, Any],
) -> None:
    """Write down what is said in audio files, or live."""
    choice("--format", form, LIVE_FORMATS if live else tuple(ENDINGS))
    _check_words(form, words=words, live=live)
    params = _params(language, task, prompt, words=words, temperature=temperature, seed=seed)
    names = audios or ["-"]
    if "-" in names and sys.stdin is None:
        raise PromptError(CLOSED)
    share, wait = SHARE if cpu_share is None else cpu_share, WAIT if live_wait is None else live_wait
    if live:
        _check_live(names, output, share, wait)
    elif (cpu_share, live_wait) != (None, None):
        raise ConfigError(f"{'--live-wait' if cpu_share is None else '--cpu-share'} is for captions; add --live")
    elif not audios and sys.stdin.isatty():
        raise PromptError(NO_NAMES)
    jobs = [] if live else _jobs(names, form, output)
    need_model(flag_values)
    start = perf_counter()
    llm = open_llm(flag_values, speech=True)
    load = loading(perf_counter() - start)
    from paceline.transcriber import Transcriber

    transcriber = Transcriber(llm)
    transcriber.check(params)
    with TerminatedToo():
        if live:
            told, code = _captions(transcriber, params, names[0], form, share=share, wait=wait)
        else:
            told, code = _files(transcriber, params, jobs, form, words=words)
    for line in (load, *told, memory()) if stats else ():
        remark(line)
    if code:
        raise typer.Exit(code)


def _captions(
    transcriber: Transcriber, params: TranscriptionParams, name: str, form: str, *, share: float, wait: float
) -> tuple[list[str], int]:
    """Captions of an audio that is still coming; what it took, in lines, and the code to exit with."""
    from paceline.cli import live_audio
    from paceline.live_transcriber import LiveTranscriber, Pace

    source = live_audio.AudioSource(name, wait)
    captions, pace = LiveTranscriber(transcriber, params), Pace(share)
    seconds, ended = live_audio.captions(captions, source, form, pace)
    told = speech_figures(transcriber.cost, seconds, pace.busy)
    words = f"{counted(captions.updates, 'transcript')}, {counted(len(captions.stable), 'word')}"
    return [*told, f"captions     {words}"], INTERRUPTED if ended else 0


def need_model(flag_values: Mapping[str, Any]) -> None:
    """Reject that no model was named: the bundled ones read no speech.

    Raises:
        ConfigError: none was.
    """
    if "model" not in flag_values:
        raise ConfigError("--model must name a Whisper model, such as openai/whisper-base; the bundled one reads text")


def _params(language: str | None, task: str, prompt: str, *, words: bool, **drawn: float | None) -> TranscriptionParams:
    """What is wanted of each audio.

    Args:
        drawn: `temperature` and `seed`; None is their default.
    """
    from paceline.transcriber import TranscriptionParams

    given: dict[str, Any] = {name: value for name, value in drawn.items() if value is not None}
    return TranscriptionParams(language=language, task=task, prompt=prompt, words=words, **given)


# ------------------------------------------------------------------------------------------------ files


@dataclass(frozen=True, slots=True)
class Job:
    """An audio, `-` for standard input, and the file that its text is written to; None prints it."""

    name: str
    output: Path | None


def _jobs(names: Sequence[str], form: str, output: Path | None) -> list[Job]:
    """What is to be done, checked before a model is loaded for it.

    Raises:
        PromptError: an audio that is not there.
        ConfigError: a place where nothing can be written, or two texts for one.
    """
    for name in names:
        if name != "-":
            _check_file(name, "an audio file")
    if names.count("-") > 1:
        raise ConfigError("standard input can be read once; give - once")
    if output is None:
        if len(names) > 1 and form in ("srt", "vtt"):
            raise ConfigError(f"--format {form} of several audios needs --output FOLDER")
        return [Job(name, None) for name in names]
    if len(names) == 1 and not output.is_dir():
        _check_output(output, names)
        return [Job(names[0], output)]
    if not output.is_dir():
        raise ConfigError(f"--output must be a folder for several audios, got {str(output)!r}; make it first")
    jobs = [Job(name, output / f"{_stem(name)}.{ENDINGS[form]}") for name in names]
    for job in jobs:
        assert job.output is not None
        if sum(other.output == job.output for other in jobs) > 1:
            raise ConfigError(f"several texts would go to {str(job.output)!r}; transcribe these audios one by one")
        _check_output(job.output, names)
    return jobs


def _check_output(output: Path, names: Sequence[str]) -> None:
    """Reject a file that cannot be written, or that would be lost.

    Raises:
        ConfigError: it cannot be, or is one of the audios.
    """
    outputs.must_be_writable("--output", output)
    if output.exists() and any(output.samefile(name) for name in names if name != "-"):
        raise ConfigError(f"--output {str(output)!r} is an audio that is to be read; name another file")


def _check_file(name: str, wanted: str) -> None:
    """Reject what cannot be read.

    Raises:
        PromptError: it is not there, is no file, or may not be read.
    """
    path = Path(name)
    if not name or not path.is_file():
        if name and path.exists():
            got = "a folder" if path.is_dir() else "a pipe or a device; send what it holds to standard input"
        else:
            got = f"no file{near_file(path)}"
        raise PromptError(f"{name!r} must be {wanted}, got {got}")
    if not os.access(path, os.R_OK):
        raise PromptError(f"{name!r} may not be read by you; name another file, or change its permissions")


def _stem(name: str) -> str:
    return "standard-input" if name == "-" else Path(name).stem


def _files(
    transcriber: Transcriber, params: TranscriptionParams, jobs: Sequence[Job], form: str, *, words: bool
) -> tuple[list[str], int]:
    """Lines on what it took, and the exit code.

    What was understood until a signal came, if anything, is written; one of several that cannot be read is passed over.
    """
    seconds, audio, code = 0.0, 0.0, 0
    for job in jobs:
        try:
            samples = _read(job.name)
        except PromptError as error:
            if len(jobs) == 1:
                raise
            report(f"paceline: {error}")
            code = UNREADABLE
            continue
        start = perf_counter()
        transcript, ended = _transcribed(transcriber, params, samples)
        seconds += perf_counter() - start
        audio += transcript.duration
        heading = f"--- {job.name} ---" if len(jobs) > 1 and form == "txt" else ""
        if transcript.segments or not ended:
            _write(transcript, job, form, heading, words=words)
        if ended:
            code = INTERRUPTED
            break
    return speech_figures(transcriber.cost, audio, seconds), code


def _read(name: str) -> Samples:
    from paceline.speech import AudioLimits, load_audio

    limits = AudioLimits()
    source = sys.stdin.buffer.read(limits.max_bytes + 1) if name == "-" else Path(name)
    if source == b"":
        raise PromptError(NO_NAMES)
    return load_audio(source, limits=limits)


def _transcribed(transcriber: Transcriber, params: TranscriptionParams, samples: Samples) -> tuple[Transcript, bool]:
    """What was understood, and whether a signal came before the end."""
    from paceline.speech import SAMPLE_RATE, Transcript

    duration, segments, language, ended = len(samples) / SAMPLE_RATE, [], params.language or "en", False
    stream = transcriber.stream(samples, params)
    try:
        for window in _with_progress(stream, duration):
            segments += window.segments
            language = window.language
    except KeyboardInterrupt:
        stream.close()
        ended = True
    return Transcript(language=language, duration=duration, segments=tuple(segments), task=params.task), ended


def _with_progress(stream: Iterator[Any], duration: float) -> Iterator[Any]:
    """The same windows; of a long audio a terminal shows how far they are."""
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    if duration <= LONG:
        yield from stream
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with progress_bar(*columns) as bar:
        task = bar.add_task("transcribing", total=duration)
        for window in stream:
            bar.update(task, completed=window.until)
            yield window


def _write(transcript: Transcript, job: Job, form: str, heading: str, *, words: bool) -> None:
    from paceline.speech import write_transcript

    text = write_transcript(transcript, form, words=words)
    if job.output is not None:
        whole = text if text.endswith("\n") else f"{text}\n"
        with outputs.writing("--output", job.output):
            file = job.output.resolve()
            if (file.exists() and not file.is_file()) or not os.access(file.parent, os.W_OK):  # as a device
                file.write_text(whole, encoding="utf-8")
                return
            with replacing(file) as fresh:
                fresh.write_text(whole, encoding="utf-8")
        return
    if heading:
        print(heading)
    shown = text.removesuffix("\n")
    print(shown.translate(HARMLESS) if sys.stdout.isatty() else shown, flush=True)


def _check_words(form: str, *, words: bool, live: bool) -> None:
    """Reject times of words where the text shows none.

    Raises:
        ConfigError: it does not.
    """
    if words and live and form == "txt":
        raise ConfigError("--words has no effect on a text; add --format json to see the time of each word")
    if words and not live and form in ("txt", "json"):
        raise ConfigError(
            f"--words has no effect on {form}; add --format srt, vtt or verbose_json to see times of words"
        )


def _check_live(names: Sequence[str], output: Path | None, cpu_share: float, live_wait: float) -> None:
    """Reject what captions have not.

    Raises:
        ConfigError: several audios, an output, no share, or a time that is none.
    """
    from paceline.live_transcriber import Pace

    if len(names) > 1:
        raise ConfigError(f"--live takes one audio, got {len(names)}")
    if output is not None:
        raise ConfigError("--live prints words as they come; leave --output out, or send them on with > FILE")
    Pace(cpu_share)
    number("--live-wait", live_wait, 0.0, 1e6, "be a number of seconds of 0 or more")
    if names[0] == "-" and sys.stdin.isatty():
        raise PromptError("--live reads audio on standard input, which is a terminal; send it through a pipe")
    if names[0] != "-":
        _check_file(names[0], "an audio file that grows")
