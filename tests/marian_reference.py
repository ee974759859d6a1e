"""Marian's transformer in plain PyTorch, in float32, by Marian's own names and one sentence at a time: what ours is
held against. Decoders are recurrent (the simpler simple recurrent unit, D19-5632) or attend to themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from paceline.checkpoints.marian_file import MarianFile

END = 0
EPS = 1e-6


class MarianReference:
    """A model of one of Marian's files.

    Args:
        swapped: the roles of the recurrent gate's two halves are exchanged, which is wrong.
    """

    def __init__(self, file: MarianFile, *, swapped: bool = False) -> None:
        settings, self.file, self._swapped = file.settings(), file, swapped
        self.heads, self.depths = settings["transformer-heads"], (settings["enc-depth"], settings["dec-depth"])
        self.recurrent = settings["transformer-decoder-autoreg"] == "rnn"
        names = [name for name in file.items if not name.startswith("special:")]
        self.weights = {name: file.tensor(name).contiguous() for name in names}

    def affine(self, x: torch.Tensor, matrix: str, bias: str | None) -> torch.Tensor:
        """x (rows, in) times a matrix, and a bias."""
        product = x @ (self.weights[matrix].t() if matrix == "Wemb" else self.weights[matrix])
        return product if bias is None else product + self.weights[bias]

    # -------------------------------------------------------------------------------------------- layers

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale, bias = (self.weights[f"{name}_ln_{part}"].flatten() for part in ("scale", "bias"))
        return F.layer_norm(x, x.shape[-1:], scale, bias, EPS)

    def _attention(self, name: str, x: torch.Tensor, seen: torch.Tensor, *, causal: bool = False) -> torch.Tensor:
        """Rows x attend to rows `seen`; the sum is normed."""

        def heads(given: torch.Tensor, part: str) -> torch.Tensor:
            made = self.affine(given, f"{name}_W{part}", f"{name}_b{part}")
            return made.view(len(given), self.heads, -1).transpose(0, 1)

        query, key, value = heads(x, "q"), heads(seen, "k"), heads(seen, "v")
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)
        mixed = (scores.softmax(-1) @ value).transpose(0, 1).reshape(len(x), -1)
        return self._norm(self.affine(mixed, f"{name}_Wo", f"{name}_bo") + x, f"{name}_Wo")

    def _recurrence(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gates = self.affine(x, f"{name}_Wf", f"{name}_bf").sigmoid()
        gates = 1 - gates if self._swapped else gates
        inputs, cell, outputs = self.affine(x, f"{name}_W", None), torch.zeros(x.shape[1]), []
        for gate, one in zip(gates, inputs, strict=True):
            cell = gate * cell + (1 - gate) * one
            outputs.append(cell.relu())
        return self._norm(torch.stack(outputs) + x, f"{name}_ffn")

    def _feed_forward(self, name: str, x: torch.Tensor) -> torch.Tensor:
        inner = self.affine(x, f"{name}_W1", f"{name}_b1").relu()
        return self._norm(self.affine(inner, f"{name}_W2", f"{name}_b2") + x, f"{name}_ffn")

    def _placed(self, x: torch.Tensor) -> torch.Tensor:
        """Embeddings (rows, width), scaled, with their positions."""
        rows, half = len(x), x.shape[1] // 2
        angles = torch.arange(rows)[:, None] * torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
        return x * math.sqrt(x.shape[1]) + torch.cat((angles.sin(), angles.cos()), 1)

    # -------------------------------------------------------------------------------------------- the model

    def encode(self, source: Sequence[int]) -> torch.Tensor:
        """(tokens, width) states of a source, which ends with its end token."""
        x = self._placed(self.weights["Wemb"][list(source)])
        for layer in range(1, self.depths[0] + 1):
            x = self._attention(f"encoder_l{layer}_self", x, x)
            x = self._feed_forward(f"encoder_l{layer}_ffn", x)
        return x

    def states(self, encoded: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        """(1 + tokens, width) states from which follows what stands behind nothing, behind the first token, and so on;
        what is fed before the first is no token.
        """
        table = self.weights["Wemb"]
        x = self._placed(torch.cat((torch.zeros(1, table.shape[1]), table[list(tokens)])))
        for layer in range(1, self.depths[1] + 1):
            name = f"decoder_l{layer}"
            if self.recurrent:
                x = self._recurrence(f"{name}_rnn", x)
            else:
                x = self._attention(f"{name}_self", x, x, causal=True)
            x = self._attention(f"{name}_context", x, encoded)
            x = self._feed_forward(f"{name}_ffn", x)
        return x

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return self.affine(states, "Wemb", "decoder_ff_logit_out_b")

    @torch.inference_mode()
    def text_logits(self, source: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """(1 + tokens, vocabulary) logits of a text, see `states`."""
        return self.logits(self.states(self.encode(source), tokens))

    @torch.inference_mode()
    def translate(self, source: Sequence[int], most: int) -> list[int]:
        """The likeliest tokens one after another, at most so many, the end token among them."""
        encoded, tokens = self.encode(source), list[int]()
        while len(tokens) < most and END not in tokens:
            tokens.append(int(self.logits(self.states(encoded, tokens)[-1:]).argmax()))
        return tokens
