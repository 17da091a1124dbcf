// The copier for CUDA with all its threads, on the fake device that is linked into this program: for the sanitizers.
//
// "plain" (default): an engine's thread stores and loads; another pins, takes the arena away and brings it back, and
// stops the copies as for a sleep; a third does the device's work. Every load that is reported must show what was
// stored. "planted-race": reads a block while its load may still run, which the thread sanitizer must see.
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/copier.h"

extern "C" {
void fake_reset(std::uint64_t seed, int version);
void fake_add_device_memory(std::uint64_t address, std::uint64_t nbytes);
void fake_run(int on);
std::int64_t fake_alive(const char* what);
}

using namespace kvstore;
using namespace kvstore::cuda;

namespace {

constexpr std::size_t BLOCK = 8 << 10;
constexpr std::size_t SLOTS = 16;
constexpr std::uint64_t PIECE = 64 << 10;
constexpr double WAIT_S = 60;

struct Rig {
    explicit Rig(std::uint64_t kernel_bytes) : memory(2 * SLOTS * BLOCK) {
        fake_reset(20'240'607, 13000);
        fake_add_device_memory(device_block(0), memory.size());
        CopySettings settings;
        settings.load_kernel_bytes = settings.store_kernel_bytes = kernel_bytes;
        settings.in_flight_bytes = 4 * BLOCK;
        settings.pin_piece_bytes = PIECE;
        const std::byte kernels[1] = {};
        copier = DeviceCopier::open(std::make_unique<OpenDevice>(Driver::open(""), 0, kernels), settings);
        copier->add_memory(device_block(0), memory.size());
        arena = shared_memory("arena", SLOTS * BLOCK);
    }
    std::uint64_t device_block(std::size_t i) { return reinterpret_cast<std::uint64_t>(memory.data() + i * BLOCK); }
    std::uint64_t slot(std::size_t i) { return reinterpret_cast<std::uint64_t>(arena->data() + i * BLOCK); }
    void submit(std::uint64_t job, bool is_load, std::size_t block, std::size_t at) {
        const std::uint64_t here = device_block(block), there = slot(at);
        copier->submit({job,
                        is_load,
                        {{is_load ? there : here, is_load ? here : there, BLOCK}},
                        {},
                        nullptr,
                        {static_cast<std::int64_t>(block)}});
    }
    bool ended_well(std::uint64_t job) {
        const std::uint64_t jobs[] = {job};
        CHECK(copier->wait(jobs, WAIT_S));
        for (const Ended& ended : copier->finished()) {
            if (ended.job == job) return ended.failed.empty() && ended.settled;
        }
        CHECK(!"the job was never reported");
        return false;
    }

    std::vector<std::byte> memory;
    std::shared_ptr<Mapping> arena;
    std::shared_ptr<DeviceCopier> copier;
};

void pin_all(DeviceCopier& copier, std::uint64_t address) {
    while (copier.arena(address)->pin_next() == Pinned::PIECE) {
    }
}

// What the engine sees while another thread takes the arena away now and then: right bytes, or a failure.
void bytes_are_right_while_arenas_come_and_go(std::uint64_t kernel_bytes) {
    Rig rig(kernel_bytes);
    fake_run(1);
    const std::uint64_t address = rig.slot(0);
    rig.copier->map_arena(rig.arena, nullptr, true);
    std::atomic<bool> stop{false};
    std::thread link([&] {
        while (!stop.load()) {
            pin_all(*rig.copier, address);
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
            rig.copier->unmap_arena(address);
            rig.copier->map_arena(rig.arena, nullptr, true);
            rig.copier->suspend();
            rig.copier->resume();
        }
        pin_all(*rig.copier, address);
    });
    std::mt19937_64 random(7);
    std::uint64_t job = 0;
    int loaded = 0;
    const auto latest = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (loaded < 60) {
        CHECK(std::chrono::steady_clock::now() < latest);
        const std::size_t at = random() % SLOTS, block = random() % SLOTS;
        std::memset(rig.memory.data() + block * BLOCK, loaded + 1, BLOCK);
        try {
            rig.submit(++job, false, block, at);
            if (!rig.ended_well(job)) continue;
            rig.submit(++job, true, SLOTS + block, at);
            if (!rig.ended_well(job)) continue;
        } catch (const std::invalid_argument&) {  // there is no arena at the moment
            std::this_thread::yield();
            continue;
        }
        ++loaded;
        CHECK(std::memcmp(rig.memory.data() + (SLOTS + block) * BLOCK, rig.memory.data() + block * BLOCK, BLOCK) == 0);
    }
    stop = true;
    link.join();
    rig.copier->close();
    fake_run(0);
    for (const char* what : {"registered", "events"}) CHECK(fake_alive(what) == 0);
    rig.copier.reset();
    for (const char* what : {"contexts", "modules", "streams"}) CHECK(fake_alive(what) == 0);
}

void jobs_of_many_threads_all_end() {
    Rig rig(0);
    fake_run(1);
    rig.copier->map_arena(rig.arena, nullptr, true);
    pin_all(*rig.copier, rig.slot(0));
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&rig, thread] {
            for (std::size_t i = 0; i < 40; ++i) {
                rig.submit(1 + thread * 40 + i, i % 2 == 1, thread * 4 + i % 4, thread * 4 + i % 4);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::vector<std::uint64_t> jobs(160);
    for (std::size_t i = 0; i < jobs.size(); ++i) jobs[i] = i + 1;
    CHECK(rig.copier->wait(jobs, WAIT_S));
    CHECK(rig.copier->finished().size() == jobs.size());
    rig.copier->close();
    fake_run(0);
}

void planted_race() {
    Rig rig(0);
    rig.copier->map_arena(rig.arena, nullptr, false);
    fake_run(1);
    unsigned sum = 0;
    for (std::uint64_t job = 1; job <= 50; ++job) {
        rig.submit(job, true, 0, 0);
        for (int i = 0; i < 20'000; ++i) sum += static_cast<unsigned>(rig.memory[i % BLOCK]);
        CHECK(rig.ended_well(job));
    }
    rig.copier->close();
    fake_run(0);
    std::printf("%u\n", sum);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1 && std::string(argv[1]) == "planted-race") {
        planted_race();
    } else {
        for (const std::uint64_t kernel_bytes : {std::uint64_t{0}, UINT64_MAX}) {
            bytes_are_right_while_arenas_come_and_go(kernel_bytes);
        }
        jobs_of_many_threads_all_end();
    }
    std::puts("ok");
}
