// What forward and backward share: the operands of a call, its tasks and its memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "k3tune_cpu.h"
#include "kernels.h"
#include "routing.h"
#include "team.h"

namespace k3 {

enum Projection { GATE = 0, UP = 1, DOWN = 2 };

// Uninitialised memory on a cache line.
template <class T>
class Buffer {
   public:
    explicit Buffer(int64_t count)
        : data_(static_cast<T*>(::operator new(bytes(count), std::align_val_t{64}))) {}
    T* data() const { return data_.get(); }

   private:
    struct Free {
        void operator()(T* data) const { ::operator delete(data, std::align_val_t{64}); }
    };
    static size_t bytes(int64_t count) {
        return static_cast<size_t>(count < 1 ? 1 : count) * sizeof(T);
    }
    std::unique_ptr<T, Free> data_;
};

// memset, which may not be given the null pointer of an empty tensor even for no bytes.
inline void clear_bytes(void* data, int64_t bytes) {
    if (bytes > 0) std::memset(data, 0, static_cast<size_t>(bytes));
}

// Columns first .. last of a segment's product.
struct Task {
    int64_t segment, first, last;
};

class Moe {
   public:
    // bytes_per_row: what the pass keeps of a routed row; products: results a column task holds.
    Moe(const K3Moe& call, const Kernels& kernels, int64_t bytes_per_row, int64_t products);

    const K3Moe& call;
    const Kernels& kernels;
    const int64_t value_bytes;  // of a gathered row value
    const Routing routing;
    const Team team;
    int64_t narrow_width = 0;      // sum of the ranks
    int64_t narrow_offset[3] = {};  // of each projection within a row of narrow values

    Weight weight(Projection which, int64_t expert) const;
    Factor A(Projection which, int64_t expert) const;
    Factor B(Projection which, int64_t expert) const;
    float scaling(Projection which, int64_t expert) const;
    int64_t rank(Projection which) const { return call.lora[which].rank; }
    int64_t outputs(Projection which) const { return which == DOWN ? call.dim : call.hidden; }
    int64_t inputs(Projection which) const { return which == DOWN ? call.hidden : call.dim; }

    // Column tasks over all segments of a wave; wide where few rows make the weights the cost.
    std::vector<Task> column_tasks(const Wave& wave, int64_t columns) const;
    // Row tasks: at most ROW_TASK rows of one segment.
    std::vector<Task> row_tasks(const Wave& wave) const;

    char* at(char* rows, int64_t row, int64_t width) const {
        return rows + row * width * value_bytes;
    }
    Rows rows_of(const char* rows, int64_t first, int64_t count, int64_t width) const {
        return {rows + first * width * value_bytes, width, count};
    }
    const char* x_at(const void* x, int64_t token) const {
        return static_cast<const char*>(x) + token * call.dim * x_bytes();
    }
    int64_t x_bytes() const { return call.x_dtype == K3_BFLOAT16 ? 2 : 4; }
    int64_t token_of(int64_t row) const { return routing.slot_of_row[row] / call.active; }

    // function(task, scratch of its thread)
    template <class Work, class Function>
    void each(const std::vector<Work>& tasks, const Function& function) const {
        team.run(static_cast<int64_t>(tasks.size()), [&](int64_t task, int64_t thread) {
            function(tasks[task], scratch_.data() + thread * scratch_bytes_);
        });
    }
    // In a thread's scratch: result `index` of a column task, and behind all results the panel.
    float* product(char* scratch, int64_t index) const {
        return reinterpret_cast<float*>(scratch) + index * product_floats_;
    }
    char* panel(char* scratch) const {
        return reinterpret_cast<char*>(product(scratch, products_));
    }

    // Values of a projection in `narrow`, rows of narrow_width.
    float* narrow_at(float* narrow, int64_t row, Projection which) const {
        return narrow + row * narrow_width + narrow_offset[which];
    }
    // out[t, c - first] = rows[t] . W[c] + narrow[t] . B[c] for the task's columns.
    void project(Projection which, const Task& task, Rows rows, float* out, int64_t stride,
                 char* panel) const;
    // Gate and up of the task's columns into products 0 and 1 of the scratch; x: rows of the wave.
    void gate_up(const Wave& wave, const Task& task, const char* x, char* scratch) const;

    // Rounds what enters down in place, whole groups of 32 values; whether there was anything to do.
    bool round_hidden(char* values, int64_t count) const;
    // sum of values * weights, of row values
    float dot_hidden(const char* values, const float* weights, int64_t count) const;

    // Rows of `source` [N, D] for rows first .. last, behind each other.
    void gather(const void* source, int64_t first, int64_t last, char* rows) const;
    // target[n] (+)= sum over n's rows of this wave of weight * rows[row], in the order of the
    // experts' ids; sums holds partial sums between waves and is null where there is one wave.
    void combine(const Wave& wave, const float* rows, const float* weights, float* sums,
                 void* target) const;

    static constexpr int64_t ROW_TASK = 32;
    // Column tasks begin at multiples of this.
    static constexpr int64_t TASK_STEP = 128;

   private:
    int64_t largest_panel() const;

    const int64_t products_, product_floats_, scratch_bytes_;
    const Buffer<char> scratch_;
};

}  // namespace k3
