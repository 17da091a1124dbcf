#include "io.h"

#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

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

struct Job {
    IoRequest request;
    std::uint64_t ticket = 0;  // order of submission, unique
    Clock::time_point submitted;
};

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

// The whole of head and payload, or an errno. A call that stops half way is taken up where it stopped.
int transfer(const IoRequest& request, std::byte* head) {
    const std::uint64_t head_bytes = request.has_head ? IO_HEAD_BYTES : 0;
    const std::uint64_t total = head_bytes + request.nbytes;
    std::uint64_t done = 0;
    while (done < total) {
        iovec parts[2];
        int count = 0;
        if (done < head_bytes) parts[count++] = {head + done, head_bytes - done};
        const std::uint64_t in_payload = done > head_bytes ? done - head_bytes : 0;
        if (in_payload < request.nbytes)
            parts[count++] = {reinterpret_cast<void*>(request.address + in_payload), request.nbytes - in_payload};
        const auto at = static_cast<off_t>(request.offset + done);
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

IoDone run(IoRequest& request, std::byte* head) {
    IoDone done;
    done.id = request.id;
    const auto* payload = reinterpret_cast<const void*>(request.address);
    if (request.is_write) {
        if (request.has_head) std::memcpy(head, request.head.data(), IO_HEAD_BYTES);
        if (request.payload_checksum_at >= 0) {
            done.checksum = crc32c(payload, request.nbytes);
            put_checksum(head, request.payload_checksum_at, done.checksum);
        }
        if (request.head_checksum_at >= 0)
            put_checksum(head, request.head_checksum_at, crc32c(head, request.head_checksum_at));
    }
    done.error = transfer(request, head);
    if (!request.is_write && done.error == 0) {
        if (request.has_head) done.head.assign(head, head + IO_HEAD_BYTES);
        if (request.nbytes > 0) done.checksum = crc32c(payload, request.nbytes);
    }
    return done;
}

}  // namespace

struct IoPool::State {
    std::mutex mutex;
    std::condition_variable read_waits;
    std::condition_variable write_waits;
    std::condition_variable deadlines_changed;
    std::condition_variable thread_ended;
    // All below: under `mutex`.
    std::deque<Job> reads;
    std::deque<Job> writes;
    std::set<std::pair<Clock::time_point, std::uint64_t>> deadlines;  // of jobs by ticket, waiting or running
    std::map<std::uint64_t, std::uint64_t> running;                   // ticket to id
    std::vector<IoDone> finished;
    std::map<std::uintptr_t, std::uint64_t> regions;
    std::uint64_t next_ticket = 0;
    int threads = 0;
    bool closing = false;

    int event_fd = -1;  // written once, before the threads start

    ~State() {
        if (event_fd >= 0) ::close(event_fd);
    }

    void report(IoDone done) {
        finished.push_back(std::move(done));
        const std::uint64_t one = 1;
        // Non-blocking: it fails only where the counter is full, and then the descriptor is readable anyway.
        [[maybe_unused]] const ssize_t ignored = ::write(event_fd, &one, sizeof one);
    }

    void forget_deadline(const Job& job) {
        if (job.request.deadline.count() > 0) deadlines.erase({job.submitted + job.request.deadline, job.ticket});
    }

    bool inside_a_region(std::uintptr_t address, std::uint64_t nbytes) const {
        auto region = regions.upper_bound(address);
        if (region == regions.begin()) return false;
        --region;
        const std::uint64_t into = address - region->first;
        return into <= region->second && nbytes <= region->second - into;
    }

    void work(std::unique_lock<std::mutex>& lock, Job job, std::byte* head) {
        running.emplace(job.ticket, job.request.id);
        lock.unlock();
        IoDone done = run(job.request, head);
        lock.lock();
        running.erase(job.ticket);
        forget_deadline(job);
        report(std::move(done));
    }

    static Job take(std::deque<Job>& queue) {
        Job job = std::move(queue.front());
        queue.pop_front();
        return job;
    }

    void read_thread() {
        const HeadBlock head = make_head_block();
        std::unique_lock lock(mutex);
        for (;;) {
            read_waits.wait(lock, [this] { return closing || !reads.empty(); });
            if (reads.empty()) break;
            Job job = take(reads);
            if (reads.empty() && !writes.empty()) write_waits.notify_all();
            work(lock, std::move(job), head.get());
        }
        leave();
    }

    void write_thread() {
        const HeadBlock head = make_head_block();
        std::unique_lock lock(mutex);
        for (;;) {
            if (writes.empty()) {
                if (closing) break;
                write_waits.wait(lock);
                continue;
            }
            const auto patience_ends = writes.front().submitted + WRITE_PATIENCE;
            if (!reads.empty() && Clock::now() < patience_ends) {
                write_waits.wait_until(lock, patience_ends);
                continue;
            }
            Job job = take(writes);
            // A wake-up may have gone to a thread that was only being patient: pass it on.
            if (!writes.empty()) write_waits.notify_one();
            work(lock, std::move(job), head.get());
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
            if (const auto found = running.find(ticket); found != running.end()) {
                report({.id = found->second, .error = ETIMEDOUT, .late = true, .checksum = 0, .head = {}});
                continue;
            }
            for (auto* queue : {&reads, &writes})
                for (auto job = queue->begin(); job != queue->end(); ++job)
                    if (job->ticket == ticket) {
                        report({.id = job->request.id, .error = ETIMEDOUT, .late = false, .checksum = 0, .head = {}});
                        queue->erase(job);
                        break;
                    }
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
    {
        const std::lock_guard lock(state_->mutex);
        if (state_->closing) throw std::runtime_error("the pool is closed");
        if (request.nbytes > 0 && !state_->inside_a_region(request.address, request.nbytes))
            throw std::invalid_argument("a payload outside the regions");
        Job job{std::move(request), state_->next_ticket++, Clock::now()};
        if (job.request.deadline.count() > 0) {
            const auto when = job.submitted + job.request.deadline;
            const bool soonest = state_->deadlines.empty() || when < state_->deadlines.begin()->first;
            state_->deadlines.emplace(when, job.ticket);
            if (soonest) state_->deadlines_changed.notify_one();
        }
        const bool is_write = job.request.is_write;
        (is_write ? state_->writes : state_->reads).push_back(std::move(job));
        (is_write ? state_->write_waits : state_->read_waits).notify_one();
    }
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
        for (auto& job : *queue) {
            state_->forget_deadline(job);
            state_->report({.id = job.request.id, .error = ECANCELED, .late = false, .checksum = 0, .head = {}});
        }
        queue->clear();
    }
    state_->read_waits.notify_all();
    state_->write_waits.notify_all();
    state_->deadlines_changed.notify_all();
    // A thread counts itself out under the mutex as its last act, and holds the state itself: nothing is left to join.
    return state_->thread_ended.wait_for(lock, timeout, [this] { return state_->threads == 0; });
}

}  // namespace kvstore
