"""Every primitive that the code knows by name exists in the JAX at hand: CI runs both ends.

A name that JAX never had, or has no more, is a rule that never fires, and nothing else tells.
"""

import ast
import importlib
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import jax
import jax.experimental.pallas
import pytest
from jax.extend.core import Primitive

import octojax

ROOT = Path(octojax.__file__).parent
ELSEWHERE = {"triton_kernel_call"}
"""Of packages that the tests do not have: jax-triton."""
ONE_END = {
    "closed_call": (0, 10),  # not in 0.12
    "one_minus_square": (0, 12),  # tanh's derivative; not in 0.10
}
"""Primitives of one supported version, and the version in which they must be."""


def primitives() -> set[str]:
    modules = [
        m for name, m in list(sys.modules.items()) if name.split(".")[0] in ("jax", "octojax")
    ]
    return {
        value.name
        for m in modules
        for value in list(vars(m).values())
        if isinstance(value, Primitive)
    }


def is_name(node: ast.AST, variables: set[str]) -> bool:
    """Whether an expression is a primitive's name: read off an equation, or a variable of it."""
    if isinstance(node, ast.Name):
        return node.id in variables
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "name"
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "primitive"
    )


def compared(tree: ast.Module) -> list[ast.AST]:
    """Returns what primitives' names are compared with, or looked up in."""
    variables = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.NamedExpr)) and is_name(node.value, set())
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    others: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.comparators) == 1:
            left, right = node.left, node.comparators[0]
            part = isinstance(node.ops[0], (ast.In, ast.NotIn)) and is_name(right, variables)
            if is_name(left, variables):
                others.append(right)
            elif is_name(right, variables) and not part:  # `"callback" in name` is a part of it
                others.append(left)
        elif isinstance(node, ast.Subscript) and is_name(node.slice, variables):
            others.append(node.value)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "get"
            and node.args
            and is_name(node.args[0], variables)
        ):
            others.append(node.func.value)
    return others


def strings(value: object) -> set[str]:
    if isinstance(value, str):
        return {value}
    if isinstance(value, (set, frozenset, tuple, list, dict)):
        return {x for x in value if isinstance(x, str)}
    return set()


def tables(module: ModuleType, known: set[str]) -> set[str]:
    """Returns the entries of a module's constants most of whose entries are primitives."""
    found: set[str] = set()
    for value in vars(module).values():
        words = strings(value) if not isinstance(value, str) else set()
        if len(words & known) > max(2, len(words) / 2):
            found |= words
    return found


def names_by_module(known: set[str]) -> dict[str, set[str]]:
    names: dict[str, set[str]] = defaultdict(set)
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "primitive" not in text:
            continue
        path = ".".join(("octojax", *file.relative_to(ROOT).with_suffix("").parts))
        module = importlib.import_module(path)
        for other in compared(ast.parse(text)):
            for node in ast.walk(other):
                if isinstance(node, ast.Constant):
                    names[path] |= strings(node.value)
                elif isinstance(node, ast.Name):
                    names[path] |= strings(getattr(module, node.id, None))
        names[path] |= tables(module, known)
    return names


def test_every_primitive_known_by_name_exists():
    known = primitives()
    for name in ("dot_general", "scan", "remat2", "scatter-add", "custom_vjp_call"):
        assert name in known, name
    version = tuple(map(int, jax.__version__.split(".")[:2]))
    absent = ELSEWHERE | {name for name, home in ONE_END.items() if home != version}
    names = names_by_module(known)
    assert len(set().union(*names.values())) > 120
    missing = {
        path: sorted(words - known - absent)
        for path, words in names.items()
        if words - known - absent
    }
    assert not missing, f"JAX {jax.__version__} has no primitives of these names: {missing}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = eqn.primitive.name in ('sin', 'cosine')", {"sin", "cosine"}),
        ("name = eqn.primitive.name\nif name == 'sine': pass", {"sine"}),
        ("if 'call' in eqn.primitive.name: pass", set()),
    ],
)
def test_comparisons_are_seen(text, expected):
    seen = {
        node.value
        for other in compared(ast.parse(text))
        for node in ast.walk(other)
        if isinstance(node, ast.Constant)
    }
    assert seen == expected
