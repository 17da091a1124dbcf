// A device for machines without one: the driver's functions that the core uses, as a library that stands in for
// libcuda.so.1. Addresses are plain memory.
//
// Work is done late and in random order, within what CUDA allows: each stream runs its own work in order, nothing else
// orders anything but events; the copies of a batch run in any order and each in two halves; a source of order ANY is
// read at any time from the call on; a kernel reads its tiles when it runs. Nothing runs until `fake_step`, or until
// somebody synchronizes, or while `fake_run` has a thread do it. Where CUDA leaves behaviour undefined, or allows more
// than the core should rely on, this refuses: host memory of a batch or kernel must be registered, in one piece.
//
// One global state, guarded by one lock. `fake_reset` starts a new device; what others still hold of the last one
// stays.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/driver.h"
#include "cuda/tiles.h"

using namespace kvstore::cuda;

namespace {

constexpr Result INVALID_VALUE = 1;
constexpr Result INVALID_CONTEXT = 201;
constexpr Result NOT_FOUND = 500;
constexpr Result ILLEGAL_ADDRESS = 700;
constexpr Result NOT_REGISTERED = 713;
constexpr Result CAPTURE_UNSUPPORTED = 900;
constexpr Result ALREADY_REGISTERED = 712;
constexpr int PRIORITY_LEAST = 0;
constexpr int PRIORITY_GREATEST = -5;

// Planted faults: what a core that forgets a rule would do.
enum Fault : unsigned {
    LOADS_DO_NOT_WAIT = 1,
    STORES_DO_NOT_WAIT = 2,
    ENDED_AT_ONCE = 4,  // every event says that it has completed
    STORES_READ_ANY_TIME = 8,
};

struct FakeEvent {
    std::uint64_t recorded = 0;
    std::uint64_t completed = 0;
    std::uint64_t at = 0;
};

struct Piece {
    DeviceAddress to, from;
    std::size_t nbytes;
    std::vector<std::byte> read_early;
};

// One entry of a stream. `runnable` and `step`; `step` says whether it is done.
struct Op {
    std::function<bool()> runnable = [] { return true; };
    std::function<bool()> step;
};

struct FakeStream {
    int priority = 0;
    std::deque<Op> ops;
};

struct State {
    std::mt19937_64 random;
    int version = 13000;
    unsigned faults = 0;
    bool lost = false;
    std::uint64_t steps = 0;
    std::map<std::uint64_t, std::size_t> device, registered, unmapped;
    std::vector<std::unique_ptr<FakeStream>> streams;
    std::vector<std::weak_ptr<Piece>> early;  // sources that may be read out of order
    std::map<std::string, std::uint64_t> calls;
    std::map<std::string, std::pair<std::uint64_t, Result>> failures;  // after so many more calls
    FakeStream null_stream;
    std::int64_t events_alive = 0, contexts = 0, modules = 0;
    std::size_t next_device = 0;
    bool gate_open = true;
    bool capturing = false, capture_broken = false;
};

std::recursive_mutex mutex;
std::vector<std::unique_ptr<State>> states;  // those of before as well: somebody may still point to them
State* state = states.emplace_back(new State).get();
std::atomic<bool> running{false};
std::thread runner;
thread_local std::vector<Context> context_stack;
thread_local int capture_mode = 0;  // "global": forbidden what would break anybody's capture

int a_context, a_module, a_function;

std::uint64_t pick(std::uint64_t below) {
    return std::uniform_int_distribution<std::uint64_t>(0, below - 1)(state->random);
}

// While somebody captures a graph, some calls break it, unless their thread has said that it knows.
const char* const UNSAFE[] = {"cuEventQuery",    "cuMemHostRegister",   "cuMemHostUnregister", "cuMemAlloc",
                              "cuMemFree",       "cuStreamSynchronize", "cuModuleLoadData",    "cuModuleUnload",
                              "cuStreamDestroy", "cuEventDestroy"};

// Counts the call; the planted failure of this function, if it is due.
Result enter(const char* name) {
    ++state->calls[name];
    const auto failure = state->failures.find(name);
    if (failure != state->failures.end()) {
        if (failure->second.first == 0) {
            const Result result = failure->second.second;
            state->failures.erase(failure);
            return result;
        }
        --failure->second.first;
    }
    const bool unsafe = std::any_of(std::begin(UNSAFE), std::end(UNSAFE),
                                    [name](const char* other) { return std::strcmp(name, other) == 0; });
    if (state->capturing && unsafe && capture_mode != CAPTURE_MODE_RELAXED) {
        state->capture_broken = true;
        return CAPTURE_UNSUPPORTED;
    }
    return state->lost ? ILLEGAL_ADDRESS : SUCCESS;
}

#define ENTER(name)                     \
    const std::lock_guard guard(mutex); \
    if (const Result planted = enter(name); planted != 0) return planted

bool within(const std::map<std::uint64_t, std::size_t>& ranges, std::uint64_t address, std::size_t nbytes) {
    auto range = ranges.upper_bound(address);
    if (range == ranges.begin()) return false;
    --range;
    return address - range->first <= range->second && nbytes <= range->second - (address - range->first);
}

// Whoever touches it loses the device.
bool is_gone(std::uint64_t address, std::size_t nbytes) {
    const bool gone = within(state->unmapped, address, nbytes);
    state->lost |= gone;
    return gone;
}

FakeStream& stream_of(Stream handle) {
    return handle == nullptr ? state->null_stream : *reinterpret_cast<FakeStream*>(handle);
}

void copy_half(const std::shared_ptr<Piece>& piece, std::size_t begin, std::size_t end) {
    if (is_gone(piece->to, piece->nbytes) || is_gone(piece->from, piece->nbytes)) return;
    const auto* from =
        piece->read_early.empty() ? reinterpret_cast<const std::byte*>(piece->from) : piece->read_early.data();
    std::memcpy(reinterpret_cast<std::byte*>(piece->to) + begin, from + begin, end - begin);
}

void read_now(Piece& piece) {
    const auto* from = reinterpret_cast<const std::byte*>(piece.from);
    if (piece.read_early.empty()) piece.read_early.assign(from, from + piece.nbytes);
}

void enqueue_pieces(FakeStream& stream, std::vector<std::shared_ptr<Piece>> pieces, bool any_order) {
    if (any_order) {
        for (const auto& piece : pieces) {
            switch (pick(3)) {
                case 0:
                    read_now(*piece);
                    break;
                case 1:
                    state->early.push_back(piece);
                    break;
                default:
                    break;
            }
        }
    }
    struct Half {
        std::shared_ptr<Piece> piece;
        std::size_t begin, end;
    };
    auto halves = std::make_shared<std::vector<Half>>();
    for (const auto& piece : pieces) {
        const std::size_t middle = piece->nbytes > 1 ? 1 + pick(piece->nbytes - 1) : piece->nbytes;
        halves->push_back({piece, 0, middle});
        if (middle < piece->nbytes) halves->push_back({piece, middle, piece->nbytes});
    }
    std::shuffle(halves->begin(), halves->end(), state->random);
    Op op;
    op.step = [halves] {
        const Half half = halves->back();
        halves->pop_back();
        copy_half(half.piece, half.begin, half.end);
        return halves->empty();
    };
    stream.ops.push_back(std::move(op));
}

bool step_once() {
    std::vector<FakeStream*> able;
    const auto look = [&](FakeStream& stream) {
        if (!stream.ops.empty() && stream.ops.front().runnable()) able.push_back(&stream);
    };
    for (const auto& stream : state->streams) {
        if (stream) look(*stream);
    }
    if (state->gate_open) look(state->null_stream);
    ++state->steps;
    if (!state->early.empty() && pick(2) == 0) {
        const std::size_t i = pick(state->early.size());
        if (const auto piece = state->early[i].lock()) read_now(*piece);
        std::swap(state->early[i], state->early.back());
        state->early.pop_back();
    }
    if (able.empty()) return false;
    FakeStream& stream = *able[pick(able.size())];
    if (stream.ops.front().step()) stream.ops.pop_front();
    return true;
}

// Runs anything until `done`. False when nothing can run any more.
bool run_until(const std::function<bool()>& done) {
    while (!done()) {
        if (!step_once()) return false;
    }
    return true;
}

bool one_side_each(DeviceAddress to, DeviceAddress from, std::size_t nbytes, bool& pinned) {
    if (is_gone(to, nbytes) || is_gone(from, nbytes)) return false;
    const bool to_device = within(state->device, to, nbytes), from_device = within(state->device, from, nbytes);
    pinned = within(state->registered, to_device ? from : to, nbytes);
    return to_device != from_device;
}

struct CheckedAccess {
    bool good = true;
    void check(std::uint64_t address, std::size_t nbytes) {
        good &= address % nbytes == 0 &&
                (within(state->device, address, nbytes) || within(state->registered, address, nbytes));
    }
    template <typename Word>
    Word load(std::uint64_t address) {
        check(address, sizeof(Word));
        Word word{};
        if (good) std::memcpy(&word, reinterpret_cast<const void*>(address), sizeof word);
        return word;
    }
    template <typename Word>
    void store(std::uint64_t address, const Word& word) {
        check(address, sizeof(Word));
        if (good) std::memcpy(reinterpret_cast<void*>(address), &word, sizeof word);
    }
};

struct Word16 {
    std::uint64_t low, high;
};

Result batch(DeviceAddress* to, DeviceAddress* from, std::size_t* sizes, std::size_t count, CopyAttributes* attributes,
             std::size_t* starts, std::size_t attribute_count, std::size_t* refused, Stream handle) {
    ENTER("cuMemcpyBatchAsync");
    if (handle == nullptr || count == 0 || attribute_count != 1 || starts[0] != 0) return INVALID_VALUE;
    std::vector<std::shared_ptr<Piece>> pieces;
    for (std::size_t i = 0; i < count; ++i) {
        bool pinned = false;
        if (sizes[i] == 0 || !one_side_each(to[i], from[i], sizes[i], pinned) || !pinned) {
            if (refused != nullptr) *refused = i;
            return INVALID_VALUE;
        }
        pieces.push_back(std::make_shared<Piece>(Piece{to[i], from[i], sizes[i], {}}));
    }
    const SourceOrder order = attributes->source_order;
    if (order != SourceOrder::STREAM && order != SourceOrder::ANY) return INVALID_VALUE;
    const bool from_device = within(state->device, from[0], sizes[0]);
    if (order == SourceOrder::ANY && from_device) return INVALID_VALUE;  // live KV cache: never
    ++state->calls[order == SourceOrder::ANY ? "batches of order ANY" : "batches of order STREAM"];
    enqueue_pieces(stream_of(handle), std::move(pieces),
                   order == SourceOrder::ANY || (from_device && (state->faults & STORES_READ_ANY_TIME) != 0));
    return SUCCESS;
}

// ---- the driver's functions

Result init(unsigned) {
    ENTER("cuInit");
    return SUCCESS;
}
Result driver_version(int* version) {
    ENTER("cuDriverGetVersion");
    *version = state->version;
    return SUCCESS;
}
Result error_name(Result error, const char** text) {
    *text = error == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
            : error == INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"
            : error == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                       : "CUDA_ERROR";
    return SUCCESS;
}
Result error_string(Result error, const char** text) {
    *text = error == OUT_OF_MEMORY ? "out of memory" : "of the fake device";
    return SUCCESS;
}
Result device_get(Device* device, int ordinal) {
    ENTER("cuDeviceGet");
    if (ordinal != 0) return 101;
    *device = 0;
    return SUCCESS;
}
Result device_name(char* name, int length, Device) {
    ENTER("cuDeviceGetName");
    std::snprintf(name, static_cast<std::size_t>(length), "fake device");
    return SUCCESS;
}
Result device_attribute(int* value, int attribute, Device) {
    ENTER("cuDeviceGetAttribute");
    switch (attribute) {
        case ATTRIBUTE_CAPABILITY_MAJOR:
            *value = 10;
            return SUCCESS;
        case ATTRIBUTE_CAPABILITY_MINOR:
            *value = 3;
            return SUCCESS;
        case ATTRIBUTE_HOST_POINTER_FOR_REGISTERED:
            *value = 1;
            return SUCCESS;
        case ATTRIBUTE_HOST_NUMA_ID:
            *value = 0;
            return SUCCESS;
        default:
            return INVALID_VALUE;
    }
}
Result primary_context_retain(Context* context, Device) {
    ENTER("cuDevicePrimaryCtxRetain");
    ++state->contexts;
    *context = reinterpret_cast<Context>(&a_context);
    return SUCCESS;
}
Result primary_context_release(Device) {
    ENTER("cuDevicePrimaryCtxRelease");
    --state->contexts;
    return SUCCESS;
}
Result context_push(Context context) {
    ENTER("cuCtxPushCurrent");
    context_stack.push_back(context);
    return SUCCESS;
}
Result context_pop(Context* context) {
    ENTER("cuCtxPopCurrent");
    if (context_stack.empty()) return INVALID_CONTEXT;
    *context = context_stack.back();
    context_stack.pop_back();
    return SUCCESS;
}
Result capture_mode_exchange(int* mode) {
    ENTER("cuThreadExchangeStreamCaptureMode");
    std::swap(*mode, capture_mode);
    return SUCCESS;
}
Result stream_priorities(int* least, int* greatest) {
    ENTER("cuCtxGetStreamPriorityRange");
    if (context_stack.empty()) return INVALID_CONTEXT;
    *least = PRIORITY_LEAST;
    *greatest = PRIORITY_GREATEST;
    return SUCCESS;
}
Result stream_create(Stream* stream, unsigned flags, int priority) {
    ENTER("cuStreamCreateWithPriority");
    if (context_stack.empty()) return INVALID_CONTEXT;
    if (flags != STREAM_NON_BLOCKING) return INVALID_VALUE;  // would wait for everything on stream 0
    state->streams.push_back(std::make_unique<FakeStream>());
    state->streams.back()->priority = priority;
    *stream = reinterpret_cast<Stream>(state->streams.back().get());
    return SUCCESS;
}
Result stream_wait_event(Stream handle, Event event_handle, unsigned) {
    ENTER("cuStreamWaitEvent");
    FakeStream& stream = stream_of(handle);
    if ((stream.priority == PRIORITY_GREATEST && (state->faults & LOADS_DO_NOT_WAIT) != 0) ||
        (stream.priority == PRIORITY_GREATEST + 1 && (state->faults & STORES_DO_NOT_WAIT) != 0)) {
        return SUCCESS;
    }
    auto* event = reinterpret_cast<FakeEvent*>(event_handle);
    const std::uint64_t version = event->recorded;
    Op op;
    op.runnable = [event, version] { return event->completed >= version; };
    op.step = [] { return true; };
    stream.ops.push_back(std::move(op));
    return SUCCESS;
}
Result stream_synchronize(Stream handle) {
    ENTER("cuStreamSynchronize");
    FakeStream& stream = stream_of(handle);
    return run_until([&] { return stream.ops.empty(); }) ? SUCCESS : INVALID_VALUE;
}
Result stream_destroy(Stream handle) {
    ENTER("cuStreamDestroy");
    for (auto& stream : state->streams) {
        if (reinterpret_cast<Stream>(stream.get()) == handle) {
            if (!stream->ops.empty()) return INVALID_VALUE;
            stream.reset();
            return SUCCESS;
        }
    }
    return INVALID_VALUE;
}
Result event_create(Event* event, unsigned) {
    ENTER("cuEventCreate");
    if (context_stack.empty()) return INVALID_CONTEXT;
    ++state->events_alive;
    *event = reinterpret_cast<Event>(new FakeEvent);
    return SUCCESS;
}
Result event_record(Event handle, Stream stream) {
    ENTER("cuEventRecord");
    if (context_stack.empty()) return INVALID_CONTEXT;
    auto* event = reinterpret_cast<FakeEvent*>(handle);
    const std::uint64_t version = ++event->recorded;
    Op op;
    op.step = [event, version] {
        event->completed = std::max(event->completed, version);
        event->at = state->steps;
        return true;
    };
    stream_of(stream).ops.push_back(std::move(op));
    return SUCCESS;
}
Result event_query(Event handle) {
    ENTER("cuEventQuery");
    const auto* event = reinterpret_cast<FakeEvent*>(handle);
    if ((state->faults & ENDED_AT_ONCE) != 0) return SUCCESS;
    return event->completed >= event->recorded ? SUCCESS : NOT_READY;
}
Result event_elapsed(float* milliseconds, Event start, Event end) {
    ENTER("cuEventElapsedTime");
    const auto from = reinterpret_cast<FakeEvent*>(start)->at, to = reinterpret_cast<FakeEvent*>(end)->at;
    *milliseconds = static_cast<float>(to - from) / 1000;
    return SUCCESS;
}
Result event_destroy(Event handle) {
    ENTER("cuEventDestroy");
    delete reinterpret_cast<FakeEvent*>(handle);
    --state->events_alive;
    return SUCCESS;
}
Result memory_allocate(DeviceAddress* address, std::size_t nbytes) {
    ENTER("cuMemAlloc");
    *address = reinterpret_cast<DeviceAddress>(new std::byte[nbytes]);
    state->device[*address] = nbytes;
    return SUCCESS;
}
Result memory_free(DeviceAddress address) {
    ENTER("cuMemFree");
    if (state->device.erase(address) == 0) return INVALID_VALUE;
    delete[] reinterpret_cast<std::byte*>(address);
    return SUCCESS;
}
Result host_register(void* memory, std::size_t nbytes, unsigned) {
    ENTER("cuMemHostRegister");
    if (context_stack.empty()) return INVALID_CONTEXT;
    const auto address = reinterpret_cast<std::uint64_t>(memory);
    if (address % 4096 != 0) return INVALID_VALUE;  // it may share a page with another one
    const auto after = state->registered.lower_bound(address);
    if ((after != state->registered.end() && after->first < address + (nbytes + 4095) / 4096 * 4096) ||
        (after != state->registered.begin() && std::prev(after)->first + std::prev(after)->second > address)) {
        return ALREADY_REGISTERED;
    }
    state->registered[address] = nbytes;
    return SUCCESS;
}
Result host_unregister(void* memory) {
    ENTER("cuMemHostUnregister");
    return state->registered.erase(reinterpret_cast<std::uint64_t>(memory)) == 1 ? SUCCESS : NOT_REGISTERED;
}
Result copy(DeviceAddress to, DeviceAddress from, std::size_t nbytes, Stream handle) {
    ENTER("cuMemcpyAsync");
    bool pinned = false;
    if (nbytes == 0 || !one_side_each(to, from, nbytes, pinned)) return INVALID_VALUE;
    FakeStream& stream = stream_of(handle);
    auto piece = std::make_shared<Piece>(Piece{to, from, nbytes, {}});
    if (!pinned) {
        if (within(state->device, to, nbytes)) {
            read_now(*piece);  // staged
        } else {               // comes back when it is done
            if (!run_until([&] { return stream.ops.empty(); })) return INVALID_VALUE;
            copy_half(piece, 0, nbytes);
            return SUCCESS;
        }
    }
    enqueue_pieces(stream, {piece}, false);
    return SUCCESS;
}
Result module_load(Module* module, const void* image) {
    ENTER("cuModuleLoadData");
    if (image == nullptr) return INVALID_VALUE;
    ++state->modules;
    *module = reinterpret_cast<Module>(&a_module);
    return SUCCESS;
}
Result module_unload(Module) {
    ENTER("cuModuleUnload");
    --state->modules;
    return SUCCESS;
}
Result module_function(Function* function, Module, const char* name) {
    ENTER("cuModuleGetFunction");
    if (std::strcmp(name, "kvstore_copy_tiles") != 0) return NOT_FOUND;
    *function = reinterpret_cast<Function>(&a_function);
    return SUCCESS;
}
Result launch(Function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
              unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters, void** extra) {
    ENTER("cuLaunchKernel");
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || block_x != BLOCK_THREADS || block_y != 1 || block_z != 1 ||
        shared_bytes != 0 || extra != nullptr) {
        return INVALID_VALUE;
    }
    const Tile* tiles = *static_cast<const Tile**>(parameters[0]);
    const std::uint32_t count = *static_cast<std::uint32_t*>(parameters[1]);
    if (!within(state->registered, reinterpret_cast<std::uint64_t>(tiles), count * sizeof(Tile))) return INVALID_VALUE;
    const std::uint32_t warps = grid_x * (block_x / WARP_LANES);
    auto order = std::make_shared<std::vector<std::uint32_t>>();  // a warp a step
    for (std::uint32_t warp = 0; warp < warps; ++warp) {
        if (warp < count) order->push_back(warp);
    }
    std::shuffle(order->begin(), order->end(), state->random);
    Op op;
    op.step = [=] {
        if (order->empty()) return true;
        const std::uint32_t warp = order->back();
        order->pop_back();
        CheckedAccess access;
        for (std::uint32_t lane = 0; lane < WARP_LANES; ++lane) {
            copy_tiles<Word16>(tiles, count, warp, warps, lane, access);
        }
        if (!access.good) state->lost = true;
        return order->empty();
    };
    stream_of(stream).ops.push_back(std::move(op));
    return SUCCESS;
}

