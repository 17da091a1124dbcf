// CRC-32C (Castagnoli, reflected, initial value and final xor all ones): what the fs tier puts beside every payload.
//
// Chosen over XXH3 because two kinds of host have an instruction for it and it needs no foreign code. Where the
// instruction is missing, a table does the same sum at about 1 GB/s; both ways are tested against each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

std::uint32_t crc32c(const void* bytes, std::size_t nbytes);

// A message in pieces: all but the first are of CRC32C_PIECE_BYTES. `crc32c_joined` is the whole's checksum, from that
// of what comes before a piece and that of the piece.
inline constexpr std::size_t CRC32C_PIECE_BYTES = std::size_t{256} << 10;
std::uint32_t crc32c_joined(std::uint32_t before, std::uint32_t piece);

// What `crc32c` uses on this host: "sse4.2", "armv8" or "table".
const char* crc32c_kind();

// The table's way, whatever the host can do: the tests compare the two.
std::uint32_t crc32c_table(const void* bytes, std::size_t nbytes);

}  // namespace kvstore
