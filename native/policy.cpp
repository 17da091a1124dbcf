#include "policy.h"

#include <algorithm>
#include <cassert>
#include <iterator>
#include <stdexcept>

namespace kvstore {
namespace {

constexpr std::uint64_t PROBATION_SHARE = 20;
constexpr std::uint64_t GHOSTS_PER_CHUNK = 2;
constexpr std::uint64_t GHOSTS_MIN = 65'536;
constexpr std::size_t SAMPLE_MAX = 4'096;
// At first after a sixteenth more ticks than there were; in the long run after a quarter of the tracked chunks.
constexpr std::uint64_t LEARN_TICKS_MIN = 128;
constexpr std::uint64_t LEARN_SOON_SHARE = 16;
constexpr std::uint64_t LEARN_TICKS = 1'024;
constexpr std::uint64_t LEARN_SHARE = 4;
constexpr std::uint64_t HALVE_PERIODS = 4;  // after as many ticks as four times what can be tracked
constexpr std::uint64_t UNTOUCHED_TICKS_MAX = 16;
constexpr std::uint64_t UNTOUCHED_SHARE = 64;
constexpr double JUST_TOUCHED_WEIGHT = 2;       // of the rank of what was touched within these ticks
constexpr double LONGEST_UNUSED_WEIGHT = 0.75;  // of the ranks of the class that holds the leaf unused for longest

}  // namespace

Rule rule_named(const std::string& name) {
    if (name == "lru") return Rule::LRU;
    if (name == "probation") return Rule::PROBATION;
    if (name == "adaptive") return Rule::ADAPTIVE;
    throw std::invalid_argument("eviction policy '" + name + "' is none of lru, probation and adaptive");
}

// ---- Leaves ----

void Leaves::list(Place& place, const Leaf& leaf, unsigned use_class, bool orphan) {
    assert(!place.listed());
    const unsigned set = orphan ? ORPHANS : use_class;
    place.at = sets_[set].insert(sets_[set].end(), leaf);  // most were used just now
    place.set = static_cast<std::uint8_t>(set);
}

void Leaves::unlist(Place& place) {
    if (!place.listed()) return;
    sets_[place.set].erase(place.at);
    place = Place{};
}

std::uint64_t Leaves::residents() const {
    std::uint64_t count = 0;
    for (const std::uint64_t residents : residents_) count += residents;
    return count;
}

std::size_t Leaves::leaf_count() const {
    std::size_t count = 0;
    for (const auto& set : sets_) count += set.size();
    return count;
}

std::optional<Leaf> Leaves::after(const Place& place) const {
    const auto next = std::next(place.at);
    if (next == sets_[place.set].end()) return std::nullopt;
    return *next;
}

std::optional<Leaf> Leaves::before(const Place& place) const {
    if (place.at == sets_[place.set].begin()) return std::nullopt;
    return *std::prev(place.at);
}

std::optional<Leaf> Leaves::youngest(unsigned use_class, std::uint64_t tick) const {
    const auto& set = sets_[use_class];
    const auto beyond = set.upper_bound(Leaf{tick, UINT32_MAX});
    if (beyond == set.begin()) return std::nullopt;
    return *std::prev(beyond);
}

std::optional<unsigned> Leaves::class_of_oldest() const {
    std::optional<unsigned> found;
    for (unsigned c = 0; c < USE_CLASSES; ++c) {
        if (sets_[c].empty()) continue;
        if (!found || *sets_[c].begin() < *sets_[*found].begin()) found = c;
    }
    return found;
}

std::optional<std::uint64_t> Leaves::oldest_tick() const {
    if (!orphans().empty()) return 0;
    const auto its_class = class_of_oldest();
    if (!its_class) return std::nullopt;
    return sets_[*its_class].begin()->tick;
}

// ---- Policy: how chunks were used ----

Policy::Policy(Rule rule, std::uint64_t chunks_max)
    : rule_(rule), ghosts_(rule == Rule::LRU ? 0 : std::max(GHOSTS_PER_CHUNK * chunks_max, GHOSTS_MIN)) {}

unsigned Policy::use_class(std::uint32_t uses) const {
    switch (rule_) {
        case Rule::LRU:
            return 0;
        case Rule::PROBATION:
            return uses > 1 ? 1 : 0;
        case Rule::ADAPTIVE:
            return use_class_of(uses);
    }
    return 0;
}

Uses Policy::arrived(const Digest& digest, std::uint64_t now, bool is_use) {
    ++resident_count_;
    Uses uses = ghosts_.take(digest).value_or(Uses{now, 0});
    if (is_use) {
        used(digest, uses, now);
    } else {
        sample(digest, uses);
    }
    return uses;
}

void Policy::used(const Digest& digest, Uses& uses, std::uint64_t now) {
    if (rule_ == Rule::ADAPTIVE && uses.count > 0 && is_sampled(digest)) {
        comeback_.hit(use_class_of(uses.count), now - uses.last);
    }
    if (uses.count < UINT32_MAX) ++uses.count;
    uses.last = now;
    sample(digest, uses);
    learn_if_due(now);
}

void Policy::missed(const Digest& digest, std::uint64_t now) {
    if (rule_ == Rule::LRU) return;
    Uses uses = ghosts_.take(digest).value_or(Uses{now, 0});
    used(digest, uses, now);
    leave_ghost(digest, uses, now);
}

void Policy::evicted(const Digest& digest, const Uses& uses, std::uint64_t now) {
    --resident_count_;
    if (rule_ != Rule::LRU) leave_ghost(digest, uses, now);
}

void Policy::removed(const Digest& digest, std::uint64_t now) {
    --resident_count_;
    sample_.erase(digest);
    forget_surplus(now);
}

std::uint64_t Policy::ghosts_max() const {
    return std::max(GHOSTS_PER_CHUNK * resident_count_, GHOSTS_MIN);
}

void Policy::leave_ghost(const Digest& digest, const Uses& uses, std::uint64_t now) {
    ghosts_.add(digest, uses);
    forget_surplus(now);
}

void Policy::forget_surplus(std::uint64_t now) {
    while (ghosts_.size() > ghosts_max()) {  // few: the most changes by two for each chunk that goes
        const auto ghost = ghosts_.take_oldest();
        if (rule_ != Rule::ADAPTIVE || !is_sampled(ghost->digest)) continue;
        comeback_.gone(use_class_of(ghost->uses.count), now - ghost->uses.last);
        sample_.erase(ghost->digest);
    }
}

void Policy::sample(const Digest& digest, const Uses& uses) {
    if (rule_ != Rule::ADAPTIVE || !is_sampled(digest)) return;
    sample_[digest] = uses;
    if (sample_.size() <= SAMPLE_MAX) return;
    sample_bound_ /= 2;
    std::erase_if(sample_, [this](const auto& sampled) { return !is_sampled(sampled.first); });
    comeback_.halve();
}

void Policy::learn_if_due(std::uint64_t now) {
    if (rule_ != Rule::ADAPTIVE || now < learn_at_) return;
    const std::uint64_t tracked = resident_count_ + ghosts_.size();
    learn_at_ = now + std::clamp(now / LEARN_SOON_SHARE, LEARN_TICKS_MIN, std::max(LEARN_TICKS, tracked / LEARN_SHARE));
    Comeback::Counts<std::uint32_t> live{};
    for (const auto& [digest, uses] : sample_) {
        ++live[use_class_of(uses.count)][age_bucket_of(now - uses.last)];
    }
    comeback_.learn(live);
    if (now < halve_at_) return;
    if (halve_at_ > 0) comeback_.halve();
    halve_at_ = now + HALVE_PERIODS * (resident_count_ + ghosts_max());
}

// ---- Policy: who goes ----

std::optional<Victim> Policy::victim(const Leaves& leaves, std::uint64_t now) const {
    if (!leaves.orphans().empty()) {
        const Leaf& oldest = *leaves.orphans().begin();
        return Victim{false, 0, oldest.tick, oldest.record};
    }
    switch (rule_) {
        case Rule::LRU:
            return least_rank(leaves, now);
        case Rule::PROBATION: {
            const bool crowded = leaves.residents(0) * PROBATION_SHARE > leaves.residents();
            for (const unsigned c : {crowded ? 0U : 1U, crowded ? 1U : 0U}) {
                if (leaves.of_class(c).empty()) continue;
                const Leaf& oldest = *leaves.of_class(c).begin();
                return Victim{true, static_cast<double>(c), oldest.tick, oldest.record};
            }
            return std::nullopt;
        }
        case Rule::ADAPTIVE:
            return least_rank(leaves, now);
    }
    return std::nullopt;
}

std::optional<std::uint64_t> Policy::young_end(const Leaves& leaves, std::uint64_t now) const {
    if (rule_ != Rule::ADAPTIVE) return std::nullopt;
    const auto untouched_for = std::clamp<std::uint64_t>(leaves.residents() / UNTOUCHED_SHARE, 1, UNTOUCHED_TICKS_MAX);
    return now - std::min(now, untouched_for);
}

// Of each use class the least and the most recently used leaf, and the most recently used one of those not used just
// now. What was learned is not exact. So one of the class in which LRU would evict goes, unless another class is worth
// clearly less; and what was used just now goes only if it is worth clearly less than all others.
std::optional<Victim> Policy::least_rank(const Leaves& leaves, std::uint64_t now) const {
    const auto longest_unused = leaves.class_of_oldest();
    if (!longest_unused) return std::nullopt;
    const std::uint64_t just_now = young_end(leaves, now).value_or(now);
    std::optional<Victim> least;
    const auto consider = [&](const Leaf& leaf, unsigned use_class) {
        Victim candidate{true, rank(leaf, use_class, now), leaf.tick, leaf.record};
        if (leaf.tick > just_now) candidate.rank *= JUST_TOUCHED_WEIGHT;
        if (use_class == *longest_unused) candidate.rank *= LONGEST_UNUSED_WEIGHT;
        if (!least || candidate < *least) least = candidate;
    };
    for (unsigned c = 0; c < USE_CLASSES; ++c) {
        const std::set<Leaf>& set = leaves.of_class(c);
        if (set.empty()) continue;
        consider(*set.begin(), c);
        if (rule_ == Rule::LRU) continue;
        auto newest = std::prev(set.end());
        consider(*newest, c);
        while (newest->tick > just_now && newest != set.begin()) --newest;  // at most one leaf for each of those ticks
        consider(*newest, c);
    }
    return least;
}

double Policy::rank(const Leaf& leaf, unsigned use_class, std::uint64_t now) const {
    switch (rule_) {
        case Rule::LRU:
            return 0;
        case Rule::PROBATION:
            return use_class;
        case Rule::ADAPTIVE:
            return comeback_.rank(use_class, now - leaf.tick);
    }
    return 0;
}

Victim Policy::weigh(const Leaf& leaf, std::uint32_t uses, bool orphan, std::uint64_t now) const {
    return {!orphan, orphan ? 0 : rank(leaf, use_class(uses), now), leaf.tick, leaf.record};
}

std::vector<std::string> Policy::problems() const {
    std::vector<std::string> problems;
    if (ghosts_.size() > ghosts_max()) {
        problems.push_back(std::to_string(ghosts_.size()) + " chunks that have gone are remembered, more than " +
                           std::to_string(ghosts_max()));
    }
    if (sample_.size() > SAMPLE_MAX) problems.push_back("the sample has " + std::to_string(sample_.size()) + " chunks");
    return problems;
}

}  // namespace kvstore
