// Index: what a lower tier has yet to be given. Questions only; nothing here changes anything.
#include <set>
#include <unordered_map>

#include "index.h"

namespace kvstore {

Unwritten Index::unwritten_at(std::uint32_t number) const {
    const Record& record = records_[number];
    return {scopes_[record.scope].scope, Bytes(record.key.data(), record.key_bytes), record.at};
}

// Evicts in thought: of each class the oldest leaves, as the policy weighs them now; a parent goes once all of its
// resident children have gone. What the policy would take from the youngest end is not foreseen.
std::vector<Unwritten> Index::next_to_go(std::uint64_t nbytes, std::size_t steps, std::size_t limit) const {
    std::vector<Unwritten> found;
    const auto weigh = [this](std::uint32_t number) {
        const Record& record = records_[number];
        return policy_.weigh({record.tick, number}, record.uses.count, record.orphan, tick_);
    };
    for (const auto& [class_bytes, leaves] : leaves_) {
        std::set<Victim> oldest;                                // of each set the first one that has not gone
        std::unordered_map<std::uint32_t, std::uint32_t> gone;  // children, by parent
        leaves.for_each_set([&](const std::set<Leaf>& set) {
            if (!set.empty()) oldest.insert(weigh(set.begin()->record));
        });
        for (std::uint64_t freed = 0; freed < nbytes && steps > 0 && found.size() < limit; freed += class_bytes) {
            if (oldest.empty()) break;
            const std::uint32_t number = oldest.extract(oldest.begin()).value().record;
            --steps;
            const Record& record = records_[number];
            if (is_unwritten(record)) found.push_back(unwritten_at(number));
            if (record.place.listed()) {
                if (const auto next = leaves.after(record.place)) oldest.insert(weigh(next->record));
            }
            if (record.parent == NO_RECORD) continue;
            const Record& parent = records_[record.parent];
            if (++gone[record.parent] == parent.children && !is_held(parent)) oldest.insert(weigh(record.parent));
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
