#include "cuda/copier.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <chrono>
#include <cmath>
#include <stdexcept>

namespace kvstore::cuda {
namespace {

constexpr auto POLL = std::chrono::microseconds(50);  // a part takes some 150 at the speed of PCIe 5

bool share_a_block(const std::vector<std::int64_t>& one, const std::vector<std::int64_t>& other) {
    auto a = one.begin();
    auto b = other.begin();
    while (a != one.end() && b != other.end()) {
        if (*a == *b) return true;
        if (*a < *b) {
            ++a;
        } else {
            ++b;
        }
    }
    return false;
}

std::uint64_t bytes_of(const std::vector<Fragment>& fragments) {
    std::uint64_t nbytes = 0;
    for (const Fragment& fragment : fragments) nbytes += fragment.nbytes;
    return nbytes;
}

}  // namespace

// The copies of one part, by the way they go.
struct DeviceCopier::Batch {
    std::vector<Fragment> large;     // copy engines
    std::vector<Fragment> tiles;     // kernel
    std::vector<Fragment> pageable;  // memory that is not pinned
    std::vector<Fragment> host;      // from host memory, by this thread
    std::uint64_t nbytes = 0;
    std::size_t count = 0;
    void add(std::vector<Fragment>& list, const Fragment& piece) {
        list.push_back(piece);
        nbytes += piece.nbytes;
        ++count;
    }
};

std::shared_ptr<DeviceCopier> DeviceCopier::open(std::unique_ptr<OpenDevice> device, const CopySettings& settings) {
    if (settings.in_flight_bytes == 0 || settings.pin_piece_bytes < SLOT_ALIGNMENT ||
        settings.pin_piece_bytes % SLOT_ALIGNMENT != 0 || settings.kernel_blocks == 0) {
        throw std::invalid_argument("a device copier with " + std::to_string(settings.in_flight_bytes) +
                                    " bytes in flight, pieces of " + std::to_string(settings.pin_piece_bytes) +
                                    " bytes and " + std::to_string(settings.kernel_blocks) + " kernel blocks");
    }
    if (!device->has_kernel() && (settings.load_kernel_bytes > 0 || settings.store_kernel_bytes > 0)) {
        throw std::invalid_argument(device->kernel_problem());
    }
    return {new DeviceCopier(std::move(device), settings), [](DeviceCopier* copier) {
                if (getpid() == copier->pid_) delete copier;
            }};
}

DeviceCopier::DeviceCopier(std::unique_ptr<OpenDevice> device, const CopySettings& settings)
    : pid_(getpid()),
      settings_(settings),
      part_bytes_(std::min(PART_BYTES, settings.in_flight_bytes)),
      device_(std::move(device)) {
    if (!settings_.background) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // the host's signals are for its own threads
    try {
        thread_ = std::thread([this] { run(); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

DeviceCopier::~DeviceCopier() {
    close();
}

void DeviceCopier::require_own_process() const {
    if (getpid() != pid_) throw std::runtime_error("this copier belongs to the process that this one was forked from");
}

// ---- memory

void DeviceCopier::add_memory(std::uint64_t address, std::uint64_t nbytes) {
    add_region(address, nbytes, Kind::DEVICE, nullptr);
}

std::uint64_t DeviceCopier::allocate(std::uint64_t nbytes) {
    require_own_process();
    DeviceAddress address = 0;
    {
        const std::lock_guard lock(mutex_);
        if (closing_) throw std::runtime_error("the copier is closed");
        const CurrentContext current(driver(), device_->context());
        driver().check(driver().memory_allocate(&address, nbytes), "cuMemAlloc");
        allocated_.push_back(address);
    }
    add_memory(address, nbytes);
    return address;
}

void DeviceCopier::add_host_memory(std::uint64_t address, std::uint64_t nbytes) {
    add_region(address, nbytes, Kind::HOST, nullptr);
}

std::shared_ptr<PinnedArena> DeviceCopier::map_arena(std::shared_ptr<Mapping> memory,
                                                     std::shared_ptr<const MappedTable> table, bool pin) {
    auto arena = std::make_shared<PinnedArena>(device_->shared_driver(), device_->context(), std::move(memory),
                                               std::move(table), pin, settings_.pin_piece_bytes);
    add_region(arena->address(), arena->nbytes(), Kind::ARENA, arena);
    return arena;
}

void DeviceCopier::add_region(std::uint64_t address, std::uint64_t nbytes, Kind kind,
                              std::shared_ptr<PinnedArena> arena) {
    require_own_process();
    const std::lock_guard lock(mutex_);
    if (closing_) throw std::runtime_error("the copier is closed");
    if (address == 0 || nbytes == 0 || nbytes > UINT64_MAX - address) {
        throw std::invalid_argument("a region of " + std::to_string(nbytes) + " bytes at " + std::to_string(address));
    }
    const auto after = regions_.lower_bound(address);
    const bool overlaps =
        (after != regions_.end() && after->first < address + nbytes) ||
        (after != regions_.begin() && std::prev(after)->first + std::prev(after)->second.nbytes > address);
    if (overlaps) {
        throw std::invalid_argument("a region of " + std::to_string(nbytes) + " bytes at " + std::to_string(address) +
                                    " overlaps another one");
    }
    regions_.emplace(address, Region{nbytes, kind, std::move(arena)});
}

const DeviceCopier::Region* DeviceCopier::region_of(std::uint64_t address, std::uint64_t nbytes) const {
    auto region = regions_.upper_bound(address);
    if (region == regions_.begin()) return nullptr;
    --region;
    const std::uint64_t offset = address - region->first;
    const bool inside = offset <= region->second.nbytes && nbytes <= region->second.nbytes - offset;
    return inside ? &region->second : nullptr;
}

std::shared_ptr<PinnedArena> DeviceCopier::arena(std::uint64_t address) const {
    require_own_process();
    const std::lock_guard lock(mutex_);
    const auto region = regions_.find(address);
    if (region == regions_.end() || region->second.kind != Kind::ARENA) {
        throw std::invalid_argument("no arena begins at " + std::to_string(address));
    }
    return region->second.arena;
}

void DeviceCopier::unmap_arena(std::uint64_t address) {
    const std::shared_ptr<PinnedArena> leaving = arena(address);
    leaving->stop_pinning();  // or a job would wait for a piece that nobody will pin
    std::vector<std::uint64_t> running;
    {
        const std::lock_guard lock(mutex_);
        regions_.erase(address);
        running = fail_queued(leaving);
    }
    wait_long(running);
    leaving->unpin();
}

void DeviceCopier::suspend() {
    require_own_process();
    std::vector<std::uint64_t> running;
    {
        const std::lock_guard lock(mutex_);
        suspended_ = true;
        running = fail_queued(nullptr);
    }
    wait_long(running);
}

void DeviceCopier::resume() {
    const std::lock_guard lock(mutex_);
    suspended_ = false;
}

// Jobs on this arena (null: on any) that have not begun fail whole; returns those that have. Under mutex_.
std::vector<std::uint64_t> DeviceCopier::fail_queued(const std::shared_ptr<PinnedArena>& arena) {
    const auto touches = [&](const JobRef& job) { return !arena || job->arena == arena; };
    for (Direction& direction : directions_) {
        std::deque<JobRef> kept;
        for (const JobRef& job : direction.queued) {
            if (job->started || !touches(job)) {
                kept.push_back(job);
                continue;
            }
            if (job->computed != nullptr) events_.push_back(job->computed);
            end_whole(job, true);
        }
        direction.queued = std::move(kept);
    }
    std::vector<std::uint64_t> begun;
    for (const auto& [number, job] : live_) {
        if (touches(job)) begun.push_back(number);
    }
    news_ = true;
    changed_.notify_all();
    return begun;
}

// A copy always ends, if only with its device.
void DeviceCopier::wait_long(const std::vector<std::uint64_t>& jobs) {
    while (!wait(jobs, 1.0)) {
    }
}

// ---- jobs in

void DeviceCopier::submit(Submission work) {
    if (work.expected.slots.size() != work.expected.generations.size()) {
        throw std::invalid_argument("job " + std::to_string(work.job) + ": " +
                                    std::to_string(work.expected.slots.size()) + " slots but " +
                                    std::to_string(work.expected.generations.size()) + " generations");
    }
    require_own_process();
    auto job = std::make_shared<Job>();
    job->ended = {work.job, {}, 0, 0.0, true};
    job->ended.failed.reserve(std::max(work.fragments.size(), work.expected.slots.size()));
    job->current.resize(work.expected.slots.size());
    std::sort(work.blocks.begin(), work.blocks.end());
    job->work = std::move(work);
    const Submission& given = job->work;

    const std::lock_guard lock(mutex_);
    if (closing_) throw std::runtime_error("the copier is closed");
    if (live_.contains(given.job)) {
        throw std::invalid_argument("job " + std::to_string(given.job) + " is still queued or running");
    }
    if (live_.size() + ended_.size() >= COPY_JOBS_MAX) {
        throw std::runtime_error(std::to_string(COPY_JOBS_MAX) + " copy jobs wait already: call finished()");
    }
    job->from_host.reserve(given.fragments.size());
    bool uses_device = false;
    for (std::size_t i = 0; i < given.fragments.size(); ++i) {
        const Fragment& fragment = given.fragments[i];
        const Region* from = region_of(fragment.source, fragment.nbytes);
        const Region* to = region_of(fragment.destination, fragment.nbytes);
        const Region* host = given.is_load ? from : to;
        const Region* other = given.is_load ? to : from;
        const bool right = host != nullptr && other != nullptr && host->kind == Kind::ARENA &&
                           (other->kind == Kind::DEVICE || (!given.is_load && other->kind == Kind::HOST)) &&
                           (!job->arena || job->arena == host->arena);
        if (!right) {
            throw std::invalid_argument("job " + std::to_string(given.job) + ", fragment " + std::to_string(i) + ": " +
                                        std::to_string(fragment.nbytes) + " bytes from " +
                                        std::to_string(fragment.source) + " to " +
                                        std::to_string(fragment.destination) + " are not inside a region of each side");
        }
        uses_device |= other->kind == Kind::DEVICE;
        job->from_host.push_back(other->kind == Kind::HOST);
        job->arena = host->arena;
    }
    job->after = conflicts(*job);
    if (!lost_.empty() || suspended_) {
        live_.emplace(given.job, job);
        end_whole(job, true);
        return;
    }
    if (uses_device) {
        const CurrentContext current(driver(), device_->context());
        job->computed = take_event(events_, EVENT_DISABLE_TIMING);
        const Result recorded = driver().event_record(job->computed, given.compute_stream);
        if (recorded != SUCCESS) {
            events_.push_back(job->computed);
            driver().check(recorded, "cannot order a copy behind the compute stream: cuEventRecord");
        }
    }
    live_.emplace(given.job, job);
    directions_[given.is_load].queued.push_back(job);
    news_ = true;
    changed_.notify_all();
}

// Rule 2. Every job that is live was submitted before.
std::vector<std::uint64_t> DeviceCopier::conflicts(const Job& job) const {
    std::vector<std::uint64_t> earlier;
    for (const auto& [number, other] : live_) {
        if ((job.work.is_load || other->work.is_load) && share_a_block(job.work.blocks, other->work.blocks)) {
            earlier.push_back(number);
        }
    }
    return earlier;
}

// ---- the copying thread

void DeviceCopier::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        news_ = false;
        lock.unlock();
        bool moved = false;
        try {
            moved = advance();
        } catch (const std::exception& error) {  // no memory, or no context any more
            const std::lock_guard relock(mutex_);
            lose(error.what());
        }
        lock.lock();
        if (closing_ && idle()) return;
        if (moved || news_) continue;
        if (live_.empty()) {
            changed_.wait(lock, [this] { return news_; });
        } else {
            changed_.wait_for(lock, POLL, [this] { return news_; });
        }
    }
}

bool DeviceCopier::idle() const {
    return std::all_of(directions_.begin(), directions_.end(), [](const Direction& direction) {
        return direction.in_flight.empty() && direction.queued.empty();
    });
}

bool DeviceCopier::advance() {
    require_own_process();
    const CurrentContext current(driver(), device_->context());
    bool moved = false;
    for (const bool is_load : {true, false}) moved |= reap(is_load);
    for (const bool is_load : {true, false}) {
        while (begin(is_load)) moved = true;
    }
    return moved;
}

// Takes what has ended. Parts of one stream end in their order.
bool DeviceCopier::reap(bool is_load) {
    Direction& direction = directions_[is_load];
    bool moved = false;
    while (!direction.in_flight.empty()) {
        Part& part = direction.in_flight.front();
        const Result result = driver().event_query(part.end);
        if (result == NOT_READY) break;
        if (result != SUCCESS) {
            const std::lock_guard lock(mutex_);
            lose("cuEventQuery: " + driver().describe(result));
            return true;
        }
        moved = true;
        const JobRef job = part.job;
        --job->parts_running;
        direction.bytes -= part.nbytes;
        const bool last = job->all_begun() && job->parts_running == 0;
        if (last && job->begun != nullptr) driver().event_elapsed(&job->milliseconds, job->begun, part.end);
        if (part.tiles) free_tiles_.push_back(std::move(part.tiles));
        timed_events_.push_back(part.end);
        direction.in_flight.pop_front();
        if (last) end(job);
    }
    return moved;
}

// Rule 2, asked while the job has not begun.
bool DeviceCopier::may_begin(const Job& job) const {
    const std::lock_guard lock(mutex_);
    return std::none_of(job.after.begin(), job.after.end(),
                        [this](std::uint64_t number) { return live_.contains(number); });
}

// Hands the next part of the oldest job to the driver. False: nothing could be begun now.
bool DeviceCopier::begin(bool is_load) {
    Direction& direction = directions_[is_load];
    JobRef job;
    {
        const std::lock_guard lock(mutex_);
        if (!lost_.empty() || direction.queued.empty()) return false;
        if (direction.bytes > 0 && direction.bytes + part_bytes_ > settings_.in_flight_bytes) return false;
        job = direction.queued.front();
        if (closing_) {
            direction.queued.pop_front();
            job->failed = true;
            if (job->parts_running == 0) {
                if (job->computed != nullptr) events_.push_back(job->computed);
                if (job->begun != nullptr) timed_events_.push_back(job->begun);
                end_whole(job, true);
            }
            return true;
        }
    }
    if (!job->started && !may_begin(*job)) return false;
    Batch batch;
    if (!next_part(*job, batch)) return false;  // its piece of the arena is being pinned
    {
        const std::lock_guard lock(mutex_);
        if (direction.queued.empty() || direction.queued.front() != job)
            return true;  // its arena went, or the engine sleeps
        job->started = true;
    }
    for (const Fragment& fragment : batch.host) {
        const auto* source = reinterpret_cast<const std::byte*>(fragment.source);
        copy_bytes(reinterpret_cast<std::byte*>(fragment.destination), source, fragment.nbytes, source);
    }
    if (!batch.host.empty()) stream_fence();
    if (batch.count > batch.host.size() && !put_in_flight(job, batch)) return true;
    if (job->all_begun()) {
        {
            const std::lock_guard lock(mutex_);
            direction.queued.pop_front();
        }
        if (job->parts_running == 0) end(job);
    }
    return true;
}

// Rules 1 and 4. False: the device is lost.
bool DeviceCopier::put_in_flight(const JobRef& job, Batch& batch) {
    const Stream stream = device_->stream(job->work.is_load);
    Direction& direction = directions_[job->work.is_load];
    const Event end = take_event(timed_events_, EVENT_DEFAULT);
    if (job->begun == nullptr) {
        job->begun = take_event(timed_events_, EVENT_DEFAULT);
        Result result = driver().stream_wait_event(stream, job->computed, 0);
        if (result == SUCCESS) result = driver().event_record(job->begun, stream);
        if (result != SUCCESS) {  // nothing was begun
            timed_events_.push_back(end);
            job->failed = true;
            return true;
        }
    }
    // Before its copies are handed over: whatever goes wrong from here on, the job is known to run.
    direction.in_flight.push_back({job, end, batch.nbytes, nullptr});
    direction.bytes += batch.nbytes;
    ++job->parts_running;
    if (hand_over(*job, batch, direction.in_flight.back()) != SUCCESS) job->failed = true;
    const Result recorded = driver().event_record(end, stream);  // behind what was begun of a part that failed, too
    if (recorded == SUCCESS) return true;
    const std::lock_guard lock(mutex_);
    lose("cuEventRecord: " + driver().describe(recorded));
    return false;
}

// Cuts the next part off the job, at the arena's pieces, and sorts it by the way it goes.
bool DeviceCopier::next_part(Job& job, Batch& batch) {
    const std::vector<Fragment>& fragments = job.work.fragments;
    const bool is_load = job.work.is_load;
    const std::uint64_t kernel_below = is_load ? settings_.load_kernel_bytes : settings_.store_kernel_bytes;
    while (job.next_fragment < fragments.size() && batch.nbytes < part_bytes_ && batch.count < PART_FRAGMENTS_MAX) {
        const Fragment& fragment = fragments[job.next_fragment];
        const std::uint64_t left = fragment.nbytes - job.next_offset;
        Fragment piece{fragment.source + job.next_offset, fragment.destination + job.next_offset, left};
        if (left > 0) {
            const std::uint64_t in_arena = is_load ? piece.source : piece.destination;
            piece.nbytes = std::min({left, job.arena->left_in_piece(in_arena), part_bytes_ - batch.nbytes});
            if (job.from_host[job.next_fragment]) {
                batch.add(batch.host, piece);
            } else {
                const Memory memory = job.arena->use(in_arena);
                if (memory == Memory::WAIT) return batch.count > 0;
                const bool small = fragment.nbytes < kernel_below;
                batch.add(memory == Memory::PAGEABLE ? batch.pageable : small ? batch.tiles : batch.large, piece);
            }
        }
        job.next_offset += piece.nbytes;
        if (job.next_offset == fragment.nbytes) {
            ++job.next_fragment;
            job.next_offset = 0;
        }
    }
    return true;
}

Result DeviceCopier::hand_over(Job& job, Batch& batch, Part& part) {
    const bool is_load = job.work.is_load;
    const Stream stream = device_->stream(is_load);
    if (batch.tiles.size() < settings_.kernel_fragments_min) {
        batch.large.insert(batch.large.end(), batch.tiles.begin(), batch.tiles.end());
        batch.tiles.clear();
    }
    Result result = SUCCESS;
    if (!batch.large.empty()) result = hand_over_large(batch, is_load, stream);
    if (result == SUCCESS && !batch.tiles.empty()) result = hand_over_tiles(batch, part, stream);
    for (std::size_t i = 0; result == SUCCESS && i < batch.pageable.size(); ++i) {
        const Fragment& piece = batch.pageable[i];
        result = driver().copy(piece.destination, piece.source, piece.nbytes, stream);
    }
    if (result != SUCCESS) return result;
    const std::lock_guard lock(mutex_);
    counts_.engine_bytes += bytes_of(batch.large);
    counts_.kernel_bytes += bytes_of(batch.tiles);
    counts_.pageable_bytes += bytes_of(batch.pageable);
    return SUCCESS;
}

Result DeviceCopier::hand_over_large(const Batch& batch, bool is_load, Stream stream) {
    const std::size_t count = batch.large.size();
    if (!driver().has_batch()) {
        for (const Fragment& piece : batch.large) {
            const Result result = driver().copy(piece.destination, piece.source, piece.nbytes, stream);
            if (result != SUCCESS) return result;
        }
        return SUCCESS;
    }
    std::vector<DeviceAddress> from(count), to(count);
    std::vector<std::size_t> sizes(count);
    for (std::size_t i = 0; i < count; ++i) {
        from[i] = batch.large[i].source;
        to[i] = batch.large[i].destination;
        sizes[i] = batch.large[i].nbytes;
    }
    const SourceOrder order = is_load ? SourceOrder::ANY : SourceOrder::STREAM;  // rule 3
    return driver().batch(to.data(), from.data(), sizes.data(), count, order, stream);
}

Result DeviceCopier::hand_over_tiles(Batch& batch, Part& part, Stream stream) {
    part.tiles = take_tiles();
    if (!part.tiles) return OUT_OF_MEMORY;
    std::uint32_t count = 0;
    for (const Fragment& piece : batch.tiles) {
        for (std::uint64_t at = 0; at < piece.nbytes; at += TILE_BYTES) {
            assert(count < PART_TILES_MAX);
            part.tiles.get()[count++] = {piece.source + at, piece.destination + at,
                                         std::min<std::uint64_t>(TILE_BYTES, piece.nbytes - at)};
        }
    }
    return device_->launch_copy(part.tiles.get(), count, settings_.kernel_blocks, stream);
}

// The kernel reads its tiles where they are written here: pinned, and kept until the part's event.
DeviceCopier::Tiles DeviceCopier::take_tiles() {
    if (!free_tiles_.empty()) {
        auto tiles = std::move(free_tiles_.back());
        free_tiles_.pop_back();
        return tiles;
    }
    constexpr std::size_t nbytes = (PART_TILES_MAX * sizeof(Tile) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    Tiles tiles(static_cast<Tile*>(::operator new[](nbytes, std::align_val_t{PAGE_BYTES})));
    const Result result = driver().host_register(tiles.get(), nbytes, HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP);
    return result == SUCCESS ? std::move(tiles) : nullptr;
}

Event DeviceCopier::take_event(std::vector<Event>& pool, unsigned flags) {
    Event event = nullptr;
    if (pool.empty()) {
        driver().check(driver().event_create(&event, flags), "cuEventCreate");
    } else {
        event = pool.back();
        pool.pop_back();
    }
    return event;
}

// ---- jobs out

// Nothing of the job runs any more.
void DeviceCopier::end(const JobRef& job) {
    Job& ending = *job;
    if (!ending.failed && ending.work.expected.table) {
        ending.work.expected.table->reader.current(ending.work.expected.slots, ending.work.expected.generations,
                                                   ending.current);
        for (std::size_t i = 0; i < ending.current.size(); ++i) {
            if (ending.current[i] == 0) ending.ended.failed.push_back(i);
        }
    }
    ending.ended.seconds = ending.milliseconds / 1e3;
    ending.ended.nbytes = bytes_of(ending.work.fragments);
    const std::lock_guard lock(mutex_);
    if (ending.computed != nullptr) events_.push_back(ending.computed);
    if (ending.begun != nullptr) timed_events_.push_back(ending.begun);
    if (ending.failed) {
        end_whole(job, true);
        return;
    }
    live_.erase(ending.ended.job);
    ended_.push_back(std::move(ending.ended));
    ending.work.expected.table.reset();
    job_ended_.notify_all();
}

// Under mutex_.
void DeviceCopier::end_whole(const JobRef& job, bool settled) {
    const std::size_t slots = job->work.expected.slots.size();
    const std::size_t count = slots == 0 ? job->work.fragments.size() : slots;
    job->ended.failed.clear();
    for (std::size_t i = 0; i < count; ++i) job->ended.failed.push_back(i);
    job->ended.nbytes = 0;
    job->ended.settled = settled;
    live_.erase(job->ended.job);
    ended_.push_back(std::move(job->ended));
    job->work.expected.table.reset();
    job_ended_.notify_all();
}

// Rule 5. Under mutex_. Events and tiles of what may still run are never touched again.
void DeviceCopier::lose(const std::string& why) {
    if (lost_.empty()) lost_ = why;
    for (Direction& direction : directions_) {
        for (Part& part : direction.in_flight) {
            if (part.tiles) (void)part.tiles.release();
            if (live_.contains(part.job->work.job)) end_whole(part.job, false);
        }
        direction.in_flight.clear();
        direction.bytes = 0;
        for (const JobRef& job : direction.queued) {
            if (live_.contains(job->work.job)) end_whole(job, job->parts_running == 0);
        }
        direction.queued.clear();
    }
}

std::vector<Ended> DeviceCopier::finished() {
    require_own_process();
    const std::lock_guard lock(mutex_);
    return std::exchange(ended_, {});
}

bool DeviceCopier::wait(std::span<const std::uint64_t> jobs, double timeout_s) {
    if (std::isnan(timeout_s)) throw std::invalid_argument("a time-out that is not a number");
    require_own_process();
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(std::clamp(timeout_s, 0.0, 1e8)));
    const auto done = [&] {
        return std::none_of(jobs.begin(), jobs.end(), [this](std::uint64_t job) { return live_.contains(job); });
    };
    std::unique_lock lock(mutex_);
    if (settings_.background) return job_ended_.wait_until(lock, deadline, done);
    while (!done()) {
        if (Clock::now() >= deadline) return false;
        lock.unlock();
        if (!advance()) synchronize();
        lock.lock();
    }
    return true;
}

// Without a thread of its own: waits for what is in flight.
void DeviceCopier::synchronize() {
    const CurrentContext current(driver(), device_->context());
    for (const bool is_load : {true, false}) {
        if (!directions_[is_load].in_flight.empty()) driver().stream_synchronize(device_->stream(is_load));
    }
}

void DeviceCopier::close() {
    if (getpid() != pid_) return;
    const std::lock_guard only(closing_mutex_);  // a second caller must not go on while copies still run
    {
        const std::lock_guard lock(mutex_);
        if (closed_) return;
        closing_ = true;
        news_ = true;
        changed_.notify_all();
    }
    if (thread_.joinable()) {
        thread_.join();
    } else {
        while (!idle()) {
            try {
                if (!advance()) synchronize();
            } catch (const std::exception& error) {
                const std::lock_guard lock(mutex_);
                lose(error.what());
            }
        }
    }
    std::vector<std::shared_ptr<PinnedArena>> arenas;
    {
        const std::lock_guard lock(mutex_);
        closed_ = true;
        for (const auto& [address, region] : regions_) {
            if (region.arena) arenas.push_back(region.arena);
        }
        regions_.clear();
    }
    for (const auto& arena : arenas) arena->unpin();
    release_device();
}

void DeviceCopier::release_device() {
    const std::lock_guard lock(mutex_);
    if (lost_.empty()) {
        const CurrentContext current(driver(), device_->context());
        for (const Event event : events_) driver().event_destroy(event);
        for (const Event event : timed_events_) driver().event_destroy(event);
        for (const auto& tiles : free_tiles_) driver().host_unregister(tiles.get());
        for (const DeviceAddress address : allocated_) driver().memory_free(address);
    } else {
        for (auto& tiles : free_tiles_) (void)tiles.release();  // still registered: never to be used by anybody else
    }
    events_.clear();
    timed_events_.clear();
    free_tiles_.clear();
    device_->release();
}

std::string DeviceCopier::lost() const {
    const std::lock_guard lock(mutex_);
    return lost_;
}

DeviceCopyCounts DeviceCopier::counts() const {
    const std::lock_guard lock(mutex_);
    return counts_;
}

}  // namespace kvstore::cuda
