#include "index.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <utility>

namespace kvstore {
namespace {

constexpr std::size_t EPOCHS_MAX = 64;
// Looked at by one `touch`: a chain in order needs each of its chunks once, however often it was interrupted.
constexpr std::size_t ANCESTORS_MAX = 65'536;

std::uint64_t chunks_max_of(const TableWriter& table) {
    return table.place_count() / 3 * 2;
}

}  // namespace

Index::Index(std::shared_ptr<Mapping> table, std::shared_ptr<Mapping> arena, std::uint64_t arena_bytes,
             std::uint64_t unit_bytes, const Id& index_key, const Id& instance_id, Rule rule, bool verify)
    : table_memory_(std::move(table)),
      arena_(verify ? std::move(arena) : nullptr),
      arena_bytes_(arena_bytes),
      index_key_(index_key),
      table_(table_memory_->data(), TableShape::for_bytes(table_memory_->size(), arena_bytes, unit_bytes), instance_id),
      slabs_(arena_bytes, unit_bytes),
      chunks_max_(chunks_max_of(table_)),
      policy_(rule, chunks_max_) {}

// ---- Grants ----

std::vector<Ref> Index::grant(std::uint64_t group, std::uint64_t chunk_bytes, std::size_t count) {
    const std::uint64_t bytes = class_bytes_of(chunk_bytes);
    if (slabs_.class_count() == SIZE_CLASSES_MAX && !slabs_.knows(bytes)) give_back_idle_class();
    slabs_.require_class(bytes);
    std::vector<Ref> granted;
    Move move;
    while (granted.size() < count) {
        // Chunks smaller than the table was sized for fill it before the tier, and it would then refuse every commit.
        if (chunk_count_ + grant_count_ >= chunks_max_) {
            if (!make_room_in_table()) break;
            continue;
        }
        const auto slot = slabs_.take(bytes);
        if (!slot) {
            if (!make_room(bytes, move)) break;
            continue;
        }
        *slabs_.find(*slot) = {Slot::Holder::GROUP, epoch_, group};
        ++slabs_.slab_of(*slot).granted;
        groups_[group].grants.insert(*slot);
        ++grant_count_;
        granted_bytes_ += bytes;
        granted.push_back({*slot, table_.raise_generation(*slot)});
    }
    // No byte of the new owners may be seen before these generations, whatever kind of store writes it.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (arena_) {
        for (const Ref& ref : granted) {
            std::memset(arena_->data() + slabs_.offset(ref.slot), static_cast<int>(POISON), bytes);
        }
    }
    return granted;
}

bool Index::is_granted(std::uint64_t group, Ref ref) {
    const Slot* slot = slabs_.find(ref.slot);
    return slot != nullptr && slot->holder == Slot::Holder::GROUP && slot->owner == group &&
           table_.generation(ref.slot) == ref.generation;
}

void Index::end_grant(std::uint64_t group, std::uint32_t slot) {
    const auto erased = groups_.at(group).grants.erase(slot);
    assert(erased == 1);
    --grant_count_;
    --slabs_.slab_of(slot).granted;
    granted_bytes_ -= class_bytes(slot);
}

void Index::drop_grant(std::uint64_t group, std::uint32_t slot) {
    end_grant(group, slot);
    slabs_.give_back(slot);
}

std::size_t Index::abort(std::uint64_t group, std::span<const Ref> refs) {
    std::size_t aborted = 0;
    for (const Ref& ref : refs) {
        if (!is_granted(group, ref)) continue;
        drop_grant(group, ref.slot);
        ++aborted;
    }
    forget_if_idle(group);
    return aborted;
}

void Index::forget_if_idle(std::uint64_t group) {
    const auto found = groups_.find(group);
    if (found != groups_.end() && found->second.grants.empty() && found->second.leases.empty()) groups_.erase(found);
}

// ---- Commits ----

std::vector<CommitCode> Index::commit(std::uint64_t group, const Id& name_space, std::span<const Commit> commits,
                                      std::uint64_t now_ms, bool is_use) {
    std::vector<CommitCode> codes;
    codes.reserve(commits.size());
    Stored previous;
    for (const Commit& commit : commits) {
        codes.push_back(commit_one(group, name_space, commit, now_ms, is_use, previous));
    }
    forget_if_idle(group);
    return codes;
}

