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
#include <unordered_set>
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

    // What a rule looks at, by set: a use class, or ORPHANS.
    std::optional<Leaf> oldest(unsigned set) const;
    std::optional<Leaf> newest(unsigned set) const;
    // The newest that was not used after this tick, which is few ticks ago: looks at each younger one.
    std::optional<Leaf> newest_until(unsigned set, std::uint64_t tick) const;
    std::uint64_t residents(unsigned use_class) const { return residents_[use_class]; }
    std::uint64_t residents() const;
    const std::set<Leaf>& of(unsigned set) const { return sets_[set]; }
    std::size_t leaf_count() const;
    // Of the leaf that was used least recently; 0: there is an orphan; none: there is no leaf.
    std::optional<std::uint64_t> oldest_tick() const;

    static constexpr unsigned ORPHANS = USE_CLASSES;
    static constexpr unsigned SETS = USE_CLASSES + 1;

  private:
    static constexpr std::uint8_t NOWHERE = UINT8_MAX;
    std::array<std::set<Leaf>, SETS> sets_;
    std::array<std::uint64_t, USE_CLASSES> residents_{};
};

// The same leaves while they are evicted in thought: less those that were taken, with the parents that become leaves
// for it, and one resident used once in the place of each that went. The leaves must not change meanwhile.
class LeavesInThought {
  public:
    // `until`: the only tick that `newest_until` will be asked about.
    LeavesInThought(const Leaves& leaves, std::uint64_t until);
    void take(const Leaf& leaf, unsigned set, unsigned use_class);
    void add(const Leaf& leaf, unsigned set) { added_[set].insert(leaf); }

    std::optional<Leaf> oldest(unsigned set) const;
    std::optional<Leaf> newest(unsigned set) const;
    std::optional<Leaf> newest_until(unsigned set, std::uint64_t tick) const;
    std::uint64_t residents(unsigned use_class) const { return residents_[use_class]; }
    std::uint64_t residents() const { return resident_count_; }

  private:
    // Of the leaves that are left: the oldest, and those after the newest and after the newest until that tick.
    struct Ends {
        std::set<Leaf>::const_iterator begin, end, end_until;
    };
    const Leaves& leaves_;
    std::uint64_t until_;
    std::unordered_set<std::uint32_t> taken_;
    std::array<Ends, Leaves::SETS> ends_;
    std::array<std::set<Leaf>, Leaves::SETS> added_;
    std::array<std::uint64_t, USE_CLASSES> residents_;
    std::uint64_t resident_count_;
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
    std::optional<Victim> victim(const LeavesInThought& leaves, std::uint64_t now) const;
    // What was used after this tick was used just now.
    std::uint64_t untouched_until(std::uint64_t resident_count, std::uint64_t now) const;
    // Where it comes in the order of victims of several size classes, or of no particular one, whatever else is there.
    Victim weigh(const Leaf& leaf, std::uint32_t uses, bool orphan, std::uint64_t now) const;

    std::uint64_t ghost_count() const { return ghosts_.size(); }
    std::vector<std::string> problems() const;

  private:
    double rank(const Leaf& leaf, unsigned use_class, std::uint64_t now) const;
    // `View`: Leaves or LeavesInThought, one rule for both.
    template <class View>
    std::optional<Victim> choose(const View& leaves, std::uint64_t now) const;
    template <class View>
    std::optional<Victim> least_rank(const View& leaves, std::uint64_t now) const;
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
