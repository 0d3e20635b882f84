// The loader: what it says when the plug-in cannot be used, and that errors of the plug-in are the
// program's. Cases that need a process in which nothing is open yet run in one of their own.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/device/lab.hpp"

namespace zshard::lab {
namespace {

/// The end of a process whose output is what the loader says of a file.
[[noreturn]] void tell(const std::string& path) {
  engine::set_accelerator_path(path);
  std::string first;
  for (int attempt = 0; attempt < 2; ++attempt) {
    try {
      engine::accelerator();
      std::fputs("opened\n", stderr);
      std::_Exit(1);
    } catch (const DeviceError& error) {
      if (attempt == 0) first = error.what();
      if (attempt == 1 && first != error.what()) std::fputs("another text: ", stderr);
      if (attempt == 1) std::fprintf(stderr, "%s\n", error.what());
    } catch (const std::exception& error) {
      std::fprintf(stderr, "another class: %s\n", error.what());
      std::_Exit(2);
    }
  }
  std::_Exit(0);
}

class Loader : public ::testing::Test {
 protected:
  void SetUp() override { ::testing::FLAGS_gtest_death_test_style = "threadsafe"; }
};

#define EXPECT_SAID(path, text) EXPECT_EXIT(tell(path), ::testing::ExitedWithCode(0), text)

TEST_F(Loader, MissingFile) {
  EXPECT_SAID("/nowhere/libzshard_cuda.so",
              "^the CUDA plug-in /nowhere/libzshard_cuda.so does not exist");
}

TEST_F(Loader, MissingLibraryOfThePlugin) {
  EXPECT_SAID(library("fixtures/libzshard_fixture_orphan.so"),
              "^the CUDA plug-in .*orphan.so cannot be loaded: libzshard_fixture_absent.so: cannot "
              "open shared object file: No such file or directory.*LD_LIBRARY_PATH");
}

TEST_F(Loader, AnotherBuildIsRefusedBeforeItIsUsed) {
  EXPECT_SAID(library("fixtures/libzshard_fixture_foreign.so"),
              "foreign.so belongs to another build of zshard: it is zshard-0.0.1-000000000000, the "
              "program is zshard-.*Build or install both together");
}

TEST_F(Loader, LibraryThatIsNoPlugin) {
  EXPECT_SAID(library("fixtures/libzshard_fixture_hollow.so"),
              "hollow.so is no CUDA plug-in of this version of zshard: it lacks zshard_cuda_abi");
}

TEST_F(Loader, FileThatIsNoLibrary) {
  const std::string path = ::testing::TempDir() + "zshard_no_library.so";
  std::ofstream(path) << "no library, but long enough that its header can be read as one's is.\n"
                      << std::string(100, '.');
  EXPECT_SAID(path, "zshard_no_library.so cannot be loaded: .*invalid ELF header");
  std::filesystem::remove(path);
}

/// Errors of the plug-in, which has type descriptions of its own, are caught by their classes here.
TEST_F(Loader, ErrorsCrossTheLibrary) {
  simulator::reset();
  engine::Accelerator& accelerator = simulated();
  EXPECT_THROW((void)accelerator.open(99, 0), UsageError);
  EXPECT_THROW((void)accelerator.open(99, 0), Error);
  EXPECT_THROW((void)accelerator.open(-1, 0), std::runtime_error);
  simulator::set_driver_version(0);
  EXPECT_THROW((void)accelerator.gpus(), DeviceError);
  simulator::reset();
}

TEST_F(Loader, OneAcceleratorForTheProcess) {
  EXPECT_EQ(&engine::accelerator(), &simulated());
  std::vector<engine::Accelerator*> seen(4);
  on_ranks(4, [&](int rank) { seen[static_cast<std::size_t>(rank)] = &engine::accelerator(); });
  for (const engine::Accelerator* each : seen) EXPECT_EQ(each, &simulated());
  EXPECT_THROW(engine::set_accelerator_path("/nowhere"), UsageError);
}

TEST(Environment, CollectivesAreLaunchedInTheHostsOrder) {
  simulated();
  const char* value = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  ASSERT_NE(value, nullptr);
  EXPECT_STREQ(value, "1");
}

class Facts : public SimulatedTest {};

TEST_F(Facts, GpusAndVersions) {
  simulator::set_devices(3);
  simulator::set_device_memory(std::int64_t{1} << 26);
  const std::vector<engine::GpuFacts> gpus = simulated().gpus();
  ASSERT_EQ(gpus.size(), 3U);
  for (int i = 0; i < 3; ++i) {
    const engine::GpuFacts& gpu = gpus[static_cast<std::size_t>(i)];
    EXPECT_EQ(gpu.ordinal, i);
    EXPECT_FALSE(gpu.name.empty());
    EXPECT_EQ(gpu.memory_bytes, std::int64_t{1} << 26);
    EXPECT_GT(gpu.major, 0);
  }
  simulator::set_driver_version(13010);
  EXPECT_EQ(simulated().driver_version(), "13.1");
  simulator::set_nccl_version(23001);
  EXPECT_EQ(simulated().nccl_version(), "2.30.1");
  EXPECT_FALSE(simulated().runtime_version().empty());
}

TEST_F(Facts, NoGpuIsNoError) {
  simulator::set_devices(0);
  EXPECT_TRUE(simulated().gpus().empty());
  EXPECT_TRUE(contains(thrown<UsageError>([] { (void)simulated().open(0, 5); }),
                       "GPU 0 for rank 5: CUDA shows no GPU"));
}

TEST_F(Facts, NoDriver) {
  simulator::set_driver_version(0);
  EXPECT_EQ(simulated().driver_version(), "");
  EXPECT_TRUE(contains(thrown<DeviceError>([] { (void)simulated().gpus(); }),
                       "there is no NVIDIA driver on this machine"));
  EXPECT_TRUE(
      contains(thrown<DeviceError>([] { (void)simulated().open(0, 0); }), "no NVIDIA driver"));
}

TEST_F(Facts, OldDriver) {
  simulator::set_driver_version(11080);
  const std::string said = thrown<DeviceError>([] { (void)simulated().gpus(); });
  EXPECT_TRUE(contains(said, "too old: it serves CUDA 11.8"));
  EXPECT_TRUE(contains(said, "Update the driver"));
}

}  // namespace
}  // namespace zshard::lab
