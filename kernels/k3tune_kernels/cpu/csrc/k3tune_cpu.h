// The C interface of the shared library; k3tune_kernels/cpu/library.py mirrors these structs.
//
// Shapes: N tokens, A active experts a token, M routed rows here, D model (latent) dim, F expert
// hidden dim, E local experts, R LoRA rank, O outputs and I inputs of one projection.
#pragma once

#include <cstdint>

#define K3_EXPORT extern "C" __attribute__((visibility("default")))

enum K3Dtype : int64_t { K3_FLOAT32 = 0, K3_BFLOAT16 = 1 };
enum K3Rounding : int64_t { K3_ROUND_NONE = 0, K3_ROUND_BF16 = 1, K3_ROUND_MXFP8 = 2 };
enum K3Status : int64_t { K3_OK = 0, K3_OUT_OF_MEMORY = 1, K3_NO_SUCH_ISA = 2 };

// MXFP4 weight of all experts, packed u8 [E, O, I/2] and scale u8 [E, O, I/32]. Strides in bytes;
// the bytes of one row are contiguous.
struct K3Weight {
    const uint8_t* packed;
    const uint8_t* scale;
    int64_t packed_expert_stride, packed_row_stride;
    int64_t scale_expert_stride, scale_row_stride;
};

// A [E or 1, R, I], B [E or 1, O, R], contiguous. rank 0: no adapter. Gradients are fp32 and may be
// null. scaling_E, where it is not null, replaces scaling.
struct K3Factors {
    const void* A;
    const void* B;
    const float* scaling_E;
    float* dA;
    float* dB;
    double scaling;
    int64_t rank;
    int64_t A_dtype, B_dtype;
    int64_t A_shared, B_shared;
};

struct K3Moe {
    int64_t tokens, active, experts, dim, hidden;
    int64_t x_dtype;
    int64_t threads;
    int64_t isa;  // of k3_isa_name; -1: the best this CPU has
    int64_t hidden_rounding;  // of what enters down; gradients pass as if it were not rounded
    double beta, linear_beta;
    const void* x;                 // [N, D] contiguous
    const int64_t* expert_ids;     // [N, A]
    const float* expert_weights;   // [N, A]
    const int64_t* local_experts;  // [E], or null: ids are rows of the weights
    float* narrow;                 // [N * A, sum of ranks]: scaled x A^T of gate and up, of hidden
    void* out;                     // forward: [N, D] in the dtype of x
    const void* d_out;             // backward: [N, D] in the dtype of x
    void* dx;                      // [N, D] in the dtype of x, or null
    float* d_weights;              // [N, A], or null
    K3Weight weight[3];            // gate, up, down
    K3Factors lora[3];
};

K3_EXPORT int64_t k3_moe_forward(const K3Moe* call);
K3_EXPORT int64_t k3_moe_backward(const K3Moe* call);

// The residual mixer: out[n] = sum_s softmax_s(query . x_s / rms(x_s)) x_s. Its backward pass reads
// the weights and inverse_rms that the forward pass wrote.
struct K3Mix {
    int64_t tokens, num_sources, dim;
    int64_t dtype, threads, isa;
    double eps;
    const void* const* sources;  // [S] of [N, D]
    const float* query;          // [D], the norm's weight in it
    void* out;                   // forward: [N, D]
    float* weights;              // [N, S]
    float* inverse_rms;          // [N, S]
    const void* grad;            // backward: [N, D]
    void* const* d_sources;      // [S] of [N, D]
    float* d_query;              // [D], or null
};

constexpr int64_t K3_CONVOLUTION_TAPS = 4;

// Depthwise causal convolution and SiLU of B rows of T tokens.
struct K3ShortConvolution {
    int64_t rows, tokens, channels;
    int64_t dtype, threads, isa;
    const void* x;         // [B, T, C]
    const void* past;      // [B, taps - 1, C], the inputs before them
    const float* taps;     // [taps, C], the newest input's last
    const uint8_t* reach;  // [B, T, taps - 1], oldest input first: 0 is not read; null: all are
    void* out;             // forward: [B, T, C]
    const void* grad;      // backward: [B, T, C]
    void* dx;              // [B, T, C]
    void* d_past;          // [B, taps - 1, C], or null
    float* d_taps;         // [taps, C], or null
};

// out = weight * (x / rms(x), rounded to its dtype) * sigmoid(gate).
struct K3RmsNorm {
    int64_t tokens, dim;
    int64_t dtype, threads, isa;
    double eps;
    const void* x;       // [N, D]
    const void* weight;  // [D] in the dtype of x
    const float* gate;   // [N, D], or null: no such factor
    void* out;           // forward: [N, D]
    const void* grad;    // backward: [N, D]
    void* dx;            // [N, D]
    float* d_weight;     // [D], or null
    float* d_gate;       // [N, D], read with a gate only
};

