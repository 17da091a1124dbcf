#include "comeback.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace kvstore {
namespace {

constexpr double PRIOR_WEIGHT = 32;  // chunks
constexpr double PRIOR_DIVISOR = 32;
constexpr double RATIO_WEIGHT = 8;  // hits

double bucket_begin(unsigned bucket) {
    return std::ldexp(bucket % 2 == 0 ? 1.0 : 1.5, static_cast<int>(bucket / 2));
}

double bucket_width(unsigned bucket) {
    return bucket_begin(bucket + 1) - bucket_begin(bucket);
}

}  // namespace

unsigned use_class_of(std::uint32_t uses) {
    if (uses <= 1) return 0;
    return std::min(USE_CLASSES - 1, static_cast<unsigned>(std::bit_width(uses - 1)));
}

unsigned age_bucket_of(std::uint64_t age) {
    if (age <= 1) return 0;
    const auto octave = static_cast<unsigned>(std::bit_width(age)) - 1;
    const auto upper_half = static_cast<unsigned>(age >> (octave - 1)) & 1;
    return std::min(AGE_BUCKETS - 1, 2 * octave + upper_half);
}

Comeback::Comeback() {
    learn({});
}

void Comeback::halve() {
    for (unsigned c = 0; c < USE_CLASSES; ++c) {
        for (double& count : hits_[c]) count /= 2;
        for (double& count : gone_[c]) count /= 2;
    }
}

void Comeback::learn(const Counts<std::uint32_t>& live) {
    std::array<double, AGE_BUCKETS> prior;  // of the class below
    for (unsigned b = 0; b < AGE_BUCKETS; ++b) prior[b] = 1 / (PRIOR_DIVISOR * bucket_begin(b));
    for (unsigned c = 0; c < USE_CLASSES; ++c) {
        std::array<double, AGE_BUCKETS> exposure;  // ticks that chunks were of that age
        double older = 0, seen = RATIO_WEIGHT, expected = RATIO_WEIGHT;
        for (unsigned b = AGE_BUCKETS; b-- > 0;) {
            const double ended = hits_[c][b] + gone_[c][b] + live[c][b];
            exposure[b] = (older + ended / 2) * bucket_width(b);
            older += ended;
            seen += hits_[c][b];
            expected += exposure[b] * prior[b];
        }
        // What all ages of the class say says something of the ages at which too few were seen.
        const double ratio = seen / expected;
        std::array<double, AGE_BUCKETS> hazard;  // uses for each tick at that age
        std::array<double, AGE_BUCKETS> used;    // probability that it is used while of that age
        std::array<double, AGE_BUCKETS> held;    // ticks until then, or until it is older
        for (unsigned b = 0; b < AGE_BUCKETS; ++b) {
            const double weight = PRIOR_WEIGHT * bucket_width(b);
            hazard[b] = (hits_[c][b] + weight * ratio * prior[b]) / (exposure[b] + weight);
            used[b] = -std::expm1(-hazard[b] * bucket_width(b));
            held[b] = used[b] / hazard[b];
        }
        for (unsigned b = 0; b < AGE_BUCKETS; ++b) {
            double best = 0, waiting = 1, hits = 0, ticks = 0;
            for (unsigned end = b; end < AGE_BUCKETS; ++end) {
                hits += waiting * used[end];
                ticks += waiting * held[end];
                waiting *= 1 - used[end];
                best = std::max(best, hits / ticks);
            }
            ranks_[c][b] = best;
        }
        prior = hazard;
    }
}

}  // namespace kvstore
