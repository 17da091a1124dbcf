#include "table.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace kvstore {
namespace {

constexpr std::uint64_t BUCKETS_MIN = PROBES_MAX;  // so that a probe meets no bucket twice
constexpr std::uint64_t TABLE_BYTES_MAX = std::uint64_t{1} << 46;
constexpr std::size_t PREFETCH_KEYS = 64;
constexpr long LOOK_NS = 10'000;

// Multiply and shift: any bucket count, no division.
std::uint64_t home_of(const Digest& digest, std::uint64_t bucket_count) {
    return static_cast<std::uint64_t>((static_cast<unsigned __int128>(digest.lo) * bucket_count) >> 64);
}

std::uint64_t location_word(Where where, std::uint32_t slot) {
    return (static_cast<std::uint64_t>(where) << 32) | slot;
}

Where where_of(std::uint64_t location) {
    return static_cast<Where>(location >> 32);
}

// The writer is in the bucket for as long as this lives. Odd, then a release fence, so that no word written inside can
// be seen before the odd number; the even number is a release, so that it can not be seen before them.
class BucketWrite {
  public:
    explicit BucketWrite(Bucket& bucket) : bucket_(bucket), before_(bucket.sequence.load(std::memory_order_relaxed)) {
        assert(before_ % 2 == 0);
        bucket_.sequence.store(before_ + 1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
    }
    ~BucketWrite() { bucket_.sequence.store(before_ + 2, std::memory_order_release); }
    BucketWrite(const BucketWrite&) = delete;
    BucketWrite& operator=(const BucketWrite&) = delete;

  private:
    Bucket& bucket_;
    std::uint64_t before_;
};

void set(std::atomic<std::uint64_t>& word, std::uint64_t value) {
    word.store(value, std::memory_order_relaxed);
}
std::uint64_t get(const std::atomic<std::uint64_t>& word) {
    return word.load(std::memory_order_relaxed);
}

void check_arena(std::uint64_t arena_bytes, std::uint64_t unit_bytes) {
    if (arena_bytes == 0 || unit_bytes == 0 || unit_bytes % SLOT_ALIGNMENT != 0) {
        throw std::invalid_argument("an arena of " + std::to_string(arena_bytes) + " bytes in units of " +
                                    std::to_string(unit_bytes) + ": units are multiples of 4096 bytes");
    }
    if (arena_bytes > (std::uint64_t{1} << 43) || unit_bytes > (std::uint64_t{1} << 43)) {
        throw std::invalid_argument("an arena of " + std::to_string(arena_bytes) + " bytes: 8 TiB is the most");
    }
}

}  // namespace

std::uint64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(now.tv_nsec);
}

TableShape TableShape::for_entries(std::uint64_t entries, std::uint64_t arena_bytes, std::uint64_t unit_bytes) {
    check_arena(arena_bytes, unit_bytes);
    if (entries >= NO_RECORD) throw std::invalid_argument("a table of " + std::to_string(entries) + " entries");
    // Half of the places stay empty, so that nearly every entry lies in its home bucket.
    const std::uint64_t buckets = (2 * entries + PLACES_PER_BUCKET - 1) / PLACES_PER_BUCKET;
    return {arena_bytes, unit_bytes, std::max(buckets, BUCKETS_MIN)};
}

TableShape TableShape::for_bytes(std::uint64_t table_bytes, std::uint64_t arena_bytes, std::uint64_t unit_bytes) {
    check_arena(arena_bytes, unit_bytes);
    TableShape shape{arena_bytes, unit_bytes, BUCKETS_MIN};
    if (table_bytes < shape.table_bytes() || table_bytes > TABLE_BYTES_MAX) {
        throw std::invalid_argument("a table of " + std::to_string(table_bytes) + " bytes for an arena of " +
                                    std::to_string(arena_bytes) + ": at least " + std::to_string(shape.table_bytes()) +
                                    " are needed");
    }
    const std::uint64_t generation_bytes = shape.generation_count() * sizeof(std::uint64_t);
    shape.bucket_count = (table_bytes - shape.buckets_offset() - generation_bytes) / sizeof(Bucket);
    while (shape.table_bytes() > table_bytes) --shape.bucket_count;  // the generations begin on a page of their own
    return shape;
}

std::uint64_t TableShape::generation_count() const {
    const std::uint64_t units = (arena_bytes + unit_bytes - 1) / unit_bytes;
    return units * (unit_bytes / SLOT_ALIGNMENT);
}

