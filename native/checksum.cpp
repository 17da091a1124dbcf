#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#ifndef HWCAP_CRC32
#define HWCAP_CRC32 (1 << 7)
#endif
#endif

namespace kvstore {
namespace {

constexpr std::uint32_t POLYNOMIAL = 0x82f63b78;  // reflected

// TABLES[0] advances the register by one byte; TABLES[k] by one byte followed by k zero bytes.
constexpr auto TABLES = [] {
    std::array<std::array<std::uint32_t, 256>, 8> tables{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
        std::uint32_t value = byte;
        for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) ? POLYNOMIAL : 0);
        tables[0][byte] = value;
    }
    for (std::size_t k = 1; k < tables.size(); ++k)
        for (std::uint32_t byte = 0; byte < 256; ++byte) {
            const std::uint32_t before = tables[k - 1][byte];
            tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
        }
    return tables;
}();

std::uint64_t load64(const unsigned char* at) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    return word;
}

std::uint32_t update_table(std::uint32_t crc, const unsigned char* at, std::size_t nbytes) {
    for (; nbytes >= 8; at += 8, nbytes -= 8) {
        const std::uint64_t word = load64(at) ^ crc;  // both kinds of host are little-endian
        crc = 0;
        for (int k = 0; k < 8; ++k) crc ^= TABLES[7 - k][(word >> (8 * k)) & 0xff];
    }
    for (; nbytes > 0; ++at, --nbytes) crc = (crc >> 8) ^ TABLES[0][(crc ^ *at) & 0xff];
    return crc;
}

// Appending zero bytes to a message is a linear map of its register, kept as four tables.
struct Shift {
    std::array<std::array<std::uint32_t, 256>, 4> tables;
    std::uint32_t operator()(std::uint32_t crc) const {
        return tables[0][crc & 0xff] ^ tables[1][(crc >> 8) & 0xff] ^ tables[2][(crc >> 16) & 0xff] ^
               tables[3][crc >> 24];
    }
};

Shift make_shift(std::size_t zero_bytes) {
    std::array<std::uint32_t, 32> image{};  // of each single bit
    for (int bit = 0; bit < 32; ++bit) {
        std::uint32_t crc = std::uint32_t{1} << bit;
        for (std::size_t i = 0; i < zero_bytes; ++i) crc = (crc >> 8) ^ TABLES[0][crc & 0xff];
        image[bit] = crc;
    }
    Shift shift{};
    for (int part = 0; part < 4; ++part)
        for (std::uint32_t byte = 0; byte < 256; ++byte)
            for (int bit = 0; bit < 8; ++bit)
                if (byte >> bit & 1) shift.tables[part][byte] ^= image[8 * part + bit];
    return shift;
}

// Of a power of two zero bytes: a map of half as many, twice.
Shift doubled_shift(std::size_t zero_bytes) {
    if (zero_bytes == 1) return make_shift(1);
    const Shift half = doubled_shift(zero_bytes / 2);
    Shift shift{};
    for (std::size_t part = 0; part < shift.tables.size(); ++part) {
        for (std::size_t byte = 0; byte < 256; ++byte) shift.tables[part][byte] = half(half.tables[part][byte]);
    }
    return shift;
}

#if defined(__x86_64__) || defined(__aarch64__)

#if defined(__x86_64__)
#define KVSTORE_CRC_TARGET __attribute__((target("sse4.2")))
KVSTORE_CRC_TARGET inline std::uint64_t step8(std::uint64_t crc, std::uint64_t word) {
    return _mm_crc32_u64(crc, word);
}
KVSTORE_CRC_TARGET inline std::uint32_t step1(std::uint32_t crc, unsigned char byte) {
    return _mm_crc32_u8(crc, byte);
}
bool has_instruction() {
    return __builtin_cpu_supports("sse4.2");
}
constexpr const char* INSTRUCTION = "sse4.2";
#else
#define KVSTORE_CRC_TARGET __attribute__((target("+crc")))
KVSTORE_CRC_TARGET inline std::uint64_t step8(std::uint64_t crc, std::uint64_t word) {
    return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
KVSTORE_CRC_TARGET inline std::uint32_t step1(std::uint32_t crc, unsigned char byte) {
    return __crc32cb(crc, byte);
}
bool has_instruction() {
    return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
}
constexpr const char* INSTRUCTION = "armv8";
#endif

// The instruction has a latency of three cycles and can start every cycle, so three runs of LANE bytes go side by side
// and are joined afterwards. In long lanes the processor sees three streams and fetches them ahead: from memory they go
// at twice the rate of short ones, whose streams end before it has begun.
constexpr std::size_t LONG_LANE = std::size_t{16} << 10;
constexpr std::size_t SHORT_LANE = 1360;  // three are just under 4 KiB, so a header block takes the fast way as well

template <std::size_t LANE>
KVSTORE_CRC_TARGET std::uint32_t update_three_lanes(std::uint32_t crc, const unsigned char* at, const Shift& shift) {
    std::uint64_t first = crc, second = 0, third = 0;
    for (std::size_t i = 0; i < LANE; i += 8) {
        first = step8(first, load64(at + i));
        second = step8(second, load64(at + LANE + i));
        third = step8(third, load64(at + 2 * LANE + i));
    }
    return shift(shift(static_cast<std::uint32_t>(first)) ^ static_cast<std::uint32_t>(second)) ^
           static_cast<std::uint32_t>(third);
}

KVSTORE_CRC_TARGET std::uint32_t update_instruction(std::uint32_t crc, const unsigned char* at, std::size_t nbytes) {
    static const Shift long_shift = doubled_shift(LONG_LANE);
    static const Shift short_shift = make_shift(SHORT_LANE);
    for (; nbytes >= 3 * LONG_LANE; at += 3 * LONG_LANE, nbytes -= 3 * LONG_LANE)
        crc = update_three_lanes<LONG_LANE>(crc, at, long_shift);
    for (; nbytes >= 3 * SHORT_LANE; at += 3 * SHORT_LANE, nbytes -= 3 * SHORT_LANE)
        crc = update_three_lanes<SHORT_LANE>(crc, at, short_shift);
    std::uint64_t rest = crc;
    for (; nbytes >= 8; at += 8, nbytes -= 8) rest = step8(rest, load64(at));
    crc = static_cast<std::uint32_t>(rest);
    for (; nbytes > 0; ++at, --nbytes) crc = step1(crc, *at);
    return crc;
}

#else
bool has_instruction() {
    return false;
}
constexpr const char* INSTRUCTION = "";
constexpr auto update_instruction = update_table;
#endif

const bool HAS_INSTRUCTION = has_instruction();

}  // namespace

std::uint32_t crc32c(const void* bytes, std::size_t nbytes) {
    const auto* at = static_cast<const unsigned char*>(bytes);
    return ~(HAS_INSTRUCTION ? update_instruction(~0U, at, nbytes) : update_table(~0U, at, nbytes));
}

// Made as the module is loaded: by the first read it would be made while others wait for it.
const Shift PIECE_SHIFT = doubled_shift(CRC32C_PIECE_BYTES);

std::uint32_t crc32c_joined(std::uint32_t before, std::uint32_t piece) {
    return PIECE_SHIFT(before) ^ piece;
}

std::uint32_t crc32c_table(const void* bytes, std::size_t nbytes) {
    return ~update_table(~0U, static_cast<const unsigned char*>(bytes), nbytes);
}

const char* crc32c_kind() {
    return HAS_INSTRUCTION ? INSTRUCTION : "table";
}

}  // namespace kvstore
