"""Exceptions across gRPC: one table, used by both ends.

The status code is for tools; this package's own client takes the class from the trailing metadata entry
"kvstore-error", because several classes share a code.
"""

from collections.abc import Iterator

import grpc

from kvstore import errors

ERROR_METADATA_KEY = "kvstore-error"

STATUS_OF: dict[type[errors.KVStoreError], grpc.StatusCode] = {
    errors.KVStoreError: grpc.StatusCode.INTERNAL,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    errors.IdentityMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SeedMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.NamespaceMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ConfigurationError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.SaltRequired: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LimitExceeded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.WrongSize: grpc.StatusCode.INVALID_ARGUMENT,
    errors.BadKey: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
}

# For a status that gRPC itself made, or a tool's proxy: what the caller does next.
_ERROR_OF_CODE: dict[grpc.StatusCode, type[errors.KVStoreError]] = {
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unavailable,  # a token of the daemon before this one
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.LimitExceeded,
}


def wire_class_of(cls: type[errors.KVStoreError]) -> type[errors.KVStoreError]:
    """What the other end can know of: an exception that one module keeps to itself travels as its nearest ancestor."""
    return next(ancestor for ancestor in cls.__mro__ if ancestor in STATUS_OF)


def error_classes(root: type[errors.KVStoreError] = errors.KVStoreError) -> Iterator[type[errors.KVStoreError]]:
    yield root
    for child in root.__subclasses__():
        yield from error_classes(child)


def error_of(call: grpc.RpcError, endpoint: str = "") -> errors.KVStoreError:
    """The exception that the daemon raised, as far as the status tells. `endpoint`: for the message."""
    assert isinstance(call, grpc.Call), f"{type(call).__name__} carries no status"
    text = call.details() or str(call.code())
    metadata = dict(call.trailing_metadata() or ())
    name = metadata.get(ERROR_METADATA_KEY)
    for cls in error_classes():
        if cls.__name__ == name:
            return cls(text)
    cls = _ERROR_OF_CODE.get(call.code(), errors.KVStoreError)
    if cls is errors.Unavailable and endpoint:
        text = f"the daemon at {endpoint} did not answer to the end ({text}); see whether it runs, and ask again"
    return cls(text)
