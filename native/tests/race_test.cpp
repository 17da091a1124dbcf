// One writer, three readers and a copier with two threads on real shared memory: no reader may believe bytes that are
// not its chunk's.
//
// The writer reuses few slots as fast as it can: forget the chunk, raise the generation, write the next chunk's bytes,
// insert. Every word of a chunk's bytes names its key and generation. A reader looks a key up, copies, compares the
// generation, and if that is still the one it found, every word must be right. Reader 0 copies through the copier.
//
//     race_test                        must end with "ok"
//     race_test ignore-generations     must find wrong bytes (exit 1): else this test could not fail
//     race_test planted-race           must be reported by the thread sanitizer
//     race_test entries                readers against a writer that never leaves one bucket: no entry may be torn;
//                                      must end with "ok", and must not in a build without the sequence check
//
// All threads use one map of each memory, for the thread sanitizer knows places by their address.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "copy.h"
#include "digest.h"
#include "table.h"

using namespace kvstore;

namespace {

constexpr std::uint64_t SLOT_BYTES = 16 << 10;
constexpr std::uint32_t SLOTS = 24;
constexpr std::uint32_t KEYS = 64;
constexpr int READERS = 3;
constexpr std::uint64_t WRITES_MIN = 20'000;
constexpr std::uint64_t HITS_MIN = 2'000;     // of each reader
constexpr std::uint64_t MISMATCHES_MIN = 20;  // of all
constexpr std::chrono::seconds TIME_MAX{60};

enum class Mode { SOUND, IGNORE_GENERATIONS, PLANTED_RACE };

struct Shared {
    Mode mode;
    std::shared_ptr<Mapping> table;
    std::shared_ptr<Mapping> arena;
    std::vector<Digest> digests;
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> wrong{0};
    std::atomic<std::uint64_t> hits[READERS]{};
    std::atomic<std::uint64_t> mismatches{0};
    std::atomic<std::uint64_t> peeked{0};
};

std::uint64_t stamp(std::uint32_t key, std::uint64_t generation) {
    return std::uint64_t{key} << 40 | generation;
}

TableShape shape() {
    return TableShape::for_entries(KEYS / 4, SLOTS * SLOT_BYTES, SLOT_BYTES);
}

std::uint32_t slot_number(std::uint32_t place) {
    return place * static_cast<std::uint32_t>(SLOT_BYTES / SLOT_ALIGNMENT);
}

bool enough(const Shared& shared) {
    for (const auto& hits : shared.hits) {
        if (hits.load() < HITS_MIN) return false;
    }
    return shared.mismatches.load() >= MISMATCHES_MIN;
}

void write(Shared& shared, TableWriter& writer) {
    std::mt19937 random(1);
    std::vector<std::uint32_t> holds(SLOTS, KEYS);  // by place: the key, or none
    std::vector<std::uint64_t> bytes(SLOT_BYTES / 8);
    const auto deadline = std::chrono::steady_clock::now() + TIME_MAX;
    for (std::uint64_t writes = 0; writes < WRITES_MIN || !enough(shared); ++writes) {
        if (shared.wrong.load() > 0 || std::chrono::steady_clock::now() > deadline) break;
        const std::uint32_t place = random() % SLOTS;
        std::uint32_t key = random() % KEYS;
        while (writer.find(shared.digests[key]) != NO_RECORD) key = (key + 1) % KEYS;
        if (holds[place] != KEYS) writer.erase(shared.digests[holds[place]]);
        holds[place] = KEYS;
        const std::uint64_t generation = writer.raise_generation(slot_number(place));
        std::atomic_thread_fence(std::memory_order_seq_cst);
        std::fill(bytes.begin(), bytes.end(), stamp(key, generation));
        const auto* source = reinterpret_cast<const std::byte*>(bytes.data());
        copy_bytes(shared.arena->data() + place * SLOT_BYTES, source, SLOT_BYTES, source);
        stream_fence();
        if (writer.insert(shared.digests[key], Where::CPU, {slot_number(place), generation}, key)) holds[place] = key;
        writer.heartbeat();
        if (writes % 64 == 0) std::this_thread::yield();
    }
    shared.stop = true;
    CHECK(writer.problems().empty());
}

// A plain read of a word that the writer writes atomically: what nobody must do.
std::uint64_t peek(const Shared& shared) {
    const std::byte* bucket = shared.table->data() + shape().buckets_offset();
    return *reinterpret_cast<const std::uint64_t*>(bucket + offsetof(Bucket, location));
}

void read(Shared& shared, int number, Copier* copier) {
    const TableReader table(shared.table->data(), shared.table->size());
    std::mt19937 random(100 + static_cast<unsigned>(number));
    std::vector<std::uint64_t> bytes(SLOT_BYTES / 8);
    if (copier != nullptr) copier->add_region(reinterpret_cast<std::uint64_t>(bytes.data()), SLOT_BYTES);
    for (std::uint64_t job = 0; !shared.stop.load(); ++job) {
        if (shared.mode == Mode::PLANTED_RACE) shared.peeked += peek(shared);
        const std::uint32_t key = random() % KEYS;
        const Found found = table.find(shared.digests[key]);
        if (found.where == Where::MISS) continue;
        CHECK(found.where == Where::CPU && found.at.slot % slot_number(1) == 0 && found.at.slot < slot_number(SLOTS));
        const std::byte* source = shared.arena->data() + found.at.slot * SLOT_ALIGNMENT;
        if (copier != nullptr) {
            std::vector<Fragment> fragments;
            for (std::uint64_t at = 0; at < SLOT_BYTES; at += SLOT_BYTES / 2) {
                fragments.push_back({reinterpret_cast<std::uint64_t>(source) + at,
                                     reinterpret_cast<std::uint64_t>(bytes.data()) + at, SLOT_BYTES / 2});
            }
            copier->submit(job, std::move(fragments), {});
            while (!copier->wait({&job, 1}, 1.0)) {
            }
            copier->finished();
        } else {
            copy_bytes(reinterpret_cast<std::byte*>(bytes.data()), source, SLOT_BYTES, source);
            stream_fence();
        }
        std::uint8_t current = 0;
        table.current({&found.at.slot, 1}, {&found.at.generation, 1}, {&current, 1});
        if (current == 0) ++shared.mismatches;
        if (current == 0 && shared.mode != Mode::IGNORE_GENERATIONS) continue;
        ++shared.hits[number];
        for (const std::uint64_t word : bytes) {
            if (word == stamp(key, found.at.generation)) continue;
            ++shared.wrong;
            return;
        }
    }
}

// Eight keys share one home bucket; each always has its own slot and generation. The writer exchanges them without a
// pause, so that most reads meet a write.
constexpr std::uint32_t CROWD = 8;
constexpr std::uint64_t EXCHANGES = 3'000'000;
constexpr std::uint64_t EXCHANGES_MAX = 300'000'000;
constexpr std::uint64_t ENTRIES_READ_MIN = 500'000;  // by each reader

Digest crowd_digest(std::uint32_t key) {
    return {0, key + 1};
}

bool race_for_entries() {
    const auto memory = shared_memory("table", shape().table_bytes());
    TableWriter writer(memory->data(), shape(), Id{});
    std::atomic<bool> stop{false};
    std::atomic<std::uint64_t> torn{0};
    std::atomic<std::uint64_t> read[READERS]{};
    std::vector<std::thread> readers;
    for (int i = 0; i < READERS; ++i) {
        readers.emplace_back([&, i] {
            const TableReader table(memory->data(), memory->size());
            for (std::uint32_t key = 0; !stop.load(); key = (key + 1) % CROWD) {
                const Found found = table.find(crowd_digest(key));
                if (found.where == Where::MISS) continue;
                ++read[i];
                if (found.at != Ref{key, 1000 + key}) ++torn;
            }
        });
    }
    std::mt19937 random(1);
    bool present[CROWD] = {};
    const auto all_read = [&] {
        return std::all_of(std::begin(read), std::end(read), [](const auto& one) { return one >= ENTRIES_READ_MIN; });
    };
    for (std::uint64_t i = 0; torn == 0 && (i < EXCHANGES || (i < EXCHANGES_MAX && !all_read())); ++i) {
        const std::uint32_t key = random() % CROWD;
        if (present[key]) {
            writer.erase(crowd_digest(key));
        } else {
            CHECK(writer.insert(crowd_digest(key), Where::CPU, {key, 1000 + key}, key));
        }
        present[key] = !present[key];
    }
    stop = true;
    for (std::thread& reader : readers) reader.join();
    CHECK(writer.problems().empty());
    std::printf("%llu, %llu and %llu entries read, %llu torn\n", static_cast<unsigned long long>(read[0].load()),
                static_cast<unsigned long long>(read[1].load()), static_cast<unsigned long long>(read[2].load()),
                static_cast<unsigned long long>(torn.load()));
    if (torn > 0) return false;
    CHECK(all_read());
    return true;
}

}  // namespace

