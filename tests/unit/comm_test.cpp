// Thread ranks and the calls of a process group: what they move, and what they say when ranks
// disagree, leave or are slow.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime/comm/control.hpp"
#include "runtime/comm/endpoint.hpp"
#include "runtime/memory/arena.hpp"
#include "zshard/error.hpp"
#include "zshard/process_group.hpp"

namespace zshard {
namespace {

using std::chrono::milliseconds;

#ifdef ZSHARD_SANITIZER
constexpr double kDeadline = 20.0;
#else
constexpr double kDeadline = 2.0;
#endif

template <class E, class Body>
std::string text_of(Body&& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing of that type was thrown";
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "no `" << part << "` in: " << text;
}

/// Every rank's CommError; "" where fn returned.
std::vector<std::string> comm_errors(int world, const std::function<void(ProcessGroup)>& fn,
                                     double deadline = kDeadline) {
  std::vector<std::string> texts(static_cast<std::size_t>(world));
  const auto start = std::chrono::steady_clock::now();
  run_ranks(world,
            [&](const ProcessGroup& group) {
              try {
                fn(group);
              } catch (const CommError& error) {
                texts[static_cast<std::size_t>(group.rank())] = error.what();
              }
            },
            {.deadline_seconds = deadline});
  const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
  EXPECT_LT(spent.count(), 2 * deadline + 2);
  return texts;
}

std::vector<std::byte> bytes_of(int rank, std::size_t count) {
  std::vector<std::byte> out(count);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = static_cast<std::byte>(rank * 31 + static_cast<int>(i % 97));
  }
  return out;
}

// -- what the calls move --

TEST(ProcessGroup, AllGatherBroadcastAndBarrierMoveBytesOfAnySize) {
  for (const int world : {1, 2, 3, 5, 8}) {
    for (const std::size_t count : {0, 1, 7, 4096, 100'003}) {
      run_ranks(world, [&](const ProcessGroup& group) {
        EXPECT_EQ(group.size(), world);
        const auto mine = bytes_of(group.rank(), count);
        std::vector<std::byte> all(count * static_cast<std::size_t>(world));
        group.all_gather(mine, all);
        for (int r = 0; r < world; ++r) {
          const auto theirs = bytes_of(r, count);
          EXPECT_TRUE(std::equal(theirs.begin(), theirs.end(),
                                 all.begin() + static_cast<std::ptrdiff_t>(r * theirs.size())));
        }
        for (int root = 0; root < world; ++root) {
          auto data = bytes_of(group.rank(), count);
          group.broadcast(data, root);
          EXPECT_EQ(data, bytes_of(root, count));
        }
        group.barrier();
      });
    }
  }
}

TEST(ProcessGroup, AllGatherWorksInPlace) {
  run_ranks(4, [&](const ProcessGroup& group) {
    std::vector<std::byte> all(4 * 64);
    const std::span<std::byte> mine(all.data() + group.rank() * 64, 64);
    for (int turn = 0; turn < 50; ++turn) {
      std::fill(mine.begin(), mine.end(), static_cast<std::byte>(group.rank() + turn));
      group.all_gather(mine, all);
      for (int r = 0; r < 4; ++r)
        EXPECT_EQ(all[static_cast<std::size_t>(r * 64)], static_cast<std::byte>(r + turn));
      group.barrier();  // before the next turn overwrites what peers may compare
    }
  });
}

TEST(ProcessGroup, ABarrierSeparates) {
  std::atomic<int> arrived{0};
  run_ranks(4, [&](const ProcessGroup& group) {
    for (int turn = 1; turn <= 200; ++turn) {
      ++arrived;
      group.barrier();
      EXPECT_GE(arrived.load(), 4 * turn);
      group.barrier();
      EXPECT_LT(arrived.load(), 4 * turn + 4);
      group.barrier();
    }
  });
}

TEST(ProcessGroup, CopiesAreTheSameRank) {
  run_ranks(2, [](const ProcessGroup& group) {
    const ProcessGroup copy = group;
    EXPECT_EQ(copy.rank(), group.rank());
    for (int i = 0; i < 10; ++i) (i % 2 == 0 ? copy : group).barrier();
  });
}

TEST(ProcessGroup, AGroupOfOneNeedsNobody) {
  const ProcessGroup single = ProcessGroup::single();
  EXPECT_EQ(single.rank(), 0);
  EXPECT_EQ(single.size(), 1);
  auto data = bytes_of(3, 10);
  std::vector<std::byte> all(10);
  single.all_gather(data, all);
  EXPECT_EQ(all, data);
  single.broadcast(data, 0);
  single.barrier();
}

TEST(ProcessGroup, AMeshHasOneAxisOfTheWorldsSize) {
  run_ranks(3, [](const ProcessGroup& group) {
    ASSERT_EQ(group.axes().size(), 1U);
    EXPECT_EQ(group.axes()[0].size, 3);
    EXPECT_EQ(group.mesh({{"data", 3}}).axes()[0].name, "data");
    expect_part(text_of<UsageError>([&] { (void)group.mesh({}); }), "0 axes");
    expect_part(text_of<UsageError>([&] { (void)group.mesh({{"a", 3}, {"b", 1}}); }), "2 axes");
    for (const int size : {0, -1, 1, 2, 4}) {
      expect_part(text_of<UsageError>([&] {
                    (void)group.mesh({{"data", size}});
                  }),
                  "size " + std::to_string(size));
    }
  });
}

// -- arguments --

TEST(ProcessGroup, BadSizesAndRootsAreUsageErrorsAndPeersMayGoOn) {
  run_ranks(2, [](const ProcessGroup& group) {
    std::vector<std::byte> mine(4), all(8);
    for (const std::size_t size : {0, 4, 7, 9, 16}) {
      std::vector<std::byte> wrong(size);
      expect_part(text_of<UsageError>([&] { group.all_gather(mine, wrong); }),
                  std::to_string(size) + " bytes, needs 2 x 4");
    }
    for (const int root : {-1, 2, 1 << 30}) {
      expect_part(text_of<UsageError>([&] { group.broadcast(all, root); }),
                  "root " + std::to_string(root));
    }
    group.all_gather(mine, all);
  });
}

TEST(RunRanks, RefusesNumbersAndDeadlinesOutOfRange) {
  for (const int n : {0, -1, 1025, 1 << 30}) {
    expect_part(text_of<UsageError>([&] { run_ranks(n, [](const ProcessGroup&) {}); }),
                "n is " + std::to_string(n));
  }
  for (const double deadline : {0.0, -1.0, std::nan(""), HUGE_VAL}) {
    expect_part(text_of<UsageError>([&] {
                  run_ranks(1, [](const ProcessGroup&) {}, {.deadline_seconds = deadline});
                }),
                "deadline_seconds");
  }
  expect_part(text_of<UsageError>([&] { run_ranks(1, nullptr); }), "no function");
}

#ifndef ZSHARD_SANITIZER
TEST(RunRanks, RunsManyRanks) {
  std::atomic<int> seen{0};
  run_ranks(200, [&](const ProcessGroup& group) {
    ++seen;
    group.barrier();
    EXPECT_EQ(seen.load(), 200);
  });
}
#endif

// -- errors --

TEST(RunRanks, TheErrorThatCameFirstIsRethrownWithItsType) {
  const auto throw_at = [](int world, int first, auto&& early, auto&& late) {
    run_ranks(world, [&](const ProcessGroup& group) {
      if (group.rank() == first) early();
      std::this_thread::sleep_for(milliseconds(50));
      late();
    });
  };
  const auto runtime = [] { throw std::runtime_error("late"); };
  EXPECT_EQ(text_of<OutOfMemory>([&] {
              throw_at(
                  3, 2, [] { throw OutOfMemory("early"); }, runtime);
            }),
            "early");
  EXPECT_EQ(text_of<CommError>([&] {
              throw_at(
                  3, 1, [] { throw CommError("early"); }, runtime);
            }),
            "early");
  EXPECT_EQ(text_of<std::logic_error>([&] {
              throw_at(
                  2, 0, [] { throw std::logic_error("early"); }, runtime);
            }),
            "early");
  EXPECT_THROW(throw_at(
                   2, 0, [] { throw 7; }, runtime),
               int);
}

TEST(RunRanks, AnErrorIsReportedAndNotWhatItCausesOnPeers) {
  for (int turn = 0; turn < 20; ++turn) {
    const std::string text = text_of<std::logic_error>([&] {
      run_ranks(4, [&](const ProcessGroup& group) {
        if (group.rank() == turn % 4) throw std::logic_error("the cause");
        group.barrier();
      });
    });
    EXPECT_EQ(text, "the cause");
  }
}

TEST(ProcessGroup, ARankThatThrowsOrReturnsIsNamedWithTheReason) {
  const auto thrown = comm_errors(3, [](const ProcessGroup& group) {
    if (group.rank() == 1) throw CommError("my own");
    group.barrier();
  });
  // comm_errors catches it, so the rank's function returned.
  for (const std::size_t r : {0, 2}) expect_part(thrown[r], "rank 1 is gone (its function has");
  EXPECT_EQ(text_of<std::runtime_error>([] {
              run_ranks(2, [](const ProcessGroup& group) {
                if (group.rank() == 0) throw std::runtime_error("the reason");
                const std::string text = text_of<CommError>([&] { group.barrier(); });
                expect_part(text, "rank 0 is gone (it threw: the reason)");
                expect_part(text, "barrier");
                expect_part(text, "on rank 1");
              });
            }),
            "the reason");
  EXPECT_THROW(run_ranks(2,
                         [](const ProcessGroup& group) {
                           if (group.rank() == 0) throw 5;
                           expect_part(text_of<CommError>([&] { group.barrier(); }),
                                       "no std::exception");
                         }),
               int);
}

TEST(ProcessGroup, DifferentCallsAreACommErrorOnEveryRankThatNamesBoth) {
  struct Case {
    std::string what;
    std::function<void(const ProcessGroup&)> odd;
    std::function<void(const ProcessGroup&)> other;
    std::vector<std::string> parts;
  };
  const auto gather = [](std::size_t count) {
    return [count](const ProcessGroup& g) {
      std::vector<std::byte> mine(count), all(3 * count);
      g.all_gather(mine, all);
    };
  };
  const auto cast = [](std::size_t count, int root) {
    return [=](const ProcessGroup& g) {
      std::vector<std::byte> data(count);
      g.broadcast(data, root);
    };
  };
  const auto barrier = [](const ProcessGroup& g) { g.barrier(); };
  const std::vector<Case> cases = {
      {"barrier and all_gather", gather(8), barrier, {"barrier", "all_gather (8 bytes"}},
      {"barrier and an empty all_gather", gather(0), barrier, {"barrier", "all_gather"}},
      {"barrier and broadcast", cast(8, 0), barrier, {"barrier", "broadcast (8 bytes, root 0)"}},
      {"sizes", gather(9), gather(8), {"8 bytes", "9 bytes"}},
      {"roots", cast(8, 2), cast(8, 1), {"root 1", "root 2"}},
      {"broadcast sizes", cast(4, 0), cast(8, 0), {"4 bytes", "8 bytes"}},
  };
  for (const Case& c : cases) {
    for (int odd = 0; odd < 3; ++odd) {
      const auto texts = comm_errors(3, [&](const ProcessGroup& group) {
        group.barrier();
        (group.rank() == odd ? c.odd : c.other)(group);
      });
      for (const std::string& text : texts) {
        EXPECT_EQ(text, texts[0]) << c.what;
        expect_part(text, "rank 0 ");
        expect_part(text, "rank " + std::to_string(odd == 0 ? 1 : odd) + " ");
        for (const std::string& part : c.parts) expect_part(text, part);
      }
    }
  }
}

TEST(ProcessGroup, ASlowRankIsNamedAfterTheDeadlineAndTheGroupStaysBroken) {
  const auto texts = comm_errors(
      3,
      [](const ProcessGroup& group) {
        if (group.rank() == 2) std::this_thread::sleep_for(milliseconds(700));
        const std::string text = text_of<CommError>([&] { group.barrier(); });
        // Later calls throw at once.
        const auto start = std::chrono::steady_clock::now();
        std::vector<std::byte> data(4);
        for (int i = 0; i < 5; ++i) {
          const std::string again = text_of<CommError>([&] { group.broadcast(data, 0); });
          expect_part(again, "the group has failed");
          expect_part(again, "rank 2 did not arrive");
        }
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
        EXPECT_LT(spent.count(), 0.2);
        throw CommError(text);
      },
      0.2);
  for (const std::size_t r : {0, 1}) expect_part(texts[r], "rank 2 did not arrive within 0.2");
  expect_part(texts[2], "the group has failed");
}

TEST(ProcessGroup, ARankBelowTheDeadlineIsWaitedFor) {
  const auto texts = comm_errors(3, [](const ProcessGroup& group) {
    for (int turn = 0; turn < 3; ++turn) {
      if (group.rank() == turn) std::this_thread::sleep_for(milliseconds(80));
      group.barrier();
    }
  });
  for (const std::string& text : texts) EXPECT_EQ(text, "");
}

TEST(ProcessGroup, AtTheDeadlineACallEitherTakesPlaceOnAllRanksOrOnNone) {
  // The late rank comes just when the others give up.
  int complete = 0;
  int failed = 0;
  for (int turn = 0; turn < 60; ++turn) {
    std::atomic<int> through{0};
    const auto start = std::chrono::steady_clock::now();
    std::vector<std::string> texts(3);
    run_ranks(3,
              [&](const ProcessGroup& group) {
                auto mine = bytes_of(group.rank(), 64);
                std::vector<std::byte> all(3 * 64);
                // Others are asked once in 20 ms: the deadline is noticed a little after it.
                if (group.rank() == 1) {
                  std::this_thread::sleep_for(std::chrono::microseconds(20'000 + turn * 60));
                }
                try {
                  group.all_gather(mine, all);
                  ++through;
                  for (int r = 0; r < 3; ++r) {
                    EXPECT_EQ(all[static_cast<std::size_t>(r) * 64], bytes_of(r, 64)[0]);
                  }
                } catch (const CommError& error) {
                  texts[static_cast<std::size_t>(group.rank())] = error.what();
                }
                // What a failed call shows to peers goes here.
                std::fill(mine.begin(), mine.end(), std::byte{0xFF});
              },
              {.deadline_seconds = 0.020});
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    EXPECT_LT(spent.count(), 1.0);
    if (through.load() == 3) {
      ++complete;
    } else {
      ++failed;
      // On a busy machine another rank may be the late one.
      for (const std::string& text : texts) expect_part(text, "did not arrive");
    }
    EXPECT_TRUE(through.load() == 0 || through.load() == 3) << through.load();
  }
  EXPECT_EQ(complete + failed, 60);
}

// -- the environment --

/// Sets variables for a while; nothing else of this process reads them meanwhile.
class Environment {
 public:
  explicit Environment(std::vector<std::pair<std::string, std::string>> values) {
    for (const char* name : kNames) unsetenv(name);
    for (const auto& [name, value] : values) setenv(name.c_str(), value.c_str(), 1);
  }
  Environment(const Environment&) = delete;
  Environment& operator=(const Environment&) = delete;
  ~Environment() {
    for (const char* name : kNames) unsetenv(name);
  }

 private:
  static constexpr const char* kNames[] = {"RANK",
                                           "WORLD_SIZE",
                                           "LOCAL_RANK",
                                           "LOCAL_WORLD_SIZE",
                                           "MASTER_PORT",
                                           "PMI_RANK",
                                           "PMI_SIZE",
                                           "OMPI_COMM_WORLD_RANK",
                                           "OMPI_COMM_WORLD_SIZE",
                                           "SLURM_PROCID",
                                           "SLURM_STEP_NUM_TASKS"};
};

TEST(ProcessGroup, AnEnvironmentWithoutLauncherOrOfOneRankIsAGroupOfOne) {
  {
    const Environment none({});
    EXPECT_EQ(ProcessGroup::from_environment().size(), 1);
  }
  const Environment one({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(ProcessGroup::from_environment().size(), 1);
}

TEST(ProcessGroup, AnEnvironmentThatMakesNoSenseIsAUsageErrorThatNamesTheVariable) {
  struct Case {
    std::vector<std::pair<std::string, std::string>> values;
    std::string part;
  };
  const std::vector<Case> cases = {
      {{{"WORLD_SIZE", "4"}}, "RANK is not set"},
      {{{"RANK", "1"}}, "WORLD_SIZE is not set"},
      {{{"WORLD_SIZE", "0"}, {"RANK", "0"}}, "WORLD_SIZE=0"},
      {{{"WORLD_SIZE", "-1"}, {"RANK", "0"}}, "WORLD_SIZE=-1"},
      {{{"WORLD_SIZE", "four"}, {"RANK", "0"}}, "WORLD_SIZE=four"},
      {{{"WORLD_SIZE", "4x"}, {"RANK", "0"}}, "WORLD_SIZE=4x"},
      {{{"WORLD_SIZE", "99999999999999999999"}, {"RANK", "0"}}, "WORLD_SIZE=9999"},
      {{{"WORLD_SIZE", "4"}, {"RANK", "4"}}, "RANK=4"},
      {{{"WORLD_SIZE", "4"}, {"RANK", "-1"}}, "RANK=-1"},
      {{{"WORLD_SIZE", "4"}, {"RANK", "1"}, {"LOCAL_RANK", "4"}}, "LOCAL_RANK=4"},
      {{{"OMPI_COMM_WORLD_SIZE", "4"}}, "OMPI_COMM_WORLD_RANK is not set"},
      {{{"PMI_SIZE", "2"}}, "PMI_RANK is not set"},
      {{{"SLURM_STEP_NUM_TASKS", "2"}}, "SLURM_PROCID is not set"},
  };
  for (const Case& c : cases) {
    const Environment environment(c.values);
    expect_part(text_of<UsageError>([] { (void)ProcessGroup::from_environment(); }), c.part);
  }
}

// A rank without a core for a while is not elsewhere: its peers wait for it.
TEST(ControlBoard, ARankThatIsSlowToLeaveACallThatIsOverIsInNone) {
  constexpr int kRanks = 3;
  const auto memory =
      memory::Arena::make(static_cast<std::int64_t>(comm::ControlBoard::bytes(kRanks)));
  const comm::ControlBoard board(memory->data(), kRanks);
  for (int r = 0; r < kRanks; ++r) {
    board.rank(r).arrived.store(5);
    board.rank(r).done.store(4);
  }
  EXPECT_EQ(board.inside(2), std::nullopt);
  board.rank(2).inside.store(static_cast<std::uint32_t>(comm::Operation::initialize) + 1);
  EXPECT_EQ(board.inside(2), comm::Operation::initialize);
  for (int r = 0; r < kRanks; ++r) {
    EXPECT_EQ(board.inside(2), comm::Operation::initialize) << r << " ranks have finished it";
    board.rank(r).done.store(5);
  }
  EXPECT_EQ(board.inside(2), std::nullopt);
}

// -- meetings of the data plane --

TEST(Endpoint, SaysWhichMeetingWaitsForWhom) {
  std::atomic<bool> looked{false};
  run_ranks(3, [&](const ProcessGroup& group) {
    comm::Endpoint endpoint(
        group.implementation(), group.implementation()->make_board(8, 8), 20,
        [](const comm::PackedSignature& s) { return "item " + std::to_string(s[0]); });
    EXPECT_EQ(endpoint.waits(), "");
    for (const std::uint64_t i : {0, 1}) endpoint.publish(i, {40 + i});
    EXPECT_EQ(endpoint.text(1), "item 41");
    endpoint.meet(comm::Lane::gather, 0, 0);
    endpoint.finish(comm::Lane::gather);
    if (group.rank() == 1) {
      while (!looked) std::this_thread::yield();
    }
    std::thread watcher;
    if (group.rank() == 0) {
      watcher = std::thread([&] {
        std::string text;
        while ((text = endpoint.waits()).empty()) std::this_thread::yield();
        EXPECT_EQ(text, "item 41 waits for rank 1");
        looked = true;
      });
    }
    endpoint.meet(comm::Lane::reduce, 1, 0);
    endpoint.part(comm::Lane::reduce);
    if (watcher.joinable()) watcher.join();
    group.barrier();
    EXPECT_EQ(endpoint.waits(), "");
    group.barrier();  // a peer's endpoint that has gone is another matter
  });
}

}  // namespace
}  // namespace zshard