std::uint64_t TableShape::generations_offset() const {
    const std::uint64_t end = buckets_offset() + bucket_count * sizeof(Bucket);
    return (end + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
}

std::uint64_t TableShape::table_bytes() const {
    return generations_offset() + generation_count() * sizeof(std::uint64_t);
}

TableReader::TableReader(const std::byte* memory, std::size_t nbytes) {
    if (nbytes < SLOT_ALIGNMENT) {
        throw std::invalid_argument("not a table: a memory of " + std::to_string(nbytes) + " bytes");
    }
    header_ = reinterpret_cast<const Header*>(memory);
    if (header_->magic != TABLE_MAGIC) throw std::invalid_argument("not a table: its first word is not a table's");
    if (header_->version != TABLE_VERSION) {
        throw std::invalid_argument("a table of format " + std::to_string(header_->version) +
                                    ", but this process reads " + std::to_string(TABLE_VERSION) +
                                    ": run one version of kvstore on the node");
    }
    shape_ = {header_->arena_bytes, header_->unit_bytes, header_->bucket_count};
    check_arena(shape_.arena_bytes, shape_.unit_bytes);
    if (shape_.bucket_count < BUCKETS_MIN || shape_.bucket_count > TABLE_BYTES_MAX / sizeof(Bucket) ||
        header_->buckets_offset != shape_.buckets_offset() ||
        header_->generations_offset != shape_.generations_offset() ||
        header_->generation_count != shape_.generation_count() || shape_.table_bytes() > nbytes) {
        throw std::invalid_argument("not a table: its header does not fit a memory of " + std::to_string(nbytes) +
                                    " bytes");
    }
    instance_id_ = header_->instance_id;
    buckets_ = reinterpret_cast<const Bucket*>(memory + shape_.buckets_offset());
    generations_ = reinterpret_cast<const std::atomic<std::uint64_t>*>(memory + shape_.generations_offset());
}

std::uint64_t TableReader::home(const Digest& digest) const {
    return home_of(digest, shape_.bucket_count);
}

TableReader::Step TableReader::read(const Bucket& bucket, const Digest& digest, Found& found) const {
    for (int attempt = 0; attempt < READ_TRIES_MAX; ++attempt) {
        const std::uint64_t sequence = bucket.sequence.load(std::memory_order_acquire);
        if (sequence % 2 != 0) continue;
        Found candidate;
        for (std::uint32_t i = 0; i < PLACES_PER_BUCKET; ++i) {
            if (get(bucket.digest_lo[i]) != digest.lo || get(bucket.digest_hi[i]) != digest.hi) continue;
            const std::uint64_t location = get(bucket.location[i]);
            if (location == 0) continue;
            candidate = {where_of(location), {static_cast<std::uint32_t>(location), get(bucket.generation[i])}};
        }
        const std::uint32_t displaced = bucket.displaced.load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_acquire);
        if (bucket.sequence.load(std::memory_order_relaxed) != sequence) continue;
        if (candidate.where != Where::MISS) {
            found = candidate;
            return Step::FOUND;
        }
        return displaced == 0 ? Step::END : Step::NEXT;
    }
    return Step::END;  // a writer that died in here, or one that is too busy: a miss costs a recompute, waiting costs
                       // more
}

Found TableReader::find(const Digest& digest) const {
    Found found;
    std::uint64_t bucket = home(digest);
    for (std::uint32_t probe = 0; probe < PROBES_MAX; ++probe) {
        if (read(buckets_[bucket], digest, found) != Step::NEXT) break;
        bucket = bucket + 1 == shape_.bucket_count ? 0 : bucket + 1;
    }
    return found;
}

void TableReader::find_all(const Hasher& hasher, std::span<const Bytes> keys, std::span<Found> found) const {
    assert(keys.size() == found.size());
    Digest digests[PREFETCH_KEYS];
    for (std::size_t begin = 0; begin < keys.size(); begin += PREFETCH_KEYS) {
        const std::size_t count = std::min(PREFETCH_KEYS, keys.size() - begin);
        for (std::size_t i = 0; i < count; ++i) {
            digests[i] = hasher(keys[begin + i]);
            const auto* bucket = reinterpret_cast<const char*>(&buckets_[home(digests[i])]);
            __builtin_prefetch(bucket);
            __builtin_prefetch(bucket + 64);
        }
        for (std::size_t i = 0; i < count; ++i) found[begin + i] = find(digests[i]);
    }
}

