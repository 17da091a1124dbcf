#include "slabs.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "arena.h"

namespace kvstore {
namespace {

constexpr std::uint32_t NO_UNIT = UINT32_MAX;
constexpr std::uint64_t UNIT_BYTES_MAX = std::uint64_t{1} << 30;
constexpr std::uint64_t UNITS_PER_ARENA = 64;
constexpr std::uint64_t WASTE_SHARE =
    16;  // a class may lose up to 1/16 of the chunks that the arena's bytes could hold

std::uint64_t round_up(std::uint64_t value, std::uint64_t step) {
    return (value + step - 1) / step * step;
}

}  // namespace

std::uint64_t unit_bytes_for(std::uint64_t arena_bytes) {
    if (arena_bytes == 0) throw std::invalid_argument("an arena of 0 bytes");
    const std::uint64_t share = arena_bytes / UNITS_PER_ARENA + (arena_bytes % UNITS_PER_ARENA != 0 ? 1 : 0);
    return std::min(round_up(share, SLOT_ALIGNMENT), UNIT_BYTES_MAX);
}

std::uint64_t slot_offset(std::uint32_t slot, std::uint64_t class_bytes, std::uint64_t unit_bytes) {
    if (unit_bytes < SLOT_ALIGNMENT || unit_bytes % SLOT_ALIGNMENT != 0 || class_bytes == 0 ||
        class_bytes % SLOT_ALIGNMENT != 0) {
        throw std::invalid_argument("class_bytes " + std::to_string(class_bytes) + " and unit_bytes " +
                                    std::to_string(unit_bytes) + " must be multiples of 4096");
    }
    const std::uint64_t per_unit = unit_bytes / SLOT_ALIGNMENT;
    const auto offset = static_cast<unsigned __int128>(slot / per_unit) * unit_bytes +
                        static_cast<unsigned __int128>(slot % per_unit) * class_bytes;
    if (offset > std::numeric_limits<std::uint64_t>::max() / 2) {
        throw std::invalid_argument("slot " + std::to_string(slot) + " of " + std::to_string(class_bytes) +
                                    " bytes lies beyond any memory");
    }
    return static_cast<std::uint64_t>(offset);
}

Slabs::Slabs(std::uint64_t arena_bytes, std::uint64_t unit_bytes)
    : arena_bytes_(arena_bytes),
      unit_bytes_(unit_bytes),
      slots_per_unit_(static_cast<std::uint32_t>(unit_bytes / SLOT_ALIGNMENT)),
      owner_((arena_bytes + unit_bytes - 1) / unit_bytes, NO_UNIT),
      free_units_(owner_.size()),
      slabs_(owner_.size()) {}

std::uint64_t Slabs::run_bytes(std::uint32_t first_unit, std::uint32_t units) const {
    const std::uint64_t begin = first_unit * unit_bytes_;
    return std::min(arena_bytes_, begin + units * unit_bytes_) - begin;
}

// The smallest run with which the arena would hold, in slabs of this class alone, all but 1/16 of the chunks that fit
// into its bytes; with fewer than 16 chunks in all, none is lost. Slot numbers stay unique because a run has no more
// slots than one unit has pages: run * 4096 <= class_bytes, or the run is one unit.
std::uint32_t Slabs::run_units_for(std::uint64_t class_bytes) const {
    const std::uint64_t best = arena_bytes_ / class_bytes;
    const auto units = static_cast<std::uint32_t>(owner_.size());
    const std::uint64_t longest = std::max<std::uint64_t>(1, class_bytes / SLOT_ALIGNMENT);
    std::uint32_t chosen = 0;
    std::uint64_t chosen_total = 0;
    for (std::uint32_t run = 1; run <= units && run <= longest; ++run) {
        std::uint64_t total = 0;
        for (std::uint32_t first = 0; first < units; first += run) {
            total += run_bytes(first, std::min(run, units - first)) / class_bytes;
        }
        if (total <= chosen_total) continue;
        chosen = run;
        chosen_total = total;
        if (total >= best - best / WASTE_SHARE) break;
    }
    assert(chosen > 0);
    return chosen;
}

void Slabs::require_class(std::uint64_t class_bytes) {
    if (classes_.contains(class_bytes)) return;
    if (class_bytes > arena_bytes_) {
        throw std::invalid_argument("a chunk of " + std::to_string(class_bytes) + " bytes does not fit the arena of " +
                                    std::to_string(arena_bytes_) + " bytes: start the daemon with more --cpu-bytes");
    }
    if (classes_.size() == SIZE_CLASSES_MAX) {
        throw std::invalid_argument("a chunk of " + std::to_string(class_bytes) +
                                    " bytes would be the size class number " + std::to_string(SIZE_CLASSES_MAX + 1) +
                                    " of this arena; " + std::to_string(SIZE_CLASSES_MAX) + " is the most");
    }
    classes_[class_bytes].run_units = run_units_for(class_bytes);
}

std::vector<std::uint64_t> Slabs::classes_in_use() const {
    std::vector<std::uint64_t> found;
    for (const auto& [class_bytes, known] : classes_) {
        if (known.in_use > 0) found.push_back(class_bytes);
    }
    return found;
}

std::optional<std::uint64_t> Slabs::idle_class() const {
    for (const auto& [class_bytes, known] : classes_) {
        if (known.in_use == 0) return class_bytes;
    }
    return std::nullopt;
}

void Slabs::forget_class(std::uint64_t class_bytes) {
    assert(classes_.at(class_bytes).in_use == 0);
    classes_.erase(class_bytes);
    for (auto& slab : slabs_) {
        if (slab && slab->class_bytes == class_bytes) give_up(slab);
    }
}

std::optional<std::uint32_t> Slabs::take(std::uint64_t class_bytes) {
    Class& known = classes_.at(class_bytes);
    auto slot = carve(known);
    if (!slot && known.free.size() <= FREE_SLOTS_RESTING && add_slab(class_bytes, known)) slot = carve(known);
    if (!slot && !known.free.empty()) {
        slot = known.free.front();
        known.free.pop_front();
    }
    if (slot) ++known.in_use;
    return slot;
}

std::optional<std::uint32_t> Slabs::carve(Class& known) {
    for (std::size_t i = 0; i < known.open.size(); ++i) {
        Slab& slab = *slabs_[known.open[i]];
        const std::uint32_t place = slab.carved;
        if (slab.first_unit * unit_bytes_ + (place + 1) * slab.class_bytes > prefaulted_bytes_) continue;
        ++slab.carved;
        if (slab.carved == slab.slots.size()) known.open.erase(known.open.begin() + static_cast<std::ptrdiff_t>(i));
        return number(slab, place);
    }
    return std::nullopt;
}

// Whether the run would hold a chunk, pre-faulted.
bool Slabs::fits(std::uint32_t first_unit, std::uint32_t units, std::uint64_t class_bytes) const {
    return run_bytes(first_unit, units) >= class_bytes && first_unit * unit_bytes_ + class_bytes <= prefaulted_bytes_;
}

// The first free run of the class's length; where there is none, the longest shorter one that holds at least a chunk.
bool Slabs::add_slab(std::uint64_t class_bytes, Class& known) {
    if (free_units_ == 0) return false;
    std::uint32_t best_first = 0;
    std::uint32_t best_units = 0;
    for (std::uint32_t first = 0; first < owner_.size() && best_units < known.run_units;) {
        std::uint32_t units = 0;
        while (first + units < owner_.size() && owner_[first + units] == NO_UNIT && units < known.run_units) ++units;
        const bool usable = fits(first, units, class_bytes);
        if (usable && units > best_units) {
            best_first = first;
            best_units = units;
        }
        first += std::max(units, 1U);
    }
    if (best_units == 0) return false;
    auto slab = std::make_unique<Slab>();
    slab->class_bytes = class_bytes;
    slab->first_unit = best_first;
    slab->units = best_units;
    slab->slots.resize(run_bytes(best_first, best_units) / class_bytes);
    assert(slab->slots.size() <= slots_per_unit_);
    std::fill_n(owner_.begin() + best_first, best_units, best_first);
    free_units_ -= best_units;
    known.open.push_back(best_first);
    slabs_[best_first] = std::move(slab);
    return true;
}

std::optional<Window> Slabs::oldest_window(std::uint64_t class_bytes) const {
    if (classes_.size() == 1) return std::nullopt;
    const auto units = static_cast<std::uint32_t>(owner_.size());
    std::optional<Window> oldest;
    // A run of the class's own length if there is one, else the longest shorter one.
    for (std::uint32_t run = std::min(classes_.at(class_bytes).run_units, units); run > 0 && !oldest; --run) {
        for (std::uint32_t first = 0; first + run <= units; ++first) {
            if (!fits(first, run, class_bytes)) continue;
            const auto newest = newest_if_movable(first, run, class_bytes);
            if (newest && (!oldest || *newest < oldest->newest)) oldest = Window{first, run, *newest};
        }
    }
    return oldest;
}

// The tick of the newest chunk in the slabs that reach into the run, if all of them may change to this class.
std::optional<std::uint64_t> Slabs::newest_if_movable(std::uint32_t first_unit, std::uint32_t units,
                                                      std::uint64_t class_bytes) const {
    std::uint64_t newest = 0;
    for (std::uint32_t unit = first_unit; unit < first_unit + units;) {
        if (owner_[unit] == NO_UNIT) {
            ++unit;
            continue;
        }
        const Slab& slab = *slabs_[owner_[unit]];
        assert(slab.newest_known);
        if (slab.class_bytes == class_bytes || slab.granted > 0 || slab.held > 0) return std::nullopt;
        newest = std::max(newest, slab.newest);
        unit = slab.first_unit + slab.units;
    }
    return newest;
}

std::vector<std::uint32_t> Slabs::slabs_in(const Window& window) const {
    std::vector<std::uint32_t> found;
    for (std::uint32_t unit = window.first_unit; unit < window.first_unit + window.units; ++unit) {
        if (owner_[unit] != NO_UNIT && (found.empty() || found.back() != owner_[unit])) found.push_back(owner_[unit]);
    }
    return found;
}

void Slabs::dissolve(std::uint32_t first_unit) {
    const Slab& slab = *slabs_[first_unit];
    assert(std::all_of(slab.slots.begin(), slab.slots.end(),
                       [](const Slot& slot) { return slot.holder == Slot::Holder::NOBODY; }));
    Class& known = classes_.at(slab.class_bytes);
    std::erase_if(known.free, [this, first_unit](std::uint32_t slot) { return slot / slots_per_unit_ == first_unit; });
    std::erase(known.open, first_unit);
    give_up(slabs_[first_unit]);
}

// Its units are free; the class's lists are the caller's.
void Slabs::give_up(std::unique_ptr<Slab>& slab) {
    std::fill_n(owner_.begin() + slab->first_unit, slab->units, NO_UNIT);
    free_units_ += slab->units;
    slab.reset();
}

void Slabs::give_back(std::uint32_t slot) {
    Slot* held = find(slot);
    assert(held != nullptr && held->holder != Slot::Holder::NOBODY);
    *held = Slot{};
    Class& known = classes_.at(slab_of(slot).class_bytes);
    --known.in_use;
    known.free.push_back(slot);
}

void Slabs::set_prefaulted(std::uint64_t nbytes) {
    if (nbytes < prefaulted_bytes_ || nbytes > arena_bytes_) {
        throw std::invalid_argument("pre-faulted " + std::to_string(nbytes) + " bytes: outside of " +
                                    std::to_string(prefaulted_bytes_) + " (before) to " + std::to_string(arena_bytes_) +
                                    " (the arena)");
    }
    prefaulted_bytes_ = nbytes;
}

Slot* Slabs::find(std::uint32_t slot) {
    const std::uint32_t unit = slot / slots_per_unit_;
    if (unit >= owner_.size() || owner_[unit] != unit) return nullptr;  // slots are numbered from a slab's first unit
    Slab& slab = *slabs_[unit];
    const std::uint32_t place = slot % slots_per_unit_;
    return place < slab.carved ? &slab.slots[place] : nullptr;
}

std::uint64_t Slabs::offset(std::uint32_t slot) const {
    return slot_offset(slot, slab_of(slot).class_bytes, unit_bytes_);
}

std::vector<std::string> Slabs::problems() const {
    std::vector<std::string> problems;
    std::vector<std::uint32_t> owner(owner_.size(), NO_UNIT);
    std::map<std::uint64_t, std::size_t> free_count, held_count;
    for (const auto& slab : slabs_) {
        if (!slab) continue;
        const std::string name = "the slab at unit " + std::to_string(slab->first_unit);
        const std::uint64_t begin = slab->first_unit * unit_bytes_;
        if (!classes_.contains(slab->class_bytes)) problems.push_back(name + " has an unknown class");
        if (begin + slab->slots.size() * slab->class_bytes > arena_bytes_) {
            problems.push_back(name + " ends beyond the arena");
        }
        if (slab->slots.size() * slab->class_bytes > slab->units * unit_bytes_) {
            problems.push_back(name + " ends beyond its units");
        }
        if (slab->carved > 0 && begin + slab->carved * slab->class_bytes > prefaulted_bytes_) {
            problems.push_back(name + " handed out slots that are not pre-faulted");
        }
        for (std::uint32_t unit = slab->first_unit; unit < slab->first_unit + slab->units; ++unit) {
            if (unit >= owner.size() || owner[unit] != NO_UNIT) {
                problems.push_back(name + " shares unit " + std::to_string(unit));
            } else {
                owner[unit] = slab->first_unit;
            }
        }
        for (std::size_t place = 0; place < slab->slots.size(); ++place) {
            const bool nobody = slab->slots[place].holder == Slot::Holder::NOBODY;
            if (place >= slab->carved && !nobody) problems.push_back(name + " has a holder of a slot never handed out");
            if (place < slab->carved && nobody) ++free_count[slab->class_bytes];
            if (!nobody) ++held_count[slab->class_bytes];
        }
    }
    if (owner != owner_) problems.push_back("units and slabs disagree about who owns which");
    if (std::cmp_not_equal(std::count(owner_.begin(), owner_.end(), NO_UNIT), free_units_)) {
        problems.push_back(std::to_string(free_units_) + " units are said to be free, which is not so");
    }
    for (const auto& [class_bytes, known] : classes_) {
        const std::string name = "the class of " + std::to_string(class_bytes) + " bytes";
        std::unordered_set<std::uint32_t> seen;
        for (const std::uint32_t slot : known.free) {
            if (!seen.insert(slot).second)
                problems.push_back(name + " has slot " + std::to_string(slot) + " free twice");
            Slot* held = const_cast<Slabs*>(this)->find(slot);
            if (held == nullptr || held->holder != Slot::Holder::NOBODY || slab_of(slot).class_bytes != class_bytes) {
                problems.push_back(name + " lists slot " + std::to_string(slot) + " as free, which it is not");
            }
        }
        if (known.in_use != held_count[class_bytes]) {
            problems.push_back(name + " counts " + std::to_string(known.in_use) + " slots in use of " +
                               std::to_string(held_count[class_bytes]));
        }
        if (known.free.size() != free_count[class_bytes]) {
            problems.push_back(name + " lists " + std::to_string(known.free.size()) + " free slots of " +
                               std::to_string(free_count[class_bytes]));
        }
    }
    return problems;
}

}  // namespace kvstore
