#include "kernels/kernels.hpp"

namespace thinwire::THINWIRE_TARGET {

extern const Kernels kKernels = {
    .block_encode = block_encode,
    .block_decode = block_decode,
    .block_largest = block_largest,
    .block_encode_part = block_encode_part,
    .cast = cast,
    .multiply = multiply,
    .exp3_count = exp3_count,
    .exp3_encode = exp3_encode,
    .exp3_announced = exp3_announced,
    .exp3_decode = exp3_decode,
    .mpc_count = mpc_count,
    .mpc_encode = mpc_encode,
    .mpc_announced = mpc_announced,
    .mpc_decode = mpc_decode,
    .zfp_encode = zfp_encode,
    .zfp_decode = zfp_decode,
};

}  // namespace thinwire::THINWIRE_TARGET
