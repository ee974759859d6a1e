"""Paceline beside other engines on the same weights, token ids, precision, threads and lengths, greedily, in turn, in
one run.

usage: peers.py [--model smollm2] [--threads 2] [--repeats 3] [--batches 1,8] [--tokens 64] [--prompts 8]
                [--only large,prompts] [--peers all] [--documents FOLDER] [--quick] [--data FOLDER]

prompts  the model on the shipped prompts, the bundled one with its draft model where an engine takes one
data     the same on Spec-Bench, HumanEval, MT-Redundant and GSM8K (test), whose files lie in --data as they are
         published
large    the 291M Llama with random weights in bfloat16; its greedy text repeats itself, which helps prompt lookup of
         all alike

Each part is one run of `python -m lab bench`, whose document and report go to --documents (megabytes; a temporary
folder by default). `results/peers.json` keeps of every part and batch size how our plain decoding does against the
fastest plain peer, our fastest speculative setting against the fastest setting of every peer, and how many tokens a
pass of the target yields under each. Make the peers first: `python -m lab peers install all`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import RESULTS, kept, save
from decoding import Model, add_model, model_of
from methods import FILES

from lab.__main__ import main as lab
from paceline.bench.report import fastest_setting, peer_ratio
from paceline.bench.run import load_document

LOOKUPS = (
    "ngram",
    '{"method": "ngram", "num_speculative_tokens": 8}',
    '{"method": "ngram", "num_speculative_tokens": 15}',
)
DRAFTS = (
    "draft_model",
    '{"method": "draft_model", "num_speculative_tokens": 4}',
    '{"method": ["ngram", "draft_model"]}',
)
HALF = (
    '{"name": "llama.cpp", "method": "plain", "dtype": "float16"}',
    '{"name": "llama.cpp", "method": "ngram", "dtype": "float16"}',
)
LONG = (
    '{"name": "llama.cpp", "method": "ngram", "num_speculative_tokens": 16}',
    '{"name": "openvino-genai", "method": "ngram", "num_speculative_tokens": 16}',
    '{"name": "transformers", "method": "ngram", "num_speculative_tokens": 16}',
)


def arguments(part: str, model: Model, given: argparse.Namespace) -> list[str]:
    """The words of `paceline bench` for a part, but for where its results go."""
    if part == "large":
        shape = f"synthetic:prompt=64,output={given.tokens},count={given.prompts}"
        words = ["--random-shape", "291m", "-w", shape]
        settings = ("auto", *LOOKUPS)
    else:
        names = ("bundled",) if part == "prompts" else workloads(given.data)
        words = [] if model.name == "bundled" else ["--model", str(model.folder)]
        words += [word for name in names for word in ("-w", name)]
        words += ["--limit", str(3 * given.prompts), "--max-tokens", str(2 * given.tokens)]
        settings = ("auto", *LOOKUPS, *(DRAFTS if model.name == "bundled" else ()))
    peers = [given.peers, *(HALF + LONG if given.peers == "all" and not given.quick else ())]
    words += [word for setting in settings[: 2 if given.quick else None] for word in ("-s", setting)]
    words += [word for peer in peers for word in ("--peers", peer)]
    return [*words, "--batch", given.batches, "--repeats", str(given.repeats), "--threads", str(given.threads)]


def workloads(data: Path) -> tuple[str, ...]:
    """The published sets as `paceline bench --workload` takes them."""
    files = {name: sorted(data.glob(pattern)) for name, pattern in FILES.items()}
    if missing := [FILES[name] for name, found in files.items() if not found]:
        sys.exit(f"{data} holds no {', '.join(missing)}; give --data a folder that does")
    return tuple(f"{name}={found[0]}" for name, found in files.items())


def claims(made: dict[str, Any]) -> list[dict[str, Any]]:
    """What is to be shown, for every workload and batch size."""
    found = []
    places = dict.fromkeys((cell["workload"], cell["batch"]) for cell in made["cells"])
    for workload, batch in places:
        here = (workload, batch)
        ours = [cell for cell in made["cells"] if (cell["workload"], cell["batch"]) == here]
        theirs = [peer for peer in made["peers"] if (peer["workload"], peer["batch"]) == here]
        plain = [cell for cell in ours if cell["setting"] == made["baseline"]]
        bases = [peer for peer in theirs if peer["setting"].split("(")[0].split(",")[0] == "plain"]
        fastest = fastest_setting([cell for cell in ours if cell not in plain])
        made_by = {
            name: fastest_setting([peer for peer in theirs if peer["name"] == name])
            for name in dict.fromkeys(p["name"] for p in theirs)
        }
        record: dict[str, Any] = {"workload": workload, "batch": batch}
        record["plain over the fastest plain peer"] = _duel(fastest_setting(plain), fastest_setting(bases))
        record["fastest over the fastest of every peer"] = {
            name: _duel(fastest, peer) for name, peer in made_by.items()
        }
        speeds = {cell["setting"]: cell["tokens_per_second"] for cell in ours} | {
            f"{peer['name']} {peer['setting']}": peer["tokens_per_second"] for peer in theirs
        }
        record["tokens per second"] = {name: speed["value"] for name, speed in speeds.items() if speed is not None}
        record["withheld"] = {
            f"{peer['name']} {peer['setting']}": peer["reason"] for peer in theirs if peer["reason"] is not None
        }
        record["tokens per target pass"] = {cell["setting"]: cell["mean_acceptance_length"] for cell in ours} | {
            f"{peer['name']} {peer['setting']}": peer["mean_acceptance_length"] for peer in theirs
        }
        found.append(record)
    return found


def _duel(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> dict[str, Any] | None:
    """Both speeds and their ratio; None where one of them has no speed."""
    if ours is None or theirs is None:
        return None
    ratio = peer_ratio(ours, theirs)
    return {
        "ours": ours["setting"],
        "theirs": f"{theirs['name']} {theirs['setting']}",
        "tokens_per_second": [one["tokens_per_second"]["value"] for one in (ours, theirs)],
        "ratio": None if ratio is None else ratio.to_dict(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--documents", type=Path, help="folder of the documents and reports; default: a temporary one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--only", default="large,prompts")
    parser.add_argument("--peers", default="all")
    parser.add_argument("--quick", action="store_true", help="two settings, and no other options of the peers")
    parser.add_argument("--data", type=Path, help="for the part of this name")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    given = parser.parse_args()
    if "data" in given.only.split(",") and given.data is None:
        parser.error("the part data needs --data FOLDER")
    result, model, made = kept("peers", given.folder), model_of(given.model), list[str]()
    documents = given.documents or Path(tempfile.mkdtemp(prefix="paceline-peers-"))
    for part in given.only.split(","):
        name = part if part == "large" else f"{part} {model.name}"
        path = documents / f"peers {name}.json"
        words = ["bench", *arguments(part, model, given), "-o", str(path), "--html", str(path.with_suffix(".html"))]
        typed, sys.argv = sys.argv, ["lab", *words]  # the document says which command makes it
        code = lab(words)
        sys.argv = typed
        if code not in (0, 1):
            sys.exit(code)
        result[name] = claims(load_document(path))
        made.append(name)
        for record in result[name]:
            print(record)
    save("peers", result, given.folder, parts=made)


if __name__ == "__main__":
    main()
