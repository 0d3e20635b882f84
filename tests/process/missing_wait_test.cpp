// The thread sanitizer finds a wait for an event that is left out: the data plane and the cursor as
// the engine joins them, but without the wait between a gather and the use of what it brings. On a
// device the same mistake is a race that shows now and then; here it is a report each time.
#include "tests/process/scenario.hpp"

#ifdef __SANITIZE_THREAD__

#include <gtest/gtest.h>

#include "runtime/comm/endpoint.hpp"
#include "runtime/engine/blueprint.hpp"
#include "runtime/engine/cursor.hpp"
#include "runtime/engine/data_plane.hpp"
#include "runtime/engine/storage.hpp"
#include "runtime/kernels/pool.hpp"

namespace zshard {
namespace {

using lab::Json;

EngineOptions concurrent() {
  EngineOptions options = lab::at_stage(3);
  options.poison_slots = false;
  options.test_delay_microseconds = 500;
  return options;
}

/// What reads gathered parameters, and waits for them or does not.
class Reader final : private engine::CursorSink {
 public:
  Reader(const ModelSpec& spec, comm::Group& group, std::shared_ptr<comm::Group> shared, bool waits)
      : blueprint_(engine::Blueprint::make(spec, AdamW{}, group.size(), concurrent())),
        storage_(blueprint_, group, nullptr),
        pool_(1),
        waits_(waits) {
    storage_.share(group);
    endpoint_ = std::make_unique<comm::Endpoint>(
        std::move(shared),
        group.make_board(4 * engine::DataPlane::queue_capacity(blueprint_),
                         engine::DataPlane::vote_bytes(blueprint_)),
        lab::kDeadline, [this](const comm::PackedSignature& s) {
          return engine::DataPlane::describe(blueprint_, s);
        });
    plane_ = std::make_unique<engine::DataPlane>(blueprint_, storage_, *endpoint_, pool_, nullptr,
                                                 group.rank());
    cursor_ = std::make_unique<engine::Cursor>(&blueprint_.training, &blueprint_.evaluation, true,
                                               static_cast<engine::CursorSink*>(this));
  }

  float sum() {
    float total = 0.0f;
    cursor_->evaluation_passes(3);
    while (cursor_->next_micro_step()) {
      for (int u = 0; u < static_cast<int>(blueprint_.spec.units().size()); ++u) {
        cursor_->acquire(lab::unit(u), Pass::forward);
        const auto* values =
            reinterpret_cast<const float*>(storage_.slot(cursor_->address(lab::unit(u)), u, 0));
        // Long enough for the queue to come to it, and without a call that would order the two.
        for (int turn = 0; turn < 20; ++turn) {
          for (int i = 0; i < 5; ++i) total += values[i];
          std::this_thread::sleep_for(std::chrono::microseconds(300));
        }
        cursor_->release(lab::unit(u), Pass::forward);
      }
    }
    plane_->drain();
    return total;
  }

 private:
  void issue(engine::Queue, const engine::Signature& signature, const engine::Item& item) override {
    plane_->issue(signature, item, false);
  }
  void wait(engine::Queue queue, std::uint64_t count) override {
    if (waits_) {
      plane_->wait(queue, count);
    } else {
      plane_->kick();
    }
  }
  void accumulate_locally(const engine::Item&) override {}
  void use(std::int32_t, std::int32_t) override {}
  void released(std::int32_t) override {}

  engine::Blueprint blueprint_;
  engine::Storage storage_;
  kernels::Pool pool_;
  bool waits_;
  std::unique_ptr<comm::Endpoint> endpoint_;
  std::unique_ptr<engine::DataPlane> plane_;
  std::unique_ptr<engine::Cursor> cursor_;
};

const lab::Scenario reading("read gathered parameters", [](const Json& a) {
  run_ranks(2, [&](const ProcessGroup& group) {
    Reader reader(lab::small_model(), *group.implementation(), group.implementation(), a["waits"]);
    if (reader.sum() != 0.0f) throw Error("parameters are zero at birth");
  });
});

TEST(MissingWait, IsAReportOfTheThreadSanitizer) {
  for (const bool waits : {true, false}) {
    lab::Children children(lab::kJobSeconds);
    children.start(lab::command_of("read gathered parameters", {{"waits", waits}}),
                   {{"TSAN_OPTIONS", "halt_on_error=0:exitcode=66"}});
    const lab::Ending end = children.wait(0);
    const bool reported = end.output.find("ThreadSanitizer: data race") != std::string::npos;
    EXPECT_EQ(reported, !waits) << end.text();
    EXPECT_EQ(end.code(), waits ? 0 : 66) << end.text();
    if (!waits) {
      EXPECT_NE(end.output.find("DataPlane::"), std::string::npos) << end.text();
      EXPECT_NE(end.output.find("missing_wait_test.cpp"), std::string::npos) << end.text();
    }
  }
}

}  // namespace
}  // namespace zshard

#endif
