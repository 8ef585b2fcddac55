// Calls of RMSNorm: tokens spread over the threads.
#include <algorithm>
#include <new>

#include "token_sums.h"

K3_EXPORT int64_t k3_rms_norm(const K3RmsNorm* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    constexpr int64_t TOKENS = 8;
    const auto norm =
        call->dtype == K3_BFLOAT16 ? isa->steps->rms_norm_bf16 : isa->steps->rms_norm_float32;
    const k3::Team team(k3::useful_threads(call->threads, call->tokens * call->dim));
    team.run((call->tokens + TOKENS - 1) / TOKENS, [&](int64_t task, int64_t) {
        const int64_t last = std::min((task + 1) * TOKENS, call->tokens);
        for (int64_t token = task * TOKENS; token < last; token++) norm(*call, token);
    });
    return K3_OK;
}

K3_EXPORT int64_t k3_rms_norm_backward(const K3RmsNorm* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    const auto back = call->dtype == K3_BFLOAT16 ? isa->steps->rms_norm_back_bf16
                                                 : isa->steps->rms_norm_back_float32;
    const k3::Team team(k3::useful_threads(call->threads, call->tokens * call->dim));
    try {
        k3::run_with_sums(team, call->tokens, call->dim, call->d_weight,
                          [&](int64_t first, int64_t last, int64_t, float* d_weight) {
                              for (int64_t token = first; token < last; token++)
                                  back(*call, token, d_weight);
                          });
    } catch (const std::bad_alloc&) {
        return K3_OUT_OF_MEMORY;
    }
    return K3_OK;
}
