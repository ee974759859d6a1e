"""Clover's heads: the tokens drafted so far are added to one state, one after the other, by an attention decoder.

    h_0    what the augmenting block, a decoder layer, makes of the target's states
    e      the row of the target's head for a token, normed, so that its numbers have a root mean square of 1
    h      <- h + sum over attention heads of cos(W_Q norm(h), W_K e) * W_V e      the regressive connection
    logits of head k: target's head on a residual block of its own, h + SiLU(W_k h)

The decoder has one set of weights for all levels, and one key at a time: the token that is read now. A softmax over one
key is 1 whatever the query, so the weight is the cosine of query and key instead, in each attention head, as in the
code that the authors have published for the method's second version.

Source: Clover: regressive lightweight speculative decoding with sequential knowledge (arXiv:2405.00263); Clover-2
(arXiv:2408.00264).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.models.heads.head_config import HeadConfig
from paceline.models.heads.path_heads import HeadStep, linear, regressive, residual, unit_rows
from paceline.models.heads.shared_rows import head_of, target_rows
from paceline.models.layers.linear import make_norm
from paceline.models.layers.own_weights import Weights
from paceline.models.runners.prefix_heads import PrefixHeads


class CloverHead(PrefixHeads):
    """The heads in a folder, for one target; see `PrefixHeads`."""

    method = "clover"

    def _build(self, config: HeadConfig, weights: Weights) -> None:
        heads, blocks = range(config.num_heads), range(config.num_layers)
        self._build_prefix(config, weights)
        self._decoder_norm = make_norm(weights["decoder.norm.weight"], config.layer.get("rms_norm_eps") or 1e-6)
        self._q, self._k, self._v = (linear(weights, f"decoder.{name}_proj") for name in "qkv")
        self._attention_heads = config.regressive_heads
        self._blocks = [[linear(weights, f"heads.{k}.blocks.{j}") for j in blocks] for k in heads]
        self._heads = [self._rows(weights, k) for k in heads]
        rows = weights.get("embed.weight")
        if rows is None:
            info = self.target.info
            rows = target_rows(head_of(self.target, self.name), info, torch.arange(info.vocab_size))
        self._tokens = unit_rows(rows)

    @torch.inference_mode()
    def step(self, memory: torch.Tensor, tokens: Sequence[int], depth: int) -> HeadStep:
        read = self._tokens[torch.tensor(tokens, device=memory.device)]
        memory = memory + regressive(
            self._q(self._decoder_norm(memory)), self._k(read), self._v(read), self._attention_heads
        )
        return HeadStep(self._heads[depth](residual(self._blocks[depth], memory)), memory)
