// Engines on disk that cannot be made: directories that do not serve, tiers that do not go
// together, ranks that disagree.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <mutex>

#include "runtime/base/log.hpp"
#include "tests/engine/offload_lab.hpp"

namespace zshard::lab::disk {
namespace {

void expect_refused(int world, const EngineOptions& options, const std::string& type,
                    const std::vector<std::string>& parts, const std::string& what) {
  const auto ends = outcomes(world, [&](const ProcessGroup& group) {
    const Engine engine(model(), AdamW{}, group, options);
  });
  expect_all(ends, type, parts, what);
}

// The directory alone moves nothing to a disk.
TEST(Offload, ADirectoryThatNoTierUsesIsAWarning) {
  const auto warnings = [](const EngineOptions& options) {
    std::mutex mutex;
    std::vector<std::string> lines;
    const base::LogSink before = base::set_log_sink([&](const base::LogRecord& record) {
      const std::lock_guard lock(mutex);
      if (record.level == base::LogLevel::warning) lines.emplace_back(record.message);
    });
    run_ranks(2, [&](const ProcessGroup& group) {
      const Engine engine(model(), AdamW{}, group, options);
    });
    base::set_log_sink(before);
    return std::count_if(lines.begin(), lines.end(), [](const std::string& line) {
      return line.find("no tier is nvme") != std::string::npos;
    });
  };
  EngineOptions options;
  EXPECT_EQ(warnings(options), 0);
  options.offload.nvme_dir = lab::nvme_directory();
  EXPECT_EQ(warnings(options), 1) << "from one rank";
  options.offload.optimizer = Tier::nvme;
  EXPECT_EQ(warnings(options), 0);
}

TEST(Offload, DirectoriesThatCannotServeAreUsageErrorsOnEveryRank) {
  const std::string base = lab::nvme_directory() + "/places";
  std::filesystem::create_directory(base);
  std::ofstream(base + "/file") << "x";
  std::filesystem::create_directory(base + "/real");
  std::filesystem::create_directory_symlink(base + "/real", base + "/link");
  const auto with = [&](const std::string& directory) {
    EngineOptions options = on_disk(1, lab::kOptimizerNvme);
    options.offload.nvme_dir = directory;
    return options;
  };
  expect_refused(2, with(""), "UsageError", {"offload.nvme_dir is not set"}, "unset");
  expect_refused(2, with(base + "/missing"), "UsageError",
                 {"offload.nvme_dir", "missing", "No such file"}, "missing");
  expect_refused(2, with(base + "/file"), "UsageError", {"offload.nvme_dir", "no directory"},
                 "a file");
  expect_refused(2, with(base + "/link"), "UsageError", {"offload.nvme_dir", "symbolic link"},
                 "a link");
  expect_refused(2, with(base + "/link/"), "UsageError", {"offload.nvme_dir", "symbolic link"},
                 "a link with a slash");
  expect_refused(2, with(base + "/real," + base + "/missing"), "UsageError", {"missing"},
                 "the second one is missing");
  expect_refused(2, with(base + "/real,,"), "UsageError", {"offload.nvme_dir"}, "empty names");
  // Who names a disk twice meant another one.
  for (const std::string again : {"/real", "/real/", "//real", "/./real", "/real/."}) {
    expect_refused(2, with(base + "/real," + base + again), "UsageError",
                   {"offload.nvme_dir", "are the same directory"}, "twice");
  }
  if (geteuid() != 0) {
    std::filesystem::permissions(base + "/real", std::filesystem::perms::owner_read);
    expect_refused(1, with(base + "/real"), "UsageError", {"cannot be written to"}, "read-only");
    std::filesystem::permissions(base + "/real", std::filesystem::perms::owner_all);
  } else if (chown((base + "/real").c_str(), 65534, 65534) == 0) {
    expect_refused(1, with(base + "/real"), "UsageError", {"belongs to uid 65534"}, "another's");
  }
  std::filesystem::remove_all(base);
}

TEST(Offload, OtherTiersOnOneRankAreAUsageErrorOnEveryRank) {
  struct Row {
    std::string what;
    std::function<void(EngineOptions&)> edit;
    std::string part;
  };
  const std::vector<Row> rows = {
      {"optimizer", [](EngineOptions& o) { o.offload.optimizer = Tier::device; }, ""},
      {"gradients", [](EngineOptions& o) { o.offload.gradients = Tier::nvme; }, "gradients"},
      {"parameters", [](EngineOptions& o) { o.offload.parameters = Tier::nvme; }, "parameters"},
      {"buffers", [](EngineOptions& o) { o.offload.io_buffers = 1; }, "io_buffers"},
      {"verification", [](EngineOptions& o) { o.offload.io_verify = true; }, "io_verify"},
      {"sub-groups", [](EngineOptions& o) { o.sub_group_bytes = 1 << 20; }, "sub_group_bytes"},
      {"bytes", [](EngineOptions& o) { o.offload.optimizer_nvme_bytes = 20000; }, "nvme"},
      {"no bytes", [](EngineOptions& o) { o.offload.optimizer_nvme_bytes = 0; }, ""},
      {"budget", [](EngineOptions& o) { o.host_budget = std::int64_t{1} << 40; }, ""},
  };
  for (const Row& row : rows) {
    for (const int other : {0, 1}) {
      const auto ends = outcomes(2, [&](const ProcessGroup& group) {
        EngineOptions options = on_disk(3, lab::kOptimizerNvme);
        if (group.rank() == other) row.edit(options);
        const Engine engine(model(), AdamW{}, group, options);
      });
      expect_all(ends, "UsageError", {"ranks made different engines", row.part}, row.what);
    }
  }
  // What does not shape the store may differ.
  run_ranks(2, [&](const ProcessGroup& group) {
    EngineOptions options = on_disk(3, lab::kAllNvme);
    if (group.rank() == 1) {
      options.offload.io_backend = IoBackendKind::posix;
      options.offload.io_block_bytes = 8192;
      options.offload.io_depth = 2;
    }
    Engine engine(model(), AdamW{.lr = 0.01}, group, options);
    fill(engine);
    for (int t = 0; t < 3; ++t) train(engine, t);
    EXPECT_EQ(difference(undisturbed(2).values, everything(engine)), "");
  });
}

// The same number of bytes on disk, but of other units: ranks would look in the wrong places.
TEST(Offload, AnotherSplitOfTheSameSizeOnOneRankIsAUsageError) {
  // Two sub-groups of 16 KiB a unit and rank.
  ModelSpec spec;
  for (int u = 0; u < 3; ++u) {
    const std::string name = "u" + std::to_string(u);
    spec.unit(name).parameter(name, {8192});
  }
  EngineOptions one = on_disk(3, lab::kOptimizerNvme);
  EngineOptions other = one;
  one.offload.optimizer_nvme_bytes = 16384 * 11 / 10;
  other.offload.optimizer_nvme_bytes = 16384 * 19 / 10;
  ASSERT_EQ(plan_memory(spec, AdamW{}, 2, one), plan_memory(spec, AdamW{}, 2, other));
  const auto ends = outcomes(2, [&](const ProcessGroup& group) {
    const Engine engine(spec, AdamW{}, group, group.rank() == 0 ? one : other);
  });
  expect_all(ends, "UsageError", {"ranks made different engines", "optimizer state in memory"});
}

TEST(Offload, TiersThatDoNotGoTogetherAreUsageErrors) {
  EngineOptions local = on_disk(2, lab::kOptimizerAndGradientsNvme);
  local.accumulation = Accumulation::local;
  expect_refused(2, local, "UsageError", {"offload.gradients = nvme needs accumulation = reduced"},
                 "local");
  for (int stage = 0; stage < 3; ++stage) {
    EngineOptions options = on_disk(stage, lab::kOptimizerNvme);
    options.offload.parameters = Tier::nvme;
    expect_refused(2, options, "UsageError", {"offload.parameters", "nvme needs stage"}, "stage");
  }
  EngineOptions bytes = on_disk(2, lab::kAllDevice);
  bytes.offload.optimizer_nvme_bytes = 1;
  expect_refused(1, bytes, "UsageError", {"needs offload.optimizer = nvme"}, "bytes");
  for (const auto& [name, edit] :
       std::vector<std::pair<std::string, std::function<void(OffloadOptions&)>>>{
           {"io_buffers", [](OffloadOptions& o) { o.io_buffers = 0; }},
           {"io_buffers", [](OffloadOptions& o) { o.io_buffers = -1; }},
           {"io_depth", [](OffloadOptions& o) { o.io_depth = 0; }},
           {"io_block_bytes", [](OffloadOptions& o) { o.io_block_bytes = 0; }},
           {"optimizer_nvme_bytes", [](OffloadOptions& o) { o.optimizer_nvme_bytes = -1; }}}) {
    EngineOptions options = on_disk(2, lab::kOptimizerNvme);
    edit(options.offload);
    expect_refused(1, options, "UsageError", {name}, name);
  }
}

}  // namespace
}  // namespace zshard::lab::disk