CommitCode Index::commit_one(std::uint64_t group, const Id& name_space, const Commit& commit, std::uint64_t now_ms,
                             bool is_use, Stored& previous) {
    const Stored before = std::exchange(previous, {});
    if (!is_granted(group, commit.at)) {
        const std::uint32_t committed = chunk_at(commit.at);
        const bool again =
            committed != NO_RECORD && is_key_of(records_[committed], name_space, commit.tenant, commit.key);
        return again ? CommitCode::STORED : CommitCode::NOT_GRANTED;
    }
    if (removed_since(slabs_.find(commit.at.slot)->epoch, name_space, commit.tenant)) {
        drop_grant(group, commit.at.slot);
        return CommitCode::NOT_GRANTED;
    }
    if (arena_ && holds_poison(commit.at.slot)) ++poison_commit_count_;
    const Hasher hasher = hasher_for(index_key_, name_space, commit.tenant);
    const Digest digest = hasher(commit.key);
    policy_.prefetch(digest);
    bool other = false;
    if (find(digest, name_space, commit.tenant, commit.key, &other) != NO_RECORD) {
        drop_grant(group, commit.at.slot);
        return CommitCode::PRESENT;
    }
    if (other) {
        ++digest_collision_count_;
        drop_grant(group, commit.at.slot);
        return CommitCode::TIER_FULL;
    }
    const bool in_lower =
        lower_count_ > 0 && table_.where(digest) != Where::MISS;  // an entry without a record, as `find` said
    if (in_lower) erase_lower(digest);
    Digest parent_digest;
    std::uint32_t parent = NO_RECORD;
    if (before.record != NO_RECORD && before.tenant == commit.tenant && std::ranges::equal(before.key, commit.parent)) {
        parent_digest = before.digest;
        parent = before.record;
    } else if (!commit.parent.empty()) {
        parent_digest = hasher(commit.parent);
        parent = find(parent_digest, name_space, commit.tenant, commit.parent);
    }
    const bool cut_off = !commit.parent.empty() && parent == NO_RECORD;
    if (Quota* quota = quota_of(commit.tenant);
        quota != nullptr && !make_room_in(*quota, class_bytes(commit.at.slot), parent, cut_off)) {
        if (in_lower) insert_lower(digest, Where::FS);
        if (is_use) policy_.missed(digest, ++tick_);
        drop_grant(group, commit.at.slot);
        return CommitCode::QUOTA;
    }
    const std::uint32_t number = new_record();
    const auto insert = [&] { return insert_chunk(digest, commit.at, number); };
    if (number == NO_RECORD || !(insert() || (make_place(digest, parent) && insert()))) {
        if (in_lower) insert_lower(digest, Where::FS);
        if (number != NO_RECORD) free_records_.push_back(number);
        if (is_use) policy_.missed(digest, ++tick_);
        drop_grant(group, commit.at.slot);
        return CommitCode::TIER_FULL;
    }
    Record& record = records_[number];
    record = Record{};
    record.live = true;
    record.key_bytes = static_cast<std::uint8_t>(commit.key.size());
    std::memcpy(record.key.data(), commit.key.data(), commit.key.size());
    record.scope = scopes_.add_chunk({name_space, commit.tenant}, class_bytes(commit.at.slot));
    record.digest = digest;
    record.at = commit.at;
    set_in_lower(record, in_lower);
    record.parent_digest = parent_digest;
    end_grant(group, commit.at.slot);
    *slabs_.find(commit.at.slot) = {Slot::Holder::CHUNK, 0, number};
    used_bytes_ += class_bytes(commit.at.slot);
    if (Quota* quota = quota_of(commit.tenant)) quota->used += class_bytes(commit.at.slot);
    ++chunk_count_;
    make_youngest(record, now_ms);
    record.uses = policy_.arrived(digest, tick_, is_use);
    leaves(record).arrive(use_class(record));
    if (parent != NO_RECORD) set_parent(number, parent);
    list(number);
    previous = {commit.tenant, commit.key, digest, number};
    return CommitCode::STORED;
}

std::uint32_t Index::new_record() {
    if (!free_records_.empty()) {
        const std::uint32_t number = free_records_.back();
        free_records_.pop_back();
        return number;
    }
    if (records_.size() >= NO_RECORD) return NO_RECORD;
    records_.emplace_back();
    return static_cast<std::uint32_t>(records_.size() - 1);
}

std::uint32_t Index::find(const Digest& digest, const Id& name_space, const Id& tenant, Bytes key, bool* other) const {
    const std::uint32_t number = table_.find(digest);
    if (number == NO_RECORD) return NO_RECORD;
    if (is_key_of(records_[number], name_space, tenant, key)) return number;
    if (other != nullptr) *other = true;
    return NO_RECORD;
}

bool Index::is_key_of(const Record& record, const Id& name_space, const Id& tenant, Bytes key) const {
    return record.live && record.key_bytes == key.size() &&
           std::memcmp(record.key.data(), key.data(), key.size()) == 0 &&
           scopes_[record.scope].scope == Scope{name_space, tenant};
}

std::uint32_t Index::chunk_at(Ref ref) {
    const Slot* slot = slabs_.find(ref.slot);
    if (slot == nullptr || slot->holder != Slot::Holder::CHUNK) return NO_RECORD;
    const auto number = static_cast<std::uint32_t>(slot->owner);
    return records_[number].at == ref ? number : NO_RECORD;
}

bool Index::holds_poison(std::uint32_t slot) const {
    constexpr std::size_t LINE = 64;
    std::array<std::byte, LINE> poison;
    poison.fill(POISON);
    const std::byte* begin = arena_->data() + slabs_.offset(slot);
    for (const std::byte* at = begin; at < begin + class_bytes(slot); at += LINE) {
        if (std::memcmp(at, poison.data(), LINE) == 0) return true;
    }
    return false;
}

// ---- Leases ----

std::vector<bool> Index::lease(std::uint64_t group, std::span<const Ref> refs, std::uint64_t deadline_ms) {
    std::vector<bool> leased;
    leased.reserve(refs.size());
    for (const Ref& ref : refs) {
        const std::uint32_t number = chunk_at(ref);
        if (number == NO_RECORD) {
            leased.push_back(false);
            continue;
        }
        Record& record = records_[number];
        const std::uint64_t bytes = class_bytes(ref.slot);
        if (record.leases == 0 && pinned_bytes_ + bytes > arena_bytes_ / 2) {
            leased.push_back(false);
            continue;
        }
        const auto [held, first] = groups_[group].leases.try_emplace(ref.slot);
        if (first) {
            unlist(number);
            if (record.leases == 0) pinned_bytes_ += bytes;
            if (!is_held(record)) ++slabs_.slab_of(ref.slot).held;
            ++record.leases;
        } else {
            lease_ends_.erase(held->second.end);
        }
        // Most end last, for all have the same time.
        const auto end = lease_ends_.insert(lease_ends_.end(), {deadline_ms, group, ref.slot});
        held->second = {ref.generation, end};
        leased.push_back(true);
    }
    return leased;
}

