// A trace of requests played against an index, and perhaps a second one for the tier below: sizes only, no bytes.
//
// Each request does what an engine's does: it finds the longest prefix present, has what lies below read up, touches
// its chain, and stores what is missing, head first. Every chunk has one size and its id in the trace is its key.
// One thread.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "index.h"

namespace kvstore {

// How much of a request's chain, from its head, may be loaded, stored, and written to the lower tier.
struct Ends {
    std::uint32_t load, store, write;
};

struct Served {
    std::uint32_t hits = 0;     // chunks loaded: of the longest prefix present in either tier
    std::uint32_t fs_hits = 0;  // of these, only in the lower one
    std::uint32_t stored = 0;   // new in the upper one
    std::uint32_t written = 0;  // new in the lower one
};

class Replay {
  public:
    // Capacities in chunks. `fs` may be null.
    Replay(Index& cpu, std::uint64_t cpu_chunks, Index* fs);

    // `chain`: ids of the request's chunks, head first. Where each is: CPU, FS (only there) or MISS.
    std::vector<Where> find(std::span<const std::uint64_t> chain);
    Served serve(std::span<const std::uint64_t> chain, const Ends& ends);

  private:
    using Key = std::array<std::byte, KEY_BYTES_MIN>;
    void look_up(std::span<const std::uint64_t> chain);
    bool has(std::size_t i) const { return in_cpu_[i] == Where::CPU; }
    bool promote(std::size_t i);
    void touch();
    std::uint32_t store(std::uint32_t store_end);
    std::uint32_t write(std::size_t i);

    Index& cpu_;
    Index* fs_;
    std::size_t grants_max_;
    std::vector<Key> key_bytes_;
    std::vector<Bytes> keys_;
    std::vector<Where> in_cpu_;
    std::vector<Where> in_fs_;
    std::vector<Bytes> some_keys_;
    std::vector<Commit> commits_;
};

}  // namespace kvstore
