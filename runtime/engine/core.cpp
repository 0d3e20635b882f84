#include "runtime/engine/core.hpp"

#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <new>
#include <system_error>
#include <utility>

#include "offload/io/extent_file.hpp"
#include "runtime/base/log.hpp"
#include "runtime/base/system_reason.hpp"
#include "runtime/engine/accelerator.hpp"
#include "zshard/error.hpp"

namespace zshard::engine {
namespace {

// What a rank says first at construction.
struct Hello {
  std::uint64_t hash = 0;
  std::uint64_t bytes = 0;
  std::uint32_t status = 0;
  std::uint32_t rank = 0;
};
enum Status : std::uint32_t { kFine, kUsage, kMemory, kIo, kOther };

void check_log_dir(const std::string& directory) {
  if (directory.empty()) return;
  struct stat facts {};
  if (stat(directory.c_str(), &facts) == 0 && !S_ISDIR(facts.st_mode)) errno = ENOTDIR;
  if (S_ISDIR(facts.st_mode) && access(directory.c_str(), W_OK | X_OK) == 0) return;
  throw UsageError("option log_dir: cannot write into " + directory + ": " +
                   base::system_reason(errno));
}

std::string first_difference(const std::string& a, const std::string& b, int rank_a, int rank_b) {
  std::size_t at = 0;
  while (at < a.size() && at < b.size() && a[at] == b[at]) ++at;
  const auto line = [&](const std::string& text) {
    const std::size_t begin = at == 0 ? 0 : text.rfind('\n', std::min(at, text.size()) - 1);
    const std::size_t from = begin == std::string::npos || at == 0 ? 0 : begin + 1;
    if (from >= text.size()) return std::string("nothing more");
    return text.substr(from, text.find('\n', from) - from);
  };
  return "rank " + std::to_string(rank_a) + " has `" + line(a) + "`, rank " +
         std::to_string(rank_b) + " has `" + line(b) + "`";
}

}  // namespace

std::string text_of(const std::exception_ptr& cause) {
  try {
    std::rethrow_exception(cause);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "something that is no std::exception";
  }
}

Core::Core(const ModelSpec& spec, const Optimizer& optimizer, const ProcessGroup& group,
           const EngineOptions& options)
    : blueprint_{spec, optimizer, options, nullptr, {}, {}, {}, {}, {}},
      group_(group.implementation()),
      rank_(group.rank()),
      world_(group.size()),
      exceptions_(std::uncaught_exceptions()) {
  // A rank whose arguments are refused still takes part, so that its peers get an error instead of
  // a deadline.
  std::uint32_t status = kFine;
  std::exception_ptr own;
  std::string text;
  const auto attempt = [&](auto&& body) {
    try {
      body();
    } catch (const UsageError& error) {
      status = kUsage;
      text = error.what();
      own = std::current_exception();
    } catch (const OutOfMemory& error) {
      status = kMemory;
      text = error.what();
      own = std::current_exception();
    } catch (const IoError& error) {
      status = kIo;
      text = error.what();
      own = std::current_exception();
    } catch (const std::bad_alloc&) {
      status = kMemory;
      text = "out of memory outside the plan; free memory, or raise the limit (ulimit -v)";
      own = std::make_exception_ptr(OutOfMemory(text));
    } catch (const std::system_error& error) {
      status = kMemory;
      text = std::string("cannot start the threads of the queues and element loops: ") +
             error.what() + "; raise the limits (ulimit -u, ulimit -v)";
      own = std::make_exception_ptr(OutOfMemory(text));
    } catch (const std::exception& error) {
      status = kOther;
      text = error.what();
      own = std::current_exception();
    }
  };
  attempt([&] {
    for (const UnitSpec& unit : spec.units()) {
      const std::string& axis = unit.options.shard_axis;
      if (!axis.empty() && (group.axes().size() != 1 || group.axes()[0].name != axis)) {
        throw UsageError("unit " + unit.name + ": the mesh has no axis " + axis +
                         " to shard it over");
      }
    }
    blueprint_ = Blueprint::make(spec, optimizer, world_, options);
    check_budgets(blueprint_, world_);
    check_machine(blueprint_, group_->ranks_here());
    check_log_dir(options.log_dir);
    if (blueprint_.tiers.uses_store() && options.offload.nvme_dir.empty()) {
      throw UsageError(
          "a tier is nvme, and offload.nvme_dir is not set: name the directory for its file");
    }
    // Before any rank makes its file: afterwards free space and what is needed do not compare.
    if (blueprint_.tiers.uses_store()) {
      const offload::StoreOptions disk = store_options();
      offload::Store::check(disk);
      register_buffers_ = offload::Store::may_register(disk, blueprint_.tiers.transfer_bytes());
    }
    text = blueprint_.identity();
  });
  agree(status, text, own);
  text.clear();
  std::shared_ptr<memory::Arena> board;
  attempt([&] {
    pool_ = std::make_unique<kernels::Pool>(
        kernels::kernel_threads(options.threads, group_->ranks_here()));
    if (options.device != DeviceKind::host) open_device();
    try {
      storage_ = std::make_unique<Storage>(blueprint_, *group_,
                                           parts_ == nullptr ? nullptr : parts_->device.get());
    } catch (const OutOfMemory& error) {
      if (parts_ == nullptr) throw;
      throw OutOfMemory(std::string(error.what()) + ".\n" + device_advice());
    }
    if (blueprint_.tiers.uses_store()) make_store();
    board = group_->make_board_memory(4 * DataPlane::queue_capacity(blueprint_),
                                      DataPlane::vote_bytes(blueprint_));
  });
  agree(status, text, own);
  attempt([&] { construct(std::move(board)); });
  agree(status, text, own);
  // From here on the loop's own calls of the group, and the engine's, are as patient as its queues.
  group_->limit_deadline(blueprint_.options.deadline_seconds);
  base::log_info(base::Topic::engine, rank_, "stage {}, {} ranks, {} units, {} bytes in arenas",
                 static_cast<int>(options.stage), world_, spec.units().size(),
                 storage_->reserved_bytes());
}

void Core::agree(std::uint32_t status, const std::string& text, std::exception_ptr own) {
  const Hello mine{XXH3_64bits(text.data(), text.size()), text.size(), status,
                   static_cast<std::uint32_t>(rank_)};
  std::vector<Hello> all(static_cast<std::size_t>(world_));
  try {
    group_->exchange({comm::Operation::construct, 0, sizeof mine, 0}, &mine, all.data());
  } catch (const CommError&) {
    if (own != nullptr) std::rethrow_exception(own);
    throw;
  }
  std::uint64_t longest = 0;
  bool same = true;
  for (const Hello& hello : all) {
    longest = std::max(longest, hello.bytes);
    same =
        same && hello.hash == all[0].hash && hello.status == kFine && hello.bytes == all[0].bytes;
  }
  if (same) return;
  std::vector<char> padded(longest, '\0');
  std::copy(text.begin(), text.end(), padded.begin());
  std::vector<char> texts(longest * static_cast<std::size_t>(world_));
  group_->exchange({comm::Operation::construct, 0, longest, 1}, padded.data(), texts.data());
  const auto text_of = [&](int r) {
    const std::size_t at = static_cast<std::size_t>(r);
    return std::string(texts.data() + at * longest, all[at].bytes);
  };
  if (own != nullptr) std::rethrow_exception(own);
  for (int r = 0; r < world_; ++r) {
    const std::string message =
        "rank " + std::to_string(r) + " could not make its engine: " + text_of(r);
    switch (all[static_cast<std::size_t>(r)].status) {
      case kFine:
        continue;
      case kUsage:
        throw UsageError(message);
      case kMemory:
        throw OutOfMemory(message);
      case kIo:
        throw IoError(message);
      default:
        throw CommError(message);
    }
  }
  for (int r = 1; r < world_; ++r) {
    const std::string first = text_of(0);
    const std::string other = text_of(r);
    if (first == other) continue;
    throw UsageError(
        "ranks made different engines: " + first_difference(first, other, 0, r) +
        ". Spec, optimizer and the options that shape layout, schedule or bits must be the same on "
        "every rank");
  }
}

offload::StoreOptions Core::store_options() const {
  const TierMap& map = blueprint_.tiers;
  const OffloadOptions& tiers = blueprint_.options.offload;
  offload::StoreOptions options;
  options.directories = offload::split_directories(tiers.nvme_dir);
  options.backend = tiers.io_backend;
  options.block_bytes = tiers.io_block_bytes;
  options.depth = tiers.io_depth;
  options.bytes = map.store_bytes;
  options.rank = rank_;
  options.ranks_here = group_->ranks_here();
  // Peers give up a rank that waits for its disk for as long as a collective may take: it has to
  // say earlier what is wrong.
  options.deadline_seconds = blueprint_.options.deadline_seconds / 2;
  options.describe = [this](std::int64_t offset) {
    return blueprint_.tiers.describe(*blueprint_.layout, offset);
  };
  return options;
}

void Core::make_store() {
  const TierMap& map = blueprint_.tiers;
  offload::StoreOptions options = store_options();
  options.owner = storage_->owner();
  options.buffers = {storage_->staging(rank_, 0), static_cast<std::size_t>(map.transfer_bytes())};
  options.register_buffers = register_buffers_;
  options.checksums = {reinterpret_cast<std::uint64_t*>(storage_->staging(rank_, map.checksums)),
                       static_cast<std::size_t>(map.checksum_bytes / 8)};
  store_ = offload::Store::make(std::move(options));
  raw_read_ = store_->raw_read();
  raw_write_ = store_->raw_write();
  stream_ = std::make_unique<StateStream>(map, *storage_, *store_, rank_);
  windows_ = std::make_unique<DiskWindows>(map, *storage_, *store_, rank_);
  streamed_.reserve(map.groups.size());
  disk_failures_.resize(static_cast<std::size_t>(world_));
}

void Core::open_device() {
  Accelerator& cuda = accelerator();
  const auto gpus = static_cast<int>(cuda.gpus().size());
  if (gpus == 0) throw DeviceError("device = cuda: no GPU is visible; see `zshard info`");
  const int wanted = blueprint_.options.device_index;
  if (wanted >= gpus) {
    throw UsageError("option device_index: " + std::to_string(wanted) + ", but there are " +
                     std::to_string(gpus) + " GPUs");
  }
  parts_ = std::make_unique<DeviceParts>();
  parts_->device = cuda.open(wanted >= 0 ? wanted : group_->local_rank() % gpus, rank_);
  parts_->kernels = cuda.make_kernels(*parts_->device);
  parts_->update = cuda.make_update(*parts_->device);
  std::int64_t free_bytes = 0;
  std::int64_t total = 0;
  parts_->device->memory(free_bytes, total);
  const std::int64_t planned = blueprint_.plan.arena_bytes(Tier::device);
  if (planned > free_bytes) {
    throw OutOfMemory(parts_->device->name() + " has " + std::to_string(free_bytes) +
                      " bytes free of " + std::to_string(total) + ", the plan takes " +
                      std::to_string(planned) + ".\n" + device_advice());
  }
  if (rank_ == 0 && world_ > 1) {
    for (comm::CommunicatorId& id : ids_) id = cuda.make_id();
  }
}

std::string Core::device_advice() const {
  return blueprint_.plan.to_string() + "device_budget names the cheapest change that fits.";
}

void Core::make_communicators() {
  if (world_ == 1) return;
  group_->broadcast({comm::Operation::construct, 0, sizeof ids_, 2}, ids_.data());
  // One rank that cannot have two decides for all.
  const char ordered = accelerator().orders_collectives() ? 1 : 0;
  std::vector<char> all(static_cast<std::size_t>(world_));
  group_->exchange({comm::Operation::construct, 0, sizeof ordered, 3}, &ordered, all.data());
  const bool two = std::find(all.begin(), all.end(), char{0}) == all.end();
  if (!two) {
    base::log_info(base::Topic::engine, rank_,
                   "one communicator for gathers and reductions: NCCL does not keep the order of "
                   "two (2.26 and later with NCCL_LAUNCH_ORDER_IMPLICIT=1 do)");
  }
  std::unique_ptr<comm::Communicator>* made[] = {&parts_->gather, &parts_->reduce};
  for (std::size_t k = 0; k < (two ? ids_.size() : 1); ++k) {
    *made[k] = accelerator().make_communicator(*parts_->device, ids_[k], rank_, world_,
                                               blueprint_.options.deadline_seconds);
  }
}

MemoryPlan Core::ledger() const {
  MemoryPlan ledger = storage_->ledger();
  if (store_ == nullptr) return ledger;
  const TierMap& map = blueprint_.tiers;
  ledger.add(Category::gradients, Tier::nvme, map.gradient_bytes);
  ledger.add(Category::master, Tier::nvme, map.master_bytes);
  ledger.add(Category::moments, Tier::nvme, map.moment_bytes);
  // Whatever the file has more or less than planned shows here.
  ledger.add(Category::parameters, Tier::nvme,
             store_->bytes() - map.gradient_bytes - map.master_bytes - map.moment_bytes);
  return ledger;
}

void Core::construct(std::shared_ptr<memory::Arena> board) {
  storage_->share(*group_);
  endpoint_ = std::make_unique<comm::Endpoint>(
      group_,
      group_->make_board(std::move(board), 4 * DataPlane::queue_capacity(blueprint_),
                         DataPlane::vote_bytes(blueprint_)),
      blueprint_.options.deadline_seconds,
      [this](const comm::PackedSignature& s) { return DataPlane::describe(blueprint_, s); });
  if (parts_ == nullptr) {
    plane_ =
        std::make_unique<DataPlane>(blueprint_, *storage_, *endpoint_, *pool_, store_.get(), rank_);
  } else {
    make_communicators();
    auto plane = std::make_unique<DevicePlane>(blueprint_, *storage_, *endpoint_, *pool_,
                                               store_.get(), *group_, *parts_);
    device_plane_ = plane.get();
    plane_ = std::move(plane);
  }
  cursor_ = std::make_unique<Cursor>(&blueprint_.training, &blueprint_.evaluation,
                                     blueprint_.options.accumulation == Accumulation::reduced,
                                     static_cast<CursorSink*>(this));
  prepare_bindings();
  prepare_hyper_classes();
}

Core::~Core() {
  close();
}

void Core::close() noexcept {
  const std::lock_guard<CallMutex> lock(mutex_);
  if (closed_) return;
  closed_ = true;
  try {
    if (std::uncaught_exceptions() > exceptions_) group_->fails();
    for (std::size_t u = 0; u < bound_.size(); ++u) unbind(UnitId{static_cast<std::int32_t>(u)});
    on_bind_ = nullptr;  // what it refers to, and the bound variables, may go before a last guard
    for (auto& bound : bound_) bound.clear();
    if (endpoint_ != nullptr && cursor_ != nullptr) {
      if (cursor_->in_range() || poison_ != nullptr) {
        // A queue may wait for peers for ever: the failure lets it go.
        endpoint_->fail("rank " + std::to_string(rank_) +
                        " destroyed its engine inside a range of micro-steps or evaluation passes");
      } else {
        // Peers may still need what this rank passed over in an evaluation.
        plane_->drain();
      }
    }
  } catch (...) {
    if (poison_ == nullptr) poison_ = std::current_exception();
  }
  try {
    if (poison_ == nullptr) {
      poison_ = std::make_exception_ptr(
          UsageError("the engine is destroyed, but a guard or range of it is still used"));
    }
  } catch (...) {
    poison_ = std::current_exception();
  }
  device_plane_ = nullptr;
  plane_.reset();
  endpoint_.reset();
  windows_.reset();
  stream_.reset();
  store_.reset();  // waits for its transfers; the file goes with the engine, not with a last guard
  group_->lift_deadline(blueprint_.options.deadline_seconds);
}

void Core::prepare_bindings() {
  const shard::Layout& layout = *blueprint_.layout;
  bound_.resize(layout.units().size());
  announced_.assign(layout.units().size(), {});
  modes_.assign(layout.units().size(), GradientMode::accumulate);
  for (const UnitSpec& unit : blueprint_.spec.units()) {
    for (const ParameterSpec& p : unit.parameters) {
      const Location at = locate(p.id);
      bound_[static_cast<std::size_t>(at.unit)].push_back(
          {p.id, p.data, p.gradient, at.segment, at.placed->start, size_of(at.layout->dtype),
           at.layout->trained()});
      p.data.assign(nullptr);
      p.gradient.assign(nullptr);
    }
  }
}

// -- endings --

void Core::poison(std::exception_ptr cause, const std::string& message) {
  if (poison_ == nullptr) poison_ = std::move(cause);
  if (endpoint_ != nullptr) endpoint_->fail(message);
  report(message);
}

void Core::report(const std::string& cause) noexcept {
  if (reported_failure_ || blueprint_.options.log_dir.empty() || endpoint_ == nullptr) return;
  reported_failure_ = true;
  static std::atomic<int> reports{0};
  try {
    const std::string path = blueprint_.options.log_dir + "/zshard-rank" + std::to_string(rank_) +
                             "-" + std::to_string(getpid()) + "-" +
                             std::to_string(reports.fetch_add(1)) + ".txt";
    std::ofstream file(path);
    file << cause << where() << "\n\n" << endpoint_->report();
    file.close();
    if (file) {
      base::log_error(base::Topic::comm, rank_, "the last collectives are in {}", path);
    } else {
      base::log_error(base::Topic::comm, rank_, "cannot write the last collectives to {}: {}", path,
                      base::system_reason(errno));
    }
  } catch (...) {
    base::log_error(base::Topic::comm, rank_, "no memory to report the last collectives");
  }
}

void Core::abandon(const std::string& scope) noexcept {
  try {
    const std::lock_guard<CallMutex> lock(mutex_);
    const std::string message = "rank " + std::to_string(rank_) + ": " + scope +
                                " was left by an exception" + where() +
                                "; make a new engine, from a checkpoint if need be";
    Error error(message);
    if (cursor_ != nullptr) error.set_state_step(cursor_->step_count());
    group_->fails();
    poison(std::make_exception_ptr(error), message);
  } catch (...) {
    if (poison_ == nullptr) poison_ = std::current_exception();
  }
}

void Core::check_poison() const {
  if (poison_ != nullptr) std::rethrow_exception(poison_);
  if (interrupted_ != nullptr) std::rethrow_exception(interrupted_);
}

std::string Core::where() const {
  if (cursor_ == nullptr) return "";
  std::string text = " (step " + std::to_string(cursor_->step_count());
  if (cursor_->in_micro_step()) {
    text += cursor_->in_evaluation() ? ", evaluation pass " : ", micro-step ";
    text += std::to_string(cursor_->micro());
  }
  return text + ")";
}

void Core::check_unit(UnitId unit) const {
  if (unit.value >= 0 && unit.value < static_cast<std::int32_t>(bound_.size())) return;
  throw UsageError("unit " + std::to_string(unit.value) + " is not in the spec; it has " +
                   std::to_string(bound_.size()) + " units");
}

void Core::check_between_steps(std::string_view call) const {
  if (!cursor_->in_range()) return;
  throw UsageError(std::string(call) + " inside a range of micro-steps or evaluation passes" +
                   where() + "; call it between steps");
}

// -- ranges --

void Core::begin_micro_steps(int n) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  guarded([&] { cursor_->micro_steps(n); });
  plane_->expect_squares();
  if (windows_ != nullptr) windows_->forget();  // reductions may write accumulators
}

