#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "target.hpp"

namespace thinwire {

void bind_target(nanobind::module_& module) {
    module.def("targets", &targets);
    module.def("target", &target);
    module.def("use_target", &use_target, nanobind::arg("name"));
}

}  // namespace thinwire
