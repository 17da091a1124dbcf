"""Prometheus: every series is made from one snapshot of the daemon's own counters, at the moment of the scrape.

Concurrency: the exporter's threads ask `snapshot`, which has the event loop make the reply and waits for it with a
bound; nothing here touches the store. No label holds a salt, a tenant or a token. docs/metrics.md lists every series.
"""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvstore.rpc.v1 import admin_pb2

_TIER_GAUGES = {
    "capacity_bytes": "Size of the tier.",
    "used_bytes": "Slots of committed chunks.",
    "granted_bytes": "Slots handed out for writing and not committed yet.",
    "pinned_bytes": "Slots under a lease.",
    "overhead_bytes": "The table, beside the capacity.",
    "ready_bytes": "cpu: pre-faulted so far, only these can be granted; fs: all of it once its index is read.",
    "chunks": "Committed chunks.",
    "tenants": "Tenants with a chunk.",
    "quarantined_slots": "Slots that held bytes nobody wrote, not used again by this instance.",
    "unindexed_chunks": "Chunks on disk that a kill now would forget.",
}
_BALANCES = {
    "load_predicted": ("predicted_s", "From the decision to load until the prompt was computed, as predicted."),
    "load_realised": ("realised_s", "The same, as it was."),
    "load": ("load_s", "From the decision to load until the load had ended."),
    "load_wait": ("wait_s", "Of that, waiting for steps of the engine, or other copies."),
    "saved": ("saved_s", "What recomputing would have kept these requests, and others, waiting, as estimated."),
    "regret": ("regret_s", "What was lost by loads that took longer than that."),
}
_TIER_COUNTERS = {
    "hits": "Chunks loaded from this tier.",
    "misses": "Chunks looked for and in no tier; the same number in every tier.",
    "evictions": "Chunks dropped by policy.",
    "removals": "Chunks removed because an operator asked.",
    "corruptions": "Chunks removed because their bytes were not theirs.",
    "scrubbed_chunks": "Chunks read to be checked, and for nothing else.",
    "dropped_stores": "Chunks that should have been written to this tier and were not.",
}


class DaemonCollector(Collector):
    def __init__(self, snapshot: Callable[[], admin_pb2.StatsReply]) -> None:
        self._snapshot = snapshot

    def describe(self) -> Iterator[Metric]:
        """Without asking the daemon, which may not serve yet when the collector is registered."""
        yield from families(admin_pb2.StatsReply())

    def collect(self) -> Iterator[Metric]:
        yield from families(self._snapshot())


def _admission(stats: admin_pb2.StatsReply) -> Iterator[Metric]:
    decisions = CounterMetricFamily(
        "kvstore_decisions",
        "What engines decided about loading and storing, and commits that were rejected, by reason.",
        labels=["kind", "reason"],
    )
    refused = CounterMetricFamily(
        "kvstore_refused_chunks",
        "Chunks that engines did not store, or not on disk, and those that were written and rejected.",
        labels=["kind", "reason"],
    )
    for count in stats.decisions:
        decisions.add_metric([count.kind, count.reason], count.decisions)
        if count.kind != "load":
            refused.add_metric([count.kind, count.reason], count.refused_chunks)
    yield decisions
    yield refused
    for name, (field, text) in _BALANCES.items():
        seconds = CounterMetricFamily(f"kvstore_{name}_seconds", text, labels=["tier"])
        for balance in stats.balances:
            seconds.add_metric([balance.tier], getattr(balance, field))
        yield seconds


def families(stats: admin_pb2.StatsReply) -> Iterator[Metric]:
    for field, text in _TIER_GAUGES.items():
        gauge = GaugeMetricFamily(f"kvstore_{field}", text, labels=["tier"])
        for tier in stats.tiers:
            gauge.add_metric([tier.name], getattr(tier, field))
        yield gauge
    for field, text in _TIER_COUNTERS.items():
        counter = CounterMetricFamily(f"kvstore_{field}", text, labels=["tier"])
        for tier in stats.tiers:
            counter.add_metric([tier.name], getattr(tier, field))
        yield counter
    sick = GaugeMetricFamily("kvstore_sick", "1 while the tier refuses stores or loads.", labels=["tier"])
    for tier in stats.tiers:
        sick.add_metric([tier.name], bool(tier.sick))
    yield sick
    not_growing = GaugeMetricFamily(
        "kvstore_not_growing", "1 while the tier evicts though it is below its capacity.", labels=["tier"]
    )
    for tier in stats.tiers:
        not_growing.add_metric([tier.name], bool(tier.not_growing))
    yield not_growing
    yield from _admission(stats)
    yield CounterMetricFamily("kvstore_stores", "Commits that made a chunk visible.", value=stats.stores)
    yield CounterMetricFamily(
        "kvstore_failed_loads", "Releases of chunks that were not loaded: failed or never begun.",
        value=stats.failed_loads,
    )  # fmt: skip
    yield GaugeMetricFamily("kvstore_sessions", "Connected processes.", value=len(stats.sessions))
    yield GaugeMetricFamily("kvstore_namespaces", "Namespace documents kept.", value=stats.namespaces)
    yield GaugeMetricFamily("kvstore_uptime_seconds", "Since this instance started.", value=stats.uptime_s)
