"""Which versions of vLLM are accepted, and what stands in for what one of them lacks."""

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from connector import compat

HASHES = [bytes([i]) * 32 for i in range(6)]


@pytest.mark.parametrize("version", ["0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.33.1rc2+cu130", "0.32.1.dev7+g0123abc"])
def test_versions_of_the_range_are_accepted(version):
    assert compat.version_problem(version) is None


@pytest.mark.parametrize(
    ("version", "served"), [("0.30.0", False), ("0.31.0", False), ("0.32.0", True), ("0.33.0", True)]
)
def test_states_are_served_where_vllm_hands_them_over(version, served):
    assert compat.hands_over_states(version) is served


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "0.3.0", "0.330.0", "1.31.0", "dev", ""])
def test_another_version_is_named_with_the_range(version):
    problem = compat.version_problem(version)
    assert problem is not None
    assert f"vLLM 0.30 to 0.33, and this is vLLM {version}:" in problem


def test_under_another_version_the_class_is_refused_before_vllms_connectors_are_imported():
    code = (
        "import sys, vllm.version; vllm.version.__version__ = '0.34.0'\n"
        "import connector\n"
        "try: connector.KVStoreConnector\n"
        "except ValueError as refusal: print(refusal, 'vllm.v1.kv_offload.base' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert re.search(r"works with vLLM 0\.30 to 0\.33, and this is vLLM 0\.34\.0: .* False$", found.stdout.strip())


class WithoutPlaces:
    """A request's context as of 0.30."""


def test_without_vllms_word_a_chunk_ends_where_its_hash_does():
    keys = [make_offload_key(HASHES[i], 0) for i in (1, 3)]
    assert compat.end_tokens(keys, WithoutPlaces(), HASHES, 16) == {keys[0]: 32, keys[1]: 64}


@pytest.mark.skipif(not hasattr(ReqContext, "get_offload_key_position"), reason="0.31 and later")
def test_vllms_word_is_taken_where_it_gives_it():
    context = ReqContext("request")
    key, other = (make_offload_key(HASHES[i], 0) for i in (1, 3))
    context.set_offload_key_position(key, 48)
    assert compat.end_tokens([key, other], context, HASHES, 16) == {key: 48}


def test_a_key_that_the_request_does_not_have_has_no_place():
    strange = make_offload_key(b"\xff" * 32, 0)
    assert compat.end_tokens([strange], WithoutPlaces(), HASHES, 16) == {}


@pytest.mark.parametrize(
    ("second_runner", "zeroes", "late"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_only_the_second_model_runner_zeroes_blocks_before_it_waits_for_copies(second_runner, zeroes, late):
    config = SimpleNamespace(use_v2_model_runner=second_runner)
    assert compat.overwrites_before_flushes(config, SimpleNamespace(needs_kv_cache_zeroing=zeroes)) == late
