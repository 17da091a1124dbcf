// How likely a chunk is to be used again, by how often it was used and how long ago: counted, and turned into a rank.
//
// Time is counted in ticks, one for each chunk that a request refers to. docs/decisions/010-eviction-policy.md has the
// equations. Pure; one thread.
#pragma once

#include <array>
#include <cstdint>

namespace kvstore {

inline constexpr unsigned USE_CLASSES = 8;  // used once, twice, 3-4, 5-8, ... 65 and more times
inline constexpr unsigned AGE_BUCKETS = 63;

unsigned use_class_of(std::uint32_t uses);
// Half octaves: from 1, 1.5, 2, 3, 4, 6, 8, ... ticks on.
unsigned age_bucket_of(std::uint64_t age);

class Comeback {
  public:
    template <typename T>
    using Counts = std::array<std::array<T, AGE_BUCKETS>, USE_CLASSES>;

    Comeback();

    // A chunk was used again at that age; `use_class` as of before.
    void hit(unsigned use_class, std::uint64_t age) { hits_[use_class][age_bucket_of(age)] += 1; }
    // A chunk was forgotten at that age.
    void gone(unsigned use_class, std::uint64_t age) { gone_[use_class][age_bucket_of(age)] += 1; }
    void halve();
    // `live`: of those still waited for, how many have which age.
    void learn(const Counts<std::uint32_t>& live);

    // The most hits for each tick of holding it that such a chunk can still give.
    double rank(unsigned use_class, std::uint64_t age) const { return ranks_[use_class][age_bucket_of(age)]; }

  private:
    Counts<double> hits_{};
    Counts<double> gone_{};
    Counts<double> ranks_{};
};

}  // namespace kvstore
