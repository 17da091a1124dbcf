// Copies between host memories by a pool of threads.
//
// Who does what: any thread submits; the pool's threads take parts of about 256 KiB from the oldest job, so that one
// large job uses every thread and many small fragments cost one turn of the lock. What orders them: `mutex_` guards all
// bookkeeping; bytes are copied outside it. Each thread fences its streaming stores before it takes the lock to say
// that its part is done, and the last one to do so compares the generations, so the comparison is after every read and
// whoever learns of the job's end sees every byte. If a thread of the pool could not go on, the process is ended by the
// runtime: no exception crosses threads, and none can be thrown while copying. In a forked child there are no threads:
// there the pool refuses everything and `close` does nothing.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arena.h"
#include "table.h"

namespace kvstore {

inline constexpr std::size_t COPY_THREADS_MAX = 64;
inline constexpr std::size_t COPY_JOBS_MAX = 65'536;  // queued, running or not yet asked for
inline constexpr std::uint64_t COPY_PART_BYTES = 256 << 10;

// One fragment with streaming stores where its size pays for them; `stream_fence` before anybody is told of it. `next`
// is where the next one's source begins, for its first bytes are asked for ahead (not by fragments too short for
// streaming stores, nor where there are none); a hint, so anything where none follows.
void copy_bytes(std::byte* destination, const std::byte* source, std::size_t nbytes, const std::byte* next);
void stream_fence();
// "avx512", "avx2" or "plain": what this machine's copies use.
const char* copy_kernel_name();

struct Fragment {
    std::uint64_t source;
    std::uint64_t destination;
    std::uint64_t nbytes;
};

// A map of the table, with its reader. Shared: a job in progress keeps it mapped.
struct MappedTable {
    explicit MappedTable(int fd)
        : memory(fd, memfd_bytes(fd), Mapping::Access::READ), reader(memory.data(), memory.size()) {}
    Mapping memory;
    TableReader reader;
};

// What a load's slots must still be after its copy; no table: nothing to compare.
struct Expected {
    std::shared_ptr<const MappedTable> table;
    std::vector<std::uint32_t> slots;
    std::vector<std::uint64_t> generations;
};

struct Ended {
    std::uint64_t job;
    std::vector<std::uint64_t> failed;  // indices: slots' if there are any, else fragments'
    std::uint64_t nbytes;               // copied; 0 for a job that failed whole
    double seconds;
    bool settled = true;  // false: a device may still write to the slots
};

class Copier {
  public:
    // Shared, and never destroyed in a forked child, where waiting for the pool's threads would have no end.
    static std::shared_ptr<Copier> with_threads(std::size_t threads);
    ~Copier();
    Copier(const Copier&) = delete;
    Copier& operator=(const Copier&) = delete;

    // The same region may be added more than once; it counts.
    void add_region(std::uint64_t address, std::uint64_t nbytes);
    // Waits until no running job touches it; queued ones that do fail whole.
    void remove_region(std::uint64_t address);
    // std::invalid_argument, nothing queued: a fragment outside the regions, a job number in use.
    void submit(std::uint64_t job, std::vector<Fragment> fragments, Expected expected);
    std::vector<Ended> finished();
    bool wait(std::span<const std::uint64_t> jobs, double timeout_s);
    // No byte is copied after it, whoever of several callers returns first.
    void close();

  private:
    using Clock = std::chrono::steady_clock;
    explicit Copier(std::size_t threads);
    struct Region {
        std::uint64_t id;
        std::uint64_t count;
    };
    using Regions = std::map<std::pair<std::uint64_t, std::uint64_t>, Region>;  // by (address, nbytes)
    // A job never leaves its list node, and ending it allocates nothing.
    struct Job {
        std::vector<Fragment> fragments;
        Expected expected;
        std::vector<std::uint64_t> regions;  // ids, sorted
        std::size_t next_fragment = 0;       // where the next part begins
        std::uint64_t next_offset = 0;
        std::size_t parts_running = 0;
        bool started = false;
        Clock::time_point started_at;
        std::vector<std::uint8_t> current;  // room for the comparison's answers
        Ended ended;
    };
    using Jobs = std::list<Job>;
    struct Part {
        std::size_t first, last;                  // fragments, both included
        std::uint64_t first_offset, last_offset;  // begins in the first, ends in the last
    };

    void require_own_process() const;
    void require_open() const;
    Regions::const_iterator region_of(std::uint64_t address, std::uint64_t nbytes, Regions::const_iterator last) const;
    void work();
    static Part cut(Job& job);
    void run(const Job& job, const Part& part);
    static void compare(Job& job);
    void fail_whole(Jobs& from, Jobs::iterator job);
    void end(Jobs& from, Jobs::iterator job);

    const pid_t pid_;
    std::mutex closing_mutex_;  // held while `close` waits for the threads; taken before mutex_
    std::mutex mutex_;
    std::condition_variable work_ready_;  // something queued, or closing
    std::condition_variable job_ended_;
    // All below: guarded by mutex_.
    Jobs queued_;                                         // with bytes that no thread has taken
    Jobs running_;                                        // every part taken, some not done
    Jobs ended_;                                          // not yet asked for
    std::unordered_map<std::uint64_t, const Job*> live_;  // queued or running
    Regions regions_;
    std::uint64_t next_region_id_ = 1;
    bool closed_ = false;
    // Not guarded.
    std::atomic<bool> closing_{false};  // threads look at it between fragments
    std::vector<std::thread> threads_;
};

}  // namespace kvstore
