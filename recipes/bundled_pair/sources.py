"""The public data behind the bundled models: where each file comes from, how to fetch and how to read it.

A local folder may hold a file as published or gzip-compressed; the checksum is always that of the uncompressed bytes.
Sets that are cut locally (MBPP, Advising) come out the same from the published files, because rows are chosen here by
their number and split.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.bundled_pair.corpus import chat

RAW = "https://raw.githubusercontent.com"
STDLIB_SKIP = ("/site-packages/", "/test", "/idlelib/", "/lib2to3/", "/encodings/", "pydoc_data", "/turtledemo/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file: its name in a local data folder, where it was published, and the SHA-256 of its published bytes."""

    local: str
    repository: str
    commit: str
    path: str
    sha256: str
    licence: str
    cut_sha256: str = ""  # of the local file, where that holds a part of the published one

    @property
    def url(self) -> str:
        return f"{RAW}/{self.repository}/{self.commit}/{self.path}"


SOURCES: dict[str, Source] = {
    "math": Source(
        local="gsm8k/train.jsonl",
        repository="openai/grade-school-math",
        commit="3101c7d5072418e28b9008a6636bde82a006892c",
        path="grade_school_math/data/train.jsonl",
        sha256="17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
        licence="MIT",
    ),
    "mbpp": Source(
        local="mbpp/mbpp.jsonl",
        repository="OckBench/OckBench",
        commit="b72752a0ba5989d3c212675ec60d3eedcd838628",
        path="data/mbpp.jsonl",
        sha256="ccf64ceae9c5403bf50a044cb6d505bfd2a2963ee58338ba268fd65beab92a9f",
        licence="CC BY 4.0",
        cut_sha256="3d7308df2ff7d65f4f98fa3eb49ca56aec67dd08cdd4a74a318113ec4048c84b",
    ),
    "sql": Source(
        local="advising-sql/advising.train-dev.json",
        repository="jkkummerfeld/text2sql-data",
        commit="5050bad2309a93636ea4788d3660c9202bf11e0e",
        path="data/advising.json",
        sha256="ec8d6a2d570b1768b25ef51d2445bb599b537d9b3d802bf498513a70337599bd",
        licence="CC BY 4.0",
        cut_sha256="a8ee2ed9edad9ab1742949060d0c5f25fa1863d25938ba191a7d728678b1dd3c",
    ),
    "summary": Source(
        local="scitldr/train.jsonl",
        repository="allenai/scitldr",
        commit="5ccad9c00a60ad75c9e04abf7f27d0f53f983b20",
        path="SciTLDR-Data/SciTLDR-A/train.jsonl",
        sha256="b222771d387be585cfdf5ae957b36757138415a352e0a3e3b23f73f87c3b1119",
        licence="Apache-2.0",
    ),
    "instruct": Source(
        local="self-instruct/seed_tasks.jsonl",
        repository="yizhongw/self-instruct",
        commit="0b26ccaa415992100fa32df62d41b994cf928e23",
        path="data/seed_tasks.jsonl",
        sha256="7779004fa198fdf27cf70a159363879d8a26c53329e11b436af17b3941875f48",
        licence="Apache-2.0",
    ),
    "holmes": Source(
        local="sherlock-holmes/1661.txt",
        repository="GITenberg/The-Adventures-of-Sherlock-Holmes_1661",
        commit="7e5dd2703fbf503c004063e96ab7c61262375e5f",
        path="1661.txt",
        sha256="2a0ce5568625a304f54fbb6bfdeeadf527a1437254b5f0e06b5a9e233d4784a2",
        licence="public domain",
    ),
    "shakespeare": Source(
        local="tiny-shakespeare/input.txt",
        repository="pytorch/examples",
        commit="77f55b912142e11fcfdf5b530231fb9c52f181e8",
        path="distributed/minGPT-ddp/mingpt/data/input.txt",
        sha256="86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        licence="public domain",
    ),
}

# Never trained on.
EVALUATION: dict[str, Source] = {
    "gsm8k-test": Source(
        local="gsm8k/test.first-half.jsonl",
        repository="openai/grade-school-math",
        commit="3101c7d5072418e28b9008a6636bde82a006892c",
        path="grade_school_math/data/test.jsonl",
        sha256="3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
        cut_sha256="651a538889e5becb430196c446231fb0f05164f0c8993e2832bfb7ac5be78410",
        licence="MIT",
    ),
    "humaneval": Source(
        local="humaneval/HumanEval.even.jsonl",
        repository="openai/human-eval",
        commit="6d43fb980f9fee3c892a914eda09951f772ad10d",
        path="data/HumanEval.jsonl.gz",
        sha256="1d49078ba3e2b196b9344535bef34a43021f038fad9561d6ee7c53450609a6a2",
        cut_sha256="41ca66bdb2c8d9a23aea692c6e2bc57d270b69f990e162a06558b625b6b99a1a",
        licence="MIT",
    ),
    "scitldr-dev": Source(
        local="scitldr/dev.jsonl",
        repository="allenai/scitldr",
        commit="5ccad9c00a60ad75c9e04abf7f27d0f53f983b20",
        path="SciTLDR-Data/SciTLDR-A/dev.jsonl",
        sha256="3191fa98ccc09521332b7a1cd63b1930be4e8df125a235ccd31e40329709525e",
        licence="Apache-2.0",
    ),
}


def read_source(source: Source, data: Path | None, cache: Path) -> str:
    """The text of one file, from `data` if given, else from `cache`, else fetched into it. Raises SystemExit with the
    reason.
    """
    path = data / source.local if data else cache / source.repository / source.path.removesuffix(".gz")
    packed = path.with_name(path.name + ".gz")
    if packed.is_file():
        content, path = gzip.decompress(packed.read_bytes()), packed
    elif path.is_file():
        content = path.read_bytes()
    elif data:
        raise SystemExit(
            f"{path} is missing; complete the folder given to --data, or leave --data out to fetch {source.url}"
        )
    else:
        content = fetch(source.url)
    check(content, source, path, cut_allowed=data is not None)
    if not data and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return content.decode("utf-8", errors="replace")


