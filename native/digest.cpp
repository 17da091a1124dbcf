#include "digest.h"

#include <bit>
#include <cassert>
#include <cstring>

namespace kvstore {
namespace {

static_assert(std::endian::native == std::endian::little, "digests are stored as this machine's words");

std::uint64_t word_at(const std::byte* at) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

inline void round(std::uint64_t& v0, std::uint64_t& v1, std::uint64_t& v2, std::uint64_t& v3) {
    v0 += v1;
    v2 += v3;
    v1 = std::rotl(v1, 13) ^ v0;
    v3 = std::rotl(v3, 16) ^ v2;
    v0 = std::rotl(v0, 32);
    v2 += v1;
    v0 += v3;
    v1 = std::rotl(v1, 17) ^ v2;
    v3 = std::rotl(v3, 21) ^ v0;
    v2 = std::rotl(v2, 32);
}

inline void absorb(std::uint64_t word, std::uint64_t& v0, std::uint64_t& v1, std::uint64_t& v2, std::uint64_t& v3) {
    v3 ^= word;
    round(v0, v1, v2, v3);
    round(v0, v1, v2, v3);
    v0 ^= word;
}

}  // namespace

Hasher::Hasher(const Id& key, Bytes prefix) : prefix_bytes_(prefix.size()) {
    assert(prefix.size() % 8 == 0);
    const std::uint64_t k0 = word_at(key.data());
    const std::uint64_t k1 = word_at(key.data() + 8);
    v0_ = k0 ^ 0x736f6d6570736575;
    v1_ = k1 ^ 0x646f72616e646f6d ^ 0xee;  // 0xee: the variant with 128 bits of output
    v2_ = k0 ^ 0x6c7967656e657261;
    v3_ = k1 ^ 0x7465646279746573;
    for (std::size_t at = 0; at < prefix.size(); at += 8) absorb(word_at(prefix.data() + at), v0_, v1_, v2_, v3_);
}

Digest Hasher::operator()(Bytes message) const {
    std::uint64_t v0 = v0_, v1 = v1_, v2 = v2_, v3 = v3_;
    const std::size_t whole = message.size() & ~std::size_t{7};
    for (std::size_t at = 0; at < whole; at += 8) absorb(word_at(message.data() + at), v0, v1, v2, v3);
    std::uint64_t last = static_cast<std::uint64_t>(prefix_bytes_ + message.size()) << 56;
    for (std::size_t at = whole; at < message.size(); ++at) {
        last |= static_cast<std::uint64_t>(message[at]) << (8 * (at - whole));
    }
    absorb(last, v0, v1, v2, v3);
    Digest digest;
    v2 ^= 0xee;
    for (int i = 0; i < 4; ++i) round(v0, v1, v2, v3);
    digest.lo = v0 ^ v1 ^ v2 ^ v3;
    v1 ^= 0xdd;
    for (int i = 0; i < 4; ++i) round(v0, v1, v2, v3);
    digest.hi = v0 ^ v1 ^ v2 ^ v3;
    return digest;
}

Hasher hasher_for(const Id& index_key, const Id& name_space, const Id& tenant) {
    std::array<std::byte, 32> prefix;
    std::memcpy(prefix.data(), name_space.data(), 16);
    std::memcpy(prefix.data() + 16, tenant.data(), 16);
    return Hasher(index_key, prefix);
}

}  // namespace kvstore
