// From pages to bytes: what a job copies, as runs that lie together in device memory and in the arena.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvstore {

// Bytes of each block that lie together in device memory and in a chunk.
struct Piece {
    std::uint64_t device;         // address, of block 0
    std::uint64_t device_stride;  // from block to block
    std::uint64_t arena;          // offset in the chunk, of its block 0
    std::uint64_t arena_stride;
    std::uint64_t nbytes;
};

struct BlockPlace {
    std::uint64_t block;     // of the device
    std::uint64_t chunk;     // its address
    std::uint64_t position;  // in the chunk, in blocks
};

// Equally long columns.
struct Runs {
    std::uint64_t* device;
    std::uint64_t* arena;
    std::uint64_t* nbytes;
};

// Every piece of every block. `together` pieces in a row are taken of each block before the next block's; it divides
// the number of pieces. Neighbours that touch on both sides become one. Returns how many runs it wrote; `runs` has room
// for pieces x blocks.
std::size_t expand(std::span<const Piece> pieces, std::size_t together, std::span<const BlockPlace> blocks,
                   const Runs& runs);

}  // namespace kvstore
