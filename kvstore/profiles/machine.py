"""A machine's copies to its GPUs and its disk, and how each figure is known: what `kvstore calibrate` measured of this
node counts before the tables, as it does for engines. Pure."""

import enum
import time
from dataclasses import dataclass, replace

from kvstore.costmodel import TransferModel
from kvstore.profiles import Disk, Gpu, find_disk, find_gpu
from kvstore.profiles.measured import Device, Direction, Measured

DEFAULT_GPU = "h100_sxm"


class Known(enum.StrEnum):
    MEASURED = "measured"  # on this node
    PUBLISHED = "published"  # of such hardware, measured by others
    ASSUMED = "assumed"  # of other hardware


@dataclass(frozen=True, slots=True)
class Source:
    """`text` is for a person: where the figure comes from."""

    known: Known
    text: str

    def document(self) -> dict[str, object]:
        return {"known": self.known.value, "text": self.text}


@dataclass(frozen=True, slots=True)
class Machine:
    """`gpu` None: no profile of the GPU `gpu_name`. `link`: host memory to one rank's GPU, as an engine loads."""

    gpu_name: str
    gpu: Gpu | None
    link: TransferModel
    link_source: Source
    disk: Disk
    disk_source: Source

    def document(self) -> dict[str, object]:
        return {
            "link": {
                "bytes_per_s": self.link.bytes_per_s,
                "overhead_s": self.link.overhead_s,
                "source": self.link_source.document(),
            },
            "disk": {
                "read_bytes_per_s": self.disk.read.bytes_per_s,
                "write_bytes_per_s": self.disk.write_bytes_per_s,
                "source": self.disk_source.document(),
            },
        }

    def sentences(self) -> tuple[str, str]:
        read = self.disk.read.bytes_per_s
        return (
            f"copies to the GPU: {self.link.bytes_per_s / 1e9:.1f} GB/s, {self.link_source.text}",
            f"disk: {read / 1e9:.1f} GB/s read, {self.disk.write_bytes_per_s / 1e9:.1f} GB/s written, "
            f"{self.disk_source.text}",
        )


def find_machine(node: Measured | None, gpu_name: str | None, fragment_bytes: int) -> Machine:
    """`gpu_name` None: the GPU that was measured on this node, else an H100. `fragment_bytes`: of what a copy has of a
    layer, `Device.link`."""
    device = node.device if node is not None else None
    if gpu_name is None:
        gpu_name = device.name if device is not None else DEFAULT_GPU
    gpu = find_gpu(gpu_name)
    link, link_source = _link(node, device if _is_same(device, gpu_name, gpu) else None, gpu_name, gpu, fragment_bytes)
    disk = find_disk()
    disk_source = Source(
        Known.PUBLISHED,
        "published of one NVMe drive, not measured on this node (`kvstore calibrate --fs-dir DIR` does)",
    )
    if node is not None and node.disk_read is not None:
        disk = Disk("measured", node.disk_read, node.disk_write_bytes_per_s or disk.write_bytes_per_s)
        disk_source = Source(Known.MEASURED, _measured(node))
    return Machine(gpu_name, gpu, link, link_source, disk, disk_source)


def _is_same(device: Device | None, gpu_name: str, gpu: Gpu | None) -> bool:
    return device is not None and (device.name == gpu_name or (gpu is not None and find_gpu(device.name) == gpu))


def _link(
    node: Measured | None, device: Device | None, gpu_name: str, gpu: Gpu | None, fragment_bytes: int
) -> tuple[TransferModel, Source]:
    like = gpu or find_gpu(DEFAULT_GPU)
    assert like is not None, f"no profile of {DEFAULT_GPU}"
    expected = like.link.expected
    copies = None if device is None else device.link(Direction.LOAD, fragment_bytes)
    if copies is not None:
        assert node is not None, "a device was measured, and no node"
        # No engine ran: what one adds to a copy before a load has ended is in the published overhead alone.
        link = replace(copies, overhead_s=max(copies.overhead_s, expected.overhead_s))
        return link, Source(Known.MEASURED, _measured(node))
    if gpu is None:
        return expected, Source(Known.ASSUMED, f"assumed: that of {like.name}, for there is no profile of '{gpu_name}'")
    if not gpu.link.measured:
        return expected, Source(
            Known.ASSUMED, f"assumed: that of a slower link which was measured, for {gpu.link.name} was not"
        )
    return expected, Source(Known.PUBLISHED, f"published for {gpu.link.name}, not measured on this node")


def _measured(node: Measured) -> str:
    when = "" if node.at_s is None else f", {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime(node.at_s))}"
    return f"measured on {node.node or 'this node'}{when}"
