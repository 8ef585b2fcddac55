// The instruction set every CPU of its kind has: 128-bit vectors, which gcc and clang lower to
// whatever the target's baseline offers.
#include "kernels.h"

#define K3_VECTOR_BYTES 16
#define K3_DOT_ROWS 2
#define K3_OUTER_ROWS 3
#define K3_OUTER_VECTORS 2
#define K3_FEW_ROWS 16
#define K3_TURNED_ROWS 64
#define K3_TURNED_INPUTS 256
#define K3_BACK_PANEL_ROWS 256
#define K3_BACK_PANEL_COLUMNS 64
#define K3_MANY_ROWS 64

namespace k3 {
namespace portable {
#include "lanes.inc"
#include "products.inc"
#include "row_kernels.inc"
#include "residual_mixer.inc"
#include "rms_norm.inc"
#include "short_convolution.inc"
#include "step_kernels.inc"
#include "kda_rule.inc"
#include "kda_rule_backward.inc"

static bool runs_here() { return true; }
// Rows are widened to fp32 as they are gathered, also those of a bf16 call.
static const Kernels kernels = row_kernels<float>(false);
static const StepKernels steps = step_kernels();
static const RuleKernels rule = rule_kernels();
}  // namespace portable

const Isa PORTABLE = {"portable", portable::runs_here, &portable::kernels, &portable::kernels,
                      &portable::steps, &portable::rule};
}  // namespace k3
