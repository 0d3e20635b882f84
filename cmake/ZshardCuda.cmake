# The CUDA back end: libzshard_cuda.so, opened at run time (runtime/engine/accelerator.cpp), and the
# same sources as C++ over the simulated device of tests/simulator. Both compile the few sources of
# libzshard that they use into themselves and export zshard_cuda_* only, so nothing of theirs and of
# the program's can meet; errors are caught all the same, since libstdc++ compares types by name.
set(ZSHARD_CUDA_ARCHITECTURES "75;80;90;100;120" CACHE STRING
    "GPU architectures: machine code for each, PTX of the last")

file(GLOB zshard_plugin_cpp CONFIGURE_DEPENDS
     "${PROJECT_SOURCE_DIR}/runtime/*/cuda_*.cpp" "${PROJECT_SOURCE_DIR}/optimizers/cuda_*.cpp")
list(APPEND zshard_plugin_cpp "${PROJECT_SOURCE_DIR}/runtime/base/bytes.cpp")
file(GLOB zshard_plugin_nccl CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/runtime/comm/nccl_*.cpp")
file(GLOB zshard_plugin_cu CONFIGURE_DEPENDS
     "${PROJECT_SOURCE_DIR}/runtime/*/cuda_*.cu" "${PROJECT_SOURCE_DIR}/optimizers/cuda_*.cu")

# What the program and the plug-in must agree on: version and the headers that both compile.
set(zshard_plugin_seam
    include/zshard/error.hpp include/zshard/model_spec.hpp include/zshard/types.hpp
    optimizers/device_update.hpp optimizers/rule.hpp runtime/base/log.hpp
    runtime/comm/communicator.hpp runtime/device/device.hpp runtime/engine/accelerator.hpp
    runtime/engine/cuda_plugin.hpp runtime/kernels/device_kernels.hpp)
set(zshard_plugin_hash "")
foreach(header ${zshard_plugin_seam})
  file(SHA256 "${PROJECT_SOURCE_DIR}/${header}" hash)
  string(SHA256 zshard_plugin_hash "${zshard_plugin_hash}${hash}")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/${header}")
endforeach()
string(SUBSTRING "${zshard_plugin_hash}" 0 12 zshard_plugin_hash)
set(zshard_plugin_abi "ZSHARD_PLUGIN_ABI=\"zshard-${PROJECT_VERSION}-${zshard_plugin_hash}\"")
set_source_files_properties(
  "${PROJECT_SOURCE_DIR}/runtime/engine/accelerator.cpp"
  PROPERTIES COMPILE_DEFINITIONS
             "${zshard_plugin_abi};ZSHARD_BUILD_LIBRARY_DIR=\"${PROJECT_BINARY_DIR}/lib\";\
ZSHARD_INSTALL_LIBRARY_DIR=\"${CMAKE_INSTALL_FULL_LIBDIR}\"")

file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/zshard_cuda.map"
     CONTENT "{ global: zshard_cuda_*; local: *; };\n")

