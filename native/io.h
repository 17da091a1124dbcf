// Batched file I/O by a pool of threads: reads and writes of a head block and a payload, in pieces, whose checksums are
// taken while other pieces move.
//
// Who does what: any thread submits; `n_read_threads` threads run reads and `n_write_threads` run writes, in order of
// submission, a request each. A thread has several calls of its request under way at once by Linux's own asynchronous
// I/O (io_submit), so that a single request too keeps a disk busy; one piece each, more where many requests are under
// way or the request is large. The head goes with the first piece, which is written last: it bears the checksum of
// all. What the kernel does not take so, or does at once (a file that is not open for direct I/O), is done one call
// after the other. Reads go first: a write starts only while no read waits, or after it has waited WRITE_PATIENCE. One
// watcher thread looks after deadlines. Finished requests are collected with `poll`; an eventfd becomes readable when
// there is something to collect, so an event loop can watch it. One mutex guards the queues; no I/O is done under it.
//
// Deadlines: a request that is still waiting at its deadline is cancelled (ETIMEDOUT, its memory is free). One that is
// running is reported `late` once, and again, finally, when its calls have returned: until then its memory belongs to
// the kernel, whatever the caller has given up. A disk that never answers holds at most what was submitted.
//
// A thread for each request: a call may block where it should not (a file that is not what it seems, a disk that does
// not answer), and checksums go over the cores. Not io_uring: containers' seccomp profiles forbid it, and asynchronous
// I/O reaches the device's speed at the depths in question.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace kvstore {

inline constexpr std::size_t IO_HEAD_BYTES = 4096;

struct IoRequest {
    std::uint64_t id = 0;
    bool is_write = false;
    int fd = -1;
    std::uint64_t offset = 0;
    std::uintptr_t address = 0;  // of the payload; it lies in the file right behind the head
    std::uint64_t nbytes = 0;    // of the payload; may be 0
    bool has_head = false;
    std::vector<std::byte> head;  // for a write: IO_HEAD_BYTES
    // For a write: where in the head to put the payload's checksum, then that of the head's bytes before
    // `head_checksum_at` (both little-endian, 4 bytes); negative: nowhere.
    int payload_checksum_at = -1;
    int head_checksum_at = -1;
    std::chrono::milliseconds deadline{0};  // from submission; 0: none
};

struct IoDone {
    std::uint64_t id = 0;
    int error = 0;                // errno; ENODATA: the file ends before the request does; ETIMEDOUT: cancelled or late
    bool late = false;            // past its deadline and still running: the memory is not free yet
    std::uint32_t checksum = 0;   // of the payload
    std::vector<std::byte> head;  // of a read with a head
};

class IoPool {
  public:
    IoPool(int n_read_threads, int n_write_threads);
    ~IoPool();  // as close(0)
    IoPool(const IoPool&) = delete;
    IoPool& operator=(const IoPool&) = delete;

    // Payloads must lie in a region: std::invalid_argument from `submit` otherwise.
    void add_region(std::uintptr_t address, std::uint64_t nbytes);
    // std::invalid_argument for what could never be run, std::runtime_error after `close`; else it will be reported.
    void submit(IoRequest request);
    std::vector<IoDone> poll();
    int event_fd() const;
    // Cancels what waits (ECANCELED, to be polled) and waits for what runs. False when a call was still running at the
    // end of the time: its thread is left behind, its memory must stay mapped.
    bool close(std::chrono::milliseconds timeout);

  private:
    struct State;
    std::shared_ptr<State> state_;  // shared with the threads: one that hangs may outlive the pool
};

}  // namespace kvstore
