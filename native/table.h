// The table: where each chunk is and which generation each slot has, in shared memory that the daemon alone writes.
//
// Layout of the memory:
//     page 0          Header
//     buckets         `bucket_count` of 128 bytes; an entry lies in its home bucket or one of the 7 after it (wrapping)
//     generations     one word for each possible slot; pages stay untouched where no slot was ever granted
//
// Who writes: the daemon's event loop, through TableWriter. Who reads: any thread of any attached process, through
// TableReader, on a map without write permission. What orders them: each bucket has a sequence number, odd while the
// writer is in it; a reader takes the words between two equal, even readings. All shared words are lock-free atomics,
// so nothing here is undefined however stale or torn it is. If the daemon dies inside a write, the bucket stays odd and
// its readers find nothing in it; if a reader dies, nobody notices.
//
// What a reader learned may be stale at once. That is what generations are for: a slot's generation rises before the
// slot is handed out for writing, so a reader that compares it *after* its copy knows whether the bytes are the
// chunk's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "arena.h"
#include "digest.h"

namespace kvstore {

enum class Where : std::uint8_t { MISS = 0, CPU = 1, FS = 2, PENDING = 3 };

struct Ref {
    std::uint32_t slot = 0;
    std::uint64_t generation = 0;
    bool operator==(const Ref&) const = default;
};

struct Found {
    Where where = Where::MISS;
    Ref at;  // for CPU
};

inline constexpr std::uint64_t TABLE_MAGIC = 0x454c424154564b01;  // "\x01KVTABLE"
inline constexpr std::uint64_t TABLE_VERSION = 1;
inline constexpr std::uint32_t PLACES_PER_BUCKET = 3;
inline constexpr std::uint32_t PROBES_MAX = 8;
inline constexpr int READ_TRIES_MAX = 64;
inline constexpr std::uint32_t NO_RECORD = UINT32_MAX;

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(std::atomic<std::uint64_t>) == 8);
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

// Written once, before the memory is shown to anybody, but for the two atomics.
struct Header {
    std::uint64_t magic;
    std::uint64_t version;
    Id instance_id;
    std::uint64_t arena_bytes;
    std::uint64_t unit_bytes;
    std::uint64_t bucket_count;
    std::uint64_t buckets_offset;
    std::uint64_t generations_offset;
    std::uint64_t generation_count;
    alignas(64) std::atomic<std::uint64_t> heartbeat_ns;  // CLOCK_MONOTONIC
    std::atomic<std::uint64_t> ready_bytes;               // of the arena, pre-faulted; only grows
};
static_assert(sizeof(Header) <= SLOT_ALIGNMENT);

struct alignas(128) Bucket {
    std::atomic<std::uint64_t> sequence;
    std::atomic<std::uint64_t> digest_lo[PLACES_PER_BUCKET];
    std::atomic<std::uint64_t> digest_hi[PLACES_PER_BUCKET];
    std::atomic<std::uint64_t> location[PLACES_PER_BUCKET];  // slot | Where << 32; 0: the place is empty
    std::atomic<std::uint64_t> generation[PLACES_PER_BUCKET];
    std::atomic<std::uint32_t> record[PLACES_PER_BUCKET];  // means something to the writer only
    std::atomic<std::uint32_t> displaced;  // entries whose probe passed this bucket; 0: no need to look further
};
static_assert(sizeof(Bucket) == 128);

// What the sizes of one table follow from; one place for writer and readers.
struct TableShape {
    std::uint64_t arena_bytes;
    std::uint64_t unit_bytes;
    std::uint64_t bucket_count;

    // std::invalid_argument for sizes that slot numbers (32 bits) or addresses could not hold.
    static TableShape for_entries(std::uint64_t entries, std::uint64_t arena_bytes, std::uint64_t unit_bytes);
    static TableShape for_bytes(std::uint64_t table_bytes, std::uint64_t arena_bytes, std::uint64_t unit_bytes);

