"""The optimizer state between the ranks, which hold it leaf by leaf, and the user's tree."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import optax

from octojax.api.state_layout import StateLayout
from octojax.checkpoint import join_layers, split_layers
from octojax.trace import Leaves
from octojax.update import UpdatePlan


@dataclass(frozen=True)
class OptimizerForm:
    """How an optimizer state looks to the user, and on the ranks of one step.

    `whole` are the shapes of `optimizer.init(params)`. Where the optimizer keeps for a stacked
    leaf something else than the stack of what it keeps for its layers (factored second moments
    may), the user's tree has the layers' own.
    """

    plan: UpdatePlan
    whole: Any

    @cached_property
    def shapes(self) -> Any:
        """The user's tree, of shapes."""
        return self.whole if self._stacks else self._sliced

    @cached_property
    def _sliced(self) -> Any:
        return self.plan.state_tree.unflatten(self.plan.state_avals)

    @cached_property
    def _stacks(self) -> bool:
        try:
            join_layers(self._sliced, self.whole)
        except ValueError:
            return False
        return True

    def to_user(self, opt_state: Any, layout: StateLayout) -> Any:
        """Returns the user's tree of what the ranks hold, in every process."""
        plan, leaves = self.plan, []
        at = {rank: {k: i for i, k in enumerate(plan.state_leaves(rank))} for rank in layout.here}
        for k, (owner, aval) in enumerate(zip(plan.state_owners, plan.state_avals, strict=True)):
            rank = layout.here[0] if owner is None else owner  # every rank has its own copy
            mine = opt_state[rank]
            value = None if mine is None else mine[at[rank][k]]
            leaves.append(value if owner is None else layout.from_owner(value, rank, aval))
        gathered = plan.state_tree.unflatten(leaves)
        return join_layers(gathered, self.whole) if self._stacks else gathered

    def from_user(self, tree: Any) -> Any:
        """Returns the tree that `Update.scatter` takes."""
        return split_layers(tree, self._sliced) if self._stacks else tree


def optimizer_form(
    plan: UpdatePlan, optimizer: optax.GradientTransformation, params: Leaves
) -> OptimizerForm:
    """Returns the form of the optimizer's state for the user's tree of parameters."""
    shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in params.avals]
    return OptimizerForm(plan, jax.eval_shape(optimizer.init, params.unflatten(shapes)))
