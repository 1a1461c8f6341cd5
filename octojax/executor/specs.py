"""How the values of a step lie over the further axes of a rank.

parameters, sums of gradients   as the parameter's spec says
residuals, what I keeps for W   as XLA makes them: numbered, and asked of the first program
                                that writes them
everything else                 whole: batch, activations between stages, results
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from octojax.executor.values import Place, Value
from octojax.executor.work import Group
from octojax.programs.recipe import WHOLE, Spec
from octojax.stages.program import Program


@dataclass(frozen=True)
class ParamSpecs:
    """How each parameter unit lies on its rank: `params` in the programs of the stages, `stored`
    between steps, `gradients` once they are summed over the data axis, with the optimizer's
    moments. The latter two may name the data axis."""

    params: tuple[PartitionSpec, ...]
    stored: tuple[PartitionSpec, ...]
    gradients: tuple[PartitionSpec, ...]


_NUMBERED = frozenset({Place.RESIDUAL, Place.KEPT})
_OF_PARAMETERS = frozenset({Place.PARAM, Place.TOTAL, Place.OTHER})

_End = tuple[int, bool, int]
"""A program by its number, whether it is an output of it, and which."""


class Specs:
    """The spec, or its number, of every value of a step.

    Values at one end of one program have one number, whatever stage and microbatch: so do all ends
    between which a value passes. Without `params` no value is spread.
    """

    def __init__(
        self,
        params: Sequence[PartitionSpec],
        groups: Sequence[Sequence[Group]],
        number: Callable[[Program], int],
    ) -> None:
        self.params = tuple(params)
        self._numbers: dict[Value, int] = {}
        if self.params:
            self._number(groups, number)

    def __call__(self, value: Value) -> Spec:
        if not self.params:
            return WHOLE
        if value.place in _OF_PARAMETERS:
            return self.params[value.index]
        return self._numbers[value] if value.place in _NUMBERED else WHOLE

    def of(self, values: Iterable[Value]) -> tuple[Spec, ...]:
        """Returns the specs of values; none where no parameter has one."""
        return tuple(map(self, values)) if self.params else ()

    def _number(self, groups: Sequence[Sequence[Group]], number: Callable[[Program], int]) -> None:
        union = _Joined()
        first: dict[Value, _End] = {}
        for work in (w for row in groups for group in row for w in group.works):
            program = number(work.program)
            for is_output, values in ((False, work.reads), (True, work.writes)):
                for at, value in enumerate(values):
                    if value.place in _NUMBERED:
                        end = (program, is_output, at)
                        union.join(first.setdefault(value, end), end)
        numbers: dict[_End, int] = {}
        for value, end in first.items():
            self._numbers[value] = numbers.setdefault(union.root(end), len(numbers))


class _Joined:
    """Sets of ends, joined two by two (union and find)."""

    def __init__(self) -> None:
        self._parents: dict[_End, _End] = {}

    def root(self, end: _End) -> _End:
        while (parent := self._parents.get(end, end)) != end:
            end = parent
        return end

    def join(self, a: _End, b: _End) -> None:
        self._parents[self.root(b)] = self.root(a)
