// Our declarations of the driver against NVIDIA's. Compiles where they agree; there is nothing to run.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

#include "cuda/driver.h"

namespace ours = kvstore::cuda;

// Passed alike: of one size, and of one kind (a pointer or a number).
template <typename Our, typename Their>
constexpr bool passed_alike = sizeof(Our) == sizeof(Their) && std::is_pointer_v<Our> == std::is_pointer_v<Their> &&
                              std::is_floating_point_v<Our> == std::is_floating_point_v<Their>;

template <typename Our, typename Their>
struct Alike : std::false_type {};
template <typename... Our, typename... Their>
    requires(sizeof...(Our) == sizeof...(Their))
struct Alike<ours::Result (*)(Our...), CUresult (*)(Their...)> : std::bool_constant<(passed_alike<Our, Their> && ...)> {
};

#define SAME(member, type) static_assert(Alike<decltype(ours::Driver::member), type>::value, #type)
SAME(init, PFN_cuInit_v2000);
SAME(driver_version, PFN_cuDriverGetVersion_v2020);
SAME(error_name, PFN_cuGetErrorName_v6000);
SAME(error_string, PFN_cuGetErrorString_v6000);
SAME(device_get, PFN_cuDeviceGet_v2000);
SAME(device_name, PFN_cuDeviceGetName_v2000);
SAME(device_attribute, PFN_cuDeviceGetAttribute_v2000);
SAME(primary_context_retain, PFN_cuDevicePrimaryCtxRetain_v7000);
SAME(primary_context_release, PFN_cuDevicePrimaryCtxRelease_v11000);
SAME(context_push, PFN_cuCtxPushCurrent_v4000);
SAME(context_pop, PFN_cuCtxPopCurrent_v4000);
SAME(capture_mode_exchange, PFN_cuThreadExchangeStreamCaptureMode_v10010);
SAME(stream_priorities, PFN_cuCtxGetStreamPriorityRange_v5050);
SAME(stream_create, PFN_cuStreamCreateWithPriority_v5050);
SAME(stream_wait_event, PFN_cuStreamWaitEvent_v3020);
SAME(stream_synchronize, PFN_cuStreamSynchronize_v2000);
SAME(stream_destroy, PFN_cuStreamDestroy_v4000);
SAME(event_create, PFN_cuEventCreate_v2000);
SAME(event_record, PFN_cuEventRecord_v2000);
SAME(event_query, PFN_cuEventQuery_v2000);
SAME(event_elapsed, PFN_cuEventElapsedTime_v2000);
SAME(event_destroy, PFN_cuEventDestroy_v4000);
SAME(memory_allocate, PFN_cuMemAlloc_v3020);
SAME(memory_free, PFN_cuMemFree_v3020);
SAME(host_register, PFN_cuMemHostRegister_v6050);
SAME(host_unregister, PFN_cuMemHostUnregister_v4000);
SAME(copy, PFN_cuMemcpyAsync_v4000);
SAME(module_load, PFN_cuModuleLoadData_v2000);
SAME(module_unload, PFN_cuModuleUnload_v2000);
SAME(module_function, PFN_cuModuleGetFunction_v2000);
SAME(launch, PFN_cuLaunchKernel_v4000);
SAME(copy_batch, PFN_cuMemcpyBatchAsync_v13000);
SAME(copy_batch_with_index, PFN_cuMemcpyBatchAsync_v12080);

// The names without a version are those that the core asks for as of ABI_VERSION.
static_assert(CUDA_VERSION >= ours::BATCH_VERSION);

static_assert(sizeof(ours::CopyAttributes) == sizeof(CUmemcpyAttributes));
static_assert(offsetof(ours::CopyAttributes, source_order) == offsetof(CUmemcpyAttributes, srcAccessOrder));
static_assert(offsetof(ours::CopyAttributes, source_hint) == offsetof(CUmemcpyAttributes, srcLocHint));
static_assert(offsetof(ours::CopyAttributes, destination_hint) == offsetof(CUmemcpyAttributes, dstLocHint));
static_assert(offsetof(ours::CopyAttributes, flags) == offsetof(CUmemcpyAttributes, flags));

#define EQUAL(our, their) static_assert(static_cast<int>(ours::our) == static_cast<int>(their))
EQUAL(SUCCESS, CUDA_SUCCESS);
EQUAL(OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
EQUAL(NOT_READY, CUDA_ERROR_NOT_READY);
EQUAL(CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
EQUAL(STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
EQUAL(EVENT_DEFAULT, CU_EVENT_DEFAULT);
EQUAL(EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
EQUAL(HOST_REGISTER_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
EQUAL(HOST_REGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_DEVICEMAP);
EQUAL(ATTRIBUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
EQUAL(ATTRIBUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
EQUAL(ATTRIBUTE_HOST_POINTER_FOR_REGISTERED, CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
EQUAL(ATTRIBUTE_HOST_NUMA_ID, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
EQUAL(COPY_BESIDE_COMPUTE, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
EQUAL(SourceOrder::STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
EQUAL(SourceOrder::ANY, CU_MEMCPY_SRC_ACCESS_ORDER_ANY);