void Index::drop_lease(Group& group, std::unordered_map<std::uint32_t, Lease>::iterator lease) {
    const std::uint32_t slot = lease->first;
    lease_ends_.erase(lease->second.end);
    group.leases.erase(lease);
    const Slot* held = slabs_.find(slot);
    assert(held != nullptr && held->holder == Slot::Holder::CHUNK && "a leased slot lost its chunk");
    Record& record = records_[held->owner];
    assert(record.leases > 0);
    --record.leases;
    if (record.leases > 0) return;
    pinned_bytes_ -= class_bytes(slot);
    if (is_held(record)) return;
    --slabs_.slab_of(slot).held;
    list(static_cast<std::uint32_t>(held->owner));
}

bool Index::begin_io(Ref ref) {
    const std::uint32_t number = chunk_at(ref);
    if (number == NO_RECORD) return false;
    Record& record = records_[number];
    unlist(number);
    if (!is_held(record)) ++slabs_.slab_of(ref.slot).held;
    if (record.io++ == 0) io_bytes_ += class_bytes(ref.slot);
    return true;
}

void Index::end_io(Ref ref) {
    Slot* slot = slabs_.find(ref.slot);
    if (slot != nullptr && slot->holder == Slot::Holder::IO) {
        if (--slot->owner > 0) return;
        io_bytes_ -= class_bytes(ref.slot);
        --slabs_.slab_of(ref.slot).held;
        slabs_.give_back(ref.slot);
        return;
    }
    const std::uint32_t number = chunk_at(ref);
    assert(number != NO_RECORD && records_[number].io > 0 && "a slot with I/O lost its chunk");
    Record& record = records_[number];
    if (--record.io == 0) io_bytes_ -= class_bytes(ref.slot);
    if (is_held(record)) return;
    --slabs_.slab_of(ref.slot).held;
    list(number);
}

std::vector<bool> Index::release(std::uint64_t group, std::span<const Ref> refs) {
    std::vector<bool> released;
    released.reserve(refs.size());
    const auto found = groups_.find(group);
    for (const Ref& ref : refs) {
        bool held = false;
        if (found != groups_.end()) {
            const auto lease = found->second.leases.find(ref.slot);
            held = lease != found->second.leases.end() && lease->second.generation == ref.generation;
            if (held) drop_lease(found->second, lease);
        }
        released.push_back(held);
    }
    forget_if_idle(group);
    return released;
}

std::size_t Index::expire_leases(std::uint64_t now_ms, std::size_t limit) {
    std::size_t expired = 0;
    for (; expired < limit && !lease_ends_.empty() && lease_ends_.begin()->deadline_ms <= now_ms; ++expired) {
        const LeaseEnd end = *lease_ends_.begin();
        Group& group = groups_.at(end.group);
        drop_lease(group, group.leases.find(end.slot));
        forget_if_idle(end.group);
    }
    return expired;
}

bool Index::end_leases(std::uint64_t group, std::size_t limit) {
    const auto found = groups_.find(group);
    if (found == groups_.end()) return true;
    auto& leases = found->second.leases;
    for (; limit > 0 && !leases.empty(); --limit) drop_lease(found->second, leases.begin());
    const bool ended = leases.empty();
    forget_if_idle(group);
    return ended;
}

// ---- Eviction ----

// The table, and not the arena, is what is full: of all classes' chunks the one that goes first.
bool Index::make_room_in_table() {
    std::optional<Victim> first;
    for (const auto& [class_bytes, leaves] : leaves_) {
        const auto victim = policy_.victim(leaves, tick_);
        if (victim && (!first || *victim < *first)) first = victim;
    }
    if (first) evict(first->record, Cause::TABLE);
    return first.has_value();
}

bool Index::make_room(std::uint64_t class_bytes, Move& move) {
    if (!move.looked && slabs_.class_count() > 1) {
        for (const auto& slab : slabs_.slabs()) {
            if (slab && !slab->newest_known) find_newest(*slab);
        }
        move.window = slabs_.oldest_window(class_bytes);
        move.looked = true;
    }
    const Leaves& leaves = leaves_[class_bytes];
    const bool may_move = move.window && !move.done;
    const auto oldest = leaves.oldest_tick();
    if (oldest && (!may_move || *oldest < move.window->newest)) {
        evict(policy_.victim(leaves, tick_)->record, Cause::SLOT);
        return true;
    }
    if (!may_move) return false;
    move_slabs(*move.window);
    move.done = true;
    return true;
}

// No place is free where the table looks for this digest: of the few chunks there, the leaf that goes first, but not
// `kept`.
bool Index::make_place(const Digest& digest, std::uint32_t kept) {
    std::optional<Victim> first;
    for (const std::uint32_t number : table_.within_reach(digest)) {
        if (number == NO_RECORD || number == kept || !is_evictable(records_[number])) continue;
        const Record& record = records_[number];
        const Victim victim = policy_.weigh({record.tick, number}, record.uses.count, record.orphan, tick_);
        if (!first || victim < *first) first = victim;
    }
    if (first) evict(first->record, Cause::TABLE);
    return first.has_value();
}

void Index::find_newest(Slab& slab) const {
    slab.newest = 0;
    for (const Slot& slot : slab.slots) {
        if (slot.holder == Slot::Holder::CHUNK) slab.newest = std::max(slab.newest, records_[slot.owner].tick);
    }
    slab.newest_known = true;
}

void Index::move_slabs(const Window& window) {
    for (const std::uint32_t first_unit : slabs_.slabs_in(window)) {
        const Slab& slab = slabs_.slab_at(first_unit);
        for (std::uint32_t place = 0; place < slab.carved; ++place) {
            if (slab.slots[place].holder == Slot::Holder::CHUNK) {
                evict(static_cast<std::uint32_t>(slab.slots[place].owner), Cause::SLAB);
            }
        }
        raise_generations(slab);
        slabs_.dissolve(first_unit);
    }
}

