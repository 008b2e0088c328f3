/* What reading and writing the lists of `packed` share (FORMAT section "packed"): tiles, parameters, scans. */
#ifndef DELTACKPT_LISTS_H
#define DELTACKPT_LISTS_H

#include "common.h"
#include "workers.h"

#define MAX_CLASSES 15
#define ALL_LISTS (2 * MAX_CLASSES) /* of changes by class, and of long ones */
#define MAX_ELEMENTS ((int64_t)1 << 31) /* of a tile */
#define CHUNK 64                     /* elements that a scan looks at together: a bit each in a word */
#define ROW 16                       /* counts that a scan keeps for each chunk: one a class, and zeros */
#define BLOCK_CHUNKS 64
#define BLOCK_ELEMENTS (BLOCK_CHUNKS * CHUNK)

/* A tensor and its lists, as the index has them. */
typedef struct {
    int64_t height, width, rows, columns;
    int32_t word, exponent_start, exponent_bits; /* bytes of an element; the field of its old exponent */
    int32_t classes, sized, top, anchor;
    int32_t unused;
} form_t;

INLINE type_t type_of(const form_t *f) { return (type_t){f->word, f->exponent_start, f->exponent_bits}; }

INLINE int class_of(int exponent, const form_t *f) {
    const int depth = f->top - exponent;
    return depth < 0 ? 0 : depth < f->classes - 1 ? depth : f->classes - 1;
}

/* Bits of size of a change that is not long, of a class that has sizes. */
INLINE int raw_bits(int exponent, const form_t *f) {
    const int raw = f->anchor - exponent;
    return raw < 0 ? 0 : raw < 8 * f->word - 1 ? raw : 8 * f->word - 1;
}

typedef struct {
    int64_t origin, elements; /* the flat position of the first; how many exist */
    int64_t wide, skip;       /* elements of a row of the tile; of the tensor's row, those outside of it */
    int contiguous;
    uint64_t inverse; /* where it is not contiguous: an index, times this, >> shift is its row */
    int shift;
} tile_at_t;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t parts(int64_t all, int64_t by) { return all / by + (all % by != 0); }

INLINE tile_at_t tile_at(const form_t *f, int64_t number) {
    const int64_t tile_height = parts(f->height, f->rows), tile_width = parts(f->width, f->columns);
    const int64_t top = least(number / f->columns * tile_height, f->height);
    const int64_t left = least(number % f->columns * tile_width, f->width);
    const int64_t high = least(f->height - top, tile_height), wide = least(f->width - left, tile_width);
    tile_at_t t = {top * f->width + left, high * wide, wide, f->width - wide, high <= 1 || wide == f->width, 0, 0};
    if (!t.contiguous && wide) { /* 2^shift / wide, rounded up: too large by less than 1 in 2^31, and at most 2^32 */
        t.shift = 31 + bit_length((uint32_t)(wide - 1));
        t.inverse = ((1ull << t.shift) + (uint64_t)wide - 1) / (uint64_t)wide;
    }
    return t;
}

/* The flat position of an element of the tile. */
INLINE int64_t flat(const tile_at_t *t, uint32_t local) {
    return t->origin + local + (t->contiguous ? 0 : (int64_t)(local * t->inverse >> t->shift) * t->skip);
}

/* Where a block of a tile lies: ``left`` elements from ``x`` on, then, ``skip`` bytes further, runs of ``wide``, all of
 * whole chunks; the last block alone may end within one. What lies ``ahead`` bytes is wanted next. */
typedef struct {
    const uint8_t *x;
    int64_t elements, left, wide, skip, ahead;
} block_t;

/* The ``n`` elements of the tile from ``at`` on: where they lie, or, if rows are no whole chunks, copied to ``room``. */
block_t block_of(const form_t *f, const tile_at_t *t, const uint8_t *elements, int64_t at, int64_t n, uint8_t *room);

INLINE int64_t listed_of(int64_t chosen, int64_t candidates) {
    return 2 * chosen > candidates ? candidates - chosen : chosen;
}

/* The largest k in [0, 31] with listed << k at most 31/32 of candidates - listed / 2; 0 without one. */
INLINE int rice(int64_t listed, int64_t candidates) {
    if (!listed) return 0;
    int64_t room = candidates - (listed >> 1);
    const int64_t quotient = (room - (room >> 5)) / listed;
    const int k = quotient > 0 ? 63 - __builtin_clzll((uint64_t)quotient) : 0;
    return k < MAX_K ? k : MAX_K;
}

/* The places that are to be found in a scan, by class: rising ranks in [next, end), overwritten by local indices. */
typedef struct {
    uint32_t *next[ROW], *end[ROW];
    uint32_t seen[ROW]; /* elements of each class in the blocks before */
    int classes;
} select_t;

/* Changes of a tile, rising, whose ranks are to be found: of all before ``next`` they are. */
typedef struct {
    const uint32_t *local;
    uint32_t *rank;
    uint8_t *class;
    int64_t next, changes;
    uint32_t seen[ROW]; /* elements of each class in the blocks before */
} rank_t;

/* How the old elements of tiles are looked at, in the instructions that this processor has. */
typedef struct {
    /* The elements of one block to the class of each, with 255 after the last up to a whole chunk, and how many of each
     * class each chunk has; those of all are added to ``counts``. */
    void (*classify)(block_t block, const form_t *f, uint8_t *class, uint8_t *rows, uint32_t *counts);
    /* Over the chunks of one block of a tile, which begins at ``first``. */
    void (*select)(const uint8_t *class, const uint8_t *rows, int64_t chunks, uint32_t first, select_t *s);
    void (*rank)(const uint8_t *class, const uint8_t *rows, int64_t chunks, uint32_t first, rank_t *r);
} scan_t;

const scan_t *scan_of_this_processor(void);

/* Sums of the counts of chunks, as vectors; compilers do not find them by themselves. */
typedef uint8_t row_t __attribute__((vector_size(ROW)));
typedef uint16_t row_sum_t __attribute__((vector_size(2 * ROW)));

#define row_of(row) (__builtin_convertvector(*(const row_t __attribute__((aligned(1))) *)(row), row_sum_t))

INLINE uint64_t word_at(const uint8_t *from, const uint8_t *limit) { /* eight bytes, those from ``limit`` on as zeros */
    uint64_t word = 0;
    if (limit - from >= 8) {
        memcpy(&word, from, 8);
        return word;
    }
    for (int i = 0; from < limit; from++, i += 8) word |= (uint64_t)*from << i;
    return word;
}

#endif
