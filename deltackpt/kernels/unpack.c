/* `packed`, reading (FORMAT section "packed"). The bytes are not trusted: every read is bounded, every defect has a code. */
#include "sections.h"

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

typedef struct {
    const grid_t *grid;
    const near_t *near;
    const type_t *type;
    void *base;
    const int64_t *population; /* where each (tile, class) begins in ``local`` */
    const uint32_t *local;
    const uint8_t *raw;
    int ceiling, exception_k;
    int wide; /* bytes of a position that is made: 4 or 8 */
} stream_t;

typedef struct {
    int64_t origin, full_width; /* the element at the tile's corner; elements of a row of the tensor */
    int32_t bottom, right;      /* the last row and column that exist, or -1 */
    uint32_t width;             /* what a local index counts */
    uint64_t inverse;           /* an index below 2^31, times this, >> shift is its row */
    int shift;
} tile_t;

INLINE tile_t tile_of(const grid_t *g, int64_t tile) {
    int64_t above = tile / g->columns, slice = above / g->rows;
    int64_t top = above % g->rows * g->tile_height, left = tile % g->columns * g->tile_width;
    int64_t height = g->height - top < g->tile_height ? g->height - top : g->tile_height;
    int64_t width = g->width - left < g->tile_width ? g->width - left : g->tile_width;
    tile_t t = {(slice * g->height + top) * g->width + left, g->width, -1, -1, (uint32_t)g->tile_width, 0, 31};
    if (height > 0) t.bottom = (int32_t)(height - 1);
    if (width > 0) t.right = (int32_t)(width - 1);
    if (t.width) { /* 2^shift / width, rounded up: too large by less than 1 in 2^31, and at most 2^32 - 1, or 2^31 */
        t.shift += bit_length(t.width - 1);
        t.inverse = ((1ull << t.shift) + t.width - 1) / t.width;
    }
    return t;
}

/* Local indices of a tile to positions. -> a code */
INLINE int emit(const tile_t *tile, const uint32_t *local, int64_t n, void *positions, int64_t first, const int wide) {
    const int64_t origin = tile->origin, skip = tile->full_width - tile->width;
    const uint32_t inverse = (uint32_t)tile->inverse, columns = tile->width;
    const int32_t bottom = tile->bottom, right = tile->right;
    const int shift = tile->shift;
    int32_t outside = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t row = (uint32_t)((uint64_t)local[i] * inverse >> shift);
        outside |= ((int32_t)row > bottom) | ((int32_t)(local[i] - row * columns) > right);
        store(positions, first + i, (uint64_t)(origin + local[i] + row * skip), wide);
    }
    return outside ? POSITION_OUTSIDE : OK;
}

/* The positions of one tile's changes. -> a code */
INLINE int read_positions(const stream_t *s, const lists_t *p, int64_t number, const int64_t *spans,
                          const uint8_t *const *plane, unary_t *u, void *positions, const int wide) {
    const tile_t tile = tile_of(s->grid, number);
    int64_t code = 0, made = 0;
    uint32_t low[RUN + 8], at[RUN], others[RUN];
    for (int l = 0; l < s->near->classes + 1; l++) {
        const uint32_t *local = l ? s->local + s->population[number * s->near->classes + l - 1] : NULL;
        const int64_t listed = p->listed[l], span = spans[l];
        const int k = p->k[l], flipped = p->flipped[l];
        int64_t next = 0; /* the rank after the last one read */
        int64_t emitted = 0, held = 0; /* of a flipped list: ranks passed, and those that wait in ``others`` */
        for (int64_t i = 0, n; i < listed || (flipped && emitted < span); i += n, code += n) {
            n = listed - i < RUN ? listed - i : RUN;
            if (n) {
                const int64_t quotients = unary_run(u, at, n) - (n - 1);
                if (quotients > span >> k) return GAP_OUTSIDE;
                read_planes(low, plane, k, code, n);
                const uint32_t *from = low + (code & 7), start = (uint32_t)next;
                uint64_t below = 0;
                for (int64_t j = 0; j < n; j++) {
                    below += from[j];
                    at[j] = start + (uint32_t)below + (uint32_t)j + ((at[j] - (uint32_t)j) << k);
                }
                next += (quotients << k) + (int64_t)below + n;
            }
            /* Those that follow rise, so they need room too; else a flipped list could emit more than it counts. */
            if (next + (listed - i - n) > span) return GAP_OUTSIDE;
            if (!flipped) {
                if (local)
                    for (int64_t j = 0; j < n; j++) at[j] = local[at[j]];
                int refused = emit(&tile, at, n, positions, made, wide);
                if (refused) return refused;
                made += n;
                continue;
            }
            for (int64_t j = 0; j <= n; j++) { /* the ranks between those that were read */
                int64_t to = j < n ? at[j] : i + n < listed ? emitted : span;
                for (; emitted < to; emitted++) {
                    others[held++] = local ? local[emitted] : (uint32_t)emitted;
                    if (held < RUN && emitted + 1 < span) continue;
                    int refused = emit(&tile, others, held, positions, made, wide);
                    if (refused) return refused;
                    made += held;
                    held = 0;
                }
                if (j < n) emitted++;
            }
        }
        if (held) {
            int refused = emit(&tile, others, held, positions, made, wide);
            if (refused) return refused;
            made += held;
        }
    }
    return OK;
}

