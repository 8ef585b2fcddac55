// What an instruction set offers to the op: products over packed weights, and the small products
// of LoRA around them. Rows are activations gathered by expert, in bf16 or fp32; every result is
// fp32. No function allocates, and none depends on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "k3tune_cpu.h"
#include "mxfp4.h"

namespace k3 {

// A LoRA factor of one expert, row-major.
struct Factor {
    const void* data;
    bool is_bf16;
};

// Activation rows of one expert.
struct Rows {
    const void* data;
    int64_t stride;  // in values
    int64_t count;
};

// Columns of the big products a call works on at most.
constexpr int64_t MOST_COLUMNS = 4096;

struct Kernels {
    bool rows_are_bf16;
    // Columns to give a call: of few rows, which then reads long runs of bytes, and of many.
    int64_t columns_of_few_rows, columns_of_many_rows;

    // out[t, o - first] = rows[t] . W[o] for outputs first <= o < last, multiples of 32
    // and at most MOST_COLUMNS of them.
    void (*project)(Rows rows, const Weight& weight, int64_t first, int64_t last, float* out,
                    int64_t out_stride, void* scratch);
    // out[t, i - first] (+)= sum_o rows[t, o] W[o, i] for inputs first <= i < last.
    void (*project_back)(Rows rows, const Weight& weight, int64_t first, int64_t last, float* out,
                         int64_t out_stride, bool add, void* scratch);
    // narrow[t, r] = scaling * rows[t] . A[r], with A [rank, width].
    void (*shrink)(Rows rows, Factor A, int64_t rank, int64_t width, float scaling, float* narrow,
                   int64_t narrow_stride);
    // narrow[t, r] = scaling * sum_o rows[t, o] B[o, r], with B [width, rank].
    void (*shrink_back)(Rows rows, Factor B, int64_t rank, int64_t width, float scaling,
                        float* narrow, int64_t narrow_stride, void* scratch);
    // out[t, o - first] += narrow[t] . B[o].
    void (*expand)(const float* narrow, int64_t narrow_stride, int64_t count, Factor B,
                   int64_t rank, int64_t first, int64_t last, float* out, int64_t out_stride,
                   void* scratch);
    // out[t, i - first] += sum_r narrow[t, r] A[r, i], with A [rank, width].
    void (*expand_back)(const float* narrow, int64_t narrow_stride, int64_t count, Factor A,
                        int64_t rank, int64_t width, int64_t first, int64_t last, float* out,
                        int64_t out_stride);
    // dA[r, i] (+)= sum_t narrow[t, r] rows[t, i] for first <= i < last, with dA [rank, width].
    void (*gram_A)(const float* narrow, int64_t narrow_stride, int64_t rank, Rows rows,
                   int64_t width, int64_t first, int64_t last, float* dA, bool add);
    // dB[o, r] (+)= sum_t rows[t, o] narrow[t, r] for first <= o < last, with dB [width, rank].
    void (*gram_B)(const float* narrow, int64_t narrow_stride, int64_t rank, Rows rows,
                   int64_t first, int64_t last, float* dB, bool add, void* scratch);
    // hidden[i] = SiTU(gate[i], up[i]), stored as a row value.
    void (*situ)(const float* gate, const float* up, int64_t n, float beta, float linear_beta,
                 void* hidden);
    // From the gradient of hidden before the routing weight: row values of d_gate, d_up (weighted)
    // and hidden (may be null); returns sum_i d_hidden[i] * hidden[i].
    float (*situ_back)(const float* gate, const float* up, const float* d_hidden, int64_t n,
                       float weight, float beta, float linear_beta, void* d_gate, void* d_up,
                       void* hidden);
    // One row of n values of x, into row values.
    void (*load_row)(const void* source, bool source_is_bf16, int64_t n, void* row);
    // sum[i] (+)= factor * row[i].
    void (*accumulate)(const float* row, float factor, int64_t n, float* sum, bool add);
    // fp32 to x's dtype, rounded to nearest even.
    void (*store_row)(const float* sum, int64_t n, void* target, bool target_is_bf16);

    size_t (*scratch_bytes)(int64_t rank);
};

// Channels of a row that a task of the short convolution takes.
constexpr int64_t CONVOLUTION_CHANNELS = 256;

// One token, or one row, of the calls of k3tune_cpu.h.
struct StepKernels {
    void (*mix_float32)(const K3Mix& call, int64_t token);
    void (*mix_bf16)(const K3Mix& call, int64_t token);
    void (*mix_back_float32)(const K3Mix& call, int64_t token, float* products, float* d_query);
    void (*mix_back_bf16)(const K3Mix& call, int64_t token, float* products, float* d_query);
    void (*rms_norm_float32)(const K3RmsNorm& call, int64_t token);
    void (*rms_norm_bf16)(const K3RmsNorm& call, int64_t token);
    void (*rms_norm_back_float32)(const K3RmsNorm& call, int64_t token, float* d_weight);
    void (*rms_norm_back_bf16)(const K3RmsNorm& call, int64_t token, float* d_weight);
    // `count` channels of a row from `channel` on; d_taps begins there and has rows of all channels.
    void (*short_convolution_float32)(const K3ShortConvolution& call, int64_t row, int64_t channel,
                                      int64_t count);
    void (*short_convolution_bf16)(const K3ShortConvolution& call, int64_t row, int64_t channel,
                                   int64_t count);
    void (*short_convolution_back_float32)(const K3ShortConvolution& call, int64_t row,
                                           int64_t channel, int64_t count, float* d_taps);
    void (*short_convolution_back_bf16)(const K3ShortConvolution& call, int64_t row,
                                        int64_t channel, int64_t count, float* d_taps);
    void (*kda_step)(const K3KdaStep& call, int64_t row, float* scratch);
    // scores holds a value for each head and place.
    void (*latent_attention)(const K3LatentAttention& call, int64_t row, float* scores);
};

// One head of one document through the gated delta rule.
struct RuleKernels {
    void (*forward)(const K3KdaRule& call, int64_t document, int64_t head, float* scratch);
    void (*backward)(const K3KdaRule& call, int64_t document, int64_t head, float* scratch);
    // Floats of scratch for documents of at most so many tokens.
    int64_t (*scratch)(int64_t head_dim, int64_t tokens, bool backward);
};

struct Isa {
    const char* name;
    bool (*runs_here)();
    const Kernels* for_float32;
    const Kernels* for_bf16;
    const StepKernels* steps;
    const RuleKernels* rule;
};

// Best first; the last runs everywhere.
constexpr int NUM_ISAS = 4;
extern const Isa AMX_BF16;
extern const Isa AVX512_BF16;
extern const Isa AVX2;
extern const Isa PORTABLE;

const Isa* isa_at(int64_t index);
// The one asked for, or the best for -1; null if it does not run here.
const Isa* choose_isa(int64_t index);

}  // namespace k3
