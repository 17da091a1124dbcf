#include "io.h"

#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "checksum.h"

namespace kvstore {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto WRITE_PATIENCE = std::chrono::milliseconds(20);
constexpr std::size_t PIECES_AT_ONCE_MAX = 4;
constexpr int NICENESS = 5;  // of a thread that moves pieces: where cores are few, the event loop goes first

struct FreeAligned {
    void operator()(std::byte* block) const { std::free(block); }
};
using HeadBlock = std::unique_ptr<std::byte, FreeAligned>;

HeadBlock make_head_block() {
    auto* block = static_cast<std::byte*>(std::aligned_alloc(IO_HEAD_BYTES, IO_HEAD_BYTES));
    if (block == nullptr) throw std::bad_alloc();
    return HeadBlock(block);
}

void put_checksum(std::byte* head, int at, std::uint32_t value) {
    for (int i = 0; i < 4; ++i) head[at + i] = static_cast<std::byte>(value >> (8 * i));
}

// A part of the payload.
struct Piece {
    std::uint64_t at = 0;
    std::uint64_t nbytes = 0;
};

struct Job {
    Job(IoRequest&& what, std::uint64_t number)
        : request(std::move(what)),
          ticket(number),
          pieces(std::max<std::uint64_t>(1, request.nbytes / CRC32C_PIECE_BYTES)),
          checksums(pieces),
          unsummed(pieces),
          untaken(pieces),
          unfinished(pieces) {}

    const IoRequest request;
    const std::uint64_t ticket;  // order of submission, unique
    const Clock::time_point submitted = Clock::now();
    const std::size_t pieces;
    // Each element is written by the thread that took the piece, and read when `unsummed` or `unfinished` says so.
    std::vector<std::uint32_t> checksums;
    std::atomic<std::size_t> unsummed;  // pieces of a write that have no checksum yet
    std::vector<std::byte> head;        // that was read
    // Under the pool's mutex:
    std::size_t untaken;     // the last piece is taken first
    std::size_t unfinished;  // pieces
    int error = 0;

    Clock::time_point deadline() const { return submitted + request.deadline; }

    // The first one has what is left over, for all others are of the size that checksums are joined by.
    Piece piece(std::size_t number) const {
        const std::uint64_t first = request.nbytes - (pieces - 1) * CRC32C_PIECE_BYTES;
        if (number == 0) return {0, first};
        return {first + (number - 1) * CRC32C_PIECE_BYTES, CRC32C_PIECE_BYTES};
    }

    // `count` of them, which lie one behind the other.
    Piece span(std::size_t first, std::size_t count) const {
        const Piece last = piece(first + count - 1);
        const std::uint64_t begin = piece(first).at;
        return {begin, last.at + last.nbytes - begin};
    }

    void sum(std::size_t first, std::size_t count) {
        for (std::size_t number = first; number < first + count; ++number) {
            const auto [at, nbytes] = piece(number);
            checksums[number] = crc32c(reinterpret_cast<const void*>(request.address + at), nbytes);
        }
    }

