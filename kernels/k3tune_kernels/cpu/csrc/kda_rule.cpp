// The call of the gated delta rule: heads of documents spread over the threads.
#include <algorithm>
#include <new>

#include "moe.h"
#include "target.h"

#if K3_X86
#include <xmmintrin.h>
#endif

namespace k3 {
namespace {

// Where a decay is weak and little is written, states and gradients fade through subnormal numbers,
// over which an x86 processor is up to 15 times slower: meanwhile they are zero there.
class WithoutSubnormals {
#if K3_X86
   public:
    WithoutSubnormals() : before_(_mm_getcsr()) {
        constexpr unsigned FLUSH_TO_ZERO = 0x8000, READ_AS_ZERO = 0x40;
        _mm_setcsr(before_ | FLUSH_TO_ZERO | READ_AS_ZERO);
    }
    ~WithoutSubnormals() { _mm_setcsr(before_); }

   private:
    unsigned before_;
#endif
};

}  // namespace
}  // namespace k3

K3_EXPORT int64_t k3_kda_rule(const K3KdaRule* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    int64_t longest = 0;
    for (int64_t d = 0; d < call->documents; d++)
        longest = std::max(longest, call->bounds[d + 1] - call->bounds[d]);
    const bool backward = call->d_out != nullptr;
    const auto rule = backward ? isa->rule->backward : isa->rule->forward;
    const int64_t floats = isa->rule->scratch(call->head_dim, longest, backward);
    const int64_t heads = call->documents * call->heads;
    const int64_t work = call->bounds[call->documents] * call->heads * call->head_dim;
    const k3::Team team(std::min({call->threads, std::max<int64_t>(heads, 1),
                                  1 + work * call->head_dim / k3::PRODUCTS_PER_THREAD}));
    try {
        const k3::Buffer<float> scratch(team.threads() * floats);
        team.run(heads, [&](int64_t task, int64_t thread) {
            const k3::WithoutSubnormals meanwhile{};
            rule(*call, task / call->heads, task % call->heads, scratch.data() + thread * floats);
        });
    } catch (const std::bad_alloc&) {
        return K3_OUT_OF_MEMORY;
    }
    return K3_OK;
}
