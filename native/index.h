// The daemon's index: which chunks are in the cpu tier, who may write which slot, who reads which.
//
// One thread, the daemon's event loop; no I/O and no clock: deadlines and times are arguments. It is the only writer of
// the table, whose readers see a change as soon as it is made. Answers are facts about now; nothing here waits. If a
// client dies, the caller says so with `end_group`; if the daemon dies, all of this is gone and the table's readers are
// told by their own connection.
//
// A slot's life: free -> granted to a group (generation raised) -> committed: it holds a chunk -> evicted: free.
//                                                              `-> aborted, or the group ended: free
//
// Eviction happens in `grant`, when nothing is free: the least recently used chunk of the class that has neither
// resident children nor a lease; one whose parent was taken from under it goes before all others. If another class's
// slab holds only chunks that were last used before that one, the whole slab changes its class instead. Eviction itself
// leaves the slot's generation alone; it rises when the slot is granted again, and a slab that changes its class has
// the generations of all its old slots raised first. One call evicts at most as many chunks as slots were asked for,
// and one slab (or run of slabs) full. Where chunks are so small that the table is full before the arena, a commit
// drops the chunk of any class that goes first.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "arena.h"
#include "digest.h"
#include "slabs.h"
#include "table.h"

namespace kvstore {

inline constexpr std::byte POISON{0xA5};
inline constexpr std::uint64_t TABLE_EMPTY_SHARE = 8;  // an eighth of the table's places stays empty

enum class CommitCode : int { STORED = 1, PRESENT = 2, TIER_FULL = 3, NOT_GRANTED = 7 };

struct Commit {
    Ref at;
    Id tenant;
    Bytes key;
    Bytes parent;  // empty: none
};

class Index {
  public:
    // `arena` is held, and written, only with verify.
    Index(std::shared_ptr<Mapping> table, std::shared_ptr<Mapping> arena, std::uint64_t arena_bytes,
          std::uint64_t unit_bytes, const Id& index_key, const Id& instance_id, bool verify);
    Index(const Index&) = delete;
    Index& operator=(const Index&) = delete;

    void heartbeat() { table_.heartbeat(); }
    void set_prefaulted(std::uint64_t nbytes) {
        slabs_.set_prefaulted(nbytes);
        table_.set_ready(nbytes);
    }

    std::vector<Ref> grant(std::uint64_t group, std::uint64_t chunk_bytes, std::size_t count);
    std::vector<CommitCode> commit(std::uint64_t group, const Id& name_space, std::span<const Commit> commits);
    std::size_t abort(std::uint64_t group, std::span<const Ref> refs);

    std::vector<bool> lease(std::uint64_t group, std::span<const Ref> refs, std::uint64_t deadline_ms);
    std::vector<bool> release(std::uint64_t group, std::span<const Ref> refs);
    std::size_t expire_leases(std::uint64_t now_ms);
    void end_leases(std::uint64_t group);
    void end_group(std::uint64_t group);

    void touch(const Id& name_space, const Id& tenant, std::span<const Bytes> keys);
    std::vector<Where> lookup(const Id& name_space, const Id& tenant, std::span<const Bytes> keys) const;

    std::vector<std::pair<const char*, std::uint64_t>> stats() const;
    std::vector<std::string> problems() const;

  private:
    struct Record {
        bool live = false;
        std::uint8_t key_bytes = 0;
        std::array<std::byte, KEY_BYTES_MAX> key;
        std::uint32_t name_space = 0;  // interned
        std::uint32_t tenant = 0;      // interned
        Digest digest;
        Ref at;
        std::uint64_t tick = 0;  // of its last use
        std::uint32_t leases = 0;
        Digest parent_digest;              // of the parent that the commit named; zero: none
        std::uint32_t parent = NO_RECORD;  // resident, same namespace and tenant
        std::uint32_t children = 0;        // resident chunks whose parent this is
        std::uint32_t first_child = NO_RECORD;
        std::uint32_t next_sibling = NO_RECORD;
        std::uint32_t previous_sibling = NO_RECORD;
        bool orphan = false;  // its parent was evicted before it
    };
    // Chunks that may be evicted, of one class, in the order in which they go: orphans, then by last use.
    struct Victim {
        bool parented;
        std::uint64_t tick;
        std::uint32_t record;
        auto operator<=>(const Victim&) const = default;
    };
    struct Lease {
        std::uint64_t generation;
        std::uint64_t deadline_ms;
    };
    struct Group {
        std::unordered_set<std::uint32_t> grants;
        std::unordered_map<std::uint32_t, Lease> leases;  // by slot
    };
    // Ids of 16 bytes, numbered while a chunk refers to them.
    class Interned {
      public:
        std::uint32_t take(const Id& id);
        void give_back(std::uint32_t number);
        std::optional<std::uint32_t> find(const Id& id) const;
        const Id& id(std::uint32_t number) const { return ids_[number]; }
        std::size_t size() const { return numbers_.size(); }
        std::uint64_t uses(std::uint32_t number) const { return uses_[number]; }

