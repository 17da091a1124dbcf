"""What a machine's copies and disk are taken to do, and what is said of where each figure comes from."""

import pytest

from kvstore.costmodel import TransferModel
from kvstore.profiles import find_disk, find_gpu
from kvstore.profiles.machine import Known, find_machine
from kvstore.profiles.measured import Device, Direction, Measured, Rate, Way

HOST = TransferModel(9e9, 1e-5)
DISK = TransferModel(3e9, 1e-3)
RATES = tuple(
    Rate(Way.COPY_ENGINE, direction, nbytes, rate)
    for direction, nbytes, rate in (
        (Direction.LOAD, 16384, 11e9),
        (Direction.LOAD, 65536, 50e9),
        (Direction.STORE, 16384, 1e9),
    )
)
NODE = Measured(HOST, DISK, 1e9, Device("NVIDIA H200", 1e-4, RATES), node="node-7", at_s=1_764_556_200.0)


def test_what_was_measured_on_this_node_counts_before_the_tables_and_says_where_and_when() -> None:
    machine = find_machine(NODE, None, 20_000)
    assert machine.gpu_name == "NVIDIA H200"
    assert machine.gpu == find_gpu("h200_sxm")
    assert machine.link.bytes_per_s == 11e9  # of fragments as large as that, loading
    assert (machine.disk.read, machine.disk.write_bytes_per_s) == (DISK, 1e9)
    for source in (machine.link_source, machine.disk_source):
        assert source.known is Known.MEASURED
        assert source.text == "measured on node-7, 2025-12-01 02:30 UTC"


def test_what_an_engine_adds_to_a_copy_is_kept_for_no_engine_was_measured() -> None:
    published = find_machine(None, "H200", 65536).link
    assert find_machine(NODE, "H200", 65536).link == TransferModel(50e9, published.overhead_s, 0.0)


def test_another_gpu_than_the_one_measured_has_the_tables_link_and_this_nodes_disk() -> None:
    machine = find_machine(NODE, "H100", 65536)
    gpu = find_gpu("H100")
    assert gpu is not None
    assert machine.link == gpu.link.expected
    assert machine.link_source.known is Known.PUBLISHED
    assert machine.disk_source.known is Known.MEASURED


def test_a_gpu_without_a_profile_is_found_by_the_name_that_was_measured() -> None:
    device = Device("NVIDIA A100-SXM4-80GB", 1e-4, RATES)
    node = Measured(HOST, device=device)
    machine = find_machine(node, None, 65536)
    assert (machine.gpu, machine.link.bytes_per_s, machine.link_source.known) == (None, 50e9, Known.MEASURED)
    assert machine.link_source.text == "measured on this node"  # as the first profiles say no more
    assert machine.disk == find_disk()
    assert machine.disk_source.known is Known.PUBLISHED


@pytest.mark.parametrize(
    ("gpu", "known", "said"),
    [
        ("H100", Known.PUBLISHED, "published for pcie5"),
        ("B300", Known.ASSUMED, "pcie6 was not"),
        ("NVIDIA A100-SXM4-80GB", Known.ASSUMED, "no profile of 'NVIDIA A100-SXM4-80GB'"),
    ],
)
def test_without_a_measurement_it_is_said_whether_anybody_measured_such_a_link(
    gpu: str, known: Known, said: str
) -> None:
    source = find_machine(None, gpu, 65536).link_source
    assert source.known is known
    assert said in source.text
