"""One configuration, all methods: the row of most of the paper's tables."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from octojax.ir import Profile
from octojax.tune import TuneResult
from paper_pieces.ceiling import ceiling
from paper_pieces.cells import SPEEDUP, TGS, Cell, rounded
from paper_pieces.methods import METHODS, Method, baselines, tokens_per_gpu_s
from paper_pieces.study import Study, load_average


@dataclass(frozen=True)
class Comparison:
    """The baselines and the tuned plan on one profile, by the paper's names."""

    profile: Profile
    baselines: Mapping[str, Method]
    tuned: TuneResult

    @property
    def base_s(self) -> float:
        """The step of split 1F1B, over which all speedups are."""
        return self.baselines["1F1B"].makespan_s

    def makespans(self) -> dict[str, float]:
        """Returns the step of every method, in the paper's order."""
        found = {name: method.makespan_s for name, method in self.baselines.items()}
        found["OctoPipe"] = self.tuned.makespan_s
        return {name: found[name] for name in METHODS if name in found}


def compare(study: Study, profile: Profile, size: str) -> Comparison:
    """Returns all methods on the profile; the tuned plan after the size's search."""
    quick = study.settings.quick
    key = ("baselines", profile.name, profile.fingerprint, profile.ranks, profile.microbatches)
    with study.job(f"baselines of {profile.name}", 1.0):
        published = study.once(key, lambda: baselines(profile, quick=quick))
    tuned = study.tuned(profile, size, replicated=False)
    return Comparison(profile, published, tuned)


def speedup_cells(
    case: str,
    found: Comparison,
    paper: Mapping[str, str],
    *,
    step_s: Callable[[str], float] | None = None,
) -> list[Cell]:
    """Returns a cell per method: its speedup over 1F1B beside `paper[method]`.

    `step_s(method)` is its step where that is more than the makespan of one pipeline.
    """
    seconds = {name: step_s(name) if step_s else s for name, s in found.makespans().items()}
    base = seconds["1F1B"]
    load, searched_s = load_average(), rounded(found.tuned.seconds, 3)
    top = ceiling(found.profile, base)
    return [
        Cell(
            case, name, SPEEDUP, "simulated",
            ours=rounded(base / s),
            paper=paper.get(name, ""),
            ceiling=rounded(top),
            bound=rounded(base / found.tuned.lower_bound_s),
            aim="more",
            makespan_ms=rounded(s * 1e3, 7),
            search_s=searched_s if name == "OctoPipe" else None,
            load_average=load,
        )
        for name, s in seconds.items()
    ]  # fmt: skip


def tgs_cells(case: str, found: Comparison, paper: Mapping[str, str]) -> list[Cell]:
    """Returns a cell per method: its tokens per GPU and second beside `paper[method]`.

    Only OctoPipe's is judged: those of the others follow from the profile's scale.
    """
    load, searched_s = load_average(), rounded(found.tuned.seconds, 3)
    top = found.base_s / ceiling(found.profile, found.base_s)
    return [
        Cell(
            case, name, TGS, "simulated",
            ours=rounded(tokens_per_gpu_s(found.profile, s)),
            paper=paper.get(name, ""),
            ceiling=rounded(tokens_per_gpu_s(found.profile, top)),
            bound=rounded(tokens_per_gpu_s(found.profile, found.tuned.lower_bound_s)),
            aim="more" if name == "OctoPipe" else "none",
            makespan_ms=rounded(s * 1e3, 7),
            search_s=searched_s if name == "OctoPipe" else None,
            load_average=load,
        )
        for name, s in found.makespans().items()
    ]  # fmt: skip