def check(content: bytes, source: Source, path: Path, *, cut_allowed: bool) -> None:
    """Raises SystemExit when the bytes are not the published ones (or, where allowed, their known part)."""
    found = hashlib.sha256(content).hexdigest()
    if found != source.sha256 and not (cut_allowed and found == source.cut_sha256):
        raise SystemExit(
            f"{path} has SHA-256 {found}, expected {source.sha256} as published at {source.url}; get the file again"
        )


def fetch(url: str, timeout: float = 60.0) -> bytes:
    """The bytes behind an address, unpacked if it ends in .gz. Raises SystemExit naming the address and the reason."""
    print(f"fetching {url}", flush=True)
    try:
        with urllib.request.urlopen(url, timeout=timeout) as reply:
            content: bytes = reply.read()
    except (urllib.error.URLError, TimeoutError) as error:
        raise SystemExit(f"cannot fetch {url}: {error}; check the network, or pass --data with a local copy") from error
    return gzip.decompress(content) if url.endswith(".gz") else content


def rows(text: str) -> Iterator[Any]:
    return map(json.loads, filter(None, text.split("\n")))


def gsm8k(text: str) -> list[str]:
    return [chat(row["question"], row["answer"]) for row in rows(text)]


def mbpp(text: str) -> list[str]:
    """Tasks 1 to 10, 511 on, and the odd ones between; the even ones stay free for benchmarks."""
    chosen = (row for row in rows(text) if row["task_id"] <= 10 or row["task_id"] >= 511 or row["task_id"] % 2)
    return [
        chat(
            row["text"] + "\nYour code should pass:\n" + "\n".join(row["test_list"]),
            row["code"].replace("\r\n", "\n").replace("\t", "    "),
        )
        for row in chosen
    ]


def advising(text: str) -> list[str]:
    """The train and dev queries, variables filled in; a query's first SQL form answers all its wordings."""
    documents = []
    for query in json.loads(text):
        if query["query-split"] not in {"train", "dev"}:
            continue
        for sentence in query["sentences"]:
            question, answer = sentence["text"], query["sql"][0]
            for name, value in sentence["variables"].items():
                question, answer = question.replace(name, value), answer.replace(name, value)
            documents.append(chat("Write SQL: " + question, answer))
    return documents


def scitldr(text: str) -> list[str]:
    return [chat("Summarize: " + " ".join(row["source"]), row["target"][0]) for row in rows(text)]


def self_instruct(text: str) -> list[str]:
    return [
        chat(row["instruction"] + ("\n" + case["input"] if case["input"] else ""), case["output"])
        for row in rows(text)
        for case in row["instances"]
        if case["output"].strip()
    ]


def gutenberg(text: str) -> list[str]:
    """The book between Project Gutenberg's start and end marks, without its producer's line; header and licence are
    left out.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith("*** START OF")), None)
    end = next((i for i, line in enumerate(lines) if line.startswith("*** END OF")), None)
    if start is None or end is None or end <= start:
        raise SystemExit("the Gutenberg text has no '*** START OF' and '*** END OF' lines; is it the right file?")
    body = [
        line for line in lines[start + 1 : end] if not line.startswith(("Produced by", "End of the Project Gutenberg"))
    ]
    return ["\n".join(body).strip()]


def plain(text: str) -> list[str]:
    return [text.strip()]


def standard_library() -> list[str]:
    """The modules of the running Python, its tests left out (PSF licence)."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if not any(part in path.as_posix() for part in STDLIB_SKIP):
            text = path.read_text(encoding="utf-8", errors="replace")
            if 200 < len(text) < 200_000:
                texts.append(text)
    return texts


READERS: dict[str, Callable[[str], list[str]]] = {
    "math": gsm8k,
    "mbpp": mbpp,
    "sql": advising,
    "summary": scitldr,
    "instruct": self_instruct,
    "holmes": gutenberg,
    "shakespeare": plain,
}


def load_sources(data: Path | None, cache: Path) -> dict[str, list[str]]:
    """All texts by source name, the standard library as `code`."""
    texts = {name: READERS[name](read_source(source, data, cache)) for name, source in SOURCES.items()}
    return texts | {"code": standard_library()}


def gsm8k_test(text: str) -> list[tuple[str, str]]:
    """The first half of the published rows."""
    return [(chat(row["question"]), row["answer"]) for row in [*rows(text)][:659]]


def human_eval(text: str) -> list[tuple[str, str]]:
    """The even tasks, as plain code to be continued."""
    chosen = (row for row in rows(text) if int(row["task_id"].removeprefix("HumanEval/")) % 2 == 0)
    return [(row["prompt"], row["canonical_solution"]) for row in chosen]


def scitldr_dev(text: str) -> list[tuple[str, str]]:
    return [(chat("Summarize: " + " ".join(row["source"])), row["target"][0]) for row in rows(text)]


EVALUATION_READERS: dict[str, Callable[[str], list[tuple[str, str]]]] = {
    "gsm8k-test": gsm8k_test,
    "humaneval": human_eval,
    "scitldr-dev": scitldr_dev,
}


def evaluation_texts(data: Path | None, cache: Path) -> dict[str, list[tuple[str, str]]]:
    """(prompt, published answer) pairs by set name; for measuring only."""
    return {name: EVALUATION_READERS[name](read_source(source, data, cache)) for name, source in EVALUATION.items()}
