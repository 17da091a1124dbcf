// Copies between device memory and the arena. This page states what they are ordered against; all of it is here.
//
// 1. A store waits for everything that the compute stream had been given when the store was submitted: the passes that
//    wrote its blocks. A load waits for the same: the passes that still read its blocks, and the zeroing of them.
// 2. A job waits for earlier jobs that touch the same blocks, unless both only read them (two stores).
// 3. Nothing of the arena is read or written before the job is submitted; the slots are granted or leased by then. So
//    a load may read its source at any time from then on (SourceOrder::ANY); a store reads device memory, which rule 1
//    protects only in stream order (SourceOrder::STREAM).
// 4. A job has ended when the event behind its last copy has: that is asked, never waited for. Only then are the
//    generations of its slots compared, and only then is it reported, so nobody commits, frees, releases or unmaps
//    memory under a running copy. That also holds for a job that fails half-way: what was begun ends first.
// 5. What the driver refuses fails its job. When it cannot say any more whether copies have ended (the device is
//    lost), running jobs are reported as failed and not `settled`: the device may still write to their slots, which
//    therefore stay granted until the process has ended. Every later job fails without copying.
// 6. Device memory that is about to be unmapped (an engine that is put to sleep) is not touched any more once `suspend`
//    has returned: jobs that had begun have ended, all others fail without copying, until `resume`.
//
// Who does what: the engine's thread submits, which records an event on the compute stream and queues; one thread here
// hands copies to the driver and asks for their ends (`advance`), at most `in_flight_bytes` at a time in each
// direction, so that a load never waits behind a burst of stores in a queue that only the hardware sees. `mutex_`
// guards the bookkeeping, never held during a call of the driver that may wait. `background=false` makes no thread;
// then the caller calls `advance` (and waiting does so), which tests need to choose the order of things. In a forked
// child everything but `close` is refused. If the process dies, the driver is taken to end its copies before the kernel
// reports the process as ended, which is what the daemon waits for.
#pragma once

#include <sys/types.h>

#include <array>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "arena.h"
#include "copy.h"
#include "cuda/device.h"
#include "cuda/pinning.h"

namespace kvstore::cuda {

inline constexpr std::uint64_t PART_BYTES = 8 << 20;  // of one call of the driver; what an event stands behind
inline constexpr std::size_t PART_FRAGMENTS_MAX = 4096;
inline constexpr std::size_t PAGE_BYTES = 64 << 10;  // the largest of a host that we know, on Arm
inline constexpr std::size_t PART_TILES_MAX = PART_BYTES / TILE_BYTES + PART_FRAGMENTS_MAX;

struct CopySettings {
    // Fragments shorter than this go by the kernel, the rest by the copy engines. 0: none; UINT64_MAX: all.
    std::uint64_t load_kernel_bytes = 0;
    std::uint64_t store_kernel_bytes = 0;
    std::size_t kernel_fragments_min = 1;  // fewer of them in a part are not worth a launch
    unsigned kernel_blocks = 12;           // at most so many multiprocessors copy
    std::uint64_t in_flight_bytes = 64 << 20;
    std::uint64_t pin_piece_bytes = PIN_PIECE_BYTES;
    bool background = true;
};

struct DeviceCopyCounts {
    std::uint64_t engine_bytes = 0;    // by the copy engines
    std::uint64_t kernel_bytes = 0;    // by the kernel
    std::uint64_t pageable_bytes = 0;  // of memory that was not pinned
};

class DeviceCopier {
  public:
    // std::invalid_argument, std::runtime_error (DriverError): what is wrong with the settings or the device.
    static std::shared_ptr<DeviceCopier> open(std::unique_ptr<OpenDevice> device, const CopySettings& settings);
    ~DeviceCopier();
    DeviceCopier(const DeviceCopier&) = delete;
    DeviceCopier& operator=(const DeviceCopier&) = delete;

    const OpenDevice& device() const { return *device_; }

    // Device memory that copies may touch. Regions do not overlap.
    void add_memory(std::uint64_t address, std::uint64_t nbytes);
    // Device memory of its own, freed by `close`: for measurements.
    std::uint64_t allocate(std::uint64_t nbytes);
    // Ordinary memory that stores may read: what the padding of slots is filled from.
    void add_host_memory(std::uint64_t address, std::uint64_t nbytes);
    std::shared_ptr<PinnedArena> map_arena(std::shared_ptr<Mapping> memory, std::shared_ptr<const MappedTable> table,
                                           bool pin);
    // Jobs on it that have not begun fail whole; waits for the others, then unpins.
    void unmap_arena(std::uint64_t address);
    void suspend();
    void resume();
    std::shared_ptr<PinnedArena> arena(std::uint64_t address) const;