// Bytes of its slots will be parts of others, with generations of their own.
void Index::raise_generations(const Slab& slab) {
    for (std::uint32_t place = 0; place < slab.carved; ++place) table_.raise_generation(slabs_.number(slab, place));
}

void Index::give_back_idle_class() {
    const auto idle = slabs_.idle_class();
    if (!idle) return;
    for (const auto& slab : slabs_.slabs()) {
        if (slab && slab->class_bytes == *idle) raise_generations(*slab);
    }
    slabs_.forget_class(*idle);
    leaves_.erase(*idle);
}

void Index::evict(std::uint32_t number, Cause cause) {
    const Record& record = records_[number];
    const Digest digest = record.digest;
    const Uses uses = record.uses;
    policy_.prefetch(digest);
    if (!record.in_lower) ++unwritten_eviction_count_;
    evictions_.add(digest, scopes_[record.scope].scope.name_space, Bytes(record.key.data(), record.key_bytes),
                   record.at, cause);
    drop(number);
    policy_.evicted(digest, uses, tick_);
    ++eviction_count_;
}

void Index::orphan(std::uint32_t child) {
    leave_parent(child);
    unlist(child);
    records_[child].orphan = true;
    list(child);
}

void Index::drop(std::uint32_t number) {
    Record& record = records_[number];
    assert(record.live && record.leases == 0);
    unlist(number);
    leaves(record).leave(use_class(record));
    record.live = false;  // so that it is not listed again when its children have left it
    table_.erase(record.digest);
    if (record.in_lower) {
        insert_lower(record.digest, Where::FS);
        set_in_lower(record, false);
    }
    while (record.first_child != NO_RECORD) orphan(record.first_child);
    if (record.parent != NO_RECORD) leave_parent(number);
    Slab& slab = slabs_.slab_of(record.at.slot);
    if (record.tick == slab.newest) slab.newest_known = false;
    used_bytes_ -= slab.class_bytes;
    --chunk_count_;
    if (Quota* quota = quota_of(scopes_[record.scope].scope.tenant)) quota->used -= slab.class_bytes;
    scopes_.take_chunk(record.scope, slab.class_bytes);
    if (record.io > 0) {
        *slabs_.find(record.at.slot) = {Slot::Holder::IO, 0, record.io};
    } else {
        slabs_.give_back(record.at.slot);
    }
    record = Record{};
    free_records_.push_back(number);
}

void Index::make_youngest(Record& record, std::uint64_t now_ms) {
    record.tick = ++tick_;
    record.used_ms = now_ms;
    Slab& slab = slabs_.slab_of(record.at.slot);
    slab.newest = record.tick;
    slab.newest_known = true;
}

void Index::set_parent(std::uint32_t child, std::uint32_t parent) {
    assert(child != parent && records_[child].parent == NO_RECORD);
    unlist(child);
    unlist(parent);
    Record& record = records_[child];
    record.orphan = false;
    record.parent = parent;
    record.next_sibling = records_[parent].first_child;
    if (record.next_sibling != NO_RECORD) records_[record.next_sibling].previous_sibling = child;
    records_[parent].first_child = child;
    ++records_[parent].children;
    list(child);
}

void Index::leave_parent(std::uint32_t child) {
    Record& record = records_[child];
    Record& parent = records_[record.parent];
    assert(parent.children > 0);
    if (record.previous_sibling == NO_RECORD) {
        parent.first_child = record.next_sibling;
    } else {
        records_[record.previous_sibling].next_sibling = record.next_sibling;
    }
    if (record.next_sibling != NO_RECORD) records_[record.next_sibling].previous_sibling = record.previous_sibling;
    --parent.children;
    list(record.parent);
    record.parent = record.next_sibling = record.previous_sibling = NO_RECORD;
}

bool Index::may_descend_from(std::uint32_t record, std::uint32_t ancestor, std::size_t& steps) const {
    for (; record != NO_RECORD; record = records_[record].parent, --steps) {
        if (record == ancestor || steps == 0) return true;
    }
    return false;
}

void Index::unlist(std::uint32_t number) {
    Record& record = records_[number];
    if (!record.place.listed()) return;
    leaves(record).unlist(record.place);
    if (Quota* quota = quota_of(scopes_[record.scope].scope.tenant)) quota->leaves.erase(own_leaf(number));
}

void Index::list(std::uint32_t number) {
    Record& record = records_[number];
    if (record.place.listed() || !is_evictable(record)) return;
    leaves(record).list(record.place, {record.tick, number}, use_class(record), record.orphan);
    if (Quota* quota = quota_of(scopes_[record.scope].scope.tenant)) quota->leaves.insert(own_leaf(number));
}

// ---- Recency and lookup ----

void Index::touch(const Id& name_space, const Id& tenant, std::span<const Bytes> keys, std::uint64_t now_ms,
                  std::size_t again) {
    const Hasher hasher = hasher_for(index_key_, name_space, tenant);
    std::uint32_t child = NO_RECORD;
    std::size_t ancestors = ANCESTORS_MAX;
    for (std::size_t i = keys.size(); i-- > 0;) {  // tail first: no parent is ever older than its child
        const Digest digest = hasher(keys[i]);
        const std::uint32_t number = find(digest, name_space, tenant, keys[i]);
        if (number != NO_RECORD) {
            Record& record = records_[number];
            unlist(number);
            make_youngest(record, now_ms);
            if (i >= again) {
                leaves(record).leave(use_class(record));
                policy_.used(digest, record.uses, tick_);
                leaves(record).arrive(use_class(record));
            }
            list(number);
            // A parent that came back, or came after its child, is its parent again.
            const bool named =
                child != NO_RECORD && records_[child].parent == NO_RECORD && records_[child].parent_digest == digest;
            if (named && !may_descend_from(number, child, ancestors)) set_parent(child, number);
        } else if (i >= again) {
            const Where where = table_.where(digest);  // CPU: another key's digest; PENDING: used once it has come
            if (where == Where::MISS || where == Where::FS) policy_.missed(digest, ++tick_);
        }
        child = number;
    }
}

