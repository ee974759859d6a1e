"""An LSTM on rows by themselves: every row begins with a cell of zeros, so that no row knows of another one.

    i, g, o = W x + b;  c = sigmoid(i) * tanh(g);  y = sigmoid(o) * tanh(c)                        (r, d) each

What is left of a layer without a cell before it: the second of its four gates, which forgets, and what reads the
layer's last output do nothing.

Source: Hochreiter and Schmidhuber 1997, as the code of Falcon (arXiv:2412.12639) runs it, which gives its rows to the
layer as a batch of texts of one token each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.layers.linear import Map


def counting(gates: torch.Tensor) -> torch.Tensor:
    """(3 d, ...) rows of the gates that count, of PyTorch's (4 d, ...): input, forget, cell, output."""
    entering, _, cell, leaving = gates.chunk(4)
    return torch.cat((entering, cell, leaving))


def gated(gates: torch.Tensor) -> torch.Tensor:
    """(..., d) output of a layer, of its gates (..., 3 d): input, cell, output."""
    entering, cell, leaving = gates.chunk(3, -1)
    return torch.sigmoid(leaving) * torch.tanh(torch.sigmoid(entering) * torch.tanh(cell))


def through_gates(layers: Sequence[Map]) -> Map:
    """What the layers make of (r, in), one after the other; each makes the gates (r, 3 d) of a layer."""

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = gated(layer(x))
        return x

    return run
