// One device as the copies use it: the process's primary context (the one that PyTorch uses), a stream for each
// direction, the copy kernel, and pools of events.
//
// `launch_copy` is for the one thread that runs copies; what it knows of the device never changes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/driver.h"
#include "cuda/tiles.h"

namespace kvstore::cuda {

// The fatbin that was built with this module; empty where there was no nvcc.
std::span<const std::byte> built_kernels();

class OpenDevice {
  public:
    // std::runtime_error: no such device, or the driver refuses. `kernels`: a fatbin, may be empty.
    OpenDevice(std::shared_ptr<const Driver> driver, int ordinal, std::span<const std::byte> kernels);
    ~OpenDevice() { release(); }
    OpenDevice(const OpenDevice&) = delete;
    OpenDevice& operator=(const OpenDevice&) = delete;

    // Gives streams, kernel and context back; what it knows of the device stays. Nothing runs on its streams any more.
    void release();

    const Driver& driver() const { return *driver_; }
    const std::shared_ptr<const Driver>& shared_driver() const { return driver_; }
    Context context() const { return context_; }
    Stream stream(bool is_load) const { return is_load ? load_stream_ : store_stream_; }
    const std::string& name() const { return name_; }
    std::string capability() const { return std::to_string(major_) + "." + std::to_string(minor_); }
    int numa_node() const { return numa_node_; }  // -1: unknown
    bool has_kernel() const { return kernel_ != nullptr; }
    const std::string& kernel_problem() const { return kernel_problem_; }  // why there is none

    // `tiles` is memory that the device can read, until the stream has got past this.
    Result launch_copy(const Tile* tiles, std::uint32_t count, std::uint32_t blocks, Stream stream) const;

  private:
    void load_kernel(std::span<const std::byte> kernels);
    int attribute(int which) const;

    const std::shared_ptr<const Driver> driver_;
    Device device_ = 0;
    Context context_ = nullptr;
    Stream store_stream_ = nullptr;
    Stream load_stream_ = nullptr;
    Module module_ = nullptr;
    Function kernel_ = nullptr;
    std::string kernel_problem_;
    std::string name_;
    int major_ = 0, minor_ = 0, numa_node_ = -1;
    bool released_ = false;
};

}  // namespace kvstore::cuda
