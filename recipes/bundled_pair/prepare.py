"""Corpus and tokenizer of the bundled models.

Reads --data DIR with the sets of sources.py, or nothing, and they are fetched by pinned commit and checksum.
Writes OUT/documents.jsonl (source, text, heldout) and OUT/tokenizer.json (byte-level BPE, 6144 entries).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.bundled_pair.corpus import SPECIAL_TOKENS, VOCAB_SIZE, Document, shuffled, write_documents
from recipes.bundled_pair.sources import load_sources
from recipes.common.options import add_flags, new_parser

HELDOUT_EVERY = 50  # one document in fifty measures, and is not trained on
MIN_FOR_HELDOUT = 100  # the two books stay whole


def split(texts: dict[str, list[str]], seed: int) -> list[Document]:
    """All texts as documents, in random order; every fiftieth of a large enough set is held out."""
    documents = [
        Document(
            source=source,
            text=text,
            heldout=len(group) >= MIN_FOR_HELDOUT and index % HELDOUT_EVERY == HELDOUT_EVERY - 1,
        )
        for source, group in texts.items()
        for index, text in enumerate(group)
    ]
    return [documents[i] for i in shuffled(len(documents), seed)]


def train_tokenizer(texts: list[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def prepare(texts: dict[str, list[str]], out: Path, *, seed: int = 1, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write the corpus folder. Held-out texts shape neither tokenizer nor models."""
    out.mkdir(parents=True, exist_ok=True)
    documents = split(texts, seed)
    write_documents(out / "documents.jsonl", documents)
    train_tokenizer([d.text for d in documents if not d.heldout], vocab_size).save(str(out / "tokenizer.json"))
    counts = Counter((d.source, d.heldout) for d in documents)
    for source in texts:
        print(f"{source:12} {counts[source, False]:6} documents to train on, {counts[source, True]:4} held out")
    return out


def main(arguments: list[str] | None = None) -> None:
    parser = new_parser(__doc__)
    add_flags(parser, "data", "cache", out=Path("build/corpus"), seed=1)
    options = parser.parse_args(arguments)
    prepare(load_sources(options.data, options.cache), options.out, seed=options.seed)


if __name__ == "__main__":
    main()
