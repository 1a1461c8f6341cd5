"""The table of optimizers: nothing of optax is missing, and its lines are what the script says."""

import optax
import optax.contrib
import pytest

from docs.make_optimizers import CONTRIB, OPTAX, PAGE, RULES, optimizers_of, rows

TABLES = {"optax": OPTAX, "optax.contrib": CONTRIB, "rules": RULES}


def stored_cells(name: str) -> list[str]:
    """The words before the reasons, which depend on the version of optax."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    (line,) = [x for x in lines if x.startswith((f"| `{name}` |", f"| {name} |"))]
    return [cell.split(":")[0].strip() for cell in line.strip("|").split("|")[1:4]]


@pytest.mark.parametrize("module", [optax, optax.contrib])
def test_every_optimizer_of_optax_is_in_the_table(module: object) -> None:
    table = TABLES[module.__name__]  # type: ignore[attr-defined]
    missing = set(optimizers_of(module)) - set(table)  # type: ignore[arg-type]
    assert not missing, "add them to docs/make_optimizers.py and run it"
    assert len(optimizers_of(module)) > 25  # type: ignore[arg-type]
    for name in table:
        stored_cells(name)


def test_no_optimizer_of_the_table_differs_from_plain_optax() -> None:
    for table in TABLES.values():
        for name in table:
            assert set(stored_cells(name)) <= {"exact", "rows", "gathers", "refused"}, name


@pytest.mark.parametrize(
    ("table", "name"),
    [
        pytest.param("optax", "sgd", marks=pytest.mark.slow),
        ("optax", "lookahead"),
        ("rules", "sorted along layers"),
    ],
)
def test_lines_are_what_the_script_writes(table: str, name: str) -> None:
    line = list(rows(TABLES[table], [name]))[-1]
    cells = [cell.split(":")[0].strip() for cell in line.strip("|").split("|")[1:4]]
    assert cells == stored_cells(name)