int main(int count, char** arguments) {
    const std::string name = count > 1 ? arguments[1] : "";
    if (name == "entries") {
        if (!race_for_entries()) return 1;
        std::puts("ok");
        return 0;
    }
    Shared shared{};
    shared.mode = name == "ignore-generations" ? Mode::IGNORE_GENERATIONS
                  : name == "planted-race"     ? Mode::PLANTED_RACE
                                               : Mode::SOUND;
    shared.table = shared_memory("table", shape().table_bytes());
    shared.arena = shared_memory("arena", SLOTS * SLOT_BYTES);
    populate(reinterpret_cast<std::uintptr_t>(shared.arena->data()), shared.arena->size());
    const Hasher hasher = hasher_for(Id{}, Id{}, Id{});
    for (std::uint32_t key = 0; key < KEYS; ++key) {
        std::byte bytes[16] = {};
        std::memcpy(bytes, &key, sizeof key);
        shared.digests.push_back(hasher(bytes));
    }
    TableWriter writer(shared.table->data(), shape(), Id{});
    const auto copier = Copier::with_threads(2);
    copier->add_region(reinterpret_cast<std::uint64_t>(shared.arena->data()), shared.arena->size());
    std::vector<std::thread> threads;
    for (int i = 0; i < READERS; ++i) {
        threads.emplace_back([&, i] { read(shared, i, i == 0 ? copier.get() : nullptr); });
    }
    write(shared, writer);
    for (std::thread& thread : threads) thread.join();
    std::uint64_t hits = 0;
    for (const auto& of_one : shared.hits) hits += of_one.load();
    std::printf("%llu hits, %llu generation mismatches, %llu wrong\n", static_cast<unsigned long long>(hits),
                static_cast<unsigned long long>(shared.mismatches.load()),
                static_cast<unsigned long long>(shared.wrong.load()));
    if (shared.wrong.load() > 0) return 1;
    CHECK(shared.mode != Mode::SOUND || enough(shared));
    std::puts("ok");
}