Result batch_13(DeviceAddress* to, DeviceAddress* from, std::size_t* sizes, std::size_t count,
                CopyAttributes* attributes, std::size_t* starts, std::size_t attribute_count, Stream stream) {
    return batch(to, from, sizes, count, attributes, starts, attribute_count, nullptr, stream);
}

}  // namespace

// ---- what is exported

extern "C" {

Result cuGetProcAddress_v2(const char* symbol, void** function, int version, std::uint64_t, int* status) {
    const std::lock_guard guard(mutex);
    *function = nullptr;
    *status = 1;
    if (std::strcmp(symbol, "cuMemcpyBatchAsync") == 0) {
        if (version > state->version) {
            *status = 2;
        } else if (version >= BATCH_VERSION) {
            *function = reinterpret_cast<void*>(&batch_13);
        } else if (version >= BATCH_VERSION_WITH_INDEX) {
            *function = reinterpret_cast<void*>(&batch);
        }
    }
#define FAKE_FIND(member, name, parameters)                         \
    if (std::strcmp(symbol, name) == 0 && version <= ABI_VERSION) { \
        Result(*found) parameters = &member;                        \
        *function = reinterpret_cast<void*>(found);                 \
    }
    KVSTORE_CUDA_FUNCTIONS(FAKE_FIND)
#undef FAKE_FIND
    if (*function == nullptr) return SUCCESS;
    *status = 0;
    return SUCCESS;
}

void fake_reset(std::uint64_t seed, int version) {
    const std::lock_guard guard(mutex);
    state = states.emplace_back(new State).get();
    state->random.seed(seed);
    state->version = version;
}
void fake_add_device_memory(std::uint64_t address, std::uint64_t nbytes) {
    const std::lock_guard guard(mutex);
    state->device[address] = nbytes;
}
// Takes it away, as an engine that falls asleep does, or (`on`) brings it back with other bytes in it.
void fake_map_device_memory(std::uint64_t address, int on) {
    const std::lock_guard guard(mutex);
    auto& from = on != 0 ? state->unmapped : state->device;
    auto& to = on != 0 ? state->device : state->unmapped;
    const auto range = from.extract(address);
    if (on != 0 && range) std::memset(reinterpret_cast<void*>(address), 0xDD, range.mapped());
    if (range) to[address] = range.mapped();
}
void fake_faults(unsigned faults) {
    const std::lock_guard guard(mutex);
    state->faults = faults;
}
void fake_fail(const char* function, std::uint64_t after, Result result) {
    const std::lock_guard guard(mutex);
    state->failures[function] = {after, result};
}
void fake_lose() {
    const std::lock_guard guard(mutex);
    state->lost = true;
}
// Up to `count` steps; how many did something.
std::uint64_t fake_step(std::uint64_t count) {
    const std::lock_guard guard(mutex);
    std::uint64_t done = 0;
    while (done < count && step_once()) ++done;
    return done;
}
// While the gate is closed, nothing on stream 0 runs: a model that computes for a long time.
void fake_gate(int open) {
    const std::lock_guard guard(mutex);
    state->gate_open = open != 0;
}
// Something that stream 0 computes: it writes a copy of `bytes`, or reads what is there.
void fake_compute_write(std::uint64_t address, const void* bytes, std::uint64_t nbytes) {
    const std::lock_guard guard(mutex);
    const auto* begin = static_cast<const std::byte*>(bytes);
    Op op;
    op.step = [address, copy = std::vector<std::byte>(begin, begin + nbytes)] {
        std::memcpy(reinterpret_cast<void*>(address), copy.data(), copy.size());
        return true;
    };
    state->null_stream.ops.push_back(std::move(op));
}
void fake_compute_read(std::uint64_t address, void* into, std::uint64_t nbytes) {
    const std::lock_guard guard(mutex);
    Op op;
    op.step = [=] {
        std::memcpy(into, reinterpret_cast<const void*>(address), nbytes);
        return true;
    };
    state->null_stream.ops.push_back(std::move(op));
}
// Somebody captures a graph from now on, or ends it; whether it is whole so far.
int fake_capture(int on) {
    const std::lock_guard guard(mutex);
    state->capturing = on != 0;
    return state->capture_broken ? 0 : 1;
}
std::uint64_t fake_calls(const char* function) {
    const std::lock_guard guard(mutex);
    return state->calls[function];
}
// What somebody forgot to give back.
std::int64_t fake_alive(const char* what) {
    const std::lock_guard guard(mutex);
    const std::string kind = what;
    if (kind == "registered") return static_cast<std::int64_t>(state->registered.size());
    if (kind == "events") return state->events_alive;
    if (kind == "contexts") return state->contexts;
    if (kind == "modules") return state->modules;
    if (kind == "streams") {
        return std::count_if(state->streams.begin(), state->streams.end(), [](const auto& stream) { return !!stream; });
    }
    return -1;
}
// A thread that steps all the time, until `fake_run(0)`.
void fake_run(int on) {
    if (on != 0 && !running.exchange(true)) {
        runner = std::thread([] {
            while (running.load()) {
                bool moved;
                {
                    const std::lock_guard guard(mutex);
                    moved = step_once();
                }
                if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(20));
            }
        });
    } else if (on == 0 && running.exchange(false)) {
        runner.join();
    }
}
// The kernel's arithmetic on plain memory, tile by tile. -1 when a word was not aligned.
int fake_copy_tiles(const Tile* tiles, std::uint32_t count, std::uint32_t warps) {
    const std::lock_guard guard(mutex);
    auto* saved = state;
    State plain;
    state = &plain;
    for (std::uint32_t i = 0; i < count; ++i) {
        plain.registered[tiles[i].source] = std::max<std::size_t>(plain.registered[tiles[i].source], tiles[i].nbytes);
        plain.device[tiles[i].destination] = std::max<std::size_t>(plain.device[tiles[i].destination], tiles[i].nbytes);
    }
    CheckedAccess access;
    for (std::uint32_t warp = 0; warp < warps; ++warp) {
        for (std::uint32_t lane = 0; lane < WARP_LANES; ++lane) {
            copy_tiles<Word16>(tiles, count, warp, warps, lane, access);
        }
    }
    state = saved;
    return access.good ? 0 : -1;
}

}  // extern "C"