/* What a tile holds after its gaps. */
typedef struct {
    int64_t changes, exceptions;
    const uint8_t *signs, *low, *fields, *end; /* ``low``: of the exceptions' gaps; ``end`` of the tile */
    const uint8_t *limit;                      /* the end of the payload: no byte is read from there on */
    const uint8_t *bits;                       /* by old exponent: raw bits, and 128 if it counts for exceptions */
    unary_t codes;                             /* of the exceptions */
} sections_t;

/* New values of one tile's changes, into ``values``, or, if that is NULL, into their places. The first ``far`` are of
 * elements that must lie above the threshold. -> a code */
INLINE int read_values(const stream_t *s, const sections_t *c, int64_t far, const void *positions, void *values,
                       const int width, const int wide) {
    const type_t t = *s->type;
    const uint8_t *const low = c->low, *const fields = c->fields, *const limit = c->limit, *const bits = c->bits;
    const int64_t changes = c->changes, exceptions = c->exceptions, stride = octets(exceptions);
    const int64_t room = 8 * (c->end - fields);
    const int exception_k = s->exception_k;
    const int64_t never = INT64_MAX;
    int64_t field = 0, ordinal = 0, next = never, found = 0;
    /* First the exceptions' gaps, then what their sizes exceed raw bits by. */
    unary_t gap_codes = c->codes, excess = c->codes;
    uint32_t old[RUN], size[RUN];
    uint8_t count[RUN], eligible[RUN + 1], down[RUN];
    for (int64_t i = 0; i < exceptions; i++) unary_next(&excess);
#define FIND_NEXT(first)                                                                                               \
    {                                                                                                                  \
        int64_t gap = unary_next(&gap_codes) << exception_k;                                                           \
        for (int j = 0; j < exception_k; j++)                                                                          \
            gap |= (int64_t)(low[j * stride + (found >> 3)] >> (found & 7) & 1) << j;                                  \
        next = (first) + gap;                                                                                          \
    }
    if (exceptions) FIND_NEXT(0)
    for (int64_t first = 0, n; first < changes; first += n) {
        n = changes - first < RUN ? changes - first : RUN;
        int64_t m = 0, wanted = 0;
        for (int64_t i = 0; i < n; i++)
            old[i] = (uint32_t)load(s->base, (int64_t)load(positions, first + i, wide), width);
        for (int64_t i = 0; i < n; i++) {
            /* Spread over the work, as a processor drops those that it has no room for; the loads above are in a loop
             * of their own, as it looks at so many instructions ahead. */
            int64_t ahead = first + i + RUN < changes ? first + i + RUN : changes - 1;
            __builtin_prefetch((const char *)s->base + (int64_t)load(positions, ahead, wide) * width);
            uint8_t known = bits[exponent_of(old[i], t)];
            count[i] = known & 127;
            eligible[m] = (uint8_t)i;
            m += known >> 7;
        }
        for (int64_t i = 0; i < n && first + i < far; i++)
            if (exponent_of(old[i], t) <= s->near->threshold) return LIST_WRONG;
        memset(size, 0, sizeof size);
        while (next - ordinal < m) { /* rare; all else that differs from change to change is no branch */
            const int i = eligible[next - ordinal];
            const int64_t length = count[i] + unary_next(&excess) + 1;
            if (length > 8 * width) return STEP_OUTSIDE;
            count[i] = (uint8_t)(length - 1);
            size[i] = 1u << (length - 1);
            const int64_t after = next + 1;
            next = never;
            if (++found < exceptions) FIND_NEXT(after)
        }
        ordinal += m;
        for (int64_t i = 0; i < m; i++) wanted += count[eligible[i]];
        if (field + wanted > room) return TILE_LENGTH;
        for (int64_t j = 0; j < m; j++) {
            const int i = eligible[j];
            uint64_t word = load_up_to_8(fields + (field >> 3), limit);
            size[i] |= (uint32_t)(word >> (field & 7) & ((1ull << count[i]) - 1));
            field += count[i];
        }
        for (int64_t b = 0; b < octets(n); b++) memcpy(down + 8 * b, &spread[c->signs[(first >> 3) + b]], 8);
        for (int64_t i = 0; i < n; i++) {
            uint32_t step = size[i] + 1, a = in_order(old[i], width, t.exponent_bits);
            uint32_t flip = -(uint32_t)down[i]; /* two's complement */
            size[i] = in_order((a + ((step ^ flip) - flip)) & mask_of(width), width, t.exponent_bits);
        }
        if (values)
            for (int64_t i = 0; i < n; i++) store(values, first + i, size[i], width);
        else
            for (int64_t i = 0; i < n; i++) store(s->base, (int64_t)load(positions, first + i, wide), size[i], width);
    }
#undef FIND_NEXT
    if (found < exceptions) return GAP_OUTSIDE;
    if (octets(field) != c->end - fields) return TILE_LENGTH;
    return padded(fields, field) ? PADDING : OK;
}

