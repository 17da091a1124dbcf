// CRC-32C (Castagnoli, reflected, initial value and final xor all ones): what the fs tier puts beside every payload.
//
// Chosen over XXH3 because two kinds of host have an instruction for it and it needs no foreign code. Where the
// instruction is missing, a table does the same sum at about 1 GB/s; both ways are tested against each other.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvstore {

std::uint32_t crc32c(const void* bytes, std::size_t nbytes);

// What `crc32c` uses on this host: "sse4.2", "armv8" or "table".
const char* crc32c_kind();

// The table's way, whatever the host can do: the tests compare the two.
std::uint32_t crc32c_table(const void* bytes, std::size_t nbytes);

}  // namespace kvstore
