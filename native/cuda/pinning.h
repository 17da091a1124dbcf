// An arena as the device sees it: page-locked piece by piece, so that copies run at the link's speed.
//
// Page-locking takes seconds for tens of gigabytes, so one thread of the process does it in the background, a piece a
// call, and copies go through as soon as their piece is locked: a copy that needs a piece has it locked next. It never
// runs ahead of the daemon, which decides when the arena's memory is taken: a piece that is not wholly there yet, and
// every piece after a refusal (a limit on locked memory, a driver that cannot), is copied as ordinary memory, which is
// slower and always possible.
//
// Who does what: any thread asks `use`; one thread at a time calls `pin_next`; `unpin` comes when no copy runs any
// more, and waits for a piece being locked. `mutex_` guards the wishes and the refusal, `pinning_` what locks and
// unlocks; a piece's state is an atomic that says LOCKED only after the driver has said so. If the process dies, the
// kernel unlocks; nothing of this outlives it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "arena.h"
#include "copy.h"
#include "cuda/driver.h"

namespace kvstore::cuda {

// Expected to be locked in some 10 ms (not measured), for which the driver may hold up the engine's own calls.
inline constexpr std::uint64_t PIN_PIECE_BYTES = 64 << 20;

// Makes a context current on this thread, and puts back what was. Meanwhile the thread may do what is forbidden while
// some other thread captures a CUDA graph, as engines do right after their start: page-locking or asking an event then
// would break the capture, and concerns none of our streams.
class CurrentContext {
  public:
    CurrentContext(const Driver& driver, Context context);
    ~CurrentContext();
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

  private:
    const Driver& driver_;
    int capture_mode_ = CAPTURE_MODE_RELAXED;  // what it was
};

enum class Memory {
    PINNED,
    PAGEABLE,
    WAIT,  // it will be pinned next
};

enum class Pinned {
    PIECE,    // one more
    NOTHING,  // the daemon has nothing ready that is not pinned; later
    ALL,
    STOPPED,  // refused, or told to
};

class PinnedArena {
  public:
    // `table` says how much of the memory is there; null: all. `pin` false: every copy is of ordinary memory.
    PinnedArena(std::shared_ptr<const Driver> driver, Context context, std::shared_ptr<Mapping> memory,
                std::shared_ptr<const MappedTable> table, bool pin, std::uint64_t piece_bytes);
    ~PinnedArena() { unpin(); }
    PinnedArena(const PinnedArena&) = delete;
    PinnedArena& operator=(const PinnedArena&) = delete;

    std::uint64_t address() const { return address_; }
    std::uint64_t nbytes() const { return nbytes_; }
    // How many bytes from `address` on lie in the same piece. Pieces are locked apart, and a copy may not span two.
    std::uint64_t left_in_piece(std::uint64_t address) const;
    Memory use(std::uint64_t address);

    Pinned pin_next();
    void stop_pinning();
    void unpin();
    std::uint64_t pinned_bytes() const { return pinned_bytes_.load(std::memory_order_relaxed); }
    // Why pinning stopped; empty: it did not.
    std::string refusal() const;

  private:
    bool ready(std::size_t piece) const;
    std::uint64_t bytes_of(std::size_t piece) const;

    const std::shared_ptr<const Driver> driver_;
    const Context context_;
    const std::shared_ptr<Mapping> memory_;
    const std::shared_ptr<const MappedTable> table_;
    const std::uint64_t address_;
    const std::uint64_t nbytes_;
    const std::uint64_t piece_bytes_;
    std::vector<std::atomic<bool>> locked_;  // of each piece
    std::atomic<bool> stopped_;
    std::atomic<std::uint64_t> pinned_bytes_{0};
    mutable std::mutex mutex_;
    std::deque<std::size_t> wanted_;  // guarded by mutex_
    std::string refusal_;             // guarded by mutex_
    std::mutex pinning_;
    std::size_t next_ = 0;  // guarded by pinning_: pieces before it are locked
};

}  // namespace kvstore::cuda
