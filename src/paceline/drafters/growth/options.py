"""The options of all drafters that grow trees, declared once: `with_growth_options` adds them to a drafter's own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TypedDict, TypeVar, get_type_hints

from paceline.drafters.common.bases import SampleMethod
from paceline.drafters.growth.policies import PolicyName, TreePolicy, tree_policy
from paceline.utils import need

Class = TypeVar("Class", bound=type)


class GrowthOptions(TypedDict, total=False):
    """How much is drafted, how its tokens are chosen, how trees grow; each may be left out, which None says too.

    Attributes:
        num_speculative_tokens: most levels to draft; None leaves it to the budget. Heads that each draft one level
            draft no more levels than there are heads.
        draft_sample_method: above temperature 0, "probabilistic" draws from the draft's distribution, "greedy" takes
            its most likely tokens, as it always does at temperature 0. By default it draws, but for requests with a
            seed of their own, which then get the tokens of that seed whatever is drafted.
        tree_policy: how trees grow. "levels" (the default) expands the most likely nodes of each level; "dyspec" adds
            node by node where the draft expects most, "dyspec_threshold" all that is worth `tree_threshold`, level by
            level; "eagle2" ranks all nodes again in the end; "static" fills the shape `speculative_token_tree`; "ppd"
            fills the best shape of the budget's size, that of controller "ppd" where it decides. These three take
            tokens by rank at every temperature. Above it, "rsd_c" draws `tree_width` children of every node, "rsd_s"
            keeps as many nodes of a level by stochastic beam search, both without replacement; "spectr" draws as many
            independent chains (for acceptance_method "k_seq"), "greedy_draft" one child beside the likeliest (for
            "greedy_draft_sampling"); at temperature 0 all four are "levels".
        tree_width: of "levels" (1, the default, drafts chains) and "eagle2" (10): children of a node, nodes expanded on
            a level; of the last four policies (3): drafts, as above. Of "rsd_c" also a list: the children of a node on
            each level, such as [3, 2, 1], and no more levels than these.
        tree_threshold: of "dyspec_threshold": least chance, as the draft sees it, of a position that gets a node; None
            is 1 / nodes.
        speculative_token_tree: of "static": paths of ranks, as a list or as vLLM's text, such as "[(0,), (1,), (0,
            0)]".
    """

    num_speculative_tokens: int | None
    draft_sample_method: SampleMethod | None
    tree_policy: PolicyName | None
    tree_width: int | Sequence[int] | None
    tree_threshold: float | None
    speculative_token_tree: str | Sequence[Sequence[int]] | None


def with_growth_options(drafter: Class) -> Class:
    """The same class, whose constructor takes `**growth`; its signature and docstring name these options too."""
    _add_to_signature(drafter, get_type_hints(GrowthOptions))
    told = inspect.cleandoc(GrowthOptions.__doc__ or "").partition("Attributes:\n")[2]
    before, heading, behind = inspect.cleandoc(drafter.__doc__ or "").partition("Raises:\n")
    head = before.rstrip() if "Args:" in before else f"{before}Args:"
    drafter.__doc__ = f"{head}\n{told}\n{heading}{behind}"
    return drafter


def with_tree_options(drafter: Class) -> Class:
    """The same of a drafter that draws nothing: without `draft_sample_method`, and what it says of the others stands in
    its own docstring.
    """
    hints = get_type_hints(GrowthOptions)
    _add_to_signature(drafter, {name: hint for name, hint in hints.items() if name != "draft_sample_method"})
    return drafter


def _add_to_signature(drafter: type, hints: Mapping[str, object]) -> None:
    """Let the signature of a constructor name these options in place of its `**growth`."""
    create = drafter.__init__  # type: ignore[misc]  # of a class
    signature, kind = inspect.signature(create), inspect.Parameter.KEYWORD_ONLY
    parameters = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.name not in hints and parameter.kind is not parameter.VAR_KEYWORD
    ]
    shared = [inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in hints.items()]
    create.__signature__ = signature.replace(parameters=[*parameters, *shared])


def growth_policy(growth: GrowthOptions, usual: PolicyName | None = None) -> TreePolicy:
    """Make the policy that the options name.

    Args:
        usual: where they name none.
    Raises:
        ConfigError: an unknown name, a value outside its range, options that exclude each other.
    """
    name, paths = growth.get("tree_policy"), growth.get("speculative_token_tree")
    policy = tree_policy(
        usual if name is None and paths is None else name, width=growth.get("tree_width"),
        threshold=growth.get("tree_threshold"), paths=paths,
    )  # fmt: skip
    method = growth.get("draft_sample_method")
    clash = policy.points and method == "probabilistic"
    need(not clash, "draft_sample_method", f"be greedy or left out with tree_policy {policy.name!r}", method)
    return policy
