"""How long each action of a plan takes, by its profile."""

from collections.abc import Callable

from octojax.ir import Action, Kind, Plan, Profile
from octojax.simulate.costs import StageCosts


def durations(plan: Plan, profile: Profile, scale: float = 1.0) -> Callable[[int, Action], float]:
    """Returns how long an action of a plan takes on a rank, in seconds times `scale`.

    Host costs of transfers are left out. Raises `PlanError` for a profile of another model.
    """
    costs = StageCosts.of(profile, plan.partition, plan.recompute)
    explicit = {a.stage for _, _, a in plan.schedule.actions() if a.kind is Kind.RECOMPUTE}
    columns = {
        Kind.FORWARD: costs.forward_s,
        Kind.BACKWARD: costs.backward_s,
        Kind.INPUT_GRAD: costs.input_grad_s,
        Kind.WEIGHT_GRAD: costs.weight_grad_s,
        Kind.RECOMPUTE: costs.forward_s,
    }

    def seconds(rank: int, action: Action) -> float:
        own = float(columns[action.kind][action.stage])
        again = (
            plan.recomputes[action.stage]
            and action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD)
            and action.stage not in explicit
        )
        if again:
            own += float(costs.forward_s[action.stage])
        return scale * own / profile.machine.speed(rank)

    return seconds
