/* The state digest's sums (FORMAT section "State digest"), of a run of elements and of a change. */
#include "common.h"

#define BLOCK 4096

static uint64_t low[2][BLOCK];

static uint64_t mix(uint64_t n) {
    uint64_t z = (n + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* Once, before the others. */
EXPORT void dk_digest_start(void) {
    for (uint64_t j = 0; j < BLOCK; j++) {
        low[0][j] = mix(4 * j);
        low[1][j] = mix(4 * j + 1);
    }
}

INLINE uint64_t value_of(const void *words, int64_t i, int width) {
    uint64_t v = load(words, i, width);
    return width == 8 ? v ^ (v >> 32) : v;
}

INLINE void add_block(uint64_t *sums, uint64_t block, uint64_t a, uint64_t b) {
    sums[0] += a * (mix(4 * block + 2) | 1);
    sums[1] += b * (mix(4 * block + 3) | 1);
}

/* sums += D of n elements, the first of which is element ``first`` of its tensor. */
EXPORT void dk_digest_run(const void *words, int64_t n, int width, int64_t first, uint64_t *sums) {
    for (int64_t i = 0; i < n;) {
        int64_t at = (first + i) % BLOCK, end = n - i < BLOCK - at ? n : i + BLOCK - at;
        uint64_t block = (uint64_t)(first + i) / BLOCK, a = 0, b = 0;
#define CALL(w)                                                                                                        \
    for (; i < end; i++, at++) {                                                                                       \
        uint64_t v = value_of(words, i, w);                                                                            \
        a += v * low[0][at];                                                                                           \
        b += v * low[1][at];                                                                                           \
    }
        BY_WIDTH(width, CALL)
#undef CALL
        add_block(sums, block, a, b);
    }
}

/* sums += D of rows of n elements each, ``pitch`` bytes apart in memory; where each begins in its tensor is in first. */
EXPORT void dk_digest_rows(const uint8_t *words, int64_t rows, int64_t n, int width, int64_t pitch,
                           const int64_t *first, uint64_t *sums) {
    for (int64_t row = 0; row < rows; row++) dk_digest_run(words + row * pitch, n, width, first[row], sums);
}

/* sums += what D gains when n elements at ``positions`` turn from old to new. */
EXPORT void dk_digest_change(const int64_t *positions, const void *old, const void *new, int64_t n, int width,
                             uint64_t *sums) {
    uint64_t block = 0, a = 0, b = 0;
#define CALL(w)                                                                                                        \
    for (int64_t i = 0; i < n; i++) {                                                                                  \
        uint64_t here = (uint64_t)positions[i] / BLOCK, at = (uint64_t)positions[i] % BLOCK;                           \
        if (here != block) {                                                                                           \
            add_block(sums, block, a, b);                                                                              \
            block = here;                                                                                              \
            a = b = 0;                                                                                                 \
        }                                                                                                              \
        uint64_t delta = value_of(new, i, w) - value_of(old, i, w);                                                    \
        a += delta * low[0][at];                                                                                       \
        b += delta * low[1][at];                                                                                       \
    }
    BY_WIDTH(width, CALL)
#undef CALL
    add_block(sums, block, a, b);
}

/* What the library was made from. */
EXPORT uint32_t dk_fingerprint(void) { return FINGERPRINT; }
