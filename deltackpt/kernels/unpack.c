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
    const uint8_t *next, *end; /* bytes after those in ``word`` */
    uint64_t word;             /* 64 bits, less the ones that were read */
    int64_t begins, last;      /* the bit where ``word`` begins, and the bit after the last one read */
} unary_t;

INLINE unary_t unary_at(const uint8_t *bits, const uint8_t *end) { return (unary_t){bits, end, 0, -64, 0}; }

INLINE int64_t unary_next(unary_t *u) {
    while (!u->word) {
        u->word = load_up_to_8(u->next, u->end);
        u->next += 8;
        u->begins += 64;
    }
    int64_t at = u->begins + __builtin_ctzll(u->word), zeros = at - u->last;
    u->word &= u->word - 1;
    u->last = at + 1;
    return zeros;
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

/* Low bits of gaps first, first + 1, ... first + 7, where ``first`` is a multiple of 8. */
INLINE void read_planes(uint32_t *low, const uint8_t *const *plane, const lists_t *p, int64_t first) {
    for (int i = 0; i < 8; i++) low[i] = 0;
    for (int from = 0; from < p->planes; from += 8) {
        uint64_t lane = 0;
        for (int j = from; j < p->planes && j < from + 8 && p->bits[j] > first; j++)
            lane |= spread(plane[j][first >> 3]) << (j - from);
        for (int i = 0; i < 8; i++) low[i] |= (uint32_t)(lane >> 8 * i & 255) << from;
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
    int wide; /* bytes of a position that is made: 4 or 8 */
} stream_t;

#define RUN 128 /* changes that take each step together: simple loops, and many words on their way at a time */


typedef struct {
    int64_t origin, full_width; /* the element at the tile's corner; elements of a row of the tensor */
    uint32_t rows, columns;     /* that exist */
    uint32_t width;             /* what a local index counts */
    uint64_t inverse;           /* an index * inverse >> 32 is its row, or the one before */
} tile_t;

INLINE tile_t tile_of(const grid_t *g, int64_t tile) {
    int64_t above = tile / g->columns, slice = above / g->rows;
    int64_t top = above % g->rows * g->tile_height, left = tile % g->columns * g->tile_width;
    int64_t height = g->height - top < g->tile_height ? g->height - top : g->tile_height;
    int64_t width = g->width - left < g->tile_width ? g->width - left : g->tile_width;
    tile_t t = {(slice * g->height + top) * g->width + left, g->width, 0, 0, (uint32_t)g->tile_width, 0};
    t.rows = height > 0 ? (uint32_t)height : 0;
    t.columns = width > 0 ? (uint32_t)width : 0;
    t.inverse = t.width ? (1ull << 32) / t.width : 0;
    return t;
}

/* Local indices of a tile to positions; their old words are asked for, as they come from far. -> a code */
INLINE int emit(const tile_t *tile, const uint32_t *local, int64_t n, const char *base, void *positions, int64_t first,
                const int width, const int wide) {
    uint32_t outside = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t row = (uint32_t)(local[i] * tile->inverse >> 32), column = local[i] - row * tile->width;
        uint32_t next = column >= tile->width;
        row += next;
        column -= tile->width & -next;
        outside |= (row >= tile->rows) | (column >= tile->columns);
        store(positions, first + i, (uint64_t)(tile->origin + row * tile->full_width + column), wide);
    }
    if (outside) return POSITION_OUTSIDE;
    for (int64_t i = 0; i < n; i++) __builtin_prefetch(base + (int64_t)load(positions, first + i, wide) * width);
    return OK;
}

/* The positions of one tile's changes. -> a code */
INLINE int read_positions(const stream_t *s, const lists_t *p, int64_t number, const int64_t *spans,
                          const uint8_t *const *plane, unary_t *u, void *positions, const int width, const int wide) {
    const tile_t tile = tile_of(s->grid, number);
    int64_t code = 0, made = 0;
    uint32_t low[RUN + 8], at[RUN];
    unary_t ones = *u;
    for (int l = 0; l < s->near->classes + 1; l++) {
        const uint32_t *local = l ? s->local + s->population[number * s->near->classes + l - 1] : NULL;
        const int64_t listed = p->listed[l], span = spans[l], longest = span >> p->k[l];
        const int k = p->k[l];
        const uint32_t mask = (1u << k) - 1;
        int64_t next = 0, emitted = 0; /* the rank after the last one read; of a flipped list, after the last emitted */
        for (int64_t i = 0, n; i < listed || (p->flipped[l] && emitted < span); i += n, code += n) {
            n = listed - i < RUN ? listed - i : RUN;
            for (int64_t j = 0; j < (code & 7) + n; j += 8) read_planes(low + j, plane, p, (code & ~7ll) + j);
            for (int64_t j = 0; j < n; j++) {
                int64_t quotient = unary_next(&ones);
                if (quotient > longest) return GAP_OUTSIDE;
                at[j] = (uint32_t)quotient;
            }
            for (int64_t j = 0; j < n; j++) {
                next += (int64_t)at[j] << k | (low[(code & 7) + j] & mask);
                at[j] = (uint32_t)next++;
            }
            /* Those that follow rise, so they need room too; else a flipped list could emit more than it counts. */
            if (next + (listed - i - n) > span) return GAP_OUTSIDE;
            if (!p->flipped[l]) {
                if (local)
                    for (int64_t j = 0; j < n; j++) at[j] = local[at[j]];
                int code_of = emit(&tile, at, n, s->base, positions, made, width, wide);
                if (code_of) return code_of;
                made += n;
                continue;
            }
            for (int64_t j = 0; j <= n; j++) { /* the ranks between those that were read */
                int64_t to = j < n ? at[j] : i + n < listed ? emitted : span;
                for (; emitted < to; emitted++) {
                    uint32_t one = local ? local[emitted] : (uint32_t)emitted;
                    int code_of = emit(&tile, &one, 1, s->base, positions, made++, width, wide);
                    if (code_of) return code_of;
                }
                if (j < n) emitted++;
            }
        }
    }
    *u = ones;
    return OK;
}

INLINE int read_values(const stream_t *s, const lists_t *p, const int64_t *counts, const uint8_t *signs, unary_t *gaps,
                       int64_t exceptions, const uint8_t *low, const uint8_t *fields, const uint8_t *end,
                       const void *positions, void *values, const int width, const int wide) {
    const type_t t = *s->type;
    const int64_t stride = octets(exceptions), room = 8 * (end - fields), changes = p->changes;
    const int exception_k = s->exception_k;
    const int64_t far = s->near->classes ? counts[0] : 0; /* elements that must lie above the threshold */
    int64_t field = 0, ordinal = 0, next = -1, found = 0;
    unary_t gap_codes = *gaps, excess = *gaps; /* first the exceptions' gaps, then what their sizes exceed raw bits by */
    uint32_t old[RUN], size[RUN];
    uint8_t bits[EXPONENTS]; /* raw bits, and 128 for those that count for exceptions; without, there are no bits */
    for (int e = 0; e < EXPONENTS; e++) bits[e] = e < s->ceiling ? s->raw[e] | 128 : 0;
    for (int64_t i = 0; i < exceptions; i++) unary_next(&excess);
#define FIND_NEXT(first)                                                                                               \
    {                                                                                                                  \
        int64_t gap = unary_next(&gap_codes) << exception_k;                                                           \
        for (int j = 0; j < exception_k; j++) gap |= (int64_t)(low[j * stride + (found >> 3)] >> (found & 7) & 1) << j; \
        next = (first) + gap;                                                                                          \
    }
    if (exceptions) FIND_NEXT(0)
    for (int64_t first = 0, n; first < changes; first += n) {
        n = changes - first < RUN ? changes - first : RUN;
        for (int64_t i = 0; i < n; i++)
            old[i] = (uint32_t)load(s->base, (int64_t)load(positions, first + i, wide), width);
        for (int64_t i = 0; i < n && first + i < far; i++)
            if (exponent_of(old[i], t) <= s->near->threshold) return LIST_WRONG;
        for (int64_t i = 0; i < n; i++) {
            int known = bits[exponent_of(old[i], t)], count = known & 127;
            uint32_t top = 0;
            if ((known >> 7) & (ordinal == next)) { /* rare; all else that differs from change to change is no branch */
                int64_t length = count + unary_next(&excess) + 1;
                if (length > 8 * width) return STEP_OUTSIDE;
                count = (int)length - 1;
                top = 1u << count;
                next = -1;
                if (++found < exceptions) FIND_NEXT(ordinal + 1)
            }
            ordinal += known >> 7;
            if (field + count > room) return TILE_LENGTH;
            uint64_t word = load_up_to_8(fields + (field >> 3), end);
            size[i] = (uint32_t)(word >> (field & 7) & ((1ull << count) - 1)) | top;
            field += count;
        }
        for (int64_t i = 0; i < n; i++) {
            uint32_t step = size[i] + 1, a = in_order(old[i], width, t.exponent_bits);
            uint32_t flip = -(uint32_t)(signs[(first + i) >> 3] >> (i & 7) & 1); /* two's complement */
            uint32_t made = in_order((a + ((step ^ flip) - flip)) & mask_of(width), width, t.exponent_bits);
            store(values, first + i, made, width);
        }
    }
#undef FIND_NEXT
    if (found < exceptions) return GAP_OUTSIDE;
    if (octets(field) != end - fields) return TILE_LENGTH;
    return padded(fields, field) ? PADDING : OK;
}

/* Tiles to positions (tile by tile, list by list) and new values of all changes.
 *
 * ``counts`` and ``spans`` are (tiles, lists), no count above its span; ``unary`` and ``lengths`` are the bytes of each
 * tile, adding up to at most those at ``payload``. Positions are of ``wide`` bytes, 4 if all fit. -> 0, or the code of the first defect, whose tile is in ``where``. */
EXPORT int dk_unpack(const stream_t *stream, int64_t tiles, const int64_t *counts, const int64_t *spans,
                     const int64_t *unary, const int64_t *lengths, const uint8_t *payload, void *positions,
                     void *values, int64_t *where) {
    const stream_t s = *stream;
    const int lists = s.near->classes + 1, width = s.type->width, wide = s.wide;
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
        unary_t u = unary_at(codes, codes + unary[i]);
        int code;
#define CALL(w, p_)                                                                                                    \
    code = read_positions(&s, &p, i, spans, plane, &u, positions, w, p_);                                              \
    if (!code) code = read_values(&s, &p, counts, signs, &u, exceptions, low, fields, end, positions, values, w, p_)
        switch (width + (wide & 8)) {
        case 1: CALL(1, 4); break;
        case 2: CALL(2, 4); break;
        case 4: CALL(4, 4); break;
        case 9: CALL(1, 8); break;
        case 10: CALL(2, 8); break;
        default: CALL(4, 8);
        }
#undef CALL
        if (code) return code;
        positions = (char *)positions + p.changes * wide;
        values = (char *)values + p.changes * width;
        payload = end;
    }
    return OK;
}
