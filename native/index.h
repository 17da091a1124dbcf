// The daemon's index: which chunks are in the cpu tier, who may write which slot, who reads which.
//
// One thread, the daemon's event loop; no I/O and no clock: deadlines and times are arguments. It is the only writer of
// the table, whose readers see a change as soon as it is made. Answers are facts about now; nothing here waits. If a
// client dies, the caller ends its leases and aborts its grants; if the daemon dies, all of this is gone and the
// table's readers are told by their own connection.
//
// A slot's life: free -> granted to a group (generation raised) -> committed: it holds a chunk -> evicted: free.
//                                                              `-> aborted, or the group ended: free
// A chunk that is removed while the daemon reads its slot has gone at once; the slot is free when it has been read.
//
// Eviction happens in `grant`, when nothing is free: of the class's chunks that have neither resident children nor a
// lease, the one that the policy names (policy.h). If another class's slab holds only chunks that were last used before
// all of these, the whole slab changes its class instead. Eviction itself leaves the slot's generation alone; it rises
// when the slot is granted again, and a slab that changes its class has the generations of all its old slots raised
// first. Where chunks are so small that the table is full before the arena, `grant` evicts the chunk of any class that
// goes first: chunks and grants together take at most two thirds of the table's places, so a commit nearly always finds
// one within reach. Where it does not, a chunk without children there makes room, or the commit is refused: to drop a
// chunk from under its children would lose them all. One call evicts at most two chunks for each slot asked for, and
// one slab (or run of slabs) full.
//
// A removal is not an eviction: what an operator wants to be forgotten must not come back. `begin_removal` raises the
// epoch of what it covers, and a commit of a slot that was granted before that ends as an abort. The chunks themselves
// go in slices, so that the caller's loop can do other work in between; chunks committed meanwhile under the new epoch
// may stay or go.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "arena.h"
#include "blocks.h"
#include "digest.h"
#include "evictions.h"
#include "policy.h"
#include "slabs.h"
#include "table.h"

namespace kvstore {

inline constexpr std::byte POISON{0xA5};

enum class CommitCode : int { STORED = 1, PRESENT = 2, TIER_FULL = 3, QUOTA = 4, NOT_GRANTED = 7 };

struct Commit {
    Ref at;
    Id tenant;
    Bytes key;
    Bytes parent;  // empty: none
};

struct Scope {
    Id name_space;
    Id tenant;
    auto operator<=>(const Scope&) const = default;
};

// What the chunks of one tenant in one namespace take.
struct Usage {
    Scope scope;
    std::uint64_t chunks = 0;
    std::uint64_t bytes = 0;     // of their slots
    std::uint64_t in_lower = 0;  // chunks that a lower tier has too, as far as the index knows
};

// Which chunks somebody means.
struct Selection {
    std::optional<Id> name_space;
    std::optional<Id> tenant;
    std::uint64_t used_before_ms = UINT64_MAX;  // last use before that; UINT64_MAX: whenever
    bool covers(const Id& its_name_space, const Id& its_tenant) const {
        return (!name_space || *name_space == its_name_space) && (!tenant || *tenant == its_tenant);
    }
};

// One removal under way, from `begin_removal` until `remove` says that it is done.
struct Removal {
    Selection what;
    std::uint64_t bytes_wanted = UINT64_MAX;  // least recently used first, until that much is free; UINT64_MAX: all
    bool dry_run = false;                     // count only
    std::uint64_t chunks = 0;                 // removed so far
    std::uint64_t bytes = 0;
    std::uint64_t skipped_pinned = 0;  // selected, but leased

    struct Candidate {
        bool parented;
        std::uint64_t tick;
        std::uint32_t record;
        Ref at;
        std::uint64_t bytes;
        bool operator<(const Candidate& other) const {
            return std::tie(parented, tick) < std::tie(other.parented, other.tick);
        }
    };
    std::uint32_t next = 0;  // record to look at; those from `end` on are younger than the removal
    std::uint32_t end = 0;
    bool covers_writes = false;    // a chunk's write that runs ends with it
    bool chosen = false;           // all records were looked at
    std::deque<Candidate> oldest;  // a heap, the newest on top: no more than the bytes wanted
    std::uint64_t oldest_bytes = 0;
    std::deque<Candidate> pinned;
};

struct ChunkView {
    Scope scope;
    Bytes key;
    std::uint64_t bytes;  // of its slot
    std::uint64_t used_ms;
    bool leased;
};

// A chunk that was evicted, and the one that has taken its slot, while that is there.
struct Evicted {
    std::uint64_t number;  // rises with each eviction
    Eviction how;
    std::optional<Scope> newcomer;
    Bytes newcomer_key;
};

// A chunk of the cpu tier that no lower tier has, and nobody is writing there.
struct Unwritten {
    Scope scope;
    Bytes key;
    Ref at;
};

class Index {
  public:
    // `arena` is held, and written, only with verify; without it, it may be null.
    Index(std::shared_ptr<Mapping> table, std::shared_ptr<Mapping> arena, std::uint64_t arena_bytes,
          std::uint64_t unit_bytes, const Id& index_key, const Id& instance_id, Rule rule, bool verify);
    Index(const Index&) = delete;
    Index& operator=(const Index&) = delete;

