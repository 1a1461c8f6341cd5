"""What a rank gets before its first action: its pieces of the batch, counters, cleared sums.

    microbatches        0 .. 15   16 .. 31   32 .. 47   48 .. 53
    program      sums      a          a          a          b

Microbatches are cut in groups. Groups of one form share a program, which takes the number of
its first microbatch: a batch of a thousand microbatches compiles no more than one of fifty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from octojax.arrays import put_all
from octojax.executor.instructions import RankProgram
from octojax.executor.specs import ParamSpecs
from octojax.executor.values import Value
from octojax.mesh import Rank
from octojax.programs.build import Job
from octojax.programs.finish import zeros
from octojax.programs.microbatch import Kind, Microbatches
from octojax.programs.recipe import Layout, is_key, is_packed, raw, stored, unstored
from octojax.rows.join import Join
from octojax.stages.program import OwnTerm, Ref, Role

MOST_PIECES = 16
"""That one program makes: compiling costs 5-10 ms for each, a further call some 50 us a step."""


_POSITION = jax.ShapeDtypeStruct((2,), np.int32)
"""Of a group: its first microbatch, and that one's first row."""


@dataclass(frozen=True)
class Model:
    """What the engine must know of a model beside its stages.

    `params` are the types of the parameter units. `count(values)` advances the counters of
    module state by one microbatch: it returns new values of the leaves `counters`, from the
    values of the leaves and units `count_reads` names (types: `count_avals`). `joins` say how
    leaves of what the loss returns join; `terms` are to be added to them once per step. `specs` say
    how parameter units lie on their ranks.
    """

    params: tuple[Any, ...]
    counters: tuple[int, ...] = ()
    count_reads: tuple[Ref, ...] = ()
    count_avals: tuple[Any, ...] = ()
    count: Any = None
    joins: tuple[Join, ...] = ()
    terms: tuple[OwnTerm, ...] = ()
    trainable: frozenset[int] = frozenset()
    specs: ParamSpecs | None = None

    def advance(self, values: dict[Ref, Any]) -> dict[Ref, Any]:
        """Returns what `count_reads` names, one microbatch later."""
        if self.count is None:
            return values
        reads = zip(self.count_reads, self.count_avals, strict=True)
        new = self.count(*(unstored(values[ref], aval) for ref, aval in reads))
        refs = (Ref(Role.STATE, leaf) for leaf in self.counters)
        return {**values, **{ref: raw(value) for ref, value in zip(refs, new, strict=True)}}


@dataclass(frozen=True)
class Form:
    """What one program makes of `count` microbatches of `size` rows.

    `pieces` and `counted` are pairs of a leaf (of the batch, of module state) and a place among
    the microbatches of the group. `clears`: the program makes the zeroed sums, too.
    """

    count: int
    size: int
    pieces: tuple[tuple[int, int], ...]
    counted: tuple[tuple[int, int], ...]
    clears: bool


@dataclass(frozen=True)
class Group:
    """Consecutive microbatches from `first` on."""

    first: int
    form: Form


