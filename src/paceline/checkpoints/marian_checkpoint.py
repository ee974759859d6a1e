"""Models in Marian's binary files: their settings as a `config.json`, their tensors under the names of safetensors
checkpoints.

A folder holds such a file, by whatever name that ends with .bin, and a tokenizer; it has no config.json. Source and
text have one vocabulary, whose token 0 ends both. Marian feeds no token before the first: the embedding there is zeros.
Sources: Marian (arXiv:1804.00344), the recurrent unit of its students (D19-5632).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from paceline.checkpoints.checkpoint import Checkpoint, TensorEntry
from paceline.checkpoints.marian_file import EMBEDDINGS, SETTINGS, MarianItem, read_marian
from paceline.errors import UnsupportedModelError
from paceline.utils import shortened

FAMILY: Final = "marian_file"
END: Final = 0
FEATURES: Mapping[str, tuple[object, ...]] = {
    "type": ("transformer",),
    "input-types": (None, [], ["sequence", "sequence"]),
    "layer-normalization": (None, False),
    "lemma-dim-emb": (None, 0),
    "output-omit-bias": (None, False),
    "right-left": (None, False),
    "tied-embeddings-all": (True,),
    "transformer-decoder-autoreg": ("rnn", "self-attention"),
    "transformer-ffn-depth": (2,),
    "transformer-no-projection": (None, False),
    "transformer-pool": (None, False),
    "transformer-preprocess": ("", "d"),
    "transformer-postprocess": ("dan", "an"),
    "transformer-postprocess-emb": ("", "d"),
    "transformer-postprocess-top": (None, "", "d"),
    "transformer-tied-layers": (None, []),
    "transformer-train-position-embeddings": (None, False),
    "ulr": (None, False),
}
"""Settings that change the model, with the values that are known here; None is a setting that is not there."""

LAYER = re.compile(r"^(encoder|decoder)_l(\d+)_(.+)$")
AROUND: Mapping[str, str] = {EMBEDDINGS: "embed_tokens.weight", "decoder_ff_logit_out_b": "lm_head.bias"}
NORMS: Mapping[str, str] = {
    "self_Wo_ln": "input_layernorm",
    "rnn_ffn_ln": "input_layernorm",
    "context_Wo_ln": "cross_attn_layernorm",
    "ffn_ffn_ln": "post_attention_layernorm",
}
PARTS: Mapping[str, str] = {
    **{f"{norm}_scale": f"{ours}.weight" for norm, ours in NORMS.items()},
    **{f"{norm}_bias": f"{ours}.bias" for norm, ours in NORMS.items()},
    **{f"self_W{part}": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"self_b{part}": f"self_attn.{part}_proj.bias" for part in "qkvo"},
    **{f"context_W{part}": f"cross_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"context_b{part}": f"cross_attn.{part}_proj.bias" for part in "qkvo"},
    "rnn_W": "mixer.in_proj.weight",
    "rnn_Wf": "mixer.gate_proj.weight",
    "rnn_bf": "mixer.gate_proj.bias",
    "ffn_W1": "mlp.up_proj.weight",
    "ffn_b1": "mlp.up_proj.bias",
    "ffn_W2": "mlp.down_proj.weight",
    "ffn_b2": "mlp.down_proj.bias",
}
"""Marian's name of a part of a layer -> ours."""

OF_INPUTS: Final = "_QuantMultA"
"""End of the names of numbers by which a matrix's inputs are multiplied before they are rounded, which is not done."""


def marian_config(path: Path) -> dict[str, Any]:
    """The configuration of a model in one of Marian's files.

    Raises:
        CheckpointError: a file that is cut off or damaged.
        UnsupportedModelError: a setting that is not implemented.
    """
    settings = read_marian(path).settings()
    for name, known in FEATURES.items():
        if settings.get(name) not in known:
            raise UnsupportedModelError(f"{path}: {name}={shortened(settings.get(name))} is not implemented")
    recurrent = settings["transformer-decoder-autoreg"] == "rnn"
    if recurrent and settings.get("dec-cell") != "ssru":
        raise UnsupportedModelError(f"{path}: dec-cell={shortened(settings.get('dec-cell'))} is not implemented")
    vocabularies = settings.get("dim-vocabs")
    if not isinstance(vocabularies, list) or vocabularies != vocabularies[:1] * 2:
        raise UnsupportedModelError(
            f"{path}: dim-vocabs={shortened(vocabularies)} is not implemented, but one vocabulary of source and text"
        )
    heads, inner = settings.get("transformer-heads"), settings.get("transformer-dim-ffn")
    return {
        "model_type": FAMILY,
        "is_encoder_decoder": True,
        "dtype": "float32",
        "vocab_size": vocabularies[0],
        "d_model": settings.get("dim-emb"),
        "encoder_layers": settings.get("enc-depth"),
        "decoder_layers": settings.get("dec-depth"),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": inner,
        "decoder_ffn_dim": inner,
        "recurrent_decoder": recurrent,
        "activation_function": settings.get("transformer-ffn-activation"),
        "eos_token_id": END,
        "decoder_start_token_id": END,
    }


class MarianCheckpoint(Checkpoint):
    """The tensors of one of Marian's files in float32, under the names that safetensors checkpoints give them; see
    `Checkpoint`.

    Attributes:
        folder: the file, for messages.
    """

    def __init__(self, path: Path) -> None:
        self.file, self.folder = read_marian(path), path
        self._names: dict[str, str] = {}
        self.entries: dict[str, TensorEntry] = {}
        for name, item in self.file.items.items():
            if name != SETTINGS and not name.endswith(OF_INPUTS):
                self._names[ours := _ours(name)] = name
                self.entries[ours] = TensorEntry(path, "F32", _shape(ours, item), item.nbytes)

    def header_sizes(self) -> dict[Path, int]:
        """See `Checkpoint.header_sizes`."""
        return {self.file.path: self.file.start}

    def tensor(self, name: str) -> torch.Tensor:
        """See `Checkpoint.tensor`."""
        tensor, shape = self.file.tensor(self._names[name]), self.entries[name].shape
        return tensor.t() if _is_turned(name, self.file.items[self._names[name]]) else tensor.view(shape)


def _ours(name: str) -> str:
    """The name of a tensor in safetensors checkpoints, or Marian's own where there is none."""
    match = LAYER.match(name)
    if match is None or match[3] not in PARTS:
        return AROUND.get(name, name)
    return f"{'encoder.' * (match[1] == 'encoder')}layers.{int(match[2]) - 1}.{PARTS[match[3]]}"


def _is_turned(ours: str, item: MarianItem) -> bool:
    """Whether it is a matrix of inputs and outputs, which are outputs and inputs elsewhere."""
    return len(item.shape) == 2 and item.shape[0] > 1 and ours != AROUND[EMBEDDINGS]


def _shape(ours: str, item: MarianItem) -> tuple[int, ...]:
    if _is_turned(ours, item):
        return item.shape[::-1]
    return item.shape if ours in AROUND.values() else (item.count,)