    std::uint32_t checksum() const {
        std::uint32_t whole = checksums[0];
        for (std::size_t i = 1; i < pieces; ++i) whole = crc32c_joined(whole, checksums[i]);
        return whole;
    }
};
using Jobs = std::deque<std::shared_ptr<Job>>;

// The whole of a piece, behind the head where there is one, or an errno. A call that stops half way is taken up where
// it stopped.
int transfer(const IoRequest& request, std::byte* head, Piece piece) {
    const std::uint64_t head_bytes = head != nullptr ? IO_HEAD_BYTES : 0;
    const std::uint64_t begin = request.offset + piece.at + (request.has_head && head == nullptr ? IO_HEAD_BYTES : 0);
    std::uint64_t done = 0;
    while (done < head_bytes + piece.nbytes) {
        iovec parts[2];
        int count = 0;
        if (done < head_bytes) parts[count++] = {head + done, head_bytes - done};
        const std::uint64_t in_piece = done > head_bytes ? done - head_bytes : 0;
        if (in_piece < piece.nbytes)
            parts[count++] = {reinterpret_cast<void*>(request.address + piece.at + in_piece), piece.nbytes - in_piece};
        const auto at = static_cast<off_t>(begin + done);
        const ssize_t moved =
            request.is_write ? ::pwritev(request.fd, parts, count, at) : ::preadv(request.fd, parts, count, at);
        if (moved < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        if (moved == 0) return request.is_write ? EIO : ENODATA;
        done += static_cast<std::uint64_t>(moved);
    }
    return 0;
}

int write_pieces(Job& job, std::size_t first, std::size_t count, std::byte* head) {
    const IoRequest& request = job.request;
    const Piece span = job.span(first, count);
    if (request.payload_checksum_at >= 0) job.sum(first, count);
    if ((job.unsummed -= count) == 0) job.unsummed.notify_all();
    if (first > 0 || !request.has_head) return transfer(request, nullptr, span);
    std::memcpy(head, request.head.data(), IO_HEAD_BYTES);
    if (request.payload_checksum_at >= 0) {
        // All others are taken, and a checksum waits for nothing.
        while (const std::size_t left = job.unsummed) job.unsummed.wait(left);
        put_checksum(head, request.payload_checksum_at, job.checksum());
    }
    if (request.head_checksum_at >= 0)
        put_checksum(head, request.head_checksum_at, crc32c(head, request.head_checksum_at));
    return transfer(request, head, span);
}

int read_pieces(Job& job, std::size_t first, std::size_t count, std::byte* head) {
    const bool with_head = first == 0 && job.request.has_head;
    const int error = transfer(job.request, with_head ? head : nullptr, job.span(first, count));
    if (error != 0) return error;
    if (with_head) job.head.assign(head, head + IO_HEAD_BYTES);
    job.sum(first, count);
    return 0;
}

}  // namespace

struct IoPool::State {
    std::mutex mutex;
    std::condition_variable read_waits;
    std::condition_variable write_waits;
    std::condition_variable deadlines_changed;
    std::condition_variable thread_ended;
    // All below: under `mutex`.
    Jobs reads;  // with pieces that nobody has taken
    Jobs writes;
    std::set<std::pair<Clock::time_point, std::uint64_t>> deadlines;  // of jobs by ticket, waiting or running
    std::map<std::uint64_t, std::uint64_t> running;                   // ticket to id, from the first piece on
    std::vector<IoDone> finished;
    std::map<std::uintptr_t, std::uint64_t> regions;
    std::uint64_t next_ticket = 0;
    int threads = 0;
    bool closing = false;

    int event_fd = -1;  // written once, before the threads start

    ~State() {
        if (event_fd >= 0) ::close(event_fd);
    }

    void report(IoDone done) { finished.push_back(std::move(done)); }

    // Outside the mutex where there is a choice: whoever it wakes wants that next.
    void say() const {
        const std::uint64_t one = 1;
        // Non-blocking: it fails only where the counter is full, and then the descriptor is readable anyway.
        [[maybe_unused]] const ssize_t ignored = ::write(event_fd, &one, sizeof one);
    }

    void finish(Job& job) {
        running.erase(job.ticket);
        if (job.request.deadline.count() > 0) deadlines.erase({job.deadline(), job.ticket});
        const bool has_checksum = job.error == 0 && (!job.request.is_write || job.request.payload_checksum_at >= 0);
        report({.id = job.request.id,
                .error = job.error,
                .late = false,
                .checksum = has_checksum ? job.checksum() : 0,
                .head = std::move(job.head)});
    }

    // The pieces that nobody has taken will not be moved. The job leaves its queue by the caller.
    void give_up(Job& job, int error) {
        if (job.error == 0) job.error = error;
        job.unfinished -= std::exchange(job.untaken, 0);
        if (job.unfinished == 0) finish(job);
    }

