"""A made Whisper checkpoint: random weights, letters as its text tokens, windows of 30 s, 32 tokens of a window."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from paceline.speech import SAMPLE_RATE, Samples

LANGUAGES = ("en", "de", "haw")
SPECIAL = (
    *("endoftext", "startoftranscript", *LANGUAGES, "translate", "transcribe"),
    *("startoflm", "startofprev", "nospeech", "notimestamps"),
)
SIZES: dict[str, Any] = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64, "decoder_ffn_dim": 48, "num_mel_bins": 80, "max_source_positions": 1500,
    "max_target_positions": 64,
}  # fmt: skip


def write(folder: Path, *, multilingual: bool = True, seed: int = 0) -> Path:
    """The files of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = _tokenizer(folder)
    end, start = ids["<|endoftext|>"], ids["<|startoftranscript|>"]
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(
        **SIZES, vocab_size=len(ids), pad_token_id=end, bos_token_id=end, eos_token_id=end,
        decoder_start_token_id=start,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    model.generation_config = _generation(ids, multilingual=multilingual)
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
    return folder


def _tokenizer(folder: Path) -> dict[str, int]:
    """Writes a tokenizer of bytes with Whisper's special tokens; their ids."""
    letters = {sign: number for number, sign in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in SPECIAL])
    tokenizer.add_tokens([AddedToken(f"<|{step * 0.02:.2f}|>") for step in range(1501)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return tokenizer.get_vocab(with_added_tokens=True)


def _generation(ids: dict[str, int], *, multilingual: bool) -> transformers.GenerationConfig:
    end, spoken = ids["<|endoftext|>"], {ids[sign] for sign in ("Ġ", *"abcdefghijklmnopqrstuvwxyz")}
    special = [ids[f"<|{name}|>"] for name in SPECIAL[1:] if name not in LANGUAGES and name != "notimestamps"]
    more: dict[str, Any] = {}
    if multilingual:
        more["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        more["task_to_id"] = {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return transformers.GenerationConfig(
        is_multilingual=multilingual,
        suppress_tokens=sorted({*range(end), *special, *(ids[f"<|{code}|>"] for code in LANGUAGES)} - spoken),
        begin_suppress_tokens=[ids["Ġ"], end],
        max_initial_timestamp_index=50,
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        max_length=SIZES["max_target_positions"],
        return_timestamps=False,
        **more,
    )  # fmt: skip


def sound(seconds: float, seed: int = 0) -> Samples:
    """Tones that change every half a second."""
    random = np.random.default_rng(seed)
    count = round(seconds * SAMPLE_RATE)
    pitches = np.repeat(random.uniform(100, 3000, int(seconds * 2) + 1), SAMPLE_RATE // 2)[:count]
    samples: Samples = (0.3 * np.sin(2 * np.pi * np.cumsum(pitches) / SAMPLE_RATE)).astype(np.float32)
    return samples + (0.01 * random.standard_normal(count)).astype(np.float32)


def wav(samples: Samples, rate: int = SAMPLE_RATE) -> bytes:
    """A wav file of samples."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()
