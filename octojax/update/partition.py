"""Cut a placed graph into one program per rank and phase.

A program holds exactly the operations that its targets need: in every phase what is offered
to the exchange, in the final phase the new leaves. An operation asked for again in a later
phase is run again when it is cheap (elementwise: reading the leaf once more costs less than
storing what was made of it), and saved when it reduces or multiplies.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from octojax.compat import num_bytes
from octojax.update.graph import Atom, Graph, emit
from octojax.update.pack import pack, unpack
from octojax.update.place import EVERYWHERE, Placed, Rank
from octojax.update.plan import Distributed, End, Entry, Exchange, Phase, Role, UpdateProgram

_HEAVY = frozenset(
    {
        "cholesky", "conv_general_dilated", "cumsum", "custom_call", "dot_general", "eigh", "fft",
        "householder_product", "lu", "qr", "random_bits", "scan", "sort", "svd", "top_k",
        "triangular_solve", "while",
    }
)  # fmt: skip
"""Primitives whose results are stored between phases and not computed twice."""


@dataclass(frozen=True)
class Want:
    """An output of the function: which end it is, its value, its rank (None: all), its type."""

    end: End
    atom: Atom
    rank: Rank
    aval: Any


@dataclass(frozen=True)
class _Draft:
    """What one rank computes in one phase, by the numbers of the graph."""

    targets: tuple[Want, ...]
    offers: tuple[Entry, ...]
    ops: tuple[int, ...]
    inputs: tuple[tuple[End, int], ...]
    arrived: tuple[tuple[int, Entry], ...]
    """Values that an exchange brought: its phase, and where the value lies."""

    saves: tuple[int, ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.targets or self.offers or self.saves)


def distribute(
    graph: Graph, placed: Placed, ends: Sequence[End], wants: Sequence[Want], num_ranks: int
) -> Distributed:
    """Returns the programs of every phase. `ends` name the inputs of the graph, in order."""
    ready = [_ready(placed, want) for want in wants]
    leaves = [at for want, at in zip(wants, ready, strict=True) if want.end.role is not Role.SCALAR]
    final = max(leaves, default=0)
    cut = _Cut(graph, placed, tuple(ends), num_ranks, tuple(max(final, at) for at in ready), wants)
    drafts = [cut.drafts(rank) for rank in range(num_ranks)]
    return Distributed(
        tuple(cut.phase(k, [rank[k] for rank in drafts], drafts) for k in range(cut.num_phases)),
        final,
    )


def _ready(placed: Placed, want: Want) -> int:
    """The first phase in which the value can be had where it is wanted."""
    if isinstance(want.atom, Literal):
        return 0
    here = placed.ranks[want.atom] in (EVERYWHERE, want.rank)
    return placed.phases[want.atom] + (0 if here else 1)


@dataclass(frozen=True)
class _Cut:
    graph: Graph
    placed: Placed
    ends: tuple[End, ...]
    num_ranks: int
    due: tuple[int, ...]
    wants: Sequence[Want]

    @cached_property
    def num_phases(self) -> int:
        return 1 + max(self.due, default=0)

    @cached_property
    def producers(self) -> dict[int, int]:
        return self.graph.producers()

    @cached_property
    def layouts(self) -> tuple[tuple[Entry, ...], ...]:
        """Per exchange, where each value lies in the byte vector of its rank."""
        return tuple(map(self._layout, range(self.num_phases - 1)))

    @cached_property
    def brought(self) -> dict[int, tuple[int, Entry]]:
        """Per exchanged value, after which phase, and where it lies."""
        return {e.value: (k, e) for k, entries in enumerate(self.layouts) for e in entries}

    def _layout(self, phase: int) -> tuple[Entry, ...]:
        filled = [0] * self.num_ranks
        entries = []
        for value in self.placed.exchanged[phase]:
            rank = self.placed.ranks[value]
            assert rank is not None, "a value that is everywhere needs no exchange"
            size = num_bytes(self.graph.avals[value])
            entries.append(Entry(value, rank, filled[rank], size))
            filled[rank] += size
        return tuple(entries)

    def drafts(self, rank: int) -> list[_Draft]:
        """The rank's work in every phase; what a later phase reads is saved by the first."""
        drafts: list[_Draft] = []
        made: dict[int, int] = {}
        for phase in range(self.num_phases):
            draft = self._draft(rank, phase, made)
            for end, value in draft.inputs:
                if end.role is Role.SAVED:
                    at = made[value]
                    saves = tuple(sorted({*drafts[at].saves, value}))
                    drafts[at] = replace(drafts[at], saves=saves)
            drafts.append(draft)
            for op in draft.ops:
                for value in self.graph.ops[op].outputs:
                    made.setdefault(value, phase)
        return drafts

    def _draft(self, rank: int, phase: int, made: dict[int, int]) -> _Draft:
        """Walks back from the targets to what the rank has at the start of the phase."""
        targets = tuple(
            want
            for want, due in zip(self.wants, self.due, strict=True)
            if due == phase and want.rank in (EVERYWHERE, rank)
        )
        layout = self.layouts[phase] if phase < len(self.layouts) else ()
        offers = tuple(entry for entry in layout if entry.rank == rank)
        ops: set[int] = set()
        inputs: dict[End, int] = {}
        arrived: dict[int, tuple[int, Entry]] = {}
        seen: set[int] = set()
        todo: list[Atom] = [want.atom for want in targets] + [entry.value for entry in offers]
        while todo:
            atom = todo.pop()
            if isinstance(atom, Literal) or atom in seen:
                continue
            seen.add(atom)
            if atom < self.graph.num_inputs and self.placed.ranks[atom] in (EVERYWHERE, rank):
                inputs[self.ends[atom]] = atom
            elif atom in self.brought and self.brought[atom][0] < phase:
                arrived[atom] = self.brought[atom]
            elif atom in made and self._worth_saving(atom):
                inputs[End(Role.SAVED, atom)] = atom
            else:
                ops.add(self.producers[atom])
                todo += self.graph.ops[self.producers[atom]].inputs
        return _Draft(
            targets,
            offers,
            tuple(sorted(ops)),
            tuple(sorted(inputs.items())),
            tuple(arrived[value] for value in sorted(arrived)),
        )

    def _worth_saving(self, value: int) -> bool:
        op = self.graph.ops[self.producers[value]]
        if op.primitive.name in _HEAVY:
            return True
        made = num_bytes(self.graph.avals[value])
        read = [num_bytes(self.graph.avals[x]) for x in op.inputs if not isinstance(x, Literal)]
        return max(read, default=0) > 8 * made

    def phase(
        self, phase: int, drafts: Sequence[_Draft], every: Sequence[Sequence[_Draft]]
    ) -> Phase:
        exchange = None
        if phase < len(self.layouts):
            layout = self.layouts[phase]
            needs = tuple(
                tuple(sorted({e.rank for d in later for k, e in d.arrived if k == phase}))
                for later in every
            )
            width = max((e.offset + e.nbytes for e in layout), default=0)
            exchange = Exchange(width, layout, needs)
        programs = tuple(
            None if draft.empty else self._program(rank, phase, draft, exchange)
            for rank, draft in enumerate(drafts)
        )
        return Phase(programs, exchange)

    def _program(
        self, rank: int, phase: int, draft: _Draft, exchange: Exchange | None
    ) -> UpdateProgram:
        graph = self.graph
        vectors = sorted({(k, entry.rank) for k, entry in draft.arrived})
        widths = [max(e.offset + e.nbytes for e in self.layouts[k]) for k, _ in vectors]

        def start(*gathered: Any) -> dict[int, Any]:
            by_source = dict(zip(vectors, gathered, strict=True))
            return {
                e.value: unpack(by_source[k, e.rank], e.offset, graph.avals[e.value])
                for k, e in draft.arrived
            }

        def finish(read: Any) -> list[Any]:
            outputs = [_as(read(want.atom), want.aval) for want in draft.targets]
            outputs += [read(value) for value in draft.saves]
            if draft.offers:
                assert exchange is not None
                outputs.append(pack([read(e.value) for e in draft.offers], exchange.width))
            return outputs

        jaxpr = emit(
            [graph.ops[at] for at in draft.ops],
            graph.avals,
            [value for _, value in draft.inputs],
            finish,
            widths,
            start,
        )
        reads = [End(Role.GATHERED, k * self.num_ranks + source) for k, source in vectors]
        reads += [end for end, _ in draft.inputs]
        writes = [want.end for want in draft.targets]
        writes += [End(Role.SAVED, value) for value in draft.saves]
        writes += [End(Role.PACKED, phase)] if draft.offers else []
        return UpdateProgram(rank, phase, jaxpr, tuple(reads), tuple(writes))


def _as(value: Any, aval: Any) -> Any:
    """A value, or a constant, with exactly the shape and type of the leaf it becomes."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return value
    return jnp.broadcast_to(jnp.asarray(value).astype(aval.dtype), aval.shape)
