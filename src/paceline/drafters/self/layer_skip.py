"""LayerSkip: the target's first layers, or evenly spaced ones, draft; all of them verify.

The exit's state goes through the target's final norm and head, as in training. Checkpoints trained for it
(facebook/layerskip-*) have the layout of their family and load as such; on others early exits are rarely right.

Sources: LayerSkip: enabling early exit inference and self-speculative decoding (arXiv:2404.16710); the evenly spaced
layers are those of Accelerating Inference in Large Language Models with a Unified Layer Skipping Strategy
(arXiv:2404.06954), which decodes with them alone. That is approximate where such a pass decides; here it only drafts,
and all layers verify, so that nothing is lost. With trained adapters between such layers it is method `m2r2`.
"""

from __future__ import annotations

from paceline.drafters.base import Context, DrafterArgs
from paceline.drafters.common.bases import UNLIMITED, SampleMethod
from paceline.drafters.self.base import DraftPlan, SelfDrafter, SelfState
from paceline.drafters.self.skip_sets import unified_plan
from paceline.errors import ConfigError
from paceline.models import LayerPlan
from paceline.utils import integer, number


class LayerSkipDrafter(SelfDrafter[SelfState]):
    """Drafts with the first `exit_layer` layers, or with evenly spaced ones.

    Args:
        exit_layer: layers that run, from 1 to one less than the target has; None is a quarter of them.
        assistant_early_exit: the same, as transformers calls it.
        target_speedup: instead of an exit, run one of so many layers: the first, the last and evenly spaced ones
            between, as Unified Layer Skipping keeps them. From 1, which runs all, to half the number of layers.
        num_speculative_tokens: most tokens to draft; None leaves it to the budget.
        draft_sample_method: above temperature 0, "probabilistic" draws from the early exit's distribution, "greedy"
            takes its most likely tokens. By default it draws, but for requests with a seed of their own.
        resume_verification: let scoring go on behind the exit, with its states and the keys and values that are there
            already; by default where a measurement finds that faster.
    Raises:
        ConfigError: a layer that the target does not have, two different ones, an exit or resuming beside a speed-up.
        CapabilityError: a target whose layers cannot be run alone.
    """

    name = "layer_skip"

    def __init__(
        self,
        args: DrafterArgs,
        *,
        exit_layer: int | None = None,
        assistant_early_exit: int | None = None,
        target_speedup: float | None = None,
        num_speculative_tokens: int | None = None,
        draft_sample_method: SampleMethod | None = None,
        resume_verification: bool | None = None,
    ) -> None:
        super().__init__(
            args,
            num_speculative_tokens=num_speculative_tokens,
            draft_sample_method=draft_sample_method,
            resume_verification=resume_verification if target_speedup is None else bool(resume_verification),
        )
        if exit_layer is not None and assistant_early_exit is not None and exit_layer != assistant_early_exit:
            raise ConfigError(
                f"exit_layer and assistant_early_exit are the same option, got {exit_layer} and "
                f"{assistant_early_exit}; leave one out"
            )
        layers = self.target.info.num_layers
        name, chosen = (
            ("exit_layer", exit_layer)
            if assistant_early_exit is None
            else ("assistant_early_exit", assistant_early_exit)
        )
        self.exit_layer = max(1, layers // 4) if chosen is None else chosen
        integer(name, self.exit_layer, 1, layers - 1)
        plan = LayerPlan(stop=self.exit_layer)
        if target_speedup is not None:
            if chosen is not None:
                raise ConfigError(
                    f"{name} and target_speedup are two ways to choose layers, got {chosen} and {target_speedup}; "
                    f"leave one out"
                )
            self.exit_layer, plan = layers, _spaced(layers, target_speedup, resume_verification)
        self._drafting = DraftPlan(plan, UNLIMITED)

    def _usual(self) -> LayerPlan:
        return self._drafting.plan

    def _state(self, context: Context) -> SelfState:
        return SelfState(context)

    def draft_plan(self, state: SelfState) -> DraftPlan:
        return self._drafting


def _spaced(layers: int, speedup: float, resume: bool | None) -> LayerPlan:
    """Evenly spaced layers, behind which scoring cannot go on."""
    number("target_speedup", speedup, 1.0, layers / 2, f"be in 1..{layers / 2:g}")
    if resume:
        raise ConfigError(
            "scoring cannot go on behind layers that were left out; leave out resume_verification or target_speedup"
        )
    return unified_plan(layers, speedup)