std::vector<Where> Index::lookup(const Id& name_space, const Id& tenant, std::span<const Bytes> keys) const {
    const Hasher hasher = hasher_for(index_key_, name_space, tenant);
    std::vector<Digest> digests(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
        digests[i] = hasher(keys[i]);
        table_.prefetch(digests[i]);
    }
    std::vector<Where> found(keys.size(), Where::CPU);
    for (std::size_t i = 0; i < keys.size(); ++i) {
        if (find(digests[i], name_space, tenant, keys[i]) != NO_RECORD) continue;
        const Where where = lower_count_ > 0 ? table_.where(digests[i]) : Where::MISS;
        found[i] = where == Where::CPU ? Where::MISS : where;  // CPU: another key's digest
    }
    return found;
}

std::optional<Ref> Index::place_of(const Id& name_space, const Id& tenant, Bytes key) const {
    const std::uint32_t number = find(hasher_for(index_key_, name_space, tenant)(key), name_space, tenant, key);
    if (number == NO_RECORD) return std::nullopt;
    return records_[number].at;
}

// ---- What lower tiers hold ----

void Index::set_lower(const Id& name_space, const Id& tenant, Bytes key, Where where) {
    assert(where != Where::CPU);
    const Digest digest = hasher_for(index_key_, name_space, tenant)(key);
    const std::uint32_t number = find(digest, name_space, tenant, key);
    if (number != NO_RECORD) {
        if (where != Where::PENDING) set_in_lower(records_[number], where == Where::FS);
        return;
    }
    const Where shown = table_.where(digest);
    if (shown == where || shown == Where::CPU) return;  // CPU: another key's digest
    if (shown == Where::MISS) {
        insert_lower(digest, where);
    } else if (where == Where::MISS) {
        erase_lower(digest);
    } else {
        table_.change(digest, where);
    }
}

void Index::set_in_lower(Record& record, bool is) {
    if (record.in_lower != is) scopes_.count_in_lower(record.scope, is);
    record.in_lower = is;
}

void Index::evicted_below(const Id& name_space, const Id& tenant, Bytes key, std::uint64_t now_ms) {
    evictions_.add_below(hasher_for(index_key_, name_space, tenant)(key), name_space, key, now_ms);
}

bool Index::insert_chunk(const Digest& digest, Ref at, std::uint32_t number) {
    if (table_.insert(digest, Where::CPU, at, number)) return true;
    if (!table_.erase_unrecorded_near(digest)) return false;  // a hint gives way to a chunk
    --lower_count_;
    return table_.insert(digest, Where::CPU, at, number);
}

bool Index::insert_lower(const Digest& digest, Where where) {
    // Beyond that nearly every chunk would first have to push a hint out.
    if (table_.entry_count() >= table_.place_count() / 4 * 3) return false;
    if (!table_.insert(digest, where, Ref{}, NO_RECORD)) return false;
    ++lower_count_;
    return true;
}

void Index::erase_lower(const Digest& digest) {
    table_.erase(digest);
    --lower_count_;
}

// ---- Namespaces and tenants ----

std::uint32_t Index::Scopes::add_chunk(const Scope& scope, std::uint64_t nbytes) {
    const auto [at, added] = numbers_.try_emplace(scope, 0);
    if (added) {
        if (free_.empty()) {
            at->second = static_cast<std::uint32_t>(usage_.size());
            usage_.emplace_back();
        } else {
            at->second = free_.back();
            free_.pop_back();
        }
        usage_[at->second] = {scope};
        ++tenants_[scope.tenant];
    }
    ++usage_[at->second].chunks;
    usage_[at->second].bytes += nbytes;
    return at->second;
}

void Index::Scopes::take_chunk(std::uint32_t number, std::uint64_t nbytes) {
    Usage& usage = usage_[number];
    assert(usage.chunks > 0 && usage.bytes >= nbytes);
    usage.bytes -= nbytes;
    if (--usage.chunks > 0) return;
    const auto tenant = tenants_.find(usage.scope.tenant);
    if (--tenant->second == 0) tenants_.erase(tenant);
    numbers_.erase(usage.scope);
    free_.push_back(number);
}

std::uint64_t Index::Scopes::bytes_of(const Id& tenant) const {
    Id last;
    last.fill(std::byte{0xff});
    std::uint64_t bytes = 0;
    // From namespace to namespace: of those there are few, and of tenants there may be very many.
    for (auto at = numbers_.begin(); at != numbers_.end();) {
        const Id name_space = at->first.name_space;
        const auto found = numbers_.find({name_space, tenant});
        if (found != numbers_.end()) bytes += usage_[found->second].bytes;
        at = numbers_.upper_bound({name_space, last});
    }
    return bytes;
}

bool Index::holds(const Selection& what) const {
    const auto& numbers = scopes_.numbers();
    if (what.name_space && what.tenant) return numbers.contains({*what.name_space, *what.tenant});
    if (what.tenant) return scopes_.tenants().contains(*what.tenant);
    if (!what.name_space) return !numbers.empty();
    const auto first = numbers.lower_bound({*what.name_space, Id{}});
    return first != numbers.end() && first->first.name_space == *what.name_space;
}