bool TableReader::wait_shown(const Digest& digest, Ref at, double timeout_s) const {
    // A thread that sleeps is woken up to so much later than it wants: 50 us where nobody says anything else.
    const int slack = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, 1UL);
    const timespec pause{0, LOOK_NS};
    const std::uint64_t end = monotonic_ns() + static_cast<std::uint64_t>(timeout_s * 1e9);
    Found found = find(digest);
    while ((found.where != Where::CPU || found.at != at) && monotonic_ns() < end) {
        nanosleep(&pause, nullptr);
        found = find(digest);
    }
    prctl(PR_SET_TIMERSLACK, slack > 0 ? static_cast<unsigned long>(slack) : 0UL);
    return found.where == Where::CPU && found.at == at;
}

void TableReader::current(std::span<const std::uint32_t> slots, std::span<const std::uint64_t> generations,
                          std::span<std::uint8_t> answers) const {
    assert(slots.size() == generations.size() && slots.size() == answers.size());
#if defined(__x86_64__)
    _mm_lfence();  // an acquire fence alone does not wait for weakly ordered (non-temporal) loads
#endif
    std::atomic_thread_fence(std::memory_order_acquire);
    const std::uint64_t count = shape_.generation_count();
    for (std::size_t i = 0; i < slots.size(); ++i) {
        answers[i] = slots[i] < count && get(generations_[slots[i]]) == generations[i] ? 1 : 0;
    }
}

TableWriter::TableWriter(std::byte* memory, const TableShape& shape, const Id& instance_id) : shape_(shape) {
    if (reinterpret_cast<const Header*>(memory)->magic != 0) {
        throw std::invalid_argument("the memory holds a table already: a table begins in fresh memory");
    }
    populate(reinterpret_cast<std::uintptr_t>(memory), shape.generations_offset());
    header_ = new (memory) Header{};
    header_->version = TABLE_VERSION;
    header_->instance_id = instance_id;
    header_->arena_bytes = shape.arena_bytes;
    header_->unit_bytes = shape.unit_bytes;
    header_->bucket_count = shape.bucket_count;
    header_->buckets_offset = shape.buckets_offset();
    header_->generations_offset = shape.generations_offset();
    header_->generation_count = shape.generation_count();
    header_->magic = TABLE_MAGIC;
    // Zero bytes are valid empty buckets and generations; writing them all would only take memory.
    buckets_ = reinterpret_cast<Bucket*>(memory + shape.buckets_offset());
    generations_ = reinterpret_cast<std::atomic<std::uint64_t>*>(memory + shape.generations_offset());
}

std::uint64_t TableWriter::home(const Digest& digest) const {
    return home_of(digest, shape_.bucket_count);
}

std::optional<TableWriter::Place> TableWriter::place_of(const Digest& digest) const {
    std::uint64_t at = home(digest);
    for (std::uint32_t probe = 0; probe < PROBES_MAX; ++probe) {
        const Bucket& bucket = buckets_[at];
        for (std::uint32_t i = 0; i < PLACES_PER_BUCKET; ++i) {
            if (get(bucket.digest_lo[i]) == digest.lo && get(bucket.digest_hi[i]) == digest.hi &&
                get(bucket.location[i]) != 0) {
                return Place{at, i};
            }
        }
        if (bucket.displaced.load(std::memory_order_relaxed) == 0) break;
        at = next(at);
    }
    return std::nullopt;
}

void TableWriter::prefetch(const Digest& digest) const {
    const auto* bucket = reinterpret_cast<const char*>(&buckets_[home(digest)]);
    __builtin_prefetch(bucket);
    __builtin_prefetch(bucket + 64);
}

std::uint32_t TableWriter::find(const Digest& digest) const {
    const auto place = place_of(digest);
    return place ? buckets_[place->bucket].record[place->index].load(std::memory_order_relaxed) : NO_RECORD;
}

std::vector<std::uint32_t> TableWriter::within_reach(const Digest& digest) const {
    std::vector<std::uint32_t> records;
    std::uint64_t at = home(digest);
    for (std::uint32_t probe = 0; probe < PROBES_MAX; ++probe, at = next(at)) {
        for (std::uint32_t i = 0; i < PLACES_PER_BUCKET; ++i) {
            if (get(buckets_[at].location[i]) == 0) continue;
            records.push_back(buckets_[at].record[i].load(std::memory_order_relaxed));
        }
    }
    return records;
}

