"""Hypothesis strategies: valid tables of any shape, costs and machines to go with them."""

import numpy as np
from hypothesis import strategies as st

from octojax.ir import Action, Kind, Machine, Overlap, Schedule
from octojax.simulate import StageCosts

SETTINGS = {"deadline": None, "max_examples": 50}


@st.composite
def tables(draw, max_ranks=4, max_stages=7, max_microbatches=5, recompute=False, pairs=True):
    """A valid schedule, made by running ready actions in an arbitrary order.

    Stages lie anywhere, some on two ranks, which then share the microbatches; some microbatches
    have a fused and some a split backward; ready forwards and backwards are sometimes paired.
    """
    ranks = draw(st.integers(1, max_ranks))
    stages = draw(st.integers(1, max_stages))
    microbatches = draw(st.integers(1, max_microbatches))
    random = draw(st.randoms(use_true_random=False))
    homes = [
        random.sample(range(ranks), min(ranks, random.choice((1, 1, 1, 2)))) for _ in range(stages)
    ]
    owner = {(s, m): random.choice(homes[s]) for s in range(stages) for m in range(microbatches)}
    split = {cell: random.random() < 0.6 for cell in owner}
    again = {cell: recompute and random.random() < 0.5 for cell in owner}
    rows: list[list] = [[] for _ in range(ranks)]
    done: set[Action] = set()
    todo = {Action(s, Kind.FORWARD, m) for s, m in owner}

    def back(stage: int, microbatch: int) -> Action:
        kind = Kind.INPUT_GRAD if split[stage, microbatch] else Kind.BACKWARD
        return Action(stage, kind, microbatch)

    def ready(action: Action) -> bool:
        stage, microbatch = action.stage, action.microbatch
        if action.kind is Kind.FORWARD:
            return stage == 0 or Action(stage - 1, Kind.FORWARD, microbatch) in done
        if action.kind is Kind.WEIGHT_GRAD or action.kind is Kind.RECOMPUTE:
            return True
        if again[stage, microbatch] and Action(stage, Kind.RECOMPUTE, microbatch) not in done:
            return False
        return stage == stages - 1 or back(stage + 1, microbatch) in done

    while todo:
        able = sorted(action for action in todo if ready(action))
        action = random.choice(able)
        home = owner[action.stage, action.microbatch]
        partners = [
            x for x in able if x.kind is Kind.BACKWARD and owner[x.stage, x.microbatch] == home
        ]
        run = [action]
        if pairs and action.kind is Kind.FORWARD and partners and random.random() < 0.5:
            run.append(random.choice(partners))
            rows[home].append(Overlap(*run))
        else:
            rows[home].append(action)
        for one in run:
            todo.remove(one)
            done.add(one)
            cell = (one.stage, one.microbatch)
            if one.kind is Kind.FORWARD:
                todo.add(back(*cell))
                if again[cell]:
                    todo.add(Action(one.stage, Kind.RECOMPUTE, one.microbatch))
            elif one.kind is Kind.INPUT_GRAD:
                todo.add(Action(one.stage, Kind.WEIGHT_GRAD, one.microbatch))
    return Schedule(tuple(map(tuple, rows)))


@st.composite
def stage_costs(draw, stages, recompute=False, ends=False):
    """Costs of any kind: some actions take no time, sizes are whole numbers of bytes; with `ends`
    ranks may be busy before and after their actions."""
    seconds = st.one_of(st.just(0.0), st.floats(1e-3, 10.0))
    sizes = st.integers(0, 1000)
    flags = [recompute and draw(st.booleans()) for _ in range(stages)]
    rows = [[draw(seconds) for _ in range(5)] for _ in range(stages)]
    for row in rows:
        row[4] = row[0]  # R costs what F does
    nbytes = np.array([[draw(sizes) for _ in range(5)] for _ in range(stages)], dtype=np.float64)
    nbytes[0, 3] = 0
    nbytes[-1, 2] = 0
    nbytes[1:, 3] = nbytes[:-1, 2]
    ends_s = None
    if ends and draw(st.booleans()):
        ends_s = np.array([[draw(seconds), draw(seconds)] for _ in range(stages)])
    return StageCosts(np.array(rows), nbytes, np.array(flags, dtype=np.bool_), ends_s)


@st.composite
def machines(draw, ranks):
    """Links of one or two speeds, ranks of unequal speed, a host cost or none."""
    two_speeds = draw(st.booleans())
    positive = st.floats(1e-2, 10.0)
    return Machine(
        latency_s=draw(st.one_of(st.just(0.0), positive)),
        bandwidth_bytes_per_s=draw(st.one_of(st.just(float("inf")), st.floats(10.0, 1e4))),
        host_cost_s=draw(st.one_of(st.just(0.0), positive)),
        speeds=tuple(draw(st.floats(0.5, 2.0)) for _ in range(ranks))
        if draw(st.booleans())
        else (),
        overlap_discount=draw(st.sampled_from((0.0, 0.25, 0.9))),
        ranks_per_node=2 if two_speeds else None,
        inter_latency_s=draw(positive) if two_speeds else None,
        inter_bandwidth_bytes_per_s=draw(st.floats(10.0, 1e4)) if two_speeds else None,
    )