    void heartbeat() { table_.heartbeat(); }
    void set_prefaulted(std::uint64_t nbytes) {
        slabs_.set_prefaulted(nbytes);
        table_.set_ready(nbytes);
    }

    // std::invalid_argument: of a size class that is one too many.
    std::vector<Ref> grant(std::uint64_t group, std::uint64_t chunk_bytes, std::size_t count);
    // Of which some slot is held, by whomever. Others make way for new ones.
    std::vector<std::uint64_t> classes_in_use() const { return slabs_.classes_in_use(); }
    // `is_use`: each commit is the use of its chunk by the request that brought it.
    std::vector<CommitCode> commit(std::uint64_t group, const Id& name_space, std::span<const Commit> commits,
                                   std::uint64_t now_ms, bool is_use = true);
    std::size_t abort(std::uint64_t group, std::span<const Ref> refs);

    std::vector<bool> lease(std::uint64_t group, std::span<const Ref> refs, std::uint64_t deadline_ms);
    std::vector<bool> release(std::uint64_t group, std::span<const Ref> refs);
    // Those whose deadline has passed, but no more than `limit`. How many.
    std::size_t expire_leases(std::uint64_t now_ms, std::size_t limit);
    // The group's, but no more than `limit`. False: there are more.
    bool end_leases(std::uint64_t group, std::size_t limit);

    // The daemon reads the chunk's slot by itself: it stays put, leased or not, until as many `end_io` calls. False:
    // the chunk has gone. These do not count towards what may be leased; the caller bounds them.
    bool begin_io(Ref ref);
    void end_io(Ref ref);

    // What a lower tier holds, for the table's readers: FS, PENDING (on its way up) or MISS (no longer there). A chunk
    // of the cpu tier is shown as CPU and becomes FS when it is evicted. Only a hint: the lower tier itself decides.
    void set_lower(const Id& name_space, const Id& tenant, Bytes key, Where where);

    // What a lower tier has yet to be given (unwritten.cpp). The keys stay valid until the index changes.
    // Of each class the chunks that would be evicted for the next `nbytes`, in that order; looks at `steps` at most.
    std::vector<Unwritten> next_to_go(std::uint64_t nbytes, std::size_t steps, std::size_t limit) const;
    // Looks at records as `chunks` does.
    std::vector<Unwritten> unwritten(std::uint32_t& next, std::uint64_t used_before_ms, std::size_t steps,
                                     std::size_t limit) const;
    // Of these keys, those that were used at least so often.
    std::vector<Unwritten> used_often(const Id& name_space, const Id& tenant, std::span<const Bytes> keys,
                                      std::uint32_t uses) const;

    // For a person who asks what became of a chunk. For whom, by the caller's numbers, the evictions that follow make
    // room, and when:
    void make_room_for(std::uint32_t evictor, std::uint64_t now_ms) { evictions_.make_room_for(evictor, now_ms); }
    // The tier below has evicted one by itself.
    void evicted_below(const Id& name_space, const Id& tenant, Bytes key, std::uint64_t now_ms);
    std::uint64_t evictions_told() const { return evictions_.count(); }
    // Of the key in that scope or in any, or of all keys whose first 8 bytes these are; newest first. The keys stay
    // valid until the index changes.
    std::vector<Evicted> evictions_of(Bytes key, const std::optional<Scope>& scope, std::size_t limit);

    // What the tenant's chunks may take here; nothing: no limit (quota.cpp). Chunks there are stay: the caller removes
    // the excess. A commit over the quota evicts the tenant's own least recently used chunks, or is refused.
    // Returns what they take now.
    std::uint64_t set_quota(const Id& tenant, std::optional<std::uint64_t> nbytes);
    // A tenant's order of eviction begins with its first quota: looks for its chunks at `steps` records, or drops so
    // much of the order of a tenant that has none any more. False: there is more to do. Until then a commit over the
    // quota may evict another chunk than the oldest, or be refused.
    bool order_for_quotas(std::size_t steps);

    // Head first. One request is one use of each chunk: those `again` at the head it has used before, which makes them
    // young but does not count. A key that is not here, and that the request will not store, counts all the same.
    void touch(const Id& name_space, const Id& tenant, std::span<const Bytes> keys, std::uint64_t now_ms,
               std::size_t again = 0);
    std::vector<Where> lookup(const Id& name_space, const Id& tenant, std::span<const Bytes> keys) const;
    std::optional<Ref> place_of(const Id& name_space, const Id& tenant, Bytes key) const;

