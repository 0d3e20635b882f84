// zshard info: what was built, what can be used here, and why not.
#include <fmt/format.h>

#include "runtime/base/build_config.hpp"
#include "runtime/base/bytes.hpp"
#include "runtime/cli/arguments.hpp"
#include "runtime/cli/command.hpp"
#include "runtime/cli/console.hpp"
#include "runtime/cli/json_line.hpp"
#include "runtime/cli/machine.hpp"

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

constexpr const char* kUnusedGpus =
    "this version trains on host ranks only; GPUs are found and not used";

struct Facts {
  IoUring io_uring = probe_io_uring();
  Gpus gpus = probe_gpus();
  Cpu cpu = probe_cpu();
  MemoryFacts memory = probe_memory();

  [[nodiscard]] std::string cuda_reason() const {
    return gpus.list.empty() ? gpus.none : kUnusedGpus;
  }
};

Json json_of(const Usable& usable) {
  return {{"usable", usable.yes}, {"reason", or_null(usable.reason)}};
}

Json number(std::int64_t value) {
  return value < 0 ? Json(nullptr) : Json(value);
}

Json json_of(const Facts& facts) {
  Json build = {{"compiler", ZSHARD_COMPILER}, {"type", ZSHARD_BUILD_TYPE}};
  for (const BuildPart& part : kParts) build[part.name] = or_null(part.there ? part.version : "");
  Json gpus = Json::array();
  for (const Gpu& gpu : facts.gpus.list) {
    gpus.push_back({{"name", gpu.name}, {"memory_bytes", gpu.memory}});
  }
  return {{"version", ZSHARD_VERSION},
          {"build", build},
          {"backends",
           {{"host", json_of(Usable{true, ""})},
            {"cuda", json_of(Usable{false, facts.cuda_reason()})},
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
          {"no_gpu_because", or_null(facts.gpus.none)},
          {"cuda_driver", or_null(facts.gpus.driver)}};
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
  line("CUDA", "no: " + facts.cuda_reason());
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
  if (facts.gpus.list.empty()) line("GPUs", "none: " + facts.gpus.none);
  for (const Gpu& gpu : facts.gpus.list) {
    line("GPU", gpu.name + ", " + base::human_bytes(gpu.memory));
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
