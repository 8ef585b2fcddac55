// AVX2 with FMA: fp32 arithmetic in 256-bit vectors, for fp32 and bf16 calls alike.
#include "kernels.h"
#include "target.h"

#if K3_X86

#include <immintrin.h>

#define K3_VECTOR_BYTES 32
#define K3_DOT_ROWS 3
#define K3_OUTER_ROWS 6
#define K3_OUTER_VECTORS 2
#define K3_FEW_ROWS 4
#define K3_TURNED_ROWS 32
#define K3_TURNED_INPUTS 128
#define K3_BACK_PANEL_ROWS 64
#define K3_BACK_PANEL_COLUMNS 128
#define K3_MANY_ROWS 3
#define K3_256_BIT_LANES
#define K3_OWN_DECODE "avx2_decode.inc"

K3_TARGET_BEGIN("avx2,fma")
namespace k3 {
namespace avx2 {
#include "lanes.inc"
#include "products.inc"
#include "row_kernels.inc"
#include "residual_mixer.inc"
#include "rms_norm.inc"
#include "short_convolution.inc"
#include "step_kernels.inc"
#include "kda_rule.inc"
#include "kda_rule_backward.inc"
}  // namespace avx2
}  // namespace k3
K3_TARGET_END

namespace k3 {
static bool avx2_runs_here() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
static const Kernels avx2_kernels = avx2::row_kernels<float>(false);
static const StepKernels avx2_steps = avx2::step_kernels();
static const RuleKernels avx2_rule = avx2::rule_kernels();
const Isa AVX2 = {"avx2", avx2_runs_here, &avx2_kernels, &avx2_kernels, &avx2_steps, &avx2_rule};
}  // namespace k3

#else

namespace k3 {
static bool avx2_runs_here() { return false; }
const Isa AVX2 = {"avx2", avx2_runs_here, nullptr, nullptr, nullptr, nullptr};
}  // namespace k3

#endif
