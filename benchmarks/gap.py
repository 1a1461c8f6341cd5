"""What separates a measured step on two cores from half of a step on one: parts that add up.

step = half of the plain step's work + half of the extra work + imbalance + idle time
extra work = cutting + the split + shared cache + transfers + host + update
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Processor seconds of one step, all ranks together.

    `step_s` is the whole step, `gradients_s` the same without the update, `together_s` and
    `apart_s` its programs alone: rehearsed by all ranks at once, and by one after the other.
    `split_s` is by how much I and W take longer than B, from the layers' times; `transfers_s` what
    the transfers cost their two processes. `plain_s` and `plain_update_s` are of the plain step.
    """

    step_s: float
    gradients_s: float
    together_s: float
    apart_s: float
    split_s: float
    transfers_s: float
    plain_s: float
    plain_update_s: float

    @property
    def extra_s(self) -> float:
        return self.step_s - self.plain_s

    def causes(self) -> dict[str, float]:
        """Returns the causes of the extra work in seconds; they add up to `extra_s`."""
        plain_gradients_s = self.plain_s - self.plain_update_s
        return {
            "programs of their own: residuals leave and enter, sums of gradients": (
                self.apart_s - plain_gradients_s - self.split_s
            ),
            "backward split into I and W (by the layers' times)": self.split_s,
            "cache and memory shared with the other rank": self.together_s - self.apart_s,
            "transfers (by the links' host cost)": self.transfers_s,
            "host: dispatch, cutting the batch, joining results": (
                self.gradients_s - self.together_s - self.transfers_s
            ),
            "update, beyond the plain one": (self.step_s - self.gradients_s - self.plain_update_s),
        }


def time_parts(
    step_s: float,
    plain_s: float,
    by_rank_s: Sequence[float],
    idle_s: Mapping[str, float],
) -> dict[str, float]:
    """Returns the parts of a measured step; they add up to `step_s`.

    `by_rank_s` is each rank's processor time; `idle_s` what the busiest waits for, by cause, in a
    recorded step. The last part is what none of that explains: above all the cores' other users.
    """
    ranks, total = len(by_rank_s), sum(by_rank_s)
    parts = {
        "plain step's work, evenly spread": plain_s / ranks,
        "extra work, evenly spread": (total - plain_s) / ranks,
        "imbalance": max(by_rank_s) - total / ranks,
        **idle_s,
    }
    return {**parts, "the rest (other work on the cores)": step_s - sum(parts.values())}
