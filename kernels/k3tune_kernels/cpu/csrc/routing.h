// Which rows each expert gets. A routed row is a (token, slot) pair whose expert is here; rows are
// sorted by the expert's global id, within an expert by token.
#pragma once

#include <cstdint>
#include <vector>

#include "k3tune_cpu.h"

namespace k3 {

// Rows first .. last of one expert: all of them, or a part where there are many.
struct Segment {
    int64_t expert, first, last;
    int64_t count() const { return last - first; }
};

// Segments that are worked on together; its rows are consecutive.
struct Wave {
    int64_t first_segment, last_segment;
    int64_t first_row, last_row;
    int64_t rows() const { return last_row - first_row; }
};

struct Routing {
    std::vector<int64_t> slot_of_row;   // flat (token, slot)
    std::vector<int64_t> row_of_place;  // rows of token n, in order: [n * A, n * A + count[n])
    std::vector<int32_t> rows_of_token;
    std::vector<Segment> segments;
    std::vector<Wave> waves;
    int64_t most_rows = 0;  // of a wave

    int64_t rows() const { return static_cast<int64_t>(slot_of_row.size()); }
};

// most_rows bounds the rows of a wave, and so the memory of a call.
Routing route(const K3Moe& call, int64_t most_rows);

}  // namespace k3
