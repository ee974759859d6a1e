"""Chimera's heads: a trigram encoder makes an input of the last three tokens, a full-context encoder, a decoder layer,
puts it behind the target's states of all tokens before, and each head predicts one token from what comes out.

    t_p = reduce(z + SiLU(block(z))),  z = [embeddings of tokens p - 2, p - 1, p]      (hidden,)
    encoder's inputs: the target's states h_0 .. h_i of committed tokens, then t of the root i + 1 and of drafts
    o_p = encoder(t_p), which sees h_0 .. h_i and the t of its path
    s   = reduce_k [h_i; o_p], then residual blocks, for p = i + 1 + k; logits of token p + 1 = the target's head on s

Draft inputs leave the encoder's cache again, and the target's states take their places. At the beginning of a text the
first token stands for those before it. Features of trigrams that were met are kept, the last ones that were used.

The card's and the paper's words do not settle the heads: as in the authors' code each reads the target's state beside
the encoder's; here they share the target's rows behind a map, where those of the code have rows of their own. That a
drafted input stays a trigram's in later levels, where the code puts the encoder's output, is our reading.

Source: Chimera: a lossless decoding method for accelerating large language models inference by fusing all tokens
(arXiv:2402.15758; code kafkayu/Chimera).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch.nn import functional as F

from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.path_heads import DepthHeads, linear, residual
from paceline.models.heads.shared_rows import embedding_of
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.state_layer import layer_spec, state_layer
from paceline.models.state.cache import NativeCache
from paceline.tree import TokenTree

Trigram = tuple[int, int, int]

KEPT: Final = 4096
"""Trigrams whose features are kept."""


def trigram(text: Sequence[int], drafted: Sequence[int] = ()) -> Trigram:
    """The last three tokens of a text and what was drafted behind it; its first one stands for those that lack."""
    last = [*text[-3:], *drafted][-3:]
    first, second, third = [*last[:1] * (3 - len(last)), *last]
    return first, second, third


class ChimeraHead(DepthHeads):
    """The heads in a folder, for one target; see `DepthHeads`.

    Attributes:
        runner: the full-context encoder, for its caches and their memory.
    """

    method = "chimera"

    def _build(self, config: HeadConfig, weights: Weights) -> None:
        heads, blocks = range(config.num_heads), range(config.num_layers)
        self._embed = embedding_of(weights.get("embed.weight"), self.target, self.name)
        self._block, self._reduce = (linear(weights, f"trigram.{name}") for name in ("block", "reduce"))
        self._features: dict[Trigram, torch.Tensor] = {}
        self._reduces = [linear(weights, f"heads.{k}.reduce") for k in heads]
        self._blocks = [[linear(weights, f"heads.{k}.blocks.{j}") for j in blocks] for k in heads]
        self._heads = [self._rows(weights, k) for k in heads]
        spec = layer_spec(config, weights, "encoder.")
        self.runner = state_layer(spec, weights, self.target.info, name=self.name, prefix="encoder.", head=None)
        self.open, self.fork = self.runner.open, self.runner.fork
        self.truncate, self.release = self.runner.truncate, self.runner.release
        self.commit = self.runner.commit

    @torch.inference_mode()
    def features(self, trigrams: Sequence[Trigram]) -> torch.Tensor:
        """(r, hidden) what the trigram encoder makes of each, from memory where it was met."""
        lacking = [one for one in dict.fromkeys(trigrams) if one not in self._features]
        found = {one: row.clone() for one, row in zip(lacking, self.computed(lacking), strict=True)} if lacking else {}
        for one in dict.fromkeys(trigrams):
            if one not in found:
                found[one] = self._features.pop(one)
        self._features |= found  # in the order of their use
        for one in list(self._features)[: max(0, len(self._features) - KEPT)]:
            del self._features[one]
        return torch.stack([found[one] for one in trigrams])

    @torch.inference_mode()
    def computed(self, trigrams: Sequence[Trigram]) -> torch.Tensor:
        """The same, without looking into memory."""
        read = self._embed([token for one in trigrams for token in one]).view(len(trigrams), -1)
        return self._reduce(read + F.silu(self._block(read)))

    @torch.inference_mode()
    def encode(
        self,
        caches: Sequence[NativeCache],
        trees: Sequence[TokenTree],
        computed: Sequence[int],
        inputs: torch.Tensor,
    ) -> torch.Tensor:
        """(r, hidden) what the full-context encoder makes of inputs (r, hidden), which stay in scratch until `commit`.

        Args:
            trees: which input sees which, as of `Runner.score`: the root is the first input, and tokens are not looked
                at. computed: inputs of each that were fed before.
        """
        return self.runner.run_states(caches, trees, computed, inputs, picked=()).states

    @torch.inference_mode()
    def logits(self, states: torch.Tensor, encoded: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """(r, n) logits of the next token.

        Args:
            states: (r, hidden) the target's, of the token before the root. encoded: (r, hidden) of `encode`, of the
                last token. depths: of the token that is predicted, from 0 on.
        """
        read, places = torch.cat((states, encoded), 1), dict[int, list[int]]()
        for place, depth in enumerate(depths):
            places.setdefault(depth, []).append(place)
        if len(places) == 1:
            return self._of_head(read, depths[0])
        rows = torch.cat([self._of_head(read[own], depth) for depth, own in places.items()])
        order = torch.tensor([place for own in places.values() for place in own], device=rows.device)
        return rows[order.argsort()]

    def _of_head(self, read: torch.Tensor, depth: int) -> torch.Tensor:
        return self._heads[depth](residual(self._blocks[depth], self._reduces[depth](read)))
