// What this CPU can do at best, with a number of threads: bytes read from memory, and the
// multiplications and additions of its best arithmetic from registers, each a second. That is bf16
// tiles (AMX) or bf16 dot products where the CPU has them, else fp32 in 256 bits. Built and called by
// cpu_ceilings.py.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#define K3_BENCH extern "C" __attribute__((visibility("default")))

namespace {

template <class Work>
double seconds(int threads, const Work& work) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int t = 1; t < threads; t++) others.emplace_back(work, t);
    work(0);
    for (std::thread& other : others) other.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bf16");
}

// Linux gives the tiles' registers to processes that ask for them.
bool has_amx() {
    constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
    unsigned a, b, c, d;
    if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    return (d & AMX_BF16) && (d & AMX_TILE) && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

__attribute__((target("avx512f"))) int64_t read_all_512(const char* from, int64_t bytes) {
    __m512i sum[4] = {};
    for (int64_t i = 0; i + 256 <= bytes; i += 256)
        for (int j = 0; j < 4; j++) {
            _mm_prefetch(from + i + 64 * j + 4096, _MM_HINT_T0);
            sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(from + i + 64 * j));
        }
    return _mm512_reduce_add_epi64(sum[0] ^ sum[1] ^ sum[2] ^ sum[3]);
}

__attribute__((target("avx2"))) int64_t read_all_256(const char* from, int64_t bytes) {
    __m256i sum[4] = {};
    for (int64_t i = 0; i + 128 <= bytes; i += 128)
        for (int j = 0; j < 4; j++) {
            const char* at = from + i + 32 * j;
            if (j % 2 == 0) _mm_prefetch(at + 4096, _MM_HINT_T0);
            sum[j] = _mm256_xor_si256(
                sum[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
        }
    const __m256i all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
    return all[0] ^ all[1] ^ all[2] ^ all[3];
}

// 16 x 64 operations a round
__attribute__((target("avx512f,avx512bf16"))) float dot_many(int64_t rounds) {
    __m512 sum[16];
    for (int j = 0; j < 16; j++) sum[j] = _mm512_set1_ps(static_cast<float>(j));
    const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    for (int64_t r = 0; r < rounds; r++)
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) sum[j] = _mm512_dpbf16_ps(sum[j], a, a);
    __m512 all = sum[0];
    for (int j = 1; j < 16; j++) all = all + sum[j];
    return _mm512_reduce_add_ps(all);
}

// 4 x 16,384 operations a round, all of zeros: no sum waits for itself
__attribute__((target("amx-tile,amx-bf16"))) float multiply_tiles(int64_t rounds) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
    } shapes;
    __asm__ volatile("" : : "r"(&shapes) : "memory");
    _tile_loadconfig(&shapes);
    _tile_zero(4);
    _tile_zero(5);
    for (int64_t r = 0; r < rounds; r++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_release();
    return 0;
}

// 12 x 16 operations a round
__attribute__((target("avx2,fma"))) float multiply_add_many(int64_t rounds) {
    __m256 sum[12];
    for (int j = 0; j < 12; j++) sum[j] = _mm256_set1_ps(static_cast<float>(j));
    const __m256 a = _mm256_set1_ps(0.5f);
    for (int64_t r = 0; r < rounds; r++)
#pragma GCC unroll 12
        for (int j = 0; j < 12; j++) sum[j] = _mm256_fmadd_ps(sum[j], a, a);
    __m256 all = sum[0];
    for (int j = 1; j < 12; j++) all = all + sum[j];
    return all[0] + all[1] + all[2] + all[3] + all[4] + all[5] + all[6] + all[7];
}

}  // namespace

// The arithmetic that is measured; null where this CPU has neither.
K3_BENCH const char* arithmetic() {
    if (has_amx()) return "bf16 tiles";
    if (has_avx512()) return "bf16 dot products";
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return has_avx2 ? "fp32 multiply-adds" : nullptr;
}

K3_BENCH double read_bytes_per_s(const char* from, int64_t bytes, int threads) {
    std::vector<int64_t> results(threads);
    const int64_t part = bytes / threads;
    const auto read_all = has_avx512() ? read_all_512 : read_all_256;
    return static_cast<double>(bytes) / seconds(threads, [&](int t) {
               results[t] = read_all(from + t * part, part);
           });
}

K3_BENCH double flops_per_s(int threads) {
    struct Loop {
        float (*run)(int64_t rounds);
        int64_t rounds;
        double operations;
    };
    const Loop loop = has_amx()      ? Loop{multiply_tiles, 5'000'000, 4.0 * 16384}
                      : has_avx512() ? Loop{dot_many, 40'000'000, 16.0 * 64}
                                     : Loop{multiply_add_many, 40'000'000, 12.0 * 16};
    std::vector<float> results(threads);
    const double operations = loop.operations * static_cast<double>(loop.rounds * threads);
    return operations / seconds(threads, [&](int t) { results[t] = loop.run(loop.rounds); });
}
