"""A placement that the user gives: one rank per stage, no rank empty."""

from octojax.ir.placement import Placement


def on_ranks(placement: Placement, ranks: int, name: str) -> Placement:
    """Returns the placement over exactly `ranks` ranks.

    Raises `ValueError` if it names other ranks, leaves one empty, or puts a stage on two.
    """
    if placement.num_ranks > ranks:
        raise ValueError(
            f"{name}: placement [{placement}] names rank {placement.num_ranks - 1}, but there are "
            f"{ranks} ranks (0 to {ranks - 1})"
        )
    placement = Placement(placement.stages, ranks)
    if placement.empty_ranks:
        raise ValueError(
            f"{name}: placement [{placement}] leaves rank {list(placement.empty_ranks)} of {ranks} "
            f"empty. Give every rank at least one stage"
        )
    double = [s for s, holders in enumerate(placement.stages) if len(holders) != 1]
    if double:
        raise ValueError(f"{name}: stage {double[0]} is on two ranks; place each stage once")
    return placement
