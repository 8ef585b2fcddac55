// MXFP4: two E2M1 codes a byte, low nibble first; one E8M0 scale for a group of 32.
#pragma once

#include <array>
#include <cstdint>

namespace k3 {

constexpr int64_t GROUP = 32;

struct bf16 {
    uint16_t bits;
};

// Scales under which every value of a group is a normal bf16. Outside, groups that hold anything
// but zeros take the fp32 path: the bf16 dot product reads subnormals as zero, and an exponent
// added as an integer would overflow into the sign.
constexpr int SMALLEST_FAST_SCALE = 2;
constexpr int LARGEST_FAST_SCALE = 252;

// bf16 of an E2M1 code under a scale byte: exact, infinite beyond the range, NaN for byte 255.
constexpr uint16_t decode_bits(int code, int scale) {
    const int magnitude = code & 7;
    const uint16_t sign = static_cast<uint16_t>((code & 8) << 12);
    if (scale == 255) return static_cast<uint16_t>(sign | 0x7fc0);
    if (magnitude == 0) return sign;
    // magnitude = (1 + mantissa / 2) * 2^exponent
    const int exponent = magnitude == 1 ? -1 : (magnitude >> 1) - 1;
    const int mantissa = magnitude == 1 ? 0 : magnitude & 1;
    const int field = exponent + scale;
    if (field >= 255) return static_cast<uint16_t>(sign | 0x7f80);
    if (field >= 1) return static_cast<uint16_t>(sign | field << 7 | mantissa << 6);
    return static_cast<uint16_t>(sign | (128 + 64 * mantissa) >> (1 - field));
}

struct alignas(64) DecodeTable {
    uint16_t bits[256][16] = {};
    constexpr DecodeTable() {
        for (int scale = 0; scale < 256; scale++)
            for (int code = 0; code < 16; code++) bits[scale][code] = decode_bits(code, scale);
    }
};

inline constexpr DecodeTable DECODE_TABLE;

// One expert's weight; strides in bytes.
struct Weight {
    const uint8_t* packed;
    const uint8_t* scale;
    int64_t packed_stride, scale_stride;
    int64_t outputs, inputs;
};

}  // namespace k3