function(zshard_add_plugin target)
  add_library(${target} MODULE ${ARGN})
  set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib"
                                             LINK_DEPENDS "${PROJECT_BINARY_DIR}/zshard_cuda.map")
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}" "${PROJECT_SOURCE_DIR}/include"
                                               "${ZSHARD_GENERATED_DIR}")
  target_include_directories(${target} SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_compile_definitions(${target} PRIVATE "${zshard_plugin_abi}")
  target_link_libraries(${target} PRIVATE zshard_build_options fmt::fmt)
  target_link_options(${target} PRIVATE
                      "LINKER:--as-needed,--version-script=${PROJECT_BINARY_DIR}/zshard_cuda.map")
  if(NOT ZSHARD_SANITIZE)
    target_link_options(${target} PRIVATE "LINKER:-z,defs")
  endif()
endfunction()

# Compiles a .cu file; CMake's own CUDA language is not used (ZshardBackends.cmake says why).
function(zshard_compile_cuda source object_variable)
  file(RELATIVE_PATH name "${PROJECT_SOURCE_DIR}" "${source}")
  set(object "${PROJECT_BINARY_DIR}/cuda/${name}.o")
  get_filename_component(directory "${object}" DIRECTORY)
  file(MAKE_DIRECTORY "${directory}")
  set(code "")
  foreach(architecture ${ZSHARD_CUDA_ARCHITECTURES})
    list(APPEND code "-gencode=arch=compute_${architecture},code=sm_${architecture}")
  endforeach()
  list(GET ZSHARD_CUDA_ARCHITECTURES -1 last)
  list(APPEND code "-gencode=arch=compute_${last},code=compute_${last}")
  set(warnings -Xcompiler=-Wall,-Wextra,-Wshadow)
  if(CMAKE_COMPILE_WARNING_AS_ERROR)
    list(APPEND warnings -Werror=all-warnings -Xcompiler=-Werror)
  endif()
  add_custom_command(
    OUTPUT "${object}"
    COMMAND
      ${CMAKE_CXX_COMPILER_LAUNCHER} "${CUDAToolkit_NVCC_EXECUTABLE}" -std=c++20 -ccbin
      "${CMAKE_CXX_COMPILER}" -O3 --fmad=false -prec-div=true -prec-sqrt=true -ftz=false ${code}
      ${warnings} -Xcompiler=-fPIC,-ffp-contract=off "-I${PROJECT_SOURCE_DIR}"
      "-I${PROJECT_SOURCE_DIR}/include" "-I${ZSHARD_GENERATED_DIR}" -MD -MF "${object}.d" -c
      "${source}" -o "${object}"
    DEPENDS "${source}"
    DEPFILE "${object}.d"
    COMMENT "Building CUDA object ${name}.o"
    VERBATIM COMMAND_EXPAND_LISTS)
  set(${object_variable} "${object}" PARENT_SCOPE)
endfunction()

if(ZSHARD_HAS_CUDA AND NOT ZSHARD_SANITIZE)
  set(objects "")
  foreach(source ${zshard_plugin_cu})
    zshard_compile_cuda("${source}" object)
    list(APPEND objects "${object}")
  endforeach()
  set_source_files_properties(${objects} PROPERTIES EXTERNAL_OBJECT TRUE GENERATED TRUE)
  set(sources ${zshard_plugin_cpp} ${objects})
  if(ZSHARD_HAS_NCCL)
    list(APPEND sources ${zshard_plugin_nccl})
  endif()
  zshard_add_plugin(zshard_cuda ${sources})
  target_compile_definitions(zshard_cuda PRIVATE ZSHARD_PLUGIN_NCCL=${ZSHARD_HAS_NCCL})
  target_link_libraries(zshard_cuda PRIVATE CUDA::cudart
                                            $<$<BOOL:${ZSHARD_HAS_NCCL}>:NCCL::NCCL>)
  # The toolkit's libraries often lie where the loader does not look by itself.
  set_target_properties(zshard_cuda PROPERTIES INSTALL_RPATH_USE_LINK_PATH TRUE)
  install(TARGETS zshard_cuda LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
endif()

# The simulated device needs the headers of CUDA and NCCL, neither nvcc nor their libraries.
if(ZSHARD_BUILD_TESTS AND NOT ZSHARD_CUDA STREQUAL "OFF"
   AND EXISTS "${PROJECT_SOURCE_DIR}/tests/simulator/CMakeLists.txt")
  find_package(NCCL QUIET)
  find_file(zshard_cuda_header cuda_runtime_api.h PATHS ${CUDAToolkit_INCLUDE_DIRS} NO_CACHE)
  if(zshard_cuda_header AND NCCL_INCLUDE_DIR)
    add_subdirectory("${PROJECT_SOURCE_DIR}/tests/simulator" tests/simulator)
    set_source_files_properties(${zshard_plugin_cu} PROPERTIES LANGUAGE CXX)
    zshard_add_plugin(zshard_cuda_simulated ${zshard_plugin_cpp} ${zshard_plugin_nccl}
                      ${zshard_plugin_cu})
    target_compile_definitions(
      zshard_cuda_simulated
      PRIVATE ZSHARD_SIMULATED_DEVICE ZSHARD_PLUGIN_NCCL=1
              "ZSHARD_SIMULATED_LAUNCH=\"tests/simulator/launch.hpp\"")
    target_include_directories(zshard_cuda_simulated SYSTEM PRIVATE "${NCCL_INCLUDE_DIR}")
    # The thread sanitizer does not see how the system's loader frees other thread-local memory.
    target_compile_options(zshard_cuda_simulated PRIVATE -ftls-model=initial-exec)
    target_link_libraries(zshard_cuda_simulated PRIVATE zshard_simulator)
  else()
    message(STATUS "simulated device: left out, the headers of CUDA and NCCL are not both there")
  endif()
endif()

if(ZSHARD_BUILD_TESTS)
  add_subdirectory("${PROJECT_SOURCE_DIR}/tests/device/fixtures" tests/device/fixtures)
endif()