    std::uint64_t generation_count() const;
    std::uint64_t buckets_offset() const { return SLOT_ALIGNMENT; }
    std::uint64_t generations_offset() const;
    std::uint64_t table_bytes() const;
};

std::uint64_t monotonic_ns();

class TableReader {
  public:
    // Checks the header against the size; std::invalid_argument when this is not a table of this version.
    TableReader(const std::byte* memory, std::size_t nbytes);

    const Id& instance_id() const { return instance_id_; }
    const TableShape& shape() const { return shape_; }
    std::uint64_t heartbeat_ns() const { return header_->heartbeat_ns.load(std::memory_order_relaxed); }
    std::uint64_t ready_bytes() const { return header_->ready_bytes.load(std::memory_order_relaxed); }

    void find_all(const Hasher& hasher, std::span<const Bytes> keys, std::span<Found> found) const;
    Found find(const Digest& digest) const;
    // Until the chunk is in this slot and generation, or the time is over: looks again and again, and sleeps between.
    bool wait_shown(const Digest& digest, Ref at, double timeout_s) const;
    // 1 for each slot that still has its generation. Call it after the copy: it orders what the copy read before it.
    void current(std::span<const std::uint32_t> slots, std::span<const std::uint64_t> generations,
                 std::span<std::uint8_t> answers) const;

  private:
    enum class Step { FOUND, NEXT, END };
    Step read(const Bucket& bucket, const Digest& digest, Found& found) const;
    std::uint64_t home(const Digest& digest) const;

    const Header* header_;
    const Bucket* buckets_;
    const std::atomic<std::uint64_t>* generations_;
    TableShape shape_;
    Id instance_id_;
};

// The daemon's end; one thread. `find` is not for other threads.
class TableWriter {
  public:
    // Formats the memory, which must be zero, and pre-faults the buckets.
    TableWriter(std::byte* memory, const TableShape& shape, const Id& instance_id);

    void heartbeat() { header_->heartbeat_ns.store(monotonic_ns(), std::memory_order_relaxed); }
    void set_ready(std::uint64_t nbytes) { header_->ready_bytes.store(nbytes, std::memory_order_relaxed); }

    void prefetch(const Digest& digest) const;
    // The record that `insert` was given, or NO_RECORD.
    std::uint32_t find(const Digest& digest) const;
    // The records in all places where `insert` would look.
    std::vector<std::uint32_t> within_reach(const Digest& digest) const;
    // False: no free place within reach. The digest must not be there.
    [[nodiscard]] bool insert(const Digest& digest, Where where, Ref at, std::uint32_t record);
    void erase(const Digest& digest);
    // Erases one entry without a record where this digest could lie. False: there is none.
    bool erase_unrecorded_near(const Digest& digest);
    // MISS: it is not there.
    Where where(const Digest& digest) const;
    // Of an entry that is there and has no slot, before and after.
    void change(const Digest& digest, Where where);

    std::uint64_t generation(std::uint32_t slot) const { return generations_[slot].load(std::memory_order_relaxed); }
    // Before the slot is handed out. The new value.
    std::uint64_t raise_generation(std::uint32_t slot);

    std::uint64_t entry_count() const { return entry_count_; }
    std::uint64_t place_count() const { return shape_.bucket_count * PLACES_PER_BUCKET; }
    const TableShape& shape() const { return shape_; }

    // Every way in which the buckets contradict themselves, a sentence each.
    std::vector<std::string> problems() const;

  private:
    struct Place {
        std::uint64_t bucket;
        std::uint32_t index;
    };
    std::uint64_t home(const Digest& digest) const;
    std::uint64_t next(std::uint64_t bucket) const { return bucket + 1 == shape_.bucket_count ? 0 : bucket + 1; }
    std::optional<Place> place_of(const Digest& digest) const;

    Header* header_;
    Bucket* buckets_;
    std::atomic<std::uint64_t>* generations_;
    TableShape shape_;
    std::uint64_t entry_count_ = 0;
};

}  // namespace kvstore
