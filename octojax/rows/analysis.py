"""A static analysis of two traces of a loss: which values depend on which rows of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.compat import REMAT_NAMES, Atom
from octojax.jaxprs.dataflow import reached_from
from octojax.rows import rules
from octojax.rows.pairs import Misaligned, Pair, Paired
from octojax.rows.state import SAME, Group, Rows, union


@dataclass
class Analysis:
    """States of all values of the whole batch's trace.

    `mixing[k]` is the microbatch's equation that number k of a `blame` stands for. `exchanged`
    says which operands of which equations (by identity) are taken from the whole batch.
    `opened` are the `jax.checkpoint` equations that have to be written out for that.
    """

    paired: Paired
    states: dict[Var, Rows] = field(default_factory=dict)
    mixing: list[JaxprEqn] = field(default_factory=list)
    exchanged: dict[tuple[int, int], Atom] = field(default_factory=dict)
    opened: set[int] = field(default_factory=set)
    numbers: dict[int, int] = field(default_factory=dict)
    inner: dict[int, list["Analysis"]] = field(default_factory=dict)  # by equation
    inside: bool = False  # of a loop

    def run(self, inputs: Sequence[Rows]) -> list[Rows]:
        whole = self.paired.whole
        self.states = dict(zip(whole.invars, inputs, strict=True))
        self.states.update((v, SAME) for v in whole.constvars)
        for pair in self.paired.pairs:
            self._pair(pair)
        ends = zip(self.paired.probe.outvars, whole.outvars, strict=True)
        return [self.state(micro, other) for micro, other in ends]

    def state(self, micro: Atom, whole: Atom) -> Rows:
        """Returns the state of a value, given in both traces."""
        if not isinstance(whole, Literal):
            return self.states[whole]
        if isinstance(micro, Literal) and not same_value(micro, whole):
            return Rows(own=True, size=True)
        return SAME

    def number(self, eqn: JaxprEqn) -> int:
        """Returns the number of an equation in `blame`."""
        if id(eqn) not in self.numbers:
            self.numbers[id(eqn)] = len(self.mixing)
            self.mixing.append(eqn)
        return self.numbers[id(eqn)]

    def operands(self, pair: Pair) -> list[Rows]:
        return [self.state(a, b) for a, b in zip(pair.probe.invars, pair.whole.invars, strict=True)]

    def _pair(self, pair: Pair) -> None:
        states = self.operands(pair)
        if not all(s.fixed for s in states) and not any(map(_keeps, states)):
            for k in range(len(states)):
                self.exchanged.pop((id(pair.micro), k), None)
            states = [self._exchange(pair, k, s) for k, s in enumerate(states)]
        number = self.number(pair.micro)
        if pair.name == "scan":
            results = self._scan(pair, states, number)
        elif pair.name == "while":
            results = self._while(pair, states, number)
        elif pair.name == "cond":
            results = self._cond(pair, states, number)
        elif pair.name == "shard_map":
            results = self._shard_map(pair, states, number)
        else:
            results = self._wrapped_number(pair, states) or rules.apply(pair, states, number)
        self.states.update(zip(pair.whole.outvars, results, strict=True))

    def _wrapped_number(self, pair: Pair, states: Sequence[Rows]) -> list[Rows] | None:
        """`i < 0 ? i + n : i` of row numbers i, as every indexing has it, is i."""
        if pair.name == "select_n" and len(states) == 3 and states[1].number is not None:
            return [states[1]]
        return None

    def _exchange(self, pair: Pair, operand: int, state: Rows) -> Rows:
        """Returns the state of an operand taken from the whole batch, where that is possible.

        What the batch alone decides is evaluated for all rows before the step.
        """
        if not state.fixed or state.plain or state.each:
            return state
        numbered = state.number is not None
        if numbered and pair.name in ("gather", "scatter", "scatter-add", "select_n"):
            rows = any(s.groups and s.number is None for s in self.operands(pair)[:1])
            if rows or pair.name == "select_n":
                return state
        if numbered and pair.name in ("lt", "broadcast_in_dim", "reshape", "concatenate"):
            return state
        if pair.glue:
            raise Misaligned(pair.micro, f"of one row, {pair.name} is left out")
        whole = pair.whole.invars[operand]
        possible = isinstance(whole, Literal) or not self.inside
        possible = possible and self._can_be_split(pair, operand)
        if not possible or (pair.scope and not self._open(pair.scope)):
            return replace(state, blame=state.blame | {self.number(pair.micro)})
        self.exchanged[id(pair.micro), operand] = whole
        groups = [replace(g, outer=1) for g in state.groups if not g.partial]
        return Rows(groups=tuple(groups), batch=True)

    @staticmethod
    def _can_be_split(pair: Pair, operand: int) -> bool:
        """Whether a whole batch's value is shared, or falls into rows along its first axis."""
        return rules.row_dims(*pair.shapes(operand)) in ([], [0])

    def _open(self, scope: int) -> bool:
        """Asks for the calls around an equation to be written out. False if they cannot be."""
        chain = []
        while scope:
            eqn, scope = self.paired.calls[scope - 1]
            chain.append(eqn)
        if self.inside or any(e.primitive.name not in REMAT_NAMES for e in chain):
            return False
        self.opened.add(id(chain[-1]))
        return True

    # ------------------------------------------------------------------ control flow

    def _body(self, paired: Paired, inputs: Sequence[Rows]) -> "tuple[Analysis, list[Rows]]":
        inner = Analysis(paired, mixing=self.mixing, numbers=self.numbers, inside=True)
        results = inner.run(inputs)
        return inner, results

    def _fixpoint(
        self, paired: Paired, inputs: list[Rows], carry: slice, skip: Sequence[int] = ()
    ) -> "tuple[Analysis, list[Rows], list[Rows]]":
        """Returns the analysis of a loop's body once its carried states no longer change."""
        while True:
            inner, results = self._body(paired, inputs)
            before = inputs[carry]
            sources = [
                old
                if k in skip
                else replace(old, params=old.params or new.params, draws=old.draws or new.draws)
                for k, (old, new) in enumerate(zip(before, results, strict=False))
            ]
            if sources != before:  # first: what the batch alone decides has other rules
                inputs[carry] = sources
                continue
            after = [
                old if k in skip else join(old, new)
                for k, (old, new) in enumerate(zip(before, results, strict=False))
            ]
            if after == before:
                self.exchanged.update(inner.exchanged)
                return inner, inputs, results
            inputs[carry] = after

    def _scan(self, pair: Pair, states: Sequence[Rows], number: int) -> list[Rows]:
        consts, num_carry = compat.scan_counts(pair.probe.params)
        over_rows = pair.probe.params["length"] != pair.whole.params["length"]
        rows = [_scanned(s) for s in states[consts + num_carry :]]
        spread = any(r.spread for r in rows)
        inputs = [*states[: consts + num_carry], *(r.state for r in rows)]
        carry = slice(consts, consts + num_carry)
        paired = pair.bodies[0]
        sums = accumulators(paired, range(num_carry), consts) if over_rows or spread else {}
        changes = [self._changes(paired, consts + k, k) for k in range(num_carry)]
        turns = any(s.turn for s in states)
        if over_rows or spread:
            carried = [consts + k for k in range(num_carry) if changes[k] and k not in sums]
            sliced = range(consts + num_carry, len(inputs)) if spread else ()
            for k in (*carried, *(k for k in sliced if not inputs[k].groups)):
                inputs[k] = replace(inputs[k], turn=True, even=frozenset())
        inner, inputs, ends = self._fixpoint(paired, inputs, carry, tuple(sums))
        self.inner[id(pair.micro)] = [inner]
        results = []
        for k in range(num_carry):
            if k in sums:
                parts = [inner.state(a, paired.whole_of(a)) for a in sums[k]]
                results.append(_accumulated(inputs[consts + k], parts, over_rows, number))
                continue
            state = ends[k]
            mixes = state.each or (over_rows and changes[k])
            state = replace(state, turn=turns)
            results.append(rules.blamed(state, number) if mixes else state)
        outer = next((g.outer for r in rows for g in [r.scanned] if g and g.outer), 1)
        for state in ends[num_carry:]:
            state = _stacked(replace(state, turn=turns), over_rows, spread, outer)
            results.append(state)
        return [rules.checked(pair, k, s, number) for k, s in enumerate(results)]

    @staticmethod
    def _changes(paired: Paired, inside: int, out: int) -> bool:
        """Whether an iteration hands on another value than came in."""
        return paired.whole.outvars[out] is not paired.whole.invars[inside]

    def _while(self, pair: Pair, states: Sequence[Rows], number: int) -> list[Rows]:
        head, body = pair.bodies
        num_head = pair.micro.params["cond_nconsts"]
        num_body = pair.micro.params["body_nconsts"]
        inputs = list(states[num_head:])
        carry = slice(num_body, None)
        _, inputs, ends = self._fixpoint(body, inputs, carry)
        carried = [join(a, b) for a, b in zip(inputs[carry], ends, strict=True)]
        _, (again,) = self._body(head, [*states[:num_head], *carried])
        depends = again.groups or again.lumped
        results = [rules.blamed(s, number) if depends else s for s in carried]
        return [rules.checked(pair, k, s, number) for k, s in enumerate(results)]

    def _cond(self, pair: Pair, states: Sequence[Rows], number: int) -> list[Rows]:
        index, *operands = states
        results: list[Rows] | None = None
        self.inner[id(pair.micro)] = inners = []
        for body in pair.bodies:
            inner, ends = self._body(body, operands)
            inners.append(inner)
            self.exchanged.update(inner.exchanged)
            results = ends if results is None else list(map(join, results, ends))
        final = []
        for k, state in enumerate(results or []):
            merged = union([state, replace(index, own=False, size=False)])
            state = replace(
                merged, groups=state.groups, added=state.added, own=state.own, join=state.join
            )
            mixes = index.lumped or index.groups or (index.turn and state.of_rows)
            state = rules.blamed(state, number) if mixes else state
            final.append(rules.checked(pair, k, state, number))
        return final

    def _shard_map(self, pair: Pair, states: Sequence[Rows], number: int) -> list[Rows]:
        """Returns the states of a body that runs on parts of its operands: like its equations
        where every part has whole rows, and no sum over rows arises in it."""
        inner, results = self._body(pair.bodies[0], states)
        specs, mesh = pair.probe.params["in_specs"], pair.probe.params["mesh"]
        whole = not any(map(partial(_parts_rows, mesh), states, specs))
        if not whole or inner.exchanged or any(s.lumped or s.inner for s in results):
            return rules.apply(pair, states, number)
        return [rules.checked(pair, k, s, number) for k, s in enumerate(results)]


