// Calls of the small kernels: tokens or rows spread over the threads.
#include <algorithm>
#include <new>

#include "moe.h"
#include "token_sums.h"

K3_EXPORT int64_t k3_mix(const K3Mix* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    constexpr int64_t TOKENS = 8;
    const auto mix = call->dtype == K3_BFLOAT16 ? isa->steps->mix_bf16 : isa->steps->mix_float32;
    const k3::Team team(
        k3::useful_threads(call->threads, call->tokens * call->dim * call->num_sources));
    team.run((call->tokens + TOKENS - 1) / TOKENS, [&](int64_t task, int64_t) {
        const int64_t last = std::min((task + 1) * TOKENS, call->tokens);
        for (int64_t token = task * TOKENS; token < last; token++) mix(*call, token);
    });
    return K3_OK;
}

K3_EXPORT int64_t k3_mix_backward(const K3Mix* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    const auto back =
        call->dtype == K3_BFLOAT16 ? isa->steps->mix_back_bf16 : isa->steps->mix_back_float32;
    const int64_t products = 2 * call->num_sources;
    const k3::Team team(
        k3::useful_threads(call->threads, call->tokens * call->dim * call->num_sources));
    try {
        const k3::Buffer<float> scratch(team.threads() * products);
        k3::run_with_sums(team, call->tokens, call->dim, call->d_query,
                          [&](int64_t first, int64_t last, int64_t thread, float* d_query) {
                              for (int64_t token = first; token < last; token++)
                                  back(*call, token, scratch.data() + thread * products, d_query);
                          });
    } catch (const std::bad_alloc&) {
        return K3_OUT_OF_MEMORY;
    }
    return K3_OK;
}

K3_EXPORT int64_t k3_kda_step(const K3KdaStep* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    constexpr int64_t ROWS = 4;
    const int64_t width = call->heads * call->head_dim;
    const k3::Team team(
        k3::useful_threads(call->threads, call->rows * width * call->head_dim));
    try {
        const k3::Buffer<float> scratch(team.threads() * 4 * width);
        team.run((call->rows + ROWS - 1) / ROWS, [&](int64_t task, int64_t thread) {
            const int64_t last = std::min((task + 1) * ROWS, call->rows);
            for (int64_t row = task * ROWS; row < last; row++)
                isa->steps->kda_step(*call, row, scratch.data() + thread * 4 * width);
        });
    } catch (const std::bad_alloc&) {
        return K3_OUT_OF_MEMORY;
    }
    return K3_OK;
}

K3_EXPORT int64_t k3_latent_attention(const K3LatentAttention* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    int64_t places = 0, most = 0;
    for (int64_t row = 0; row < call->rows; row++) {
        places += call->last_place[row] + 1;
        most = std::max(most, call->last_place[row] + 1);
    }
    const int64_t scores = call->heads * most;
    const int64_t work = places * call->heads * (call->dim + call->value_dim);
    const k3::Team team(std::min(call->threads, 1 + work / k3::PRODUCTS_PER_THREAD));
    try {
        const k3::Buffer<float> scratch(team.threads() * scores);
        team.run(call->rows, [&](int64_t row, int64_t thread) {
            isa->steps->latent_attention(*call, row, scratch.data() + thread * scores);
        });
    } catch (const std::bad_alloc&) {
        return K3_OUT_OF_MEMORY;
    }
    return K3_OK;
}

K3_EXPORT int64_t k3_situ_glu(const K3SituGlu* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    const k3::Kernels& kernels = *isa->for_float32;
    constexpr int64_t VALUES = 4096;
    const float beta = static_cast<float>(call->beta);
    const float linear_beta = static_cast<float>(call->linear_beta);
    const k3::Team team(k3::useful_threads(call->threads, call->values));
    team.run((call->values + VALUES - 1) / VALUES, [&](int64_t task, int64_t) {
        const int64_t at = task * VALUES, count = std::min(VALUES, call->values - at);
        if (call->grad == nullptr)
            kernels.situ(call->gate + at, call->up + at, count, beta, linear_beta, call->out + at);
        else
            kernels.situ_back(call->gate + at, call->up + at, call->grad + at, count, 1.0f, beta,
                              linear_beta, call->d_gate + at, call->d_up + at, nullptr);
    });
    return K3_OK;
}
