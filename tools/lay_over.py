"""Makes an installed CPU build of vLLM another version, from the wheel of that version's CUDA build.

    .venv-vllm-0.33.0/bin/python tools/lay_over.py vllm-0.33.0-*.whl

For a version of which no CPU build was published: the environment's own interpreter puts the wheel's Python files in
the place of the CPU build's and keeps the compiled operations that are there. What the connector works with (scheduler,
block manager, workers, the offloading itself, the server) is Python and is then the real one; attention and
sampling are computed by the older version's code. An operation that only the newer version has fails when it is called.

It is safe to run again, also after it was interrupted.
"""

import shutil
import sys
import sysconfig
import zipfile
from pathlib import Path

PACKAGE = "vllm"
CPU = "+cpu"  # vLLM takes its platform from the version that its own metadata tell


def lay_over(wheel: Path, site_packages: Path) -> str:
    """Returns the version that the environment has now. FileNotFoundError where no compiled vLLM is installed;
    ValueError where `wheel` is none of vLLM's."""
    installed = site_packages / PACKAGE
    if not list(installed.glob("*.so")):
        raise FileNotFoundError(f"no compiled operations of vLLM in {installed}: install its CPU build first")
    name, version, *_ = wheel.name.split("-")
    metadata = f"{PACKAGE}-{version}.dist-info/METADATA"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if name != PACKAGE or metadata not in names:
            raise ValueError(f"{wheel.name} is not a wheel of vLLM")
        for there in installed.iterdir():
            if there.is_dir():
                shutil.rmtree(there)
            elif there.suffix != ".so":
                there.unlink()
        archive.extractall(
            site_packages, [it for it in names if it.startswith(PACKAGE + "/") and not it.endswith(".so")]
        )
        told = archive.read(metadata).decode()
    for earlier in site_packages.glob(f"{PACKAGE}-*.dist-info"):
        shutil.rmtree(earlier)
    about = site_packages / f"{PACKAGE}-{version}{CPU}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(told.replace(f"\nVersion: {version}\n", f"\nVersion: {version}{CPU}\n", 1))
    return version + CPU


if __name__ == "__main__":
    print(lay_over(Path(sys.argv[1]), Path(sysconfig.get_path("platlib"))))
