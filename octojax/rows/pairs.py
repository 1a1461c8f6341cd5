"""The traces of one loss for a microbatch and for the whole batch, equation by equation.

Calls of the microbatch's trace (`jax.checkpoint`, custom rules) stay calls, because they are
differentiated later; in the whole batch's trace, which is only evaluated, they are written out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from octojax.compat import CUSTOM_NAMES, JIT_NAMES, REMAT_NAMES, Atom, aval_of
from octojax.jaxprs.flat import FlatJaxpr, flatten
from octojax.jaxprs.inline import body_of, inline_jits, written_out

CALLS = REMAT_NAMES | CUSTOM_NAMES
LOOPS = frozenset({"scan", "while", "cond"})


class Misaligned(Exception):
    """The two traces have other operations. `eqn` is where they part, in the microbatch's."""

    def __init__(self, eqn: JaxprEqn | None, why: str) -> None:
        super().__init__(why)
        self.eqn, self.why = eqn, why


@dataclass(frozen=True)
class Pair:
    """One equation in both traces. `scope` numbers the call of the microbatch's trace it is in
    (0: none); `bodies` are the paired bodies of a loop or of branches. `probe` is the equation
    for another number of rows, with which the whole batch's is compared. `glue`: the
    microbatch's trace has no such equation, and `micro` is the probe's."""

    micro: JaxprEqn
    whole: JaxprEqn
    scope: int
    probe: JaxprEqn
    bodies: tuple["Paired", ...] = ()
    glue: bool = False

    @property
    def name(self) -> str:
        return self.micro.primitive.name

    def shapes(self, operand: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return shape(self.probe.invars[operand]), shape(self.whole.invars[operand])

    def results(self, output: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return shape(self.probe.outvars[output]), shape(self.whole.outvars[output])


@dataclass
class Paired:
    """Both traces. `counterpart` maps variables of the microbatch's to the whole batch's.

    `calls[k - 1]` is the call equation of scope k and the scope around it. `probe` is the trace
    for another number of rows: of a single row, JAX leaves out what others need.
    """

    micro: FlatJaxpr
    whole: FlatJaxpr
    probe: FlatJaxpr
    pairs: list[Pair] = field(default_factory=list)
    counterpart: dict[Var, Atom] = field(default_factory=dict)
    calls: list[tuple[JaxprEqn, int]] = field(default_factory=list)
    bodies: dict[int, FlatJaxpr] = field(default_factory=dict)
    probes: dict[int, JaxprEqn] = field(default_factory=dict)  # of calls, by identity

    def whole_of(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else self.counterpart[atom]


def shape(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(aval_of(atom), "shape", ()))


def pair(micro: FlatJaxpr, whole: FlatJaxpr, probe: FlatJaxpr | None = None) -> Paired:
    """Returns the equations of both traces side by side. Raises `Misaligned`.

    `micro` and `probe`, by default the same, have no nested jit.
    """
    probe = micro if probe is None else probe
    paired = Paired(micro, inline_jits(whole, JIT_NAMES | CALLS), probe)
    counts = {len(x.constvars) for x in (micro, probe, paired.whole)}
    if len(counts) > 1:
        raise Misaligned(None, "the traces have other numbers of constants")
    paired.counterpart.update(zip(micro.invars, paired.whole.invars, strict=True))
    paired.counterpart.update(zip(micro.constvars, paired.whole.constvars, strict=True))
    rest = _Walk(paired)
    rest.walk(micro.eqns, probe.eqns, 0)
    if rest.at < len(paired.whole.eqns):
        eqn = paired.whole.eqns[rest.at]
        raise Misaligned(eqn, f"the whole batch's trace goes on with {eqn.primitive.name}")
    return paired


class _Walk:
    """Walks the whole batch's equations alongside those of the microbatch."""

    def __init__(self, paired: Paired) -> None:
        self.paired, self.at = paired, 0
        self.wholes: dict[Var, Atom] = dict(
            zip(paired.probe.invars, paired.whole.invars, strict=True)
        )
        self.wholes.update(zip(paired.probe.constvars, paired.whole.constvars, strict=True))
        self.alike = dict(zip(paired.probe.invars, paired.micro.invars, strict=True))
        self.alike.update(zip(paired.probe.constvars, paired.micro.constvars, strict=True))

    def walk(self, eqns: Sequence[JaxprEqn], probes: Sequence[JaxprEqn], scope: int) -> None:
        same = eqns if eqns is probes else _aligned(eqns, probes)
        for eqn, probe in zip(same, probes, strict=True):
            if eqn is not None and not self._fits(eqn, probe):
                eqn = None
            if probe.primitive.name in CALLS and body_of(probe) is not None:
                self._call(eqn or probe, probe, scope)
            else:
                self._one(eqn or probe, probe, scope, glue=eqn is None)

    def _fits(self, eqn: JaxprEqn, probe: JaxprEqn) -> bool:
        """Whether both read what corresponds, as far as that is known."""
        if eqn is probe:
            return True
        reads = [(a, b) for a, b in zip(eqn.invars, probe.invars) if isinstance(b, Var)]
        ends = [(a, self.alike[b]) for a, b in reads if b in self.alike]
        return all(a is b for a, b in ends)

    def _call(self, eqn: JaxprEqn, probe: JaxprEqn, scope: int) -> None:
        paired = self.paired
        body = written_out(flatten(body_of(eqn)))
        other = body if probe is eqn else inline_jits(flatten(body_of(probe)))
        paired.calls.append((eqn, scope))
        paired.probes[id(eqn)] = probe
        inner = len(paired.calls)
        paired.bodies[inner] = body
        for var, operand in zip(other.invars, probe.invars, strict=True):
            self.wholes[var] = self._whole_of_probe(operand)
        if probe is not eqn:
            self.alike.update(zip(other.invars, body.invars, strict=True))
        for var, operand in zip(body.invars, probe.invars, strict=True):
            paired.counterpart[var] = self._whole_of_probe(operand)
        for var, value in zip(body.constvars, body.constants, strict=True):
            same = [v for v, c in zip(paired.whole.constvars, paired.whole.constants) if c is value]
            if not same:
                raise Misaligned(eqn, "a call has constants of its own in each trace")
            paired.counterpart[var] = same[0]
        self.wholes.update(
            (v, paired.counterpart[w]) for v, w in zip(other.constvars, body.constvars)
        )
        self.walk(body.eqns, body.eqns if probe is eqn else other.eqns, inner)
        for k, atom in enumerate(other.outvars):
            whole = self._whole_of_probe(atom)
            paired.counterpart[eqn.outvars[k]] = self.wholes[probe.outvars[k]] = whole
            self.alike[probe.outvars[k]] = eqn.outvars[k]

    def _whole_of_probe(self, atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else self.wholes[atom]

    def _one(self, eqn: JaxprEqn, probe: JaxprEqn, scope: int, glue: bool = False) -> None:
        paired, eqns = self.paired, self.paired.whole.eqns
        name = eqn.primitive.name
        if self.at >= len(eqns) or eqns[self.at].primitive.name != name:
            other = eqns[self.at].primitive.name if self.at < len(eqns) else "nothing"
            raise Misaligned(eqn, f"{name} of a microbatch is {other} of the whole batch")
        whole = eqns[self.at]
        ends = {(len(e.invars), len(e.outvars)) for e in (eqn, probe, whole)}
        ranks = [
            (len(shape(a)), len(shape(b)))
            for a, b in zip((*probe.invars, *probe.outvars), (*whole.invars, *whole.outvars))
        ]
        if len(ends) > 1 or any(a != b for a, b in ranks):
            raise Misaligned(eqn, f"{name} has other numbers of operands or dimensions")
        self.at += 1
        three = zip(*map(sub_bodies, (eqn, whole, probe)), strict=True)
        bodies = tuple(pair(a, b, None if probe is eqn else c) for a, b, c in three)
        paired.pairs.append(Pair(eqn, whole, scope, probe, bodies, glue))
        paired.counterpart.update(zip(eqn.outvars, whole.outvars, strict=True))
        self.wholes.update(zip(probe.outvars, whole.outvars, strict=True))
        if not glue and probe is not eqn:
            self.alike.update(zip(probe.outvars, eqn.outvars, strict=True))


def _aligned(
    eqns: Sequence[JaxprEqn], probes: Sequence[JaxprEqn], far: int = 40
) -> list[JaxprEqn | None]:
    """Returns for each probe the equation that is the same for a single row, or None.

    Of one row, JAX leaves out broadcasts, and squeezes what `einsum` contracts.
    """
    partners: list[JaxprEqn | None] = []
    i = 0
    while len(partners) < len(probes):
        j = len(partners)
        if i < len(eqns) and _similar(eqns[i], probes[j]):
            partners.append(eqns[i])
            i += 1
            continue
        skips = ((d - k, k) for d in range(1, far) for k in range(d + 1))
        for a, b in skips:
            here, there = eqns[i + a : i + a + 3], probes[j + b : j + b + 3]
            if here and len(here) == len(there) and all(map(_similar, here, there)):
                i += a
                partners += [None] * b
                break
        else:
            partners.append(None)
    return partners


def _similar(eqn: JaxprEqn, probe: JaxprEqn) -> bool:
    """Whether two equations differ in the number of rows alone, as far as their results show."""
    if eqn.primitive.name != probe.primitive.name or len(eqn.invars) != len(probe.invars):
        return False
    ends = list(zip(eqn.outvars, probe.outvars))
    return len(eqn.outvars) == len(probe.outvars) and all(
        len(shape(a)) == len(shape(b))
        and all(x == y or (x and y % x == 0) for x, y in zip(shape(a), shape(b)))
        for a, b in ends
    )


def sub_bodies(eqn: JaxprEqn) -> list[FlatJaxpr]:
    """Returns the bodies of a loop or a `shard_map`, or the branches of a `cond`, without calls."""
    name, params = eqn.primitive.name, eqn.params
    bodies: Mapping[str, Any] = {
        "scan": lambda: [params["jaxpr"]],
        "while": lambda: [params["cond_jaxpr"], params["body_jaxpr"]],
        "cond": lambda: list(params["branches"]),
        "shard_map": lambda: [params["jaxpr"]],
    }
    calls = JIT_NAMES | REMAT_NAMES
    return [written_out(flatten(body), calls) for body in bodies[name]()] if name in bodies else []
