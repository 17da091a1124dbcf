// Shared memory: memfds, their seals, and maps of them.
//
// A map is shared by reference count: whoever works on the memory without the interpreter's lock holds one, so that
// `close` in another thread can not unmap under it. Every map is MADV_DONTFORK: a forked child of an engine has no
// arena that it could scribble on, and does not keep the memory alive. What the child's kernel puts in that place is
// the child's own, often its first large array: there the end of a map unmaps nothing.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvstore {

inline constexpr std::size_t SLOT_ALIGNMENT = 4096;

// `bytes` rounded up to SLOT_ALIGNMENT; std::invalid_argument when that does not fit in 64 bits or `bytes` is 0.
std::uint64_t class_bytes_of(std::uint64_t chunk_bytes);

// Mode 0600, close-on-exec, not executable where the kernel knows how. std::system_error on failure.
int create_memfd(const std::string& name, std::uint64_t nbytes);

void seal_arena(int fd);
// After the daemon has mapped it: from then on nobody gets a writable map, not by reopening through /proc either.
void seal_table(int fd);

// Pre-fault for writing; what is there stays. std::system_error when the memory cannot be had.
void populate(std::uintptr_t address, std::size_t nbytes);
// Into this process's page tables, for reading.
void populate_for_reading(std::uintptr_t address, std::size_t nbytes);

// From now on the map's memory comes from these NUMA nodes in turn, whoever touches it first: of shared memory that is
// a property of the memory, not of this map or process. False, and nothing changed, where this process was started with
// a memory policy of its own (numactl). std::system_error where the kernel refuses.
bool interleave(std::uintptr_t address, std::size_t nbytes, const std::vector<unsigned>& nodes);

class Mapping {
  public:
    enum class Access { READ, WRITE };

    // std::invalid_argument when the memory is shorter than `nbytes`: touching beyond its end would kill the process.
    Mapping(int fd, std::size_t nbytes, Access access);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    std::byte* data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    std::byte* data_;
    std::size_t size_;
    pid_t pid_;  // whose map it is
};

std::uint64_t memfd_bytes(int fd);

}  // namespace kvstore
