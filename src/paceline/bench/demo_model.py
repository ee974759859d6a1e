"""Which model `paceline demo` runs on where none is named: a real one that is at hand, or that the hub gives quickly.

The hub is asked in a thread of its own, since looking up its name can take longer than any timeout of a request. The
download runs in a process of its own, so that Ctrl-C ends it at once, whatever library is at work; the hub's cache
keeps what has come.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

from paceline.bench.bundled import SMOLLM2, smollm2_folder
from paceline.errors import PacelineError

HUB_ID = f"HuggingFaceTB/{SMOLLM2}"
PATIENCE = 4.0
"""Seconds that the hub may take to say how large the model is."""

WEIGHTS, TOKENIZER = "model.safetensors", "tokenizer.json"
DOWNLOAD = "import sys; from paceline.bench.demo_model import fetch; sys.exit(fetch())"


@dataclass(frozen=True, slots=True)
class Offer:
    """A model that can be downloaded.

    Attributes:
        size: of its files, bytes.
        source: where from.
    """

    size: int
    source: str

    def __str__(self) -> str:
        return f"{SMOLLM2} ({self.size / 1e6:.0f} MB) from {self.source}"


def model_at_hand() -> str | None:
    """The folder of the real model, made by benchmarks/real_models.py or in the hub's cache, if there is one."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    folders = [smollm2_folder()]
    with suppress(LocalEntryNotFoundError, HfHubHTTPError):
        folders.append(Path(snapshot_download(HUB_ID, local_files_only=True)))
    whole = (folder for folder in folders if (folder / WEIGHTS).is_file() and (folder / TOKENIZER).is_file())
    return next((str(folder) for folder in whole), None)


def offer_of_hub() -> Offer | None:
    """What the hub has; None where it may not be asked (HF_HUB_OFFLINE) or does not answer within PATIENCE."""
    from huggingface_hub import HfApi, constants

    answers: list[Offer] = []

    def ask() -> None:
        try:
            info = HfApi().model_info(HUB_ID, files_metadata=True, timeout=PATIENCE)
        except Exception:  # of several libraries: whatever it is, there is no model to be had quickly
            return
        size = sum(file.size or 0 for file in info.siblings or () if "/" not in file.rfilename)
        answers.append(Offer(size, f"{constants.ENDPOINT}/{HUB_ID}"))

    if constants.HF_HUB_OFFLINE:
        return None
    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return answers[0] if answers else None


def fetch() -> str | None:
    """Download the real model in this process; returns what went wrong, in a line."""
    from paceline.checkpoints import resolve

    try:
        resolve(HUB_ID)
    except PacelineError as error:
        return f"paceline: {error}"
    return None


def download() -> bool:
    """Fetch the real model into the hub's cache, with the hub's own progress bars; whether that went well.

    Raises:
        KeyboardInterrupt: the user had enough; what has come is kept.
    """
    with subprocess.Popen([sys.executable, "-c", DOWNLOAD], start_new_session=True) as process:
        try:
            return process.wait() == 0
        except KeyboardInterrupt:
            process.kill()
            raise
