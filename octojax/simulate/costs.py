"""What each stage of a plan costs, as arrays the simulator can index."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from octojax.errors import PlanError, ProfileError
from octojax.ir import Kind, Partition, Profile
from octojax.simulate.step_ends import StageEnds

Floats = NDArray[np.float64]

KINDS = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.INPUT_GRAD,
    Kind.WEIGHT_GRAD,
    Kind.RECOMPUTE,
)
"""Column k of `StageCosts.seconds`, and the code k of an action in a `Table`."""

FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, RECOMPUTE = range(5)
RESIDUAL, WEIGHT_RESIDUAL, OUTPUT, INPUT, STATE = range(5)
BYTES = ("residual", "weight residual", "output", "input", "state")
"""Columns of `StageCosts.nbytes`."""


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Costs of every stage for one microbatch on a rank of speed 1.

    `seconds` is (stages, 5) with a column per entry of `KINDS`; `nbytes` is (stages, 5):
    residuals kept from F until I or B, residuals kept from I until W, the output sent on, the
    input received, and the static state (weights, gradients, optimizer). `recompute` is
    (stages,) bool: F keeps only the stage's input, and I, B or an explicit R rebuild the rest.
    `ends_s` is (stages, 2): what holding a stage takes its rank before its first action and after
    its last, if anything; see `octojax.simulate.step_ends`.
    """

    seconds: Floats
    nbytes: Floats
    recompute: NDArray[np.bool_]
    ends_s: Floats | None = None

    def __post_init__(self) -> None:
        for name, values, columns in (
            ("seconds", self.seconds, KINDS),
            ("nbytes", self.nbytes, BYTES),
        ):
            if values.shape != (len(self.recompute), 5):
                raise ProfileError(
                    f"stage costs: {name} has shape {values.shape}, "
                    f"expected ({len(self.recompute)}, 5)"
                )
            wrong = np.argwhere(~(np.isfinite(values) & (values >= 0)))
            if len(wrong):
                stage, column = wrong[0]
                raise ProfileError(
                    f"stage costs: {name} of stage {stage}, {columns[column]} is "
                    f"{values[stage, column]}, expected a finite number >= 0"
                )

        ends = self.ends_s
        if ends is not None and not (
            ends.shape == (self.num_stages, 2) and (np.isfinite(ends) & (ends >= 0)).all()
        ):
            raise ProfileError(
                f"stage costs: ends_s is {ends.tolist()}, expected two finite numbers >= 0 for "
                f"each of {self.num_stages} stages"
            )

    @classmethod
    def unit(
        cls,
        num_stages: int,
        forward_s: float = 1.0,
        input_grad_s: float = 1.0,
        weight_grad_s: float = 1.0,
        backward_s: float | None = None,
    ) -> "StageCosts":
        """Returns equal costs for every stage, without bytes. A missing B costs I + W."""
        fused = input_grad_s + weight_grad_s if backward_s is None else backward_s
        row = [forward_s, fused, input_grad_s, weight_grad_s, forward_s]
        return cls(
            np.tile(np.array(row, dtype=np.float64), (num_stages, 1)),
            np.zeros((num_stages, 5)),
            np.zeros(num_stages, dtype=np.bool_),
        )

    @classmethod
    def of(
        cls, profile: Profile, partition: Partition, recompute: tuple[bool, ...] = ()
    ) -> "StageCosts":
        """Returns the stage costs of `profile` cut by `partition`.

        A profile that was measured of this partition's stages whole has one "layer" per stage.
        Raises `PlanError` if the two differ in their number of layers.
        """
        sizes = partition.sizes
        if profile.of_partition == sizes:
            sizes = (1,) * len(sizes)
        return LayerCosts(profile).cut(sizes, recompute)

    @property
    def num_stages(self) -> int:
        return len(self.recompute)

    @property
    def forward_s(self) -> Floats:
        return self.seconds[:, FORWARD]

    @property
    def backward_s(self) -> Floats:
        return self.seconds[:, BACKWARD]

    @property
    def input_grad_s(self) -> Floats:
        return self.seconds[:, INPUT_GRAD]

    @property
    def weight_grad_s(self) -> Floats:
        return self.seconds[:, WEIGHT_GRAD]

    @property
    def residual_bytes(self) -> Floats:
        return self.nbytes[:, RESIDUAL]

    @property
    def weight_residual_bytes(self) -> Floats:
        return self.nbytes[:, WEIGHT_RESIDUAL]

    @property
    def output_bytes(self) -> Floats:
        return self.nbytes[:, OUTPUT]

    @property
    def input_bytes(self) -> Floats:
        return self.nbytes[:, INPUT]

    @property
    def state_bytes(self) -> Floats:
        return self.nbytes[:, STATE]

    @cached_property
    def compute_s(self) -> Floats:
        """Forward and split backward of one microbatch, recompute included, per stage."""
        split = self.seconds[:, [FORWARD, INPUT_GRAD, WEIGHT_GRAD]].sum(axis=1)
        return split + np.where(self.recompute, self.forward_s, 0.0)


class LayerCosts:
    """A profile's layers as arrays, built once, from which stages are cut many times."""

    def __init__(self, profile: Profile) -> None:
        layers = profile.priced_layers
        self._ends = StageEnds.of(profile)
        self.num_layers = len(layers)
        self._seconds = np.array(
            [
                [x.forward_s, x.fused_backward_s, x.input_grad_s, x.weight_grad_s, x.forward_s]
                for x in layers
            ],
            dtype=np.float64,
        )
        self._summed_bytes = np.array(
            [[x.residual_bytes, x.weight_residual_bytes, x.state_bytes] for x in layers],
            dtype=np.float64,
        )
        self._output = np.array([x.output_bytes for x in layers], dtype=np.float64)

    def cut(
        self, sizes: tuple[int, ...] | list[int], recompute: tuple[bool, ...] = ()
    ) -> StageCosts:
        """Returns the costs of stages of `sizes[s]` consecutive layers each."""
        if sum(sizes) != self.num_layers:
            raise PlanError(
                f"the partition [{' '.join(map(str, sizes))}] has {sum(sizes)} layers, "
                f"the profile {self.num_layers}"
            )
        ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
        starts = ends - np.asarray(sizes)
        summed = np.add.reduceat(self._summed_bytes, starts, axis=0)
        output = self._output[ends - 1].copy()
        output[-1] = 0.0  # nothing is sent on by the last stage
        nbytes = np.empty((len(ends), 5))
        nbytes[:, RESIDUAL] = summed[:, 0]
        nbytes[:, WEIGHT_RESIDUAL] = summed[:, 1]
        nbytes[:, OUTPUT] = output
        nbytes[1:, INPUT] = output[:-1]
        nbytes[0, INPUT] = 0.0
        nbytes[:, STATE] = summed[:, 2]
        flags = np.zeros(len(ends), dtype=np.bool_)
        if recompute:
            flags[:] = recompute
        with np.errstate(over="ignore"):  # an infinite sum is refused by name
            seconds = np.add.reduceat(self._seconds, starts, axis=0)
        ends = None if self._ends is None else self._ends.cut(starts)
        return StageCosts(seconds, nbytes, flags, ends)
