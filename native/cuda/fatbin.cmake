# The copy kernel for every device from Hopper on, as one fatbin; without a usable nvcc the module has no kernel and
# everything else works. sm_100f code runs on the whole family (10.0, 10.3); 10.3 (B300) has its own as well, for code of
# sm_100a would not run there; PTX serves what comes later.
set(kernel_targets
    "-gencode=arch=compute_90,code=sm_90"
    "-gencode=arch=compute_100f,code=sm_100f"
    "-gencode=arch=compute_103,code=sm_103"
    "-gencode=arch=compute_90,code=compute_90")
find_program(KVSTORE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
set(fatbin "${CMAKE_CURRENT_BINARY_DIR}/copy_kernel.fatbin")
set(KVSTORE_FATBIN "")
if(KVSTORE_NVCC)
  # At configuration, so that an nvcc that is too old (before 12.9) or has no compiler costs the kernel, not the build.
  execute_process(
    COMMAND "${KVSTORE_NVCC}" --fatbin -std=c++17 -O3 --no-compress ${kernel_targets} -o "${fatbin}"
            "${CMAKE_CURRENT_SOURCE_DIR}/native/cuda/kernels.cu"
    RESULT_VARIABLE result ERROR_VARIABLE errors)
  if(result EQUAL 0)
    set(KVSTORE_FATBIN "${fatbin}")
  else()
    message(WARNING "${KVSTORE_NVCC} cannot build the copy kernel (CUDA 12.9 or newer is needed), so this build has "
                    "none:\n${errors}")
  endif()
endif()
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS native/cuda/kernels.cu native/cuda/tiles.h)
