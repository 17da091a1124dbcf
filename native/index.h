// The daemon's index: which chunks are in the cpu tier, who may write which slot, who reads which.
//
// One thread, the daemon's event loop; no I/O and no clock: deadlines and times are arguments. It is the only writer of
// the table, whose readers see a change as soon as it is made. Answers are facts about now; nothing here waits. If a
// client dies, the caller says so with `end_group`; if the daemon dies, all of this is gone and the table's readers are
// told by their own connection.
//
// A slot's life: free -> granted to a group (generation raised) -> committed: it holds a chunk -> evicted: free.
//                                                              `-> aborted, or the group ended: free
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
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
    void set_prefaulted(std::uint64_t nbytes) { slabs_.set_prefaulted(nbytes); }

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
        std::uint32_t parent = NO_RECORD;  // resident, same namespace and tenant
        std::uint32_t children = 0;        // resident chunks whose parent this is
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
    std::deque<Record> records_;
    std::vector<std::uint32_t> free_records_;
    std::unordered_map<std::uint64_t, Group> groups_;  // those that hold something
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
