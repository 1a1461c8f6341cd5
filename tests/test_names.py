"""Names say what a thing is: no module binds a participle such as `found` or `held`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import octojax

ROOT = Path(octojax.__file__).parent
PARTICIPLES = {"found", "made", "held", "given"}


def bound_names(source: str) -> Iterator[tuple[str, int]]:
    """Yields every name that a module binds, at any depth, without underscores, and its line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(getattr(node, "ctx", None), ast.Load):
            continue
        for field in ("name", "arg", "id", "attr", "asname"):  # of what defines, takes or stores
            name = getattr(node, field, None)
            if isinstance(name, str) and not isinstance(node, ast.keyword):
                yield name.strip("_"), getattr(node, "lineno", 0)


MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


@pytest.mark.parametrize("folder", sorted({path.parts[0] for path in MODULES}))
def test_no_module_binds_a_participle(folder: str) -> None:
    faults = [
        f"{path}:{line} {name}"
        for path in MODULES
        if path.parts[0] == folder
        for name, line in bound_names((ROOT / path).read_text(encoding="utf-8"))
        if name in PARTICIPLES
    ]
    assert not faults, "name what it is (layers, outputs, parameters, options)"


def test_every_kind_of_binding_is_seen() -> None:
    source = """
import a as found
def made(held, *given, **left): self.found = 1
class held: given: int = 0
for made in x: pass
lambda given: 0
match x:
    case [*found]: pass
try: pass
except E as made: pass
with y as _held: pass
"""
    names = [name for name, _ in bound_names(source) if name in PARTICIPLES]
    assert names.count("found") == 3
    assert names.count("made") == 3
    assert names.count("held") == 3
    assert names.count("given") == 3
