"""The tool that puts another version's Python files over a CPU build of vLLM, on folders that only look like one."""

import zipfile

import pytest

from tools.lay_over import lay_over

METADATA = "Metadata-Version: 2.4\nName: vllm\nVersion: 0.33.0\n\nVersion: 0.33.0 of the text stays.\n"


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("vllm/__init__.py", "new")
        archive.writestr("vllm/v1/core.py", "new")
        archive.writestr("vllm/_C.abi3.so", "for another device")
        archive.writestr("vllm/_moe_C.abi3.so", "for another device")
        archive.writestr("vllm-0.33.0.dist-info/METADATA", METADATA)
    return path


@pytest.fixture
def installed(tmp_path):
    package = tmp_path / "site-packages" / "vllm"
    (package / "old").mkdir(parents=True)
    for name in ("__init__.py", "old/gone.py", "gone.py"):
        (package / name).write_text("old")
    (package / "_C.abi3.so").write_text("for this processor")
    return package


def files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_python_files_are_the_new_ones_and_compiled_operations_the_old(wheel, installed):
    for _ in range(2):  # again is as once
        assert lay_over(wheel, installed.parent) == "0.33.0+cpu"
        assert files(installed) == {
            "__init__.py": "new",
            "v1/core.py": "new",
            "_C.abi3.so": "for this processor",
        }
        metadata = installed.parent / "vllm-0.33.0+cpu.dist-info" / "METADATA"
        assert [it.name for it in installed.parent.glob("*.dist-info")] == [metadata.parent.name]
        assert metadata.read_text() == METADATA.replace("\nVersion: 0.33.0\n", "\nVersion: 0.33.0+cpu\n")


def test_nothing_is_touched_where_it_cannot_be_done(wheel, installed):
    other = wheel.with_name("other-1.0-py3-none-any.whl")
    wheel.rename(other)
    before = files(installed)
    with pytest.raises(ValueError, match="is not a wheel of vLLM"):
        lay_over(other, installed.parent)
    assert files(installed) == before
    (installed / "_C.abi3.so").unlink()
    with pytest.raises(FileNotFoundError, match="install its CPU build first"):
        lay_over(other, installed.parent)