    Removal begin_removal(const Selection& what, std::uint64_t bytes_wanted, bool dry_run);
    // True: done. A step is about a microsecond: a record looked at, or a chunk that loses its parent.
    bool remove(Removal& removal, std::size_t steps);

    // Whether any chunk is in this namespace, of this tenant, or both.
    bool holds(const Selection& what) const;
    // In order of namespace and tenant, from the first one after `after`.
    std::vector<Usage> usage(const std::optional<Scope>& after, std::size_t limit) const;
    // Looks at records from `next` on, at `steps` of them or until `limit` are found; `next` becomes the record to go
    // on from, or NO_RECORD at the end. The keys stay valid until the index changes.
    std::vector<ChunkView> chunks(std::uint32_t& next, const Selection& what, std::size_t steps,
                                  std::size_t limit) const;

    std::vector<std::pair<const char*, std::uint64_t>> stats() const;
    // Every invariant that does not hold, all at once or in two parts. What concerns one chunk, of those of `steps`
    // records from `next` on, which becomes the record to go on from, or NO_RECORD at the end:
    std::vector<std::string> problems_of_chunks(std::uint32_t& next, std::size_t steps) const;
    // And all the rest, sums above all, as of one moment: up to 0.3 us a chunk.
    std::vector<std::string> problems_of_sums() const;
    std::vector<std::string> problems() const;

  private:
    struct Record {
        bool live = false;
        std::uint8_t key_bytes = 0;
        std::array<std::byte, KEY_BYTES_MAX> key;
        std::uint32_t scope = 0;
        Digest digest;
        Ref at;
        std::uint64_t tick = 0;  // when it was last touched
        Uses uses;
        Leaves::Place place;
        std::uint64_t used_ms = 0;
        std::uint32_t leases = 0;
        std::uint32_t io = 0;              // the daemon's own reads of the slot
        bool in_lower = false;             // a lower tier has it too
        Digest parent_digest;              // of the parent that the commit named; zero: none
        std::uint32_t parent = NO_RECORD;  // resident, same namespace and tenant
        std::uint32_t children = 0;        // resident chunks whose parent this is
        std::uint32_t first_child = NO_RECORD;
        std::uint32_t next_sibling = NO_RECORD;
        std::uint32_t previous_sibling = NO_RECORD;
        bool orphan = false;  // its parent went before it
    };
    // A tenant's chunks that may be evicted, of any class: orphans first, then by last use.
    struct OwnLeaf {
        bool parented;
        std::uint64_t tick;
        std::uint32_t record;
        auto operator<=>(const OwnLeaf&) const = default;
    };
    struct Quota {
        std::uint64_t nbytes = 0;
        std::uint64_t used = 0;
        std::set<OwnLeaf> leaves;
        std::uint32_t unseen = 0;  // the first record that `leaves` may lack, if it was listed before the quota; or the
                                   // end
    };
    struct LeaseEnd {
        std::uint64_t deadline_ms;
        std::uint64_t group;
        std::uint32_t slot;
        auto operator<=>(const LeaseEnd&) const = default;
    };
    struct Lease {
        std::uint64_t generation;
        std::set<LeaseEnd>::iterator end;
    };
    struct Group {
        std::unordered_set<std::uint32_t> grants;
        std::unordered_map<std::uint32_t, Lease> leases;  // by slot
    };
    // Namespaces and tenants, numbered in pairs while a chunk is in them, and what those chunks take.
    class Scopes {
      public:
        std::uint32_t add_chunk(const Scope& scope, std::uint64_t nbytes);
        void take_chunk(std::uint32_t number, std::uint64_t nbytes);
        void count_in_lower(std::uint32_t number, bool is) { usage_[number].in_lower += is ? 1 : -1; }
        std::uint64_t bytes_of(const Id& tenant) const;
        const Usage& operator[](std::uint32_t number) const { return usage_[number]; }
        const std::map<Scope, std::uint32_t>& numbers() const { return numbers_; }
        const std::map<Id, std::uint64_t>& tenants() const { return tenants_; }  // how many namespaces each is in

      private:
        std::map<Scope, std::uint32_t> numbers_;
        std::map<Id, std::uint64_t> tenants_;
        std::vector<Usage> usage_;
        std::vector<std::uint32_t> free_;
    };
    // Removals that cover all chunks of some kind, whenever they were used.
    struct Epoch {
        std::uint32_t number;
        Selection what;
    };

