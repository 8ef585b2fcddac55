// The backward pass. Of the forward only x A^T and h A^T were kept: gate and up are computed again.
//
// With dy the gradient of a token's output, w a row's routing weight, and for each projection
// p(z) = z W^T + s (z A^T) B^T:
//
//     e  = dy W_d + s (dy B_d) A_d           the gradient of w * hidden
//     dw = e . hidden
//     dg, du = w e * SiTU'(gate, up)
//     dx = dg W_g + s (dg B_g) A_g + du W_u + s (du B_u) A_u, summed over a token's rows
//     dA = (s dy B)^T z,  dB = dy^T (s z A^T), with w dy for down
#include "moe.h"

namespace k3 {
namespace {

// Columns of one factor's gradient: of one segment's expert, or of a wave for a shared factor.
struct Gram {
    Projection which;
    bool of_A, shared, add;
    int64_t segment, first, last;
};

class Backward {
   public:
    Backward(const K3Moe& call, const Kernels& kernels, int64_t value_bytes)
        : moe_(call, kernels,
               call.dim * (2 * value_bytes + 4) + call.hidden * 3 * value_bytes, 3),
          x_(rows() * call.dim * value_bytes),
          dy_(rows() * call.dim * value_bytes),
          d_gate_(rows() * call.hidden * value_bytes),
          d_up_(rows() * call.hidden * value_bytes),
          wants_hidden_(call.lora[DOWN].dA || call.hidden_rounding != K3_ROUND_NONE),
          hidden_(wants_hidden_ ? rows() * call.hidden * value_bytes : 0),
          dx_(call.dx ? rows() * call.dim : 0),
          sums_(call.dx && moe_.routing.waves.size() > 1 ? call.tokens * call.dim : 0),
          blocks_((call.hidden + Moe::TASK_STEP - 1) / Moe::TASK_STEP),
          partial_(rows() * blocks_),
          narrow_(rows() * moe_.narrow_width),
          weighted_narrow_(rows() * moe_.rank(DOWN)),
          weighted_shrunk_(rows() * moe_.rank(DOWN)) {}

    void run() {
        const K3Moe& call = moe_.call;
        clear();
        for (const Wave& wave : moe_.routing.waves) {
            const std::vector<Task> rows = moe_.row_tasks(wave);
            moe_.each(rows, [&](const Task& task, char* scratch) { gather(wave, task, scratch); });
            moe_.each(moe_.column_tasks(wave, call.hidden),
                      [&](const Task& task, char* scratch) { d_hidden(wave, task, scratch); });
            moe_.each(rows, [&](const Task& task, char* scratch) { shrink(wave, task, scratch); });
            if (call.dx != nullptr) {
                moe_.each(moe_.column_tasks(wave, call.dim),
                          [&](const Task& task, char* scratch) { d_x(wave, task, scratch); });
                moe_.combine(wave, dx_.data(), nullptr,
                             moe_.routing.waves.size() > 1 ? sums_.data() : nullptr, call.dx);
            }
            moe_.each(gram_tasks(wave),
                      [&](const Gram& task, char* scratch) { gram(wave, task, scratch); });
        }
    }

   private:
    int64_t rows() const { return moe_.routing.most_rows; }

    // What no row will write: gradients of experts and slots without rows, or of everything.
    void clear() {
        const K3Moe& call = moe_.call;
        if (call.d_weights)
            clear_bytes(call.d_weights, call.tokens * call.active * sizeof(float));
        if (call.dx && moe_.routing.waves.empty())
            clear_bytes(call.dx, call.tokens * call.dim * moe_.x_bytes());
        std::vector<char> has_rows(call.experts, 0);
        for (const Segment& segment : moe_.routing.segments) has_rows[segment.expert] = 1;
        moe_.team.run(call.experts, [&](int64_t expert, int64_t) {
            for (Projection which : {GATE, UP, DOWN}) {
                const K3Factors& factors = call.lora[which];
                clear_factor(factors.dA, factors.A_shared, expert, has_rows[expert],
                             factors.rank * moe_.inputs(which));
                clear_factor(factors.dB, factors.B_shared, expert, has_rows[expert],
                             factors.rank * moe_.outputs(which));
            }
        });
    }

    void clear_factor(float* gradient, bool shared, int64_t expert, bool has_rows,
                      int64_t size) const {
        if (gradient == nullptr || (shared ? expert > 0 || !moe_.routing.waves.empty() : has_rows))
            return;
        clear_bytes(gradient + (shared ? 0 : expert * size), size * sizeof(float));
    }

