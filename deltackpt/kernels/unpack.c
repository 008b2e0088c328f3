/* `packed`, reading (FORMAT section "packed"). The bytes are anybody's: every read is bounded, every defect has a code. */
#include "common.h"

enum { OK, TILE_SHORT, TILE_LENGTH, UNARY_COUNT, GAP_OUTSIDE, POSITION_OUTSIDE, LIST_WRONG, STEP_OUTSIDE, PADDING };

/* How many elements of each class every tile has; with ``local``, also where: by tile, class and index, from ``at`` on,
 * which then moves to the end of each. */
EXPORT void dk_population(const void *base, const type_t *type, const grid_t *grid, const near_t *near, int64_t *at,
                          uint32_t *local) {
    const type_t t = *type;
    const grid_t g = *grid;
    const near_t lists = *near;
    int64_t element = 0;
    if (!g.width) return; /* no elements, but as many rows as a header can claim */
    for (int64_t r = 0; r < g.lead * g.height; r++) {
        int64_t inside = r % g.height, tile = (r / g.height * g.rows + inside / g.tile_height) * g.columns;
        for (int64_t left = 0; left < g.width; left += g.tile_width, tile++) {
            int64_t stop = element + (left + g.tile_width < g.width ? g.tile_width : g.width - left);
            int64_t *next = at + tile * lists.classes, first = inside % g.tile_height * g.tile_width - element;
#define CALL(w)                                                                                                        \
    for (; element < stop; element += 64)                                                                              \
        for (uint64_t mask = near_mask(base, element, stop - element, t, lists, w); mask; mask &= mask - 1) {          \
            int64_t here = element + __builtin_ctzll(mask);                                                            \
            int class = list_of(exponent_of(load(base, here, w), t), lists) - 1;                                       \
            if (local) local[next[class]] = (uint32_t)(first + here);                                                  \
            next[class]++;                                                                                             \
        }
            BY_WIDTH(t.width, CALL)
#undef CALL
            element = stop;
        }
    }
}

INLINE uint64_t load_up_to_8(const uint8_t *from, const uint8_t *end) {
    uint64_t word = 0;
    if (end - from >= 8) {
        memcpy(&word, from, 8);
        return word;
    }
    for (int i = 0; from < end; from++, i += 8) word |= (uint64_t)*from << i;
    return word;
}

/* Reads the zeros before each one of a section, one number after the other. The caller knows how many there are. */
typedef struct {
    const uint8_t *bits, *end;
    int64_t at; /* bits read */
} unary_t;

