"""What the tuner's studies share: profiles, the published reference figures, files."""

import csv
import json
from collections.abc import Iterable
from pathlib import Path

from octojax.ir import Profile

HERE = Path(__file__).parent
RESULTS = HERE.parent / "docs" / "results"
DATA = RESULTS / "tuner"

CONFIGURATIONS = tuple(
    f"{model}-{size}" for size in "sml" for model in ("nemotron-h", "jamba", "llama")
)

ATOMIC = {
    "calibrated": {
        "nemotron-h-s": 1.46, "nemotron-h-m": 1.63, "nemotron-h-l": 1.86,
        "jamba-s": 1.40, "jamba-m": 1.56, "jamba-l": 1.78,
        "llama-s": 1.41, "llama-m": 1.58, "llama-l": 1.86,
    },
    "roofline": {
        "nemotron-h-s": 1.45, "nemotron-h-m": 1.68, "nemotron-h-l": 2.07,
        "jamba-s": 1.36, "jamba-m": 1.53, "jamba-l": 1.78,
        "llama-s": 1.34, "llama-m": 1.54, "llama-l": 1.88,
    },
}  # fmt: skip
"""Speedup over split 1F1B of the best whole-layer balance, without any fill or drain."""

PAPER = {
    "nemotron-h-s": 1.26, "nemotron-h-m": 1.36, "nemotron-h-l": 1.44,
    "jamba-s": 1.33, "jamba-m": 1.33, "jamba-l": 1.33,
    "llama-s": 1.17, "llama-m": 1.17, "llama-l": 1.17,
}  # fmt: skip
"""OctoPipe's own measured speedup over 1F1B (the top of the range it states)."""

WANTED = {"s": 0.985, "m": 0.97, "l": 0.95}
"""Shares of `ATOMIC` that this project asks of itself."""


def load(name: str, costs: str = "calibrated") -> Profile:
    """Returns one of the profiles beside this file."""
    return Profile.load(HERE / "profiles" / f"{name}.{costs}.json")


def write_rows(name: str, rows: Iterable[dict]) -> Path:
    """Writes `docs/results/tuner/NAME.csv` and returns its path."""
    rows = list(rows)
    DATA.mkdir(parents=True, exist_ok=True)
    path = DATA / f"{name}.csv"
    with path.open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read_rows(name: str) -> list[dict[str, str]]:
    """Returns the rows of `docs/results/tuner/NAME.csv`, none if it is not there."""
    path = DATA / f"{name}.csv"
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_json(name: str, data: object) -> None:
    DATA.mkdir(parents=True, exist_ok=True)
    (DATA / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
