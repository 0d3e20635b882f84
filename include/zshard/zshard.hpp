// Everything that a loop needs.
#pragma once

#include "zshard/engine.hpp"
#include "zshard/error.hpp"
#include "zshard/memory_plan.hpp"
#include "zshard/model_spec.hpp"
#include "zshard/optimizer.hpp"
#include "zshard/options.hpp"
#include "zshard/process_group.hpp"
#include "zshard/sharded_optimizer.hpp"
#include "zshard/types.hpp"