/* Functions of their own, so that the compiler has all registers for each. */
#define APART static __attribute__((noinline)) int
#define POSITIONS(wide)                                                                                                \
    APART positions_##wide(const stream_t *s, const lists_t *p, int64_t number, const int64_t *spans,                  \
                           const uint8_t *const *plane, unary_t *u, void *positions) {                                 \
        return read_positions(s, p, number, spans, plane, u, positions, wide);                                         \
    }
#define VALUES(width, wide)                                                                                            \
    APART values_##width##_##wide(const stream_t *s, const sections_t *c, int64_t far, const void *positions,          \
                                  void *values) {                                                                      \
        return read_values(s, c, far, positions, values, width, wide);                                                 \
    }
POSITIONS(4)
POSITIONS(8)
VALUES(1, 4)
VALUES(2, 4)
VALUES(4, 4)
VALUES(1, 8)
VALUES(2, 8)
VALUES(4, 8)

/* One tile, whose bytes are those before ``end``. -> a code */
static int read_tile(const stream_t *s, const lists_t *p, int64_t number, const int64_t *counts, const int64_t *spans,
                     int64_t unary, const uint8_t *payload, sections_t *c, void *positions, void *values) {
    int64_t at = octets(p->changes), used, bytes = 0;
    for (int j = 0; j < p->planes; j++) bytes += octets(p->bits[j]);
    if (bytes + at + unary > c->end - payload) return TILE_SHORT;
    const uint8_t *plane[MAX_K];
    c->changes = p->changes;
    c->signs = payload;
    for (int j = 0; j < p->planes; j++) {
        plane[j] = c->signs;
        if (padded(c->signs, p->bits[j])) return PADDING;
        c->signs += octets(p->bits[j]);
    }
    if (padded(c->signs, p->changes)) return PADDING;
    const uint8_t *codes = c->signs + at;
    c->low = codes + unary;
    c->exceptions = count_ones(codes, unary, &used) - p->codes;
    if (c->exceptions < 0 || c->exceptions & 1 || octets(used) != unary) return UNARY_COUNT;
    c->exceptions /= 2;
    if (c->exceptions > p->changes) return GAP_OUTSIDE;
    c->fields = c->low + s->exception_k * octets(c->exceptions);
    if (c->fields > c->end) return TILE_SHORT;
    for (int j = 0; j < s->exception_k; j++)
        if (padded(c->low + j * octets(c->exceptions), c->exceptions)) return PADDING;
    c->codes = unary_at(codes, c->limit);
    int code = (s->wide == 8 ? positions_8 : positions_4)(s, p, number, spans, plane, &c->codes, positions);
    if (code) return code;
    const int64_t far = s->near->classes ? counts[0] : 0;
    switch (s->type->width + (s->wide & 8)) {
    case 1: return values_1_4(s, c, far, positions, values);
    case 2: return values_2_4(s, c, far, positions, values);
    case 4: return values_4_4(s, c, far, positions, values);
    case 9: return values_1_8(s, c, far, positions, values);
    case 10: return values_2_8(s, c, far, positions, values);
    default: return values_4_8(s, c, far, positions, values);
    }
}

/* Tiles to positions (tile by tile, list by list) and new values of all changes.
 *
 * ``counts`` and ``spans`` are (tiles, lists), no count above its span; ``unary`` and ``lengths`` are the bytes of each
 * tile, adding up to at most those at ``payload``. Positions are of ``wide`` bytes, 4 if all fit.
 * ``values`` NULL: new values go to where the old ones were, and ``positions`` has room for the largest tile alone.
 * -> 0, or the code of the first defect, whose tile is in ``where``; then what was written is worth nothing. */
EXPORT int dk_unpack(const stream_t *stream, int64_t tiles, const int64_t *counts, const int64_t *spans,
                     const int64_t *unary, const int64_t *lengths, const uint8_t *payload, void *positions,
                     void *values, int64_t *where) {
    const int lists = stream->near->classes + 1, width = stream->type->width;
    uint8_t bits[EXPONENTS];
    sections_t sections = {.limit = payload, .bits = bits};
    lists_t p;
    for (int e = 0; e < EXPONENTS; e++) bits[e] = e < stream->ceiling ? stream->raw[e] | 128 : 0;
    for (int64_t i = 0; i < tiles; i++) sections.limit += lengths[i];
    for (int64_t i = 0; i < tiles; i++, counts += lists, spans += lists) {
        sections.end = payload + lengths[i];
        *where = i;
        plan_lists(&p, counts, spans, lists);
        int code = read_tile(stream, &p, i, counts, spans, unary[i], payload, &sections, positions, values);
        if (code) return code;
        payload = sections.end;
        if (!values) continue;
        positions = (char *)positions + p.changes * stream->wide;
        values = (char *)values + p.changes * width;
    }
    return OK;
}
