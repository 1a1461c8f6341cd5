"""The same step as a networkx graph: to look at, to find cycles in, to export.

A node is named by the text of its action, transfer or change of memory, so that any of
networkx's writers can store the graph. An edge's `delay_s` is the least time from the start of
one node to the start of the next; the longest path to the node `end` is the makespan.

    0F0 --3s--> 0SEND_F0 --0.1s--> 1F0      an action, its transfer, the action that takes it
    0F0 --3s--> 0F1                         a rank runs one item at a time, in order
    0SEND_F0 --0.1s--> 0SEND_F1             a link carries one value at a time, in order
    0F0 --0s--> 0F0+ (8 bytes)              allocated as 0F0 starts
    0I0 --3s--> 0I0- (-6 bytes)             freed as 0I0 ends
"""

import networkx as nx

from octojax.errors import ScheduleError
from octojax.ir import Item, Kind, Machine, Plan, Profile, Schedule
from octojax.ir.lowering import actions_of, makes, without_transfers
from octojax.simulate.costs import StageCosts
from octojax.simulate.oracle import Meaning
from octojax.simulate.simulator import costs_of

END = "end"


def build_dag(
    schedule: Schedule | Plan,
    costs: StageCosts | Profile,
    machine: Machine | None = None,
) -> nx.DiGraph:
    """Returns the graph of a step with asynchronous transfers; transfers spelled out are dropped.

    Nodes have `kind` ("gather", "action", "transfer", "memory", "end"), `rank` and `duration_s` or
    `bytes`. Edges have `delay_s` and `why` ("order", "data", "link", "memory", "end"). The
    table need not be valid: one that deadlocks gives a graph with a cycle.
    """
    if isinstance(costs, Profile):
        machine = costs.machine if machine is None else machine
        costs = costs.on(machine)
    rows = without_transfers(schedule.schedule if isinstance(schedule, Plan) else schedule)
    meaning = Meaning(rows, costs_of(schedule, costs), machine, placement=schedule.placement)
    graph = nx.DiGraph()
    graph.add_node(END, kind="end")
    _add_actions(graph, meaning)
    _add_data(graph, meaning)
    _add_memory(graph, meaning)
    return graph


def longest_path_s(graph: nx.DiGraph) -> float:
    """Returns the makespan: the longest path through the graph.

    Raises `ScheduleError` naming a cycle if there is one.
    """
    cycle = find_cycle(graph)
    if cycle:
        raise ScheduleError(
            f"the step never ends: {' -> '.join(cycle)}. Run `octopipe check` on the table to "
            f"see these places in it"
        )
    return float(nx.dag_longest_path_length(graph, weight="delay_s"))


def find_cycle(graph: nx.DiGraph) -> tuple[str, ...]:
    """Returns the nodes of one cycle, the first repeated at the end; empty if there is none."""
    try:
        edges = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return ()
    return (*(source for source, *_ in edges), edges[0][0])


def _add_actions(graph: nx.DiGraph, meaning: Meaning) -> None:
    for rank, row in enumerate(meaning.schedule.ranks):
        gather_s, after_s = meaning.ends[rank]
        if gather_s:
            graph.add_node(f"gather {rank}", kind="gather", rank=rank, duration_s=gather_s)
            graph.add_edge(f"gather {rank}", END, delay_s=gather_s + after_s, why="end")
        before: Item | None = None
        for item in row:
            name, seconds = str(item), meaning.duration_s(rank, actions_of(item))
            graph.add_node(name, kind="action", rank=rank, duration_s=seconds)
            graph.add_edge(name, END, delay_s=seconds + after_s, why="end")
            if before is None and gather_s:
                graph.add_edge(f"gather {rank}", name, delay_s=gather_s, why="order")
            if before is not None:
                delay = graph.nodes[str(before)]["duration_s"]
                graph.add_edge(str(before), name, delay_s=delay, why="order")
            before = item


def _add_data(graph: nx.DiGraph, meaning: Meaning) -> None:
    maker = {}
    link_last: dict[tuple[int, int], str] = {}
    for rank, row in enumerate(meaning.schedule.ranks):
        for item in row:
            for action in actions_of(item):
                value = makes(action)
                if value is not None:
                    maker[value] = (rank, item)
                transfer = meaning.crossings.take.get(action)
                if transfer is None:
                    continue
                latency, occupied = meaning.wire_s(transfer)
                name, link = str(transfer), (rank, transfer.target)
                graph.add_node(
                    name,
                    kind="transfer",
                    rank=rank,
                    target=transfer.target,
                    duration_s=latency + occupied,
                    occupied_s=occupied,
                    bytes=meaning.size_bytes(transfer),
                )
                delay = graph.nodes[str(item)]["duration_s"]
                graph.add_edge(str(item), name, delay_s=delay, why="data")
                if link in link_last:
                    link_s = graph.nodes[link_last[link]]["occupied_s"]
                    graph.add_edge(link_last[link], name, delay_s=link_s, why="link")
                link_last[link] = name
    for rank, row in enumerate(meaning.schedule.ranks):
        for item in row:
            for action in actions_of(item):
                bring = meaning.crossings.bring.get(action)
                if bring is not None:
                    delay = graph.nodes[str(bring)]["duration_s"]
                    graph.add_edge(str(bring), str(item), delay_s=delay, why="data")
                for value in meaning.crossings.reads(action):
                    source, source_item = maker.get(value, (rank, item))
                    if source == rank and source_item is not item:
                        delay = graph.nodes[str(source_item)]["duration_s"]
                        graph.add_edge(str(source_item), str(item), delay_s=delay, why="data")


def _add_memory(graph: nx.DiGraph, meaning: Meaning) -> None:
    for rank, row in enumerate(meaning.schedule.ranks):
        for item in row:
            at_start, at_end = _changes(meaning, item)
            seconds = graph.nodes[str(item)]["duration_s"]
            for sign, delay, size in (("+", 0.0, at_start), ("-", seconds, at_end)):
                if size:
                    name = f"{item}{sign}"
                    graph.add_node(name, kind="memory", rank=rank, bytes=size)
                    graph.add_edge(str(item), name, delay_s=delay, why="memory")


def _changes(meaning: Meaning, item: Item) -> tuple[float, float]:
    """Returns the change of a rank's residuals as an item starts, and as it ends."""
    at_start = at_end = 0.0
    for action in actions_of(item):
        stage, costs = action.stage, meaning.costs
        again = bool(costs.recompute[stage])
        residual, kept = float(costs.residual_bytes[stage]), float(costs.input_bytes[stage])
        if action.kind is Kind.FORWARD:
            at_start += kept if again else residual
        elif action.kind is Kind.RECOMPUTE:
            at_start += residual if again else 0.0
        elif action.kind is Kind.WEIGHT_GRAD:
            at_end -= float(costs.weight_residual_bytes[stage])
        elif action.kind in (Kind.BACKWARD, Kind.INPUT_GRAD):
            at_start += residual if meaning.rebuilds(action) else 0.0
            at_end -= residual + (kept if again else 0.0)
            if action.kind is Kind.INPUT_GRAD:
                at_end += float(costs.weight_residual_bytes[stage])
    return at_start, at_end
