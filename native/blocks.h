// An array that grows at its end without ever moving what it holds: no pause, and references stay valid.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

namespace kvstore {

template <typename T>
class Blocks {
  public:
    T& operator[](std::size_t i) { return blocks_[i / PER_BLOCK][i % PER_BLOCK]; }
    const T& operator[](std::size_t i) const { return blocks_[i / PER_BLOCK][i % PER_BLOCK]; }
    std::size_t size() const { return size_; }
    void emplace_back() {
        if (size_ % PER_BLOCK == 0) blocks_.push_back(std::make_unique<T[]>(PER_BLOCK));
        ++size_;
    }

  private:
    static constexpr std::size_t PER_BLOCK = 256;
    std::vector<std::unique_ptr<T[]>> blocks_;
    std::size_t size_ = 0;
};

}  // namespace kvstore
