#include "io.h"

#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
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
constexpr std::size_t CALLS_PER_REQUEST = 16;  // in which a large one goes that is alone
constexpr std::size_t CALLS_MAX = 32;          // of one request, under way at once
// Of all writes together, but two of each in any case: enough for the disk, and a read that comes then goes soon.
constexpr std::size_t WRITE_CALLS_MAX = 16;
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
          checksums(pieces) {}

    const IoRequest request;
    const std::uint64_t ticket;  // order of submission, unique
    const Clock::time_point submitted = Clock::now();
    const std::size_t pieces;
    // The thread's that runs it:
    std::vector<std::uint32_t> checksums;
    std::vector<std::byte> head;  // that was read

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
using Jobs = std::deque<std::unique_ptr<Job>>;

// One call: what moves, and where in the file.
struct Span {
    std::size_t first = 0;  // piece
    std::size_t count = 0;  // of pieces; 0: nothing
    Piece payload;
    std::byte* head = nullptr;  // goes before it
    std::uint64_t done = 0;     // bytes
    iovec parts[2] = {};

    std::uint64_t nbytes() const { return (head != nullptr ? IO_HEAD_BYTES : 0) + payload.nbytes; }

    // What is left of it, in `parts`; how many of those, and where they begin.
    std::pair<int, off_t> rest(const IoRequest& request) {
        const std::uint64_t head_bytes = head != nullptr ? IO_HEAD_BYTES : 0;
        int used = 0;
        if (done < head_bytes) parts[used++] = {head + done, head_bytes - done};
        const std::uint64_t into = done > head_bytes ? done - head_bytes : 0;
        if (into < payload.nbytes)
            parts[used++] = {reinterpret_cast<void*>(request.address + payload.at + into), payload.nbytes - into};
        const std::uint64_t behind_head = request.has_head && head == nullptr ? IO_HEAD_BYTES : 0;
        return {used, static_cast<off_t>(request.offset + behind_head + payload.at + done)};
    }
};

// What is left of it, or an errno. A call that stops half way is taken up where it stopped.
int transfer(const IoRequest& request, Span& span) {
    while (span.done < span.nbytes()) {
        const auto [used, at] = span.rest(request);
        const ssize_t moved =
            request.is_write ? ::pwritev(request.fd, span.parts, used, at) : ::preadv(request.fd, span.parts, used, at);
        if (moved < 0) {
            if (errno == EINTR) continue;
            return errno;
        }
        if (moved == 0) return request.is_write ? EIO : ENODATA;
        span.done += static_cast<std::uint64_t>(moved);
    }
    return 0;
}

// A thread's way to move a request: several calls under way at once by Linux's own asynchronous I/O (`io_submit`), and
// checksums taken beside them. What the kernel does not take so, a plain call does.
class Mover {
  public:
    Mover() : head_(make_head_block()) {}
    ~Mover() {
        if (context_ != 0) ::syscall(SYS_io_destroy, context_);
    }
    Mover(const Mover&) = delete;
    Mover& operator=(const Mover&) = delete;

    // 0 or an errno. `at_once`: pieces with one call; `under_way_max`: calls, CALLS_MAX at most. Once `closing`, what
    // is not under way is given up.
    int move(Job& job, std::size_t at_once, std::size_t under_way_max, const std::atomic<bool>& closing) {
        job_ = &job;
        error_ = 0;
        ready_ = 0;
        for (Span& span : spans_) span.count = 0;  // some were given up
        const bool is_write = job.request.is_write;
        if (job.pieces <= at_once || !may_be_asynchronous(job.request.fd)) at_once = job.pieces;
        const std::size_t calls = (job.pieces + at_once - 1) / at_once;
        for (std::size_t i = 0; i < calls && error_ == 0; ++i) {
            // A head to be written bears the checksum of all, so its call is the last one.
            const std::size_t first = (is_write ? (i + 1) % calls : i) * at_once;
            if (is_write && job.request.payload_checksum_at >= 0) job.sum(first, std::min(at_once, job.pieces - first));
            while (under_way_ + ready_ == under_way_max) land(1);
            if (closing) error_ = ECANCELED;
            if (error_ != 0) break;
            prepare(first, std::min(at_once, job.pieces - first));
            if (is_write || i + 1 == calls || under_way_ + ready_ == under_way_max) start(calls == 1);
        }
        while (under_way_ > 0) land(is_write ? under_way_ : 1);
        return error_;
    }

