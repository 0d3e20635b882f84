// gpt: trains a GPT-2 shaped byte-level language model, sharded by zshard.
//
//   gpt --data FILE... --ranks 2 --stage 3 --optimizer-tier host --digest
//
// Exit code 0 after success, 2 for arguments that cannot be served (too little memory for them, or
// --device cuda where there is no GPU, included), 1 for everything else. SIGTERM abandons the step:
// a shell reports 143, other ranks end with code 1 and an error that names the rank; nothing is
// left behind.
#include <cblas.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "config.hpp"
#include "data.hpp"
#include "output.hpp"
#include "session.hpp"
#include "zshard/zshard.hpp"

namespace {

/// Says why the program gives up, and leaves without the exit handlers of libraries: short of
/// memory OpenBLAS' own waits for ever.
[[noreturn]] void give_up(int code, const char* reason) {
  std::fprintf(stderr, "gpt: %s\n", reason);
  std::fflush(nullptr);
  _exit(code);
}

}  // namespace

int main(int argc, char** argv) {
  gpt::prepare_streams();
  try {
    const std::optional<gpt::Config> config =
        gpt::parse_arguments(std::vector<std::string>(argv + 1, argv + argc));
    if (!config) return 0;
    const gpt::Dataset data(gpt::Dataset::read(config->data), config->val_fraction,
                            config->shape.context);
    openblas_set_num_threads(1);  // a rank is a thread; ranks are what runs in parallel
    if (config->ranks) {
      gpt::check_machine(*config, data, 0, *config->ranks, *config->ranks);
      zshard::run_ranks(*config->ranks, [&](const zshard::ProcessGroup& group) {
        gpt::run_session(*config, data, group);
      });
    } else {
      const zshard::ProcessGroup group = zshard::ProcessGroup::from_environment();
      gpt::check_machine(*config, data, group.local_rank(), 1, group.size());
      gpt::run_session(*config, data, group);
    }
    return 0;
  } catch (const gpt::ConfigError& error) {
    give_up(2, error.what());
  } catch (const zshard::UsageError& error) {
    give_up(2, error.what());
  } catch (const zshard::OutOfMemory& error) {
    give_up(2, error.what());
  } catch (const std::bad_alloc&) {
    give_up(2, "out of memory; use a smaller model, --batch or --ranks");
  } catch (const std::exception& error) {
    give_up(1, error.what());
  }
}
