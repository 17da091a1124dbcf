"""What travels on arena.sock, a SOCK_SEQPACKET socket.

1. At once after `connect`: `Hello`, with the token that proves to gRPC who calls, or `Refusal`.
2. After gRPC `Attach`, before its answer: `Memory`, with two file descriptors as SCM_RIGHTS: arena, table.
3. After that, from a client that waits for what it has put, and back: `STEP` and a `StepRequest` as it could go on the
   gRPC stream, and `STEP` and its `StepReply`. One wake-up at each end, where gRPC has four; a put of 128 MiB waits for
   little else. Nothing depends on them: a message that is not answered here goes on the stream under its number, and is
   answered there whether or not it was applied here. So either end may drop such a packet, and the daemon drops each
   that is not the next of its session or that it would refuse on the stream.
4. From a process that closes its session by itself: `GOODBYE`. Its last copy has ended and its maps are gone, so that
   its slots need not wait for the end of the process. A daemon that hangs finds the packet later.

The end of the connection tells each side that the other has gone.

Every packet but `STEP` carries `PROTOCOL`, so a process finds out before it attaches that it and the daemon are of
different versions: fields that one end does not know are ignored, over gRPC too, and slots would be granted and commits
sent that the other never sees.
"""

import json
from dataclasses import dataclass

from kvstore.errors import ConfigurationError

PROTOCOL = 3  # raised with every change of these packets, of protos/ or of the table that the other end would not see
PACKET_BYTES_MAX = 4096
FDS_PER_PACKET = 2
STEP = b"step"
STEP_PACKET_BYTES_MAX = 64 << 10  # room for as many commits as one message takes


@dataclass(frozen=True, slots=True)
class Hello:
    token: bytes

    def encode(self) -> bytes:
        return _packet(token=self.token.hex())


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: str

    def encode(self) -> bytes:
        return _packet(refused=self.reason)


@dataclass(frozen=True, slots=True)
class Memory:
    arena_bytes: int
    index_key: bytes
    tenant_key: bytes

    def encode(self) -> bytes:
        return _packet(arena_bytes=self.arena_bytes, index_key=self.index_key.hex(), tenant_key=self.tenant_key.hex())


Packet = Hello | Refusal | Memory


def decode(packet: bytes) -> Packet:
    """ConfigurationError: the daemon's protocol is another. ValueError for what no daemon sends."""
    try:
        fields = json.loads(packet)
        if fields["protocol"] != PROTOCOL:
            raise ConfigurationError(
                f"the daemon speaks protocol {fields['protocol']} and this program {PROTOCOL}; install one version of "
                "kvstore for the daemon and the engines of a node, and restart them"
            )
        if "refused" in fields:
            return Refusal(fields["refused"])
        if "token" in fields:
            return Hello(bytes.fromhex(fields["token"]))
        return Memory(fields["arena_bytes"], bytes.fromhex(fields["index_key"]), bytes.fromhex(fields["tenant_key"]))
    except (KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"a packet on arena.sock is not this protocol's: {packet[:80]!r} ({error})") from None


def _packet(**fields: object) -> bytes:
    packet = json.dumps({"protocol": PROTOCOL} | fields).encode()
    assert len(packet) <= PACKET_BYTES_MAX, f"packet of {len(packet)} bytes"
    return packet


GOODBYE = _packet(goodbye=True)
