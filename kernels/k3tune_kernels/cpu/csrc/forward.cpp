// The forward pass: hidden = SiTU(gate(x), up(x)) of every routed row, then down, then each token's
// weighted sum. Row values are bf16 or fp32 as the kernels want them; products and sums are fp32.
#include "moe.h"

namespace k3 {
namespace {

class Forward {
   public:
    Forward(const K3Moe& call, const Kernels& kernels, int64_t value_bytes)
        : moe_(call, kernels, call.dim * (value_bytes + 4) + call.hidden * value_bytes, 2),
          x_(moe_.routing.most_rows * call.dim * value_bytes),
          hidden_(moe_.routing.most_rows * call.hidden * value_bytes),
          y_(moe_.routing.most_rows * call.dim),
          sums_(moe_.routing.waves.size() > 1 ? call.tokens * call.dim : 0) {}

    void run() {
        if (moe_.routing.waves.empty())
            clear_bytes(moe_.call.out, moe_.call.tokens * moe_.call.dim * moe_.x_bytes());
        for (const Wave& wave : moe_.routing.waves) {
            const std::vector<Task> rows = moe_.row_tasks(wave);
            moe_.each(rows, [&](const Task& task, char*) { shrink_x(wave, task); });
            moe_.each(moe_.column_tasks(wave, moe_.call.hidden),
                      [&](const Task& task, char* scratch) { gate_up(wave, task, scratch); });
            if (moe_.rank(DOWN))
                moe_.each(rows, [&](const Task& task, char*) { shrink_hidden(wave, task); });
            moe_.each(moe_.column_tasks(wave, moe_.call.dim),
                      [&](const Task& task, char* scratch) { down(wave, task, scratch); });
            moe_.combine(wave, y_.data(), moe_.call.expert_weights,
                         moe_.routing.waves.size() > 1 ? sums_.data() : nullptr, moe_.call.out);
        }
    }

   private:
    void shrink_x(const Wave& wave, const Task& task) {
        char* rows = moe_.at(x_.data(), task.first - wave.first_row, moe_.call.dim);
        moe_.gather(moe_.call.x, task.first, task.last, rows);
        for (Projection which : {GATE, UP})
            if (moe_.rank(which)) shrink(which, task, rows, moe_.call.dim);
    }

    void gate_up(const Wave& wave, const Task& task, char* scratch) {
        moe_.gate_up(wave, task, x_.data(), scratch);
        const Segment& segment = moe_.routing.segments[task.segment];
        const int64_t width = task.last - task.first, row = segment.first - wave.first_row;
        for (int64_t t = 0; t < segment.count(); t++) {
            char* hidden = moe_.at(hidden_.data(), row + t, moe_.call.hidden) +
                           task.first * moe_.value_bytes;
            moe_.kernels.situ(moe_.product(scratch, GATE) + t * width,
                              moe_.product(scratch, UP) + t * width, width,
                              static_cast<float>(moe_.call.beta),
                              static_cast<float>(moe_.call.linear_beta), hidden);
            moe_.round_hidden(hidden, width);
        }
    }

    void shrink_hidden(const Wave& wave, const Task& task) {
        shrink(DOWN, task,
               moe_.at(hidden_.data(), task.first - wave.first_row, moe_.call.hidden),
               moe_.call.hidden);
    }

    void shrink(Projection which, const Task& task, const char* rows, int64_t width) {
        const int64_t expert = moe_.routing.segments[task.segment].expert;
        moe_.kernels.shrink({rows, width, task.last - task.first}, moe_.A(which, expert),
                            moe_.rank(which), width, moe_.scaling(which, expert),
                            moe_.narrow_at(moe_.call.narrow, task.first, which),
                            moe_.narrow_width);
    }

    void down(const Wave& wave, const Task& task, char* scratch) {
        const Segment& segment = moe_.routing.segments[task.segment];
        const int64_t row = segment.first - wave.first_row;
        moe_.project(DOWN, task,
                     moe_.rows_of(hidden_.data(), row, segment.count(), moe_.call.hidden),
                     y_.data() + row * moe_.call.dim + task.first, moe_.call.dim,
                     moe_.panel(scratch));
    }

    const Moe moe_;
    const Buffer<char> x_, hidden_;
    const Buffer<float> y_, sums_;
};

}  // namespace
}  // namespace k3

K3_EXPORT int64_t k3_moe_forward(const K3Moe* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    const k3::Kernels& kernels =
        call->x_dtype == K3_BFLOAT16 ? *isa->for_bf16 : *isa->for_float32;
    try {
        k3::Forward(*call, kernels, kernels.rows_are_bf16 ? 2 : 4).run();
    } catch (const std::bad_alloc&) {
        return K3_OUT_OF_MEMORY;
    }
    return K3_OK;
}
