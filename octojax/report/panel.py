"""What every picture shows, whatever it is drawn on: titled timelines, colours, units."""

import math
from dataclasses import dataclass

from octojax.ir import (
    Action,
    ActionSpan,
    Kind,
    LoweredPlan,
    Overlap,
    Plan,
    Profile,
    Schedule,
    Timeline,
)


@dataclass(frozen=True)
class Panel:
    """One timeline in a picture. Several panels of a picture share one time axis.

    `title` names the timeline and the source of its times, `bound_s` is a proven lower bound of
    the makespan, if there is one, and `note` a sentence to stand under the heading. `layers`
    names what is in each stage and `capacities_bytes` what each rank's memory holds, where that is
    known.
    """

    title: str
    timeline: Timeline
    bound_s: float | None = None
    note: str = ""
    layers: tuple[str, ...] = ()
    capacities_bytes: tuple[float, ...] = ()

    def time(self, value: float) -> str:
        """Returns a time of this panel for people, in its timeline's unit."""
        return seconds(value) if self.timeline.unit == "s" else f"{value:.4g} {_UNIT_COST}"

    @property
    def heading(self) -> str:
        """The title, and what the whole step came to."""
        line = self.timeline
        parts = [self.time(line.makespan_s), f"bubbles {line.bubble_ratio:.1%}"]
        if self.bound_s:
            gap, bound = line.makespan_s / self.bound_s - 1, self.time(self.bound_s)
            parts.append(
                f"within {gap:.1%} of the lower bound {bound}"
                if gap > -1e-6
                else f"below {bound}, which is no lower bound of it"
            )
        if any(t.end_s > t.start_s for t in line.transfers):
            count = len(line.transfers)
            parts.append(f"{line.overlapped} of {count} transfers hidden")
        return f"{self.title}: " + ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of a rank's row in one colour."""

    rank: int
    action: Action
    start_s: float
    end_s: float
    shade: int  # counts the stages of its rank: a rank's second stage is drawn lighter

    @property
    def label(self) -> str:
        return str(self.action)


def stage_layers(
    plan: Schedule | Plan | LoweredPlan, profile: Profile | None = None
) -> tuple[str, ...]:
    """Returns what is in each stage of a plan: `layers 3-5: mamba, mlp, mamba`.

    Without a profile of the layers, their numbers alone; of a bare schedule nothing.
    """
    if isinstance(plan, Schedule):
        return ()
    kinds = profile.kinds if profile is not None and profile.of_partition is None else ()
    names = []
    for stage in range(plan.partition.num_stages):
        layers = plan.partition.layers(stage)
        where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]}-{layers[-1]}"
        names.append(f"{where}: {', '.join(kinds[i] for i in layers)}" if kinds else where)
    return tuple(names)


LIGHT = {"F": "#3a78c9", "B": "#d9661f", "I": "#6b1a55", "W": "#f0c94a", "R": "#a3abb3"}
DARK = {"F": "#4f8fe8", "B": "#d9661f", "I": "#8f3a7c", "W": "#f4d35e", "R": "#b4bac1"}
"""One colour per kind of action, for light and for dark surroundings; they differ in lightness
too, so that people who do not see red, green or blue tell them apart."""

LEGEND = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "R": "recompute",
}


def bars(timeline: Timeline) -> list[Bar]:
    """Returns the bars of all ranks; an overlapped pair becomes two, one after the other."""
    stages: list[list[int]] = [[] for _ in timeline.ranks]
    for span in timeline.actions:
        for action in _actions(span):
            if action.stage not in stages[span.rank]:
                stages[span.rank].append(action.stage)
    order = [{stage: i for i, stage in enumerate(sorted(numbers))} for numbers in stages]
    pieces = []
    for span in timeline.actions:
        actions = _actions(span)
        length = (span.end_s - span.start_s) / len(actions)
        for i, action in enumerate(actions):
            start = span.start_s + i * length
            end = span.end_s if i == len(actions) - 1 else start + length
            pieces.append(Bar(span.rank, action, start, end, order[span.rank][action.stage]))
    return pieces