void Core::begin_evaluation_passes(int n) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  guarded([&] { cursor_->evaluation_passes(n); });
}

bool Core::next_micro_step() {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  return guarded([&] {
    const bool more = cursor_->next_micro_step();
    if (!more && blueprint_.options.poison_slots && !cursor_->in_range()) {
      plane_->drain();
      plane_->fill(storage_->gather_arena(), 0xFF);
    }
    return more;
  });
}

void Core::finish_evaluation() {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  if (!cursor_->in_evaluation())
    throw UsageError("finish_evaluation() outside an evaluation range");
  guarded([&] {
    while (cursor_->next_micro_step()) {
    }
  });
}

MicroStep Core::micro_step() const {
  const std::lock_guard<CallMutex> lock(mutex_);
  return {cursor_->micro(), cursor_->n(), blueprint_.options.loss_scale};
}

// -- positions --

GradientMode Core::acquire(UnitId unit, Pass pass, StreamHandle stream) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  check_unit(unit);
  return guarded([&] {
    fresh_gradient_ = false;
    OnStream call(device_plane_, stream, false);
    cursor_->acquire(unit, pass);
    call.end();
    GradientMode& mode = modes_[static_cast<std::size_t>(unit.value)];
    if (pass == Pass::backward) {
      mode = fresh_gradient_ ? blueprint_.options.gradient_mode : GradientMode::accumulate;
    }
    try {
      bind(unit);
    } catch (...) {
      unbind(unit);  // no guard will
      throw;
    }
    return pass == Pass::backward ? mode : GradientMode::accumulate;
  });
}

