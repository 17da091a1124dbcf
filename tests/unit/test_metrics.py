"""docs/metrics.md lists what is exported, no more and no less."""

import re
from pathlib import Path

from connector.metrics import COUNTERS
from kvstore.metrics import families
from kvstore.rpc.v1 import admin_pb2

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_document_lists_exactly_what_is_exported() -> None:
    stats = admin_pb2.StatsReply(
        tiers=[admin_pb2.TierStats(name="cpu")],
        decisions=[admin_pb2.AdmissionCount(kind="store", reason="ADMISSION")],
        balances=[admin_pb2.TierBalance(tier="cpu")],
    )
    exported = {
        (sample.name, family.type, ", ".join(f"`{label}`" for label in sample.labels))
        for family in families(stats)
        for sample in family.samples
    }
    exported |= {
        (f"{name}_total", "counter", "`model_name`, `engine`") for name in COUNTERS
    }  # by vLLM, of the connector
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) ?\| ", DOCUMENT.read_text(), re.MULTILINE)
    assert exported == set(rows)


def test_a_tier_that_does_not_grow_is_1() -> None:
    tiers = [admin_pb2.TierStats(name="cpu"), admin_pb2.TierStats(name="fs", not_growing="no space")]
    [family] = [each for each in families(admin_pb2.StatsReply(tiers=tiers)) if each.name == "kvstore_not_growing"]
    assert {sample.labels["tier"]: sample.value for sample in family.samples} == {"cpu": 0, "fs": 1}


def test_every_series_has_the_prefix_and_no_identity() -> None:
    for family in families(admin_pb2.StatsReply(tiers=[admin_pb2.TierStats(name="cpu")])):
        assert family.name.startswith("kvstore_")
        assert all(set(sample.labels) <= {"tier"} for sample in family.samples)
