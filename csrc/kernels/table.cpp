#include "kernels/kernels.hpp"

namespace thinwire::THINWIRE_TARGET {

extern const Kernels kKernels = {
    .zfp_encode = zfp_encode,
    .zfp_decode = zfp_decode,
};

}  // namespace thinwire::THINWIRE_TARGET