    // The chunk that the commit before this one, in the same call, has stored: most often the parent of the next.
    struct Stored {
        Id tenant;
        Bytes key;
        Digest digest;
        std::uint32_t record = NO_RECORD;  // none
    };
    CommitCode commit_one(std::uint64_t group, const Id& name_space, const Commit& commit, std::uint64_t now_ms,
                          bool is_use, Stored& previous);
    bool removed_since(std::uint32_t epoch, const Id& name_space, const Id& tenant) const;
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
    void raise_generations(const Slab& slab);
    void give_back_idle_class();
    bool make_room_in_table();
    bool make_place(const Digest& digest, std::uint32_t kept);
    void evict(std::uint32_t record, Cause cause);
    void drop(std::uint32_t record);
    void orphan(std::uint32_t child);
    bool is_selected(const Selection& what, const Record& record) const;
    void consider(Removal& removal, std::uint32_t record) const;
    void choose(Removal& removal) const;
    bool is_pinned(const Removal& removal, const Record& record) const;
    bool forget(Removal& removal, std::uint32_t record, std::size_t& steps);
    void make_youngest(Record& record, std::uint64_t now_ms);
    void set_parent(std::uint32_t child, std::uint32_t parent);  // the child has none
    void leave_parent(std::uint32_t child);
    // Looks at `steps` records at most, and counts them off; true where that is not enough to tell.
    bool may_descend_from(std::uint32_t record, std::uint32_t ancestor, std::size_t& steps) const;
    bool is_unwritten(const Record& record) const { return record.live && !record.in_lower && record.io == 0; }
    Unwritten unwritten_at(std::uint32_t record) const;
    Quota* quota_of(const Id& tenant);
    bool make_room_in(Quota& quota, std::uint64_t nbytes, std::uint32_t kept, bool cut_off);
    void quota_problems(std::vector<std::string>& problems) const;
    OwnLeaf own_leaf(std::uint32_t record) const { return {!records_[record].orphan, records_[record].tick, record}; }
    // Around every change of what decides whether and when a record is evicted.
    void unlist(std::uint32_t record);
    void list(std::uint32_t record);
    void set_in_lower(Record& record, bool is);
    static bool is_held(const Record& record) { return record.leases > 0 || record.io > 0; }
    bool is_evictable(const Record& record) const { return record.live && record.children == 0 && !is_held(record); }
    bool insert_chunk(const Digest& digest, Ref at, std::uint32_t record);
    bool insert_lower(const Digest& digest, Where where);
    void erase_lower(const Digest& digest);
    Leaves& leaves(const Record& record) { return leaves_[class_bytes(record.at.slot)]; }
    unsigned use_class(const Record& record) const { return policy_.use_class(record.uses.count); }

    void end_grant(std::uint64_t group, std::uint32_t slot);  // bookkeeping only; the slot is the caller's
    void drop_grant(std::uint64_t group, std::uint32_t slot);
    void drop_lease(Group& group, std::unordered_map<std::uint32_t, Lease>::iterator lease);
    void forget_if_idle(std::uint64_t group);
    std::uint64_t class_bytes(std::uint32_t slot) const { return slabs_.slab_of(slot).class_bytes; }
    bool holds_poison(std::uint32_t slot) const;

    std::shared_ptr<Mapping> table_memory_;
    std::shared_ptr<Mapping> arena_;  // null without verify
    std::uint64_t arena_bytes_;
    Id index_key_;
    TableWriter table_;
    Slabs slabs_;
    std::uint64_t chunks_max_;  // with grants: what the table takes and still finds a place for nearly every new one
    Blocks<Record> records_;
    std::vector<std::uint32_t> free_records_;
    Policy policy_;
    Evictions evictions_;
    std::map<std::uint64_t, Leaves> leaves_;           // by class_bytes
    std::unordered_map<std::uint64_t, Group> groups_;  // those that hold something
    std::map<Id, Quota> quotas_;                       // by tenant
    std::vector<std::set<OwnLeaf>> dropped_orders_;    // of quotas that there are no more
    Scopes scopes_;
    std::deque<Epoch> epochs_;  // newest last; the oldest are forgotten by saying that they covered everything
    std::uint32_t epoch_ = 0;   // of the newest removal
    std::uint32_t everything_epoch_ = 0;  // of the newest removal that may have covered everything
    std::uint64_t tick_ = 0;
    std::set<LeaseEnd> lease_ends_;
    std::uint64_t used_bytes_ = 0;
    std::uint64_t granted_bytes_ = 0;
    std::uint64_t pinned_bytes_ = 0;
    std::uint64_t grant_count_ = 0;
    std::uint64_t chunk_count_ = 0;
    std::uint64_t io_bytes_ = 0;     // of slots with I/O
    std::uint64_t lower_count_ = 0;  // entries of the table without a record
    std::uint64_t eviction_count_ = 0;
    std::uint64_t unwritten_eviction_count_ = 0;  // of chunks that no lower tier had
    std::uint64_t removal_count_ = 0;
    std::uint64_t poison_commit_count_ = 0;
    std::uint64_t digest_collision_count_ = 0;
};

}  // namespace kvstore
