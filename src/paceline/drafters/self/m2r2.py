"""M2R2: a stream of states that is several layers ahead drafts, over the target's own keys and values.

One of R layers runs, and behind each a trained adapter moves the states to where R layers would have brought them
(models.heads.rate_adapters). Such a stream sees the keys and values that all layers have made of the text, and its own
of the root and of what is drafted, which lie in scratch and never stay. Behind the last step the target's final norm
and head draft.

The paper also exits early by such streams and loads experts ahead by them; here they draft, and all layers verify.

Source: Mixture of Multi-Rate Residuals for efficient transformer inference (arXiv:2502.02040).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import UNLIMITED, SampleMethod
from paceline.drafters.self.base import DraftPlan, SelfDrafter, SelfState
from paceline.models import LayerPlan, PassResult, SequenceCache
from paceline.models.heads import RateAdapters, stream_layers
from paceline.utils import need


class M2R2Drafter(SelfDrafter[SelfState]):
    """Drafts with one of several layers of the target, and adapters that were trained for it.

    Args:
        model: folder or hub id of the adapters, safetensors with a config.json, which says how many layers run.
        num_speculative_tokens: most tokens to draft; None leaves it to the budget.
        draft_sample_method: above temperature 0, "probabilistic" draws from the stream's distribution, "greedy" takes
            its most likely tokens. By default it draws, but for requests with a seed of their own.
    Raises:
        ConfigError: a value outside its range, no adapters.
        CheckpointError: adapters for another model.
        CapabilityError: a target whose layers cannot be run alone.
    """

    name = "m2r2"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        model: str | None = None,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
    ) -> None:
        super().__init__(args, num_speculative_tokens=num_speculative_tokens, draft_sample_method=draft_sample_method)
        rule = "be the folder or hub id of adapters for method 'm2r2'"
        need(isinstance(model, str), "speculative_config model", rule, model)
        info = self.target.info
        self.adapters = RateAdapters.read(str(model), info, tokenizer=args.fingerprint)
        layers = stream_layers(info.num_layers, self.adapters.rate)
        self._plans = [LayerPlan(first=layer, stop=layer + 1) for layer in layers]
        self._drafting = DraftPlan(self._plans[0], UNLIMITED)
        self._none = torch.empty(0, info.hidden_size, device=info.device, dtype=info.dtype)

    def _state(self, context: Context) -> SelfState:
        return SelfState(context)

    def draft_plan(self, state: SelfState) -> DraftPlan:
        return self._drafting

    def _level(
        self,
        states: Sequence[SelfState],
        caches: Sequence[SequenceCache],
        inputs: Sequence[Sequence[int]],
        plan: LayerPlan,
    ) -> PassResult:
        ahead = self.drafts.stream(caches, inputs, self._plans, self.adapters.moved)
        return PassResult(self.drafts.head(ahead), self._none)
