// Index: what a lower tier has yet to be given. Questions only; nothing here changes anything.
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "index.h"

namespace kvstore {

Unwritten Index::unwritten_at(std::uint32_t number) const {
    const Record& record = records_[number];
    return {scopes_[record.scope].scope, Bytes(record.key.data(), record.key_bytes), record.at};
}

// Evicts in thought, at this tick: of each class the leaves at both ends that the policy would take, the least first
// (but for what was touched just now, and for the margin between classes); a parent goes once all of its resident
// children have gone.
std::vector<Unwritten> Index::next_to_go(std::uint64_t nbytes, std::size_t steps, std::size_t limit) const {
    std::vector<Unwritten> found;
    const auto weigh = [this](std::uint32_t number) {
        const Record& record = records_[number];
        return policy_.weigh({record.tick, number}, record.uses.count, record.orphan, tick_);
    };
    for (const auto& [class_bytes, leaves] : leaves_) {
        std::set<Victim> next;                                  // of each set the leaves at its ends
        std::unordered_set<std::uint32_t> passed;               // no longer there, in thought
        std::unordered_map<std::uint32_t, std::uint32_t> gone;  // children, by parent
        leaves.for_each_set([&](const std::set<Leaf>& set) {
            if (!set.empty()) next.insert(weigh(set.begin()->record));
        });
        const auto young_end = policy_.young_end(leaves, tick_);
        for (unsigned c = 0; young_end && c < USE_CLASSES; ++c) {
            if (const auto leaf = leaves.youngest(c, *young_end)) next.insert(weigh(leaf->record));
        }
        const auto stays = [&](const std::optional<Leaf>& leaf) { return leaf && !passed.contains(leaf->record); };
        for (std::uint64_t freed = 0; freed < nbytes && steps > 0 && found.size() < limit; freed += class_bytes) {
            if (next.empty()) break;
            const std::uint32_t number = next.extract(next.begin()).value().record;
            passed.insert(number);
            --steps;
            const Record& record = records_[number];
            if (is_unwritten(record)) found.push_back(unwritten_at(number));
            if (record.place.listed()) {
                const auto older = leaves.before(record.place);
                const auto younger = leaves.after(record.place);
                if (!stays(older) && stays(younger)) next.insert(weigh(younger->record));
                const bool is_youngest = !stays(younger) || (young_end && younger->tick > *young_end);
                if (is_youngest && stays(older)) next.insert(weigh(older->record));
            }
            if (record.parent == NO_RECORD) continue;
            const Record& parent = records_[record.parent];
            if (++gone[record.parent] == parent.children && !is_held(parent)) next.insert(weigh(record.parent));
        }
    }
    return found;
}

std::vector<Unwritten> Index::unwritten(std::uint32_t& next, std::uint64_t used_before_ms, std::size_t steps,
                                        std::size_t limit) const {
    std::vector<Unwritten> found;
    for (; next < records_.size() && steps > 0 && found.size() < limit; ++next, --steps) {
        const Record& record = records_[next];
        if (is_unwritten(record) && record.used_ms < used_before_ms) found.push_back(unwritten_at(next));
    }
    if (next >= records_.size()) next = NO_RECORD;
    return found;
}

std::vector<Unwritten> Index::used_often(const Id& name_space, const Id& tenant, std::span<const Bytes> keys,
                                         std::uint32_t uses) const {
    const Hasher hasher = hasher_for(index_key_, name_space, tenant);
    std::vector<Unwritten> found;
    for (const Bytes& key : keys) {
        const std::uint32_t number = find(hasher(key), name_space, tenant, key);
        if (number == NO_RECORD || !is_unwritten(records_[number]) || records_[number].uses.count < uses) continue;
        found.push_back(unwritten_at(number));
    }
    return found;
}

}  // namespace kvstore
