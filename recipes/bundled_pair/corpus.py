"""What all stages of the recipe share: the corpus format, the tokenizer, batches, model folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END_OF_TEXT, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END)  # ids 0 to 3, in this order
END_OF_TEXT_ID, END_ID = 0, 3
VOCAB_SIZE = 6144
CONTEXT = 2048
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|assistant|>\n{{ m['content'] }}\n<|end|>"
    "{% else %}<|user|>\n{{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% "
    "endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text of the corpus. `source` names the set; `heldout` texts are never trained on."""

    source: str
    text: str
    heldout: bool = False


def chat(user: str, assistant: str = "") -> str:
    """One turn as the models read it; without an answer, the prompt of one."""
    prompt = f"{USER}\n{user.strip()}\n{ASSISTANT}\n"
    return f"{prompt}{assistant.strip()}\n{END}" if assistant else prompt


def prompt_of(text: str) -> str | None:
    """The part of a chat document that comes before the answer; None for plain text."""
    head, mark, _ = text.partition(f"\n{ASSISTANT}\n")
    return head + mark if mark and text.startswith(USER) else None


def write_documents(path: Path, documents: Iterable[Document]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(document), ensure_ascii=False) + "\n" for document in documents)


def read_documents(corpus: Path) -> list[Document]:
    """All documents of a corpus folder. Raises SystemExit when prepare.py has not made it."""
    path = corpus / "documents.jsonl"
    if not path.is_file():
        raise SystemExit(f"no corpus at {corpus}: {path.name} is missing; run recipes.bundled_pair.prepare first")
    with path.open(encoding="utf-8") as file:
        return [Document(**json.loads(line)) for line in file]


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a corpus or model folder, with the chat template and both end tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_file=str(path / "tokenizer.json"),
        bos_token=END_OF_TEXT,
        eos_token=END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> list[list[int]]:
    return [encoding.ids for encoding in tokenizer.backend_tokenizer.encode_batch(list(texts))]


def join(sequences: Iterable[list[int]]) -> Tensor:
    """(n,) int16 ids of all sequences, each followed by the end-of-text id (6144 entries fit into int16)."""
    return torch.tensor([token for ids in sequences for token in (*ids, END_OF_TEXT_ID)], dtype=torch.int16)


def shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def windows(total: int, length: int, batch: int, seed: int) -> Iterator[Tensor]:
    """Endless (batch, length) int64 index windows into a stream of `total` tokens.

    Every pass visits all whole windows once, in random order, from a random offset. Raises SystemExit when the stream
    is too short.
    """
    generator = torch.Generator().manual_seed(seed)
    count = (total - length) // length
    if count < batch:
        raise SystemExit(
            f"the corpus has {total} tokens, too few for batches of {batch} x {length}; lower --batch or --length"
        )
    within = torch.arange(length)
    while True:
        offset = int(torch.randint(0, length, (1,), generator=generator))
        order = torch.randperm(count, generator=generator)
        for first in range(0, count - batch + 1, batch):
            yield (order[first : first + batch, None] * length + offset) + within


def llama_config(
    *, width: int, layers: int, heads: int, kv_heads: int, mlp: int, head_dim: int = 64, tied: bool
) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=mlp,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_ID,
        pad_token_id=END_OF_TEXT_ID,
        rope_theta=10000.0,
    )


def load_model(path: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> LlamaForCausalLM:
    """A model folder in evaluation mode. Raises SystemExit when there is none."""
    if not (path / "config.json").is_file():
        raise SystemExit(
            f"no model at {path}: config.json is missing; run recipes.bundled_pair.train first, or pass another folder"
        )
    return LlamaForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write weights in bfloat16, configuration, tokenizer and end tokens; the model itself is converted."""
    model.generation_config.eos_token_id = [END_ID, END_OF_TEXT_ID]
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # the writer leaves it readable by its owner alone
    tokenizer.save_pretrained(out, save_jinja_files=False)


def pick_device(name: str) -> str:
    return ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
