// Calls of the short convolution: rows and blocks of channels spread over the threads.
#include <algorithm>
#include <new>

#include "token_sums.h"

namespace k3 {
namespace {

// block(row, channel, count) for the blocks of channels of each row
template <class Block>
void run_blocks(const K3ShortConvolution& call, const Block& block) {
    const int64_t blocks = (call.channels + CONVOLUTION_CHANNELS - 1) / CONVOLUTION_CHANNELS;
    const Team team(useful_threads(call.threads, call.rows * call.tokens * call.channels));
    team.run(call.rows * blocks, [&](int64_t task, int64_t) {
        const int64_t channel = task % blocks * CONVOLUTION_CHANNELS;
        block(task / blocks, channel, std::min(CONVOLUTION_CHANNELS, call.channels - channel));
    });
}

}  // namespace
}  // namespace k3

K3_EXPORT int64_t k3_short_convolution(const K3ShortConvolution* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    const auto convolve = call->dtype == K3_BFLOAT16 ? isa->steps->short_convolution_bf16
                                                     : isa->steps->short_convolution_float32;
    k3::run_blocks(*call, [&](int64_t row, int64_t channel, int64_t count) {
        convolve(*call, row, channel, count);
    });
    return K3_OK;
}

K3_EXPORT int64_t k3_short_convolution_backward(const K3ShortConvolution* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    const auto back = call->dtype == K3_BFLOAT16 ? isa->steps->short_convolution_back_bf16
                                                 : isa->steps->short_convolution_back_float32;
    const bool sums = call->d_taps != nullptr;
    const int64_t width = K3_CONVOLUTION_TAPS * call->channels;
    try {
        const k3::Buffer<float> d_taps(sums ? call->rows * width : 0);
        if (sums)
            k3::clear_bytes(d_taps.data(),
                            call->rows * width * static_cast<int64_t>(sizeof(float)));
        k3::run_blocks(*call, [&](int64_t row, int64_t channel, int64_t count) {
            back(*call, row, channel, count,
                 sums ? d_taps.data() + row * width + channel : nullptr);
        });
        if (sums) k3::add_rows(d_taps.data(), call->rows, width, call->d_taps);
    } catch (const std::bad_alloc&) {
        return K3_OUT_OF_MEMORY;
    }
    return K3_OK;
}
