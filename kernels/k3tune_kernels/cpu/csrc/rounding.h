// Rounding of activations in groups of 32, as k3tune_kernels/mxfp8/reference.py has it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace k3 {

constexpr int64_t MX_GROUP = 32;

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// A finite value, or a NaN that stays one, rounded to nearest even.
inline uint32_t bf16_bits(float value) {
    const uint32_t bits = bits_of(value);
    if (value != value) return (bits >> 16) | 0x40;
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

inline void load_group(const void* values, bool is_bf16, float* group) {
    if (!is_bf16) {
        std::memcpy(group, values, MX_GROUP * sizeof(float));
        return;
    }
    const uint16_t* narrow = static_cast<const uint16_t*>(values);
    for (int64_t i = 0; i < MX_GROUP; i++) group[i] = float_of(uint32_t{narrow[i]} << 16);
}

inline void store_group(const float* group, bool is_bf16, void* values) {
    if (!is_bf16) {
        std::memcpy(values, group, MX_GROUP * sizeof(float));
        return;
    }
    uint16_t* narrow = static_cast<uint16_t*>(values);
    for (int64_t i = 0; i < MX_GROUP; i++) narrow[i] = static_cast<uint16_t>(bf16_bits(group[i]));
}

inline void round_bf16(float* group) {
    for (int64_t i = 0; i < MX_GROUP; i++) group[i] = float_of(bf16_bits(group[i]) << 16);
}

// E4M3 under 448, rounded to nearest even.
inline float round_e4m3(float value) {
    const uint32_t bits = bits_of(value), sign = bits & 0x80000000u;
    const float size = std::min(float_of(bits ^ sign), 448.0f);
    // 3 bits behind the leading one; under 2^-6 steps of 2^-9, the spacing of floats from 2^14 on
    const uint32_t body = bits_of(size);
    const float normal = float_of((body + 0x7FFFF + ((body >> 20) & 1)) & ~0xFFFFFu);
    const float subnormal = (size + 24576.0f) - 24576.0f;
    return float_of(bits_of(size < 0.015625f ? subnormal : normal) | sign);
}

inline void round_mxfp8(float* group) {
    uint32_t most = 0;
    for (int64_t i = 0; i < MX_GROUP; i++) most = std::max(most, bits_of(group[i]) & 0x7FFFFFFFu);
    if (most >= 0x7F800000u) {
        // a NaN or an infinity: nothing of the group is known
        for (int64_t i = 0; i < MX_GROUP; i++) group[i] = float_of(0x7FC00000u);
        return;
    }
    const int32_t exponent = std::max(static_cast<int32_t>(most >> 23) - 127 - 8, -127);
    const float up = float_of(static_cast<uint32_t>(127 - exponent) << 23);
    // 2^-127 is a subnormal number
    const float down = exponent == -127 ? float_of(1u << 22)
                                        : float_of(static_cast<uint32_t>(127 + exponent) << 23);
    for (int64_t i = 0; i < MX_GROUP; i++) group[i] = round_e4m3(group[i] * up) * down;
}

}  // namespace k3