void Core::commit(UnitId unit, StreamHandle stream) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  check_unit(unit);
  if (cursor_->held(unit) && cursor_->held_backward(unit) < 0) {
    throw UsageError("commit() of unit " +
                     blueprint_.spec.units()[static_cast<std::size_t>(unit.value)].name +
                     ", whose backward pass is not held" + where() +
                     "; commit between acquire and release of its backward pass");
  }
  guarded([&] {
    OnStream call(device_plane_, stream, true);
    cursor_->commit(unit);
    call.end();
    // The end of the backward pass leaves the disk idle.
    if (stream_ != nullptr && !prefetched_ && cursor_->micro() + 1 == cursor_->n()) {
      prefetch_state();
    }
  });
}

void Core::release(UnitId unit, Pass pass, StreamHandle stream) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  check_unit(unit);
  guarded([&] {
    OnStream call(device_plane_, stream, true);
    cursor_->release(unit, pass);
    call.end();
    if (cursor_->held(unit)) {
      fresh_gradient_ = false;
      bind(unit);
    } else {
      unbind(unit);
      check_poison();
    }
  });
}

void Core::release_quietly(UnitId unit, Pass pass, StreamHandle stream) noexcept {
  try {
    release(unit, pass, stream);
  } catch (...) {
    // A destructor cannot throw: the next call does.
    const std::exception_ptr cause = std::current_exception();
    try {
      const std::lock_guard<CallMutex> lock(mutex_);
      unbind(unit);
      if (poison_ == nullptr)
        poison(cause, "rank " + std::to_string(rank_) + ": " + text_of(cause));
    } catch (...) {
      if (poison_ == nullptr) poison_ = cause;
    }
  }
}

