"""What a search may not change: layers per rank, the ranks of stages, recomputed stages.

The paper's tuner changes three things (section VI): the partition is how many layers each device
has, the placement which ones and in how many stages, the schedule their order. So where the
partition is fixed and the placement free, every rank keeps its number of layers; where the
placement is fixed and the partition free, the stages keep their ranks and the borders move.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numba import njit

from octojax.simulate.jit import CALLED
from octojax.tune.candidate import Candidate
from octojax.tune.recompute_rule import RecomputeRule


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class Constraints:
    """`layers_P` layers that every rank keeps, `ranks_S` the ranks of the stages in order,
    `recompute_S` the flag of stage 0, 1, ...; each is empty where the search is free.
    """

    layers_P: np.ndarray = field(default_factory=_none)
    ranks_S: np.ndarray = field(default_factory=_none)
    recompute_S: np.ndarray = field(default_factory=lambda: np.zeros(0, np.bool_))

    @classmethod
    def of_rule(cls, rule: RecomputeRule, layers: int) -> "Constraints":
        return cls(recompute_S=rule.array(layers))

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The fields in the order that compiled functions take them."""
        return self.layers_P, self.ranks_S, self.recompute_S

    def allow(self, candidate: Candidate) -> bool:
        """Whether ranks keep their layers, and stages their ranks."""
        return bool(keeps(candidate.rank_L, candidate.cut_L, self.layers_P, self.ranks_S))

    def applied(self, candidate: Candidate) -> Candidate:
        """Returns the candidate with the recompute flags asked for."""
        if not len(self.recompute_S):
            return candidate
        flags = candidate.recompute_L.copy()
        force(candidate.rank_L, candidate.cut_L, flags, self.recompute_S)
        return replace(candidate, recompute_L=flags)


@njit(**CALLED)
def keeps(rank_L, cut_L, layers_P, ranks_S):
    """Whether these layers on these ranks respect `Constraints`."""
    layers = rank_L.shape[0]
    if layers_P.shape[0] > 0:
        left = layers_P.copy()
        for layer in range(layers):
            left[rank_L[layer]] -= 1
            if left[rank_L[layer]] < 0:
                return False
    if ranks_S.shape[0] > 0:
        stage = -1
        for layer in range(layers):
            if layer == 0 or cut_L[layer] or rank_L[layer] != rank_L[layer - 1]:
                stage += 1
                if stage >= ranks_S.shape[0] or ranks_S[stage] != rank_L[layer]:
                    return False
        return stage + 1 == ranks_S.shape[0]
    return True


@njit(**CALLED)
def force(rank_L, cut_L, recompute_L, recompute_S):
    """Gives every layer the flag of its stage, in place."""
    stage = -1
    for layer in range(rank_L.shape[0]):
        if layer == 0 or cut_L[layer] or rank_L[layer] != rank_L[layer - 1]:
            stage += 1
        recompute_L[layer] = recompute_S[stage]
