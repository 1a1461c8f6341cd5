"""What passes share: they rewrite a schedule, and so take a plan or a bare schedule."""

from collections.abc import Callable
from typing import TypeVar

from octojax.ir import Plan, Schedule

PlanOrSchedule = TypeVar("PlanOrSchedule", Plan, Schedule)


def rewritten(subject: PlanOrSchedule, rewrite: Callable[[Schedule], Schedule]) -> PlanOrSchedule:
    """Returns the plan, or schedule, with its schedule rewritten."""
    if isinstance(subject, Plan):
        return subject.with_schedule(rewrite(subject.schedule))
    return rewrite(subject)
