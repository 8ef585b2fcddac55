// What the library says about itself, and single kernels for tests and benchmarks.
#include <pthread.h>

#include <cstring>

#include "moe.h"

#ifndef K3_SOURCE_DIGEST
#define K3_SOURCE_DIGEST ""
#endif

namespace k3 {
namespace {

bool is_forked = false;

__attribute__((constructor)) void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { is_forked = true; });
}

}  // namespace

bool forked() { return is_forked; }

const Isa* isa_at(int64_t index) {
    const Isa* const all[NUM_ISAS] = {&AMX_BF16, &AVX512_BF16, &AVX2, &PORTABLE};
    return index >= 0 && index < NUM_ISAS ? all[index] : nullptr;
}

const Isa* choose_isa(int64_t index) {
    if (index >= 0) {
        const Isa* isa = isa_at(index);
        return isa != nullptr && isa->runs_here() ? isa : nullptr;
    }
    for (int64_t i = 0; i < NUM_ISAS; i++)
        if (isa_at(i)->runs_here()) return isa_at(i);
    return nullptr;
}

}  // namespace k3

K3_EXPORT void k3_decode(const uint8_t* packed, const uint8_t* scale, int64_t rows, int64_t groups,
                         uint16_t* out) {
    for (int64_t g = 0; g < rows * groups; g++)
        for (int64_t i = 0; i < 16; i++) {
            const uint16_t* values = k3::DECODE_TABLE.bits[scale[g]];
            out[g * k3::GROUP + 2 * i] = values[packed[g * 16 + i] & 15];
            out[g * k3::GROUP + 2 * i + 1] = values[packed[g * 16 + i] >> 4];
        }
}

K3_EXPORT int64_t k3_project(const K3Weight* weight, int64_t outputs, int64_t inputs, const void* x,
                             int64_t x_dtype, int64_t rows, int64_t transposed, int64_t threads,
                             int64_t isa_index, float* out) {
    const k3::Isa* isa = k3::choose_isa(isa_index);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    const bool is_bf16 = x_dtype == K3_BFLOAT16;
    const k3::Kernels& kernels = is_bf16 ? *isa->for_bf16 : *isa->for_float32;
    const k3::Weight w{weight->packed, weight->scale, weight->packed_row_stride,
                       weight->scale_row_stride, outputs, inputs};
    const int64_t value_bytes = kernels.rows_are_bf16 ? 2 : 4;
    const int64_t depth = transposed ? outputs : inputs, columns = transposed ? inputs : outputs;
    const k3::Team team(threads);
    // two tasks a thread, of whole panels
    const int64_t wanted = 2 * team.threads(), even = (columns + wanted - 1) / wanted;
    const int64_t step = std::min((even + 127) / 128 * 128, kernels.columns_of_few_rows);
    const int64_t scratch_bytes = (static_cast<int64_t>(kernels.scratch_bytes(0)) + 63) / 64 * 64;
    try {
        const k3::Buffer<char> values(rows * depth * value_bytes);
        const k3::Buffer<char> scratch(team.threads() * scratch_bytes);
        for (int64_t r = 0; r < rows; r++)
            kernels.load_row(static_cast<const char*>(x) + r * depth * (is_bf16 ? 2 : 4), is_bf16,
                             depth, values.data() + r * depth * value_bytes);
        const k3::Rows all{values.data(), depth, rows};
        team.run((columns + step - 1) / step, [&](int64_t task, int64_t thread) {
            const int64_t first = task * step, last = std::min(first + step, columns);
            char* own = scratch.data() + thread * scratch_bytes;
            if (transposed)
                kernels.project_back(all, w, first, last, out + first, columns, false, own);
            else
                kernels.project(all, w, first, last, out + first, columns, own);
        });
    } catch (const std::bad_alloc&) {
        return K3_OUT_OF_MEMORY;
    }
    return K3_OK;
}

K3_EXPORT void k3_situ(const float* gate, const float* up, const float* grad, int64_t n,
                       double beta, double linear_beta, int64_t isa, float* out, float* d_gate,
                       float* d_up) {
    const k3::Kernels& kernels = *k3::choose_isa(isa)->for_float32;
    const float b = static_cast<float>(beta), l = static_cast<float>(linear_beta);
    if (grad != nullptr)
        kernels.situ_back(gate, up, grad, n, 1.0f, b, l, d_gate, d_up, out);
    else
        kernels.situ(gate, up, n, b, l, out);
}

K3_EXPORT const char* k3_isa_name(int64_t isa) {
    return k3::isa_at(isa) == nullptr ? nullptr : k3::isa_at(isa)->name;
}

K3_EXPORT int64_t k3_isa_runs_here(int64_t isa) {
    return k3::isa_at(isa) != nullptr && k3::isa_at(isa)->runs_here();
}

K3_EXPORT const char* k3_source_digest(void) { return K3_SOURCE_DIGEST; }
