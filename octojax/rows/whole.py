"""The loss of one microbatch, rewritten so that the microbatches' losses simply add up.

    sum(ce * mask) / sum(mask)      becomes      sum(ce * mask) / n

where n, one more input, is the whole batch's `sum(mask)`, evaluated once before the step. What
the batch alone decides is taken from the whole batch wherever it crosses rows; coefficients that
follow from the number of rows become the whole batch's; terms that depend on parameters alone
become results of their own, for the owners of the parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from octojax import compat
from octojax.compat import Atom, aval_of
from octojax.jaxprs.dataflow import eqns_for
from octojax.jaxprs.flat import Builder, FlatJaxpr, read, rewrite, without_dead
from octojax.jaxprs.inline import body_of, written_out
from octojax.jaxprs.trim_loops import trim_loops
from octojax.rows.analysis import Analysis
from octojax.rows.join import Join, natural
from octojax.rows.lift import Lift, NeedsOpening, Parts
from octojax.rows.pairs import LOOPS, Misaligned, pair, shape
from octojax.rows.state import Group, Rows
from octojax.trace import Leaves, TracedLoss


@dataclass(frozen=True)
class Portion:
    """What part of the batch a trace sees: `rows` of `of`, one of `pieces` such parts.

    `kinds` are "rows", "shared" or "key" for every leaf of the batch. `weighted`: the share of a
    part comes with it, row by row, as an input of its own; else it is `share`.
    """

    kinds: tuple[str, ...]
    share: float
    pieces: int
    weighted: bool = False


@dataclass(frozen=True)
class Extra:
    """A value of the whole batch that every microbatch reads: its slice, or all of it.

    `place` names the equation of the whole batch's trace that makes it.
    """

    name: str
    aval: Any
    rows: bool
    place: tuple[int, int]


@dataclass(frozen=True)
class WholeLoss:
    """A rewritten loss. `traced` has `extras` as further leaves of its batch; `evaluate` gives
    them from the leaves of the whole batch. `joins` are the rules for loss and aux. `mixing` are
    the equations that mix rows in other ways, of which the loss depends.
    """

    traced: TracedLoss
    extras: tuple[Extra, ...]
    evaluate: ClosedJaxpr | None
    joins: tuple[Join, ...]
    mixing: tuple[JaxprEqn, ...]
    unaligned: Misaligned | None = None


WEIGHT = (-1, -1)
"""The place of the extra that holds every row's part of its microbatch's weight."""


def whole_loss(
    traced: TracedLoss,
    whole: TracedLoss,
    portion: Portion,
    declared: dict[int, Join],
    probe: TracedLoss | None = None,
) -> WholeLoss:
    """Returns the loss of a microbatch as a summand of the loss of the whole batch.

    `traced` and `whole` are traces of one loss for a microbatch and for all rows; `declared` are
    rules for leaves of aux that replace the natural ones. `probe` is a trace for a number of rows
    other than one and all, where the microbatch has a single row.
    """
    flat = written_out(traced.flat)
    other = None if probe is None else written_out(probe.flat)
    while True:
        try:
            paired = pair(flat, whole.flat, other)
        except Misaligned as parting:
            return _unaligned(replace(traced, flat=flat), whole, portion, declared, parting)
        analysis = Analysis(paired)
        try:
            states = analysis.run(_inputs(traced, portion))
            if not analysis.opened:
                rewriting = _Rewriting(traced, whole, portion, analysis, declared)
                return rewriting.result(states)
            calls = analysis.opened
        except NeedsOpening as need:
            calls = {id(_outermost(analysis, need.eqn))}
        except Misaligned as parting:
            return _unaligned(replace(traced, flat=flat), whole, portion, declared, parting)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            # A primitive of another JAX may have other parameters than its rule knows.
            parting = Misaligned(None, f"the analysis has no rule for it: {error!r}")
            return _unaligned(replace(traced, flat=flat), whole, portion, declared, parting)
        if other is not None:
            other = _opened(other, {id(paired.probes[eqn]) for eqn in calls})
        flat = _opened(flat, calls)


def _inputs(traced: TracedLoss, portion: Portion) -> list[Rows]:
    mutable = {
        k
        for k in range(len(traced.state))
        if traced.flat.outvars[traced.num_emits + k]
        is not traced.flat.invars[len(traced.params) + k]
    }
    states = [Rows(params=True)] * len(traced.params)
    states += [Rows(params=True, draws=k in mutable) for k in range(len(traced.state))]
    table = {
        "rows": Rows((Group((0,)),) if portion.pieces > 1 else (), batch=True),
        "shared": Rows(batch=True),
        "key": Rows(batch=True, draws=True),
    }
    return states + [table[kind] for kind in portion.kinds]


def _outermost(analysis: Analysis, eqn: JaxprEqn) -> JaxprEqn:
    calls = analysis.paired.calls
    scope = next(k for k, (call, _) in enumerate(calls, 1) if call is eqn)
    while calls[scope - 1][1]:
        scope = calls[scope - 1][1]
    return calls[scope - 1][0]


def _opened(flat: FlatJaxpr, calls: set[int]) -> FlatJaxpr:
    def rule(builder: Builder, eqn: JaxprEqn, args: list[Atom]) -> Sequence[Atom] | None:
        return builder.call(body_of(eqn), args) if id(eqn) in calls else None

    return written_out(rewrite(flat, rule))


class _Rewriting:
    """One rewrite of a microbatch's trace."""

    def __init__(
        self,
        traced: TracedLoss,
        whole: TracedLoss,
        portion: Portion,
        analysis: Analysis,
        declared: dict[int, Join],
    ) -> None:
        self.traced, self.whole, self.portion = traced, whole, portion
        self.analysis, self.declared = analysis, declared
        self.paired = analysis.paired
        self.builder = Builder(self.paired.micro)
        self.env: dict[Var, Atom] = {}
        self.inputs: dict[Atom, Var] = {}
        self.weight: Var | None = None
        self.places = {
            v: (at, k)
            for at, eqn in enumerate(self.paired.whole.eqns)
            for k, v in enumerate(eqn.outvars)
        }
        self.lift = Lift(analysis, self.builder, self.env, self.request)

    def request(self, whole: Atom, micro: Atom) -> Atom:
        """Returns the microbatch's input that holds a value of the whole batch, or its slice."""
        if isinstance(whole, Literal):
            return Literal(whole.val, aval_of(micro))
        if whole not in self.inputs:
            self.inputs[whole] = compat.new_var(aval_of(micro).update(weak_type=False))
        return self.inputs[whole]

    def result(self, states: list[Rows]) -> WholeLoss:
        for eqn in self.paired.micro.eqns:
            self._emit(eqn)
        emits, joins, terms = [], [], []
        blame: set[int] = set()
        outs = zip(self.paired.micro.outvars, self.paired.whole.outvars, states, strict=True)
        for index, (micro, whole, state) in enumerate(outs):
            if index >= self.traced.num_emits:
                emits.append(read(self.env, micro))
                continue
            value, join, more = self._emit_value(index, micro, whole, state)
            emits.append(value)
            joins.append(join)
            terms += [(index, atom) for atom in more]
            if index == 0:
                blame = set(state.blame) | self.lift.blame
        flat = self.builder.finish([*emits, *(atom for _, atom in terms)])
        weight = [] if self.weight is None else [self.weight]
        flat = replace(flat, invars=(*flat.invars, *self.inputs.values(), *weight))
        return self._packed(without_dead(flat), joins, [index for index, _ in terms], blame)

    def _emit(self, eqn: JaxprEqn) -> None:
        args = [read(self.env, x) for x in eqn.invars]
        for k, old in enumerate(eqn.invars):
            if (id(eqn), k) in self.analysis.exchanged:
                args[k] = self.request(self.analysis.exchanged[id(eqn), k], old)
        params = eqn.params
        if eqn.primitive.name in LOOPS and id(eqn) in self.analysis.inner:
            params = self._loop_params(eqn)
        outvars = [compat.new_var(v.aval) for v in eqn.outvars]
        self.builder.eqns.append(eqn.replace(invars=args, outvars=outvars, params=params))
        self.env.update(zip(eqn.outvars, outvars, strict=True))

    def _loop_params(self, eqn: JaxprEqn) -> dict[str, Any]:
        """Returns the parameters of a loop whose bodies read the whole batch's literals."""
        bodies = [inner.paired.micro for inner in self.analysis.inner[id(eqn)]]
        changed = [self._body(body) for body in bodies]
        if all(body is None for body in changed):
            return eqn.params
        if eqn.primitive.name == "scan":
            return {**eqn.params, "jaxpr": changed[0]}
        old = eqn.params["branches"]
        return {**eqn.params, "branches": tuple(b or a for a, b in zip(old, changed, strict=True))}

    def _body(self, body: FlatJaxpr) -> ClosedJaxpr | None:
        if body.constvars or not any((id(e), k) in self.analysis.exchanged
                                     for e in body.eqns for k in range(len(e.invars))):  # fmt: skip
            return None
        eqns = []
        for eqn in body.eqns:
            args = [
                self.request(self.analysis.exchanged[id(eqn), k], x)
                if (id(eqn), k) in self.analysis.exchanged
                else x
                for k, x in enumerate(eqn.invars)
            ]
            eqns.append(eqn.replace(invars=args))
        return compat.new_jaxpr(body.invars, body.outvars, eqns)

    # ------------------------------------------------------------------ results

    def _emit_value(
        self, index: int, micro: Atom, whole: Atom, state: Rows
    ) -> tuple[Atom, Join, list[Atom]]:
        """One result, how microbatches' join, and its terms of parameters alone."""
        rule = self.declared.get(index - 1) if index else None
        value = read(self.env, micro)
        if rule is not None:
            return value, _placed(rule, state, aval_of(micro), aval_of(whole)), []
        rule = Join("sum") if index == 0 else natural(state, aval_of(micro), aval_of(whole))
        if state.fixed and not state.plain and self._shared_or_rows(micro, whole) and index:
            return self.request(whole, micro), rule if state.groups else Join("last"), []
        floating = compat.is_float(aval_of(micro))
        if not floating or rule.rule not in ("sum", "last"):
            if not floating and rule.rule == "sum" and state.added and not state.own:
                parts = self.lift(micro, whole)
                return (value if parts.added is None or parts.same else parts.added), rule, []
            return value, rule, []
        if rule.rule == "last" and not state.params:
            return value, rule, []
        parts = self.lift(micro, whole)
        alone = [t.atom for t in parts.same if t.params_only and not shape(t.atom)]
        rest = [t.atom for t in parts.same if not t.params_only or shape(t.atom)]
        if index == 0 and not rest and parts.added is None and parts.own is None:
            return self._sum(micro, parts, alone), rule, []  # no stage would be left
        if rule.rule == "last":
            return (value, rule, []) if rest else (self.lift.zeros(micro), Join("sum"), alone)
        return self._sum(micro, parts, rest), Join("sum"), alone

    @staticmethod
    def _shared_or_rows(micro: Atom, whole: Atom) -> bool:
        a, b = shape(micro), shape(whole)
        return [d for d in range(len(a)) if a[d] != b[d]] in ([], [0])

    def _sum(self, micro: Atom, parts: Parts, same: Sequence[Atom]) -> Atom:
        values = [] if parts.added is None else [parts.added]
        pieces = self.portion.pieces
        values += [x if pieces == 1 else self.lift.times(x, 1 / pieces) for x in same]
        if parts.own is not None:
            share = self._weight() if self.portion.weighted else self.portion.share
            values.append(parts.own if share == 1.0 else self.lift.times(parts.own, share))
        total = values[0] if values else self.lift.zeros(micro)
        for value in values[1:]:
            total = self.lift.plus(total, value)
        return total

    def _weight(self) -> Atom:
        if self.weight is None:
            (rows,) = {
                aval.shape[0]
                for aval, kind in zip(self.traced.batch.avals, self.portion.kinds, strict=True)
                if kind == "rows"
            }
            like = jax.make_jaxpr(lambda x: x)(jax.ShapeDtypeStruct((rows,), np.float32))
            self.weight = compat.new_var(like.in_avals[0])
        scalar = jax.make_jaxpr(lambda x: x)(np.float32(0)).in_avals[0]
        return self.lift.traced(lambda x: x.sum(), scalar, self.weight)

    def _packed(
        self, flat: FlatJaxpr, joins: list[Join], terms: list[int], blame: set[int]
    ) -> WholeLoss:
        used = {x for eqn in flat.eqns for x in eqn.invars if isinstance(x, Var)}
        used |= {x for x in flat.outvars if isinstance(x, Var)}
        requests = [(whole, var) for whole, var in self.inputs.items() if var in used]
        requests.sort(key=lambda item: self.places.get(item[0], (-2, 0)))  # pyright: ignore[reportArgumentType, reportCallIssue]
        extras = [
            Extra(
                f"whole batch {k}",
                jax.ShapeDtypeStruct(shape(whole), aval_of(whole).dtype),
                shape(whole) != shape(var),
                self.places[whole],  # pyright: ignore[reportArgumentType]
            )
            for k, (whole, var) in enumerate(requests)
        ]
        more = [var for _, var in requests]
        if self.weight is not None and self.weight in used:
            aval = jax.ShapeDtypeStruct((self._whole_rows(),), np.float32)
            extras.append(Extra("weight", aval, True, WEIGHT))
            more.append(self.weight)
        count = len(self.traced.flat.invars)
        flat = replace(flat, invars=(*flat.invars[:count], *more))
        batch = self.traced.batch
        leaves = Leaves(
            batch.treedef,
            (*batch.names, *(e.name for e in extras)),
            (*batch.avals, *(jax.ShapeDtypeStruct(shape(v), aval_of(v).dtype) for v in more)),
        )
        return WholeLoss(
            replace(
                self.traced,
                flat=flat,
                batch=leaves,
                terms=tuple(terms),
                pieces=self.portion.pieces,
            ),
            tuple(extras),
            self._evaluation([whole for whole, _ in requests]),
            tuple(joins),
            tuple(self.analysis.mixing[k] for k in sorted(blame)),
        )

    def _whole_rows(self) -> int:
        kinds = self.portion.kinds
        avals = zip(self.whole.batch.avals, kinds, strict=True)
        return next(a.shape[0] for a, kind in avals if kind == "rows")

    def _evaluation(self, targets: Sequence[Atom]) -> ClosedJaxpr | None:
        """Returns the program that gives the targets from the leaves of the whole batch."""
        if not targets:
            return None
        flat = self.paired.whole
        needed = eqns_for(flat.eqns, targets)
        eqns = trim_loops(needed, [x for x in targets if isinstance(x, Var)])
        first = len(self.traced.params) + len(self.traced.state)
        others, leaves = flat.invars[:first], flat.invars[first:]
        ends = [*flat.constvars, *others, *leaves]
        closed = compat.new_jaxpr(ends, targets, eqns)
        unread = [jax.ShapeDtypeStruct(shape(v), aval_of(v).dtype) for v in others]

        def run(*values: Any) -> list[Any]:
            # A loop may still carry what depends on parameters in addition to the targets.
            zeros = [jax.numpy.zeros(x.shape, x.dtype) for x in unread]
            return compat.eval_jaxpr(closed, [*flat.constants, *zeros, *values])

        return jax.make_jaxpr(run)(
            *(jax.ShapeDtypeStruct(shape(v), aval_of(v).dtype) for v in leaves)
        )


