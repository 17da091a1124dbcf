#include "copy.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// A load may read a slot that is being written again: that race is by design, and the comparison of generations after
// the copy throws its bytes away. The thread sanitizer must not see the kernels.
#define RACY_BY_DESIGN __attribute__((no_sanitize("thread")))

namespace kvstore {
namespace {

constexpr std::size_t LINE = 64;
// Below this, filling and flushing the write-combining buffers costs more than it saves.
constexpr std::size_t STREAM_BYTES_MIN = 512;
// How long before it is read a line is asked for, in bytes that are copied meanwhile. It is asked for into the second
// cache, which waits for more lines at once than the first; and where the fragment ends, the lines are the next one's,
// for the hardware cannot know where that lies.
constexpr std::size_t AHEAD_BYTES = 48 * LINE;

#if defined(__x86_64__)

// `destination` is aligned to a line and `nbytes` a multiple of it. Asks for as many bytes at `ahead`, which may lie
// anywhere.
using StreamLines = void (*)(std::byte* destination, const std::byte* source, std::size_t nbytes,
                             const std::byte* ahead);

RACY_BY_DESIGN __attribute__((target("avx512f"))) void stream_avx512(std::byte* destination, const std::byte* source,
                                                                     std::size_t nbytes, const std::byte* ahead) {
    for (std::size_t at = 0; at < nbytes; at += LINE) {
        _mm_prefetch(ahead + at, _MM_HINT_T1);
        _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + at), _mm512_loadu_si512(source + at));
    }
}

RACY_BY_DESIGN __attribute__((target("avx2"))) void stream_avx2(std::byte* destination, const std::byte* source,
                                                                std::size_t nbytes, const std::byte* ahead) {
    for (std::size_t at = 0; at < nbytes; at += LINE) {
        const auto* from = reinterpret_cast<const __m256i*>(source + at);
        auto* to = reinterpret_cast<__m256i*>(destination + at);
        _mm_prefetch(ahead + at, _MM_HINT_T1);
        const __m256i low = _mm256_loadu_si256(from);
        const __m256i high = _mm256_loadu_si256(from + 1);
        _mm256_stream_si256(to, low);
        _mm256_stream_si256(to + 1, high);
    }
}

StreamLines chosen_stream() {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return stream_avx512;
    if (__builtin_cpu_supports("avx2")) return stream_avx2;
    return nullptr;
}

const StreamLines stream_lines = chosen_stream();

#endif

void copy_plain(std::byte* destination, const std::byte* source, std::size_t nbytes) {
    if (nbytes > 0) std::memcpy(destination, source, nbytes);  // of no bytes, either address may be null
}

bool inside(std::uint64_t address, std::uint64_t nbytes, std::uint64_t region, std::uint64_t region_bytes) {
    return address >= region && nbytes <= region_bytes && address - region <= region_bytes - nbytes;
}

}  // namespace

void copy_bytes(std::byte* destination, const std::byte* source, std::size_t nbytes,
                [[maybe_unused]] const std::byte* next) {
#if defined(__x86_64__)
    if (stream_lines != nullptr && nbytes >= STREAM_BYTES_MIN) {
        const std::size_t head = (LINE - reinterpret_cast<std::uintptr_t>(destination) % LINE) % LINE;
        copy_plain(destination, source, head);
        destination += head;
        source += head;
        nbytes -= head;
        const std::size_t lines = nbytes / LINE * LINE;
        const std::size_t last = std::min(lines, AHEAD_BYTES), first = lines - last;
        stream_lines(destination, source, first, source + AHEAD_BYTES);
        stream_lines(destination + first, source + first, last, next);
        copy_plain(destination + lines, source + lines, nbytes - lines);
        return;
    }
#endif
    copy_plain(destination, source, nbytes);
}

void stream_fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
    std::atomic_thread_fence(std::memory_order_release);
}

const char* copy_kernel_name() {
#if defined(__x86_64__)
    if (stream_lines == stream_avx512) return "avx512";
    if (stream_lines == stream_avx2) return "avx2";
#endif
    return "plain";
}

