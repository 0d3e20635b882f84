# Headers, the static library, and what find_package(zshard) and pkg-config read.
include(CMakePackageConfigHelpers)

set(zshard_cmake_dir "${CMAKE_INSTALL_LIBDIR}/cmake/zshard")
install(TARGETS zshard EXPORT zshardTargets)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/zshard" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
        FILES_MATCHING PATTERN "*.hpp")
install(EXPORT zshardTargets NAMESPACE zshard:: DESTINATION "${zshard_cmake_dir}")
configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/zshardConfig.cmake.in" "${PROJECT_BINARY_DIR}/zshardConfig.cmake"
  INSTALL_DESTINATION "${zshard_cmake_dir}")
# Before 1.0 a minor version may break the interface.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/zshardConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/zshardConfig.cmake"
              "${PROJECT_BINARY_DIR}/zshardConfigVersion.cmake"
        DESTINATION "${zshard_cmake_dir}")

# Relative to the .pc file, so that an installed tree can be moved.
file(RELATIVE_PATH zshard_pc_prefix "/prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/prefix")
string(REGEX REPLACE "/$" "" zshard_pc_prefix "${zshard_pc_prefix}")
set(zshard_pc_requires "spdlog fmt libxxhash")
if(ZSHARD_HAS_IO_URING)
  string(APPEND zshard_pc_requires " liburing")
endif()
configure_file("${PROJECT_SOURCE_DIR}/cmake/zshard.pc.in" "${PROJECT_BINARY_DIR}/zshard.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/zshard.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig")
