#include "runtime/engine/blueprint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "optimizers/rule.hpp"
#include "runtime/memory/arena.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

/// The shortest text that only this number has.
std::string exact(double x) {
  return fmt::format("{}", x);
}

void refuse(const std::string& what) {
  throw UsageError(what + " is not served by this version; see the table in README.md");
}

/// What the interface declares and this version does not do.
void check_served(const ModelSpec& spec, const Optimizer& optimizer, const EngineOptions& options) {
  for (const UnitSpec& unit : spec.units()) {
    for (const ParameterSpec& p : unit.parameters) {
      if (!p.options.tensor_axis.empty()) {
        refuse("parameter " + p.name + ": tensor_axis " + p.options.tensor_axis);
      }
      if (!p.options.group.empty() &&
          std::none_of(spec.groups().begin(), spec.groups().end(),
                       [&](const GroupSpec& g) { return g.name == p.options.group; })) {
        throw UsageError("parameter " + p.name + ": there is no group " + p.options.group +
                         "; declare it with ModelSpec::group");
      }
    }
  }
  if (options.reduction == Reduction::native && options.device == DeviceKind::host) {
    refuse("reduction = native with device = host");
  }
  if (options.master != MasterWeights::f32) {
    refuse("master = " + std::string(to_string(options.master)));
  }
  if (options.moments != Moments::f32)
    refuse("moments = " + std::string(to_string(options.moments)));
  const OffloadOptions& tiers = options.offload;
  if (tiers.optimizer_nvme_bytes && tiers.optimizer != Tier::nvme) {
    throw UsageError("offload.optimizer_nvme_bytes needs offload.optimizer = nvme");
  }
  if (tiers.gradients == Tier::nvme && options.accumulation == Accumulation::local) {
    throw UsageError(
        "offload.gradients = nvme needs accumulation = reduced: `local` keeps full fp32 buffers in "
        "memory, beside which the accumulators are small");
  }
  if (tiers.parameters != Tier::device && options.stage != Stage::parameters) {
    throw UsageError("offload.parameters = " + std::string(to_string(tiers.parameters)) +
                     " needs stage 3 (stage = parameters): below it parameters stay on the device");
  }
  if (tiers.update_on == UpdateOn::host && options.device != DeviceKind::host &&
      tiers.optimizer == Tier::device) {
    throw UsageError(
        "update_on = host needs offload.optimizer = host or nvme: state on the GPU is updated "
        "there");
  }
  const optimizers::Rule& rule = optimizer.rule();
  rule.validate(rule.defaults());
  for (const GroupSpec& group : spec.groups()) {
    rule.validate(optimizers::merged(rule.defaults(), group.hyper));
  }
  if (rule.sums() != 0 || rule.transforms()) refuse("an optimizer with per-tensor sums");
}

}  // namespace

Blueprint Blueprint::make(const ModelSpec& spec, const Optimizer& optimizer, int world,
                          const EngineOptions& options) {
  validate(options);
  check_served(spec, optimizer, options);
  Blueprint b{spec, optimizer, options, nullptr, {}, {}, {}, {}, {}};
  b.layout = std::make_unique<shard::Layout>(shard::Layout::make(spec, world));
  const ScheduleOptions how{options.stage, options.gather_budget, spec.hold(), options.look_ahead,
                            options.behind};
  const std::vector<Position> program = spec.program();
  b.training = make_schedule(*b.layout, program, how);
  b.evaluation = evaluation_schedule(*b.layout, program, how);
  PlanInput input;
  input.moments.assign(optimizer.rule().slots().size(), DType::f32);
  input.master = options.master;
  input.accumulation = options.accumulation;
  input.wire = options.wire;
  input.optimizer_tier = options.offload.optimizer;
  input.gradient_tier = options.offload.gradients;
  input.parameter_tier = options.offload.parameters;
  input.kernels = options.device != DeviceKind::host;
  input.tiers = &b.tiers;
  TierInput tiers;
  tiers.stage = options.stage;
  tiers.offload = options.offload;
  tiers.sub_group_bytes = options.sub_group_bytes;
  tiers.slots = static_cast<int>(input.moments.size());
  tiers.cut = DeviceMap::cuts(options);
  const auto plan = [&] {
    b.tiers = make_tier_map(*b.layout, tiers);
    b.device = DeviceMap::make(*b.layout, b.tiers, options, tiers.slots);
    b.plan = make_plan(*b.layout, b.training, input);
    b.plan.add(Category::communication_staging, Tier::device,
               b.device.received_bytes + DeviceMap::kPieces * b.device.piece_bytes);
    b.plan.add(Category::io_staging, Tier::host, b.device.staging_bytes);
    b.plan.add(Category::io_staging, Tier::device, b.device.upload_bytes);
  };
  plan();
  if (b.tiers.optimizer && !options.offload.optimizer_nvme_bytes && options.host_budget) {
    // What the budget leaves, less the rounding of the arenas of master weights and moments.
    tiers.kept_bytes =
        *options.host_budget - b.plan.arena_bytes(Tier::host) - 2 * (memory::kArenaRounding - 1);
    if (*tiers.kept_bytes > 0) plan();
  }
  return b;
}