    void gather(const Wave& wave, const Task& task, char* scratch) {
        const int64_t row = task.first - wave.first_row, dim = moe_.call.dim;
        moe_.gather(moe_.call.x, task.first, task.last, moe_.at(x_.data(), row, dim));
        moe_.gather(moe_.call.d_out, task.first, task.last, moe_.at(dy_.data(), row, dim));
        if (moe_.rank(DOWN)) shrink_back(DOWN, wave, task, dy_.data(), scratch);
    }

    // narrow = s dz B
    void shrink_back(Projection which, const Wave& wave, const Task& task, const char* dz,
                     char* scratch) {
        const int64_t row = task.first - wave.first_row, width = moe_.outputs(which);
        const int64_t expert = moe_.routing.segments[task.segment].expert;
        moe_.kernels.shrink_back(moe_.rows_of(dz, row, task.last - task.first, width),
                                 moe_.B(which, expert), moe_.rank(which), width,
                                 moe_.scaling(which, expert),
                                 moe_.narrow_at(narrow_.data(), row, which), moe_.narrow_width,
                                 moe_.panel(scratch));
    }

    // dz W + narrow A, for the task's columns of the projection's input
    void project_back(Projection which, const Wave& wave, const Task& task, const char* dz,
                      float* out, int64_t stride, bool add, char* panel) {
        const Segment& segment = moe_.routing.segments[task.segment];
        const int64_t row = segment.first - wave.first_row;
        moe_.kernels.project_back(moe_.rows_of(dz, row, segment.count(), moe_.outputs(which)),
                                  moe_.weight(which, segment.expert), task.first, task.last, out,
                                  stride, add, panel);
        if (moe_.rank(which))
            moe_.kernels.expand_back(moe_.narrow_at(narrow_.data(), row, which),
                                     moe_.narrow_width, segment.count(),
                                     moe_.A(which, segment.expert), moe_.rank(which),
                                     moe_.inputs(which), task.first, task.last, out, stride);
    }

    void d_hidden(const Wave& wave, const Task& task, char* scratch) {
        const Segment& segment = moe_.routing.segments[task.segment];
        const int64_t width = task.last - task.first, row = segment.first - wave.first_row;
        moe_.gate_up(wave, task, x_.data(), scratch);
        float* gradient = moe_.product(scratch, 2);
        project_back(DOWN, wave, task, dy_.data(), gradient, width, false, moe_.panel(scratch));
        for (int64_t t = 0; t < segment.count(); t++) {
            const float weight = weight_of(segment.first + t);
            // blocks of one size whatever the tasks, so that their sums do not depend on threads
            for (int64_t c = 0; c < width; c += Moe::TASK_STEP) {
                const int64_t at = t * width + c;
                const auto in = [&](const Buffer<char>& values) {
                    return moe_.at(values.data(), row + t, moe_.call.hidden) +
                           (task.first + c) * moe_.value_bytes;
                };
                const int64_t count = std::min(Moe::TASK_STEP, width - c);
                char* hidden = wants_hidden_ ? in(hidden_) : nullptr;
                float sum = moe_.kernels.situ_back(
                    moe_.product(scratch, GATE) + at, moe_.product(scratch, UP) + at,
                    gradient + at, count, weight, static_cast<float>(moe_.call.beta),
                    static_cast<float>(moe_.call.linear_beta), in(d_gate_), in(d_up_), hidden);
                // the routing weight scales what the rounded values gave
                if (moe_.round_hidden(hidden, count))
                    sum = moe_.dot_hidden(hidden, gradient + at, count);
                partial_.data()[(row + t) * blocks_ + (task.first + c) / Moe::TASK_STEP] = sum;
            }
        }
    }

    float weight_of(int64_t row) const {
        return moe_.call.expert_weights[moe_.routing.slot_of_row[row]];
    }

    void shrink(const Wave& wave, const Task& task, char* scratch) {
        if (moe_.rank(GATE)) shrink_back(GATE, wave, task, d_gate_.data(), scratch);
        if (moe_.rank(UP)) shrink_back(UP, wave, task, d_up_.data(), scratch);
        const int64_t rank = moe_.rank(DOWN);
        for (int64_t row = task.first; row < task.last; row++) {
            const int64_t local = row - wave.first_row;
            if (moe_.call.d_weights) {
                float sum = 0;
                for (int64_t b = 0; b < blocks_; b++) sum += partial_.data()[local * blocks_ + b];
                moe_.call.d_weights[moe_.routing.slot_of_row[row]] = sum;
            }
            const float* narrow = moe_.narrow_at(narrow_.data(), local, DOWN);
            const float* shrunk = moe_.narrow_at(moe_.call.narrow, row, DOWN);
            for (int64_t r = 0; r < rank; r++) {
                weighted_narrow_.data()[local * rank + r] = weight_of(row) * narrow[r];
                weighted_shrunk_.data()[local * rank + r] = weight_of(row) * shrunk[r];
            }
        }
    }

