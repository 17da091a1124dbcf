// Keyed 128-bit digests (SipHash-2-4 with 128-bit output) of what a chunk is found by: namespace, tenant, key.
//
// Keyed, so that nobody who can choose keys can make two of them meet in the table; the index key is random per daemon.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace kvstore {

using Bytes = std::span<const std::byte>;
using Id = std::array<std::byte, 16>;  // a namespace's, tenant's or instance's

inline constexpr std::size_t KEY_BYTES_MIN = 16;
inline constexpr std::size_t KEY_BYTES_MAX = 64;

struct Digest {
    std::uint64_t lo = 0;
    std::uint64_t hi = 0;
    bool operator==(const Digest&) const = default;
};

// A digest with a prefix already absorbed: a batch of keys of one (namespace, tenant) shares that work.
class Hasher {
  public:
    // `prefix` is a multiple of 8 bytes long.
    Hasher(const Id& key, Bytes prefix);
    // Of prefix + message.
    Digest operator()(Bytes message) const;

  private:
    std::uint64_t v0_, v1_, v2_, v3_;
    std::size_t prefix_bytes_;
};

// The hasher for keys of one (namespace, tenant).
Hasher hasher_for(const Id& index_key, const Id& name_space, const Id& tenant);

}  // namespace kvstore
