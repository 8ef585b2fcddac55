// Sums over tokens whose bits do not depend on the threads: tasks of a size that the tokens alone
// decide, a row of sums each, added up in the order of the tasks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe.h"

namespace k3 {

// total[i] = sum_r rows[r, i]
inline void add_rows(const float* rows, int64_t count, int64_t width, float* total) {
    clear_bytes(total, width * static_cast<int64_t>(sizeof(float)));
    for (int64_t row = 0; row < count; row++)
        for (int64_t i = 0; i < width; i++) total[i] += rows[row * width + i];
}

// work(first, last, thread, sums) over ranges of tokens, where sums are [width], zero at first; null
// with a null total.
template <class Work>
void run_with_sums(const Team& team, int64_t tokens, int64_t width, float* total,
                   const Work& work) {
    constexpr int64_t MOST_TASKS = 64, FEWEST_TOKENS = 8;
    const int64_t size = std::max(FEWEST_TOKENS, (tokens + MOST_TASKS - 1) / MOST_TASKS);
    const int64_t tasks = (tokens + size - 1) / size;
    const Buffer<float> sums(total == nullptr ? 0 : tasks * width);
    team.run(tasks, [&](int64_t task, int64_t thread) {
        float* own = total == nullptr ? nullptr : sums.data() + task * width;
        if (own != nullptr) clear_bytes(own, width * static_cast<int64_t>(sizeof(float)));
        work(task * size, std::min((task + 1) * size, tokens), thread, own);
    });
    if (total != nullptr) add_rows(sums.data(), tasks, width, total);
}

}  // namespace k3
