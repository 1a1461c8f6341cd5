"""How ranks may be spread over processes."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from octojax.errors import MeshError
from octojax.mesh import PipelineMesh


@dataclass(frozen=True)
class Device:
    """What a mesh wants of a device that is not here."""

    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def mesh_of(owners, monkeypatch, here=0):
    """Ranks by rows; `owners` are the processes of their devices."""
    table = np.array(owners)
    monkeypatch.setattr(jax, "process_count", lambda: int(table.max()) + 1)
    monkeypatch.setattr(jax, "process_index", lambda: here)
    devices = [Device(k, int(p)) for k, p in enumerate(table.flat)]
    return PipelineMesh(Mesh(np.array(devices).reshape(table.shape), ("pipe", "data")), "pipe")


@pytest.mark.parametrize(
    "owners",
    [[[0, 0], [0, 0]], [[0, 0], [1, 1]], [[0, 1], [2, 3]], [[1, 0, 0, 1], [2, 3, 3, 2]]],
)
def test_whole_and_evenly_spread_ranks(owners, monkeypatch):
    mesh = mesh_of(owners, monkeypatch, here=owners[-1][0])
    spread = len(set(owners[0])) > 1
    assert mesh.spans_processes == spread
    assert mesh.local_ranks[-1] == 1
    assert mesh.led_ranks == mesh.local_ranks
    assert [rank.leader for rank in mesh.ranks] == [row[0] for row in owners]
    assert {d.process_index for d in mesh.ranks[1].local_devices} == {owners[-1][0]}
    assert mesh.shared_rank == (mesh.ranks[1] if spread else None)


def test_one_process_speaks_for_a_rank(monkeypatch):
    assert mesh_of([[0, 1], [2, 3]], monkeypatch, here=1).led_ranks == ()
    assert mesh_of([[0, 1], [2, 3]], monkeypatch, here=2).led_ranks == (1,)


@pytest.mark.parametrize(
    ("owners", "fault"),
    [
        ([[0, 0, 0, 1]], r"of the devices of rank 0 are 3 of process 0, 1 of process 1"),
        (
            [[0, 1], [0, 1]],
            r"process 0 has parts of ranks 0, 1, and not all of each; process 1 has parts of "
            r"ranks 0, 1, and not all of each",
        ),
        ([[0, 0], [0, 1]], r"process 0 has parts of ranks 0, 1"),
        (
            [[0, 0], [1, 2]],
            r"ranks have unequal numbers of processes, 1 for rank 0 and 2 for rank 1",
        ),
    ],
)
def test_others_are_refused_with_all_faults(owners, fault, monkeypatch):
    with pytest.raises(MeshError, match=fault) as caught:
        mesh_of(owners, monkeypatch)
    assert "order the mesh's devices so" in str(caught.value)


def test_processes_without_a_rank(monkeypatch):
    with pytest.raises(MeshError, match=r"there are 5 processes, but .* is on process 1, 2, 3"):
        mesh_of([[0, 4]], monkeypatch)
