#include "ghosts.h"

#include <bit>
#include <cassert>
#include <new>

namespace kvstore {

Ghosts::Ghosts(std::uint64_t count_max) {
    if (count_max == 0) return;
    const std::uint64_t buckets = std::bit_ceil(2 * count_max);
    mask_ = buckets - 1;
    buckets_.reset(static_cast<std::uint32_t*>(std::calloc(buckets, sizeof(std::uint32_t))));
    if (!buckets_) throw std::bad_alloc();
}

void Ghosts::add(const Digest& digest, const Uses& uses) {
    std::uint32_t number = free_;
    if (number != NONE) {
        free_ = at(number).in_bucket;
    } else {
        entries_.emplace_back();
        number = static_cast<std::uint32_t>(entries_.size());
    }
    at(number) = {digest, uses.last, uses.count, bucket(digest), newest_, NONE};
    bucket(digest) = number;
    (newest_ == NONE ? oldest_ : at(newest_).newer) = number;
    newest_ = number;
    ++size_;
}

std::optional<Uses> Ghosts::take(const Digest& digest) {
    if (size_ == 0) return std::nullopt;
    for (std::uint32_t number = bucket(digest); number != NONE; number = at(number).in_bucket) {
        if (at(number).digest == digest) return remove(number).uses;
    }
    return std::nullopt;
}

std::optional<Ghosts::Ghost> Ghosts::take_oldest() {
    if (size_ == 0) return std::nullopt;
    return remove(oldest_);
}

Ghosts::Ghost Ghosts::remove(std::uint32_t number) {
    Entry& entry = at(number);
    std::uint32_t* link = &bucket(entry.digest);
    while (*link != number) {
        assert(*link != NONE);
        link = &at(*link).in_bucket;
    }
    *link = entry.in_bucket;
    (entry.older == NONE ? oldest_ : at(entry.older).newer) = entry.newer;
    (entry.newer == NONE ? newest_ : at(entry.newer).older) = entry.older;
    entry.in_bucket = free_;
    free_ = number;
    --size_;
    return {entry.digest, {entry.last, entry.count}};
}

}  // namespace kvstore
