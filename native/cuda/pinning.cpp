#include "cuda/pinning.h"

#include <algorithm>
#include <cassert>

namespace kvstore::cuda {

CurrentContext::CurrentContext(const Driver& driver, Context context) : driver_(driver) {
    driver.check(driver.context_push(context), "cuCtxPushCurrent");
    driver.capture_mode_exchange(&capture_mode_);
}

CurrentContext::~CurrentContext() {
    driver_.capture_mode_exchange(&capture_mode_);
    Context popped;
    driver_.context_pop(&popped);
}

PinnedArena::PinnedArena(std::shared_ptr<const Driver> driver, Context context, std::shared_ptr<Mapping> memory,
                         std::shared_ptr<const MappedTable> table, bool pin, std::uint64_t piece_bytes)
    : driver_(std::move(driver)),
      context_(context),
      memory_(std::move(memory)),
      table_(std::move(table)),
      address_(reinterpret_cast<std::uint64_t>(memory_->data())),
      nbytes_(memory_->size()),
      piece_bytes_(piece_bytes),
      locked_((memory_->size() + piece_bytes - 1) / piece_bytes),
      stopped_(!pin) {}

std::uint64_t PinnedArena::bytes_of(std::size_t piece) const {
    return std::min(piece_bytes_, nbytes_ - piece * piece_bytes_);
}

bool PinnedArena::ready(std::size_t piece) const {
    return !table_ || piece * piece_bytes_ + bytes_of(piece) <= table_->reader.ready_bytes();
}

std::uint64_t PinnedArena::left_in_piece(std::uint64_t address) const {
    assert(address >= address_ && address - address_ < nbytes_);
    const std::uint64_t offset = address - address_;
    const std::size_t piece = offset / piece_bytes_;
    return piece * piece_bytes_ + bytes_of(piece) - offset;
}

Memory PinnedArena::use(std::uint64_t address) {
    const std::size_t piece = (address - address_) / piece_bytes_;
    if (locked_[piece].load(std::memory_order_acquire)) return Memory::PINNED;
    if (stopped_.load(std::memory_order_acquire) || !ready(piece)) return Memory::PAGEABLE;
    const std::lock_guard lock(mutex_);
    if (std::find(wanted_.begin(), wanted_.end(), piece) == wanted_.end()) wanted_.push_back(piece);
    return Memory::WAIT;
}

Pinned PinnedArena::pin_next() {
    const std::lock_guard pinning(pinning_);
    if (stopped_.load(std::memory_order_acquire)) return Pinned::STOPPED;
    std::size_t piece = locked_.size();
    {
        const std::lock_guard lock(mutex_);
        while (!wanted_.empty() && piece == locked_.size()) {
            if (!locked_[wanted_.front()].load(std::memory_order_relaxed)) piece = wanted_.front();
            wanted_.pop_front();
        }
    }
    while (next_ < locked_.size() && locked_[next_].load(std::memory_order_relaxed)) ++next_;
    if (piece == locked_.size()) {
        if (next_ == locked_.size()) return Pinned::ALL;
        if (!ready(next_)) return Pinned::NOTHING;
        piece = next_;
    }
    Result result;
    {
        const CurrentContext current(*driver_, context_);
        result = driver_->host_register(reinterpret_cast<void*>(address_ + piece * piece_bytes_), bytes_of(piece),
                                        HOST_REGISTER_PORTABLE | HOST_REGISTER_DEVICEMAP);
    }
    if (result != SUCCESS) {
        const std::lock_guard lock(mutex_);
        refusal_ = driver_->describe(result);
        stopped_.store(true, std::memory_order_release);
        return Pinned::STOPPED;
    }
    pinned_bytes_.fetch_add(bytes_of(piece), std::memory_order_relaxed);
    locked_[piece].store(true, std::memory_order_release);
    return Pinned::PIECE;
}

void PinnedArena::stop_pinning() {
    stopped_.store(true, std::memory_order_release);
}

void PinnedArena::unpin() {
    stop_pinning();
    const std::lock_guard pinning(pinning_);
    if (pinned_bytes_.load(std::memory_order_relaxed) == 0) return;
    try {
        const CurrentContext current(*driver_, context_);
        for (std::size_t piece = 0; piece < locked_.size(); ++piece) {
            if (locked_[piece].exchange(false)) {
                driver_->host_unregister(reinterpret_cast<void*>(address_ + piece * piece_bytes_));
            }
        }
    } catch (const DriverError&) {
        // Of a device that is lost nothing can be unlocked any more; the kernel does it when the process ends.
    }
    pinned_bytes_.store(0, std::memory_order_relaxed);
}

std::string PinnedArena::refusal() const {
    const std::lock_guard lock(mutex_);
    return refusal_;
}

}  // namespace kvstore::cuda
