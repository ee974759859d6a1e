"""Audio as it comes, from standard input or a file that grows, and the captions that are printed of it."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from select import select
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

import numpy as np

from paceline.cli.terminal import HARMLESS
from paceline.errors import PacelineError, PromptError

if TYPE_CHECKING:
    from io import BufferedReader

    from paceline.live_transcriber import LiveTranscriber, Pace
    from paceline.speech import Samples, Word

PIECE: Final = 1 << 13
"""Bytes that are read at once: a quarter of a second of raw audio."""

WAITING: Final = 4 * 3600
"""Pieces that may wait, an hour of raw audio; what sends more waits itself."""

LOOK: Final = 0.1
"""Seconds after which a file is looked at again."""

JOIN: Final = 2.0
"""Seconds that the thread which reads is waited for."""


def captions(live: LiveTranscriber, source: AudioSource, form: str, pace: Pace) -> tuple[float, bool]:
    """Print the words of an audio as they become final; its seconds, and whether a signal ended it.

    Args:
        form: txt or json.
    """
    from paceline.live_transcriber import LEAST_NEW
    from paceline.speech import SAMPLE_RATE

    printer, count, ended = WordPrinter(form), 0, False
    try:
        with source.reading():
            while not source.ended:
                samples = source.come(max(pace.wait, LOOK))
                live.feed(samples)
                count += len(samples)
                if live.new_seconds >= LEAST_NEW and pace.wait <= 0:
                    with pace.working():
                        printer.show(live.update())
        with pace.working():
            printer.show(live.finish())
    except KeyboardInterrupt:
        printer.show(live.rest)
        ended = True
    printer.end()
    return count / SAMPLE_RATE, ended


class WordPrinter:
    """Prints words: as a text, or one as JSON a line."""

    def __init__(self, form: str) -> None:
        self._json, self._begun = form == "json", False

    def show(self, words: Sequence[Word]) -> None:
        for word in words:
            if self._json:
                told = {"word": word.text.strip(), "start": round(word.start, 3), "end": round(word.end, 3)}
                print(json.dumps(told, ensure_ascii=False))
                continue
            text = word.text if self._begun else word.text.lstrip()
            sys.stdout.write(text.translate(HARMLESS) if sys.stdout.isatty() else text)
            self._begun = True
        sys.stdout.flush()

    def end(self) -> None:
        if self._begun:
            print(flush=True)


class AudioSource:
    """Bytes of an audio, read on a thread of their own so that none are lost while others are transcribed.

    Attributes:
        ended: all have been taken.
    """

    def __init__(self, name: str, wait: float) -> None:
        from paceline.speech import PcmStream

        self._name, self._wait = name, wait
        self._stream = PcmStream(wav=Path(name).suffix.lower() == ".wav")
        self._queue: Queue[bytes | PacelineError | None] = Queue(WAITING)
        self._stop = threading.Event()
        self.ended = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In this block bytes are read."""
        thread = threading.Thread(target=self._read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(JOIN)

    def come(self, seconds: float) -> Samples:
        """(n,) samples that have come, and come within so many seconds.

        Raises:
            PacelineError: what is wrong with them.
        """
        end, found = monotonic() + seconds, [np.zeros(0, np.float32)]
        while (left := end - monotonic()) > 0 and not self.ended:
            try:
                data = self._queue.get(timeout=left)
            except Empty:
                break
            if isinstance(data, PacelineError):
                raise data
            self.ended = data is None
            found.append(self._stream.finish() if data is None else self._stream.feed(data))
        return np.concatenate(found)

    def _read(self) -> None:
        try:
            if self._name == "-":
                self._pass_on(self._standard_input())
            else:
                with Path(self._name).open("rb") as file:
                    self._pass_on(lambda size: self._grown(file.read, size))
            self._queue.put(None)
        except OSError as error:
            self._queue.put(PromptError(f"{self._name!r} cannot be read ({error.strerror or error})"))

    def _pass_on(self, read: Callable[[int], bytes]) -> None:
        while not self._stop.is_set() and (data := read(PIECE)):
            self._queue.put(data)

    def _standard_input(self) -> Callable[[int], bytes]:
        """Reads it past its buffer, whose lock Python cannot take at its end while a thread waits in it."""
        try:
            handle = sys.stdin.fileno()
        except io.UnsupportedOperation:
            handle = -1
        if handle < 0 or os.name != "posix":  # elsewhere `select` knows sockets only
            return cast("BufferedReader", sys.stdin.buffer).read1
        return lambda size: self._come_in(handle, size)

    def _come_in(self, handle: int, size: int) -> bytes:
        while not self._stop.is_set():
            if select([handle], [], [], LOOK)[0]:
                return os.read(handle, size)
        return b""

    def _grown(self, read: Callable[[int], bytes], size: int) -> bytes:
        """What a file has more than before; nothing after it has not grown for long."""
        end = monotonic() + self._wait
        while not (data := read(size)) and monotonic() < end and not self._stop.is_set():
            time.sleep(LOOK)
        return data
