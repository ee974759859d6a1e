"""Translation by Bergamot's English-Portuguese model beside Bergamot's own engine: which texts are the same?

usage: bergamot.py --data FOLDER [--engine PYTHON] [--count 50]

FOLDER holds XQuAD, `xquad/xquad.en*.json`: sentences of its paragraphs, drawn with a seed, are translated to
Portuguese, the likeliest token at every step. PYTHON is that of an environment with `bergamot` (Python 3.10 or older);
without it the engine is left out.

ours             in float32; only tokens of the sentence's short list, as Marian does it
ours, whole      without a short list
ours, int8       as ours, weights rounded to int8 by ours
ours, drafted    as ours, with the texts of the line above as drafts, and how many tokens a pass
swapped          as ours, of a file with the roles of the recurrent gates swapped: a control, which must differ
engine, int8     as the model is shipped: int8 products, whose inputs are shifted
engine, unshifted
                 its other int8 products, which in exact arithmetic are the same
engine, float32  of a file with the same weights in float32

Results: `results/bergamot.json`: how many texts each two have in common, and those in which ours and the engine differ.
Exits with 1 where ours differs from the engine in float32 or from what is drafted, or the control does not.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from common import RESULTS, save
from real_models import MARIAN, model_folder
from tqdm import tqdm

from paceline import LLM, SamplingParams
from paceline.checkpoints import read_marian

SHORT_LIST = 0xF11A48D5013417F5
"""What a binary short list begins with."""

UNKNOWN = 1
INT8_TEXT, FLOAT32, LINE = 0x101, 0x404, 256
SENTENCE = re.compile(r"(?<=[.?!]) (?=[A-Z])")
LENGTHS = range(40, 200)
DRAFTS = {"method": "prediction", "num_speculative_tokens": 16}
PRECISIONS = {"int8": "int8shiftAlphaAll", "unshifted": "int8Alpha", "float32": "float32"}


class ShortList:
    """Which tokens may stand in a translation: the most frequent ones, those that each token of the source is often
    translated to, and those of the source. Marian adds frequent ones until their number is a multiple of 8.
    """

    def __init__(self, path: Path) -> None:
        magic, _, self._frequent, _, offsets, ids = (int(number) for number in np.fromfile(path, "<u8", 6))
        if magic != SHORT_LIST:
            sys.exit(f"{path} must be a binary short list")
        self._offsets = np.fromfile(path, "<u8", offsets, offset=48).astype(np.int64)
        self._ids = np.fromfile(path, "<u4", ids, offset=48 + 8 * offsets)

    def allowed(self, source: Sequence[int]) -> list[int]:
        """Ascending ids, without that of unknown words, which Marian does not write."""
        found, more = {*range(self._frequent), *source}, self._frequent
        for token in source:
            found.update(self._ids[self._offsets[token] : self._offsets[token + 1]].tolist())
        while len(found) % 8:
            found.add(more)
            more += 1
        return sorted(found - {UNKNOWN})


def sentences(data: Path, count: int) -> list[str]:
    """Some of XQuAD.

    Raises:
        SystemExit: there are none.
    """
    found = []
    for path in sorted(data.glob("xquad/xquad.en*.json")):
        for article in json.loads(path.read_text())["data"]:
            for paragraph in article["paragraphs"]:
                found += [one for one in SENTENCE.split(paragraph["context"]) if len(one) in LENGTHS]
    if not found:
        sys.exit(f"{data} holds no xquad/xquad.en*.json; give --data a folder that does")
    return random.Random(0).sample(found, count)


def write_float32(source: Path, to: Path, *, swapped: bool = False) -> None:
    """The same model with all weights in float32; `swapped`: the gates of its recurrent layers are negated, so that as
    much is taken of a new input as was kept of the old state.
    """
    file = read_marian(source)
    text = yaml.safe_dump(file.settings()).encode() + b"\0"
    items = {"special:model.yml": (INT8_TEXT, (len(text),), text)}
    for name in file.items.keys() - items.keys():
        if not name.endswith("_QuantMultA"):
            sign = -1 if swapped and name.endswith(("_rnn_Wf", "_rnn_bf")) else 1
            tensor = (sign * file.tensor(name)).contiguous()
            items[name] = (FLOAT32, tuple(tensor.shape), tensor.numpy().tobytes())
    to.write_bytes(_packed(items))


def _packed(items: Mapping[str, tuple[int, tuple[int, ...], bytes]]) -> bytes:
    """Marian's binary of types, shapes and values."""
    values = [data + bytes(-len(data) % LINE) for _, _, data in items.values()]
    heads, names, shapes = b"", b"", b""
    for (name, (kind, shape, _)), padded in zip(items.items(), values, strict=True):
        heads += struct.pack("<4Q", len(name) + 1, kind, len(shape), len(padded))
        names += name.encode() + b"\0"
        shapes += struct.pack(f"<{len(shape)}i", *shape)
    front = struct.pack("<2Q", 1, len(items)) + heads + names + shapes
    fill = -(len(front) + 8) % LINE
    return front + struct.pack("<Q", fill) + bytes(fill) + b"".join(values)