def separated(traced: TracedLoss) -> TracedLoss:
    """Returns the loss of a batch by itself, terms of parameters alone as results of their own."""
    kinds = ("shared",) * len(traced.batch)
    return whole_loss(traced, traced, Portion(kinds, 1.0, 1), {}).traced


def _placed(rule: Join, state: Rows, micro: Any, whole: Any) -> Join:
    """Returns a declared rule; "rows" along the axis that has them."""
    if rule.rule != "rows":
        return rule
    natural_rule = natural(state, micro, whole)
    return natural_rule if natural_rule.rule == "rows" else rule


def _unaligned(
    traced: TracedLoss,
    whole: TracedLoss,
    portion: Portion,
    declared: dict[int, Join],
    parting: Misaligned,
) -> WholeLoss:
    """Returns the loss where the traces cannot be compared: microbatches weigh by their rows."""
    joins = []
    ends = zip(traced.flat.outvars, whole.flat.outvars, strict=True)
    for index, (micro, other) in enumerate(ends):
        if index and index < traced.num_emits:
            a, b = aval_of(micro), aval_of(other)
            rule = declared.get(index - 1) or natural(Rows(own=True), a, b)
            floating = jax.numpy.issubdtype(a.dtype, jax.numpy.inexact)
            joins.append(Join("mean") if rule == Join("sum") and floating else rule)
    joins.insert(0, Join("sum"))
    weighing: Callable[..., Any]
    if portion.weighted:
        weighing = lambda loss, rows: loss * rows.sum().astype(loss.dtype)  # noqa: E731
    else:
        weighing = lambda loss: loss * np.asarray(portion.share, loss.dtype)  # noqa: E731
    builder = Builder(traced.flat)
    env: dict[Var, Atom] = {}
    for eqn in traced.flat.eqns:
        builder.emit(eqn, env)
    loss = traced.flat.outvars[0]
    shapes = [jax.ShapeDtypeStruct((), aval_of(loss).dtype)]
    sizes = [a.shape[0] for a, k in zip(traced.batch.avals, portion.kinds) if k == "rows"]
    if portion.weighted:
        shapes.append(jax.ShapeDtypeStruct((sizes[0],), np.float32))
    closed = jax.make_jaxpr(weighing)(*shapes)
    extras, leaves, more = (), traced.batch, []
    if portion.weighted:
        weight = compat.new_var(closed.in_avals[1])
        rows = next(a.shape[0] for a, k in zip(whole.batch.avals, portion.kinds) if k == "rows")
        aval = jax.ShapeDtypeStruct((rows,), np.float32)
        extras = (Extra("weight", aval, True, WEIGHT),)
        more = [weight]
        leaves = replace(leaves, names=(*leaves.names, "weight"), avals=(*leaves.avals, shapes[1]))
    (value,) = builder.call(closed, [read(env, loss), *more])
    outvars = [value, *(read(env, x) for x in traced.flat.outvars[1:])]
    flat = builder.finish(outvars)
    flat = replace(flat, invars=(*flat.invars, *more))
    return WholeLoss(
        replace(traced, flat=flat, batch=leaves), extras, None, tuple(joins), (), parting
    )
