// Which instruction set the kernels use.
#pragma once

#include <string>
#include <vector>

#include "kernels/kernels.hpp"

namespace thinwire {

// The kernels in use. Chosen when the module is loaded: the best that this CPU supports, or what the environment
// variable THINWIRE_CPU_TARGET names.
const Kernels& kernels();

// Names of the targets that this CPU supports, the plainest first.
std::vector<std::string> targets();

// The name of the target in use.
std::string target();

// Uses another target from now on. Throws std::invalid_argument, which names the valid ones.
void use_target(const std::string& name);

// What loading the module does. Throws as use_target does.
void choose_target();

}  // namespace thinwire