  private:
    void prepare(std::size_t first, std::size_t count) {
        const IoRequest& request = job_->request;
        std::size_t number = 0;
        while (spans_[number].count != 0) ++number;
        Span& span = spans_[number];
        span = {.first = first,
                .count = count,
                .payload = job_->span(first, count),
                .head = first == 0 && request.has_head ? head_.get() : nullptr};
        if (request.is_write && span.head != nullptr) seal_head();
        const auto [used, at] = span.rest(request);
        iocb& call = calls_[number];
        call = {};
        call.aio_data = number;
        call.aio_lio_opcode = request.is_write ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV;
        call.aio_fildes = static_cast<std::uint32_t>(request.fd);
        call.aio_buf = reinterpret_cast<std::uintptr_t>(span.parts);
        call.aio_nbytes = static_cast<std::uint64_t>(used);
        call.aio_offset = at;
        prepared_[ready_++] = &call;
    }

    void seal_head() {
        const IoRequest& request = job_->request;
        std::byte* head = head_.get();
        std::memcpy(head, request.head.data(), IO_HEAD_BYTES);
        if (request.payload_checksum_at >= 0) put_checksum(head, request.payload_checksum_at, job_->checksum());
        if (request.head_checksum_at >= 0)
            put_checksum(head, request.head_checksum_at, crc32c(head, request.head_checksum_at));
    }

    // `alone`: there is nothing to do beside it, so it is waited for at once.
    void start(bool alone) {
        long taken = 0;
        if (!alone) taken = std::max(0L, ::syscall(SYS_io_submit, context_, ready_, prepared_));
        under_way_ += static_cast<std::size_t>(taken);
        for (std::size_t i = static_cast<std::size_t>(taken); i < ready_; ++i) {
            Span& span = spans_[prepared_[i]->aio_data];
            end(span, transfer(job_->request, span));
        }
        ready_ = 0;
    }

    // Not on a network filesystem, or others that do not lie on a block device themselves: no process ends, not even a
    // killed one, while an asynchronous call of it is under way; a plain call to a server that does not answer ends
    // with its process.
    bool may_be_asynchronous(int fd) {
        struct stat about;
        if (::fstat(fd, &about) != 0 || !S_ISREG(about.st_mode) || major(about.st_dev) == 0) return false;
        if (context_ == 0 && !refused_) refused_ = ::syscall(SYS_io_setup, CALLS_MAX, &context_) != 0;
        return !refused_;
    }

    // Waits for so many of those under way.
    void land(std::size_t least) {
        io_event events[CALLS_MAX];
        const long landed = ::syscall(SYS_io_getevents, context_, least, CALLS_MAX, events, nullptr);
        for (long i = 0; i < landed; ++i) {  // none where a signal came
            --under_way_;
            Span& span = spans_[events[i].data];
            const auto moved = static_cast<std::int64_t>(events[i].res);
            if (moved > 0) span.done = static_cast<std::uint64_t>(moved);
            end(span, moved < 0 ? static_cast<int>(-moved) : transfer(job_->request, span));
        }
    }

    void end(Span& span, int error) {
        if (error == 0 && !job_->request.is_write) {
            if (span.head != nullptr) job_->head.assign(span.head, span.head + IO_HEAD_BYTES);
            job_->sum(span.first, span.count);
        }
        if (error_ == 0) error_ = error;
        span.count = 0;
    }

