"""Which steps a training state fits, and what it takes to read the state without its step."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from jax.extend.core import Literal

from octojax import compat
from octojax.api.pipelined import PipelinedLoss
from octojax.api.state_layout import StateLayout
from octojax.jaxprs.count import sub_jaxprs
from octojax.update import UpdatePlan


@dataclass(frozen=True)
class Origin:
    """What a training state was made for. Steps of equal origin may exchange their states.

    Parts of `facts` (name to text, with digests where the text is not all of it): the model's
    leaves and operations, partition and placement, the optimizer, the devices. Sizes of the batch,
    the schedule of a placement, and the numbers of an optimizer (its learning rate) do not count.
    """

    facts: tuple[tuple[str, str], ...]
    layout: StateLayout | None = field(compare=False, repr=False)
    optimizer: UpdatePlan | None = field(compare=False, repr=False)

    def differences(self, other: "Origin") -> str:
        """Says in which facts this origin differs from that of a state."""
        theirs = dict(other.facts)
        return "; ".join(
            f"{name}: the state's is {theirs.get(name)}, this step's is {text}"
            for name, text in self.facts
            if theirs.get(name) != text
        )

    def __copy__(self) -> "Origin":
        return self

    def __deepcopy__(self, memo: Any) -> "Origin":
        return self

    def __reduce__(self) -> Any:
        """The facts alone travel: a layout is of devices of this process."""
        return Origin, (self.facts, None, None)


def origin_of(loss: PipelinedLoss, update: UpdatePlan) -> Origin:
    """Returns the origin of the states of a step."""
    leaves = _digest(map(str, (*update.state_names, *update.state_avals, *update.state_layouts)))
    facts = (
        ("model", _model(loss)),
        ("plan", _plan(loss)),
        ("optimizer", f"{optimizer_text(update)}, {len(update.state_avals)} leaves ({leaves})"),
        ("devices", _devices(loss)),
        ("shardings", _shardings(loss)),
    )
    return Origin(facts, loss.layout, update)


def _model(loss: PipelinedLoss) -> str:
    traced = loss.staged.traced
    leaves = [
        f"{name} {aval.dtype}{list(aval.shape)}"
        for part in (traced.params, traced.state)
        for name, aval in zip(part.names, part.avals, strict=True)
    ]
    count = f"{len(traced.params)} leaves of parameters"
    if len(traced.state):
        count += f" and {len(traced.state)} of state"
    return f"{count} ({_digest(leaves)}), operations {_digest(_wiring(traced.flat))}"


def _plan(loss: PipelinedLoss) -> str:
    """Partition and placement, and how each leaf is divided and where it lies, which follows
    from them and the order of transfers."""
    units = [f"{unit.leaf} {unit.index}" for unit in loss.staged.units]
    kinds = [f"{leaf.kind} {leaf.stage}" for leaf in loss.staged.state]
    copies = [f"{t.target} {list(t.parts)}" for t in loss.lowered.step.transfers if t.kind == "P"]
    lies = _digest([*units, *kinds, str(loss.owners), *copies])
    return f"partition {loss.plan.partition} on ranks {loss.plan.placement} (leaves {lies})"


def _devices(loss: PipelinedLoss) -> str:
    ranks = [[f"{d.platform}:{d.id}" for d in rank.devices] for rank in loss.mesh.ranks]
    return " ".join("+".join(rank) for rank in ranks)


def _shardings(loss: PipelinedLoss) -> str:
    specs = loss.param_specs
    spread = sum(any(spec) for spec in specs.stored)
    return f"{spread} leaves spread ({_digest(map(str, (*specs.stored, *specs.gradients)))})"


def optimizer_text(update: UpdatePlan) -> str:
    """Names an optimizer by the records in its state and the operations of its update."""
    records = dict.fromkeys(re.findall(r"namedtuple\[(\w+)\]", str(update.state_tree)))
    return f"{', '.join(records) or 'without records'} (operations {_digest(update.operations)})"


def _wiring(jaxpr: Any) -> Iterator[str]:
    """Operations and how they are wired, without sizes, literals and options: the same for
    every size of batch."""
    jaxpr = compat.split_consts(jaxpr)[0]
    numbers: dict[Any, str] = {}

    def bind(variables: Iterable[Any]) -> None:
        for v in variables:
            numbers[v] = str(len(numbers))

    def read(atoms: Iterable[Any]) -> Iterator[str]:
        yield from ("literal" if isinstance(x, Literal) else numbers[x] for x in atoms)

    bind((*jaxpr.constvars, *jaxpr.invars))
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        yield from read(eqn.invars)
        for inner in sub_jaxprs(eqn):
            yield from _wiring(inner)
        bind(eqn.outvars)
    yield "outputs"
    yield from read(jaxpr.outvars)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:8]
