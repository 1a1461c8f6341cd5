"""Nested calls replaced by their equations."""

from collections.abc import Collection, Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from octojax.compat import JIT_NAMES, Atom
from octojax.jaxprs.flat import Builder, FlatJaxpr, rewrite


def body_of(eqn: JaxprEqn) -> Any:
    """The one jaxpr that a call equation (jit, remat, custom_jvp, ...) runs, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
            return body
    return None


def inline_call(
    builder: Builder, eqn: JaxprEqn, args: Sequence[Atom], names: Collection[str] = JIT_NAMES
) -> list[Atom]:
    """Appends the body of a call, and of every call by one of `names` in it."""
    return call_inlined(builder, body_of(eqn), args, names)


def call_inlined(
    builder: Builder, body: Any, args: Sequence[Atom], names: Collection[str] = JIT_NAMES
) -> list[Atom]:
    """Appends a jaxpr with the calls by `names` in it written out; returns its outputs."""

    def emit(inner: JaxprEqn, env: dict[Any, Atom]) -> None:
        if inner.primitive.name not in names or body_of(inner) is None:
            return builder.emit(inner, env)
        inputs = [x if hasattr(x, "val") else env[x] for x in inner.invars]
        outputs = builder.call(body_of(inner), inputs, emit)
        env.update(zip(inner.outvars, outputs, strict=True))
        return None

    return builder.call(body, args, emit)


def inline_jits(flat: FlatJaxpr, names: Collection[str] = JIT_NAMES) -> FlatJaxpr:
    """The jaxpr without nested `jit` at its top level. Other calls stay whole.

    c = jit[f] a b          x = mul a b
    d = tanh c      becomes c = add x b
                            d = tanh c
    """

    def rule(builder: Builder, eqn: JaxprEqn, args: list[Atom]) -> Sequence[Atom] | None:
        if eqn.primitive.name not in names or body_of(eqn) is None:
            return None
        return inline_call(builder, eqn, args, names)

    return rewrite(flat, rule)
