"""Where parameters, optimizer state and exchanged bytes lie."""

from dataclasses import dataclass

from jax.sharding import Sharding

from octojax.update.plan import End, Role, UpdatePlan


@dataclass(frozen=True)
class Places:
    """`ranks[r]` is for what is replicated over the devices of rank r (None: the rank is in
    another process); `params[i]` for piece i of the parameters, `gradients[i]` for its gradient
    and the state of its shape, where it is computed with (empty: as the parameters; None, or both
    empty: replicated over the owner)."""

    ranks: tuple[Sharding | None, ...]
    params: tuple[Sharding | None, ...] = ()
    gradients: tuple[Sharding | None, ...] = ()

    @property
    def local_ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, place in enumerate(self.ranks) if place is not None)

    def on_rank(self, rank: int) -> Sharding:
        """Returns where values lie that are replicated over a rank of this process."""
        place = self.ranks[rank]
        assert place is not None, f"rank {rank} is in another process"
        return place

    def of_param(self, plan: UpdatePlan, piece: int) -> Sharding | None:
        return self._of_piece(self.params, plan, piece)

    def of_gradient(self, plan: UpdatePlan, piece: int) -> Sharding | None:
        return self._of_piece(self.gradients or self.params, plan, piece)

    def of_state(self, plan: UpdatePlan, piece: int, rank: int) -> Sharding | None:
        """Returns the sharding of a moment, its parameter's gradient's; other state is replicated
        over the rank."""
        owner = parameter_of(plan, piece) if self.gradients or self.params else None
        return self.ranks[rank] if owner is None else self.of_gradient(plan, owner)

    def of_end(self, plan: UpdatePlan, end: End, rank: int) -> Sharding | None:
        """Returns where an end of a program of `rank` lies."""
        if end.role in (Role.PARAM, Role.NEW_PARAM):
            return self.of_param(plan, end.index)
        return self.of_work(plan, end, rank)

    def of_work(self, plan: UpdatePlan, end: End, rank: int) -> Sharding | None:
        """Returns where a program of `rank` computes with an end: parameters as gradients lie."""
        if end.role in (Role.PARAM, Role.GRAD, Role.NEW_PARAM):
            return self.of_gradient(plan, end.index)
        if end.role in (Role.STATE, Role.NEW_STATE):
            return self.of_state(plan, end.index, rank)
        return self.ranks[rank]

    def _of_piece(
        self, places: tuple[Sharding | None, ...], plan: UpdatePlan, piece: int
    ) -> Sharding | None:
        own = places[piece] if places else None
        rank = plan.owners[piece]
        assert rank is not None, "a parameter has an owner"
        return self.ranks[rank] if own is None else own


def parameter_of(plan: UpdatePlan, piece: int) -> int | None:
    """Returns the parameter that a piece of state belongs to: same rank, row and shape, and its
    path at the end."""
    state = plan.state_pieces[piece]
    for i, param in enumerate(plan.param_pieces):
        if (
            (param.rank, param.row) == (state.rank, state.row)
            and plan.param_avals[param.leaf].shape == plan.state_avals[state.leaf].shape
            and plan.state_names[state.leaf].endswith(plan.param_names[param.leaf])
        ):
            return i
    return None
