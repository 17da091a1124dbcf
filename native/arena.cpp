#include "arena.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>

// Newer than some C libraries' headers; the kernel answers EINVAL to what it does not know.
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvstore {
namespace {

constexpr std::size_t HUGE_PAGE_BYTES = 2 << 20;

[[noreturn]] void fail(const std::string& what) {
    throw std::system_error(errno, std::generic_category(), what);
}

void add_seals(int fd, int seals, const char* what) {
    if (fcntl(fd, F_ADD_SEALS, seals) != 0) fail(std::string("cannot seal the ") + what);
}

}  // namespace

std::uint64_t class_bytes_of(std::uint64_t chunk_bytes) {
    if (chunk_bytes == 0) throw std::invalid_argument("a chunk of 0 bytes");
    if (chunk_bytes > std::numeric_limits<std::uint64_t>::max() - SLOT_ALIGNMENT) {
        throw std::invalid_argument("a chunk of " + std::to_string(chunk_bytes) + " bytes");
    }
    return (chunk_bytes + SLOT_ALIGNMENT - 1) / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
}

int create_memfd(const std::string& name, std::uint64_t nbytes) {
    if (nbytes > static_cast<std::uint64_t>(std::numeric_limits<off_t>::max())) {
        throw std::invalid_argument("a memory of " + std::to_string(nbytes) + " bytes");
    }
    int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) fail("cannot create shared memory '" + name + "'");
    if (fchmod(fd, 0600) != 0 || ftruncate(fd, static_cast<off_t>(nbytes)) != 0) {
        const int error = errno;
        close(fd);
        errno = error;
        fail("cannot set up shared memory '" + name + "' of " + std::to_string(nbytes) + " bytes");
    }
    return fd;
}

void seal_arena(int fd) {
    add_seals(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL, "arena");
}

void seal_table(int fd) {
    add_seals(fd, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL, "table");
}

namespace {

// The pages by madvise, or else each by `touch`.
template <typename Touch>
void populate_pages(std::uintptr_t address, std::size_t nbytes, int advice, Touch touch) {
    if (nbytes == 0) return;
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    if (address > std::numeric_limits<std::uintptr_t>::max() - nbytes - page) {
        throw std::invalid_argument("populate: the range wraps around");
    }
    const std::uintptr_t begin = address / page * page;
    const std::uintptr_t end = (address + nbytes + page - 1) / page * page;
    int result;
    do {
        result = madvise(reinterpret_cast<void*>(begin), end - begin, advice);
    } while (result != 0 && (errno == EINTR || errno == EAGAIN));
    if (result == 0) return;
    if (errno != EINVAL) fail("cannot have " + std::to_string(nbytes) + " bytes of memory");
    for (std::uintptr_t at = begin; at < end; at += page) {  // before Linux 5.14
        touch(reinterpret_cast<unsigned char*>(at));
    }
}

}  // namespace

void populate(std::uintptr_t address, std::size_t nbytes) {
    // An atomic "or" of nothing writes the page without changing what another process puts there.
    populate_pages(address, nbytes, MADV_POPULATE_WRITE,
                   [](unsigned char* at) { __atomic_fetch_or(at, 0, __ATOMIC_RELAXED); });
}

void populate_for_reading(std::uintptr_t address, std::size_t nbytes) {
    populate_pages(address, nbytes, MADV_POPULATE_READ,
                   [](const unsigned char* at) { (void)*static_cast<const volatile unsigned char*>(at); });
}

bool interleave(std::uintptr_t address, std::size_t nbytes, const std::vector<unsigned>& nodes) {
    int own = MPOL_DEFAULT;
    if (syscall(SYS_get_mempolicy, &own, nullptr, 0UL, nullptr, 0UL) != 0) fail("cannot ask for the memory policy");
    if (own != MPOL_DEFAULT) return false;
    constexpr unsigned BITS = 8 * sizeof(unsigned long);
    std::vector<unsigned long> mask;
    for (const unsigned node : nodes) {
        if (node / BITS >= mask.size()) mask.resize(node / BITS + 1);
        mask[node / BITS] |= 1UL << node % BITS;
    }
    // The kernel takes the number of bits for one more than it is.
    if (syscall(SYS_mbind, address, nbytes, MPOL_INTERLEAVE, mask.data(), mask.size() * BITS + 1, 0U) != 0) {
        fail("cannot spread memory over NUMA nodes");
    }
    return true;
}

std::uint64_t memfd_bytes(int fd) {
    struct stat status;
    if (fstat(fd, &status) != 0) fail("cannot look at the shared memory");
    return static_cast<std::uint64_t>(status.st_size);
}

Mapping::Mapping(int fd, std::size_t nbytes, Access access) : size_(nbytes), pid_(getpid()) {
    const std::uint64_t there = memfd_bytes(fd);
    if (nbytes == 0 || there < nbytes) {
        throw std::invalid_argument("cannot map " + std::to_string(nbytes) + " bytes of a memory of " +
                                    std::to_string(there) + " bytes");
    }
    const int protection = access == Access::WRITE ? PROT_READ | PROT_WRITE : PROT_READ;
    void* mapped = mmap(nullptr, nbytes, protection, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) fail("cannot map " + std::to_string(nbytes) + " bytes of shared memory");
    if (madvise(mapped, nbytes, MADV_DONTFORK) != 0) {
        const int error = errno;
        munmap(mapped, nbytes);
        errno = error;
        fail("cannot keep shared memory out of forked children");
    }
    // A wish: the kernel's setting for shared memory decides. Not for what is left over, which would take a whole page.
    madvise(mapped, nbytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_HUGEPAGE);
    data_ = static_cast<std::byte*>(mapped);
}

Mapping::~Mapping() {
    if (getpid() == pid_) munmap(data_, size_);
}

}  // namespace kvstore
