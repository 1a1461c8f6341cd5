"""An explanation in words and numbers."""

import textwrap
from collections.abc import Iterator

from octojax.diagnosis.changes import Change
from octojax.diagnosis.explanation import Explanation
from octojax.report.panel import nbytes, seconds

MOST_RANKS, MOST_BINDING, MOST_CHANGES = 16, 4, 12
WIDTH = 96
LEAST = 5e-4
"""Share of the step below which a saving is not worth a line of its own."""
_PER_SORT = {"layer": 2, "kind": 2, "rank": 2}
_ALL_OF = {
    "layer": "any other layer 10% quicker",
    "kind": "the layers of any kind 10% quicker",
    "rank": "any rank 10% quicker",
}


def words(explanation: Explanation) -> str:
    """Returns the explanation as lines of text."""
    parts = (_heading, _parts, _ranks, _chain, _bound, _changes)
    return "\n\n".join("\n".join(_wrapped(part(explanation))) for part in parts)


def _wrapped(lines: list[str]) -> Iterator[str]:
    """Returns the lines, long ones broken, what follows a little further in."""
    for text in lines:
        start = len(text) - len(text.lstrip())
        yield from textwrap.wrap(
            text, WIDTH, subsequent_indent=" " * (start + 8), break_long_words=False
        )


def _time(explanation: Explanation, value: float) -> str:
    return seconds(value) if explanation.unit == "s" else f"{value:.4g}"


def _share(explanation: Explanation, value: float) -> str:
    return f"{value / (explanation.makespan_s or 1.0):.1%}"


def _heading(explanation: Explanation) -> list[str]:
    plan = explanation.plan
    unit = "" if explanation.unit == "s" else " units"
    return [
        f"{explanation.name}, simulated with {explanation.source}: "
        f"{_time(explanation, explanation.makespan_s)}{unit} a step",
        f"{plan.num_ranks} ranks, {plan.num_stages} stages, {plan.num_microbatches} microbatches",
    ]


def _parts(explanation: Explanation) -> list[str]:
    rows = [
        (x.name, _time(explanation, x.seconds), _share(explanation, x.seconds), x.where)
        for x in explanation.parts
    ]
    return [
        "Where the step goes (as the busiest rank has it; the parts add up)",
        *(f"  {name:<24}{time:>10} {share:>7}  {where}" for name, time, share, where in rows),
    ]


