/* Compare, count, scatter: the passes over whole tensors. Memory speed is the limit, so they read every byte once. */
#include "common.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WIDE 1
#endif

INLINE int64_t compare(const void *old, const void *new, int64_t n, int64_t first, int64_t *positions, void *before,
                       void *after, const int width) {
    const int64_t together = 32 / width;
    int64_t found = 0, i = 0;
    for (; i + together <= n; i += together) {
        uint64_t a[4], b[4];
        memcpy(a, (const char *)old + i * width, 32);
        memcpy(b, (const char *)new + i * width, 32);
        if (!((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]))) continue;
        for (int w = 0; w < 4; w++)
            for (uint64_t x = a[w] ^ b[w]; x;) {
                int lane = __builtin_ctzll(x) / (8 * width);
                int64_t at = i + w * (8 / width) + lane;
                positions[found] = first + at;
                store(before, found, load(old, at, width), width);
                store(after, found++, load(new, at, width), width);
                x &= width == 8 || lane == 8 / width - 1 ? 0 : ~0ull << 8 * width * (lane + 1);
            }
    }
    for (; i < n; i++)
        if (load(old, i, width) != load(new, i, width)) {
            positions[found] = first + i;
            store(before, found, load(old, i, width), width);
            store(after, found++, load(new, i, width), width);
        }
    return found;
}

#ifdef WIDE
/* Which of 64 words differ: a bit each. */
#define AVX512 __attribute__((target("avx512f,avx512bw")))

AVX512 INLINE uint64_t differing(const char *old, const char *new, const int width) {
    uint64_t mask = 0;
    for (int at = 0; at < width; at++) {
        const __m512i a = _mm512_loadu_si512(old + 64 * at), b = _mm512_loadu_si512(new + 64 * at);
        if (width == 1) mask = _mm512_cmpneq_epi8_mask(a, b);
        if (width == 2) mask |= (uint64_t)_mm512_cmpneq_epi16_mask(a, b) << (32 * at);
        if (width == 4) mask |= (uint64_t)_mm512_cmpneq_epi32_mask(a, b) << (16 * at);
    }
    return mask;
}

/* Most groups have none or few words that differ, and which have them nobody can guess: two are written in any case,
 * for which there is room, and counted if they are there. */
AVX512 INLINE int64_t compare_wide(const char *old, const char *new, int64_t n, int64_t first, int64_t *positions,
                                   void *before, void *after, const int width) {
    int64_t found = 0, i = 0;
#define FOUND(at)                                                                                                      \
    positions[found + at] = first + i + lane;                                                                          \
    store(before, found + at, load(old, i + lane, width), width);                                                      \
    store(after, found + at, load(new, i + lane, width), width);
    for (; i + 64 <= n; i += 64) {
        uint64_t mask = differing(old + i * width, new + i * width, width);
        const int count = __builtin_popcountll(mask);
        for (int k = 0; k < 2; k++, mask &= mask - 1) {
            const int lane = __builtin_ctzll(mask | 1ull << 63);
            FOUND(k)
        }
        for (int k = 2; k < count; k++, mask &= mask - 1) {
            const int lane = __builtin_ctzll(mask);
            FOUND(k)
        }
        found += count;
    }
#undef FOUND
    return found + compare(old + i * width, new + i * width, n - i, first + i, positions + found,
                           (char *)before + found * width, (char *)after + found * width, width);
}

#define WIDE_BY(width)                                                                                                 \
    AVX512 static int64_t compare_wide_##width(const void *old, const void *new, int64_t n, int64_t first,             \
                                               int64_t *positions, void *before, void *after) {                        \
        return compare_wide(old, new, n, first, positions, before, after, width);                                      \
    }
WIDE_BY(1)
WIDE_BY(2)
WIDE_BY(4)
#endif

static int level; /* 0: plain, 1: AVX-512 */

/* The best that this processor has, up to ``most``; tests ask for less. -> which */
EXPORT int dk_compare_level(int most) {
    int best = 0;
#ifdef WIDE
    __builtin_cpu_init();
    best = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw");
#endif
    return level = best < most ? best : most;
}

/* Where n words differ: position (plus ``first``), old and new word of each. The outputs have room for n. */
EXPORT int64_t dk_compare(const void *old, const void *new, int64_t n, int width, int64_t first, int64_t *positions,
                          void *before, void *after) {
    int64_t found;
#ifdef WIDE
    if (level && width < 8)
        return width == 1   ? compare_wide_1(old, new, n, first, positions, before, after)
               : width == 2 ? compare_wide_2(old, new, n, first, positions, before, after)
                            : compare_wide_4(old, new, n, first, positions, before, after);
#endif
#define CALL(w) found = compare(old, new, n, first, positions, before, after, w)
    BY_WIDTH(width, CALL)
#undef CALL
    return found;
}

#define AHEAD 32 /* words that are on their way from memory at a time */

INLINE int scatter(void *words, uint64_t n, const void *positions, const void *values, int64_t count, const int width,
                   const int wide) {
    int outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= load(positions, i, wide) >= n;
    if (outside) return -1;
    int64_t i = 0;
    for (; i + AHEAD < count; i++) {
        __builtin_prefetch((char *)words + (int64_t)load(positions, i + AHEAD, wide) * width, 1);
        store(words, (int64_t)load(positions, i, wide), load(values, i, width), width);
    }
    for (; i < count; i++) store(words, (int64_t)load(positions, i, wide), load(values, i, width), width);
    return 0;
}

/* words[positions[i]] = values[i], positions being ``wide`` = 4 or 8 bytes. -> -1, and nothing written, if one is
 * outside. */
EXPORT int dk_scatter(void *words, int64_t n, const void *positions, int wide, const void *values, int64_t count,
                      int width) {
    int code;
#define CALL(w)                                                                                                        \
    code = wide == 4 ? scatter(words, (uint64_t)n, positions, values, count, w, 4)                                     \
                     : scatter(words, (uint64_t)n, positions, values, count, w, 8)
    BY_WIDTH(width, CALL)
#undef CALL
    return code;
}
