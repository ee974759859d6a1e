"""Dovetail: a deeper head than EAGLE's drafts on a device of its own, for a target that another one scores.

Where a small GPU cannot hold the target, the target runs on the CPU, and a pass of some layers on the GPU is nearly
free beside one of its own. So the head may have several layers, and the tree is small, since a CPU's passes take longer
with every node. What the first layer reads is a fusion of state and token by a gate that looks at both. Device by
device, a head is placed by what a drafted token takes there (`draft_device`).

Source: Dovetail: a CPU/GPU heterogeneous speculative decoding for LLM inference (arXiv:2412.18934); trees of 16 nodes
are our reading.
"""

from __future__ import annotations

from typing import ClassVar

from paceline.drafters.growth.options import with_growth_options
from paceline.drafters.heads.eagle import EagleDrafter


@with_growth_options
class DovetailDrafter(EagleDrafter):
    """Drafts with a head of several layers that was trained for the target, with the trees of EAGLE-2 where no other
    policy is named.

    Args:
        model, draft_context, draft_device: as for `eagle`.
    Raises:
        ConfigError, CheckpointError, CapabilityError: as there.
    """

    name = "dovetail"
    learns = ""
    heads: ClassVar[tuple[str, ...]] = ("dovetail",)
    usual_policy = "eagle2"