std::int64_t Blueprint::gather_arena() const {
  return std::max(training.gather_arena, evaluation.gather_arena);
}

std::string Blueprint::identity() const {
  // What a user wrote comes before what follows from it: the first difference is what ranks report.
  std::string text = layout->text();
  const auto line = [&](const std::string& name, const std::string& value) {
    text += "option " + name + " " + value + "\n";
  };
  line("stage", std::string(to_string(options.stage)));
  line("device", std::string(to_string(options.device)));
  line("gather_budget", options.gather_budget ? std::to_string(*options.gather_budget) : "unset");
  line("look_ahead", std::to_string(options.look_ahead));
  line("behind", std::to_string(options.behind));
  line("accumulation", std::string(to_string(options.accumulation)));
  line("reduction", std::string(to_string(options.reduction)));
  line("wire", options.wire ? std::string(to_string(*options.wire)) : "unset");
  line("reduction_group", std::to_string(options.reduction_group));
  line("loss_scale", exact(options.loss_scale));
  // Peers read each other's staging memory, and wait for each other's disks. What is on a device
  // they get by a collective.
  const auto tier = [&](const std::string& name, Tier where) {
    const bool same = options.device == DeviceKind::host && where != Tier::nvme;
    line(name, same ? "device or host" : std::string(to_string(where)));
  };
  tier("offload.optimizer", options.offload.optimizer);
  tier("offload.gradients", options.offload.gradients);
  tier("offload.parameters", options.offload.parameters);
  if (tiers.uses_store()) {
    line("io_buffers", std::to_string(options.offload.io_buffers));
    line("io_verify", options.offload.io_verify ? "true" : "false");
    line("sub_group_bytes", std::to_string(options.sub_group_bytes));
    std::string kept;
    for (const TierMap::Unit& unit : tiers.units) {
      for (const TierMap::Segment& segment : unit.segments) {
        kept += " " + std::to_string(segment.kept);
      }
    }
    line(
        "optimizer state in memory (offload.optimizer_nvme_bytes, host_budget), elements of each "
        "segment",
        kept);
  }
  const optimizers::Rule& rule = optimizer.rule();
  const auto hyper = [&](const std::string& who, const optimizers::Resolved& h) {
    text += "hyper-parameters " + who + " lr=" + exact(h.lr) +
            " weight_decay=" + exact(h.weight_decay) + " beta1=" + exact(h.beta1) +
            " beta2=" + exact(h.beta2) + " eps=" + exact(h.eps) + " momentum=" + exact(h.momentum) +
            "\n";
  };
  const std::string variant = rule.variant();
  hyper(rule.name() + (variant.empty() ? "" : " " + variant), rule.defaults());
  for (const GroupSpec& group : spec.groups()) {
    hyper("of group " + group.name, optimizers::merged(rule.defaults(), group.hyper));
  }
  text += training.text();
  text += evaluation.text();
  return text;
}

