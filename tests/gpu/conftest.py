"""The device that a test runs on: the fake one everywhere, and with `-m gpu` a real one."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.gpu.device import Fake, Gpu


@pytest.fixture(params=["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator["Fake | Gpu"]:
    from tests.gpu.device import Fake, Gpu, no_gpu

    if request.param == "gpu" and (reason := no_gpu()):
        pytest.skip(f"no GPU: {reason}")
    device = Gpu() if request.param == "gpu" else Fake()
    with device.working():
        yield device