def _parts_rows(mesh: Any, state: Rows, spec: Sequence[Any]) -> bool:
    """Whether a spec spreads rows over an axis of a mesh."""
    entries = [spec[d] for group in state.groups for d in group.dims if d < len(spec)]
    names = [n for entry in entries for n in (entry if isinstance(entry, tuple) else (entry,))]
    return any(n is not None and mesh.shape[n] > 1 for n in names)


def _keeps(state: Rows) -> bool:
    """Whether a sum over rows, or a value of this microbatch, is to go on with its own numbers."""
    return not state.fixed and (state.lumped or (bool(state.groups) and state.inner))


def same_value(a: Literal, b: Literal) -> bool:
    """Whether two literals hold the same numbers."""
    return bool(np.array_equal(np.asarray(a.val), np.asarray(b.val), equal_nan=True)) or (
        a.val is b.val
    )


def join(a: Rows, b: Rows) -> Rows:
    """Returns what a value has to do with rows that may be either of two."""
    if a == b:
        return a
    groups = {g.dims: g for g in (*a.groups, *b.groups)}
    for state in (a, b):
        groups.update((g.dims, g) for g in state.groups if g.outer is not None)
    both = union([a, b])
    both = replace(both, added=a.added or b.added, even=a.even & b.even)
    return both.with_groups(groups.values())