std::vector<Usage> Index::usage(const std::optional<Scope>& after, std::size_t limit) const {
    std::vector<Usage> page;
    const auto& numbers = scopes_.numbers();
    auto at = after ? numbers.upper_bound(*after) : numbers.begin();
    for (; at != numbers.end() && page.size() < limit; ++at) page.push_back(scopes_[at->second]);
    return page;
}

std::vector<ChunkView> Index::chunks(std::uint32_t& next, const Selection& what, std::size_t steps,
                                     std::size_t limit) const {
    std::vector<ChunkView> page;
    for (; next < records_.size() && steps > 0 && page.size() < limit; ++next, --steps) {
        const Record& record = records_[next];
        if (!is_selected(what, record)) continue;
        page.push_back({scopes_[record.scope].scope, Bytes(record.key.data(), record.key_bytes),
                        class_bytes(record.at.slot), record.used_ms, record.leases > 0});
    }
    if (next >= records_.size()) next = NO_RECORD;
    return page;
}

// ---- Removal ----

bool Index::is_selected(const Selection& what, const Record& record) const {
    if (!record.live || record.used_ms >= what.used_before_ms) return false;
    const Scope& scope = scopes_[record.scope].scope;
    return what.covers(scope.name_space, scope.tenant);
}

bool Index::removed_since(std::uint32_t epoch, const Id& name_space, const Id& tenant) const {
    if (epoch < everything_epoch_) return true;
    for (auto removal = epochs_.rbegin(); removal != epochs_.rend() && removal->number > epoch; ++removal) {
        if (removal->what.covers(name_space, tenant)) return true;
    }
    return false;
}

Removal Index::begin_removal(const Selection& what, std::uint64_t bytes_wanted, bool dry_run) {
    if (bytes_wanted == 0) throw std::invalid_argument("a removal of 0 bytes");
    // A chunk that is being written is neither old nor among the least recently used.
    const bool covers_writes = what.used_before_ms == UINT64_MAX && bytes_wanted == UINT64_MAX;
    if (covers_writes && !dry_run) {
        epochs_.push_back({++epoch_, what});
        if (epochs_.size() > EPOCHS_MAX) {
            everything_epoch_ = epochs_.front().number;
            epochs_.pop_front();
        }
    }
    Removal removal;
    removal.what = what;
    removal.bytes_wanted = bytes_wanted;
    removal.dry_run = dry_run;
    removal.end = static_cast<std::uint32_t>(records_.size());
    removal.chosen = bytes_wanted == UINT64_MAX;
    removal.covers_writes = covers_writes;
    return removal;
}

// Its leases keep a chunk; and the write of it that runs, where that would land after the removal.
bool Index::is_pinned(const Removal& removal, const Record& record) const {
    return removal.covers_writes ? record.leases > 0 : is_held(record);
}

bool Index::remove(Removal& removal, std::size_t steps) {
    while (removal.next < removal.end) {
        if (steps == 0) return false;
        --steps;
        const Record& record = records_[removal.next];
        if (is_selected(removal.what, record)) {
            if (!removal.chosen) {
                consider(removal, removal.next);
            } else if (is_pinned(removal, record)) {
                ++removal.skipped_pinned;
            } else if (!forget(removal, removal.next, steps)) {
                return false;
            }
        }
        ++removal.next;
    }
    if (!removal.chosen) choose(removal);
    while (!removal.oldest.empty()) {
        if (steps == 0) return false;
        --steps;
        const Removal::Candidate& candidate = removal.oldest.front();
        const Record& record = records_[candidate.record];
        if (record.at == candidate.at && is_selected(removal.what, record)) {  // else it has gone, or was used
            if (is_pinned(removal, record)) {
                ++removal.skipped_pinned;
            } else if (!forget(removal, candidate.record, steps)) {
                return false;
            }
        }
        std::pop_heap(removal.oldest.begin(), removal.oldest.end());
        removal.oldest.pop_back();
    }
    return true;
}

// Keeps the oldest chunks that together have the bytes wanted.
void Index::consider(Removal& removal, std::uint32_t number) const {
    const Record& record = records_[number];
    const Removal::Candidate candidate{!record.orphan, record.tick, number, record.at, class_bytes(record.at.slot)};
    if (is_pinned(removal, record)) {
        removal.pinned.push_back(candidate);
        return;
    }
    auto& oldest = removal.oldest;
    oldest.push_back(candidate);
    std::push_heap(oldest.begin(), oldest.end());
    removal.oldest_bytes += candidate.bytes;
    while (removal.oldest_bytes - oldest.front().bytes >= removal.bytes_wanted) {
        removal.oldest_bytes -= oldest.front().bytes;
        std::pop_heap(oldest.begin(), oldest.end());
        oldest.pop_back();
    }
}

// All records were looked at: those that are leased would have gone only if they are older than the newest that goes.
void Index::choose(Removal& removal) const {
    removal.chosen = true;
    for (const Removal::Candidate& leased : removal.pinned) {
        const bool enough = removal.oldest_bytes >= removal.bytes_wanted;
        if (!enough || leased < removal.oldest.front()) ++removal.skipped_pinned;
    }
    removal.pinned.clear();
    if (!removal.dry_run) return;
    removal.chunks = removal.oldest.size();
    removal.bytes = removal.oldest_bytes;
    removal.oldest.clear();
}

// False: it has so many children that the rest waits for the next call.
bool Index::forget(Removal& removal, std::uint32_t number, std::size_t& steps) {
    const Record& record = records_[number];
    if (!removal.dry_run) {
        while (record.first_child != NO_RECORD) {
            orphan(record.first_child);
            if (steps == 0) return false;  // after one child at least, or a call of one step would never get on
            --steps;
        }
    }
    ++removal.chunks;
    removal.bytes += class_bytes(record.at.slot);
    if (removal.dry_run) return true;
    policy_.removed(record.digest, tick_);
    drop(number);
    ++removal_count_;
    return true;
}

