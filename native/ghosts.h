// What is remembered of chunks that are not resident: when and how often each was used, in the order of forgetting.
//
// One thread. Every call takes constant time; memory is 40 bytes an entry and 8 for each that is allowed at most.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>

#include "blocks.h"
#include "digest.h"

namespace kvstore {

// One request is one use of each chunk of its chain.
struct Uses {
    std::uint64_t last = 0;  // tick of the last use
    std::uint32_t count = 0;
};

class Ghosts {
  public:
    struct Ghost {
        Digest digest;
        Uses uses;
    };

    // More than `count_max` work, too, but slowly. 0: none will be kept.
    explicit Ghosts(std::uint64_t count_max);

    // That it will be asked for, or added, soon.
    void prefetch(const Digest& digest) const {
        if (buckets_) __builtin_prefetch(&buckets_.get()[digest.lo & mask_]);
    }
    // As the newest. The digest must not be there.
    void add(const Digest& digest, const Uses& uses);
    std::optional<Uses> take(const Digest& digest);
    std::optional<Ghost> take_oldest();
    std::uint64_t size() const { return size_; }

  private:
    static constexpr std::uint32_t NONE = 0;  // entries are numbered from 1, so that fresh memory says that
    struct Entry {
        Digest digest;
        std::uint64_t last;
        std::uint32_t count;
        std::uint32_t in_bucket;  // the next one of the bucket, or of the free list
        std::uint32_t older;
        std::uint32_t newer;
    };
    Entry& at(std::uint32_t number) { return entries_[number - 1]; }
    std::uint32_t& bucket(const Digest& digest) { return buckets_.get()[digest.lo & mask_]; }
    Ghost remove(std::uint32_t number);

    struct Free {
        void operator()(std::uint32_t* memory) const { std::free(memory); }
    };
    std::uint64_t mask_ = 0;
    std::unique_ptr<std::uint32_t, Free> buckets_;  // taken page by page as they fill: growing would be a pause
    Blocks<Entry> entries_;
    std::uint32_t free_ = NONE;
    std::uint32_t oldest_ = NONE;
    std::uint32_t newest_ = NONE;
    std::uint64_t size_ = 0;
};

}  // namespace kvstore