void Core::skip(UnitId unit) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  check_unit(unit);
  guarded([&] { cursor_->skip(unit); });
}

// -- addresses --

void Core::bind(UnitId unit) {
  const std::int32_t u = unit.value;
  const std::int64_t offset = cursor_->address(unit);
  const bool backward = cursor_->held_backward(unit) >= 0;
  // Callbacks hear of changes only: a nested use must not announce `overwrite` a second time.
  Announced& known = announced_[static_cast<std::size_t>(u)];
  const Announced now{true, offset, backward};
  const bool changed = now != known || fresh_gradient_;
  known = now;
  for (const Bound& b : bound_[static_cast<std::size_t>(u)]) {
    std::byte* segment = storage_->replicated(u, b.segment) ? storage_->full(rank_, u, b.segment)
                                                            : storage_->slot(offset, u, b.segment);
    void* data = segment + b.start * b.item;
    void* gradient = backward && b.trained
                         ? storage_->gradient(rank_, u, b.segment) + b.start * b.item
                         : nullptr;
    b.data.assign(data);
    b.gradient.assign(gradient);
    if (on_bind_ && changed) {
      call_back({b.parameter, data, gradient, modes_[static_cast<std::size_t>(u)]});
    }
  }
}

void Core::unbind(UnitId unit) noexcept {
  const auto u = static_cast<std::size_t>(unit.value);
  if (u >= announced_.size() || !announced_[u].bound) return;
  announced_[u] = {};
  for (const Bound& b : bound_[u]) {
    b.data.assign(nullptr);
    b.gradient.assign(nullptr);
  }
  if (!on_bind_) return;
  for (const Bound& b : bound_[u]) {
    try {
      call_back({b.parameter, nullptr, nullptr, GradientMode::accumulate});
    } catch (...) {  // has poisoned
    }
  }
}

