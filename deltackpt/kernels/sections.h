/* The bit sections of a tile, read a run of changes at a time. Nothing past ``end`` is read. */
#ifndef DELTACKPT_SECTIONS_H
#define DELTACKPT_SECTIONS_H

#include "common.h"

#define RUN 128 /* changes that take each step together: simple loops, and many words on their way at a time */

INLINE uint64_t load_up_to_8(const uint8_t *from, const uint8_t *end) {
    uint64_t word = 0;
    if (end - from >= 8) {
        memcpy(&word, from, 8);
        return word;
    }
    for (int i = 0; from < end; from++, i += 8) word |= (uint64_t)*from << i;
    return word;
}

/* Reads the zeros before each one of a section. The caller knows how many ones there are, so ``end`` may be later than
 * the section's. */
typedef struct {
    const uint8_t *next, *end; /* bytes after those in ``word`` */
    uint64_t word;             /* 64 bits, less the ones that were read */
    int64_t begins, last;      /* the bit where ``word`` begins, and the bit after the last one read */
} unary_t;

INLINE unary_t unary_at(const uint8_t *bits, const uint8_t *end) { return (unary_t){bits, end, 0, -64, 0}; }

INLINE void unary_refill(unary_t *u) {
    while (!u->word) {
        u->word = load_up_to_8(u->next, u->end);
        u->next += 8;
        u->begins += 64;
    }
}

INLINE int64_t unary_next(unary_t *u) {
    unary_refill(u);
    int64_t at = u->begins + __builtin_ctzll(u->word), zeros = at - u->last;
    u->word &= u->word - 1;
    u->last = at + 1;
    return zeros;
}

/* The next ``n`` ones: ``place`` of each, counted from the bit after the last one that was read, if it fits. -> that of
 * the last, whether it fits or not: places rise. */
INLINE int64_t unary_run(unary_t *u, uint32_t *place, int64_t n) {
    unary_t s = *u; /* in registers */
    const int64_t from = s.last;
    for (int64_t i = 0; i < n; i++) {
        if (!s.word) unary_refill(&s);
        s.last = s.begins + __builtin_ctzll(s.word);
        place[i] = (uint32_t)(s.last - from);
        s.word &= s.word - 1;
    }
    s.last++;
    *u = s;
    return s.last - 1 - from;
}

/* -> ones in a section; ``used`` is the bits up to the last one. */
INLINE int64_t count_ones(const uint8_t *from, int64_t bytes, int64_t *used) {
    int64_t ones = 0;
    *used = 0;
    for (int64_t i = 0; i < bytes; i += 8) {
        uint64_t word = load_up_to_8(from + i, from + bytes);
        ones += __builtin_popcountll(word);
        if (word) *used = 8 * i + 64 - __builtin_clzll(word);
    }
    return ones;
}

INLINE int padded(const uint8_t *section, int64_t bits) { return bits & 7 && section[bits >> 3] >> (bits & 7); }

/* The bits of every byte, a byte each. */
#define BIT(b, i) ((uint64_t)((b) >> (i) & 1) << 8 * (i))
#define SPREAD(b) (BIT(b, 0) | BIT(b, 1) | BIT(b, 2) | BIT(b, 3) | BIT(b, 4) | BIT(b, 5) | BIT(b, 6) | BIT(b, 7))
#define SPREAD_4(b) SPREAD(b), SPREAD((b) + 1), SPREAD((b) + 2), SPREAD((b) + 3)
#define SPREAD_16(b) SPREAD_4(b), SPREAD_4((b) + 4), SPREAD_4((b) + 8), SPREAD_4((b) + 12)
#define SPREAD_64(b) SPREAD_16(b), SPREAD_16((b) + 16), SPREAD_16((b) + 32), SPREAD_16((b) + 48)
static const uint64_t spread[256] = {SPREAD_64(0), SPREAD_64(64), SPREAD_64(128), SPREAD_64(192)};

/* The low ``k`` bits of ``n`` gaps from ``code`` on, whose first is at [code & 7]. */
INLINE void read_planes(uint32_t *low, const uint8_t *const *plane, int k, int64_t code, int64_t n) {
    uint8_t lanes[RUN + 8];
    const int64_t bytes = octets((code & 7) + n);
    if (!k) memset(low, 0, (RUN + 8) * sizeof *low);
    for (int from = 0; from < k; from += 8) {
        const int planes = k - from < 8 ? k - from : 8;
        for (int64_t b = 0; b < bytes; b++) {
            uint64_t lane = 0;
            for (int j = 0; j < planes; j++) lane |= spread[plane[from + j][(code >> 3) + b]] << j;
            memcpy(lanes + 8 * b, &lane, 8);
        }
        if (from)
            for (int64_t i = 0; i < 8 * bytes; i++) low[i] |= (uint32_t)lanes[i] << from;
        else
            for (int64_t i = 0; i < 8 * bytes; i++) low[i] = lanes[i];
    }
}

#endif
