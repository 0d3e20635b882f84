# Finds the optional back ends and writes the outcome to the generated header
# runtime/base/build_config.hpp. Each option is AUTO (use what is there), ON (required) or OFF.
set(ZSHARD_CUDA AUTO CACHE STRING "CUDA and NCCL: AUTO, ON or OFF")
set(ZSHARD_MPI AUTO CACHE STRING "MPI: AUTO, ON or OFF")
set(ZSHARD_IO_URING AUTO CACHE STRING "io_uring through liburing: AUTO, ON or OFF")
foreach(option ZSHARD_CUDA ZSHARD_MPI ZSHARD_IO_URING)
  set_property(CACHE ${option} PROPERTY STRINGS AUTO ON OFF)
  string(TOUPPER "${${option}}" value)
  if(NOT value MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "${option} is '${${option}}'; it takes AUTO, ON or OFF")
  endif()
  set(${option} ${value})
endforeach()

# Compiles a kernel with nvcc as C++20 and keeps the answer in the cache, by path of nvcc: enabling
# CMake's CUDA language costs several seconds in each build tree and CMake 3.25 does not know C++20
# there.
function(zshard_prove_nvcc nvcc result_variable)
  set(key "${nvcc};${CMAKE_CXX_COMPILER}")
  if(NOT "${ZSHARD_NVCC_PROVED_FOR}" STREQUAL "${key}")
    set(dir "${PROJECT_BINARY_DIR}/CMakeFiles/zshard_nvcc")
    file(WRITE "${dir}/proof.cu"
         "#include <concepts>\n"
         "template <std::integral T> __global__ void fill(T* p) { p[threadIdx.x] = T(1); }\n"
         "void run(int* p) { fill<<<1, 32>>>(p); }\n")
    execute_process(
      COMMAND "${nvcc}" -std=c++20 -ccbin "${CMAKE_CXX_COMPILER}" -c "${dir}/proof.cu" -o
              "${dir}/proof.o"
      RESULT_VARIABLE code
      OUTPUT_VARIABLE output
      ERROR_VARIABLE output
      TIMEOUT 60)
    if(code EQUAL 0)
      set(proved TRUE)
    else()
      set(proved FALSE)
      file(WRITE "${dir}/proof.log" "${output}")
    endif()
    set(ZSHARD_NVCC_PROVED_FOR "${key}" CACHE INTERNAL "compilers that the proof was made with")
    set(ZSHARD_NVCC_PROVED ${proved} CACHE INTERNAL "nvcc compiles C++20")
  endif()
  set(${result_variable} ${ZSHARD_NVCC_PROVED} PARENT_SCOPE)
endfunction()

set(ZSHARD_HAS_CUDA 0)
set(ZSHARD_HAS_NCCL 0)
set(ZSHARD_HAS_MPI 0)
set(ZSHARD_HAS_IO_URING 0)
set(ZSHARD_CUDA_VERSION "")
set(ZSHARD_NCCL_VERSION "")
set(ZSHARD_MPI_VERSION "")
set(ZSHARD_IO_URING_VERSION "")

if(ZSHARD_CUDA STREQUAL "OFF")
  set(zshard_cuda_outcome "no   switched off (ZSHARD_CUDA=OFF)")
  set(zshard_nccl_outcome "no   switched off (ZSHARD_CUDA=OFF)")
