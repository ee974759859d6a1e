"""Are the Whisper folders of `real_models.py` whole? transformers reads them and writes down spoken digits.

usage: whisper_check.py --data FOLDER [MODEL ...]

MODEL is whisper-base or whisper-tiny.en (default: both), which `real_models.py` makes. FOLDER/spoken-digits holds an
archive of the Free Spoken Digit Dataset, `recordings*.tar.gz`. Of each speaker five digits, with a pause after each,
are read by `paceline.speech` and decoded by transformers alone, greedily: now and then a model repeats itself then.
Printed: the word error rate, by jiwer, and how many speakers were understood to the word. Exits with 1 where a weight
is missing or left over, or fewer than half of the speakers were. Needs `pip install '.[bench,speech]'`.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path

import jiwer
import numpy as np
import numpy.typing as npt
import torch
from real_models import model_folder
from transformers import AutoTokenizer, WhisperForConditionalGeneration

from paceline.speech import LogMel, load_audio

MODELS = ("whisper-base", "whisper-tiny.en")
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
PAUSE = np.zeros(6400, np.float32)
LOUD = 0.8
COUNT = 5
MOST_TOKENS = 32

Samples = npt.NDArray[np.float32]


def recordings(data: Path) -> dict[tuple[str, str, str], bytes]:
    """(digit, speaker, take) -> a wav file.

    Raises:
        SystemExit: there are none.
    """
    found = {}
    for archive in sorted(data.glob("spoken-digits/recordings*.tar.gz")):
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.name.endswith(".wav") and (file := tar.extractfile(member)):
                    digit, speaker, take = Path(member.name).stem.split("_")
                    found[digit, speaker, take] = file.read()
    if not found:
        sys.exit(f"{data} holds no spoken-digits/recordings*.tar.gz; give --data a folder that does")
    return found


def spoken(files: Mapping[tuple[str, str, str], bytes], draws: int = 1) -> list[tuple[str, Samples]]:
    """Some digits of each speaker in words, and their audio; drawn so often."""
    draw, found = random.Random(0), []
    for speaker in draws * sorted({speaker for _, speaker, _ in files}):
        drawn = draw.sample(sorted(key for key in files if key[1] == speaker), COUNT)
        audio = np.concatenate([part for key in drawn for part in (load_audio(files[key]), PAUSE)])
        found.append((" ".join(DIGITS[int(digit)] for digit, _, _ in drawn), audio * LOUD / np.abs(audio).max()))
    return found


def in_words(text: str) -> str:
    """A text without signs, its figures as words."""
    apart = re.sub(r"\d", r" \g<0> ", text.lower())
    return " ".join(DIGITS[int(word)] if word.isdigit() else word for word in re.findall(r"\w+", apart))


def check(name: str, data: list[tuple[str, Samples]]) -> bool:
    """Read a model and print how many words are wrong; whether all is well."""
    folder = model_folder(name)
    model, told = WhisperForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    left = [*told["missing_keys"], *told["unexpected_keys"]]
    tokenizer, mel = AutoTokenizer.from_pretrained(folder), LogMel.load(folder)
    language = {"language": "en"} if model.generation_config.is_multilingual else {}
    heard = []
    for _, audio in data:
        with torch.inference_mode():
            features = torch.from_numpy(mel.window(audio))[None]
            tokens = model.generate(features, max_new_tokens=MOST_TOKENS, **language)[0]
        heard.append(in_words(tokenizer.decode(tokens, skip_special_tokens=True)))
    said = [words for words, _ in data]
    right = sum(one == other for one, other in zip(said, heard, strict=True))
    print(f"{name}: {len(left)} weights missing or left over; word error rate {jiwer.wer(said, heard):.1%} of")
    print(f"    {COUNT * len(said)} words, {right} of {len(said)} speakers understood to the word")
    return not left and 2 * right >= len(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="MODEL", default=MODELS, help="default: both")
    parser.add_argument("--data", type=Path, required=True, help="folder of published data")
    given = parser.parse_args()
    if unknown := set(given.names) - {*MODELS}:
        parser.error(f"a model must be one of {', '.join(MODELS)}, got {min(unknown)!r}")
    data = spoken(recordings(given.data))
    fine = [check(name, data) for name in given.names]
    sys.exit(not all(fine))


if __name__ == "__main__":
    main()
