"""Which parameters an update does not treat element by element.

    adamw, lion, sgd, clipping by a norm    elementwise, but for sums of everything: scalars
    muon, shampoo, adafactor                products of matrices, means along an axis

What is elementwise may be cut anywhere, along the data axis too, and changes not a bit.
"""

from typing import Any

from jax.extend.core import Literal

from octojax.update.places import parameter_of
from octojax.update.plan import End, Role, UpdatePlan, UpdateProgram
from octojax.update.rows import ELEMENTWISE

_FORMS = frozenset({"reshape", "squeeze", "broadcast_in_dim"})
"""What may add or drop dimensions of size 1."""

Found = dict[int, str]
"""Per piece of the parameters, the operation that mixes its elements."""


def mixing(plan: UpdatePlan) -> Found:
    """Returns the pieces of the parameters whose elements an operation of the update mixes."""
    mixed: Found = {}
    saved: dict[tuple[int, End], frozenset[int]] = {}
    for phase in plan.update.phases:
        for program in phase.every_program:
            _walk(plan, program, saved, mixed)
        for move in phase.exchange.moves if phase.exchange else ():
            saved[move.target, move.end] = saved.get((move.source, move.end), frozenset())
    return mixed


def _walk(
    plan: UpdatePlan,
    program: UpdateProgram,
    saved: dict[tuple[int, End], frozenset[int]],
    mixed: Found,
) -> None:
    """Follows the elements of every piece through one program."""
    jaxpr = program.jaxpr.jaxpr
    pieces: dict[Any, frozenset[int]] = {}
    for at, var in enumerate(jaxpr.invars):
        ends = {binding.reads[at] for binding in program.bindings}
        if var.aval.shape:
            pieces_by_end = (_pieces(plan, end, program.rank, saved) for end in ends)
            pieces[var] = frozenset().union(*pieces_by_end)
    for eqn in jaxpr.eqns:
        read = [x for x in eqn.invars if not isinstance(x, Literal) and pieces.get(x)]
        every = frozenset().union(*(pieces[x] for x in read))
        if not every or all(_is_single(v.aval) for v in eqn.outvars):
            continue
        if not _keeps_elements(eqn, read):
            mixed |= {piece: eqn.primitive.name for piece in every if piece not in mixed}
        pieces.update(dict.fromkeys(eqn.outvars, every))
    for at, var in enumerate(jaxpr.outvars):
        if not isinstance(var, Literal):
            for binding in program.bindings:
                saved[program.rank, binding.writes[at]] = pieces.get(var, frozenset())


def _pieces(
    plan: UpdatePlan, end: End, rank: int, saved: dict[tuple[int, End], frozenset[int]]
) -> frozenset[int]:
    """Returns the pieces of the parameters whose elements an end has."""
    if end.role in (Role.PARAM, Role.GRAD):
        return frozenset({end.index})
    if end.role is Role.STATE:
        piece = parameter_of(plan, end.index)
        return frozenset() if piece is None else frozenset({piece})
    return saved.get((rank, end), frozenset())


def _is_single(aval: Any) -> bool:
    return aval.size == 1


def _keeps_elements(eqn: Any, read: list[Any]) -> bool:
    """Whether every element of the results comes of the element at the same place."""
    name = eqn.primitive.name
    shapes = {_bare(x.aval.shape) for x in (*read, *eqn.outvars)}
    return len(shapes) == 1 and (name in ELEMENTWISE or name in _FORMS)


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
