"""Partitions that look at the layers alone: evenly by count, and by least maximum."""

from octojax.ir.partition import Partition, uniform_partition
from octojax.partitioners.chain import Chain, spans
from octojax.partitioners.cut import TOLERANCE, Division, least_maximum
from octojax.partitioners.family import Partitioner
from octojax.partitioners.ties import quickest

NOTHING = 1e-9
"""What a layer without operations counts beside the whole model."""


def uniform(chain: Chain, stages: int, microbatches: int) -> Division:
    """Returns the inner layers evenly by count, embedding with the first, head with the last.

    See `octojax.ir.partition.uniform_partition`.
    """
    partition = uniform_partition(chain.kinds, stages)
    return Division(partition, max(_loads(chain, partition)))


def balanced(chain: Chain, stages: int, microbatches: int) -> Division:
    """Returns the partition of least maximal stage time; of those the one that 1F1B runs quickest.

    Layers that take no time count a little, so that they are spread evenly too.
    """
    total = chain.total_s
    if not total.all():
        total = total + max(float(total.sum()), 1.0) * NOTHING
    times = spans(total)
    division = least_maximum(times, times, stages)
    assert division is not None, "layers are at least as many as stages"
    limit = max(_loads(chain, division[0])) * (1 + TOLERANCE)
    partition = quickest(
        division[0], chain, microbatches, lambda other: max(_loads(chain, other)) <= limit
    )
    return Division(partition, max(_loads(chain, partition)))


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
