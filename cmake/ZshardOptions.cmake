# Flags that every target of this repository is compiled with, as the interface target
# zshard_build_options; it is not exported, so users keep their own flags.
add_library(zshard_build_options INTERFACE)
target_compile_features(zshard_build_options INTERFACE cxx_std_20)
target_compile_options(
  zshard_build_options INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                                 -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # g++ 12 reports false overlaps in "text" + std::string (its bug 105651).
  target_compile_options(zshard_build_options INTERFACE -Wno-restrict)
endif()
# A compiler may fuse a*b+c or not, by target and by inlining: then bits depend on the machine.
target_compile_options(zshard_build_options INTERFACE -ffp-contract=off)

set(ZSHARD_KERNEL_FLAGS -O3 -fno-math-errno)
if(NOT ZSHARD_SANITIZE STREQUAL "")
  if(ZSHARD_SANITIZE STREQUAL "address")
    set(zshard_sanitizer_flags -fsanitize=address,undefined -fno-sanitize-recover=all)
  elseif(ZSHARD_SANITIZE STREQUAL "thread")
    set(zshard_sanitizer_flags -fsanitize=thread)
  else()
    message(FATAL_ERROR "ZSHARD_SANITIZE is '${ZSHARD_SANITIZE}'; it takes address, thread or "
                        "nothing")
  endif()
  # g++ 12 reports false -Wmaybe-uninitialized in instrumented code. The kernels drop target_clones
  # on ZSHARD_SANITIZER: their resolvers run before the sanitizer's runtime is up.
  target_compile_options(zshard_build_options INTERFACE ${zshard_sanitizer_flags}
                                                        -fno-omit-frame-pointer
                                                        -Wno-maybe-uninitialized)
  target_compile_definitions(zshard_build_options INTERFACE ZSHARD_SANITIZER=1 _GLIBCXX_ASSERTIONS)
  target_link_options(zshard_build_options INTERFACE ${zshard_sanitizer_flags})
  set(ZSHARD_KERNEL_FLAGS -O1 -fno-math-errno)
elseif(CMAKE_BUILD_TYPE STREQUAL "Debug")
  target_compile_definitions(zshard_build_options INTERFACE _GLIBCXX_ASSERTIONS)
endif()
