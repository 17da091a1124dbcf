#include "expansion.h"

#include <cassert>

namespace kvstore {

std::size_t expand(std::span<const Piece> pieces, std::size_t together, std::span<const BlockPlace> blocks,
                   const Runs& runs) {
    assert(together > 0 && pieces.size() % together == 0);
    std::size_t count = 0;
    std::uint64_t device_end = 0, arena_end = 0;  // of the last run
    for (std::size_t first = 0; first < pieces.size(); first += together) {
        for (const BlockPlace& at : blocks) {
            for (const Piece& piece : pieces.subspan(first, together)) {
                const std::uint64_t device = piece.device + at.block * piece.device_stride;
                const std::uint64_t arena = at.chunk + piece.arena + at.position * piece.arena_stride;
                if (count > 0 && device == device_end && arena == arena_end) {
                    runs.nbytes[count - 1] += piece.nbytes;
                } else {
                    runs.device[count] = device;
                    runs.arena[count] = arena;
                    runs.nbytes[count] = piece.nbytes;
                    ++count;
                }
                device_end = device + piece.nbytes;
                arena_end = arena + piece.nbytes;
            }
        }
    }
    return count;
}

}  // namespace kvstore