def by_ours(
    folder: Path, given: Sequence[str], *, whole: bool = False, drafts: Sequence[str] = (), **options: Any
) -> tuple[list[str], float]:
    """Translations by a folder's model, and tokens a pass.

    Args:
        whole: leave out the short list. drafts: what each translation is expected to be, if anything.
        options: of `LLM`.
    """
    llm = LLM(folder, dtype="float32", speculative_config=DRAFTS if drafts else None, **options)
    shortlist = ShortList(folder / "lex.bin")
    texts, tokens, passes = [], 0, 0
    for place, text in enumerate(tqdm(given, desc=folder.name)):
        source = llm.tokenizer.encode(text)
        allowed = None if whole else shortlist.allowed(source)
        params = SamplingParams(temperature=0, max_tokens=5 * len(source) // 2, allowed_token_ids=allowed)
        prompt: dict[str, Any] = {"encoder_prompt": source} | ({"prediction": drafts[place]} if drafts else {})
        (output,) = llm.generate(prompt, params)
        texts.append(output.outputs[0].text.strip())
        tokens += len(output.outputs[0].token_ids)
        passes += output.metrics.num_steps
    return texts, tokens / passes


def by_engine(python: str, model: Path, folder: Path, precision: str, given: Sequence[str]) -> tuple[list[str], str]:
    """Translations by Bergamot's engine, and its version."""
    files = [model, folder / "vocab.spm", folder / "lex.bin"]
    command = [python, str(Path(__file__).with_name("bergamot_peer.py")), *map(str, files), precision]
    lines = "".join(json.dumps(text) + "\n" for text in given)
    done = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    told, *found = (json.loads(line) for line in done.stdout.splitlines())
    return [text.strip() for text in found], told["version"]


def translations(given: Sequence[str], engine: str | None) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Texts by who made them, and what else is known."""
    folder = model_folder("bergamot-en-pt")
    texts, known = dict[str, list[str]](), dict[str, Any]()
    texts["ours"], _ = by_ours(folder, given)
    texts["ours, whole"], _ = by_ours(folder, given, whole=True)
    texts["ours, int8"], _ = by_ours(folder, given, quantization="int8")
    texts["ours, drafted"], known["tokens_per_pass"] = by_ours(folder, given, drafts=texts["ours, int8"])
    with tempfile.TemporaryDirectory() as name:
        work = Path(name) / "swapped"
        work.mkdir()
        for file in ("vocab.spm", "lex.bin", "tokenizer.json"):
            (work / file).symlink_to(folder / file)
        write_float32(folder / MARIAN, work / MARIAN, swapped=True)
        texts["swapped"], _ = by_ours(work, given)
        if engine is not None:
            write_float32(folder / MARIAN, Path(name) / MARIAN)
            for kind, precision in PRECISIONS.items():
                model = Path(name) / MARIAN if kind == "float32" else folder / MARIAN
                texts[f"engine, {kind}"], known["engine"] = by_engine(engine, model, folder, precision, given)
    return texts, known


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of published data")
    parser.add_argument("--engine", metavar="PYTHON")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    sources = sentences(given.data, given.count)
    texts, known = translations(sources, given.engine)
    equal = {
        one: {other: sum(map(str.__eq__, texts[one], texts[other])) for other in texts if other != one} for one in texts
    }
    for one, others in equal.items():
        print(f"{one:18}", *(f"{others.get(other, len(sources)):3}" for other in texts))
    differing = [
        {"source": source} | {name: found[place] for name, found in texts.items() if name.startswith(("ours", "eng"))}
        for place, source in enumerate(sources)
        if texts["ours"][place] != texts.get("engine, int8", texts["ours"])[place]
    ]
    save("bergamot", {"sentences": len(sources), **known, "equal": equal, "differing": differing}, given.folder)
    same = [texts["ours"] == texts.get(name, texts["ours"]) for name in ("ours, drafted", "engine, float32")]
    sys.exit(not all(same) or equal["ours"]["swapped"] > 0)


if __name__ == "__main__":
    main()