def group_microbatches(
    sizes: Sequence[int], pieces: Sequence[Value], counted: Sequence[Value], counters: int
) -> tuple[Group, ...]:
    """Returns the groups that make these values, `counters` advancing once per microbatch.

    There is at least one group, one of them clears, and each has microbatches of one size.
    """
    by_microbatch: list[tuple[list[int], list[int]]] = [([], []) for _ in sizes]
    for kind, values in enumerate((pieces, counted)):
        for value in values:
            by_microbatch[value.microbatch][kind].append(value.index)
    most = max(sum(map(len, leaves)) for leaves in by_microbatch) + counters
    if not most:
        return (Group(0, Form(len(sizes), sizes[0], (), (), True)),)
    runs = list(_runs(sizes, max(1, MOST_PIECES // most)))
    alone = len(runs) == 1  # else the sums have a group of their own, and the others one form
    groups = [] if alone else [Group(0, Form(0, 0, (), (), True))]
    for first, count, size in runs:
        inside = list(enumerate(by_microbatch[first : first + count]))
        cut, counts = (
            tuple((leaf, k) for k, leaves in inside for leaf in leaves[kind]) for kind in (0, 1)
        )
        groups.append(Group(first, Form(count, size, cut, counts, alone)))
    return tuple(groups)


def _runs(sizes: Sequence[int], most: int) -> Iterator[tuple[int, int, int]]:
    """Yields first microbatch, number and size of runs of equal sizes, none longer than `most`."""
    first = 0
    for size, same in groupby(sizes):
        remaining = len(list(same))
        while remaining:
            count = min(remaining, most)
            yield first, count, size
            first, remaining = first + count, remaining - count


@dataclass(frozen=True)
class Prepared:
    """Pieces in the order of `RankProgram.batch`, zeroed sums, the counters among
    `RankProgram.state`, and all counters after the last microbatch."""

    pieces: list[jax.Array]
    totals: list[jax.Array]
    counted: list[jax.Array]
    counters: tuple[jax.Array, ...]


class Preparation:
    """One rank's values before its first action. `ready` takes the compiled `jobs`."""

    def __init__(
        self,
        program: RankProgram,
        rank: Rank,
        batch: Microbatches,
        model: Model,
        totals: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        self.rank, self.batch, self.model = rank, batch, model
        self.totals = tuple(totals)
        self.leaves = tuple(sorted({v.index for v in program.batch}))
        self.shared = [v for v in program.batch if batch.kinds[v.index] is Kind.SHARED]
        self.cut = [v for v in program.batch if batch.kinds[v.index] is not Kind.SHARED]
        self.counted = [v for v in program.state if v.index in model.counters]
        self.groups = group_microbatches(batch.sizes, self.cut, self.counted, len(model.counters))
        self.forms = tuple(dict.fromkeys(group.form for group in self.groups))
        self.read = tuple(sorted({v.index for v in self.cut}))
        self.kept = frozenset(i for i in self.leaves if self._is_kept(i))
        places = {v: at for at, v in enumerate((*self.shared, *self.cut))}
        self.order = [places[v] for v in program.batch]
        self.replaced = [model.count_reads.index(Ref(Role.STATE, leaf)) for leaf in model.counters]

    def _is_kept(self, leaf: int) -> bool:
        """Whether a leaf of the batch comes in as values are kept between programs."""
        aval = self.batch.avals[leaf]
        return is_packed(aval) or (is_key(aval) and self.batch.kinds[leaf] is Kind.SHARED)

    # ------------------------------------------------------------------ compilation

    def jobs(self) -> list[Job]:
        """Returns the programs to compile, one per form, in the order `ready` takes them."""
        return [self._job(form) for form in self.forms]

    def _job(self, form: Form) -> Job:
        batch, rank = self.batch, self.rank
        avals = {i: batch.avals[i] for i in self.read}
        whole = [stored(a) if i in self.kept else a for i, a in avals.items()]
        counters = tuple(map(stored, self.model.count_avals))
        arguments = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rank.replicated),
            (counters, _POSITION, *whole),
        )
        where = (
            tuple(
                rank.replicated if batch.layouts[leaf] is Layout.WHOLE else rank.along_data
                for leaf, _ in form.pieces
            ),
            tuple(t.sharding for t in self.totals) if form.clears else (),
            (rank.replicated,) * len(form.counted),
            (rank.replicated,) * len(self.model.counters),
        )

        def prepare(counters: Sequence[Any], at: Any, *values: Any) -> tuple[Any, ...]:
            leaves = {
                i: unstored(value, aval) if i in self.kept else value
                for (i, aval), value in zip(avals.items(), values, strict=True)
            }
            pieces = batch.split(leaves, form.pieces, at[0], at[1], form.size)
            totals = zeros(self.totals) if form.clears else ()
            return (pieces, totals, *self._counts(counters, form))

        name = f"prepare {form.count} microbatches on rank {rank.index}"
        return Job(name, prepare, arguments, (), where)

    def _counts(self, counters: Sequence[Any], form: Form) -> tuple[tuple[Any, ...], ...]:
        """Returns the counters that the form wants, then all after its last microbatch."""
        model = self.model
        values = [dict(zip(model.count_reads, counters, strict=True))]
        for _ in range(form.count if model.counters else 0):
            values.append(model.advance(values[-1]))
        return (
            tuple(values[k][Ref(Role.STATE, leaf)] for leaf, k in form.counted),
            tuple(values[-1][Ref(Role.STATE, leaf)] for leaf in model.counters),
        )

    def ready(self, compiled: Sequence[Any]) -> None:
        """Takes the compiled `jobs`."""
        programs = dict(zip(self.forms, compiled, strict=True))
        starts = [np.array([g.first, self.batch.bounds[g.first]], np.int32) for g in self.groups]
        places = put_all(starts, self.rank.replicated)
        self.calls = [(programs[g.form], at) for g, at in zip(self.groups, places, strict=True)]

    # ------------------------------------------------------------------ running

    def run(self, counters: Sequence[jax.Array], batch: Sequence[Any]) -> Prepared:
        """Returns the values of one step, from the flat leaves of its whole batch."""
        leaves = [raw(jnp.asarray(batch[i])) if i in self.kept else batch[i] for i in self.leaves]
        whole = dict(zip(self.leaves, put_all(leaves, self.rank.replicated), strict=True))
        rows = [whole[i] for i in self.read]
        pieces: list[jax.Array] = [whole[v.index] for v in self.shared]
        counted: list[jax.Array] = []
        totals: list[jax.Array] = []
        counts = list(counters)
        last: tuple[jax.Array, ...] = ()
        for program, at in self.calls:
            cut, cleared, some, last = program(tuple(counts), at, *rows)
            pieces += cut
            totals += cleared
            counted += some
            for place, value in zip(self.replaced, last, strict=True):
                counts[place] = value
        return Prepared([pieces[at] for at in self.order], totals, counted, last)
