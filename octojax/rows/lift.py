"""The parts of a value of a microbatch's trace: what adds up, what all share, what is its own.

    loss = (ce * mask).sum() / mask.sum() + 0.01 * (w**2).sum() + log(h.mean())
           added: the microbatches' sum     same              own: of this microbatch alone

Coefficients that the batch alone decides (`mask.sum()`, one over the number of rows) become
those of the whole batch on the way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from octojax import compat
from octojax.compat import REMAT_NAMES, Atom, aval_of
from octojax.jaxprs.flat import Builder, read
from octojax.jaxprs.rows import slice_row
from octojax.rows.analysis import Analysis, accumulators, same_value
from octojax.rows.pairs import Misaligned, Pair, Paired, shape
from octojax.rows.rules import ELEMENTWISE, linear_operands
from octojax.rows.state import Rows

_SUMS = frozenset({"add", "add_any", "sub", "concatenate", "select_n", "pad", "stack"})
"""Where an operand that all microbatches share is a summand and no coefficient."""


@dataclass(frozen=True)
class Term:
    """A summand that all microbatches share. `params_only`: made of parameters alone."""

    atom: Atom
    params_only: bool


@dataclass(frozen=True)
class Parts:
    added: Atom | None = None
    same: tuple[Term, ...] = ()
    own: Atom | None = None


class NeedsOpening(Exception):
    """A `jax.checkpoint` must be written out, so that its coefficients can be exchanged."""

    def __init__(self, eqn: JaxprEqn) -> None:
        super().__init__()
        self.eqn = eqn


class _Unknown(Exception):
    """The coefficients inside a call or loop are not one factor."""


Factor = tuple[str, Atom, Atom, int]
"""("mul" or "div", the microbatch's coefficient, the whole batch's, scope)"""


class Lift:
    """Takes values apart. Appends equations to `builder`; `env` renames to its variables.

    `request(whole, micro)` returns a value of the whole batch as an input of the microbatch.
    `blame` gathers the numbers of equations that could not be seen through.
    """

    def __init__(
        self,
        analysis: Analysis,
        builder: Builder,
        env: dict[Var, Atom],
        request: Callable[[Atom, Atom], Atom],
    ) -> None:
        self.analysis, self.builder, self.env, self.request = analysis, builder, env, request
        self.blame: set[int] = set()
        paired = analysis.paired
        self.pairs = {v: p for p in paired.pairs if not p.glue for v in p.micro.outvars}
        self.calls: dict[Var, tuple[int, Atom]] = {}
        for scope, (eqn, _) in enumerate(paired.calls, 1):
            ends = zip(eqn.outvars, paired.bodies[scope].outvars, strict=True)
            self.calls.update((v, (scope, x)) for v, x in ends)
        self.outside = {
            v: x
            for scope, (eqn, _) in enumerate(paired.calls, 1)
            for v, x in zip(paired.bodies[scope].invars, eqn.invars, strict=True)
        }
        self.stacks = _stacks(paired)
        self.parts: dict[Var, Parts] = {}
        self.copies: dict[Var, Atom] = {}

    def __call__(self, micro: Atom, whole: Atom) -> Parts:
        if isinstance(micro, Literal):
            return self._lift(micro, whole)
        if micro not in self.parts:
            self.parts[micro] = self._lift(micro, whole)
        return self.parts[micro]

    def _lift(self, micro: Atom, whole: Atom) -> Parts:
        state = self.analysis.state(micro, whole)
        if state.fixed and not state.groups and not state.plain and not state.draws:
            return Parts(same=(Term(self.request(whole, micro), False),))
        if not state.lumped and not state.partial:
            return Parts(same=tuple(self._terms(micro, state)))
        if isinstance(micro, Literal):
            return Parts(own=micro)
        if micro in self.calls:
            return self._of_call(micro, whole, state)
        pair = self.pairs.get(micro)
        if pair is None:
            raise Misaligned(None, "of one row, a sum over rows is another operation")
        if pair.name in ("scan", "cond") and (state.added or state.partial):
            return self._of_loop(micro, whole, pair)
        states = self.analysis.operands(pair)
        linear = linear_operands(pair, states)
        if not linear or any(s.groups and not s.partial for s in states):
            return self._whole(micro, state)
        return self._of_linear(micro, pair, states)

    def _whole(self, micro: Atom, state: Rows) -> Parts:
        value = read(self.env, micro)
        adds = (state.added or state.partial) and not state.own
        return Parts(added=value) if adds else Parts(own=value)

    # ------------------------------------------------------------------ linear equations

    def _of_linear(self, micro: Var, pair: Pair, states: Sequence[Rows]) -> Parts:
        ends = list(zip(pair.micro.invars, pair.whole.invars, strict=True))
        if pair.name in _SUMS and pair.name != "select_n":
            parts = [self(a, b) for a, b in ends]
            fixed: dict[int, Atom] = {}
        else:
            sums = [s.lumped or s.partial for s in states]
            coefficient = {k for k, s in enumerate(states) if not sums[k] or s.fixed}
            if pair.name == "select_n":
                coefficient &= {0}
            if len(coefficient) == len(ends):
                return Parts(own=read(self.env, micro))
            fixed = {k: self._coefficient(*ends[k], states[k]) for k in coefficient}
            parts = [None if k in coefficient else self(a, b) for k, (a, b) in enumerate(ends)]
        unchanged = all(
            fixed[k] is read(self.env, a)
            if p is None
            else p.added is read(self.env, a) and not p.same and p.own is None
            for k, (p, (a, _)) in enumerate(zip(parts, ends, strict=True))
        )
        if unchanged:
            return Parts(added=read(self.env, micro))
        split = [p or Parts() for p in parts]
        added = self._again(pair, [p.added for p in split], fixed)
        own = self._again(pair, [p.own for p in split], fixed)
        same = []
        for k, part in enumerate(split):
            for term in part.same:
                alone = [term.atom if i == k else None for i in range(len(split))]
                atom = self._again(pair, alone, fixed)
                only = term.params_only and all(isinstance(x, Literal) for x in fixed.values())
                same.append(Term(atom, only))  # pyright: ignore[reportArgumentType]
        return Parts(added, tuple(same), own)

    @staticmethod
    def _strange(state: Rows) -> bool:
        return state.fixed and not state.plain

    def _coefficient(self, micro: Atom, whole: Atom, state: Rows) -> Atom:
        return self.request(whole, micro) if self._strange(state) else read(self.env, micro)

    def _again(
        self, pair: Pair, values: Sequence[Atom | None], fixed: dict[int, Atom]
    ) -> Atom | None:
        """Returns the equation with other operands; None stands for zero."""
        if all(v is None for v in values):
            return None
        out = pair.micro.outvars[0]
        present = [k for k, v in enumerate(values) if v is not None]
        if pair.name in ("add", "add_any", "sub") and len(present) == 1:
            (k,) = present
            value = values[k]
            if value is not None and shape(value) == shape(out):
                return self.negated(value) if pair.name == "sub" and k == 1 else value
        args = []
        for k, (value, old) in enumerate(zip(values, pair.micro.invars, strict=True)):
            new = fixed.get(k, value)
            args.append(self.zeros(old) if new is None else new)
        return self.builder.append(pair.micro.primitive, args, pair.micro.params, aval_of(out))

    # ------------------------------------------------------------------ what all share

    def _terms(self, micro: Atom, state: Rows) -> list[Term]:
        """Returns the summands of a value that all microbatches share."""
        only = state.params and not state.batch and not state.draws
        pair = self.pairs.get(micro) if isinstance(micro, Var) else None
        whole = [Term(read(self.env, micro), only)]
        if isinstance(micro, Literal) and micro.val == 0:
            return []
        if pair is None or pair.scope or not state.params or shape(micro):
            return whole
        summed = only and pair.name == "reduce_sum" and 0 in pair.micro.params["axes"]
        if summed and self._is_stacked(pair.micro.invars[0], 0):
            return [Term(atom, True) for atom in self._by_rows(pair)]
        ends = list(zip(pair.micro.invars, pair.whole.invars, strict=True))
        states = self.analysis.operands(pair)
        if pair.name in ("add", "add_any", "sub"):
            split = [self(a, b).same for a, b in ends]
        elif pair.name in ("mul", "div"):
            at = [k for k, s in enumerate(states) if s.params]
            if (
                len(at) != 1
                or (pair.name == "div" and at != [0])
                or any(map(self._strange, states))
            ):
                return whole
            split = [self(a, b).same if k in at else () for k, (a, b) in enumerate(ends)]
        elif pair.name in ("neg", "convert_element_type", "copy"):
            split = [self(*ends[0]).same]
        else:
            return whole
        if sum(map(len, split)) < 2 or not any(t.params_only for terms in split for t in terms):
            return whole
        multiplied = pair.name in ("mul", "div")
        result = []
        for k, terms in enumerate(split):
            for term in terms:
                others = {
                    i: read(self.env, a) for i, (a, _) in enumerate(ends) if multiplied and i != k
                }
                alone = [term.atom if i == k else None for i in range(len(ends))]
                atom = self._again(pair, alone, others)
                assert atom is not None
                result.append(Term(atom, term.params_only))
        return result

    def _is_stacked(self, atom: Atom, rows: int) -> bool:
        """Whether an array is made, row by row along axis 0, of parameters stacked over layers."""
        if isinstance(atom, Literal):
            return not shape(atom)
        rows = rows or (shape(atom) or (0,))[0]
        if atom in self.stacks:
            return shape(atom)[0] == rows
        pair = self.pairs.get(atom)
        if pair is None or pair.name not in ELEMENTWISE or shape(atom)[:1] != (rows,):
            return False
        return all(self._is_stacked(x, rows) for x in pair.micro.invars)

    def _by_rows(self, pair: Pair) -> list[Atom]:
        """Returns a sum over stacked parameters layer by layer: these have several owners."""
        stack = read(self.env, pair.micro.invars[0])
        assert isinstance(stack, Var)
        sums = []
        for k in range(shape(stack)[0]):
            row = slice_row(self.builder, stack, k)
            aval = aval_of(pair.micro.outvars[0])
            sums.append(self.builder.append(jax.lax.reduce_sum_p, [row], pair.micro.params, aval))
        return sums

    # ------------------------------------------------------------------ calls and loops

    def _of_call(self, micro: Var, whole: Atom, state: Rows) -> Parts:
        value = read(self.env, micro)
        if not state.added and not state.partial:
            return Parts(own=value)
        scope, _ = self.calls[micro]
        eqn, _ = self.analysis.paired.calls[scope - 1]
        try:
            factors = self._factors(micro, whole, self.analysis)
        except _Unknown:
            if eqn.primitive.name in REMAT_NAMES:
                raise NeedsOpening(eqn) from None
            return self._unseen(eqn, value)
        if factors and eqn.primitive.name in REMAT_NAMES:
            raise NeedsOpening(eqn)
        return Parts(added=self._scaled(value, factors))

    def _of_loop(self, micro: Var, whole: Atom, pair: Pair) -> Parts:
        value = read(self.env, micro)
        try:
            factors = self._factors(micro, whole, self.analysis, start=False)
        except _Unknown:
            return self._unseen(pair.micro, value)
        start = self._start(pair, micro)
        if start is None or self._is_zero(start):
            return Parts(added=self._scaled(value, factors))
        summed = self.subtracted(value, read(self.env, start))
        more = self(start, self.analysis.paired.whole_of(start))
        added = self._scaled(summed, factors)
        if more.added is not None:
            added = self.plus(added, more.added)
        return Parts(added, more.same, more.own)

    def _unseen(self, eqn: JaxprEqn, value: Atom) -> Parts:
        self.blame.add(self.analysis.number(eqn))
        return Parts(own=value)

    def _start(self, pair: Pair, micro: Var) -> Atom | None:
        """Returns what a carried sum of a scan begins with; None for other results."""
        if pair.name != "scan":
            return None
        consts, carry = compat.scan_counts(pair.micro.params)
        at = list(pair.micro.outvars).index(micro)
        return pair.micro.invars[consts + at] if at < carry else None

    def _factors(
        self, micro: Atom, whole: Atom, analysis: Analysis, start: bool = True
    ) -> tuple[Factor, ...]:
        """Returns the coefficients between a value and the sums over rows that it is made of.

        Raises `_Unknown` if different summands have different ones.
        """
        state = analysis.state(micro, whole)
        if state.each or (state.groups and not state.partial):
            return ()
        sums = state.added or state.partial
        if not sums or state.own or isinstance(micro, Literal):
            raise _Unknown
        paired = analysis.paired
        inner = (
            self if analysis is self.analysis else Lift(analysis, self.builder, {}, self.request)
        )
        if micro in inner.calls:
            _, atom = inner.calls[micro]
            return self._factors(atom, paired.whole_of(atom), analysis)
        pair = inner.pairs.get(micro)
        if pair is None:  # a sum that comes in from outside
            outside = inner.outside.get(micro)
            if outside is None:
                return ()
            return self._factors(outside, paired.whole_of(outside), analysis)
        if pair.name in ("scan", "cond"):
            return self._loop_factors(pair, micro, analysis, start)
        states = analysis.operands(pair)
        linear = linear_operands(pair, states)
        if not linear or any(s.groups and not s.partial for s in states):
            return ()
        ends = list(zip(pair.micro.invars, pair.whole.invars, strict=True))
        lumps = [k for k in linear if not Lift._strange(states[k])]
        alternatives = [self._factors(*ends[k], analysis) for k in lumps]
        if pair.name in _SUMS:
            rest = [a for k, (a, _) in enumerate(ends) if k not in lumps]
            if pair.name == "select_n":
                rest = [a for a in rest if a is not ends[0][0]]
            if not all(inner._is_zero(a) for a in rest):
                raise _Unknown
        if not alternatives or any(not _equal(f, alternatives[0]) for f in alternatives):
            raise _Unknown
        factors = alternatives[0]
        for k, (a, b) in enumerate(ends):
            if k not in lumps and pair.name not in _SUMS and Lift._strange(states[k]):
                if pair.name not in ("mul", "div"):
                    raise _Unknown
                if analysis is not self.analysis and not isinstance(b, Literal):
                    raise _Unknown
                factors = (*factors, (pair.name, a, b, pair.scope))
        return factors

    def _loop_factors(
        self, pair: Pair, micro: Var, analysis: Analysis, start: bool
    ) -> tuple[Factor, ...]:
        at = list(pair.micro.outvars).index(micro)
        inners = analysis.inner[id(pair.micro)]
        self._check_operands(pair, at, analysis)
        if pair.name == "cond":
            ends = [(i, i.paired.micro.outvars[at]) for i in inners]
            alternatives = [
                self._factors(a, i.paired.whole_of(a), i)
                for i, a in ends
                if not (isinstance(a, Literal) and a.val == 0)
            ]
        else:
            (inner,) = inners
            consts, carry = compat.scan_counts(pair.micro.params)
            over_rows = pair.probe.params["length"] != pair.whole.params["length"]
            if at >= carry:
                atom = inner.paired.micro.outvars[at]
                return self._factors(atom, inner.paired.whole_of(atom), inner)
            sums = accumulators(inner.paired, [at], consts)
            if at not in sums:
                raise _Unknown
            if start and not self._is_zero(pair.micro.invars[consts + at]):
                raise _Unknown
            alternatives = []
            for atom in sums[at]:
                other = inner.paired.whole_of(atom)
                state = inner.state(atom, other)
                if over_rows and not state.lumped and not state.partial:
                    alternatives.append(())
                else:
                    alternatives.append(self._factors(atom, other, inner))
        if not alternatives or any(not _equal(f, alternatives[0]) for f in alternatives):
            raise _Unknown
        return alternatives[0]

    def _check_operands(self, pair: Pair, at: int, analysis: Analysis) -> None:
        """Raises `_Unknown` if sums that a loop reads have coefficients already."""
        states = analysis.operands(pair)
        start = -1
        if pair.name == "scan":
            consts, carry = compat.scan_counts(pair.micro.params)
            start = consts + at if at < carry else -1
        for k, (a, b) in enumerate(zip(pair.micro.invars, pair.whole.invars, strict=True)):
            sums = (states[k].lumped or states[k].partial) and not states[k].fixed
            if sums and k != start and self._factors(a, b, analysis):
                raise _Unknown

    def _scaled(self, value: Atom, factors: Sequence[Factor]) -> Atom:
        """Returns the value with its microbatch's coefficients exchanged for the whole batch's."""
        ratio = 1.0
        for name, micro, whole, _ in factors:
            if isinstance(micro, Literal) and isinstance(whole, Literal):
                change = float(whole.val) / float(micro.val)
                ratio = ratio * change if name == "mul" else ratio / change
                continue
            aval = aval_of(value)
            old, new = self.copied(micro), self.request(whole, micro)
            first, second = (new, old) if name == "mul" else (old, new)
            value = self.traced(
                lambda v, a, b: v * (a / b).astype(v.dtype), aval, value, first, second
            )
        return value if ratio == 1.0 else self.times(value, ratio)

    def copied(self, atom: Atom) -> Atom:
        """Returns a value inside a call, computed again outside of it."""
        if isinstance(atom, Literal) or atom in self.env or atom in self.builder.invars:
            return read(self.env, atom)
        if atom in self.copies:
            return self.copies[atom]
        paired = self.analysis.paired
        for scope, (eqn, _) in enumerate(paired.calls, 1):
            body = paired.bodies[scope]
            if atom in body.invars:
                return self.copied(eqn.invars[body.invars.index(atom)])
            if atom in body.constvars:
                return self.builder.constant(body.constants[body.constvars.index(atom)], atom)
        if atom in self.calls:
            return self.copied(self.calls[atom][1])
        if atom not in self.pairs:
            return read(self.env, atom)
        eqn = self.pairs[atom].micro
        renamed = {x: self.copied(x) for x in eqn.invars if isinstance(x, Var)}
        self.builder.emit(eqn, renamed)  # pyright: ignore[reportArgumentType]
        self.copies.update((v, renamed[v]) for v in eqn.outvars)
        return self.copies[atom]

    # ------------------------------------------------------------------ arithmetic

    def _is_zero(self, atom: Atom) -> bool:
        if isinstance(atom, Literal):
            return not shape(atom) and float(atom.val) == 0
        pair = self.pairs.get(atom)
        passes = ("broadcast_in_dim", "convert_element_type", "copy")
        return pair is not None and pair.name in passes and self._is_zero(pair.micro.invars[0])

    def traced(self, fn: Callable[..., Any], aval: Any, *args: Atom) -> Atom:
        """Appends a function of atoms; its one result has the aval's shape and dtype."""
        shapes = [jax.ShapeDtypeStruct(shape(x), aval_of(x).dtype) for x in args]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            closed = jax.make_jaxpr(lambda *x: fn(*x).astype(aval.dtype))(*shapes)
        return self.builder.call(closed, list(args))[0]

    def zeros(self, like: Atom) -> Atom:
        aval = aval_of(like)
        return self.traced(lambda: jax.numpy.zeros(aval.shape, aval.dtype), aval)

    def negated(self, value: Atom) -> Atom:
        return self.traced(lambda x: -x, aval_of(value), value)

    def subtracted(self, a: Atom, b: Atom) -> Atom:
        return self.traced(lambda x, y: x - y, aval_of(a), a, b)

    def plus(self, a: Atom, b: Atom) -> Atom:
        return self.traced(lambda x, y: x + y, aval_of(a), a, b)

    def times(self, value: Atom, factor: float | Atom) -> Atom:
        aval = aval_of(value)
        if isinstance(factor, (Literal, Var)):
            return self.traced(lambda x, y: x * y.astype(x.dtype), aval, value, factor)
        return self.traced(lambda x: x * np.asarray(factor, aval.dtype), aval, value)


def _stacks(paired: Paired) -> set[Var]:
    """Returns the inputs over whose rows a scan of the loss runs: layers' stacked parameters."""
    ends = dict(zip(paired.whole.invars, paired.micro.invars, strict=True))
    stacks = set()
    for eqn in paired.whole.eqns:
        if eqn.primitive.name == "scan":
            first = sum(compat.scan_counts(eqn.params))
            stacks |= {ends[x] for x in eqn.invars[first:] if isinstance(x, Var) and x in ends}
    return stacks


def _equal(a: Sequence[Factor], b: Sequence[Factor]) -> bool:
    return len(a) == len(b) and all(
        x[0] == y[0] and _same_atom(x[1], y[1]) and _same_atom(x[2], y[2]) for x, y in zip(a, b)
    )


def _same_atom(a: Atom, b: Atom) -> bool:
    if isinstance(a, Literal) and isinstance(b, Literal):
        return same_value(a, b)
    return a is b