    struct Submission {
        std::uint64_t job;
        bool is_load;
        std::vector<Fragment> fragments;
        Expected expected;
        Stream compute_stream;
        std::vector<std::int64_t> blocks;  // which device blocks it touches, for rule 2
    };
    // std::invalid_argument, nothing queued: a fragment that is not between device memory and the one arena of the job
    // (or, of a store, from host memory to it), a job number in use. std::runtime_error: the compute stream refuses.
    void submit(Submission submission);
    bool advance();
    std::vector<Ended> finished();
    bool wait(std::span<const std::uint64_t> jobs, double timeout_s);
    void close();
    // Why no copy is possible any more; empty: the device is well.
    std::string lost() const;
    DeviceCopyCounts counts() const;

  private:
    using Clock = std::chrono::steady_clock;
    enum class Kind { DEVICE, HOST, ARENA };
    struct Region {
        std::uint64_t nbytes;
        Kind kind;
        std::shared_ptr<PinnedArena> arena;
    };
    using Regions = std::map<std::uint64_t, Region>;  // by address

    struct Job {
        Submission work;
        std::shared_ptr<PinnedArena> arena;  // null: no fragments
        std::vector<bool> from_host;         // of each fragment
        std::vector<std::uint64_t> after;    // jobs that must have ended before it begins
        Event computed = nullptr;            // on the compute stream, at submission
        Event begun = nullptr;               // on the copy stream, before the first copy
        std::size_t next_fragment = 0;
        std::uint64_t next_offset = 0;
        std::size_t parts_running = 0;
        bool started = false;
        bool failed = false;
        float milliseconds = 0;
        std::vector<std::uint8_t> current;
        Ended ended;
        bool all_begun() const { return failed || next_fragment == work.fragments.size(); }
    };
    using JobRef = std::shared_ptr<Job>;

    // Whole pages: what is page-locked must share none with anything else that is.
    struct FreePages {
        void operator()(Tile* tiles) const { ::operator delete[](tiles, std::align_val_t{PAGE_BYTES}); }
    };
    using Tiles = std::unique_ptr<Tile, FreePages>;

    // What one round hands to the driver, and the memory it needs until its event.
    struct Part {
        JobRef job;
        Event end = nullptr;
        std::uint64_t nbytes = 0;
        Tiles tiles;  // pinned; null: no kernel in it
    };
    struct Direction {
        std::deque<JobRef> queued;   // guarded by mutex_; the first may have begun
        std::deque<Part> in_flight;  // the copying thread's own
        std::uint64_t bytes = 0;     // in flight; the copying thread's own
    };
    struct Batch;

    DeviceCopier(std::unique_ptr<OpenDevice> device, const CopySettings& settings);
    const Driver& driver() const { return device_->driver(); }
    void require_own_process() const;
    void add_region(std::uint64_t address, std::uint64_t nbytes, Kind kind, std::shared_ptr<PinnedArena> arena);
    const Region* region_of(std::uint64_t address, std::uint64_t nbytes) const;
    std::vector<std::uint64_t> conflicts(const Job& job) const;
    std::vector<std::uint64_t> fail_queued(const std::shared_ptr<PinnedArena>& arena);
    void wait_long(const std::vector<std::uint64_t>& jobs);

    void run();
    bool reap(bool is_load);
    bool begin(bool is_load);
    bool may_begin(const Job& job) const;
    bool next_part(Job& job, Batch& batch);
    bool put_in_flight(const JobRef& job, Batch& batch);
    Result hand_over(Job& job, Batch& batch, Part& part);
    Result hand_over_large(const Batch& batch, bool is_load, Stream stream);
    Result hand_over_tiles(Batch& batch, Part& part, Stream stream);
    Tiles take_tiles();
    Event take_event(std::vector<Event>& pool, unsigned flags);
    void end(const JobRef& job);
    void end_whole(const JobRef& job, bool settled);
    void lose(const std::string& why);
    bool idle() const;
    void synchronize();
    void release_device();

    const pid_t pid_;
    const CopySettings settings_;
    const std::uint64_t part_bytes_;
    std::unique_ptr<OpenDevice> device_;

    std::mutex closing_mutex_;  // held by `close` until everything has ended; taken before mutex_
    mutable std::mutex mutex_;
    std::condition_variable changed_;  // something queued, or closing
    std::condition_variable job_ended_;
    // All below: guarded by mutex_.
    Regions regions_;
    std::unordered_map<std::uint64_t, JobRef> live_;  // queued or running
    std::vector<Ended> ended_;                        // not yet asked for
    std::vector<Event> events_;                       // free ones, without timing
    std::vector<DeviceAddress> allocated_;
    std::string lost_;
    DeviceCopyCounts counts_;
    bool news_ = false;  // since the thread last looked
    bool suspended_ = false;
    bool closing_ = false;
    bool closed_ = false;
    // The queues are guarded by it too; what is in flight belongs to whoever runs `advance`.
    std::array<Direction, 2> directions_;  // stores, loads
    std::vector<Tiles> free_tiles_;        // the copying thread's own, like the next
    std::vector<Event> timed_events_;      // free ones
    std::thread thread_;
};

}  // namespace kvstore::cuda
