"""Partitions that look at the layers alone: evenly by count, and by least maximum."""

from octojax.ir.partition import Partition
from octojax.partitioners.chain import Chain
from octojax.partitioners.cut import Division, least_maximum
from octojax.partitioners.family import Partitioner

FIRST_KINDS = ("embedding", "embed", "input")
LAST_KINDS = ("head", "loss", "output")


def uniform(chain: Chain, stages: int, microbatches: int) -> Division:
    """Returns the inner layers evenly by count, embedding with the first, head with the last.

    A remainder goes to the earliest stages, one layer each: 30 layers on 4 stages are 8 8 7 7.
    """
    n = chain.num_layers
    first = int(chain.kinds[0].lower().startswith(FIRST_KINDS))
    last = int(chain.kinds[-1].lower().startswith(LAST_KINDS))
    if n - first - last < stages:
        first = last = 0
    each, more = divmod(n - first - last, stages)
    sizes = [each + (s < more) for s in range(stages)]
    sizes[0] += first
    sizes[-1] += last
    partition = Partition(tuple(sizes))
    return Division(partition, max(_loads(chain, partition)))


def balanced(chain: Chain, stages: int, microbatches: int) -> Division:
    """Returns the partition of least maximal stage time; the evenest of those, heavier in front.

    Heavier in front, because a heavy last stage delays the first backward.
    """
    times = chain.compute_s()
    found = least_maximum(times, times, stages)
    assert found is not None, "layers are at least as many as stages"
    return Division(*found)


def _loads(chain: Chain, partition: Partition) -> list[float]:
    total = chain.total_s
    return [float(total[list(partition.layers(s))].sum()) for s in range(partition.num_stages)]


FAMILIES = (
    Partitioner(
        "uniform",
        "inner layers evenly by count, embedding and head joined to the ends",
        "Megatron-LM's default; the paper's baselines",
        uniform,
    ),
    Partitioner(
        "balanced",
        "least maximal stage time",
        "torchgpipe, DeepSpeed; exact here",
        balanced,
    ),
)