    bool inside_a_region(std::uintptr_t address, std::uint64_t nbytes) const {
        auto region = regions.upper_bound(address);
        if (region == regions.begin()) return false;
        --region;
        const std::uint64_t into = address - region->first;
        return into <= region->second && nbytes <= region->second - into;
    }

    // Moves the next pieces of the first job, and wakes whoever may go on beside it. The more jobs are under way, the
    // more pieces go with one call: then they keep the disk busy, and each call costs a wake-up.
    void work(std::unique_lock<std::mutex>& lock, Jobs& queue, std::byte* head) {
        const std::shared_ptr<Job> job = queue.front();
        running.emplace(job->ticket, job->request.id);
        const std::size_t count = std::min({job->untaken, running.size(), PIECES_AT_ONCE_MAX});
        const std::size_t first = job->untaken -= count;
        if (first == 0) queue.pop_front();
        auto& alike = job->request.is_write ? write_waits : read_waits;
        const bool more = !queue.empty();
        const bool writes_may_start = !job->request.is_write && reads.empty() && !writes.empty();
        lock.unlock();
        if (more) alike.notify_one();
        if (writes_may_start) write_waits.notify_one();
        const int error = (job->request.is_write ? write_pieces : read_pieces)(*job, first, count, head);
        lock.lock();
        if (job->error == 0) job->error = error;
        if ((job->unfinished -= count) > 0) return;
        finish(*job);
        if (finished.size() > 1) return;  // it was said already
        lock.unlock();
        say();
        lock.lock();
    }

    void read_thread() {
        ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), NICENESS);
        const HeadBlock head = make_head_block();
        std::unique_lock lock(mutex);
        for (;;) {
            read_waits.wait(lock, [this] { return closing || !reads.empty(); });
            if (reads.empty()) break;
            work(lock, reads, head.get());
        }
        leave();
    }

    void write_thread() {
        ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), NICENESS);
        const HeadBlock head = make_head_block();
        std::unique_lock lock(mutex);
        for (;;) {
            if (writes.empty()) {
                if (closing) break;
                write_waits.wait(lock);
                continue;
            }
            const auto patience_ends = writes.front()->submitted + WRITE_PATIENCE;
            if (!reads.empty() && Clock::now() < patience_ends) {
                write_waits.wait_until(lock, patience_ends);
                continue;
            }
            // More than one may have been woken only to be patient: `work` passes it on.
            work(lock, writes, head.get());
        }
        leave();
    }

    void watcher_thread() {
        std::unique_lock lock(mutex);
        while (!closing) {
            if (deadlines.empty()) {
                deadlines_changed.wait(lock);
                continue;
            }
            const auto [when, ticket] = *deadlines.begin();
            if (Clock::now() < when) {
                deadlines_changed.wait_until(lock, when);
                continue;
            }
            deadlines.erase(deadlines.begin());
            if (const auto found = running.find(ticket); found != running.end())
                report({.id = found->second, .error = ETIMEDOUT, .late = true, .checksum = 0, .head = {}});
            for (auto* queue : {&reads, &writes}) {
                const auto found = std::ranges::find_if(*queue, [&](const auto& job) { return job->ticket == ticket; });
                if (found == queue->end() || running.contains(ticket)) continue;
                give_up(**found, ETIMEDOUT);
                queue->erase(found);
                break;
            }
            say();
        }
        leave();
    }

    void leave() {
        --threads;
        thread_ended.notify_all();
    }
};

