// Which chunk makes room: leaves in ordered sets, and a rule that says from which set, and which end, the next one
// goes.
//
// A leaf is a chunk that may be evicted: nobody holds it, and no resident chunk names it as its parent. The chunks of
// one size class are in one `Leaves`. `Policy` knows how every chunk was used, also of those that have gone (`Ghosts`),
// and compares. All rules let orphans (whose parent went before them) go first, the oldest first.
//
//     LRU        the least recently used leaf
//     PROBATION  the same, but chunks used once go before the others while they hold more than a twentieth
//     ADAPTIVE   the leaf from which the fewest hits are to be expected for each tick that it would go on being held;
//                docs/decisions/010-eviction-policy.md
//
// One thread, no clock: `now` is a tick, which rises with every chunk that a request refers to. Choosing takes
// O(log n); learning takes a fraction of a millisecond once in a thousand uses or more, and at first more often.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "comeback.h"
#include "digest.h"
#include "ghosts.h"

namespace kvstore {

enum class Rule : std::uint8_t { LRU, PROBATION, ADAPTIVE };

// std::invalid_argument for a name that is none.
Rule rule_named(const std::string& name);

struct Leaf {
    std::uint64_t tick;  // of its last use
    std::uint32_t record;
    auto operator<=>(const Leaf&) const = default;
};

class Leaves {
  public:
    // Where a chunk is listed, kept with the chunk.
    struct Place {
        std::set<Leaf>::iterator at{};
        std::uint8_t set = NOWHERE;
        bool listed() const { return set != NOWHERE; }
    };

    void list(Place& place, const Leaf& leaf, unsigned use_class, bool orphan);
    void unlist(Place& place);
    // Resident chunks, leaves or not.
    void arrive(unsigned use_class) { ++residents_[use_class]; }
    void leave(unsigned use_class) { --residents_[use_class]; }

    const std::set<Leaf>& of_class(unsigned use_class) const { return sets_[use_class]; }
    const std::set<Leaf>& orphans() const { return sets_[ORPHANS]; }
    std::uint64_t residents(unsigned use_class) const { return residents_[use_class]; }
    std::uint64_t residents() const;
    std::size_t leaf_count() const;
    void for_each_set(const auto& visit) const {
        for (const auto& set : sets_) visit(set);
    }
    // The next younger and the next older leaf of the same set.
    std::optional<Leaf> after(const Place& place) const;
    std::optional<Leaf> before(const Place& place) const;
    // Of the leaf that was used least recently, orphans aside; none: there is no other leaf.
    std::optional<unsigned> class_of_oldest() const;
    // The youngest leaf of a use class that was not used after this tick.
    std::optional<Leaf> youngest(unsigned use_class, std::uint64_t tick) const;
    // Of the leaf that was used least recently; 0: there is an orphan; none: there is no leaf.
    std::optional<std::uint64_t> oldest_tick() const;

  private:
    static constexpr unsigned ORPHANS = USE_CLASSES;
    static constexpr std::uint8_t NOWHERE = UINT8_MAX;
    std::array<std::set<Leaf>, USE_CLASSES + 1> sets_;
    std::array<std::uint64_t, USE_CLASSES> residents_{};
};

// The least one goes first.
struct Victim {
    bool parented;
    double rank;
    std::uint64_t tick;
    std::uint32_t record;
    bool operator<(const Victim& other) const {
        return std::tie(parented, rank, tick, record) < std::tie(other.parented, other.rank, other.tick, other.record);
    }
};

class Policy {
  public:
    // At most `chunks_max` chunks will be resident.
    Policy(Rule rule, std::uint64_t chunks_max);

    // Which set of `Leaves` a chunk belongs to.
    unsigned use_class(std::uint32_t uses) const;

    // That one of the calls below will name it soon.
    void prefetch(const Digest& digest) const { ghosts_.prefetch(digest); }
    // A chunk becomes resident; it goes on counting where it left off. `is_use`: because a request brought it.
    Uses arrived(const Digest& digest, std::uint64_t now, bool is_use);
    void used(const Digest& digest, Uses& uses, std::uint64_t now);
    // A request referred to a chunk that is not resident and will not be: a use all the same.
    void missed(const Digest& digest, std::uint64_t now);
    void evicted(const Digest& digest, const Uses& uses, std::uint64_t now);
    // Nothing of it is remembered.
    void removed(const Digest& digest, std::uint64_t now);

    std::optional<Victim> victim(const Leaves& leaves, std::uint64_t now) const;
    // `victim` takes a use class from its youngest end, too, but those used after this tick only where they are worth
    // clearly less; none: it does not.
    std::optional<std::uint64_t> young_end(const Leaves& leaves, std::uint64_t now) const;
    // Where it comes in the order of `victim`, of whatever size class, whatever else is there.
    Victim weigh(const Leaf& leaf, std::uint32_t uses, bool orphan, std::uint64_t now) const;

    std::uint64_t ghost_count() const { return ghosts_.size(); }
    std::vector<std::string> problems() const;

  private:
    double rank(const Leaf& leaf, unsigned use_class, std::uint64_t now) const;
    std::optional<Victim> least_rank(const Leaves& leaves, std::uint64_t now) const;
    std::uint64_t ghosts_max() const;
    void leave_ghost(const Digest& digest, const Uses& uses, std::uint64_t now);
    void forget_surplus(std::uint64_t now);
    bool is_sampled(const Digest& digest) const { return digest.hi < sample_bound_; }
    void sample(const Digest& digest, const Uses& uses);
    void learn_if_due(std::uint64_t now);

    Rule rule_;
    std::uint64_t resident_count_ = 0;
    Ghosts ghosts_;  // of LRU: empty

    struct HashOfDigest {
        std::size_t operator()(const Digest& digest) const { return digest.lo; }
    };
    // Of ADAPTIVE only: how the tracked chunks were used, resident or ghosts, whose digest is below the bound.
    std::unordered_map<Digest, Uses, HashOfDigest> sample_;
    std::uint64_t sample_bound_ = UINT64_MAX;
    Comeback comeback_;
    std::uint64_t learn_at_ = 0;
    std::uint64_t halve_at_ = 0;
};

}  // namespace kvstore
