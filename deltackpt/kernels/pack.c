/* `packed`, writing (FORMAT section "packed"): changes into the order of their lists, then tiles into bits. */
#include "common.h"

/* Changes, sorted by position, into the order of (tile, list, rank), with what their values' codes follow from.
 *
 * ``base`` holds all old elements; it is read where there are near lists. Out: ``counts`` (tiles, lists) and
 * ``population`` (tiles, classes), both zeroed by the caller; for each of the n changes in the new order its rank, size,
 * sign and exponent; and how many changes have each (exponent, bit length of the size), 33 lengths an exponent.
 * ``scratch`` has room for 2 n words, ``at`` for tiles * lists. */
EXPORT void dk_pack_sort(const int64_t *positions, const void *old, const void *new, int64_t n, const void *base,
                         const type_t *type, const grid_t *grid, const near_t *near, int64_t *counts,
                         int64_t *population, uint32_t *rank, uint32_t *size, uint8_t *down, uint8_t *exponent,
                         int64_t *histogram, uint32_t *scratch, int64_t *at) {
    const type_t t = *type;
    const grid_t g = *grid;
    const near_t lists = *near;
    const int count = lists.classes + 1;
    uint32_t *key = scratch, *place = scratch + n;

    /* The tile of each change and its index there; rows are passed one by one, or skipped by a division. */
    int64_t end = 0, first_tile = 0, above = 0; /* of the row: its end, its first tile, the index of its start there */
    for (int64_t i = 0; i < n; i++) {
        if (positions[i] >= end) {
            int64_t row = positions[i] / g.width, slice = row / g.height, inside = row - slice * g.height;
            end = (row + 1) * g.width;
            first_tile = (slice * g.rows + inside / g.tile_height) * g.columns;
            above = inside % g.tile_height * g.tile_width;
        }
        uint32_t column = (uint32_t)(positions[i] - (end - g.width)), tile_column = column / (uint32_t)g.tile_width;
        int64_t tile = first_tile + tile_column;
        int list = 0;
        if (lists.classes) list = list_of(exponent_of(load(old, i, t.width), t), lists);
        key[i] = (uint32_t)(tile * count + list);
        place[i] = (uint32_t)(above + column - tile_column * g.tile_width);
        counts[key[i]]++;
    }

    /* The rank of a near change is how many elements of its class come before it in its tile. */
    if (lists.classes) {
        int64_t next = 0, element = 0;
        for (int64_t r = 0; r < g.lead * g.height; r++) {
            int64_t tile = (r / g.height * g.rows + r % g.height / g.tile_height) * g.columns;
            for (int64_t left = 0; left < g.width; left += g.tile_width, tile++) {
                int64_t stop = element + (left + g.tile_width < g.width ? g.tile_width : g.width - left);
                int64_t *seen = population + tile * lists.classes;
#define CALL(w)                                                                                                        \
    for (; element < stop; element += 64)                                                                              \
        for (uint64_t mask = near_mask(base, element, stop - element, t, lists, w); mask; mask &= mask - 1) {          \
            int64_t here = element + __builtin_ctzll(mask);                                                            \
            int class = list_of(exponent_of(load(base, here, w), t), lists) - 1;                                       \
            while (next < n && positions[next] < here) next++;                                                         \
            if (next < n && positions[next] == here) place[next] = (uint32_t)seen[class];                              \
            seen[class]++;                                                                                             \
        }
                BY_WIDTH(t.width, CALL)
#undef CALL
                element = stop;
            }
        }
    }

    int64_t keys = g.lead * g.rows * g.columns * count, sum = 0;
    for (int64_t k = 0; k < keys; k++) {
        at[k] = sum;
        sum += counts[k];
    }
    for (int64_t i = 0; i < n; i++) {
        int64_t to = at[key[i]]++;
        uint32_t bits = (uint32_t)load(old, i, t.width), mask = mask_of(t.width), half = 1u << (8 * t.width - 1);
        uint32_t a = in_order(bits, t.width, t.exponent_bits);
        uint32_t b = in_order((uint32_t)load(new, i, t.width), t.width, t.exponent_bits);
        int is_down = (b ^ half) < (a ^ half);
        rank[to] = place[i];
        down[to] = (uint8_t)is_down;
        size[to] = ((is_down ? a - b : b - a) & mask) - 1;
        exponent[to] = (uint8_t)exponent_of(bits, t);
        histogram[exponent[to] * 33 + bit_length(size[to])]++;
    }
}

/* Ranks to gaps, and how long the sections of each tile get.
 *
 * ``raw`` gives the raw bits of an exponent, ``ceiling`` the exponent from which on a step has no size. Out: ``gaps`` of
 * all written ranks, for each tile the bytes of its unary section, its bytes in all, and its exceptions. */