def _ranks(explanation: Explanation) -> list[str]:
    names = ("rank", "busy", "fill", "drain", "computation", "transfers", "less work", "memory")
    rows: list[tuple[str, ...]] = [names]
    for a in explanation.ranks[:MOST_RANKS]:
        capacity = explanation.profile.machine.capacity(a.rank)
        room = f" of {nbytes(capacity)}" if capacity < float("inf") else ""
        times = (a.busy_s, a.fill_s, a.drain_s, a.computation_wait_s, a.transfer_wait_s)
        rows.append(
            (
                str(a.rank),
                *(_time(explanation, t) for t in (*times, a.imbalance_s)),
                f"{nbytes(a.peak_bytes)}{room}" if a.peak_bytes else "-",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    lines = ["  ".join(x.rjust(w) for x, w in zip(row, widths, strict=True)) for row in rows]
    rest = len(explanation.ranks) - MOST_RANKS
    return [
        "Rank by rank (busy, then what it waits for; less work: than the busiest rank)",
        *(f"  {x}" for x in lines),
        *([f"  and {rest} more"] if rest > 0 else []),
    ]


def _chain(explanation: Explanation) -> list[str]:
    transfer_s = sum(x.seconds for x in explanation.chain_links)
    lines = [
        "What binds: the longest chain of actions, "
        f"{_share(explanation, explanation.makespan_s - transfer_s)} computation and "
        f"{_share(explanation, transfer_s)} transfers"
    ]
    for what, entries in (
        ("ranks", explanation.chain_ranks),
        ("stages", explanation.chain_stages),
        ("links", explanation.chain_links),
    ):
        listed = [
            f"{x.what} {_share(explanation, x.seconds)}"
            for x in entries[:MOST_BINDING]
            if x.seconds > 0
        ]
        rest = sum(x.seconds > 0 for x in entries) - len(listed)
        more = f"; {rest} more" if rest > 0 else ""
        if listed:
            lines.append(f"  {what:<7}{'; '.join(listed)}{more}")
    for wait in explanation.waits[:MOST_BINDING]:
        how = "to compute" if wait.cause == "computation" else "for transfers"
        if wait.cause == "host" or wait.seconds <= LEAST * explanation.makespan_s:
            continue
        lines.append(
            f"  rank {wait.rank} waits {_time(explanation, wait.seconds)} for rank {wait.peer} "
            f"{how}, the longest for {wait.on}"
        )
    return lines


def _bound(explanation: Explanation) -> list[str]:
    if explanation.bound is None:
        return ["No lower bound: it needs a profile of the layers, each of which costs something"]
    bound = explanation.bound
    room_s = explanation.makespan_s - bound.seconds
    room = (
        f"this one takes {bound.gap:.2%} longer, so another plan can save at most "
        f"{_time(explanation, room_s)}; more needs other layers or another machine"
        if bound.gap > 1e-6
        else "this one takes no longer: a shorter step needs other layers or another machine"
    )
    return [
        f"The bound: no plan of these layers on {explanation.plan.num_ranks} ranks takes less than "
        f"{_time(explanation, bound.seconds)} ({bound.binding})",
        f"  {room}",
    ]


def _changes(explanation: Explanation) -> list[str]:
    heaviest = max(
        range(explanation.profile.num_layers), key=lambda i: explanation.profile.layers[i].compute_s
    )
    worth, without = selected(explanation.changes, heaviest)
    lines = ["What would save time (each simulated; figures are differences of two simulations)"]
    for change in worth:
        lines.append(
            f"  {_time(explanation, change.saved_s):>10} {change.saved_share:>6.1%}  "
            f"{change.what}{_method(change)}"
        )
    if not worth:
        lines.append("  nothing of what was tried")
    lines += [f"  nothing saved by {what}" for what in without]
    if not explanation.searched_s:
        lines.append("  one more rank, and other plans: with --seconds, which searches for them")
    return lines


def _method(change: Change) -> str:
    if change.method == "same plan" or change.sort == "order":
        return ""
    most = ""
    if change.bound_s is not None:
        most = f"; the best plan saves at most {1 - change.bound_s / change.base_s:.1%}"
    return f" [{change.method}{most}]"


def _no_better(change: Change, changes: tuple[Change, ...]) -> bool:
    """Whether more memory saves no more than the same effort does without it."""
    return change.sort == "memory" and any(
        c.sort in ("order", "search")
        and c.method == change.method
        and change.saved_share - c.saved_share < LEAST
        for c in changes
    )


def selected(changes: tuple[Change, ...], heaviest: int) -> tuple[list[Change], list[str]]:
    """Returns the changes worth a line, few of each sort, and in words those that save nothing.

    The heaviest layer is named in any case.
    """
    worth: list[Change] = []
    counts: dict[str, int] = {}
    useless: list[str] = []
    for change in changes:
        always = change.sort == "layer" and dict(change.edit)["layers"] == [heaviest]
        rare = change.sort not in _PER_SORT
        room = counts.get(change.sort, 0) < _PER_SORT.get(change.sort, 0)
        if change.saved_share < LEAST or _no_better(change, changes):
            useless += [change.what] if always or rare else []
        elif always or (len(worth) < MOST_CHANGES and (rare or room)):
            counts[change.sort] = counts.get(change.sort, 0) + (not always)
            worth.append(change)
    for sort, what in _ALL_OF.items():
        if not counts.get(sort) and any(c.sort == sort for c in changes):
            useless.append(what)
    return worth, useless
