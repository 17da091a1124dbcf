// NVIDIA's driver, found at run time: nothing of CUDA is needed to compile, install, import or test.
//
// The declarations are our own, as few as are used, in the ABI that CUDA 12.0 defined (handles are pointers, a device
// address is 64 bits, a device is an int). `native/tests/cuda_abi.cpp` compares each of them with NVIDIA's headers
// where those are installed. One function has two ABIs: the batch copy of 12.8 reports which copy was refused, that of
// 13.0 does not; both are asked for by their version, so a newer driver never hands out the one for the other.
//
// A driver is immutable once open; its functions may be called from any thread. It is never unloaded: NVIDIA's
// library does not survive that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace kvstore::cuda {

using Result = int;  // 0: success
using Device = int;
using DeviceAddress = std::uint64_t;
using Context = struct ContextHandle*;
using Stream = struct StreamHandle*;
using Event = struct EventHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;

inline constexpr Result SUCCESS = 0;
inline constexpr Result OUT_OF_MEMORY = 2;
inline constexpr Result NOT_READY = 600;

inline constexpr int CAPTURE_MODE_RELAXED = 2;
inline constexpr unsigned STREAM_NON_BLOCKING = 1;  // does not wait for the legacy default stream, nor it for this one
inline constexpr unsigned EVENT_DEFAULT = 0;
inline constexpr unsigned EVENT_DISABLE_TIMING = 2;
inline constexpr unsigned HOST_REGISTER_PORTABLE = 1;
inline constexpr unsigned HOST_REGISTER_DEVICEMAP = 2;

inline constexpr int ATTRIBUTE_CAPABILITY_MAJOR = 75;
inline constexpr int ATTRIBUTE_CAPABILITY_MINOR = 76;
inline constexpr int ATTRIBUTE_HOST_POINTER_FOR_REGISTERED = 91;  // kernels may use the host's address
inline constexpr int ATTRIBUTE_HOST_NUMA_ID = 134;

// When the driver may read the source of a copy.
enum class SourceOrder : int { STREAM = 1, ANY = 3 };

struct Location {
    int type;
    int id;
};
struct CopyAttributes {
    SourceOrder source_order;
    Location source_hint;
    Location destination_hint;
    unsigned flags;
};
inline constexpr unsigned COPY_BESIDE_COMPUTE = 1;