IoPool::IoPool(int n_read_threads, int n_write_threads) : state_(std::make_shared<State>()) {
    if (n_read_threads < 1 || n_write_threads < 1) throw std::invalid_argument("a pool needs a thread for each way");
    state_->event_fd = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (state_->event_fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    const auto start = [this](void (State::*body)()) {
        {
            const std::lock_guard lock(state_->mutex);
            ++state_->threads;
        }
        try {
            std::thread([state = state_, body] { ((*state).*body)(); }).detach();
        } catch (...) {
            {
                const std::lock_guard lock(state_->mutex);
                --state_->threads;
            }
            close(std::chrono::milliseconds(1000));
            throw;
        }
    };
    for (int i = 0; i < n_read_threads; ++i) start(&State::read_thread);
    for (int i = 0; i < n_write_threads; ++i) start(&State::write_thread);
    start(&State::watcher_thread);
}

IoPool::~IoPool() {
    close(std::chrono::milliseconds(0));
}

void IoPool::add_region(std::uintptr_t address, std::uint64_t nbytes) {
    if (nbytes > std::numeric_limits<std::uintptr_t>::max() - address)
        throw std::invalid_argument("a region that ends beyond the address space");
    const std::lock_guard lock(state_->mutex);
    state_->regions[address] = nbytes;
}

void IoPool::submit(IoRequest request) {
    const auto in_head = [](int at) { return at < 0 || static_cast<std::size_t>(at) + 4 <= IO_HEAD_BYTES; };
    if (request.is_write && request.has_head != (request.head.size() == IO_HEAD_BYTES))
        throw std::invalid_argument("a head of " + std::to_string(request.head.size()) + " bytes");
    if ((request.payload_checksum_at >= 0 || request.head_checksum_at >= 0) && !(request.is_write && request.has_head))
        throw std::invalid_argument("a place for a checksum, but no head to write it to");
    if (!in_head(request.payload_checksum_at) || !in_head(request.head_checksum_at))
        throw std::invalid_argument("a place for a checksum beyond the head");
    if (!request.has_head && request.nbytes == 0) throw std::invalid_argument("a request of no bytes");
    constexpr auto OFFSET_MAX = static_cast<std::uint64_t>(std::numeric_limits<off_t>::max());
    if (request.nbytes > OFFSET_MAX - IO_HEAD_BYTES || request.offset > OFFSET_MAX - IO_HEAD_BYTES - request.nbytes)
        throw std::invalid_argument("a request that ends beyond what a file offset can say");
    const bool is_write = request.is_write;
    {
        const std::lock_guard lock(state_->mutex);
        if (state_->closing) throw std::runtime_error("the pool is closed");
        if (request.nbytes > 0 && !state_->inside_a_region(request.address, request.nbytes))
            throw std::invalid_argument("a payload outside the regions");
        auto job = std::make_shared<Job>(std::move(request), state_->next_ticket++);
        if (job->request.deadline.count() > 0) {
            const auto when = job->deadline();
            const bool soonest = state_->deadlines.empty() || when < state_->deadlines.begin()->first;
            state_->deadlines.emplace(when, job->ticket);
            if (soonest) state_->deadlines_changed.notify_one();
        }
        (is_write ? state_->writes : state_->reads).push_back(std::move(job));
    }
    (is_write ? state_->write_waits : state_->read_waits).notify_one();
}

std::vector<IoDone> IoPool::poll() {
    std::uint64_t count;
    [[maybe_unused]] const ssize_t ignored = ::read(state_->event_fd, &count, sizeof count);
    std::vector<IoDone> finished;
    const std::lock_guard lock(state_->mutex);
    finished.swap(state_->finished);
    return finished;
}

int IoPool::event_fd() const {
    return state_->event_fd;
}

bool IoPool::close(std::chrono::milliseconds timeout) {
    std::unique_lock lock(state_->mutex);
    state_->closing = true;
    for (auto* queue : {&state_->reads, &state_->writes}) {
        for (const auto& job : *queue) state_->give_up(*job, ECANCELED);
        queue->clear();
    }
    state_->say();
    state_->read_waits.notify_all();
    state_->write_waits.notify_all();
    state_->deadlines_changed.notify_all();
    // A thread counts itself out under the mutex as its last act, and holds the state itself: nothing is left to join.
    return state_->thread_ended.wait_for(lock, timeout, [this] { return state_->threads == 0; });
}

}  // namespace kvstore