    const HeadBlock head_;
    aio_context_t context_ = 0;  // made when first needed
    bool refused_ = false;       // there is no such I/O here
    // Of the request that is moved:
    Job* job_ = nullptr;
    int error_ = 0;
    std::size_t ready_ = 0;  // of `prepared_`
    std::size_t under_way_ = 0;
    Span spans_[CALLS_MAX];
    iocb calls_[CALLS_MAX];  // of each span
    iocb* prepared_[CALLS_MAX];
};

}  // namespace

struct IoPool::State {
    std::mutex mutex;
    std::condition_variable read_waits;
    std::condition_variable write_waits;
    std::condition_variable deadlines_changed;
    std::condition_variable thread_ended;
    // All below: under `mutex`.
    Jobs reads;  // that nobody has taken
    Jobs writes;
    std::set<std::pair<Clock::time_point, std::uint64_t>> deadlines;  // of jobs by ticket, waiting or running
    std::map<std::uint64_t, std::uint64_t> running;                   // ticket to id
    std::vector<IoDone> finished;
    std::map<std::uintptr_t, std::uint64_t> regions;
    std::uint64_t next_ticket = 0;
    int threads = 0;
    std::atomic<bool> closing = false;  // written under `mutex`

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

    void finish(Job& job, int error) {
        running.erase(job.ticket);
        if (job.request.deadline.count() > 0) deadlines.erase({job.deadline(), job.ticket});
        const bool has_checksum = error == 0 && (!job.request.is_write || job.request.payload_checksum_at >= 0);
        report({.id = job.request.id,
                .error = error,
                .late = false,
                .checksum = has_checksum ? job.checksum() : 0,
                .head = std::move(job.head)});
    }

    bool inside_a_region(std::uintptr_t address, std::uint64_t nbytes) const {
        auto region = regions.upper_bound(address);
        if (region == regions.begin()) return false;
        --region;
        const std::uint64_t into = address - region->first;
        return into <= region->second && nbytes <= region->second - into;
    }

    // Runs the first job, and wakes whoever may go on beside it. The more jobs are under way, the more pieces go with
    // one call: then they keep the disk busy, and each call costs a request to it and an interrupt. So it is with a
    // large job alone.
    void work(std::unique_lock<std::mutex>& lock, Jobs& queue, Mover& mover) {
        const std::unique_ptr<Job> job = std::move(queue.front());
        queue.pop_front();
        running.emplace(job->ticket, job->request.id);
        const std::size_t at_once =
            std::min(std::max(running.size(), job->pieces / CALLS_PER_REQUEST), PIECES_AT_ONCE_MAX);
        const std::size_t under_way_max =
            job->request.is_write ? std::max<std::size_t>(2, WRITE_CALLS_MAX / running.size()) : CALLS_MAX;
        auto& alike = job->request.is_write ? write_waits : read_waits;
        const bool more = !queue.empty();
        const bool writes_may_start = !job->request.is_write && reads.empty() && !writes.empty();
        lock.unlock();
        if (more) alike.notify_one();
        if (writes_may_start) write_waits.notify_one();
        const int error = mover.move(*job, at_once, under_way_max, closing);
        lock.lock();
        finish(*job, error);
        if (finished.size() > 1) return;  // it was said already
        lock.unlock();
        say();
        lock.lock();
    }

    void read_thread() {
        ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), NICENESS);
        Mover mover;
        std::unique_lock lock(mutex);
        for (;;) {
            read_waits.wait(lock, [this] { return closing || !reads.empty(); });
            if (reads.empty()) break;
            work(lock, reads, mover);
        }
        leave();
    }

    void write_thread() {
        ::setpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()), NICENESS);
        Mover mover;
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
            work(lock, writes, mover);
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
                if (found == queue->end()) continue;
                finish(**found, ETIMEDOUT);
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
        auto job = std::make_unique<Job>(std::move(request), state_->next_ticket++);
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
        for (const auto& job : *queue) state_->finish(*job, ECANCELED);
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