      private:
        std::map<Id, std::uint32_t> numbers_;
        std::vector<Id> ids_;
        std::vector<std::uint64_t> uses_;
        std::vector<std::uint32_t> free_;
    };

    CommitCode commit_one(std::uint64_t group, const Id& name_space, const Commit& commit);
    // The record of exactly this key, or NO_RECORD; `other` says whether its digest belongs to another key.
    std::uint32_t find(const Digest& digest, const Id& name_space, const Id& tenant, Bytes key,
                       bool* other = nullptr) const;
    bool is_key_of(const Record& record, const Id& name_space, const Id& tenant, Bytes key) const;
    bool is_granted(std::uint64_t group, Ref ref);
    // The record of the chunk that this slot holds in this generation, or NO_RECORD.
    std::uint32_t chunk_at(Ref ref);
    std::uint32_t new_record();

    // What one `grant` has found out about other classes' slabs.
    struct Move {
        bool looked = false;
        bool done = false;
        std::optional<Window> window;
    };
    bool make_room(std::uint64_t class_bytes, Move& move);
    void find_newest(Slab& slab) const;
    void move_slabs(const Window& window);
    void evict_oldest(std::uint32_t kept);
    bool make_place(const Digest& digest, std::uint32_t kept);
    void evict(std::uint32_t record);
    void use(Record& record);                                    // its tick becomes the newest
    void set_parent(std::uint32_t child, std::uint32_t parent);  // the child has none
    void leave_parent(std::uint32_t child);
    bool descends_from(std::uint32_t record, std::uint32_t ancestor) const;
    // Around every change of what decides whether and when a record is evicted.
    void unlist(std::uint32_t record);
    void list(std::uint32_t record);
    bool is_evictable(const Record& record) const { return record.live && record.children == 0 && record.leases == 0; }
    Victim victim(std::uint32_t record) const { return {!records_[record].orphan, records_[record].tick, record}; }

    void end_grant(std::uint64_t group, std::uint32_t slot);  // bookkeeping only; the slot is the caller's
    void drop_grant(std::uint64_t group, std::uint32_t slot);
    void drop_lease(std::uint32_t slot);
    void forget_if_idle(std::uint64_t group);
    std::uint64_t class_bytes(std::uint32_t slot) const { return slabs_.slab_of(slot).class_bytes; }
    bool holds_poison(std::uint32_t slot) const;

    std::shared_ptr<Mapping> table_memory_;
    std::shared_ptr<Mapping> arena_;  // null without verify
    std::uint64_t arena_bytes_;
    Id index_key_;
    TableWriter table_;
    Slabs slabs_;
    std::uint64_t chunks_max_;  // that the table takes and still finds a place for nearly every new one
    std::deque<Record> records_;
    std::vector<std::uint32_t> free_records_;
    std::map<std::uint64_t, std::set<Victim>> victims_;  // by class_bytes
    std::unordered_map<std::uint64_t, Group> groups_;    // those that hold something
    Interned namespaces_;
    Interned tenants_;
    std::uint64_t tick_ = 0;
    std::uint64_t earliest_deadline_ms_ = UINT64_MAX;  // no lease ends before it
    std::uint64_t used_bytes_ = 0;
    std::uint64_t granted_bytes_ = 0;
    std::uint64_t pinned_bytes_ = 0;
    std::uint64_t grant_count_ = 0;
    std::uint64_t lease_count_ = 0;
    std::uint64_t chunk_count_ = 0;
    std::uint64_t eviction_count_ = 0;
    std::uint64_t poison_commit_count_ = 0;
    std::uint64_t digest_collision_count_ = 0;
};

}  // namespace kvstore