def _actions(span: ActionSpan) -> tuple[Action, ...]:
    return span.item.actions if isinstance(span.item, Overlap) else (span.item,)


def account(panel: Panel) -> list[tuple[str, ...]]:
    """Returns per rank, as text: rank, busy, bubble and its share, at ends, between, peaks."""
    makespan = panel.timeline.makespan_s or 1.0

    def time(value: float) -> str:  # the heading says that it is units
        return panel.time(value).removesuffix(f" {_UNIT_COST}")

    return [
        (
            str(rank),
            time(r.busy_s),
            time(r.bubble_s),
            f"{r.bubble_s / makespan:.1%}",
            time(r.boundary_bubble_s),
            time(r.residual_bubble_s),
            str(r.peak_microbatches),
            nbytes(r.peak_bytes) if r.peak_bytes else "-",
        )
        for rank, r in enumerate(panel.timeline.ranks)
    ]


def kinds(panels: list[Panel]) -> list[str]:
    """Returns the kinds of action that appear, in the legend's order."""
    present = {bar.action.kind for panel in panels for bar in bars(panel.timeline)}
    return [kind for kind in LEGEND if Kind(kind) in present]


def extent_s(panels: list[Panel]) -> float:
    """Returns the length of the shared time axis.

    Raises `ValueError` for panels in different units, which have none.
    """
    if len({panel.timeline.unit for panel in panels}) > 1:
        names = "; ".join(f"{p.title!r} is in {_NAMES[p.timeline.unit]}" for p in panels)
        raise ValueError(
            f"these timelines have no common time axis: {names}. Give a profile, so that all are "
            f"in seconds"
        )
    return max((panel.timeline.makespan_s for panel in panels), default=0.0)


def mixed(colour: str, other: str, share: float) -> str:
    """Returns `colour` with `share` of `other` mixed in; both are `#rrggbb`."""
    pairs = [(int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def shaded(kind: str, shade: int, palette: dict[str, str], towards: str) -> str:
    """Returns the colour of a bar: its kind's, paler for each further stage of the rank."""
    return mixed(palette[kind], towards, min(0.16 * shade, 0.48))


def filled(kind: str, shade: int, odd: bool, palette: dict[str, str], towards: str) -> str:
    """Returns the colour of a bar: `shaded`, and darker for every other bar of a row."""
    colour = shaded(kind, shade, palette, towards)
    return mixed(colour, "#000000", 0.14) if odd else colour


def readable(background: str) -> str:
    """Returns black or white, whichever stands out more (WCAG's contrast) on a colour."""
    parts = [int(background[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "#ffffff" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 else "#000000"


_UNIT_COST = "units"
_NAMES = {"s": "seconds", _UNIT_COST: _UNIT_COST}
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def seconds(value: float) -> str:
    """Returns a time for people: four digits and a fitting unit."""
    factor, unit = _unit(value)
    return f"{value / factor:.4g} {unit}"


def nbytes(value: float) -> str:
    """Returns a size for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def _unit(value: float) -> tuple[float, str]:
    return next((u for u in _UNITS if abs(value) >= u[0]), _UNITS[-1] if value else _UNITS[0])


def ticks(end_s: float, most: int, unit: str = "s") -> list[tuple[float, str]]:
    """Returns `(time_s, label)` of at most `most` + 1 round marks from zero to `end_s`.

    Marks in units are bare numbers: the heading says what they are.
    """
    if not end_s > 0:
        return [(0.0, "0 s" if unit == "s" else "0")]
    rough = end_s / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
    factor, suffix = _unit(end_s) if unit == "s" else (1.0, "")
    count = math.floor(end_s / step * (1 + 1e-9))
    return [(i * step, f"{i * step / factor:.6g} {suffix}".rstrip()) for i in range(count + 1)]
