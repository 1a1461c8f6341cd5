"""Where parameters, optimizer state and exchanged bytes lie."""

from dataclasses import dataclass

from jax.sharding import Sharding

from octojax.update.plan import End, Role, UpdatePlan


@dataclass(frozen=True)
class Places:
    """`ranks[r]` is for what is replicated over the devices of rank r (None: the rank is in
    another process); `params[i]` for parameter leaf i, its gradient and the state of its shape
    (empty, or None: replicated over the owner)."""

    ranks: tuple[Sharding | None, ...]
    params: tuple[Sharding | None, ...] = ()

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, place in enumerate(self.ranks) if place is not None)

    def of_param(self, plan: UpdatePlan, leaf: int) -> Sharding | None:
        own = self.params[leaf] if self.params else None
        return self.ranks[plan.owners[leaf]] if own is None else own

    def of_state(self, plan: UpdatePlan, leaf: int, rank: int) -> Sharding | None:
        """A moment lies as its parameter does; other state is replicated over the rank."""
        owner = _parameter_of(plan, leaf) if self.params else None
        return self.ranks[rank] if owner is None else self.of_param(plan, owner)

    def of_end(self, plan: UpdatePlan, end: End, rank: int) -> Sharding | None:
        """Returns where an end of a program of `rank` lies."""
        if end.role in (Role.PARAM, Role.GRAD, Role.NEW_PARAM):
            return self.of_param(plan, end.index)
        if end.role in (Role.STATE, Role.NEW_STATE):
            return self.of_state(plan, end.index, rank)
        return self.ranks[rank]


def _parameter_of(plan: UpdatePlan, leaf: int) -> int | None:
    """The parameter that a state leaf belongs to: same rank and shape, and path at the end."""
    for i, path in enumerate(plan.param_names):
        if (
            plan.owners[i] == plan.state_owners[leaf]
            and plan.param_avals[i].shape == plan.state_avals[leaf].shape
            and plan.state_names[leaf].endswith(path)
        ):
            return i
    return None
