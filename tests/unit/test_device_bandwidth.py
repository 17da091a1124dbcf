"""Measuring a device, on the fake one: everything is measured and nothing is kept. The figures mean nothing there."""

import itertools
from collections.abc import Sequence

import pytest

from kvstore._native import DeviceCopier
from kvstore.device_bandwidth import Bandwidth, measure, measure_device
from kvstore.profiles.measured import Direction, Way
from tests.unit.fake_cuda import FakeDevice

SIZES = (2048, 65536)


def opened(device: FakeDevice, way: Way) -> DeviceCopier:
    every = 2**63 if way is Way.KERNEL else 0
    return DeviceCopier(
        0, library=device.library, kernels=b"any", load_kernel_bytes=every, store_kernel_bytes=every,
        pin_piece_bytes=1 << 20,
    )  # fmt: skip


def measured(device: FakeDevice, ways: Sequence[Way]) -> list[Bandwidth]:
    found = measure(lambda way: opened(device, way), ways=ways, fragment_bytes=SIZES, total_bytes=1 << 20, rounds=2)
    return list(found)


def test_every_way_direction_and_size_is_measured_and_everything_given_back() -> None:
    device = FakeDevice()
    with device.running():
        results = measured(device, tuple(Way))
    found = [(one.way, one.fragment_bytes, one.direction) for one in results]
    assert found == list(itertools.product(Way, SIZES, Direction))
    assert all(len(one.bytes_per_s) == 2 and min(one.bytes_per_s) > 0 for one in results)
    assert device.calls("cuLaunchKernel") > 0
    assert device.calls("cuMemcpyAsync") > 0
    assert device.alive() == {}


def test_a_copy_that_fails_is_no_measurement() -> None:
    device = FakeDevice()
    device.fail("cuMemcpyBatchAsync", after=3)
    with device.running(), pytest.raises(RuntimeError, match="fragments of 2048 bytes failed"):
        list(
            measure(lambda way: opened(device, way), ways=[Way.COPY_ENGINE], fragment_bytes=SIZES, total_bytes=1 << 20)
        )
    assert device.alive() == {}


def test_memory_that_is_not_page_locked_is_no_measurement_of_memory_that_is() -> None:
    device = FakeDevice()
    device.fail("cuMemHostRegister")
    with pytest.raises(RuntimeError, match=r"does not page-lock .* CUDA_ERROR_OUT_OF_MEMORY"):
        list(
            measure(lambda way: opened(device, way), ways=[Way.COPY_ENGINE], fragment_bytes=SIZES, total_bytes=1 << 20)
        )


def test_without_a_kernel_the_other_ways_are_measured() -> None:
    device = FakeDevice()

    def without_kernel(way: Way) -> DeviceCopier:
        return DeviceCopier(0, library=device.library, kernels=b"", load_kernel_bytes=int(way is Way.KERNEL))

    with device.running():
        found = measure_device(without_kernel, fragment_bytes=SIZES, total_bytes=1 << 20, rounds=1)
    assert {rate.way for rate in found.rates} == {Way.COPY_ENGINE, Way.PAGEABLE}
    assert {rate.direction for rate in found.rates} == {Direction.LOAD, Direction.STORE}
    assert (found.name, found.overhead_s > 0) == ("fake device", True)
    assert device.alive() == {}