@dataclass(frozen=True)
class _Scanned:
    """One slice of an operand that a scan runs over, and the group along which it runs."""

    state: Rows
    scanned: Group | None
    spread: bool


def _scanned(state: Rows) -> _Scanned:
    groups, scanned, spread = [], None, False
    for group in state.groups:
        if group.dims == (0,):
            scanned = group
        elif 0 in group.dims:
            spread = True
            groups.append(replace(group, dims=tuple(d - 1 for d in group.dims if d)))
        else:
            groups.append(replace(group, dims=tuple(d - 1 for d in group.dims)))
    each = scanned is not None and scanned.outer is not None
    return _Scanned(
        replace(
            state,
            groups=tuple(groups),
            each=state.each or each,
            number=None,
            even=frozenset(d - 1 for d in state.even if d),
        ),
        scanned,
        spread,
    )


def _stacked(state: Rows, over_rows: bool, spread: bool, outer: int) -> Rows:
    """Returns a result of every iteration, stacked."""
    groups = [
        replace(g, dims=(0, *(d + 1 for d in g.dims)))
        if spread and g.outer is not None
        else replace(g, dims=tuple(d + 1 for d in g.dims))
        for g in state.groups
    ]
    if over_rows:
        groups.append(Group((0,), outer if state.each else None))
    elif spread and state.added and not state.groups:
        groups.append(Group((0,), 1, partial=True))
        state = replace(state, added=False)
    return replace(state, each=False, even=frozenset()).with_groups(groups)