// ---- What it says of itself ----

std::vector<Evicted> Index::evictions_of(Bytes key, const std::optional<Scope>& scope, std::size_t limit) {
    std::vector<std::uint64_t> numbers;
    if (scope) {
        const Digest digest = hasher_for(index_key_, scope->name_space, scope->tenant)(key);
        numbers = evictions_.find(limit, [&](const Eviction& eviction) { return eviction.digest == digest; });
    } else if (key.size() > KEY_START_BYTES) {
        numbers = evictions_.find(
            limit, [hash = hash_of_key(key)](const Eviction& eviction) { return eviction.key_hash == hash; });
    } else {
        const Bytes start = key.first(KEY_START_BYTES);
        numbers = evictions_.find(
            limit, [&](const Eviction& eviction) { return std::ranges::equal(eviction.key_start, start); });
    }
    std::vector<Evicted> found;
    for (const std::uint64_t number : numbers) {
        Evicted& evicted = found.emplace_back(number, evictions_[number], std::nullopt, Bytes{});
        if (evicted.how.cause != Cause::SLOT) continue;  // else the slot was not what was needed
        const std::uint32_t newcomer = chunk_at({evicted.how.at.slot, evicted.how.at.generation + 1});
        if (newcomer == NO_RECORD) continue;
        const Record& record = records_[newcomer];
        evicted.newcomer = scopes_[record.scope].scope;
        evicted.newcomer_key = Bytes(record.key.data(), record.key_bytes);
    }
    return found;
}

std::vector<std::pair<const char*, std::uint64_t>> Index::stats() const {
    return {
        {"used_bytes", used_bytes_},
        {"granted_bytes", granted_bytes_},
        {"pinned_bytes", pinned_bytes_},
        {"chunks", chunk_count_},
        {"grants", grant_count_},
        {"leases", lease_ends_.size()},
        {"evictions", eviction_count_},
        {"ghosts", policy_.ghost_count()},
        {"unwritten_evictions", unwritten_eviction_count_},
        {"io_bytes", io_bytes_},
        {"entries", table_.entry_count()},
        {"entries_max", table_.place_count()},
        {"chunks_max", chunks_max_},
        {"removals", removal_count_},
        {"scopes", scopes_.numbers().size()},
        {"tenants", scopes_.tenants().size()},
        {"poison_commits", poison_commit_count_},
        {"digest_collisions", digest_collision_count_},
    };
}

