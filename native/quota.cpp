// Index: bytes that one tenant's chunks may take. Only tenants with a quota have an order of eviction of their own.
#include "index.h"

namespace kvstore {
namespace {

constexpr int EVICTIONS_PER_COMMIT_MAX = 64;

}  // namespace

std::uint64_t Index::set_quota(const Id& tenant, std::optional<std::uint64_t> nbytes) {
    if (!nbytes) {
        const auto found = quotas_.find(tenant);
        if (found == quotas_.end()) return 0;
        dropped_orders_.push_back(std::move(found->second.leaves));  // as long as the tenant has chunks: not at once
        quotas_.erase(found);
        return 0;
    }
    const auto [at, added] = quotas_.try_emplace(tenant);
    Quota& quota = at->second;
    quota.nbytes = *nbytes;
    if (!added) return quota.used;
    quota.used = scopes_.bytes_of(tenant);
    // What is listed from here on is entered by `list`.
    quota.unseen = quota.used == 0 ? NO_RECORD : 0;
    return quota.used;
}

bool Index::order_for_quotas(std::size_t steps) {
    for (; !dropped_orders_.empty(); dropped_orders_.pop_back()) {
        auto& leaves = dropped_orders_.back();
        for (; !leaves.empty(); --steps) {
            if (steps == 0) return false;
            leaves.erase(leaves.begin());
        }
    }
    for (auto& [tenant, quota] : quotas_) {
        for (; quota.unseen < records_.size(); ++quota.unseen, --steps) {
            if (steps == 0) return false;
            const Record& record = records_[quota.unseen];
            if (record.place.listed() && scopes_[record.scope].scope.tenant == tenant)
                quota.leaves.insert(own_leaf(quota.unseen));
        }
        quota.unseen = NO_RECORD;
    }
    return true;
}

Index::Quota* Index::quota_of(const Id& tenant) {
    if (quotas_.empty()) return nullptr;
    const auto found = quotas_.find(tenant);
    return found == quotas_.end() ? nullptr : &found->second;
}

// Evicts the tenant's own chunks, but not `kept`, until so many bytes more are within its quota. False: they cannot be,
// or it would not be worth it: no lookup gets as far as a chunk whose parent is not there (`cut_off`), and a chain
// longer than the quota would eat its own head for its end.
bool Index::make_room_in(Quota& quota, std::uint64_t nbytes, std::uint32_t kept, bool cut_off) {
    for (int evictions = 0; quota.used + nbytes > quota.nbytes; ++evictions) {
        if (cut_off) return false;
        auto oldest = quota.leaves.begin();
        if (oldest != quota.leaves.end() && oldest->record == kept) ++oldest;
        if (nbytes > quota.nbytes || oldest == quota.leaves.end() || evictions == EVICTIONS_PER_COMMIT_MAX)
            return false;
        evict(oldest->record, Cause::QUOTA);
    }
    return true;
}

// One look at each record, however many quotas there are.
void Index::quota_problems(std::vector<std::string>& problems) const {
    struct Count {
        std::uint64_t used = 0, evictable = 0;
    };
    std::map<Id, Count> counts;  // by tenant
    struct Of {
        const Quota* quota;
        Count* count;
    };
    std::unordered_map<std::uint32_t, Of> of_scope;
    for (const auto& [scope, number] : scopes_.numbers()) {
        const auto quota = quotas_.find(scope.tenant);
        if (quota != quotas_.end()) of_scope[number] = {&quota->second, &counts[scope.tenant]};
    }
    for (std::uint32_t number = 0; !of_scope.empty() && number < records_.size(); ++number) {
        const Record& record = records_[number];
        if (!record.live) continue;
        const auto of = of_scope.find(record.scope);
        if (of == of_scope.end()) continue;
        const auto& [quota, count] = of->second;
        count->used += class_bytes(record.at.slot);
        if (!is_evictable(record) || number >= quota->unseen) continue;
        ++count->evictable;
        if (!quota->leaves.contains(own_leaf(number))) problems.push_back("a chunk is not among its tenant's victims");
    }
    for (const auto& [tenant, quota] : quotas_) {
        const Count& count = counts[tenant];
        if (count.used != quota.used) problems.push_back("a tenant's quota counts bytes wrongly");
        if (quota.unseen == NO_RECORD && count.evictable != quota.leaves.size())
            problems.push_back("a tenant's quota has victims that are none");
    }
}

}  // namespace kvstore