    void d_x(const Wave& wave, const Task& task, char* scratch) {
        const int64_t dim = moe_.call.dim;
        const int64_t row = moe_.routing.segments[task.segment].first - wave.first_row;
        float* out = dx_.data() + row * dim + task.first;
        project_back(GATE, wave, task, d_gate_.data(), out, dim, false, moe_.panel(scratch));
        project_back(UP, wave, task, d_up_.data(), out, dim, true, moe_.panel(scratch));
    }

    std::vector<Gram> gram_tasks(const Wave& wave) const {
        std::vector<Gram> grams;
        for (Projection which : {GATE, UP, DOWN}) {
            const K3Factors& factors = moe_.call.lora[which];
            if (factors.dA) add_gram_tasks(grams, wave, which, true, factors.A_shared);
            if (factors.dB) add_gram_tasks(grams, wave, which, false, factors.B_shared);
        }
        return grams;
    }

    void add_gram_tasks(std::vector<Gram>& grams, const Wave& wave, Projection which, bool of_A,
                        bool shared) const {
        const int64_t columns = of_A ? moe_.inputs(which) : moe_.outputs(which);
        const int64_t width = shared ? Moe::TASK_STEP : columns;
        for (int64_t c = 0; c < columns; c += width) {
            const int64_t end = std::min(c + width, columns);
            if (shared) {
                grams.push_back({which, of_A, true, wave.first_row > 0, 0, c, end});
                continue;
            }
            for (int64_t s = wave.first_segment; s < wave.last_segment; s++) {
                const auto& segments = moe_.routing.segments;
                const bool again = s > 0 && segments[s - 1].expert == segments[s].expert;
                grams.push_back({which, of_A, false, again, s, c, end});
            }
        }
    }

    void gram(const Wave& wave, const Gram& task, char* scratch) {
        const Segment& segment = moe_.routing.segments[task.segment];
        const int64_t first = task.shared ? 0 : segment.first - wave.first_row;
        const int64_t count = task.shared ? wave.rows() : segment.count();
        const K3Factors& factors = moe_.call.lora[task.which];
        const int64_t rank = factors.rank;
        const int64_t width = task.of_A ? moe_.inputs(task.which) : moe_.outputs(task.which);
        const int64_t place = task.shared ? 0 : segment.expert * rank * width;
        const char* wide;
        const float* narrow;
        int64_t narrow_stride = moe_.narrow_width;
        if (task.which == DOWN) {
            wide = task.of_A ? hidden_.data() : dy_.data();
            narrow = (task.of_A ? weighted_narrow_ : weighted_shrunk_).data() + first * rank;
            narrow_stride = rank;
        } else {
            const char* gradient = task.which == GATE ? d_gate_.data() : d_up_.data();
            wide = task.of_A ? x_.data() : gradient;
            narrow = task.of_A
                         ? moe_.narrow_at(narrow_.data(), first, task.which)
                         : moe_.narrow_at(moe_.call.narrow, wave.first_row + first, task.which);
        }
        const Rows rows = moe_.rows_of(wide, first, count, width);
        if (task.of_A)
            moe_.kernels.gram_A(narrow, narrow_stride, rank, rows, width, task.first, task.last,
                                factors.dA + place, task.add);
        else
            moe_.kernels.gram_B(narrow, narrow_stride, rank, rows, task.first, task.last,
                                factors.dB + place, task.add, moe_.panel(scratch));
    }

    const Moe moe_;
    const Buffer<char> x_, dy_, d_gate_, d_up_;
    const bool wants_hidden_;  // for dA of down, or because it is rounded
    const Buffer<char> hidden_;
    const Buffer<float> dx_, sums_;
    const int64_t blocks_;
    // d_hidden . hidden, by row and block of columns
    const Buffer<float> partial_;
    // s dz B of all projections; and those of down, and s h A^T, times the routing weight
    const Buffer<float> narrow_, weighted_narrow_, weighted_shrunk_;
};

}  // namespace
}  // namespace k3

K3_EXPORT int64_t k3_moe_backward(const K3Moe* call) {
    const k3::Isa* isa = k3::choose_isa(call->isa);
    if (isa == nullptr) return K3_NO_SUCH_ISA;
    const k3::Kernels& kernels =
        call->x_dtype == K3_BFLOAT16 ? *isa->for_bf16 : *isa->for_float32;
    try {
        k3::Backward(*call, kernels, kernels.rows_are_bf16 ? 2 : 4).run();
    } catch (const std::bad_alloc&) {
        return K3_OUT_OF_MEMORY;
    }
    return K3_OK;
}
