"""Generate kvstore/rpc/v1 from protos/ (grpcio-tools 1.71.x). `--check`: exit 1 if the committed files are stale."""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "kvstore" / "rpc" / "v1"


def generate(out: Path) -> dict[str, str]:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}",
            f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}",
            *map(str, protos),
        ],
        check=True,
    )  # fmt: skip
    return {path.name: path.read_text() for path in sorted(out.rglob("*.py*"))}


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        fresh = generate(Path(scratch))
    if "--check" in sys.argv:
        stale = [name for name, text in fresh.items() if (TARGET / name).read_text() != text]
        for name in stale:
            print(f"{TARGET / name} is not what protos/ generates; run `make protos` and commit the result")
        return 1 if stale else 0
    for name, text in fresh.items():
        (TARGET / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
