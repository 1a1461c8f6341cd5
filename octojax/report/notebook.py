"""Small pictures of records, as a notebook shows them."""

from dataclasses import replace
from typing import Any

from octojax.errors import OctoPipeError
from octojax.ir import (
    Action,
    ActionSpan,
    Kind,
    Machine,
    Plan,
    Profile,
    RankSummary,
    Schedule,
    Timeline,
)
from octojax.report import svg
from octojax.report.panel import Panel, seconds
from octojax.simulate import StageCosts, simulate

MOST_ACTIONS = 100_000
"""That are simulated for a picture that nobody asked for by name."""


def html(record: Any) -> str | None:
    """Returns an SVG of a timeline, schedule, plan or profile; None where it cannot be drawn.

    Schedules and plans are drawn with unit costs, a profile as one microbatch on one rank. A
    notebook falls back to the record's one line.
    """
    if isinstance(record, Timeline):
        panel = Panel("timeline", record)
    elif isinstance(record, Profile):
        panel = Panel(f"{record.name}, its layers one after the other", _in_a_row(record))
    elif isinstance(record, (Plan, Schedule)):
        schedule = record.schedule if isinstance(record, Plan) else record
        if sum(map(len, schedule.ranks)) > MOST_ACTIONS or not record.num_microbatches:
            return None
        try:
            timeline = simulate(record, StageCosts.unit(record.num_stages, 1, 1, 1, 2), Machine())
        except OctoPipeError:  # an unfinished table can be looked at as text
            return None
        name, prediction = (
            (record.name or "plan", record.prediction)
            if isinstance(record, Plan)
            else ("schedule", None)
        )
        note = (
            f"under profile {prediction.profile} it takes {seconds(prediction.makespan_s)}"
            if prediction
            else ""
        )
        title = f"{name}, F = I = W = 1, B = 2"
        panel = Panel(title, replace(timeline, unit="units"), note=note)
    else:
        raise TypeError(f"no picture of a {type(record).__name__}")
    return svg.render([panel], svg.Layout(plot=680.0, row=22.0))


def _in_a_row(profile: Profile) -> Timeline:
    """Every layer's F, I and W (its B where that is not I + W), one after the other."""
    spans, at = [], 0.0
    for number, layer in enumerate(profile.layers):
        costs = [(Kind.FORWARD, layer.forward_s)]
        if layer.backward_s is None:
            costs += [
                (Kind.INPUT_GRAD, layer.input_grad_s),
                (Kind.WEIGHT_GRAD, layer.weight_grad_s),
            ]
        else:
            costs.append((Kind.BACKWARD, layer.backward_s))
        for kind, cost in costs:
            spans.append(ActionSpan(0, Action(number, kind, 0), at, at + cost))
            at += cost
    return Timeline(at, tuple(spans), (), (RankSummary(at, 0.0, 0.0, 0.0, 1, 0.0),))