def _accumulated(start: Rows, parts: Sequence[Rows], over_rows: bool, number: int) -> Rows:
    """Returns the state of a carried sum of what the iterations make."""
    state = union([start, *parts])
    state = replace(state, each=False, own=any(p.own for p in parts))
    if any(p.groups for p in parts) or start.groups:
        return rules.blamed(join(state, start), number)
    return replace(state, added=over_rows or any(p.added for p in parts) or start.added)


def accumulators(paired: Paired, carry: Any, consts: int) -> dict[int, list[Atom]]:
    """Returns carried values of a loop that are only added to, and what is added (microbatch's)."""
    flat = paired.micro
    makers = {v: eqn for eqn in flat.eqns for v in eqn.outvars}
    uses: dict[Var, int] = {}
    for atom in (*(x for eqn in flat.eqns for x in eqn.invars), *flat.outvars):
        if isinstance(atom, Var):
            uses[atom] = uses.get(atom, 0) + 1
    summands = {}
    for k in carry:
        start, atom, parts = flat.invars[consts + k], flat.outvars[k], []
        reach = reached_from(flat.eqns, [start])
        while isinstance(atom, Var) and atom is not start and uses.get(atom, 0) == 1:
            eqn = makers.get(atom)
            name = eqn.primitive.name if eqn is not None else ""
            if eqn is None or name not in ("add", "add_any", "sub", "convert_element_type", "copy"):
                break
            sides = [i for i, x in enumerate(eqn.invars) if isinstance(x, Var) and x in reach]
            if len(sides) != 1 or (name == "sub" and sides != [0]):
                break
            parts += [x for i, x in enumerate(eqn.invars) if i != sides[0]]
            atom = eqn.invars[sides[0]]
        if atom is start and uses.get(start, 0) == 1 and parts:
            summands[k] = parts
    return summands
