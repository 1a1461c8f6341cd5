"""What each move and phase of the default search is worth: the search with and without it, for
the same number of evaluated candidates.

    python benchmarks/search_ablation.py --evaluations 16000 --seeds 3

A search stops after so many evaluations, not seconds, so that what else the machine does is no
part of the result. The figure is the mean of `log(makespan without / makespan with)` over cases
and seeds, in percent, with its standard error: above zero, the piece pays. Rows that are in the
output file already are not run again.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from octojax.ir import Profile
from octojax.tune import best
from octojax.tune.bound import lower_bound
from octojax.tune.candidate import Candidate
from octojax.tune.problem import Problem
from octojax.tune.search import PHASES, Limits, Search

ROOT = Path(__file__).parent.parent
PROFILES = ROOT / "experiments" / "profiles"
OUTPUT = ROOT / "docs" / "results" / "tuner" / "search_ablation.csv"
CASES = (
    ("jamba-s.calibrated", None),
    ("nemotron-h-s.roofline", None),
    ("jamba-m.calibrated", None),
    ("nemotron-h-m.calibrated", None),
)
"""Profiles, and GiB per rank where memory shall bind. LLaMA is left out: its starts are optimal."""
TIGHT = (("jamba-s.calibrated", 4.4), ("nemotron-h-s.calibrated", 0.8))
ALL = frozenset(PHASES)


def variants() -> Iterator[tuple[str, Callable[[ExitStack], None]]]:
    """Yields names and what each does to the search."""
    yield "all", lambda stack: None
    for name in best.CHANCES:
        yield f"without {name!r}", lambda stack, name=name: _chances(stack, {name: 0.0})
    yield "without the moves of partition", lambda stack: _phase(stack, 0)
    yield "without the moves of placement", lambda stack: _phase(stack, 1)
    yield "without the moves of schedule", lambda stack: _phase(stack, 2)
    yield "without races", lambda stack: _put(stack, "HEATS", best.HEATS[-1:])
    yield "without justification", lambda stack: _put(stack, "ROUNDS", 0)
    yield "without pieces dealt in turns", lambda stack: _put(stack, "starting_points", _none)
    yield "without plain starts", lambda stack: _put(stack, "fixed_points", _none)


def _put(stack: ExitStack, name: str, value: object) -> None:
    stack.enter_context(mock.patch.object(best, name, value))


def _none(*arguments: object, **options: object) -> list[Candidate]:
    return []


def _phase(stack: ExitStack, phase: int) -> None:
    _chances(
        stack, {m: 0.0 for m, p in zip(best.MOVES, best.PHASE_OF_MOVE, strict=True) if p == phase}
    )


def _chances(stack: ExitStack, changed: dict[str, float]) -> None:
    """Moves that `move_chances` adds where memory binds are taken out as well."""
    before = best.move_chances

    def chances(problem: Problem, phases: frozenset[str]):
        summed = before(problem, phases)
        single = [b - a for a, b in zip([0.0, *summed], summed, strict=False)]
        kept = [0.0 if m in changed else c for m, c in zip(best.MOVES, single, strict=True)]
        again = best.np.cumsum(kept) / sum(kept)
        again[-1] = 1.0
        return again

    stack.enter_context(mock.patch.object(best, "move_chances", chances))


def makespan_s(profile: Profile, capacity_gib: float | None, seed: int, evaluations: int) -> float:
    """Returns the makespan of the best plan after so many evaluations."""
    problem = Problem.of(profile, None, None, capacity_gib and capacity_gib * 2**30)
    box: list[Search] = []
    search = Search(
        problem,
        Limits(seconds=evaluations),
        lower_bound(problem),
        clock=lambda: float(box[0].evaluations) if box else 0.0,
    )
    box.append(search)
    best.search_best(search, ALL, best.starts_for(search, ALL, seed), seed)
    return search.makespan_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evaluations", type=int, default=16_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="variants whose names hold one of these texts")
    parser.add_argument("--cases", default="", help="cases whose names hold this text")
    parser.add_argument("--tight", action="store_true", help="cases in which memory binds")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    known = read(options.output)
    for seed in range(options.seeds):
        for case, capacity in TIGHT if options.tight else CASES:
            profile = Profile.load(PROFILES / f"{case}.json")
            label = case if capacity is None else f"{case} at {capacity:g} GiB"
            for name, change in variants():
                key = (name, label, seed, options.evaluations)
                texts = [name] if options.only is None else [*options.only, "all"]
                wanted = any(text in name for text in texts) and options.cases in case
                if key in known or not wanted:
                    continue
                with ExitStack() as stack:
                    change(stack)
                    known[key] = makespan_s(profile, capacity, seed, options.evaluations)
                with options.output.open("a", encoding="utf-8", newline="") as out:
                    csv.writer(out, lineterminator="\n").writerow([*key, known[key]])
    print(table(known))


def read(path: Path) -> dict[tuple[str, str, int, int], float]:
    """Returns the makespans in a file, by variant, case, seed and evaluations."""
    if not path.exists():
        path.write_text("variant,case,seed,evaluations,makespan_s\n", encoding="utf-8")
    with path.open(encoding="utf-8", newline="") as rows:
        return {
            (r["variant"], r["case"], int(r["seed"]), int(r["evaluations"])): float(r["makespan_s"])
            for r in csv.DictReader(rows)
        }


def table(known: dict[tuple[str, str, int, int], float]) -> str:
    """Returns the losses of every variant as a Markdown table."""
    lines = ["| variant | slower by | runs |", "|---|---|---|"]
    losses: dict[str, list[float]] = {}
    for (name, case, seed, evaluations), seconds in known.items():
        base = known.get(("all", case, seed, evaluations))
        if name != "all" and base is not None and math.isfinite(seconds):
            label = f"{name}, where memory binds" if " GiB" in case else name
            losses.setdefault(label, []).append(100 * math.log(seconds / base))
    for label, percents in losses.items():
        many = len(percents)
        error = statistics.stdev(percents) / math.sqrt(many) if many > 1 else math.nan
        lines.append(f"| {label} | {statistics.mean(percents):+.3f} ± {error:.3f} % | {many} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
