"""What SmolLM2 says to prompts of many kinds: the texts that the heads of `heads.py` are trained on.

usage: head_texts.py --data FOLDER [--prompts 3200] [--max-tokens 256] [--work FOLDER] [--out FILE]
                     [--skip 0] [--max-num-seqs 16]

FOLDER holds gsm8k, mbpp, scitldr, xquad and self-instruct; of none of them is the part read that heads are measured
with. A sixth of the prompts is written by the model itself: it goes on from an empty user's turn (Magpie,
arXiv:2406.08464). Kinds follow each other in turn. A run that was killed goes on where it stopped; one that is stopped
for good can be written out with `--prompts` lowered. Results: `data/smollm2_answers.jsonl.gz`, conversations with the
temperature of each answer, and beside it the same name with `.json`: where they come from.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections.abc import Iterator
from hashlib import sha256
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from common import provenance
from decoding import asked
from real_models import WEIGHTS, smollm2

from paceline import LLM, SamplingParams
from paceline.training import answered

OUT = Path(__file__).parent / "data" / "smollm2_answers.jsonl.gz"
LONGEST = 380
"""Tokens of a prompt; longer ones are left out."""


def rows(file: Path) -> list[dict[str, Any]]:
    data = file.read_bytes()
    text = gzip.decompress(data) if file.suffix == ".gz" else data
    return [json.loads(line) for line in text.splitlines()]


def programs(data: Path) -> Iterator[str]:
    """MBPP's tasks: every second one as the head of a function with the task in its docstring."""
    for number, row in enumerate(rows(data / "mbpp" / "mbpp.jsonl")):
        head = re.search(r"^def .*:", row["code"], re.MULTILINE)
        yield f'{head[0]}\n    """ {row["text"]}\n    """\n' if head and number % 2 else row["text"]


def summaries(data: Path) -> Iterator[str]:
    for row in rows(data / "scitldr" / "train.jsonl.gz"):
        yield "Summarize: " + " ".join(row["source"])


def readings(data: Path) -> tuple[list[str], list[str], list[str]]:
    """XQuAD: passages with a question, questions alone, German sentences to translate."""
    with_passage, alone, german = [], [], []
    for language in ("en", "de"):
        for article in json.loads((data / "xquad" / f"xquad.{language}.part-a.json").read_text())["data"]:
            for paragraph in article["paragraphs"]:
                text = paragraph["context"]
                if language == "de":
                    german += ["Translate German to English: " + one for one in re.split(r"(?<=[.!?]) (?=[A-Z])", text)]
                    continue
                for place, question in enumerate(paragraph["qas"]):
                    (alone if place % 2 else with_passage).append(question["question"])
                    if not place % 2:
                        with_passage[-1] = f"{text}\n\n{question['question']}"
    return with_passage, alone, [one for one in german if 40 < len(one) < 400]


def seeds(data: Path) -> Iterator[str]:
    for row in rows(data / "self-instruct" / "seed_tasks.jsonl"):
        given = row["instances"][0]["input"]
        yield f"{row['instruction']}\n{given}" if given else row["instruction"]


def own(llm: LLM, count: int) -> Iterator[str]:
    """Messages that the model writes itself where a user's turn begins."""
    mark = "<PLACE>"
    text = llm.tokenizer.decode(asked(llm, mark), skip_special_tokens=False)
    begun = llm.tokenizer.encode(text[: text.index(mark)])
    params = [SamplingParams(temperature=1.0, top_p=0.99, seed=seed, max_tokens=LONGEST) for seed in range(count)]
    for one in llm.generate([{"prompt_token_ids": begun}] * count, params):
        one.raise_for_error()
        if one.outputs[0].finish_reason == "stop" and len(one.outputs[0].text) > 20:
            yield one.outputs[0].text.strip()


def messages(llm: LLM, data: Path, count: int, work: Path) -> list[str]:
    """Messages of all kinds in turn."""
    with_passage, alone, german = readings(data)
    if not (kept := work / "own.json").exists():
        kept.write_text(json.dumps(list(own(llm, count // 6))))
    maths = [row["question"] for row in rows(data / "gsm8k" / "train.jsonl.gz")]
    kinds = [maths, programs(data), summaries(data), with_passage, alone, german, seeds(data),
             json.loads(kept.read_text())]  # fmt: skip
    shuffled = [random.Random(0).sample(list(kind), len(kind)) for kind in map(list, kinds)]
    every = chain.from_iterable(zip_longest(*shuffled))
    found = (one for one in every if one is not None and len(asked(llm, one)) <= LONGEST)
    return list(islice(dict.fromkeys(found), count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=3200)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--work", type=Path, default=Path("head_texts"))
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--skip", type=int, default=0, help="of the prompts, which another run has answered")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    llm = LLM(smollm2(), speculative_config=None, max_num_seqs=given.max_num_seqs)
    wanted = messages(llm, given.data, given.prompts, given.work)[given.skip :]
    asked_for = {json.dumps(asked(llm, one)): one for one in wanted}
    prompts = {sha256(ids.encode()).hexdigest(): json.loads(ids) for ids in asked_for}
    made = answered(llm, prompts, given.work / "answers.jsonl", max_tokens=given.max_tokens, sampled_share=0.25)
    lines = []
    for one, message in zip(made, asked_for.values(), strict=True):
        turns = [{"role": "user", "content": message},
                 {"role": "assistant", "content": llm.tokenizer.decode(one.answer)}]  # fmt: skip
        ended = one.answer[-1] in llm.defaults.eos_ids
        row = {"messages": turns, "temperature": one.temperature, "ended": ended}
        lines.append(json.dumps(row, ensure_ascii=False))
    text = "\n".join(lines) + "\n"
    given.out.parent.mkdir(exist_ok=True)
    given.out.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    facts = {"model": WEIGHTS, "texts": len(lines), "tokens": sum(len(one.answer) for one in made),
             "sha256 of the text": sha256(text.encode()).hexdigest(), **provenance()}  # fmt: skip
    given.out.with_suffix("").with_suffix(".json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
