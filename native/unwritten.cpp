// Index: what a lower tier has yet to be given. Questions only; nothing here changes anything.
#include <unordered_map>

#include "index.h"

namespace kvstore {

Unwritten Index::unwritten_at(std::uint32_t number) const {
    const Record& record = records_[number];
    return {scopes_[record.scope].scope, Bytes(record.key.data(), record.key_bytes), record.at};
}

// Evicts in thought, at this tick, by the policy's own rule; a parent becomes a leaf once all of its resident children
// have gone.
std::vector<Unwritten> Index::next_to_go(std::uint64_t nbytes, std::size_t steps, std::size_t limit) const {
    std::vector<Unwritten> found;
    for (const auto& [class_bytes, leaves] : leaves_) {
        LeavesInThought left(leaves, policy_.untouched_until(leaves.residents(), tick_));
        std::unordered_map<std::uint32_t, std::uint32_t> gone;  // children, by parent
        const auto set_of = [this](const Record& record) {
            return record.orphan ? Leaves::ORPHANS : use_class(record);
        };
        for (std::uint64_t freed = 0; freed < nbytes && steps > 0 && found.size() < limit; freed += class_bytes) {
            const auto victim = policy_.victim(left, tick_);
            if (!victim) break;
            --steps;
            const Record& record = records_[victim->record];
            left.take({record.tick, victim->record}, set_of(record), use_class(record));
            if (is_unwritten(record)) found.push_back(unwritten_at(victim->record));
            if (record.parent == NO_RECORD) continue;
            const Record& parent = records_[record.parent];
            if (++gone[record.parent] == parent.children && !is_held(parent)) {
                left.add({parent.tick, record.parent}, set_of(parent));
            }
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
