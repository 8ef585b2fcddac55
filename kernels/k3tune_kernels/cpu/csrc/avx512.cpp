// AVX-512 with bf16 dot products (and VBMI for the nibbles): Zen 4 and later; and the same with AMX:
// Sapphire Rapids and later.
//
// Three ways through a weight, all from its one row-major buffer:
// - up to 16 rows of activations: decoded values go straight into dot products, no panel;
// - more rows, forward: a panel of 64 outputs is decoded with the outputs along the lanes, then
//   6 x 64 tiles run over it, a pair of activations broadcast at a time;
// - more rows, backward: the same tiles over a panel of 64 inputs, its rows interleaved in pairs.
// AMX takes the panels of the last two from 4 rows on.
// Every product of E2M1 and bf16 is exact; a tile sums at most 1,024 pairs before it is added.
#include "kernels.h"
#include "target.h"

#if K3_X86

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define K3_VECTOR_BYTES 64
#define K3_DOT_ROWS 4
#define K3_OUTER_ROWS 6
#define K3_OUTER_VECTORS 4
#define K3_FEW_ROWS 1
#define K3_TURNED_ROWS 64
#define K3_TURNED_INPUTS 256
#define K3_BACK_PANEL_ROWS 256
#define K3_BACK_PANEL_COLUMNS 64
#define K3_MANY_ROWS 64
#define K3_MASKED_LANES

K3_TARGET_BEGIN("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx2,fma")
namespace k3 {
namespace avx512 {
#include "lanes.inc"
#include "products.inc"
#include "row_kernels.inc"
#include "residual_mixer.inc"
#include "rms_norm.inc"
#include "short_convolution.inc"
#include "step_kernels.inc"
#include "kda_rule.inc"
#include "kda_rule_backward.inc"
#include "bf16_decode.inc"
#include "bf16_few_rows.inc"
#include "bf16_panels.inc"
#include "bf16_kernels.inc"
}  // namespace avx512
}  // namespace k3
K3_TARGET_END

#if __has_include(<amxbf16intrin.h>)
#define K3_AMX 1
// clang-format off
K3_TARGET_BEGIN("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi,avx2,fma")
// clang-format on
namespace k3 {
namespace avx512 {
#include "amx_panels.inc"
}  // namespace avx512
}  // namespace k3
K3_TARGET_END
#else
#define K3_AMX 0  // a compiler from before 2021
#endif

namespace k3 {
static bool avx512_runs_here() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
static constexpr Kernels with_bf16_products() {
    Kernels kernels = avx512::row_kernels<bf16>(true);
    kernels.project = avx512::project_bf16;
    kernels.project_back = avx512::project_back_bf16;
    kernels.scratch_bytes = avx512::bf16_scratch_bytes;
    return kernels;
}
static const Kernels avx512_float_kernels = avx512::row_kernels<float>(false);
static const Kernels avx512_bf16_kernels = with_bf16_products();
static const StepKernels avx512_steps = avx512::step_kernels();
static const RuleKernels avx512_rule = avx512::rule_kernels();
const Isa AVX512_BF16 = {"avx512_bf16", avx512_runs_here, &avx512_float_kernels,
                         &avx512_bf16_kernels, &avx512_steps, &avx512_rule};

#if K3_AMX
static bool find_amx() {
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    unsigned a, b, c, d;
    if (!avx512_runs_here() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    // Linux saves tiles, 8 KB a thread, only for processes that have asked for it
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
static bool amx_runs_here() {
    // asked at every call, and on a virtual machine CPUID takes 15 us
    static const bool found = find_amx();
    return found;
}
static constexpr Kernels with_amx_products() {
    Kernels kernels = with_bf16_products();
    // whole rows: a fifth to a third faster backward than in runs of 512 bytes
    kernels.columns_of_few_rows = MOST_COLUMNS;
    // a span of activations for more panels
    kernels.columns_of_many_rows = 256;
    kernels.project = avx512::project_amx;
    kernels.project_back = avx512::project_back_amx;
    return kernels;
}
static const Kernels amx_kernels = with_amx_products();
const Isa AMX_BF16 = {"amx_bf16", amx_runs_here, &avx512_float_kernels, &amx_kernels,
                      &avx512_steps, &avx512_rule};
#else
const Isa AMX_BF16 = {"amx_bf16", [] { return false; }, nullptr, nullptr, nullptr, nullptr};
#endif
}  // namespace k3

#else

namespace k3 {
static bool avx512_runs_here() { return false; }
const Isa AVX512_BF16 = {"avx512_bf16", avx512_runs_here, nullptr, nullptr, nullptr, nullptr};
const Isa AMX_BF16 = {"amx_bf16", avx512_runs_here, nullptr, nullptr, nullptr, nullptr};
}  // namespace k3

#endif
