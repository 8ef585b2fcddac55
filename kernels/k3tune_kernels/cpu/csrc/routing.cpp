#include "routing.h"

#include <algorithm>
#include <utility>

namespace k3 {
namespace {

// Local experts in the order of their global ids, and the place in that order of each routed slot.
struct Places {
    std::vector<int64_t> expert_at;  // local expert of each place
    std::vector<int64_t> place;      // [N * A], -1 where the expert is not here
};

Places place_slots(const K3Moe& call) {
    Places places;
    places.expert_at.resize(call.experts);
    places.place.resize(call.tokens * call.active);
    for (int64_t e = 0; e < call.experts; e++) places.expert_at[e] = e;
    const int64_t slots = call.tokens * call.active;
    if (call.local_experts == nullptr) {
        for (int64_t s = 0; s < slots; s++) {
            const int64_t id = call.expert_ids[s];
            places.place[s] = id >= 0 && id < call.experts ? id : -1;
        }
        return places;
    }
    const int64_t* ids = call.local_experts;
    auto& order = places.expert_at;
    std::sort(order.begin(), order.end(), [ids](int64_t a, int64_t b) { return ids[a] < ids[b]; });
    for (int64_t s = 0; s < slots; s++) {
        const int64_t id = call.expert_ids[s];
        const auto found = std::lower_bound(order.begin(), order.end(), id,
                                            [ids](int64_t e, int64_t wanted) {
                                                return ids[e] < wanted;
                                            });
        const bool here = found != order.end() && ids[*found] == id;
        places.place[s] = here ? found - order.begin() : -1;
    }
    return places;
}

void cut_into_waves(Routing& routing, int64_t most_rows) {
    Wave wave{};
    const int64_t count = static_cast<int64_t>(routing.segments.size());
    for (int64_t s = 0; s < count; s++) {
        const Segment& segment = routing.segments[s];
        if (wave.rows() > 0 && segment.last - wave.first_row > most_rows) {
            routing.waves.push_back(wave);
            wave = {s, s, segment.first, segment.first};
        }
        wave.last_segment = s + 1;
        wave.last_row = segment.last;
    }
    if (wave.rows() > 0) routing.waves.push_back(wave);
    for (const Wave& w : routing.waves) routing.most_rows = std::max(routing.most_rows, w.rows());
}

}  // namespace

Routing route(const K3Moe& call, int64_t most_rows) {
    const Places places = place_slots(call);
    const int64_t slots = call.tokens * call.active;
    std::vector<int64_t> start(call.experts + 1, 0);
    for (int64_t s = 0; s < slots; s++)
        if (places.place[s] >= 0) start[places.place[s] + 1]++;
    for (int64_t p = 0; p < call.experts; p++) start[p + 1] += start[p];

    Routing routing;
    routing.slot_of_row.resize(start[call.experts]);
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (int64_t s = 0; s < slots; s++)
        if (places.place[s] >= 0) routing.slot_of_row[next[places.place[s]]++] = s;

    routing.row_of_place.resize(slots);
    routing.rows_of_token.assign(call.tokens, 0);
    for (int64_t row = 0; row < routing.rows(); row++) {
        const int64_t token = routing.slot_of_row[row] / call.active;
        routing.row_of_place[token * call.active + routing.rows_of_token[token]++] = row;
    }

    for (int64_t p = 0; p < call.experts; p++)
        for (int64_t row = start[p]; row < start[p + 1]; row += most_rows)
            routing.segments.push_back(
                {places.expert_at[p], row, std::min(row + most_rows, start[p + 1])});
    cut_into_waves(routing, most_rows);
    return routing;
}

}  // namespace k3
