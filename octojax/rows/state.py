"""What one value of a loss has to do with the rows of the batch.

x        float32[8, 16]   rows along axis 0        the rows of a microbatch are a slice
x.sum()  float32[]        a sum over all rows      of the whole batch: the microbatches' sum
w        float32[16, 16]  the same for all         of the whole batch: any microbatch's
x.max()  float32[]        of this microbatch       nothing follows for the whole batch
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, order=True)
class Group:
    """Dimensions of an array along which rows lie.

    Mostly one, of size `outer * rows * inner`. A reshape into a fixed number of chunks spreads
    the rows over several: which entries are the same row's then depends on the microbatch.
    `outer` is None where the array is constant along the rows, as `tile` and `repeat` make it,
    in `blocks` (None: unknown). `partial`: of a sum over the rows some dimensions are still to
    be added.
    """

    dims: tuple[int, ...]
    outer: int | None = 1
    partial: bool = False
    blocks: int | None = 1

    @property
    def spread(self) -> bool:
        """Whether entries must be treated alike, since a microbatch has other rows there."""
        return self.outer is not None and (self.partial or len(self.dims) > 1)


@dataclass(frozen=True, slots=True)
class Rows:
    """What a value has to do with rows; without any mark it is the same in all microbatches.

    `groups`: where rows lie. Without them, `added`: contains sums over all rows; `own`: contains
    what only this microbatch knows. `blame`: numbers of the equations that mixed rows.
    `params`: depends on parameters or state, `draws`: on a random key or on mutable state,
    `batch`: on a leaf of the batch. `size`: contains numbers that follow from the number of rows.
    `each`: inside a loop over rows, of the row of this iteration. `number`: the position of the
    row itself, in this column of indices. `inner`: a sum over the other rows, for each row.
    `join`: how values of microbatches make that of the whole batch, if in a simple way.
    `even`: dimensions along which all entries are equal, as far as known. `turn`: differs between
    the iterations of a loop whose iterations have other rows in a microbatch.
    """

    groups: tuple[Group, ...] = ()
    added: bool = False
    own: bool = False
    blame: frozenset[int] = frozenset()
    params: bool = False
    draws: bool = False
    batch: bool = False
    size: bool = False
    each: bool = False
    number: int | None = None
    inner: bool = False
    join: str = ""
    even: frozenset[int] = frozenset()
    turn: bool = False

    @property
    def fixed(self) -> bool:
        """Whether the batch alone decides the value, before the step."""
        return not (self.params or self.draws)

    @property
    def plain(self) -> bool:
        """Whether a microbatch's value is that of the whole batch, or its slice."""
        return not (
            self.added
            or self.own
            or self.blame
            or self.size
            or self.number is not None
            or self.partial
        )

    @property
    def partial(self) -> bool:
        """Whether it is a sum over rows of which some dimensions are still to be added."""
        return any(g.partial for g in self.groups)

    @property
    def of_rows(self) -> bool:
        """Whether other rows give another value."""
        return self.each or self.lumped or any(g.outer is not None for g in self.groups)

    @property
    def lumped(self) -> bool:
        """Whether the value has no rows of its own but comes from them."""
        return not self.groups and (self.added or self.own)

    def with_groups(self, groups: Iterable[Group]) -> "Rows":
        return replace(self, groups=tuple(sorted(groups, key=lambda g: g.dims)))


SAME = Rows()


def union(states: Iterable[Rows]) -> Rows:
    """Returns what a value made of all these depends on; without groups, sums and numbers."""
    states = list(states)
    return Rows(
        own=any(s.own for s in states),
        blame=frozenset().union(*(s.blame for s in states)),
        params=any(s.params for s in states),
        draws=any(s.draws for s in states),
        batch=any(s.batch for s in states),
        size=any(s.size for s in states),
        each=any(s.each for s in states),
        inner=any(s.inner for s in states),
        turn=any(s.turn for s in states),
    )
