// The gather/scatter kernel: many small fragments between device memory and pinned host memory, by a few blocks.
//
// A word is read once and never again, on either side: the hints keep it from pushing out what the model has cached.
#include "tiles.h"

namespace {

struct Global {
    template <typename Word>
    __device__ __forceinline__ Word load(std::uint64_t address) const {
        return __ldcs(reinterpret_cast<const Word*>(address));
    }
    template <typename Word>
    __device__ __forceinline__ void store(std::uint64_t address, Word word) const {
        __stcs(reinterpret_cast<Word*>(address), word);
    }
};

}  // namespace

// The bound keeps a compiler from using more registers than a block of that many threads can have.
extern "C" __global__ void __launch_bounds__(kvstore::cuda::BLOCK_THREADS)
    kvstore_copy_tiles(const kvstore::cuda::Tile* tiles, std::uint32_t count) {
    const std::uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    const std::uint32_t warps = gridDim.x * (blockDim.x / kvstore::cuda::WARP_LANES);
    Global access;
    kvstore::cuda::copy_tiles<uint4>(tiles, count, thread / kvstore::cuda::WARP_LANES, warps,
                                     thread % kvstore::cuda::WARP_LANES, access);
}
