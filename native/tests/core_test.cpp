// The core without Python, for the address and undefined-behaviour sanitizers: digests, a crowded table, slabs, an
// index under random calls, copies at every alignment.
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "copy.h"
#include "digest.h"
#include "index.h"
#include "slabs.h"
#include "table.h"

using namespace kvstore;

namespace {

constexpr std::uint64_t KIB = 1024;
std::mt19937_64 random_word(20'240'607);  // one seed: every run does the same

Id id(int number) {
    Id id{};
    std::memcpy(id.data(), &number, sizeof number);
    return id;
}

std::vector<std::byte> key(int number) {
    std::vector<std::byte> key(32);
    std::memcpy(key.data(), &number, sizeof number);
    return key;
}

// Published with the algorithm: the digest of 00 01 02 ... under the key 00 01 .. 0f.
void digests_match_the_published_vectors() {
    const std::map<std::size_t, std::string> vectors = {
        {0, "a3817f04ba25a8e66df67214c7550293"},  {1, "da87c1d86b99af44347659119b22fc45"},
        {15, "5493e99933b0a8117e08ec0f97cfc3d9"}, {48, "f7e5aef549f782cf379055a608269b16"},
        {63, "5150d1772f50834a503e069a973fbd7c"},
    };
    Id index_key;
    std::vector<std::byte> message(64);
    for (std::size_t i = 0; i < index_key.size(); ++i) index_key[i] = static_cast<std::byte>(i);
    for (std::size_t i = 0; i < message.size(); ++i) message[i] = static_cast<std::byte>(i);
    for (const auto& [nbytes, expected] : vectors) {
        for (std::size_t prefix = 0; prefix <= nbytes; prefix += 8) {
            const Bytes whole = Bytes(message).first(nbytes);
            const Digest digest = Hasher(index_key, whole.first(prefix))(whole.subspan(prefix));
            std::byte bytes[16];
            std::memcpy(bytes, &digest.lo, 8);
            std::memcpy(bytes + 8, &digest.hi, 8);
            std::string hex;
            for (const std::byte byte : bytes) {
                char digits[3];
                std::snprintf(digits, sizeof digits, "%02x", static_cast<unsigned>(byte));
                hex += digits;
            }
            CHECK(hex == expected);
        }
    }
}

Digest digest_of(std::uint64_t number) {  // few homes, in a table as well as among ghosts
    return {(number % 4 << 62) + number % 7, number + 1};
}

void a_crowded_table_finds_exactly_what_is_in_it() {
    const auto shape = TableShape::for_entries(60, 64 * KIB, 4 * KIB);
    const auto memory = shared_memory("table", shape.table_bytes());
    TableWriter writer(memory->data(), shape, id(1));
    const TableReader reader(memory->data(), memory->size());
    std::map<std::uint64_t, std::uint32_t> model;  // digest.hi -> slot
    std::uint64_t refused = 0;
    for (int step = 0; step < 20'000; ++step) {
        const std::uint64_t number = random_word() % 120;
        const Digest digest = digest_of(number);
        if (model.contains(digest.hi)) {
            writer.erase(digest);
            model.erase(digest.hi);
        } else {
            const auto slot = static_cast<std::uint32_t>(random_word() % 16);
            if (writer.insert(digest, Where::CPU, {slot, number}, slot)) {
                model[digest.hi] = slot;
            } else {
                ++refused;
            }
        }
        const Digest other = digest_of(random_word() % 120);
        const Found found = reader.find(other);
        CHECK((found.where == Where::CPU) == model.contains(other.hi));
        if (found.where == Where::CPU) CHECK((found.at == Ref{model[other.hi], other.hi - 1}));
        CHECK(writer.find(other) == (model.contains(other.hi) ? model[other.hi] : NO_RECORD));
    }
    CHECK(refused > 0 && !model.empty());
    CHECK(writer.problems().empty());
}

void a_bucket_that_its_writer_left_half_written_is_a_miss() {
    const auto shape = TableShape::for_entries(1, 64 * KIB, 4 * KIB);
    const auto memory = shared_memory("table", shape.table_bytes());
    TableWriter writer(memory->data(), shape, id(1));
    const TableReader reader(memory->data(), memory->size());
    const Digest digest{0, 5};
    CHECK(writer.insert(digest, Where::CPU, {3, 1}, 0));
    CHECK(reader.find(digest).where == Where::CPU);
    auto* bucket = reinterpret_cast<Bucket*>(memory->data() + shape.buckets_offset());
    bucket->sequence.fetch_add(1);
    CHECK(reader.find(digest).where == Where::MISS);
    CHECK(!writer.problems().empty());
}

void slots_of_many_classes_never_overlap() {
    const std::uint64_t arena_bytes = 1'000'000;
    const std::uint64_t unit_bytes = unit_bytes_for(arena_bytes);
    Slabs slabs(arena_bytes, unit_bytes);
    slabs.set_prefaulted(arena_bytes);
    const std::vector<std::uint64_t> classes = {4 * KIB, 12 * KIB, 20 * KIB, 100 * KIB};
    for (const std::uint64_t class_bytes : classes) slabs.require_class(class_bytes);
    std::map<std::uint64_t, std::pair<std::uint64_t, std::uint32_t>> taken;  // offset -> (bytes, slot)
    for (int step = 0; step < 20'000; ++step) {
        if (random_word() % 2 == 0 && !taken.empty()) {
            auto at = taken.begin();
            std::advance(at, static_cast<long>(random_word() % taken.size()));
            slabs.give_back(at->second.second);
            taken.erase(at);
            continue;
        }
        const std::uint64_t class_bytes = classes[random_word() % classes.size()];
        const auto slot = slabs.take(class_bytes);
        if (!slot) continue;
        slabs.find(*slot)->holder = Slot::Holder::GROUP;
        const std::uint64_t offset = slabs.offset(*slot);
        CHECK(offset + class_bytes <= arena_bytes);
        const auto next = taken.lower_bound(offset);
        CHECK(next == taken.end() || offset + class_bytes <= next->first);
        if (next != taken.begin()) {
            const auto before = std::prev(next);
            CHECK(before->first + before->second.first <= offset);
        }
        taken[offset] = {class_bytes, *slot};
    }
    CHECK(slabs.problems().empty());
}

void ghosts_are_forgotten_in_the_order_in_which_they_came() {
    Ghosts ghosts(100);
    std::map<std::uint64_t, std::uint32_t> model;  // by number, which rises: digest and count
    std::uint64_t number = 0;
    for (int step = 0; step < 20'000; ++step) {
        switch (random_word() % 4) {
            case 0:
            case 1:
                ++number;
                model[number] = static_cast<std::uint32_t>(random_word());
                ghosts.add(digest_of(number), {number, model[number]});
                break;
            case 2: {
                const std::uint64_t wanted = number - random_word() % 40;
                const auto taken = ghosts.take(digest_of(wanted));
                CHECK(taken.has_value() == model.contains(wanted));
                if (taken) CHECK(taken->last == wanted && taken->count == model[wanted]);
                model.erase(wanted);
                break;
            }
            case 3: {
                if (random_word() % 3 != 0) break;
                const auto oldest = ghosts.take_oldest();
                CHECK(oldest.has_value() == !model.empty());
                if (!oldest) break;
                CHECK(oldest->uses.last == model.begin()->first && oldest->digest == digest_of(oldest->uses.last));
                model.erase(model.begin());
                break;
            }
        }
        CHECK(ghosts.size() == model.size());
    }
    CHECK(!model.empty());
}

void use_classes_and_age_buckets_begin_where_the_decision_says() {
    const std::vector<std::uint32_t> first_of_class = {0, 2, 3, 5, 9, 17, 33, 65};
    for (unsigned c = 1; c < USE_CLASSES; ++c) {
        CHECK(use_class_of(first_of_class[c]) == c && use_class_of(first_of_class[c] - 1) == c - 1);
    }
    CHECK(use_class_of(0) == 0 && use_class_of(UINT32_MAX) == USE_CLASSES - 1);
    CHECK(age_bucket_of(0) == 0 && age_bucket_of(1) == 0 && age_bucket_of(UINT64_MAX) == AGE_BUCKETS - 1);
    const std::vector<std::uint64_t> first_of_bucket = {2, 3, 4, 6, 8, 12, 16, 24};  // from bucket 2 on
    for (unsigned i = 1; i < first_of_bucket.size(); ++i) {
        CHECK(age_bucket_of(first_of_bucket[i]) == i + 2 && age_bucket_of(first_of_bucket[i] - 1) == i + 1);
    }
}

void what_is_learned_decides_whether_the_old_or_the_young_go() {
    Comeback comeback;
    for (unsigned c = 0; c < USE_CLASSES; ++c) {  // nothing is known: the older, the worse, and all classes alike
        for (std::uint64_t age = 1; age < std::uint64_t{1} << 40; age *= 2) {
            CHECK(comeback.rank(c, age) > comeback.rank(c, 2 * age) || age_bucket_of(2 * age) == AGE_BUCKETS - 1);
            CHECK(comeback.rank(c, age) == comeback.rank(0, age));
        }
    }
    for (int i = 0; i < 10'000; ++i) comeback.hit(3, 1'000);  // what was used 5 to 8 times comes back after that long
    comeback.learn({});
    CHECK(comeback.rank(3, 900) > comeback.rank(3, 500));
    CHECK(comeback.rank(3, 500) > comeback.rank(3, 100));
    CHECK(comeback.rank(3, 100) > comeback.rank(3, 2'000));
    CHECK(comeback.rank(7, 900) > comeback.rank(7, 100));  // inherited, where nothing else is known
    CHECK(comeback.rank(2, 900) < comeback.rank(2, 100));
    for (unsigned c = 0; c < USE_CLASSES; ++c) {
        for (int bits = 0; bits < 64; ++bits) CHECK(comeback.rank(c, std::uint64_t{1} << bits) > 0);
    }
}

void an_index_is_sound_after_random_calls(Rule rule) {
    const std::uint64_t arena_bytes = 64 * 8 * KIB;
    const std::uint64_t unit_bytes = unit_bytes_for(arena_bytes);
    const auto shape = TableShape::for_entries(64, arena_bytes, unit_bytes);
    const auto memory = shared_memory("table", shape.table_bytes());
    const auto arena = shared_memory("arena", arena_bytes);
    Index index(memory, arena, arena_bytes, unit_bytes, id(1), id(2), rule, true);
    index.set_prefaulted(arena_bytes);
    std::vector<std::pair<std::uint64_t, Ref>> granted;
    std::vector<Ref> stored;
    std::vector<Ref> reading;
    Removal removal;
    bool removal_done = true;
    for (int step = 0; step < 10'000; ++step) {
        const std::uint64_t group = random_word() % 3;
        switch (random_word() % 8) {
            case 0:
            case 1:
                for (const Ref& ref : index.grant(group, (1 + random_word() % 3) * 4 * KIB, random_word() % 4)) {
                    granted.emplace_back(group, ref);
                }
                break;
            case 2:
            case 3: {
                if (granted.empty()) break;
                const auto [owner, ref] = granted[random_word() % granted.size()];
                const auto name = key(static_cast<int>(random_word() % 100));
                const auto parent = key(static_cast<int>(random_word() % 100));
                const Commit commit{ref, id(7), name, random_word() % 2 == 0 ? Bytes{} : Bytes(parent)};
                if (index.commit(owner, id(3), {&commit, 1}, 0)[0] == CommitCode::STORED) stored.push_back(ref);
                break;
            }
            case 4:
                if (stored.empty()) break;
                index.lease(group, {&stored[random_word() % stored.size()], 1}, static_cast<std::uint64_t>(step) + 50);
                index.expire_leases(static_cast<std::uint64_t>(step), random_word() % 8);
                break;
            case 5:
                if (random_word() % 20 == 0) index.end_leases(group, random_word() % 8);
                if (!granted.empty()) index.abort(group, {&granted[random_word() % granted.size()].second, 1});
                break;
            case 6: {  // goes on beside the calls of the next steps
                if (random_word() % 4 != 0) break;
                const std::uint64_t bytes_wanted = random_word() % 16 == 0 ? UINT64_MAX : 8 * KIB;
                if (removal_done) removal = index.begin_removal({}, bytes_wanted, random_word() % 4 == 0);
                removal_done = index.remove(removal, random_word() % 20);
                std::uint32_t next = static_cast<std::uint32_t>(random_word() % 100);
                index.chunks(next, {}, 20, 10);
                break;
            }
            case 7:  // the daemon reads a slot, which may lose its chunk to a removal meanwhile
                if (!stored.empty() && reading.size() < 8) {
                    const Ref ref = stored[random_word() % stored.size()];
                    if (index.begin_io(ref)) reading.push_back(ref);
                }
                if (!reading.empty() && random_word() % 2 == 0) {
                    std::swap(reading[random_word() % reading.size()], reading.back());
                    index.end_io(reading.back());
                    reading.pop_back();
                }
                break;
        }
        if (step % 50 == 0) {
            for (const std::string& problem : index.problems()) std::fprintf(stderr, "%s\n", problem.c_str());
            CHECK(index.problems().empty());
        }
    }
    for (const auto& [name, value] : index.stats()) {
        if (std::strcmp(name, "evictions") == 0) CHECK(value > 100);
        if (std::strcmp(name, "removals") == 0) CHECK(value > 10);
    }
}

void a_copy_changes_its_destination_and_nothing_beside_it() {
    constexpr std::size_t GUARD = 256;
    for (const std::size_t nbytes : {0UL, 1UL, 63UL, 511UL, 512UL, 513UL, 3072UL, 3135UL, 3200UL, 10'000UL, 70'000UL}) {
        for (std::size_t from = 0; from < 66; from += 13) {
            for (std::size_t to = 0; to < 66; to += 11) {
                std::vector<std::byte> source(nbytes + from);
                for (std::byte& byte : source) byte = static_cast<std::byte>(random_word());
                std::vector<std::byte> destination(nbytes + 2 * GUARD + to, std::byte{0x5c});
                // A hint may point anywhere.
                copy_bytes(destination.data() + GUARD + to, source.data() + from, nbytes, nullptr);
                stream_fence();
                CHECK(nbytes == 0 || std::memcmp(destination.data() + GUARD + to, source.data() + from, nbytes) == 0);
                for (std::size_t i = 0; i < GUARD; ++i) {
                    CHECK(destination[i] == std::byte{0x5c} &&
                          destination[destination.size() - 1 - i] == std::byte{0x5c});
                }
            }
        }
    }
}

void a_job_copies_each_fragment_once() {
    const auto copier = Copier::with_threads(3);
    std::vector<std::uint64_t> source(1 << 20), destination(1 << 20);
    for (std::uint64_t& word : source) word = random_word();
    copier->add_region(reinterpret_cast<std::uint64_t>(source.data()), source.size() * 8);
    copier->add_region(reinterpret_cast<std::uint64_t>(destination.data()), destination.size() * 8);
    std::vector<Fragment> fragments;
    for (std::uint64_t at = 0; at < source.size() * 8;) {
        const std::uint64_t nbytes = std::min(1 + random_word() % 900'000, source.size() * 8 - at);
        fragments.push_back({reinterpret_cast<std::uint64_t>(source.data()) + at,
                             reinterpret_cast<std::uint64_t>(destination.data()) + at, nbytes});
        at += nbytes;
    }
    copier->submit(1, fragments, {});
    const std::uint64_t job = 1;
    CHECK(copier->wait({&job, 1}, 60.0));
    const auto ended = copier->finished();
    CHECK(ended.size() == 1 && ended[0].failed.empty() && ended[0].nbytes == source.size() * 8);
    CHECK(source == destination);
}

}  // namespace

int main() {
    digests_match_the_published_vectors();
    a_crowded_table_finds_exactly_what_is_in_it();
    a_bucket_that_its_writer_left_half_written_is_a_miss();
    slots_of_many_classes_never_overlap();
    ghosts_are_forgotten_in_the_order_in_which_they_came();
    use_classes_and_age_buckets_begin_where_the_decision_says();
    what_is_learned_decides_whether_the_old_or_the_young_go();
    for (const Rule rule : {Rule::LRU, Rule::PROBATION, Rule::ADAPTIVE}) an_index_is_sound_after_random_calls(rule);
    a_copy_changes_its_destination_and_nothing_beside_it();
    a_job_copies_each_fragment_once();
    std::puts("ok");
}