INLINE int64_t unary_next(unary_t *u) {
    const int64_t first = u->at;
    for (;; u->at = (u->at & ~7ll) + 64) { /* zeros in all of the eight bytes: on to the next */
        uint64_t word = load_up_to_8(u->bits + (u->at >> 3), u->end) >> (u->at & 7);
        if (word) {
            u->at += __builtin_ctzll(word) + 1;
            return u->at - 1 - first;
        }
    }
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

/* The bits of one byte, a byte each. */
INLINE uint64_t spread(uint64_t byte) {
    uint64_t bits = byte * 0x0101010101010101u & 0x8040201008040201u;
    return ((bits + 0x7F7F7F7F7F7F7F7Fu) | bits) >> 7 & 0x0101010101010101u;
}

/* Low bits of gaps first, first + 1, ... first + 7. */
INLINE void read_planes(uint32_t *low, const uint8_t *const *plane, const lists_t *p, int64_t first) {
    uint64_t lane[4] = {0};
    for (int j = 0; j < p->planes && p->bits[j] > first; j++)
        lane[j >> 3] |= spread(plane[j][first >> 3]) << (j & 7);
    for (int i = 0; i < 8; i++) {
        low[i] = 0;
        for (int b = 0; 8 * b < p->planes; b++) low[i] |= (uint32_t)(lane[b] >> 8 * i & 255) << 8 * b;
    }
}

typedef struct {
    const grid_t *grid;
    const near_t *near;
    const type_t *type;
    const void *base;
    const int64_t *population; /* where each (tile, class) begins in ``local`` */
    const uint32_t *local;
    const uint8_t *raw;
    int ceiling, exception_k;
} stream_t;

/* The positions of one tile's changes. -> a code */
INLINE int read_positions(const stream_t *s, const lists_t *p, int64_t tile, const int64_t *spans,
                          const uint8_t *const *plane, unary_t *u, int64_t *positions) {
    const grid_t *g = s->grid;
    int64_t above = tile / g->columns, slice = above / g->rows;
    int64_t top = above % g->rows * g->tile_height, left = tile % g->columns * g->tile_width;
    int64_t origin = (slice * g->height + top) * g->width + left;
    int64_t height = g->height - top < g->tile_height ? g->height - top : g->tile_height;
    int64_t width = g->width - left < g->tile_width ? g->width - left : g->tile_width;
    /* Copies, as a store to ``positions`` might change what a pointer leads to, for all that the compiler knows. */
    const uint32_t tile_width = (uint32_t)g->tile_width;
    const int64_t full_width = g->width;
    int64_t code = 0;
    uint32_t low[8];
    unary_t ones = *u;
    for (int l = 0; l < s->near->classes + 1; l++) {
        const uint32_t *local = l ? s->local + s->population[tile * s->near->classes + l - 1] : NULL;
        const int64_t listed = p->listed[l], span = spans[l], flipped = p->flipped[l];
        const int k = p->k[l];
        int64_t next = 0; /* the rank after the last one read */
        for (int64_t i = 0; i < listed + flipped; i++) {
            int64_t from = next, to = span; /* ranks to emit; of a flipped list those between the ones read */
            if (i < listed) {
                if (!(code & 7)) read_planes(low, plane, p, code);
                int64_t quotient = unary_next(&ones);
                if (quotient > span >> k) return GAP_OUTSIDE;
                int64_t rank = next + (quotient << k | (low[code & 7] & ((1u << k) - 1)));
                /* Those that follow rise, so they need room too; else a flipped list could emit more than it counts. */
                if (rank + (listed - 1 - i) >= span) return GAP_OUTSIDE;
                code++;
                from = flipped ? next : rank;
                to = rank + !flipped;
                next = rank + 1;
            }
            for (int64_t rank = from; rank < to; rank++) {
                uint32_t at = local ? local[rank] : (uint32_t)rank, row = at / tile_width, column = at - row * tile_width;
                if (row >= height || column >= width) return POSITION_OUTSIDE;
                *positions++ = origin + row * full_width + column;
            }
        }
    }
    *u = ones;
    return OK;
}

INLINE int read_values(const stream_t *s, const lists_t *p, const int64_t *counts, const uint8_t *signs, unary_t *gaps,
                       int64_t exceptions, const uint8_t *low, const uint8_t *fields, const uint8_t *end,
                       const int64_t *positions, void *values, const int width) {
    const type_t t = *s->type;
    const int64_t stride = octets(exceptions), room = 8 * (end - fields), changes = p->changes;
    const int ceiling = s->ceiling, exception_k = s->exception_k;
    const int threshold = s->near->classes ? s->near->threshold : -1; /* far elements lie above it */
    const uint8_t *raw = s->raw;
    const void *base = s->base;
    int64_t field = 0, ordinal = 0, next = -1, found = 0, far = counts[0];
    unary_t gap_codes = *gaps, excess = *gaps; /* first the exceptions' gaps, then what their sizes exceed raw bits by */
    for (int64_t i = 0; i < exceptions; i++) unary_next(&excess);
    for (int64_t i = 0; i < changes; i++) {
        if (found < exceptions && next < ordinal) {
            int64_t gap = unary_next(&gap_codes) << exception_k;
            for (int j = 0; j < exception_k; j++)
                gap |= (int64_t)(low[j * stride + (found >> 3)] >> (found & 7) & 1) << j;
            next = ordinal + gap;
            found++;
        }
        uint32_t old = (uint32_t)load(base, positions[i], width), size = 0;
        int e = exponent_of(old, t);
        if (i < far && e <= threshold) return LIST_WRONG;
        if (e < ceiling) {
            int bits = raw[e];
            uint32_t top = 0;
            if (next == ordinal) {
                int64_t length = bits + unary_next(&excess) + 1;
                if (length > 8 * width) return STEP_OUTSIDE;
                bits = (int)length - 1;
                top = 1u << bits;
            }
            if (bits) {
                if (field + bits > room) return TILE_LENGTH;
                uint64_t word = load_up_to_8(fields + (field >> 3), end);
                size = (uint32_t)(word >> (field & 7) & ((1ull << bits) - 1));
                field += bits;
            }
            size |= top;
            ordinal++;
        }
        uint32_t step = size + 1, a = in_order(old, width, t.exponent_bits);
        uint32_t flip = -(uint32_t)(signs[i >> 3] >> (i & 7) & 1); /* two's complement, as every other sign is set */
        store(values, i, in_order((a + ((step ^ flip) - flip)) & mask_of(width), width, t.exponent_bits), width);
    }
    if (found < exceptions || (exceptions && next >= ordinal)) return GAP_OUTSIDE;
    if (octets(field) != end - fields) return TILE_LENGTH;
    return padded(fields, field) ? PADDING : OK;
}

/* Tiles to positions (tile by tile, list by list) and new values of all changes.
 *
 * ``counts`` and ``spans`` are (tiles, lists), no count above its span; ``unary`` and ``lengths`` are the bytes of each
 * tile, adding up to at most those at ``payload``. -> 0, or the code of the first defect, whose tile is in ``where``. */
EXPORT int dk_unpack(const stream_t *stream, int64_t tiles, const int64_t *counts, const int64_t *spans,
                     const int64_t *unary, const int64_t *lengths, const uint8_t *payload, int64_t *positions,
                     void *values, int64_t *where) {
    const stream_t s = *stream;
    const int lists = s.near->classes + 1, width = s.type->width;
    lists_t p;
    for (int64_t i = 0; i < tiles; i++, counts += lists, spans += lists) {
        const uint8_t *end = payload + lengths[i];
        *where = i;
        plan_lists(&p, counts, spans, lists);
        int64_t at = octets(p.changes), used, bytes = 0;
        for (int j = 0; j < p.planes; j++) bytes += octets(p.bits[j]);
        if (bytes + at + unary[i] > lengths[i]) return TILE_SHORT;
        const uint8_t *plane[MAX_K];
        const uint8_t *signs = payload;
        for (int j = 0; j < p.planes; j++) {
            plane[j] = signs;
            if (padded(signs, p.bits[j])) return PADDING;
            signs += octets(p.bits[j]);
        }
        if (padded(signs, p.changes)) return PADDING;
        const uint8_t *codes = signs + at, *low = codes + unary[i];
        int64_t exceptions = count_ones(codes, unary[i], &used) - p.codes;
        if (exceptions < 0 || exceptions & 1 || octets(used) != unary[i]) return UNARY_COUNT;
        exceptions /= 2;
        if (exceptions > p.changes) return GAP_OUTSIDE;
        const uint8_t *fields = low + s.exception_k * octets(exceptions);
        if (fields > end) return TILE_SHORT;
        for (int j = 0; j < s.exception_k; j++)
            if (padded(low + j * octets(exceptions), exceptions)) return PADDING;
        unary_t u = {codes, codes + unary[i], 0};
        int code = read_positions(&s, &p, i, spans, plane, &u, positions);
#define CALL(w) code = code ? code : read_values(&s, &p, counts, signs, &u, exceptions, low, fields, end, positions, values, w)
        switch (width) {
        case 1: CALL(1); break;
        case 2: CALL(2); break;
        default: CALL(4);
        }
#undef CALL
        if (code) return code;
        positions += p.changes;
        values = (char *)values + p.changes * width;
        payload = end;
    }
    return OK;
}
