"""How long each action of a plan takes, by its profile."""

from collections.abc import Callable

from octojax.ir import Action, LoweredPlan, Plan, Profile
from octojax.simulate.oracle import Meaning
from octojax.simulate.simulator import costs_of


def durations(
    plan: Plan | LoweredPlan, profile: Profile, scale: float = 1.0
) -> Callable[[int, Action], float]:
    """Returns how long an action of a plan takes on a rank, in seconds times `scale`.

    Host costs of transfers are left out. Raises `PlanError` for a profile of another model.
    """
    lowered = LoweredPlan.of(plan) if isinstance(plan, Plan) else plan
    meaning = Meaning(lowered, costs_of(plan, profile), profile.machine)
    return lambda rank, action: scale * meaning.compute_s(rank, (action,))
