import pytest

from connector import config as config_module
from connector.config import SPEC_MODULE_PATH, SPEC_NAME, ConnectorConfig

ENDPOINT = {"endpoint": "unix:///run/kvstore/kvstore.sock"}


def test_answers_are_stored_by_default_and_the_canonical_layout_is_on():
    config = ConnectorConfig.parse(ENDPOINT)
    assert config.endpoint == "unix:///run/kvstore/kvstore.sock"
    assert not config.offload_prompt_only
    assert not config.require_cache_salt
    assert config.for_base_class() == {
        "spec_name": SPEC_NAME,
        "spec_module_path": SPEC_MODULE_PATH,
        "canonical_layout": True,
        "offload_prompt_only": False,
        "self_describing_kv_events": False,
    }


def test_what_was_written_for_the_base_class_parses_to_the_same():
    config = ConnectorConfig.parse({**ENDPOINT, "offload_prompt_only": True})
    assert ConnectorConfig.parse({**ENDPOINT, **config.for_base_class()}) == config


@pytest.mark.parametrize("wanted", [False, True])
def test_events_that_are_wanted_are_said_not_to_come(wanted, monkeypatch):
    warnings = []
    monkeypatch.setattr(config_module.logger, "warning", warnings.append)
    config = ConnectorConfig.parse({**ENDPOINT, "self_describing_kv_events": wanted})
    assert config == ConnectorConfig.parse(ENDPOINT)
    assert [("emits no KV events" in warning) for warning in warnings] == [True] * wanted


def test_without_an_endpoint_the_daemons_own_default_is_used(monkeypatch):
    monkeypatch.setenv("KVSTORE_ENDPOINT", "unix:///somewhere/kvstore.sock")
    assert ConnectorConfig.parse({}).endpoint == "unix:///somewhere/kvstore.sock"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"endpont": "unix:///x"}, ["'endpont'", "did you mean 'endpoint'"]),
        ({"offload_promt_only": True}, ["'offload_promt_only'", "'offload_prompt_only'"]),
        ({"xyzzy": 1}, ["'xyzzy'", "known keys are endpoint"]),
        ({"tp_lcm_size": 0}, ["tp_lcm_size=0", "above 0"]),
        ({"admission": "sometimes"}, ["admission='sometimes'", "model, always, never"]),
        ({"offload_prompt_only": "yes"}, ["offload_prompt_only='yes'", "true or false"]),
        ({"require_cache_salt": 1}, ["require_cache_salt=1", "true or false"]),
        ({"canonical_layout": False}, ["canonical_layout=False", "leave the key out"]),
        ({"sync_load_budget_bytes": 1 << 20}, ["sync_load_budget_bytes=1048576", "leave the key out"]),
        ({"spec_name": "CPUOffloadingSpec"}, ["'CPUOffloadingSpec'", "leave the key out"]),
        ({"block_size": "256"}, ["block_size='256'", "above 0"]),
        ({"block_size": 0}, ["block_size=0", "above 0"]),
        ({"blocks_per_chunk": -1}, ["blocks_per_chunk=-1", "above 0"]),
        ({"blocks_per_chunk": True}, ["blocks_per_chunk=True", "above 0"]),
        ({"blocks_per_chunk": 2, "block_size": 256}, ["blocks_per_chunk=2", "block_size=256", "one of them"]),
        ({"endpoint": "localhost:50051"}, ["'localhost:50051'", "unix:///run/kvstore/kvstore.sock"]),
        ({"endpoint": 7}, ["endpoint=7"]),
    ],
)
def test_a_wrong_key_or_value_is_refused_with_both_in_the_message(raw, said):
    with pytest.raises(ValueError, match="kv_connector_extra_config") as refusal:
        ConnectorConfig.parse({**ENDPOINT, **raw})
    for words in said:
        assert words in str(refusal.value)
