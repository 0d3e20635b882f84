// A rank of a process test, or the tests.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/process/scenario.hpp"

int main(int argc, char** argv) {
  if (argc == 4 && std::strcmp(argv[1], "--scenario") == 0) {
    return zshard::lab::Scenarios::run(argv[2], argv[3]);
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