// One token of every row through KDA, between its projections; fp32, head_dim a multiple of 16.
// W = heads * head_dim.
struct K3KdaStep {
    int64_t rows, heads, head_dim, context;
    int64_t threads, isa;
    double gate_lower_bound, eps, unit_eps;
    const float* x[3];         // q, k, v before their convolutions, [B, W] each
    float* window;             // [B, context, 3 W] inputs before x; moved on by one
    const float* taps;         // [context + 1, 3 W]
    const float* decay_logit;  // [B, W]
    const float* decay_bias;   // [W]
    const float* decay_rate;   // [heads]
    const float* beta_logit;   // [B, heads]
    const float* gate;         // [B, W]
    const float* norm_weight;  // [head_dim]
    float* state;              // [B, heads, head_dim, head_dim]; updated
    float* out;                // [B, W]
};

// The gated delta rule over whole documents; fp32, contiguous, head_dim K a multiple of 16. The
// N = B * row_tokens tokens of the rows are cut into documents, none of which crosses a row's end.
// With d_out it is the backward pass.
struct K3KdaRule {
    int64_t row_tokens, documents, heads, head_dim;
    int64_t threads, isa;
    const int64_t* bounds;   // [documents + 1], from 0 to N
    const float* q;          // [N, heads, K], as all of that width
    const float* k;
    const float* v;
    const float* log_decay;  // at most 0
    const float* beta;       // [N, heads]
    const float* begin;      // [B, heads, K, K] of each row's first document, or null for zero
    float* out;
    float* error;            // v - S'^T k of each token: forward written, or null; backward read
    float* end;              // [B, heads, K, K] of each row's last document
    const float* d_out;
    const float* d_end;      // or null for zero
    float* dq;
    float* dk;
    float* dv;
    float* d_log_decay;
    float* d_beta;
    float* d_begin;          // or null
};

// SiTU-GLU of fp32 values, a multiple of 32 of them: out, or with grad d_gate and d_up.
struct K3SituGlu {
    int64_t values, threads, isa;
    double beta, linear_beta;
    const float* gate;
    const float* up;
    const float* grad;  // or null
    float* out;
    float* d_gate;
    float* d_up;
};

// Attention of one token of each row over its cached latents, which serve as keys and, in their
// first value_dim values, as values: out = softmax(scale q C^T) C[:, :value_dim], fp32. Row b sees
// the places 0 .. last_place[b].
struct K3LatentAttention {
    int64_t rows, heads, dim, value_dim;
    int64_t threads, isa;
    double scale;
    const float* query;           // [B, heads, dim]
    const float* latents;         // row_stride and place_stride in values; dim of them adjacent
    int64_t row_stride, place_stride;
    const int64_t* last_place;    // [B]
    float* out;                   // [B, heads, value_dim]
};

K3_EXPORT int64_t k3_latent_attention(const K3LatentAttention* call);
K3_EXPORT int64_t k3_mix(const K3Mix* call);
K3_EXPORT int64_t k3_mix_backward(const K3Mix* call);
K3_EXPORT int64_t k3_rms_norm(const K3RmsNorm* call);
K3_EXPORT int64_t k3_rms_norm_backward(const K3RmsNorm* call);
K3_EXPORT int64_t k3_short_convolution(const K3ShortConvolution* call);
K3_EXPORT int64_t k3_short_convolution_backward(const K3ShortConvolution* call);
K3_EXPORT int64_t k3_kda_step(const K3KdaStep* call);
K3_EXPORT int64_t k3_kda_rule(const K3KdaRule* call);
K3_EXPORT int64_t k3_situ_glu(const K3SituGlu* call);

// packed [rows, groups * 16] and scale [rows, groups] to bf16 [rows, groups * 32], exact.
K3_EXPORT void k3_decode(const uint8_t* packed, const uint8_t* scale, int64_t rows, int64_t groups,
                         uint16_t* out);

// One product with one expert's weight, for tests and benchmarks: out[T, O] = x[T, I] W^T, or with
// transposed != 0 out[T, I] = x[T, O] W; out is fp32.
K3_EXPORT int64_t k3_project(const K3Weight* weight, int64_t outputs, int64_t inputs, const void* x,
                             int64_t x_dtype, int64_t rows, int64_t transposed, int64_t threads,
                             int64_t isa, float* out);

// SiTU-GLU of n values, and with grad its gradients; for tests.
K3_EXPORT void k3_situ(const float* gate, const float* up, const float* grad, int64_t n,
                       double beta, double linear_beta, int64_t isa, float* out, float* d_gate,
                       float* d_up);

K3_EXPORT const char* k3_isa_name(int64_t isa);       // null past the last
K3_EXPORT int64_t k3_isa_runs_here(int64_t isa);
K3_EXPORT const char* k3_source_digest(void);