namespace {

/// What to set to come from one to the other, in the words of the options table.
std::string difference(const EngineOptions& from, const EngineOptions& to) {
  std::string text;
  for (const OptionInfo& option : option_table()) {
    const std::string value = get_option(to, option.name);
    if (value == get_option(from, option.name)) continue;
    text += (text.empty() ? "" : ", ") + option.name + " = " + (value.empty() ? "unset" : value);
    if (option.help.find("Changes bits") != std::string::npos) text += " (changes bits)";
  }
  return text;
}

bool fits(const MemoryPlan& plan, const EngineOptions& options) {
  return (!options.device_budget || plan.arena_bytes(Tier::device) <= *options.device_budget) &&
         (!options.host_budget || plan.arena_bytes(Tier::host) <= *options.host_budget);
}

/// Changes in order of what they cost per step: nothing, then memory traffic, then traffic between
/// ranks, then traffic with disks.
std::vector<EngineOptions> changes(const Blueprint& b, int world) {
  std::vector<EngineOptions> all;
  const EngineOptions& now = b.options;
  const auto add = [&](EngineOptions options, auto&& edit) {
    edit(options);
    all.push_back(options);
    if (options.device == DeviceKind::host || options.offload.optimizer == Tier::device) return;
    if (options.offload.update_on == UpdateOn::host) return;
    options.offload.update_on = UpdateOn::host;  // no buffers on the GPU
    all.push_back(options);
  };
  const auto plain = [](EngineOptions&) {};
  const auto host = [](EngineOptions& o) { o.offload.optimizer = Tier::host; };
  const auto host_all = [](EngineOptions& o) {
    o.offload.optimizer = Tier::host;
    o.offload.gradients = Tier::host;
  };
  const auto nvme = [](EngineOptions& o) { o.offload.optimizer = Tier::nvme; };
  const auto nvme_all = [&](EngineOptions& o) {
    nvme(o);
    o.offload.gradients = Tier::nvme;
    o.accumulation = Accumulation::reduced;
  };
  const bool disk = now.offload.optimizer == Tier::nvme || now.offload.gradients == Tier::nvme ||
                    now.offload.parameters == Tier::nvme;
  if (now.device != DeviceKind::host) add(now, plain);
  if (disk) {  // less staging memory, or none
    add(now, [](EngineOptions& o) { o.offload.io_buffers = std::min(o.offload.io_buffers, 3); });
    for (const int buffers : {3, 1}) {
      add(now, [buffers](EngineOptions& o) {
        o.offload.io_buffers = std::min(o.offload.io_buffers, buffers);
        o.sub_group_bytes = std::min<std::int64_t>(o.sub_group_bytes, 1 << 20);
      });
    }
    add(now, [](EngineOptions& o) {
      for (Tier* tier : {&o.offload.optimizer, &o.offload.gradients, &o.offload.parameters}) {
        if (*tier == Tier::nvme) *tier = Tier::device;
      }
      o.offload.optimizer_nvme_bytes.reset();
      // State on a GPU is updated there.
      if (o.device != DeviceKind::host && o.offload.optimizer == Tier::device &&
          o.offload.update_on == UpdateOn::host) {
        o.offload.update_on = UpdateOn::automatic;
      }
    });
  }
  add(now, [](EngineOptions& o) { o.behind = 0; });
  add(now, [](EngineOptions& o) { o.wire.reset(); });
  add(now, [](EngineOptions& o) { o.accumulation = Accumulation::reduced; });
  add(now, host);
  add(now, host_all);
  for (int stage = static_cast<int>(now.stage) + 1; stage <= 3; ++stage) {
    EngineOptions base = now;
    base.stage = static_cast<Stage>(stage);
    add(base, plain);
    add(base, host);
    add(base, host_all);
  }
  EngineOptions least = now;
  least.stage = Stage::parameters;
  least.gather_budget = minimum_gather_budget(b.spec, world);
  add(least, plain);
  least.behind = 0;
  least.wire.reset();
  least.accumulation = Accumulation::reduced;
  add(least, plain);
  add(least, host);
  add(least, host_all);
  add(least, [&](EngineOptions& o) {
    host_all(o);
    o.offload.parameters = Tier::host;
  });
  add(now, nvme);
  add(now, nvme_all);
  add(least, nvme);
  add(least, [&](EngineOptions& o) {
    nvme_all(o);
    o.offload.parameters = Tier::nvme;
  });
  return all;
}

}  // namespace

