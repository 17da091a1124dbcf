#include "cuda/device.h"

#include "cuda/pinning.h"

#if defined(KVSTORE_FATBIN)
// The assembler puts the file into the module as it is.
asm(".section .rodata\n"
    ".balign 16\n"
    "kvstore_fatbin_begin:\n"
    ".incbin \"" KVSTORE_FATBIN
    "\"\n"
    "kvstore_fatbin_end:\n"
    ".byte 0\n"
    ".previous\n");
extern "C" const std::byte kvstore_fatbin_begin[];
extern "C" const std::byte kvstore_fatbin_end[];
#endif

namespace kvstore::cuda {

std::span<const std::byte> built_kernels() {
#if defined(KVSTORE_FATBIN)
    return {kvstore_fatbin_begin, kvstore_fatbin_end};
#else
    return {};
#endif
}

OpenDevice::OpenDevice(std::shared_ptr<const Driver> driver, int ordinal, std::span<const std::byte> kernels)
    : driver_(std::move(driver)) {
    driver_->check(driver_->device_get(&device_, ordinal), "cuDeviceGet");
    driver_->check(driver_->primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    try {
        const CurrentContext current(*driver_, context_);
        char name[256] = "";
        driver_->check(driver_->device_name(name, sizeof name - 1, device_), "cuDeviceGetName");
        name_ = name;
        major_ = attribute(ATTRIBUTE_CAPABILITY_MAJOR);
        minor_ = attribute(ATTRIBUTE_CAPABILITY_MINOR);
        // Asked for by its number, which an older driver may not know.
        if (driver_->device_attribute(&numa_node_, ATTRIBUTE_HOST_NUMA_ID, device_) != SUCCESS) numa_node_ = -1;
        int least = 0, greatest = 0;
        driver_->check(driver_->stream_priorities(&least, &greatest), "cuCtxGetStreamPriorityRange");
        // A load holds up a request, a store holds up nobody; both go before the model's kernels, which take longer.
        const int below = greatest < least ? greatest + 1 : greatest;
        driver_->check(driver_->stream_create(&load_stream_, STREAM_NON_BLOCKING, greatest), "cuStreamCreate");
        driver_->check(driver_->stream_create(&store_stream_, STREAM_NON_BLOCKING, below), "cuStreamCreate");
        load_kernel(kernels);
    } catch (...) {
        release();
        throw;
    }
}

void OpenDevice::release() {
    if (released_) return;
    released_ = true;
    try {
        const CurrentContext current(*driver_, context_);
        if (module_ != nullptr) driver_->module_unload(module_);
        for (const Stream stream : {store_stream_, load_stream_}) {
            if (stream != nullptr) driver_->stream_destroy(stream);
        }
    } catch (const DriverError&) {  // it is lost, and nothing can be given back
    }
    driver_->primary_context_release(device_);
}

int OpenDevice::attribute(int which) const {
    int value = 0;
    driver_->check(driver_->device_attribute(&value, which, device_), "cuDeviceGetAttribute");
    return value;
}

void OpenDevice::load_kernel(std::span<const std::byte> kernels) {
    if (kernels.empty()) {
        kernel_problem_ = "this build has no copy kernel: it was made without nvcc";
    } else if (attribute(ATTRIBUTE_HOST_POINTER_FOR_REGISTERED) == 0) {
        kernel_problem_ = "kernels cannot use host addresses on this device";
    } else if (const Result loaded = driver_->module_load(&module_, kernels.data()); loaded != SUCCESS) {
        kernel_problem_ = "the copy kernel does not load: " + driver_->describe(loaded);
        module_ = nullptr;
    } else if (const Result got = driver_->module_function(&kernel_, module_, "kvstore_copy_tiles"); got != SUCCESS) {
        kernel_problem_ = "the copy kernel is not in its module: " + driver_->describe(got);
        kernel_ = nullptr;
    }
}

Result OpenDevice::launch_copy(const Tile* tiles, std::uint32_t count, std::uint32_t blocks, Stream stream) const {
    void* parameters[] = {&tiles, &count};
    const unsigned warps = BLOCK_THREADS / WARP_LANES;
    const unsigned useful = (count + warps - 1) / warps;
    return driver_->launch(kernel_, useful < blocks ? useful : blocks, 1, 1, BLOCK_THREADS, 1, 1, 0, stream, parameters,
                           nullptr);
}

}  // namespace kvstore::cuda
