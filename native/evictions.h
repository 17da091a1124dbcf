// What became of chunks that were evicted, from the cpu tier or the one below: the last ones, for a person who asks.
//
// One thread, no clock. The index tells, and nothing in it depends on what is remembered here. Telling takes constant
// time, asking looks at all of them (less than a millisecond); memory is 80 bytes each.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <string_view>
#include <vector>

#include "digest.h"
#include "table.h"

namespace kvstore {

inline constexpr std::size_t EVICTIONS_KEPT = 1 << 16;
inline constexpr std::size_t KEY_START_BYTES = 8;  // by which a chunk is found whose whole key is not known

inline std::uint64_t hash_of_key(Bytes key) {
    return std::hash<std::string_view>()({reinterpret_cast<const char*>(key.data()), key.size()});
}
static_assert(KEY_START_BYTES <= KEY_BYTES_MIN);

inline constexpr std::uint32_t NOBODY = 0;  // the evictor where it is no request of a process

// What room was needed for. Numbers as in Python.
enum class Cause : std::uint8_t {
    SLOT = 0,   // of the same size
    SLAB = 1,   // slots of another size
    TABLE = 2,  // an entry
    QUOTA = 3,  // a newer chunk of the same tenant
    DISK = 4,   // whatever: it went from the tier below
};

struct Eviction {
    Digest digest;
    Id name_space;
    std::uint64_t key_hash;
    std::array<std::byte, KEY_START_BYTES> key_start;
    Ref at;  // where it was
    std::uint64_t at_ms;
    std::uint32_t evictor;
    Cause cause;
};

class Evictions {
  public:
    // For whom, by the caller's numbers, those that follow make room, and when.
    void make_room_for(std::uint32_t evictor, std::uint64_t now_ms) {
        evictor_ = evictor;
        now_ms_ = now_ms;
    }
    void add(const Digest& digest, const Id& name_space, Bytes key, Ref at, Cause cause) {
        add(digest, name_space, key, at, cause, evictor_, now_ms_);
    }
    void add_below(const Digest& digest, const Id& name_space, Bytes key, std::uint64_t now_ms) {
        add(digest, name_space, key, Ref{}, Cause::DISK, NOBODY, now_ms);
    }
    // How many there were; they are numbered from 1.
    std::uint64_t count() const { return count_; }
    // The numbers of those that `is_meant` accepts, newest first.
    std::vector<std::uint64_t> find(std::size_t limit, const auto& is_meant) const {
        std::vector<std::uint64_t> found;
        for (std::uint64_t number = count_; number > count_ - kept_.size() && found.size() < limit; --number) {
            if (is_meant((*this)[number])) found.push_back(number);
        }
        return found;
    }
    const Eviction& operator[](std::uint64_t number) const { return kept_[number - 1 - (count_ - kept_.size())]; }

  private:
    void add(const Digest& digest, const Id& name_space, Bytes key, Ref at, Cause cause, std::uint32_t evictor,
             std::uint64_t now_ms) {
        if (kept_.size() == EVICTIONS_KEPT) kept_.pop_front();
        Eviction& eviction = kept_.emplace_back(digest, name_space, hash_of_key(key),
                                                std::array<std::byte, KEY_START_BYTES>{}, at, now_ms, evictor, cause);
        std::copy_n(key.begin(), KEY_START_BYTES, eviction.key_start.begin());
        ++count_;
    }

    std::deque<Eviction> kept_;
    std::uint64_t count_ = 0;
    std::uint32_t evictor_ = NOBODY;
    std::uint64_t now_ms_ = 0;
};

}  // namespace kvstore
