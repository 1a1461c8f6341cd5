"""Returns a name for what a program computes, equal for equal stages, so each compiles once.

Names of variables and indices of ends do not count: layer 3's and layer 7's programs are one
program if their layers have the same structure, shapes, types and literals.
"""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from octojax.stages.program import Program


def fingerprint(program: Program) -> str:
    """Returns the same 32 hexadecimal digits for programs that compute the same.

    Kind and the roles of the ends count, their indices do not. The value is the same in every
    process, except for callbacks that capture objects without a printable value.
    """
    parts = [program.kind.value]
    parts += [ref.role.value for ref in (*program.reads, *program.writes)]
    digest = hashlib.sha256()
    for part in (*parts, *_jaxpr(program.jaxpr)):
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:32]


def digest(closed: ClosedJaxpr) -> str:
    """Returns the same 32 hexadecimal digits for jaxprs that compute the same, in this process."""
    return hashlib.sha256("\0".join(_jaxpr(closed)).encode()).hexdigest()[:32]


def portable(closed: ClosedJaxpr) -> str:
    """Returns the same 16 digits in every process for a jaxpr that computes the same.

    Addresses of objects are left out, which tells fewer programs apart than `fingerprint`.
    """
    text = "\0".join(_jaxpr(closed))
    return hashlib.sha256(_ADDRESS.sub("", text).encode()).hexdigest()[:16]


_ADDRESS = re.compile(r"0x[0-9a-f]+")


def _jaxpr(closed: ClosedJaxpr | Jaxpr) -> Iterator[str]:
    jaxpr = getattr(closed, "jaxpr", closed)
    numbers: dict[Var, int] = {}

    def bind(variables: Iterable[Var]) -> Iterator[str]:
        for v in variables:
            numbers[v] = len(numbers)
            yield _aval(v.aval)

    def read(atom) -> str:
        return (
            _value(atom.val) + _aval(atom.aval) if isinstance(atom, Literal) else str(numbers[atom])
        )

    yield "jaxpr"
    yield from bind(jaxpr.constvars)
    yield from map(_value, getattr(closed, "consts", ()))
    yield from bind(jaxpr.invars)
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        yield from map(read, eqn.invars)
        yield from _params(eqn.params)
        yield from bind(eqn.outvars)
    yield "outputs"
    yield from map(read, jaxpr.outvars)


def _aval(aval) -> str:
    sharding = getattr(aval, "sharding", None)
    weak = getattr(aval, "weak_type", False)
    return f"{aval.str_short()}{'*' if weak else ''}{getattr(sharding, 'spec', '')}"


def _params(params: Mapping) -> Iterator[str]:
    for key in sorted(params):
        yield key
        yield from _param(params[key])


def _param(value) -> Iterator[str]:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        yield from _jaxpr(value)
    elif isinstance(value, tuple | list) and type(value) in (tuple, list):
        yield f"({len(value)}"
        for item in value:
            yield from _param(item)
    elif isinstance(value, Mapping):
        yield from _params({str(k): v for k, v in value.items()})
    elif isinstance(value, functools.partial):
        yield from _param((value.func, value.args, value.keywords))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield type(value).__qualname__
        for field in dataclasses.fields(value):
            yield from _param(getattr(value, field.name))
    elif callable(value) and hasattr(value, "__code__"):
        yield from _function(value)
    else:
        yield _value(value)


def _function(function: Callable) -> Iterator[str]:
    """Returns what a function counts by: its code and the values that it captured."""
    yield f"{function.__module__}.{function.__qualname__}"
    yield from _code(function.__code__)
    yield from _param(getattr(function, "__self__", None))
    for cell in function.__closure__ or ():
        yield from _param(cell.cell_contents)
    yield from _param(function.__defaults__ or ())


def _code(code: CodeType) -> Iterator[str]:
    """What a function does, the functions within it and the globals that it names included."""
    yield hashlib.sha256(code.co_code).hexdigest()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):  # in no order that two processes share
            yield repr(sorted(map(repr, constant)))
        else:
            yield repr(constant)


def _value(value) -> str:
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        data = np.asarray(value)
        return f"{data.dtype}{data.shape}{hashlib.sha256(data.tobytes()).hexdigest()}"
    return f"{type(value).__qualname__}:{value!r}"
