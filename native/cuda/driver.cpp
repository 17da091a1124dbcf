#include "cuda/driver.h"

#include <dlfcn.h>

namespace kvstore::cuda {
namespace {

// cuGetProcAddress of CUDA 12.0. Streams are the legacy ones: stream 0 is what the rest of the process calls so.
using ProcAddress = Result(const char* symbol, void** function, int version, std::uint64_t flags, int* status);
constexpr std::uint64_t LEGACY_STREAMS = 1;
constexpr int OLDEST_VERSION = 12000;

std::string version_text(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

void* find(ProcAddress* proc_address, const char* name, int version) {
    void* function = nullptr;
    int status = 0;
    if (proc_address(name, &function, version, LEGACY_STREAMS, &status) != SUCCESS || status != 0) return nullptr;
    return function;
}

template <typename F>
void require(F*& member, ProcAddress* proc_address, const char* name, const std::string& library) {
    member = reinterpret_cast<F*>(find(proc_address, name, ABI_VERSION));
    if (member == nullptr) throw std::runtime_error(library + " has no " + name + ": is it NVIDIA's driver?");
}

}  // namespace

std::shared_ptr<const Driver> Driver::open(const std::string& library) {
    void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        const char* reason = dlerror();
        throw std::runtime_error("no CUDA driver: " + std::string(reason != nullptr ? reason : library.c_str()));
    }
    auto* proc_address = reinterpret_cast<ProcAddress*>(dlsym(handle, "cuGetProcAddress_v2"));
    if (proc_address == nullptr) {
        throw std::runtime_error(library + " is older than CUDA " + version_text(OLDEST_VERSION) +
                                 ": install a newer NVIDIA driver");
    }
    auto driver = std::make_shared<Driver>();
#define KVSTORE_CUDA_REQUIRE(member, name, parameters) require(driver->member, proc_address, name, library);
    KVSTORE_CUDA_FUNCTIONS(KVSTORE_CUDA_REQUIRE)
#undef KVSTORE_CUDA_REQUIRE
    driver->check(driver->init(0), "cuInit");
    driver->check(driver->driver_version(&driver->version), "cuDriverGetVersion");
    if (driver->version >= BATCH_VERSION) {
        driver->copy_batch = reinterpret_cast<CopyBatch*>(find(proc_address, "cuMemcpyBatchAsync", BATCH_VERSION));
    }
    if (driver->copy_batch == nullptr && driver->version >= BATCH_VERSION_WITH_INDEX) {
        driver->copy_batch_with_index =
            reinterpret_cast<CopyBatchWithIndex*>(find(proc_address, "cuMemcpyBatchAsync", BATCH_VERSION_WITH_INDEX));
    }
    return driver;
}

Result Driver::batch(DeviceAddress* to, DeviceAddress* from, std::size_t* sizes, std::size_t count, SourceOrder order,
                     Stream stream) const {
    CopyAttributes attributes{order, {0, 0}, {0, 0}, COPY_BESIDE_COMPUTE};
    std::size_t first = 0;
    if (copy_batch != nullptr) return copy_batch(to, from, sizes, count, &attributes, &first, 1, stream);
    std::size_t refused = 0;
    return copy_batch_with_index(to, from, sizes, count, &attributes, &first, 1, &refused, stream);
}

std::string Driver::describe(Result result) const {
    const char* name = nullptr;
    const char* text = nullptr;
    if (error_name(result, &name) != SUCCESS || name == nullptr) return "CUDA error " + std::to_string(result);
    if (error_string(result, &text) != SUCCESS || text == nullptr) return name;
    return std::string(name) + " (" + text + ")";
}

void Driver::check(Result result, const char* what) const {
    if (result != SUCCESS) throw DriverError(std::string(what) + ": " + describe(result), result);
}

}  // namespace kvstore::cuda
