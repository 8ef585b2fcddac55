#include "moe.h"

#include "rounding.h"

namespace k3 {
namespace {

// Rows of activations a call keeps at a time.
constexpr int64_t WAVE_BYTES = 32 << 20;
constexpr int64_t FEWEST_WAVE_ROWS = 256;
// Rows of an expert up to which its weights are the cost, and up to which its products stay small in
// tasks of so many columns.
constexpr int64_t FEW_ROWS = 16, SOME_ROWS = 128, COLUMNS_OF_SOME_ROWS = 256;

int64_t widest_task(const Kernels& kernels, int64_t rows) {
    if (rows <= FEW_ROWS) return kernels.columns_of_few_rows;
    return rows <= SOME_ROWS ? COLUMNS_OF_SOME_ROWS : kernels.columns_of_many_rows;
}

int64_t largest_product(const Kernels& kernels, int64_t most_rows) {
    return std::max({most_rows * kernels.columns_of_many_rows, SOME_ROWS * COLUMNS_OF_SOME_ROWS,
                     FEW_ROWS * kernels.columns_of_few_rows});
}

// Multiplications below which another thread costs more than it saves.
constexpr int64_t WORK_PER_THREAD = 1 << 19;

int64_t useful_threads(const K3Moe& call) {
    const int64_t work = call.tokens * call.active * call.dim * call.hidden * 3;
    return std::min(call.threads, 1 + work / WORK_PER_THREAD);
}

}  // namespace

Moe::Moe(const K3Moe& c, const Kernels& k, int64_t bytes_per_row, int64_t products)
    : call(c),
      kernels(k),
      value_bytes(k.rows_are_bf16 ? 2 : 4),
      routing(route(c, std::max(FEWEST_WAVE_ROWS, WAVE_BYTES / bytes_per_row))),
      team(useful_threads(c)),
      products_(products),
      product_floats_(largest_product(k, routing.most_rows)),
      scratch_bytes_(products * product_floats_ * static_cast<int64_t>(sizeof(float)) +
                     largest_panel()),
      scratch_(team.threads() * scratch_bytes_) {
    for (int which = 0; which < 3; which++) {
        narrow_offset[which] = narrow_width;
        narrow_width += call.lora[which].rank;
    }
}

int64_t Moe::largest_panel() const {
    int64_t rank = 0;
    for (const K3Factors& factors : call.lora) rank = std::max(rank, factors.rank);
    return (static_cast<int64_t>(kernels.scratch_bytes(rank)) + 63) / 64 * 64;
}

Weight Moe::weight(Projection which, int64_t expert) const {
    const K3Weight& w = call.weight[which];
    return {w.packed + expert * w.packed_expert_stride,
            w.scale + expert * w.scale_expert_stride,
            w.packed_row_stride,
            w.scale_row_stride,
            outputs(which),
            inputs(which)};
}

Factor Moe::A(Projection which, int64_t expert) const {
    const K3Factors& f = call.lora[which];
    const int64_t size = f.rank * inputs(which) * (f.A_dtype == K3_BFLOAT16 ? 2 : 4);
    return {static_cast<const char*>(f.A) + (f.A_shared ? 0 : expert * size),
            f.A_dtype == K3_BFLOAT16};
}

Factor Moe::B(Projection which, int64_t expert) const {
    const K3Factors& f = call.lora[which];
    const int64_t size = f.rank * outputs(which) * (f.B_dtype == K3_BFLOAT16 ? 2 : 4);
    return {static_cast<const char*>(f.B) + (f.B_shared ? 0 : expert * size),
            f.B_dtype == K3_BFLOAT16};
}

float Moe::scaling(Projection which, int64_t expert) const {
    const K3Factors& f = call.lora[which];
    return f.scaling_E != nullptr ? f.scaling_E[expert] : static_cast<float>(f.scaling);
}

std::vector<Task> Moe::column_tasks(const Wave& wave, int64_t columns) const {
    const int64_t segments = wave.last_segment - wave.first_segment;
    // some tasks a thread, so that none waits long for the last
    const int64_t a_segment = team.threads() * 8 / std::max<int64_t>(1, segments);
    const int64_t wanted = std::max<int64_t>(1, a_segment);
    const int64_t even = team.threads() == 1 ? columns : (columns + wanted - 1) / wanted;
    std::vector<Task> tasks;
    for (int64_t s = wave.first_segment; s < wave.last_segment; s++) {
        const int64_t most = widest_task(kernels, routing.segments[s].count());
        const int64_t steps = (even + TASK_STEP - 1) / TASK_STEP;
        const int64_t width = std::clamp<int64_t>(steps * TASK_STEP, TASK_STEP, most);
        for (int64_t c = 0; c < columns; c += width)
            tasks.push_back({s, c, std::min(c + width, columns)});
    }
    return tasks;
}

std::vector<Task> Moe::row_tasks(const Wave& wave) const {
    std::vector<Task> tasks;
    for (int64_t s = wave.first_segment; s < wave.last_segment; s++) {
        const Segment& segment = routing.segments[s];
        for (int64_t row = segment.first; row < segment.last; row += ROW_TASK)
            tasks.push_back({s, row, std::min(row + ROW_TASK, segment.last)});
    }
    return tasks;
}

void Moe::project(Projection which, const Task& task, Rows rows, float* out, int64_t stride,
                  char* panel) const {
    const Segment& segment = routing.segments[task.segment];
    kernels.project(rows, weight(which, segment.expert), task.first, task.last, out, stride, panel);
    if (rank(which))
        kernels.expand(narrow_at(call.narrow, segment.first, which), narrow_width, segment.count(),
                       B(which, segment.expert), rank(which), task.first, task.last, out, stride,
                       panel);
}

void Moe::gate_up(const Wave& wave, const Task& task, const char* x, char* scratch) const {
    const Segment& segment = routing.segments[task.segment];
    const Rows rows = rows_of(x, segment.first - wave.first_row, segment.count(), call.dim);
    for (Projection which : {GATE, UP})
        project(which, task, rows, product(scratch, which), task.last - task.first, panel(scratch));
}

bool Moe::round_hidden(char* values, int64_t count) const {
    const bool is_bf16 = kernels.rows_are_bf16;
    if (call.hidden_rounding == K3_ROUND_NONE) return false;
    if (call.hidden_rounding == K3_ROUND_BF16 && is_bf16) return false;
    float group[MX_GROUP];
    for (int64_t start = 0; start < count; start += MX_GROUP) {
        char* at = values + start * value_bytes;
        load_group(at, is_bf16, group);
        if (call.hidden_rounding == K3_ROUND_MXFP8)
            round_mxfp8(group);
        else
            round_bf16(group);
        store_group(group, is_bf16, at);
    }
    return true;
}

float Moe::dot_hidden(const char* values, const float* weights, int64_t count) const {
    float group[MX_GROUP], sum = 0;
    for (int64_t start = 0; start < count; start += MX_GROUP) {
        load_group(values + start * value_bytes, kernels.rows_are_bf16, group);
        for (int64_t i = 0; i < MX_GROUP; i++) sum += group[i] * weights[start + i];
    }
    return sum;
}

void Moe::gather(const void* source, int64_t first, int64_t last, char* rows) const {
    for (int64_t row = first; row < last; row++)
        kernels.load_row(x_at(source, token_of(row)), call.x_dtype == K3_BFLOAT16, call.dim,
                         rows + (row - first) * call.dim * value_bytes);
}

void Moe::combine(const Wave& wave, const float* rows, const float* weights, float* sums,
                  void* target) const {
    const bool to_bf16 = call.x_dtype == K3_BFLOAT16;
    const bool begins = wave.first_row == 0, ends = wave.last_row == routing.rows();
    const int64_t dim = call.dim;
    constexpr int64_t TOKENS = 8;
    // without partial sums a token's sum lies in a buffer of its thread
    const Buffer<float> own(sums == nullptr ? team.threads() * dim : 0);
    team.run((call.tokens + TOKENS - 1) / TOKENS, [&](int64_t task, int64_t thread) {
        const int64_t end = std::min((task + 1) * TOKENS, call.tokens);
        for (int64_t token = task * TOKENS; token < end; token++) {
            float* sum = sums == nullptr ? own.data() + thread * dim : sums + token * dim;
            bool add = !begins;
            for (int64_t i = 0; i < routing.rows_of_token[token]; i++) {
                const int64_t row = routing.row_of_place[token * call.active + i];
                if (row < wave.first_row || row >= wave.last_row) continue;
                const float weight = weights ? weights[routing.slot_of_row[row]] : 1.0f;
                kernels.accumulate(rows + (row - wave.first_row) * dim, weight, dim, sum, add);
                add = true;
            }
            if (!add) clear_bytes(sum, dim * sizeof(float));
            if (ends)
                kernels.store_row(sum, dim, static_cast<char*>(target) + token * dim * x_bytes(),
                                  to_bf16);
        }
    });
}

}  // namespace k3
