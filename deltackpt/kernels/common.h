/* What the kernels share: words of 1, 2, 4 or 8 bytes, the shape of a packed tensor, and the parameters of its lists.
 *
 * Little-endian machines only. Nothing here allocates, keeps state, or calls back into Python. */
#ifndef DELTACKPT_COMMON_H
#define DELTACKPT_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))
#define MAX_LISTS 16 /* a far list and 15 classes */
#define MAX_K 31
#define EXPONENTS 256 /* packed types are at most 4 bytes wide */

typedef struct {
    int64_t lead, height, width, rows, columns, tile_height, tile_width;
} grid_t;

typedef struct {
    int32_t width, exponent_start, exponent_bits; /* exponent_bits = 0: not sign-magnitude, in order as an integer */
} type_t;

typedef struct {
    int32_t threshold, classes;
} near_t;

/* By memcpy: a tensor in a file begins at any byte. */
#define LOAD(type) { type v; memcpy(&v, (const char *)words + i * (int64_t)sizeof v, sizeof v); return v; }
#define STORE(type) { type v = (type)value; memcpy((char *)words + i * (int64_t)sizeof v, &v, sizeof v); return; }

INLINE uint64_t load(const void *words, int64_t i, int width) {
    switch (width) {
    case 1: LOAD(uint8_t)
    case 2: LOAD(uint16_t)
    case 4: LOAD(uint32_t)
    default: LOAD(uint64_t)
    }
}

INLINE void store(void *words, int64_t i, uint64_t value, int width) {
    switch (width) {
    case 1: STORE(uint8_t)
    case 2: STORE(uint16_t)
    case 4: STORE(uint32_t)
    default: STORE(uint64_t)
    }
}

/* Call a function once for each width, so that the compiler knows it inside of the loops. */
#define BY_WIDTH(width, call)                                                                                          \
    switch (width) {                                                                                                   \
    case 1: call(1); break;                                                                                            \
    case 2: call(2); break;                                                                                            \
    case 4: call(4); break;                                                                                            \
    default: call(8);                                                                                                  \
    }

INLINE int exponent_of(uint64_t bits, type_t t) {
    return (int)((bits >> t.exponent_start) & ((1u << t.exponent_bits) - 1));
}

INLINE uint32_t mask_of(int width) { return width == 4 ? 0xFFFFFFFFu : (1u << 8 * width) - 1; }

/* The ordered-integer map, its own inverse, on words of up to 4 bytes; the sign of the result is its highest bit. */
INLINE uint32_t in_order(uint32_t bits, int width, int sign_magnitude) {
    uint32_t sign = bits >> (8 * width - 1);
    return sign_magnitude ? bits ^ (-sign & (mask_of(width) >> 1)) : bits; /* no branch: every other sign is set */
}

INLINE int list_of(int exponent, near_t near) {
    int depth = near.threshold - exponent;
    return depth < 0 ? 0 : 1 + (depth < near.classes - 1 ? depth : near.classes - 1);
}

/* A number in LEB128, of at most 9 bytes, which has at most 63 bits. -> the byte after it */
INLINE uint8_t *put_number(uint8_t *out, uint64_t value) {
    for (; value > 127; value >>= 7) *out++ = (uint8_t)(value & 127) | 128;
    *out++ = (uint8_t)value;
    return out;
}

/* Bit j of eight bytes, as one byte. */
INLINE uint8_t gather(uint64_t bytes, int j) {
    return (uint8_t)(((bytes >> j) & 0x0101010101010101u) * 0x0102040810204080u >> 56);
}

/* Which of 64 elements, or of the ``n`` that are left, are near: a bit each. Most are not, so this is the loop to keep
 * free of branches. */
INLINE uint64_t near_mask(const void *base, int64_t first, int64_t n, type_t t, near_t near, const int width) {
    uint8_t is_near[64] = {0};
    const uint32_t field = (1u << t.exponent_bits) - 1, threshold = (uint32_t)near.threshold;
    if (n >= 64)
        for (int i = 0; i < 64; i++)
            is_near[i] = (((uint32_t)load(base, first + i, width) >> t.exponent_start) & field) <= threshold;
    else
        for (int i = 0; i < n; i++)
            is_near[i] = (((uint32_t)load(base, first + i, width) >> t.exponent_start) & field) <= threshold;
    uint64_t mask = 0, bytes;
    for (int i = 0; i < 64; i += 8) {
        memcpy(&bytes, is_near + i, 8);
        mask |= (uint64_t)gather(bytes, 0) << i;
    }
    return mask;
}

INLINE int bit_length(uint32_t value) { return value ? 32 - __builtin_clz(value) : 0; }

INLINE int64_t octets(int64_t bits) { return (bits + 7) >> 3; }

/* How the lists of one tile are coded (FORMAT section "Gaps"): what follows from its counts and spans alone. */
typedef struct {
    int64_t listed[MAX_LISTS]; /* ranks written */
    uint8_t flipped[MAX_LISTS], k[MAX_LISTS];
    int64_t codes, changes; /* of the tile */
    int planes;             /* gap planes */
    int64_t bits[MAX_K];    /* of each plane: a prefix of the gaps */
} lists_t;

INLINE void plan_lists(lists_t *p, const int64_t *counts, const int64_t *spans, int lists) {
    int k = MAX_K;
    p->codes = p->changes = 0;
    p->planes = 0;
    memset(p->bits, 0, sizeof p->bits);
    for (int l = 0; l < lists; l++) {
        p->flipped[l] = 2 * counts[l] > spans[l];
        int64_t n = p->listed[l] = p->flipped[l] ? spans[l] - counts[l] : counts[l];
        p->changes += counts[l];
        p->codes += n;
        if (n) {
            int64_t quotient = (spans[l] - (spans[l] >> 5)) / n;
            int best = quotient ? 63 - __builtin_clzll((uint64_t)quotient) : 0;
            if (best < k) k = best;
        }
        p->k[l] = (uint8_t)k;
        if (n) {
            if (k > p->planes) p->planes = k;
            for (int j = 0; j < k; j++) p->bits[j] += n;
        }
    }
}

#endif
