// The least that a native test needs: a check that says what was false, and memory like the daemon's.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>

#include "arena.h"

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                \
        }                                                                                \
    } while (false)

inline std::shared_ptr<kvstore::Mapping> shared_memory(const std::string& name, std::uint64_t nbytes) {
    const int fd = kvstore::create_memfd(name, nbytes);
    auto mapping = std::make_shared<kvstore::Mapping>(fd, nbytes, kvstore::Mapping::Access::WRITE);
    close(fd);
    return mapping;
}