std::string cheapest_change(const Blueprint& b, int world, const Fits& accepted) {
  const auto works = [&](int ranks, const EngineOptions& options) {
    try {
      return accepted(plan_memory(b.spec, b.optimizer, ranks, options), options);
    } catch (const UsageError&) {
      return false;
    }
  };
  const std::vector<EngineOptions> all = changes(b, world);
  for (const EngineOptions& options : all) {
    if (!works(world, options)) continue;
    const bool disk = options.offload.optimizer == Tier::nvme && options.offload.nvme_dir.empty();
    return "The cheapest change that fits: " + difference(b.options, options) + "." +
           (disk ? " Its file goes into the directory that offload.nvme_dir names." : "");
  }
  for (int more = world; more <= 4096 / 2;) {
    more *= 2;
    for (EngineOptions options : all) {
      if (options.gather_budget) options.gather_budget = minimum_gather_budget(b.spec, more);
      if (!works(more, options)) continue;
      const std::string change = difference(b.options, options);
      return "No change of options fits on " + std::to_string(world) + " ranks; " +
             std::to_string(more) + " ranks " +
             (change.empty() ? "with the same options" : "with " + change) + " would.";
    }
  }
  return "No change of options or number of ranks fits: the largest unit, its gradients and the "
         "slots are too big for this budget; split the unit.";
}

void check_budgets(const Blueprint& b, int world) {
  if (fits(b.plan, b.options)) return;
  std::string over;
  const auto tier = [&](Tier t, const std::optional<std::int64_t>& budget, const char* name) {
    if (budget && b.plan.arena_bytes(t) > *budget) {
      over += std::string(over.empty() ? "" : "; ") + name + " is " + std::to_string(*budget) +
              " bytes a rank, the plan takes " + std::to_string(b.plan.arena_bytes(t));
    }
  };
  tier(Tier::device, b.options.device_budget, "device_budget");
  tier(Tier::host, b.options.host_budget, "host_budget");
  throw OutOfMemory(over + ".\n" + b.plan.to_string() + cheapest_change(b, world, fits));
}

void check_machine(const Blueprint& b, int ranks_here) {
  const std::int64_t available = memory::available_memory();
  std::int64_t wanted = b.plan.arena_bytes(Tier::host);
  if (b.options.device == DeviceKind::host) wanted += b.plan.arena_bytes(Tier::device);
  if (available < 0 || wanted <= available / ranks_here) return;
  throw OutOfMemory("this machine has " + std::to_string(available) + " bytes available for " +
                    std::to_string(ranks_here) + " rank(s), the plan takes " +
                    std::to_string(wanted) + " a rank.\n" + b.plan.to_string() +
                    "Use a higher stage, a smaller gather_budget or more machines; device_budget "
                    "names the cheapest change that fits.");
}

}  // namespace zshard::engine

namespace zshard {

MemoryPlan plan_memory(const ModelSpec& spec, const Optimizer& optimizer, int world,
                       const EngineOptions& options) {
  return engine::Blueprint::make(spec, optimizer, world, options).plan;
}

std::int64_t minimum_gather_budget(const ModelSpec& spec, int world) {
  return engine::minimum_gather_budget(shard::Layout::make(spec, world), spec.program(),
                                       spec.hold());
}

std::int64_t maximum_gather_budget(const ModelSpec& spec, int world) {
  return engine::maximum_gather_budget(shard::Layout::make(spec, world), spec.program());
}

}  // namespace zshard