bool TableWriter::insert(const Digest& digest, Where where, Ref at, std::uint32_t record) {
    assert(where != Where::MISS && !place_of(digest));
    const std::uint64_t first = home(digest);
    std::uint64_t target = first;
    std::uint32_t index = PLACES_PER_BUCKET;
    for (std::uint32_t probe = 0; probe < PROBES_MAX; ++probe) {
        for (index = 0; index < PLACES_PER_BUCKET && get(buckets_[target].location[index]) != 0;) ++index;
        if (index < PLACES_PER_BUCKET) break;
        target = next(target);
    }
    if (index == PLACES_PER_BUCKET) return false;
    for (std::uint64_t passed = first; passed != target; passed = next(passed)) {
        BucketWrite write(buckets_[passed]);
        buckets_[passed].displaced.fetch_add(1, std::memory_order_relaxed);
    }
    Bucket& bucket = buckets_[target];
    BucketWrite write(bucket);
    set(bucket.digest_lo[index], digest.lo);
    set(bucket.digest_hi[index], digest.hi);
    set(bucket.generation[index], at.generation);
    bucket.record[index].store(record, std::memory_order_relaxed);
    set(bucket.location[index], location_word(where, at.slot));
    ++entry_count_;
    return true;
}

void TableWriter::erase(const Digest& digest) {
    const auto place = place_of(digest);
    assert(place && "erasing what is not there");
    {
        Bucket& bucket = buckets_[place->bucket];
        BucketWrite write(bucket);
        set(bucket.location[place->index], 0);
        set(bucket.digest_lo[place->index], 0);
        set(bucket.digest_hi[place->index], 0);
        set(bucket.generation[place->index], 0);
        bucket.record[place->index].store(0, std::memory_order_relaxed);
    }
    for (std::uint64_t passed = home(digest); passed != place->bucket; passed = next(passed)) {
        BucketWrite write(buckets_[passed]);
        buckets_[passed].displaced.fetch_sub(1, std::memory_order_relaxed);
    }
    --entry_count_;
}

bool TableWriter::erase_unrecorded_near(const Digest& digest) {
    std::uint64_t at = home(digest);
    for (std::uint32_t probe = 0; probe < PROBES_MAX; ++probe, at = next(at)) {
        const Bucket& bucket = buckets_[at];
        for (std::uint32_t i = 0; i < PLACES_PER_BUCKET; ++i) {
            if (get(bucket.location[i]) == 0 || bucket.record[i].load(std::memory_order_relaxed) != NO_RECORD) continue;
            erase({get(bucket.digest_lo[i]), get(bucket.digest_hi[i])});
            return true;
        }
    }
    return false;
}

Where TableWriter::where(const Digest& digest) const {
    const auto place = place_of(digest);
    return place ? where_of(get(buckets_[place->bucket].location[place->index])) : Where::MISS;
}

void TableWriter::change(const Digest& digest, Where where) {
    const auto place = place_of(digest);
    assert(place && where != Where::MISS && where != Where::CPU);
    Bucket& bucket = buckets_[place->bucket];
    BucketWrite write(bucket);
    set(bucket.location[place->index], location_word(where, 0));
}

std::uint64_t TableWriter::raise_generation(std::uint32_t slot) {
    assert(slot < shape_.generation_count());
    const std::uint64_t raised = get(generations_[slot]) + 1;
    set(generations_[slot], raised);
    return raised;
}

std::vector<std::string> TableWriter::problems() const {
    std::vector<std::string> problems;
    std::vector<std::uint32_t> displaced(shape_.bucket_count, 0);
    std::uint64_t entries = 0;
    for (std::uint64_t at = 0; at < shape_.bucket_count; ++at) {
        const Bucket& bucket = buckets_[at];
        if (get(bucket.sequence) % 2 != 0) problems.push_back("bucket " + std::to_string(at) + " is being written");
        for (std::uint32_t i = 0; i < PLACES_PER_BUCKET; ++i) {
            if (get(bucket.location[i]) == 0) continue;
            ++entries;
            std::uint64_t from = home({get(bucket.digest_lo[i]), get(bucket.digest_hi[i])});
            std::uint32_t steps = 0;
            for (; from != at && steps < PROBES_MAX; from = next(from), ++steps) ++displaced[from];
            if (steps == PROBES_MAX) {
                problems.push_back("an entry in bucket " + std::to_string(at) + " is out of its probe's reach");
            }
        }
    }
    for (std::uint64_t at = 0; at < shape_.bucket_count; ++at) {
        const std::uint32_t says = buckets_[at].displaced.load(std::memory_order_relaxed);
        if (says != displaced[at]) {
            problems.push_back("bucket " + std::to_string(at) + " says that " + std::to_string(says) +
                               " entries passed it, but " + std::to_string(displaced[at]) + " did");
        }
    }
    if (entries != entry_count_) {
        problems.push_back("the table holds " + std::to_string(entries) + " entries, but " +
                           std::to_string(entry_count_) + " were counted");
    }
    return problems;
}

}  // namespace kvstore
