// What this CPU can do at best, with a number of threads: bytes read from memory and bf16 dot
// products from registers, each a second. Built and called by cpu_ceilings.py.
#include <immintrin.h>

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

__attribute__((target("avx512f"))) int64_t read_all(const char* from, int64_t bytes) {
    __m512i sum[4] = {};
    for (int64_t i = 0; i + 256 <= bytes; i += 256)
        for (int j = 0; j < 4; j++) {
            _mm_prefetch(from + i + 64 * j + 4096, _MM_HINT_T0);
            sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(from + i + 64 * j));
        }
    return _mm512_reduce_add_epi64(sum[0] ^ sum[1] ^ sum[2] ^ sum[3]);
}

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

}  // namespace

K3_BENCH double read_bytes_per_s(const char* from, int64_t bytes, int threads) {
    std::vector<int64_t> results(threads);
    const int64_t part = bytes / threads;
    return static_cast<double>(bytes) / seconds(threads, [&](int t) {
               results[t] = read_all(from + t * part, part);
           });
}

K3_BENCH double dot_flops_per_s(int64_t rounds, int threads) {
    std::vector<float> results(threads);
    const double flops = 16.0 * 64 * static_cast<double>(rounds) * threads;
    return flops / seconds(threads, [&](int t) { results[t] = dot_many(rounds); });
}
