// Which bytes of the arena are slots of which size, and which of them nobody holds.
//
// The arena is cut into units. A slab is a run of consecutive units that serves one size class (a chunk size rounded up
// to 4 KiB); a slab gets its class when that class needs room, and loses it when another class needs the room more. The
// run's length is chosen per class so that the arena holds nearly as many chunks as its bytes allow. A slot's number is
// first unit * slots per unit + its place in the slab, so that whoever knows the class can compute the address.
//
// One thread. Pure: no memory is touched here.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvstore {

inline constexpr std::size_t SIZE_CLASSES_MAX = 32;
// A free list no longer than this is used up only when no new slab is to be had: a slot that was just freed may still
// be read by a load that began before.
inline constexpr std::size_t FREE_SLOTS_RESTING = 8;

std::uint64_t unit_bytes_for(std::uint64_t arena_bytes);
// std::invalid_argument when slot * 4096 is not inside a memory that 64 bits can address.
std::uint64_t slot_offset(std::uint32_t slot, std::uint64_t class_bytes, std::uint64_t unit_bytes);

struct Slot {
    enum class Holder : std::uint8_t { NOBODY, GROUP, CHUNK, IO };  // IO: its chunk was removed while it was read
    Holder holder = Holder::NOBODY;
    std::uint32_t epoch = 0;  // of a grant: removals that had begun before it
    std::uint64_t owner = 0;  // group number, record number, or how many reads run
};

struct Slab {
    std::uint64_t class_bytes = 0;
    std::uint32_t first_unit = 0;
    std::uint32_t units = 0;
    std::uint32_t carved = 0;  // slots below this were handed out at least once
    std::vector<Slot> slots;
    // What the index knows of the slots, for the choice of the slab that changes its class.
    std::uint32_t granted = 0;
    std::uint32_t held = 0;    // chunks with a lease, and slots with I/O
    std::uint64_t newest = 0;  // tick of the last use of any chunk in here; 0: there is none
    bool newest_known = true;  // false: that chunk has gone, and `newest` is too high
};

// Units that could become one slab, and the tick of the newest chunk that would go.
struct Window {
    std::uint32_t first_unit;
    std::uint32_t units;
    std::uint64_t newest;
};

class Slabs {
  public:
    Slabs(std::uint64_t arena_bytes, std::uint64_t unit_bytes);
    Slabs(const Slabs&) = delete;
    Slabs& operator=(const Slabs&) = delete;

    // std::invalid_argument: larger than the arena, or one class too many.
    void require_class(std::uint64_t class_bytes);
    // A slot that nobody holds, oldest first; its class must be known. The caller sets its holder.
    std::optional<std::uint32_t> take(std::uint64_t class_bytes);
    // The slot's holder becomes NOBODY; it is handed out again after all that were free before it.
    void give_back(std::uint32_t slot);
    std::size_t class_count() const { return classes_.size(); }
    bool knows(std::uint64_t class_bytes) const { return classes_.contains(class_bytes); }
    std::vector<std::uint64_t> classes_in_use() const;  // of which somebody holds a slot
    std::optional<std::uint64_t> idle_class() const;    // one of which nobody does
    void forget_class(std::uint64_t class_bytes);       // an idle one, with its slabs
    // Units of other classes' slabs, without grants and leases, whose newest chunk is the oldest; every slab's `newest`
    // must be known. All slabs that reach into it would have to be dissolved.
    std::optional<Window> oldest_window(std::uint64_t class_bytes) const;
    std::vector<std::uint32_t> slabs_in(const Window& window) const;  // first units
    // Nobody may hold a slot of it.
    void dissolve(std::uint32_t first_unit);
    // Only bytes below the mark are handed out. std::invalid_argument: beyond the arena, or lower than before.
    void set_prefaulted(std::uint64_t nbytes);

    // Null for a number that is no slot at the moment.
    Slot* find(std::uint32_t slot);
    const Slab& slab_of(std::uint32_t slot) const { return *slabs_[owner_[slot / slots_per_unit_]]; }
    Slab& slab_of(std::uint32_t slot) { return *slabs_[owner_[slot / slots_per_unit_]]; }
    Slab& slab_at(std::uint32_t first_unit) { return *slabs_[first_unit]; }
    std::uint64_t offset(std::uint32_t slot) const;
    const std::vector<std::unique_ptr<Slab>>& slabs() const { return slabs_; }  // by first unit; null where none begins
    std::uint32_t number(const Slab& slab, std::size_t place) const {
        return static_cast<std::uint32_t>(slab.first_unit * slots_per_unit_ + place);
    }

    std::vector<std::string> problems() const;

  private:
    struct Class {
        std::uint32_t run_units = 0;
        std::size_t in_use = 0;  // slots that somebody holds
        std::deque<std::uint32_t> free;
        std::vector<std::uint32_t> open;  // first units of slabs with slots that were never handed out
    };
    std::uint32_t run_units_for(std::uint64_t class_bytes) const;
    std::uint64_t run_bytes(std::uint32_t first_unit, std::uint32_t units) const;
    std::optional<std::uint32_t> carve(Class& known);
    void give_up(std::unique_ptr<Slab>& slab);
    bool add_slab(std::uint64_t class_bytes, Class& known);
    std::optional<std::uint64_t> newest_if_movable(std::uint32_t first_unit, std::uint32_t units,
                                                   std::uint64_t class_bytes) const;
    bool fits(std::uint32_t first_unit, std::uint32_t units, std::uint64_t class_bytes) const;

    std::uint64_t arena_bytes_;
    std::uint64_t unit_bytes_;
    std::uint32_t slots_per_unit_;
    std::uint64_t prefaulted_bytes_ = 0;
    std::vector<std::uint32_t> owner_;  // by unit: the first unit of its slab, or NO_UNIT
    std::size_t free_units_;
    std::vector<std::unique_ptr<Slab>> slabs_;
    std::map<std::uint64_t, Class> classes_;  // by class_bytes
};

}  // namespace kvstore
