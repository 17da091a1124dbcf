"""Names in the fs directory: what is built is parsed, what is not ours is not."""

import pytest

from kvstore.tiers import fs_paths


@pytest.mark.parametrize("number", [0, 1, 255, fs_paths.SLAB_NUMBER_MAX])
def test_slab_names_round_trip(number: int) -> None:
    assert fs_paths.slab_number(fs_paths.slab(number)) == number


def test_namespace_names_round_trip() -> None:
    assert fs_paths.namespace_id(fs_paths.namespace(bytes(range(16)))) == bytes(range(16))


@pytest.mark.parametrize(
    "name",
    [
        "slab-1",
        "slab-0000000g",
        "slab-0000000A",
        "slab-000000001",
        "xslab-00000001",
        "slab-00000001\n",
        "slab-00000001.bak",
        "slab-00000001.new.new",
        "lock.txt",
        "notes.new",
        "index.mdb-lock",
        "namespaces/x.json",
        "namespaces/" + "0" * 31 + ".json",
        "../slab-00000001",
        "",
    ],
)
def test_other_names_are_not_ours(name: str) -> None:
    assert not fs_paths.is_ours(name)
    assert not fs_paths.is_temporary(name)


@pytest.mark.parametrize("name", [fs_paths.slab(3), fs_paths.STATE, fs_paths.namespace(bytes(16)), fs_paths.INDEX])
def test_temporary_files_are_known_again(name: str) -> None:
    assert fs_paths.is_ours(name)
    assert fs_paths.is_temporary(fs_paths.temporary(name))
    assert not fs_paths.is_ours(fs_paths.temporary(name))