void Core::call_back(const Binding& binding) {
  try {
    on_bind_(binding);
  } catch (...) {
    // Whatever its type: the unit is held, or gone, and nobody knows it.
    const std::exception_ptr cause = std::current_exception();
    if (poison_ == nullptr) {
      poison(cause, "rank " + std::to_string(rank_) + ": the callback of on_bind threw" + where() +
                        ": " + text_of(cause));
    }
    throw;
  }
}

UnitId Core::unit_of(ParameterId id) const {
  if (id.value < 0 || id.value >= blueprint_.spec.parameter_count()) {
    throw UsageError("parameter " + std::to_string(id.value) + " is not in the spec");
  }
  return UnitId{blueprint_.layout->place(id).unit};
}

Core::Location Core::locate(ParameterId id) const {
  const shard::Place& place = blueprint_.layout->place(id);
  const shard::Segment& segment = blueprint_.layout->units()[static_cast<std::size_t>(place.unit)]
                                      .segments[static_cast<std::size_t>(place.segment)];
  return {place.unit, place.segment, &segment,
          &segment.placed[static_cast<std::size_t>(place.index)]};
}

Core::Location Core::locate_held(ParameterId id) const {
  if (!cursor_->held(unit_of(id))) {
    throw UsageError("parameter " + blueprint_.spec.parameter(id).name + ": its unit is not held");
  }
  return locate(id);
}

