// A program that encodes and decodes with every target of the machine it runs on, for tests on another architecture.
//
// Standard input holds jobs: a line `CODEC DTYPE NUMEL SEED PARAMETER...` (numbers as in the bindings), then the
// values. For each job and target, standard output gets a line `TARGET BYTES`, the message, and the values that it
// decodes to.
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "codec.hpp"
#include "target.hpp"

namespace {

using thinwire::DType;

struct Job {
    std::string codec;
    DType dtype;
    std::int64_t numel;
    std::uint32_t seed;
    thinwire::Parameters parameters;
    std::vector<char> values;
};

bool read_job(Job& job) {
    std::string line;
    if (!std::getline(std::cin, line)) {
        return false;
    }
    std::istringstream words(line);
    std::int64_t dtype = 0;
    words >> job.codec >> dtype >> job.numel >> job.seed;
    job.dtype = thinwire::dtype_of(dtype);
    job.parameters.clear();
    for (std::int64_t parameter = 0; words >> parameter;) {
        job.parameters.push_back(parameter);
    }
    job.values.resize(static_cast<std::size_t>(job.numel * (job.dtype == DType::float32 ? 4 : 2)));
    std::cin.read(job.values.data(), std::ssize(job.values));
    return std::cin.gcount() == std::ssize(job.values);
}

std::vector<char> encoded(const Job& job, std::vector<char>& decoded) {
    if (thinwire::codec_kind(job.codec).make_fixed != nullptr) {
        const thinwire::Codec codec(job.codec, job.parameters);
        std::vector<char> wire(static_cast<std::size_t>(codec.wire_bytes(job.numel)));
        codec.encode(job.values.data(), job.dtype, job.numel, wire.data(), std::ssize(wire), job.seed, 1);
        codec.decode(wire.data(), std::ssize(wire), job.numel, decoded.data(), job.dtype, false, 1);
        return wire;
    }
    const auto codec = thinwire::make_lossless(job.codec, job.parameters);
    std::vector<char> wire(static_cast<std::size_t>(codec->wire_bytes(job.numel, job.dtype)));
    const std::int64_t nbytes =
        codec->encode(job.values.data(), job.dtype, job.numel, wire.data(), std::ssize(wire), 1);
    wire.resize(static_cast<std::size_t>(nbytes));
    codec->decode(wire.data(), nbytes, job.numel, job.dtype, decoded.data(), job.dtype, false, 1);
    return wire;
}

}  // namespace

int main() {
    Job job;
    while (read_job(job)) {
        for (const std::string& target : thinwire::targets()) {
            thinwire::use_target(target);
            std::vector<char> decoded(job.values.size());
            const std::vector<char> wire = encoded(job, decoded);
            std::cout << target << ' ' << wire.size() << '\n';
            std::cout.write(wire.data(), std::ssize(wire));
            std::cout.write(decoded.data(), std::ssize(decoded));
        }
    }
}