else()
  find_package(CUDAToolkit QUIET)
  if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
    set(zshard_cuda_outcome "no   CUDA Toolkit (nvcc) not found")
  elseif(NOT TARGET CUDA::cudart)
    set(zshard_cuda_outcome "no   ${CUDAToolkit_NVCC_EXECUTABLE} found, but not libcudart")
  else()
    zshard_prove_nvcc("${CUDAToolkit_NVCC_EXECUTABLE}" nvcc_works)
    if(nvcc_works)
      set(ZSHARD_HAS_CUDA 1)
      set(ZSHARD_CUDA_VERSION "${CUDAToolkit_VERSION}")
      set(zshard_cuda_outcome
          "yes  ${CUDAToolkit_VERSION}, ${CUDAToolkit_NVCC_EXECUTABLE} compiles C++20")
    else()
      set(zshard_cuda_outcome
          "no   ${CUDAToolkit_NVCC_EXECUTABLE} cannot compile C++20 with this g++, see \
CMakeFiles/zshard_nvcc/proof.log")
    endif()
  endif()
  if(ZSHARD_HAS_CUDA)
    find_package(NCCL QUIET)
    if(NCCL_FOUND)
      set(ZSHARD_HAS_NCCL 1)
      set(ZSHARD_NCCL_VERSION "${NCCL_VERSION}")
      set(zshard_nccl_outcome "yes  ${NCCL_VERSION}, ${NCCL_LIBRARY}")
    else()
      set(zshard_nccl_outcome "no   nccl.h or libnccl not found")
    endif()
  else()
    set(zshard_nccl_outcome "no   needs CUDA")
  endif()
endif()

if(ZSHARD_MPI STREQUAL "OFF")
  set(zshard_mpi_outcome "no   switched off (ZSHARD_MPI=OFF)")
else()
  find_package(MPI QUIET COMPONENTS C)
  if(MPI_C_FOUND)
    set(ZSHARD_HAS_MPI 1)
    set(ZSHARD_MPI_VERSION "${MPI_C_VERSION}")
    # The C interface only: mpi.h would otherwise pull in Open MPI's C++ one.
    target_compile_definitions(MPI::MPI_C INTERFACE OMPI_SKIP_MPICXX MPICH_SKIP_MPICXX)
    set(zshard_mpi_outcome "yes  MPI ${MPI_C_VERSION}, ${MPI_C_COMPILER}")
  else()
    set(zshard_mpi_outcome "no   MPI compiler wrapper (mpicc) not found")
  endif()
endif()

if(ZSHARD_IO_URING STREQUAL "OFF")
  set(zshard_io_uring_outcome "no   switched off (ZSHARD_IO_URING=OFF)")
else()
  find_package(PkgConfig QUIET)
  if(NOT PkgConfig_FOUND)
    set(zshard_io_uring_outcome "no   pkg-config not found")
  else()
    pkg_check_modules(LIBURING QUIET IMPORTED_TARGET liburing)
    if(LIBURING_FOUND)
      set(ZSHARD_HAS_IO_URING 1)
      set(ZSHARD_IO_URING_VERSION "${LIBURING_VERSION}")
      set(zshard_io_uring_outcome "yes  liburing ${LIBURING_VERSION}")
    else()
      set(zshard_io_uring_outcome "no   liburing not found")
    endif()
  endif()
endif()

message(STATUS "zshard ${PROJECT_VERSION}: optional back ends\n"
               "     CUDA      ${zshard_cuda_outcome}\n"
               "     NCCL      ${zshard_nccl_outcome}\n"
               "     MPI       ${zshard_mpi_outcome}\n"
               "     io_uring  ${zshard_io_uring_outcome}")
foreach(name CUDA NCCL MPI IO_URING)
  string(TOLOWER ${name} lower)
  set(switch ZSHARD_${name})
  if(name STREQUAL "NCCL")
    set(switch ZSHARD_CUDA)
  endif()
  if(${switch} STREQUAL "ON" AND NOT ZSHARD_HAS_${name})
    string(REGEX REPLACE "^no +" "" reason "${zshard_${lower}_outcome}")
    message(FATAL_ERROR "${switch}=ON, but ${name} cannot be used: ${reason}. Install it, or set "
                        "${switch} to AUTO or OFF.")
  endif()
endforeach()

set(ZSHARD_COMPILER "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
set(ZSHARD_GENERATED_DIR "${PROJECT_BINARY_DIR}/generated")
configure_file("${PROJECT_SOURCE_DIR}/runtime/base/build_config.hpp.in"
               "${ZSHARD_GENERATED_DIR}/runtime/base/build_config.hpp" @ONLY)
