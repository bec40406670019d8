#include "bind.hpp"

#include "target.hpp"

NB_MODULE(_native, module) {
    module.doc() = "Native codecs; their types are in _native.pyi.";
    // Codecs are kept until the process ends; nothing of theirs needs to be released then.
    nanobind::set_leak_warnings(false);
    thinwire::choose_target();
    thinwire::bind_target(module);
    thinwire::bind_delta(module);
    thinwire::bind_fixed(module);
    thinwire::bind_lossless(module);
}
