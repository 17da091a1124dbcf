"""Exceptions to statuses and back."""

import grpc
import pytest

from kvstore.errors import ConfigurationError, KVStoreError, LimitExceeded, Unavailable
from kvstore.rpc.handover import PROTOCOL, Hello, Memory, Refusal, decode
from kvstore.rpc.status import ERROR_METADATA_KEY, STATUS_OF, error_classes, error_of, wire_class_of
from kvstore.tiers.fs_directory import DirectoryUnusable


class FakeCall(grpc.RpcError, grpc.Call):
    def __init__(self, code: grpc.StatusCode, details: str, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._status = (code, details, metadata)

    def code(self) -> grpc.StatusCode:
        return self._status[0]

    def details(self) -> str:
        return self._status[1]

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._status[2]

    def add_callback(self, *_: object) -> None: ...
    def cancel(self) -> None: ...
    def initial_metadata(self) -> None: ...
    def is_active(self) -> None: ...
    def time_remaining(self) -> None: ...


@pytest.mark.parametrize(
    "cls", [cls for cls in error_classes() if cls.__module__ == KVStoreError.__module__], ids=lambda cls: cls.__name__
)
def test_every_exception_has_a_status_and_comes_back_as_itself(cls: type[KVStoreError]) -> None:
    call = FakeCall(STATUS_OF[cls], "what happened", ((ERROR_METADATA_KEY, cls.__name__),))
    error = error_of(call)
    assert type(error) is cls
    assert str(error) == "what happened"


def test_an_exception_of_one_module_travels_as_what_the_caller_knows() -> None:
    assert wire_class_of(DirectoryUnusable) is ConfigurationError
    for cls in error_classes():
        known = wire_class_of(cls)
        assert issubclass(cls, known)
        assert known.__module__ == KVStoreError.__module__


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, Unavailable),
        (grpc.StatusCode.UNAUTHENTICATED, Unavailable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, LimitExceeded),
        (grpc.StatusCode.UNKNOWN, KVStoreError),
    ],
)
def test_a_status_of_grpc_itself_becomes_what_the_caller_can_act_on(
    code: grpc.StatusCode, cls: type[KVStoreError]
) -> None:
    assert type(error_of(FakeCall(code, "text"))) is cls


@pytest.mark.parametrize("packet", [Hello(b"t" * 32), Refusal("no: ä"), Memory(1 << 36, b"i" * 16, b"k" * 32)])
def test_packets_come_back_as_they_were(packet: Hello | Refusal | Memory) -> None:
    assert decode(packet.encode()) == packet


@pytest.mark.parametrize("packet", [b"", b"\xff\xfe", b"{}", b"[1]", b'{"protocol": %d}' % PROTOCOL, b"null"])
def test_other_packets_are_refused(packet: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(packet)