EXPORT void dk_pack_measure(const int64_t *counts, const int64_t *spans, int64_t tiles, int lists, const uint32_t *rank,
                            const uint32_t *size, const uint8_t *exponent, const uint8_t *raw, int ceiling,
                            int exception_k, uint32_t *gaps, int64_t *unary, int64_t *lengths, int64_t *exceptions) {
    lists_t p;
    for (int64_t tile = 0; tile < tiles; tile++, counts += lists, spans += lists) {
        plan_lists(&p, counts, spans, lists);
        int64_t ones = p.codes, zeros = 0, bytes = octets(p.changes), fields = 0, found = 0, ordinal = 0, last = -1;
        for (int j = 0; j < p.planes; j++) bytes += octets(p.bits[j]);
        for (int l = 0; l < lists; l++) {
            const uint32_t *r = rank;
            int64_t before = -1;
            if (!p.flipped[l])
                for (int64_t i = 0; i < counts[l]; i++) {
                    *gaps = (uint32_t)(r[i] - before - 1);
                    before = r[i];
                    zeros += *gaps++ >> p.k[l];
                }
            else
                for (int64_t element = 0, i = 0; element < spans[l]; element++) {
                    if (i < counts[l] && r[i] == element) {
                        i++;
                        continue;
                    }
                    *gaps = (uint32_t)(element - before - 1);
                    before = element;
                    zeros += *gaps++ >> p.k[l];
                }
            rank += counts[l];
        }
        for (int64_t i = 0; i < p.changes; i++) {
            int e = exponent[i], length = bit_length(size[i]);
            if (e < ceiling) {
                if (length > raw[e]) {
                    zeros += (ordinal - last - 1) >> exception_k;
                    zeros += length - raw[e] - 1;
                    fields += length - 1 - raw[e];
                    last = ordinal;
                    found++;
                }
                ordinal++;
            }
            fields += raw[e];
        }
        size += p.changes;
        exponent += p.changes;
        exceptions[tile] = found;
        unary[tile] = octets(ones + zeros + 2 * found);
        lengths[tile] = bytes + unary[tile] + exception_k * octets(found) + octets(fields);
    }
}

INLINE void set_bit(uint8_t *bits, int64_t at) { bits[at >> 3] |= (uint8_t)(1 << (at & 7)); }

/* Appends bits, lowest first, and never writes past the last of them. */
typedef struct {
    uint8_t *out;
    uint64_t word;
    int held;
} bits_t;

INLINE void put(bits_t *b, uint64_t value, int width) {
    b->word |= value << b->held;
    for (b->held += width; b->held >= 8; b->held -= 8, b->word >>= 8) *b->out++ = (uint8_t)b->word;
}

INLINE void put_unary(bits_t *b, int64_t zeros) {
    for (; zeros >= 32; zeros -= 32) put(b, 0, 32);
    put(b, 1ull << zeros, (int)zeros + 1);
}

INLINE void put_end(bits_t *b) {
    if (b->held) *b->out = (uint8_t)b->word;
}

/* Plane j of the gaps is bit j of the first bits[j] of them. -> what follows the planes. */
INLINE uint8_t *write_planes(uint8_t *out, const uint32_t *gaps, const lists_t *p) {
    uint8_t *plane[MAX_K];
    for (int j = 0; j < p->planes; j++) {
        plane[j] = out;
        out += octets(p->bits[j]);
    }
    for (int64_t first = 0; first < p->codes; first += 8) {
        uint64_t lane[4] = {0};
        int64_t n = p->codes - first < 8 ? p->codes - first : 8;
        for (int i = 0; i < n; i++)
            for (int b = 0; 8 * b < p->planes; b++)
                lane[b] |= (uint64_t)((gaps[first + i] >> 8 * b) & 255) << 8 * i;
        for (int j = 0; j < p->planes && p->bits[j] > first; j++) {
            int64_t left = p->bits[j] - first;
            plane[j][first >> 3] = gather(lane[j >> 3], j & 7) & (left < 8 ? (1 << left) - 1 : 255);
        }
    }
    return out;
}

/* The bytes of all tiles, into ``out``, which is zero and as long as ``lengths`` add up to. */
EXPORT void dk_pack_write(const int64_t *counts, const int64_t *spans, int64_t tiles, int lists, const uint32_t *gaps,
                          const uint32_t *size, const uint8_t *down, const uint8_t *exponent, const uint8_t *raw,
                          int ceiling, int exception_k, const int64_t *unary, const int64_t *lengths,
                          const int64_t *exceptions, uint8_t *out) {
    lists_t p;
    for (int64_t tile = 0; tile < tiles; tile++, counts += lists, spans += lists) {
        plan_lists(&p, counts, spans, lists);
        uint8_t *signs = write_planes(out, gaps, &p), *codes = signs + octets(p.changes), *low = codes + unary[tile];
        int64_t stride = octets(exceptions[tile]);
        bits_t code = {codes, 0, 0}, fields = {low + exception_k * stride, 0, 0};
        for (int l = 0; l < lists; l++)
            for (int64_t i = 0; i < p.listed[l]; i++) put_unary(&code, *gaps++ >> p.k[l]);
        for (int64_t i = 0; i < p.changes; i += 8) {
            uint64_t bytes = 0;
            memcpy(&bytes, down + i, p.changes - i < 8 ? (size_t)(p.changes - i) : 8);
            signs[i >> 3] = gather(bytes, 0);
        }
        int64_t ordinal = 0, last = -1, found = 0;
        for (int64_t i = 0; i < p.changes; i++) {
            int e = exponent[i], width = raw[e];
            if (e >= ceiling) continue;
            if (bit_length(size[i]) > width) {
                int64_t gap = ordinal - last - 1;
                put_unary(&code, gap >> exception_k);
                for (int j = 0; j < exception_k; j++)
                    if (gap >> j & 1) set_bit(low + j * stride, found);
                found++;
                last = ordinal;
                width = bit_length(size[i]) - 1;
            }
            ordinal++;
            if (width) put(&fields, size[i] & ((1ull << width) - 1), width);
        }
        for (int64_t i = 0; found; i++) {
            int e = exponent[i], length = bit_length(size[i]);
            if (e < ceiling && length > raw[e]) {
                put_unary(&code, length - raw[e] - 1);
                found--;
            }
        }
        put_end(&code);
        put_end(&fields);
        size += p.changes;
        down += p.changes;
        exponent += p.changes;
        out += lengths[tile];
    }
}