Copier::Copier(std::size_t threads) : pid_(getpid()) {
    if (threads == 0 || threads > COPY_THREADS_MAX) {
        throw std::invalid_argument("a copier of " + std::to_string(threads) + " threads: 1 to " +
                                    std::to_string(COPY_THREADS_MAX) + " are possible");
    }
    // The host's signals are for its own threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        close();
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Copier::~Copier() {
    close();
}

std::shared_ptr<Copier> Copier::with_threads(std::size_t threads) {
    return {new Copier(threads), [](Copier* copier) {
                if (getpid() == copier->pid_) delete copier;
            }};
}

void Copier::require_own_process() const {
    if (getpid() != pid_) throw std::runtime_error("this copier belongs to the process that this one was forked from");
}

void Copier::require_open() const {
    if (closed_) throw std::runtime_error("the copier is closed");
}

void Copier::add_region(std::uint64_t address, std::uint64_t nbytes) {
    require_own_process();
    const std::lock_guard lock(mutex_);
    require_open();
    if (address == 0 || nbytes == 0 || nbytes > UINT64_MAX - address) {
        throw std::invalid_argument("a region of " + std::to_string(nbytes) + " bytes at " + std::to_string(address));
    }
    const auto [region, added] = regions_.try_emplace({address, nbytes}, Region{next_region_id_, 0});
    if (added) ++next_region_id_;
    ++region->second.count;
}

void Copier::remove_region(std::uint64_t address) {
    require_own_process();
    std::unique_lock lock(mutex_);
    const auto region = regions_.lower_bound({address, 0});
    if (region == regions_.end() || region->first.first != address) {
        throw std::invalid_argument("no region begins at " + std::to_string(address));
    }
    if (--region->second.count > 0) return;
    const std::uint64_t id = region->second.id;
    regions_.erase(region);
    const auto touches = [id](const Job& job) {
        return std::binary_search(job.regions.begin(), job.regions.end(), id);
    };
    for (auto job = queued_.begin(); job != queued_.end();) {
        const auto next = std::next(job);
        if (!job->started && touches(*job)) fail_whole(queued_, job);
        job = next;
    }
    job_ended_.wait(lock, [&] {
        return std::none_of(queued_.begin(), queued_.end(), touches) &&
               std::none_of(running_.begin(), running_.end(), touches);
    });
}

// The region that holds the range; `last` is tried first, for fragments come in runs.
Copier::Regions::const_iterator Copier::region_of(std::uint64_t address, std::uint64_t nbytes,
                                                  Regions::const_iterator last) const {
    const auto holds = [&](Regions::const_iterator region) {
        return inside(address, nbytes, region->first.first, region->first.second);
    };
    if (last != regions_.end() && holds(last)) return last;
    auto region = regions_.upper_bound({address, UINT64_MAX});
    while (region != regions_.begin()) {
        if (holds(--region)) return region;
    }
    return regions_.end();
}

void Copier::submit(std::uint64_t number, std::vector<Fragment> fragments, Expected expected) {
    if (expected.slots.size() != expected.generations.size()) {
        throw std::invalid_argument("job " + std::to_string(number) + ": " + std::to_string(expected.slots.size()) +
                                    " slots but " + std::to_string(expected.generations.size()) + " generations");
    }
    Jobs fresh(1);
    Job& job = fresh.front();
    job.ended = {number, {}, 0, 0.0};
    job.ended.failed.reserve(std::max(fragments.size(), expected.slots.size()));
    job.current.resize(expected.slots.size());
    job.fragments = std::move(fragments);
    job.expected = std::move(expected);

    require_own_process();
    const std::lock_guard lock(mutex_);
    require_open();
    if (live_.contains(number)) {
        throw std::invalid_argument("job " + std::to_string(number) + " is still queued or running");
    }
    if (live_.size() + ended_.size() >= COPY_JOBS_MAX) {
        throw std::runtime_error(std::to_string(COPY_JOBS_MAX) + " copy jobs wait already: call finished()");
    }
    auto source = regions_.cend();
    auto destination = regions_.cend();
    for (std::size_t i = 0; i < job.fragments.size(); ++i) {
        const Fragment& fragment = job.fragments[i];
        const auto last_source = source;
        const auto last_destination = destination;
        source = region_of(fragment.source, fragment.nbytes, source);
        destination = region_of(fragment.destination, fragment.nbytes, destination);
        if (source == regions_.end() || destination == regions_.end()) {
            throw std::invalid_argument(
                "job " + std::to_string(number) + ", fragment " + std::to_string(i) + ": the " +
                (source == regions_.end() ? "source, " : "destination, ") + std::to_string(fragment.nbytes) +
                " bytes at " + std::to_string(source == regions_.end() ? fragment.source : fragment.destination) +
                ", is not inside a region");
        }
        if (source != last_source) job.regions.push_back(source->second.id);
        if (destination != last_destination) job.regions.push_back(destination->second.id);
    }
    std::sort(job.regions.begin(), job.regions.end());
    job.regions.erase(std::unique(job.regions.begin(), job.regions.end()), job.regions.end());
    live_.emplace(number, &job);
    queued_.splice(queued_.end(), fresh);
    work_ready_.notify_all();
}

std::vector<Ended> Copier::finished() {
    require_own_process();
    Jobs taken;
    {
        const std::lock_guard lock(mutex_);
        taken.swap(ended_);
    }
    std::vector<Ended> answers;
    answers.reserve(taken.size());
    for (Job& job : taken) answers.push_back(std::move(job.ended));
    return answers;
}

bool Copier::wait(std::span<const std::uint64_t> jobs, double timeout_s) {
    if (std::isnan(timeout_s)) throw std::invalid_argument("a time-out that is not a number");
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e8)));
    require_own_process();
    std::unique_lock lock(mutex_);
    return job_ended_.wait_until(lock, deadline, [&] {
        return std::none_of(jobs.begin(), jobs.end(), [this](std::uint64_t job) { return live_.contains(job); });
    });
}