std::vector<std::string> Index::problems_of_sums() const {
    std::vector<std::string> problems = table_.problems();
    const auto add = [&problems](std::string problem) { problems.push_back(std::move(problem)); };
    const auto expect = [&add](const char* what, std::uint64_t counted, std::uint64_t says) {
        if (counted != says)
            add(std::string(what) + ": counted " + std::to_string(counted) + ", says " + std::to_string(says));
    };
    for (std::string& problem : slabs_.problems()) add(std::move(problem));
    for (std::string& problem : policy_.problems()) add(std::move(problem));

    // Slots, and who holds them.
    std::uint64_t used = 0, granted = 0, chunks = 0, grants = 0, io = 0;
    for (const auto& slab : slabs_.slabs()) {
        if (!slab) continue;
        std::uint64_t newest = 0, slab_grants = 0, slab_held = 0;
        for (std::size_t place = 0; place < slab->slots.size(); ++place) {
            const Slot& slot = slab->slots[place];
            const std::uint32_t number = slabs_.number(*slab, place);
            if (slot.holder == Slot::Holder::GROUP) {
                ++grants;
                ++slab_grants;
                granted += slab->class_bytes;
                const auto group = groups_.find(slot.owner);
                if (group == groups_.end() || !group->second.grants.contains(number)) {
                    add("slot " + std::to_string(number) + " is granted to a group that does not know it");
                }
            } else if (slot.holder == Slot::Holder::CHUNK) {
                ++chunks;
                used += slab->class_bytes;
                if (slot.owner >= records_.size() || !records_[slot.owner].live) {
                    add("slot " + std::to_string(number) + " holds a chunk that is not there");
                    continue;
                }
                newest = std::max(newest, records_[slot.owner].tick);
                slab_held += is_held(records_[slot.owner]) ? 1 : 0;
            } else if (slot.holder == Slot::Holder::IO) {
                ++slab_held;
                io += slab->class_bytes;
            }
        }
        const std::string name = "the slab at unit " + std::to_string(slab->first_unit);
        expect((name + ", grants").c_str(), slab_grants, slab->granted);
        expect((name + ", held chunks").c_str(), slab_held, slab->held);
        if (slab->newest_known ? slab->newest != newest : slab->newest < newest) add(name + " has a wrong newest tick");
    }
    expect("used_bytes", used, used_bytes_);
    expect("granted_bytes", granted, granted_bytes_);
    expect("chunks", chunks, chunk_count_);
    expect("grants", grants, grant_count_);
    expect("table entries", chunks + lower_count_, table_.entry_count());

    // Groups' leases.
    std::map<std::uint32_t, std::uint32_t> leases_of;  // by slot
    std::uint64_t leases = 0, group_grants = 0;
    for (const auto& [group, holds] : groups_) {
        if (holds.grants.empty() && holds.leases.empty()) add("group " + std::to_string(group) + " holds nothing");
        group_grants += holds.grants.size();
        for (const auto& [slot, lease] : holds.leases) {
            ++leases;
            ++leases_of[slot];
            if (lease.end->group != group || lease.end->slot != slot) add("a lease's end is another's");
            if (table_.generation(slot) != lease.generation) {
                add("slot " + std::to_string(slot) + " is leased in a generation that it no longer has");
            }
        }
    }
    expect("groups' grants", group_grants, grant_count_);
    expect("leases", leases, lease_ends_.size());

    // Records, and the order in which they go.
    std::size_t evictable = 0, listed = 0;
    std::map<std::pair<std::uint64_t, unsigned>, std::uint64_t> residents;  // by class_bytes and use class
    for (const auto& [class_bytes, leaves] : leaves_) {
        listed += leaves.leaf_count();
        for (unsigned c = 0; c < USE_CLASSES; ++c) {
            if (leaves.residents(c) > 0) residents[{class_bytes, c}] = leaves.residents(c);
        }
    }
    std::map<std::uint32_t, Usage> usage;  // by scope
    std::vector<std::uint32_t> children(records_.size());
    std::uint64_t live = 0, pinned = 0, chunks_leases = 0;
    for (std::uint32_t number = 0; number < records_.size(); ++number) {
        const Record& record = records_[number];
        if (!record.live) continue;
        ++live;
        if (record.parent < children.size()) ++children[record.parent];
        ++usage[record.scope].chunks;
        usage[record.scope].bytes += class_bytes(record.at.slot);
        usage[record.scope].in_lower += record.in_lower ? 1 : 0;
        chunks_leases += record.leases;
        if (record.leases > 0) pinned += class_bytes(record.at.slot);
        if (record.io > 0) io += class_bytes(record.at.slot);
        if (is_evictable(record)) ++evictable;
        --residents[{class_bytes(record.at.slot), use_class(record)}];
    }
    for (std::uint32_t number = 0; number < records_.size(); ++number) {
        const Record& record = records_[number];
        if (record.live) expect("a chunk's children", children[number], record.children);
    }
    expect("chunks' leases", chunks_leases, lease_ends_.size());
    for (const auto& [slot, count] : leases_of) {
        const Slot* held = const_cast<Slabs&>(slabs_).find(slot);
        const bool is_chunk = held != nullptr && held->holder == Slot::Holder::CHUNK && held->owner < records_.size();
        expect(("the leases of slot " + std::to_string(slot)).c_str(), count,
               is_chunk ? records_[held->owner].leases : 0);
    }
    expect("chunks that may be evicted", evictable, listed);
    for (const auto& [of, count] : residents) expect("chunks of a use class, less those counted", 0, count);
    std::map<Id, std::uint64_t> tenants;
    for (const auto& [scope, number] : scopes_.numbers()) {
        ++tenants[scope.tenant];
        if (scopes_[number].scope != scope) add("a namespace and tenant have two numbers");
        expect("a tenant's chunks", usage[number].chunks, scopes_[number].chunks);
        expect("a tenant's chunks that a lower tier has too", usage[number].in_lower, scopes_[number].in_lower);
        expect("a tenant's bytes", usage[number].bytes, scopes_[number].bytes);
    }
    quota_problems(problems);
    expect("pairs of namespace and tenant", usage.size(), scopes_.numbers().size());
    if (tenants != scopes_.tenants()) add("tenants are counted wrongly");
    expect("records", live, chunk_count_);
    expect("free records", records_.size() - live, free_records_.size());
    expect("pinned_bytes", pinned, pinned_bytes_);
    expect("io_bytes", io, io_bytes_);
    if (pinned_bytes_ > arena_bytes_ / 2) add("more than half of the arena is leased");
    if (used_bytes_ + granted_bytes_ > arena_bytes_) add("more is used and granted than the arena has");
    return problems;
}

std::vector<std::string> Index::problems_of_chunks(std::uint32_t& next, std::size_t steps) const {
    std::vector<std::string> problems;
    for (; next < records_.size() && steps > 0; ++next, --steps) {
        const std::uint32_t number = next;
        const Record& record = records_[number];
        if (!record.live) continue;
        const auto add = [&](const char* what) {
            problems.push_back("the chunk in slot " + std::to_string(record.at.slot) + ' ' + what);
        };
        const Slot* slot = const_cast<Slabs&>(slabs_).find(record.at.slot);
        if (slot == nullptr || slot->holder != Slot::Holder::CHUNK || slot->owner != number) {
            add("does not hold that slot");
            continue;
        }
        if (table_.find(record.digest) != number) add("is not what the table finds by its digest");
        if (table_.generation(record.at.slot) != record.at.generation) add("has another generation than its slot");
        if (is_evictable(record)) {
            const Leaf leaf{record.tick, number};
            if (!record.place.listed() || *record.place.at != leaf) add("can not be evicted");
        }
        // Each link alone: a parent may have any number of children, which the sums count.
        const std::uint32_t first = record.first_child, after = record.next_sibling;
        if (first != NO_RECORD && (records_[first].parent != number || records_[first].previous_sibling != NO_RECORD))
            add("begins its children with another's");
        if (after != NO_RECORD &&
            (records_[after].parent != record.parent || records_[after].previous_sibling != number))
            add("is followed by a sibling that is none");
        if (record.parent == NO_RECORD) continue;
        if (record.orphan) add("is an orphan with a parent");
        const Record& parent = records_[record.parent];
        if (!parent.live || parent.scope != record.scope) add("has a parent that is gone or somebody else's");
        const std::uint32_t before = record.previous_sibling;
        if ((before == NO_RECORD ? parent.first_child : records_[before].next_sibling) != number) {
            add("is not among its parent's children");
        }
    }
    if (next >= records_.size()) next = NO_RECORD;
    return problems;
}

std::vector<std::string> Index::problems() const {
    std::uint32_t next = 0;
    std::vector<std::string> problems = problems_of_chunks(next, records_.size());
    std::ranges::move(problems_of_sums(), std::back_inserter(problems));
    return problems;
}

}  // namespace kvstore