// One for each function that is used; `name` is the driver's. The last column is the ABI's version.
#define KVSTORE_CUDA_FUNCTIONS(ENTRY)                                                                                \
    ENTRY(init, "cuInit", (unsigned flags))                                                                          \
    ENTRY(driver_version, "cuDriverGetVersion", (int* version))                                                      \
    ENTRY(error_name, "cuGetErrorName", (Result error, const char** text))                                           \
    ENTRY(error_string, "cuGetErrorString", (Result error, const char** text))                                       \
    ENTRY(device_get, "cuDeviceGet", (Device * device, int ordinal))                                                 \
    ENTRY(device_name, "cuDeviceGetName", (char* name, int length, Device device))                                   \
    ENTRY(device_attribute, "cuDeviceGetAttribute", (int* value, int attribute, Device device))                      \
    ENTRY(primary_context_retain, "cuDevicePrimaryCtxRetain", (Context * context, Device device))                    \
    ENTRY(primary_context_release, "cuDevicePrimaryCtxRelease", (Device device))                                     \
    ENTRY(context_push, "cuCtxPushCurrent", (Context context))                                                       \
    ENTRY(context_pop, "cuCtxPopCurrent", (Context * context))                                                       \
    ENTRY(capture_mode_exchange, "cuThreadExchangeStreamCaptureMode", (int* mode))                                   \
    ENTRY(stream_priorities, "cuCtxGetStreamPriorityRange", (int* least, int* greatest))                             \
    ENTRY(stream_create, "cuStreamCreateWithPriority", (Stream * stream, unsigned flags, int priority))              \
    ENTRY(stream_wait_event, "cuStreamWaitEvent", (Stream stream, Event event, unsigned flags))                      \
    ENTRY(stream_synchronize, "cuStreamSynchronize", (Stream stream))                                                \
    ENTRY(stream_destroy, "cuStreamDestroy", (Stream stream))                                                        \
    ENTRY(event_create, "cuEventCreate", (Event * event, unsigned flags))                                            \
    ENTRY(event_record, "cuEventRecord", (Event event, Stream stream))                                               \
    ENTRY(event_query, "cuEventQuery", (Event event))                                                                \
    ENTRY(event_elapsed, "cuEventElapsedTime", (float* milliseconds, Event start, Event end))                        \
    ENTRY(event_destroy, "cuEventDestroy", (Event event))                                                            \
    ENTRY(memory_allocate, "cuMemAlloc", (DeviceAddress * address, std::size_t nbytes))                              \
    ENTRY(memory_free, "cuMemFree", (DeviceAddress address))                                                         \
    ENTRY(host_register, "cuMemHostRegister", (void* address, std::size_t nbytes, unsigned flags))                   \
    ENTRY(host_unregister, "cuMemHostUnregister", (void* address))                                                   \
    ENTRY(copy, "cuMemcpyAsync", (DeviceAddress to, DeviceAddress from, std::size_t nbytes, Stream stream))          \
    ENTRY(module_load, "cuModuleLoadData", (Module * module, const void* image))                                     \
    ENTRY(module_unload, "cuModuleUnload", (Module module))                                                          \
    ENTRY(module_function, "cuModuleGetFunction", (Function * function, Module module, const char* name))            \
    ENTRY(launch, "cuLaunchKernel",                                                                                  \
          (Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, \
           unsigned block_z, unsigned shared_bytes, Stream stream, void** parameters, void** extra))

inline constexpr int ABI_VERSION = 12000;
inline constexpr int BATCH_VERSION = 13000;
inline constexpr int BATCH_VERSION_WITH_INDEX = 12080;

using CopyBatch = Result(DeviceAddress* to, DeviceAddress* from, std::size_t* sizes, std::size_t count,
                         CopyAttributes* attributes, std::size_t* attribute_starts, std::size_t attribute_count,
                         Stream stream);
using CopyBatchWithIndex = Result(DeviceAddress* to, DeviceAddress* from, std::size_t* sizes, std::size_t count,
                                  CopyAttributes* attributes, std::size_t* attribute_starts,
                                  std::size_t attribute_count, std::size_t* refused, Stream stream);

class DriverError : public std::runtime_error {
  public:
    DriverError(const std::string& what, Result result) : std::runtime_error(what), result(result) {}
    Result result;
};

struct Driver {
    // Loads the library, by default NVIDIA's, and calls cuInit. std::runtime_error, saying what is missing.
    static std::shared_ptr<const Driver> open(const std::string& library = "libcuda.so.1");

#define KVSTORE_CUDA_MEMBER(member, name, parameters) Result(*member) parameters = nullptr;
    KVSTORE_CUDA_FUNCTIONS(KVSTORE_CUDA_MEMBER)
#undef KVSTORE_CUDA_MEMBER

    // At most one of them; both null before CUDA 12.8.
    CopyBatch* copy_batch = nullptr;
    CopyBatchWithIndex* copy_batch_with_index = nullptr;
    int version = 0;  // 12080 is CUDA 12.8

    bool has_batch() const { return copy_batch != nullptr || copy_batch_with_index != nullptr; }
    Result batch(DeviceAddress* to, DeviceAddress* from, std::size_t* sizes, std::size_t count, SourceOrder order,
                 Stream stream) const;
    // "CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
    std::string describe(Result result) const;
    // DriverError unless `result` is SUCCESS.
    void check(Result result, const char* what) const;
};

}  // namespace kvstore::cuda