void Copier::close() {
    if (getpid() != pid_) return;
    const std::lock_guard only(closing_mutex_);  // a second caller must not end jobs whose parts still run
    std::vector<std::thread> threads;
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        closing_.store(true, std::memory_order_relaxed);
        threads.swap(threads_);
        work_ready_.notify_all();
    }
    for (std::thread& thread : threads) thread.join();
    const std::lock_guard lock(mutex_);
    while (!queued_.empty()) fail_whole(queued_, queued_.begin());
    while (!running_.empty()) fail_whole(running_, running_.begin());
}

void Copier::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_ready_.wait(lock, [this] { return closed_ || !queued_.empty(); });
        if (closed_) return;
        const auto job = queued_.begin();
        if (!job->started) {
            job->started = true;
            job->started_at = Clock::now();
        }
        const Part part = cut(*job);
        ++job->parts_running;
        if (job->next_fragment == job->fragments.size()) running_.splice(running_.end(), queued_, job);
        lock.unlock();
        run(*job, part);
        stream_fence();
        lock.lock();
        --job->parts_running;
        if (job->next_fragment < job->fragments.size() || job->parts_running > 0 || closed_) continue;
        // Nobody else touches the job now but `close`, which waits for this thread.
        lock.unlock();
        compare(*job);
        lock.lock();
        end(running_, job);
    }
}

// The next part of the job, and the job's cursor behind it. A job without fragments has one empty part.
Copier::Part Copier::cut(Job& job) {
    if (job.fragments.empty()) return {1, 0, 0, 0};
    Part part{job.next_fragment, job.next_fragment, job.next_offset, 0};
    std::uint64_t room = COPY_PART_BYTES;
    for (;;) {
        part.last = job.next_fragment;
        const std::uint64_t left = job.fragments[job.next_fragment].nbytes - job.next_offset;
        if (left > room) {
            job.next_offset += room;
            part.last_offset = job.next_offset;
            return part;
        }
        room -= left;
        part.last_offset = job.fragments[job.next_fragment].nbytes;
        job.next_offset = 0;
        ++job.next_fragment;
        if (job.next_fragment == job.fragments.size() || room == 0) return part;
    }
}

void Copier::run(const Job& job, const Part& part) {
    for (std::size_t i = part.first; i <= part.last; ++i) {
        if (part.first > part.last || closing_.load(std::memory_order_relaxed)) return;
        const Fragment& fragment = job.fragments[i];
        const std::uint64_t begin = i == part.first ? part.first_offset : 0;
        const std::uint64_t end = i == part.last ? part.last_offset : fragment.nbytes;
        const std::uint64_t next = i < part.last ? job.fragments[i + 1].source : fragment.source + end;
        copy_bytes(reinterpret_cast<std::byte*>(fragment.destination + begin),
                   reinterpret_cast<const std::byte*>(fragment.source + begin), end - begin,
                   reinterpret_cast<const std::byte*>(next));
    }
}

void Copier::compare(Job& job) {
    if (job.expected.table) {
        job.expected.table->reader.current(job.expected.slots, job.expected.generations, job.current);
        for (std::size_t i = 0; i < job.current.size(); ++i) {
            if (job.current[i] == 0) job.ended.failed.push_back(i);
        }
    }
    for (const Fragment& fragment : job.fragments) job.ended.nbytes += fragment.nbytes;
    job.ended.seconds = std::chrono::duration<double>(Clock::now() - job.started_at).count();
}

void Copier::fail_whole(Jobs& from, Jobs::iterator job) {
    const std::size_t count = job->expected.slots.empty() ? job->fragments.size() : job->expected.slots.size();
    job->ended.failed.clear();
    for (std::size_t i = 0; i < count; ++i) job->ended.failed.push_back(i);
    job->ended.nbytes = 0;
    end(from, job);
}

void Copier::end(Jobs& from, Jobs::iterator job) {
    live_.erase(job->ended.job);
    ended_.splice(ended_.end(), from, job);
    job->expected.table.reset();
    job_ended_.notify_all();
}

}  // namespace kvstore
