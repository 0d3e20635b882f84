// zshard info: what was built, what can be used here, and why not.
#include <fmt/format.h>

#include <cstdlib>

#include "runtime/base/build_config.hpp"
#include "runtime/base/bytes.hpp"
#include "runtime/cli/arguments.hpp"
#include "runtime/cli/command.hpp"
#include "runtime/cli/console.hpp"
#include "runtime/cli/json_line.hpp"
#include "runtime/cli/machine.hpp"
#include "runtime/engine/accelerator.hpp"
#include "zshard/error.hpp"

namespace zshard::cli {
namespace {

struct BuildPart {
  const char* name;
  bool there;
  const char* version;
};

const BuildPart kParts[] = {
    {"cuda", ZSHARD_HAS_CUDA != 0, ZSHARD_CUDA_VERSION},
    {"nccl", ZSHARD_HAS_NCCL != 0, ZSHARD_NCCL_VERSION},
    {"mpi", ZSHARD_HAS_MPI != 0, ZSHARD_MPI_VERSION},
    {"liburing", ZSHARD_HAS_IO_URING != 0, ZSHARD_IO_URING_VERSION},
};

/// What the CUDA plug-in says, or why it cannot be asked.
struct Cuda {
  Usable backend;
  std::vector<engine::GpuFacts> gpus;
  std::string driver;   // CUDA versions: what the driver serves, what the plug-in runs on
  std::string runtime;  // "": no plug-in
  std::string nccl;
};

Cuda probe_cuda() {
  Cuda cuda;
  try {
    engine::Accelerator& accelerator = engine::accelerator();
    cuda.runtime = accelerator.runtime_version();
    cuda.nccl = accelerator.nccl_version();
    cuda.driver = accelerator.driver_version();
    cuda.gpus = accelerator.gpus();
    cuda.backend.yes = !cuda.gpus.empty();
    if (cuda.backend.yes) {
      if (cuda.nccl.empty()) cuda.backend.reason = "one GPU only: the build has no NCCL";
    } else {
      const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
      cuda.backend.reason =
          "the driver (CUDA " + cuda.driver + ") shows no GPU to this process" +
          (visible == nullptr ? "" : "; CUDA_VISIBLE_DEVICES is \"" + std::string(visible) + "\"");
    }
  } catch (const Error& error) {
    cuda.backend = {false, error.what()};
  }
  return cuda;
}

struct Facts {
  IoUring io_uring = probe_io_uring();
  Gpus gpus = probe_gpus();
  Cuda cuda = probe_cuda();
  Cpu cpu = probe_cpu();
  MemoryFacts memory = probe_memory();
};

Json json_of(const Usable& usable) {
  return {{"usable", usable.yes}, {"reason", or_null(usable.reason)}};
}

Json number(std::int64_t value) {
  return value < 0 ? Json(nullptr) : Json(value);
}

/// Devices as the plug-in sees them, or, where it cannot be asked, as the driver does.
Json gpus_of(const Facts& facts) {
  Json gpus = Json::array();
  for (const engine::GpuFacts& gpu : facts.cuda.gpus) {
    gpus.push_back({{"name", gpu.name},
                    {"memory_bytes", gpu.memory_bytes},
                    {"compute_capability", fmt::format("{}.{}", gpu.major, gpu.minor)}});
  }
  if (!gpus.empty()) return gpus;
  for (const Gpu& gpu : facts.gpus.list) {
    gpus.push_back(
        {{"name", gpu.name}, {"memory_bytes", gpu.memory}, {"compute_capability", nullptr}});
  }
  return gpus;
}

Json json_of(const Facts& facts) {
  Json build = {{"compiler", ZSHARD_COMPILER}, {"type", ZSHARD_BUILD_TYPE}};
  for (const BuildPart& part : kParts) build[part.name] = or_null(part.there ? part.version : "");
  const Json gpus = gpus_of(facts);
  return {
      {"version", ZSHARD_VERSION},
      {"build", build},
      {"backends",
       {{"host", json_of(Usable{true, ""})},
        {"cuda", json_of(facts.cuda.backend)},
        {"io_uring", json_of(facts.io_uring.ring)},
        {"io_uring_registered_buffers", json_of(facts.io_uring.registered)},
        {"posix", json_of(Usable{true, ""})}}},
      {"io_uring_disabled", number(facts.io_uring.disabled)},
      {"cpu",
       {{"model", or_null(facts.cpu.model)},
        {"cores", facts.cpu.online},
        {"usable_cores", facts.cpu.usable},
        {"level", facts.cpu.level},
        {"dispatch", facts.cpu.dispatch}}},
      {"memory",
       {{"total_bytes", number(facts.memory.total)},
        {"available_bytes", number(facts.memory.available)},
        {"huge_pages", or_null(facts.memory.huge_pages)},
        {"shared_huge_pages", or_null(facts.memory.shared_huge_pages)},
        {"memlock_bytes", number(facts.memory.memlock)},
        {"memlock_exempt", facts.memory.memlock_exempt}}},
      {"gpus", gpus},
      {"no_gpu_because", or_null(gpus.empty() ? facts.gpus.none : "")},
      {"cuda_driver", or_null(facts.gpus.driver.empty() ? facts.cuda.driver : facts.gpus.driver)},
      {"cuda_runtime", or_null(facts.cuda.runtime)},
      {"nccl", or_null(facts.cuda.nccl)}};
}

std::string size_text(std::int64_t bytes) {
  return bytes < 0 ? "unknown" : base::human_bytes(bytes);
}

std::string text_of(const Usable& usable) {
  if (usable.yes) return "yes" + (usable.reason.empty() ? "" : ", " + usable.reason);
  return "no: " + usable.reason;
}

std::string huge_page_text(const std::string& setting, const char* what) {
  if (setting.empty()) return fmt::format("{} unknown", what);
  const bool refused = setting == "never" || setting == "deny";
  return fmt::format("{} {}{}", what, setting, refused ? " (4 KiB pages)" : "");
}

std::string text_of(const Facts& facts) {
  std::string text =
      fmt::format("zshard {} ({}, {})\n", ZSHARD_VERSION, ZSHARD_COMPILER, ZSHARD_BUILD_TYPE);
  const auto heading = [&](const char* name) { text += fmt::format("\n{}\n", name); };
  const auto line = [&](std::string_view name, std::string_view value) {
    text += fmt::format("  {:<20}{}\n", name, value);
  };
  heading("found by the build");
  for (const BuildPart& part : kParts) line(part.name, part.there ? part.version : "no");
  heading("usable here");
  line("host ranks", "yes");
  line("CUDA", text_of(facts.cuda.backend));
  line("io_uring", text_of(facts.io_uring.ring));
  line("registered buffers",
       facts.io_uring.registered.yes
           ? "yes, " + base::human_bytes(facts.io_uring.registered_bytes) + " tried"
           : text_of(facts.io_uring.registered));
  line("posix I/O", "yes");
  heading("machine");
  line("CPU", facts.cpu.model.empty() ? "unknown" : facts.cpu.model);
  line("cores", fmt::format("{}, {} of them for this process", facts.cpu.online, facts.cpu.usable));
  line("CPU level", facts.cpu.level);
  line("kernels run as", facts.cpu.dispatch);
  line("memory", fmt::format("{} available of {}", size_text(facts.memory.available),
                             size_text(facts.memory.total)));
  line("huge pages", huge_page_text(facts.memory.huge_pages, "transparent:") + "; " +
                         huge_page_text(facts.memory.shared_huge_pages, "shared memory:"));
  line("memlock limit",
       (facts.memory.memlock < 0 ? "unlimited" : base::human_bytes(facts.memory.memlock)) +
           (facts.memory.memlock_exempt ? ", does not count for this process (CAP_IPC_LOCK)" : ""));
  line("CUDA driver", facts.gpus.driver.empty() ? "none" : "serves CUDA " + facts.gpus.driver);
  line("CUDA runtime", facts.cuda.runtime.empty() ? "not loaded" : facts.cuda.runtime);
  line("NCCL", facts.cuda.nccl.empty() ? "not loaded" : facts.cuda.nccl);
  const Json gpus = gpus_of(facts);
  if (gpus.empty()) line("GPUs", "none: " + facts.gpus.none);
  for (const Json& gpu : gpus) {
    std::string about = gpu.at("name").get<std::string>() + ", " +
                        base::human_bytes(gpu.at("memory_bytes").get<std::int64_t>());
    if (!gpu.at("compute_capability").is_null()) {
      about += ", compute capability " + gpu.at("compute_capability").get<std::string>();
    }
    line("GPU", about);
  }
  return text;
}

class InfoCommand : public Command {
 public:
  CLI::App* describe(CLI::App& tool) override {
    CLI::App* command = tool.add_subcommand(
        "info", "Print what was built, what can be used on this machine, and why not");
    command->add_flag("--json", json_, "one JSON object");
    command->footer("Examples:\n  zshard info\n  zshard info --json | jq .backends");
    return command;
  }

  ExitCode run(const std::vector<std::string>& others) override {
    refuse_others(others, {"--json", "--help"}, "zshard info");
    const Facts facts;
    print(json_ ? json_line(json_of(facts)) : text_of(facts));
    return ExitCode::fine;
  }

 private:
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_info_command() {
  return std::make_unique<InfoCommand>();
}

}  // namespace zshard::cli
