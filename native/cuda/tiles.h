// Which thread of the copy kernel moves which bytes. Pure arithmetic, the same on the device and on the host, so that
// tests without a GPU run exactly what the kernel runs.
//
// A fragment is cut on the host into tiles of at most TILE_BYTES. One warp of 32 lanes takes a tile: its lanes read
// neighbouring words, each lane several of them before it writes the first, so that enough reads are under way to fill
// the link. Words are 16 bytes where source and destination are equally far from a multiple of 16, else the widest
// that is aligned on both sides; what is before the first and after the last aligned word goes byte by byte.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KVSTORE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KVSTORE_HOST_DEVICE inline
#endif

namespace kvstore::cuda {

constexpr std::uint32_t WARP_LANES = 32;
constexpr std::uint32_t BLOCK_THREADS = 512;
constexpr std::uint32_t WORDS_AT_ONCE = 8;  // of each lane, in flight together
constexpr std::uint32_t WORD_BYTES = 16;
constexpr std::uint32_t TILE_BYTES = WARP_LANES * WORDS_AT_ONCE * WORD_BYTES;  // 4096

struct Tile {
    std::uint64_t source;
    std::uint64_t destination;
    std::uint64_t nbytes;  // at most TILE_BYTES
};

// A tile as `head` single bytes, `words` words of `width` bytes, then `tail` single bytes.
struct Split {
    std::uint32_t width;
    std::uint32_t head;
    std::uint32_t words;
    std::uint32_t tail;
};

KVSTORE_HOST_DEVICE Split split_of(const Tile& tile) {
    const auto nbytes = static_cast<std::uint32_t>(tile.nbytes);
    const auto apart = static_cast<std::uint32_t>(tile.source ^ tile.destination);
    std::uint32_t width = WORD_BYTES;
    while (width > 1 && (apart & (width - 1)) != 0) width >>= 1;
    std::uint32_t head = (width - static_cast<std::uint32_t>(tile.destination)) & (width - 1);
    if (head > nbytes) head = nbytes;
    const std::uint32_t words = (nbytes - head) / width;
    return {width, head, words, nbytes - head - words * width};
}

// What one lane does of a tile's words. `Access` has `Word load<Width>(address)` and `void store(address, Word)`.
template <typename Word, typename Access>
KVSTORE_HOST_DEVICE void copy_words(const Tile& tile, const Split& split, std::uint32_t lane, Access& access) {
    const std::uint64_t source = tile.source + split.head;
    const std::uint64_t destination = tile.destination + split.head;
    for (std::uint32_t first = lane; first < split.words; first += WARP_LANES * WORDS_AT_ONCE) {
        Word words[WORDS_AT_ONCE];
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (std::uint32_t i = 0; i < WORDS_AT_ONCE; ++i) {
            const std::uint32_t word = first + i * WARP_LANES;
            if (word < split.words) words[i] = access.template load<Word>(source + std::uint64_t{word} * sizeof(Word));
        }
#if defined(__CUDACC__)
#pragma unroll
#endif
        for (std::uint32_t i = 0; i < WORDS_AT_ONCE; ++i) {
            const std::uint32_t word = first + i * WARP_LANES;
            if (word < split.words) access.store(destination + std::uint64_t{word} * sizeof(Word), words[i]);
        }
    }
}

// What one lane does of a tile. `Word16` is the platform's 16 bytes.
template <typename Word16, typename Access>
KVSTORE_HOST_DEVICE void copy_tile(const Tile& tile, std::uint32_t lane, Access& access) {
    static_assert(sizeof(Word16) == WORD_BYTES);
    const Split split = split_of(tile);
    switch (split.width) {
        case 16:
            copy_words<Word16>(tile, split, lane, access);
            break;
        case 8:
            copy_words<std::uint64_t>(tile, split, lane, access);
            break;
        case 4:
            copy_words<std::uint32_t>(tile, split, lane, access);
            break;
        case 2:
            copy_words<std::uint16_t>(tile, split, lane, access);
            break;
        default:
            copy_words<std::uint8_t>(tile, split, lane, access);
            break;
    }
    // Fewer than 16 bytes each: a lane has at most one of either.
    if (lane < split.head) {
        access.store(tile.destination + lane, access.template load<std::uint8_t>(tile.source + lane));
    }
    if (lane < split.tail) {
        const std::uint64_t at = tile.nbytes - split.tail + lane;
        access.store(tile.destination + at, access.template load<std::uint8_t>(tile.source + at));
    }
}

// The tiles of warp `warp` of `warps`: warp, warp + warps, ...
template <typename Word16, typename Access>
KVSTORE_HOST_DEVICE void copy_tiles(const Tile* tiles, std::uint32_t count, std::uint32_t warp, std::uint32_t warps,
                                    std::uint32_t lane, Access& access) {
    for (std::uint32_t i = warp; i < count; i += warps) copy_tile<Word16>(tiles[i], lane, access);
}

}  // namespace kvstore::cuda