void* Core::pointer(ParameterId id) const {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  const Location at = locate_held(id);
  std::byte* base = storage_->replicated(at.unit, at.segment)
                        ? storage_->full(rank_, at.unit, at.segment)
                        : storage_->slot(cursor_->address(UnitId{at.unit}), at.unit, at.segment);
  return base + at.placed->start * size_of(at.layout->dtype);
}

void* Core::gradient(ParameterId id) const {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  const Location at = locate_held(id);
  if (!at.layout->trained() || cursor_->held_backward(UnitId{at.unit}) < 0) return nullptr;
  return storage_->gradient(rank_, at.unit, at.segment) +
         at.placed->start * size_of(at.layout->dtype);
}

GradientMode Core::gradient_mode(UnitId unit) const {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  check_unit(unit);
  if (!cursor_->held(unit)) {
    throw UsageError("unit " + blueprint_.spec.units()[static_cast<std::size_t>(unit.value)].name +
                     " is not held");
  }
  return modes_[static_cast<std::size_t>(unit.value)];
}

void Core::on_bind(std::function<void(const Binding&)> callback) {
  const std::lock_guard<CallMutex> lock(mutex_);
  check_poison();
  on_bind_ = std::move(callback);
}

// -- what the cursor decides --

void Core::issue(Queue /*the item's kind says it*/, const Signature& signature, const Item& item) {
  switch (item.kind) {
    case ItemKind::vote:
      plane_->issue_vote(signature, cursor_->touched(), arguments_);
      break;
    case ItemKind::gather_gradient:
    case ItemKind::gather_parameter:
      plane_->issue_step_gather(signature, item, half_);
      break;
    case ItemKind::gather:
    case ItemKind::reduce:
      plane_->issue(signature, item, cursor_->written()[static_cast<std::size_t>(item.unit)] != 0);
      break;
  }
}

void Core::accumulate_locally(const Item& item) {
  if (cursor_->written()[static_cast<std::size_t>(item.unit)] != 0)
    plane_->accumulate_locally(item.unit);
}

void Core::wait(Queue queue, std::uint64_t count) {
  plane_->wait(queue, count);
}

void Core::use(std::int32_t position, std::int32_t /*micro*/) {
  const Position& at = cursor_->schedule().program[static_cast<std::size_t>(position)];
  const auto u = static_cast<std::size_t>(at.unit.value);
  const std::int64_t bytes = blueprint_.layout->units()[u].gradient_bytes;
  if (at.pass != Pass::backward || bytes == 0 || !cursor_->unwritten(at.unit)) return;
  fresh_gradient_ = true;
  const bool zero = blueprint_.options.gradient_mode == GradientMode::accumulate;
  if (zero || blueprint_.options.poison_slots) {
    plane_->fill({storage_->gradients(at.unit.value), static_cast<std::size_t>(bytes)},
                 zero ? 0 : 0xFF);
  }
}

void Core::released(std::int32_t /*position: bindings follow the unit's holds*/) {}

}  // namespace zshard::engine
