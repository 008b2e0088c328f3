/* `packed`, writing (FORMAT section "packed"): changes of many tensors into the order of their lists, then into bits. */
#include "lists_write.h"

#include <stdlib.h>

enum { FIRST, SECOND, THIRD, FOURTH, SCANNED, COPIED }; /* rooms */

/* What is known of a tensor between the calls. Changes are in the order of (tile, class, rank). */
struct state {
    uint32_t *rank, *size;    /* of each change; ranks turn to gaps, which are as many or fewer */
    uint8_t *exponent, *down; /* of each change */
    int64_t *at, *lengths;    /* of each tile: its first change; its bytes */
    int64_t *offset;          /* of each tile: where its bytes begin */
    uint32_t *counts, *spans; /* (tiles, all lists), (tiles, all classes): chosen, and candidates of class lists */
};

typedef struct {
    int64_t job, part;
} unit_t;

typedef struct {
    write_job_t *jobs;
    const unit_t *units;
    const scan_t *scan;
    int failed; /* there was no memory */
} writing_t;

INLINE uint32_t size_of(const write_job_t *job, int64_t i, uint32_t *old, int *down, const int word) {
    const uint32_t mask = mask_of(word), half = 1u << (8 * word - 1);
    *old = (uint32_t)load(job->old, i, word);
    const uint32_t a = in_order(*old, word, job->form.exponent_bits);
    const uint32_t b = in_order((uint32_t)load(job->new, i, word), word, job->form.exponent_bits);
    *down = (b ^ half) < (a ^ half);
    return ((*down ? a - b : b - a) & mask) - 1;
}

#define COUNT_CELLS(word)                                                                                              \
    static __attribute__((noinline)) void count_cells_##word(const write_job_t *job, cells_t *cells) {                 \
        const type_t type = type_of(&job->form);                                                                       \
        for (int64_t i = 0; i < job->changes; i++) {                                                                   \
            uint32_t old;                                                                                              \
            int down;                                                                                                  \
            const uint32_t size = size_of(job, i, &old, &down, word);                                                  \
            cells->cell[exponent_of(old, type)][bit_length(size)]++;                                                   \
        }                                                                                                              \
    }
COUNT_CELLS(1)
COUNT_CELLS(2)
COUNT_CELLS(4)

static int choose(write_job_t *job, int limit, scratch_t *scratch) {
    cells_t *cells = scratch_room(scratch, FIRST, sizeof *cells);
    if (!cells) return 0;
    memset(cells, 0, sizeof *cells);
    if (job->form.word == 1) count_cells_1(job, cells);
    if (job->form.word == 2) count_cells_2(job, cells);
    if (job->form.word == 4) count_cells_4(job, cells);
    for (int e = 0; e < EXPONENTS; e++)
        for (int l = 0; l < LENGTHS; l++) cells->of[e] += cells->cell[e][l];
    choose_scale(&job->form, cells, job->changes, limit);
    return 1;
}

/* Memory for what is known of one tensor. */
static state_t *new_state(const write_job_t *job) {
    const size_t n = (size_t)job->changes, t = (size_t)job->tiles;
    const size_t size = sizeof(state_t) + n * 10 + t * (24 + 4 * (ALL_LISTS + MAX_CLASSES)) + 32;
    state_t *s = job->room && (size_t)job->room_bytes >= size ? job->room : malloc(size);
    if (!s) return NULL;
    s->at = (int64_t *)(s + 1);
    s->lengths = s->at + t + 1;
    s->offset = s->lengths + t;
    s->counts = (uint32_t *)(s->offset + t);
    s->spans = s->counts + t * ALL_LISTS;
    s->rank = s->spans + t * MAX_CLASSES;
    s->size = s->rank + n;
    s->exponent = (uint8_t *)(s->size + n);
    s->down = s->exponent + n;
    return s;
}

static void begin_job(void *shared, int64_t unit, scratch_t *scratch) {
    writing_t *all = shared;
    write_job_t *job = all->jobs + unit;
    choose_grid(&job->form, job->slices, job->changes, job->shares);
    job->tiles = job->form.rows * job->form.columns;
    job->state = new_state(job);
    if (!job->state || !choose(job, job->base ? MAX_CLASSES : 1, scratch)) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
}

/* The first change at a position or after it. */
static int64_t change_at(const write_job_t *job, int64_t position) {
    int64_t low = 0, high = job->changes;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (job->positions[middle] < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* New elements of a block, from ``first`` on, were looked at: what changed gets the class of its old element. ``id`` and
 * ``begin`` as place_tile has them. */
static void class_old(const write_job_t *job, int64_t first, int64_t n, const rank_t *r, const int64_t *id, int64_t begin,
                      uint8_t *class, uint8_t *rows, uint32_t *counts) {
    const form_t *f = &job->form;
    const type_t type = type_of(f);
    for (int64_t i = r->next; i < r->changes && r->local[i] < first + n; i++) {
        const int64_t at = r->local[i] - first;
        const int old = class_of(exponent_of(load(job->old, id ? id[i] : begin + i, f->word), type), f), new = class[at];
        if (old == new) continue;
        class[at] = (uint8_t)old;
        rows[at / CHUNK * ROW + new]--;
        rows[at / CHUNK * ROW + old]++;
        counts[new]--;
        counts[old]++;
    }
}

/* Ranks and classes of the changes of one tile, and its candidates. ``id`` and ``begin`` as place_tile has them. */
static int rank_tile(const write_job_t *job, const scan_t *scan, int64_t number, rank_t *r, const int64_t *id,
                     int64_t begin, scratch_t *scratch) {
    const form_t *f = &job->form;
    const tile_at_t at = tile_at(f, number);
    uint32_t *spans = job->state->spans + number * MAX_CLASSES;
    if (f->classes == 1) {
        memcpy(r->rank, r->local, (size_t)r->changes * sizeof *r->rank);
        memset(r->class, 0, (size_t)r->changes);
        spans[0] = (uint32_t)at.elements;
        return 1;
    }
    uint8_t *class = scratch_room(scratch, SCANNED, BLOCK_CHUNKS * (CHUNK + ROW)), *rows = class + BLOCK_ELEMENTS;
    uint8_t *room = scratch_room(scratch, COPIED, BLOCK_ELEMENTS * 4);
    if (!class || !room) return 0;
    for (int64_t first = 0; first < at.elements; first += BLOCK_ELEMENTS) {
        const int64_t n = least(BLOCK_ELEMENTS, at.elements - first);
        uint32_t counts[ROW] = {0};
        scan->classify(block_of(f, &at, job->base, first, n, room), f, class, rows, counts);
        if (job->after) class_old(job, first, n, r, id, begin, class, rows, counts);
        scan->rank(class, rows, (n + CHUNK - 1) / CHUNK, (uint32_t)first, r);
        for (int c = 0; c < f->classes; c++) r->seen[c] += counts[c];
    }
    memcpy(spans, r->seen, (size_t)f->classes * sizeof *spans);
    return 1;
}

/* The changes of one tile, ``id`` in row-major order (NULL: those from ``begin`` on), to where their lists are. */
INLINE void place_tile(write_job_t *job, int64_t number, const rank_t *r, const int64_t *id, int64_t begin,
                       const int word) {
    state_t *s = job->state;
    const type_t type = type_of(&job->form);
    uint32_t *counts = s->counts + number * ALL_LISTS;
    int64_t to[MAX_CLASSES + 1] = {begin};
    memset(counts, 0, ALL_LISTS * sizeof *counts);
    for (int64_t i = 0; i < r->changes; i++) counts[r->class[i]]++;
    for (int c = 0; c < job->form.classes; c++) to[c + 1] = to[c] + counts[c];
    s->at[number] = begin;
    for (int64_t i = 0; i < r->changes; i++) {
        uint32_t old;
        int down;
        const int64_t slot = to[r->class[i]]++;
        s->size[slot] = size_of(job, id ? id[i] : begin + i, &old, &down, word);
        s->rank[slot] = r->rank[i];
        s->exponent[slot] = (uint8_t)exponent_of(old, type);
        s->down[slot] = (uint8_t)down;
    }
}

#define PLACE(word)                                                                                                    \
    static __attribute__((noinline)) void place_tile_##word(write_job_t *job, int64_t number, const rank_t *r,         \
                                                            const int64_t *id, int64_t begin) {                        \
        place_tile(job, number, r, id, begin, word);                                                                   \
    }
PLACE(1)
PLACE(2)
PLACE(4)

/* Where the tile of each change in a row of tiles begins among them, and the index of each change in its tile. ``id``
 * and ``local`` are in the order of (tile, position) afterwards. */
static void split_band(const write_job_t *job, int64_t top, int64_t begin, int64_t n, int64_t *starts, int64_t *id,
                       uint32_t *local, uint32_t *column_of, uint32_t *at) {
    const form_t *f = &job->form;
    const int64_t tile_width = parts(f->width, f->columns);
    int64_t end = 0, row_at = 0, above = 0;
    memset(starts, 0, (size_t)(f->columns + 1) * sizeof *starts);
    for (int64_t i = 0; i < n; i++) {
        const int64_t position = job->positions[begin + i];
        if (position >= end) { /* rows are passed one by one, or skipped by a division */
            const int64_t row = position / f->width;
            row_at = row * f->width;
            end = row_at + f->width;
            above = row - top;
        }
        const int64_t column = position - row_at, tile = column / tile_width;
        column_of[i] = (uint32_t)tile;
        at[i] = (uint32_t)(above * least(tile_width, f->width - tile * tile_width) + column - tile * tile_width);
        starts[tile + 1]++;
    }
    for (int64_t c = 0; c < f->columns; c++) starts[c + 1] += starts[c];
    for (int64_t i = 0; i < n; i++) {
        const int64_t slot = starts[column_of[i]]++;
        id[slot] = begin + i;
        local[slot] = at[i];
    }
    for (int64_t c = f->columns; c > 0; c--) starts[c] = starts[c - 1];
    starts[0] = 0;
}

/* All tiles of one row of tiles: changes to the order of their lists. */
static int sort_band(write_job_t *job, const scan_t *scan, int64_t band, scratch_t *scratch) {
    const form_t *f = &job->form;
    const int64_t tile_height = parts(f->height, f->rows);
    const int64_t top = least(band * tile_height, f->height), bottom = least(top + tile_height, f->height);
    const int64_t begin = change_at(job, top * f->width), n = change_at(job, bottom * f->width) - begin;
    const size_t size = (size_t)n * (4 + 4 + 1), columns = (size_t)f->columns + 1;
    uint32_t *local = scratch_room(scratch, FIRST, size), *rank = local + n;
    int64_t *starts = scratch_room(scratch, SECOND, (columns + (size_t)(f->columns > 1 ? n : 0)) * sizeof *starts);
    uint32_t *columns_of = f->columns > 1 ? scratch_room(scratch, THIRD, (size_t)n * 8) : local;
    if (!local || !starts || !columns_of) return 0;
    int64_t *id = f->columns > 1 ? starts + columns : NULL;
    uint8_t *class = (uint8_t *)(rank + n);
    if (id) {
        split_band(job, top, begin, n, starts, id, local, columns_of, columns_of + n);
    } else {
        starts[0] = 0;
        starts[1] = n;
        for (int64_t i = 0; i < n; i++) local[i] = (uint32_t)(job->positions[begin + i] - top * f->width);
    }
    for (int64_t c = 0; c < f->columns; c++) {
        const int64_t number = band * f->columns + c, at = starts[c];
        rank_t r = {.local = local + at, .rank = rank + at, .class = class + at, .changes = starts[c + 1] - at};
        const int64_t *ids = id ? id + at : NULL;
        if (!rank_tile(job, scan, number, &r, ids, begin + at, scratch)) return 0;
        if (f->word == 1) place_tile_1(job, number, &r, ids, begin + at);
        if (f->word == 2) place_tile_2(job, number, &r, ids, begin + at);
        if (f->word == 4) place_tile_4(job, number, &r, ids, begin + at);
    }
    return 1;
}

static void sort_unit(void *shared, int64_t unit, scratch_t *scratch) {
    writing_t *all = shared;
    const unit_t *u = all->units + unit;
    if (!sort_band(all->jobs + u->job, all->scan, u->part, scratch)) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
}

/* Once all tiles are sorted: did lists by class save anything? If not, do it again without. */
static void settle_job(void *shared, int64_t unit, scratch_t *scratch) {
    writing_t *all = shared;
    write_job_t *job = all->jobs + unit;
    const int classes = job->form.classes;
    int64_t changes[MAX_CLASSES] = {0}, elements[MAX_CLASSES] = {0};
    if (classes == 1) return;
    for (int64_t t = 0; t < job->tiles; t++)
        for (int c = 0; c < classes; c++) {
            changes[c] += job->state->counts[t * ALL_LISTS + c];
            elements[c] += job->state->spans[t * MAX_CLASSES + c];
        }
    if (!saves_nothing(&job->form, changes, elements)) return;
    int done = choose(job, 1, scratch);
    for (int64_t band = 0; done && band < job->form.rows; band++) done = sort_band(job, all->scan, band, scratch);
    if (!done) __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
}

/* Rising ranks to gaps, or, of a flipped list, to those of the ranks that are missing. -> how many */
static int64_t gaps_of(const uint32_t *rank, int64_t n, int64_t candidates, uint32_t *gaps) {
    int64_t next = 0, made = 0;
    if (2 * n <= candidates) {
        for (int64_t i = 0; i < n; i++) {
            gaps[i] = (uint32_t)(rank[i] - next);
            next = (int64_t)rank[i] + 1;
        }
        return n;
    }
    int64_t before = 0; /* chosen ones since the last one that is listed */
    for (int64_t i = 0; i <= n; i++) {
        const int64_t stop = i < n ? rank[i] : candidates;
        for (; next < stop; next++) {
            gaps[made++] = (uint32_t)before;
            before = 0;
        }
        next++;
        before++;
    }
    return made;
}

/* A tile as it is written. */
typedef struct {
    const form_t *form;
    state_t *state;
    int64_t begin, changes;
    uint32_t *counts;
    const uint32_t *spans;
    uint32_t *gaps; /* of the long lists, one after the other */
    int64_t listed[ALL_LISTS];
    int k[ALL_LISTS];
} making_t;

INLINE int width_of(const making_t *m, int64_t i) { return raw_bits(m->state->exponent[i], m->form); }

static int making(making_t *m, const write_job_t *job, int64_t tile, scratch_t *scratch) {
    state_t *s = job->state;
    *m = (making_t){.form = &job->form, .state = s, .begin = s->at[tile], .changes = s->at[tile + 1] - s->at[tile]};
    m->counts = s->counts + tile * ALL_LISTS;
    m->spans = s->spans + tile * MAX_CLASSES;
    m->gaps = scratch_room(scratch, FIRST, (size_t)(2 * m->changes + 1) * sizeof *m->gaps);
    return m->gaps != NULL;
}

/* The long lists' gaps, from the changes. */
static void long_lists(making_t *m) {
    const form_t *f = m->form;
    uint32_t *gaps = m->gaps, *ranks = m->gaps + m->changes;
    int64_t at = m->begin;
    for (int c = 0; c < f->classes; at += m->counts[c++]) {
        const int list = f->classes + c - (f->classes - f->sized);
        if (list < f->classes) continue;
        int64_t n = 0;
        for (int64_t i = 0; i < m->counts[c]; i++) {
            ranks[n] = (uint32_t)i;
            n += bit_length(m->state->size[at + i]) > width_of(m, at + i);
        }
        m->counts[list] = (uint32_t)n;
        m->listed[list] = gaps_of(ranks, n, m->counts[c], gaps);
        m->k[list] = rice(m->listed[list], m->counts[c]);
        gaps += m->listed[list];
    }
}

static void measure_unit(void *shared, int64_t unit, scratch_t *scratch) {
    writing_t *all = shared;
    const unit_t *u = all->units + unit;
    const write_job_t *job = all->jobs + u->job;
    making_t m;
    if (!making(&m, job, u->part, scratch)) {
        __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    const form_t *f = m.form;
    const int lists = f->classes + f->sized;
    int64_t bits = m.changes, at = m.begin;
    for (int c = 0; c < f->classes; at += m.counts[c++]) {
        uint32_t *rank = m.state->rank + at;
        const int64_t n = m.listed[c] = gaps_of(rank, m.counts[c], m.spans[c], m.gaps);
        const int k = m.k[c] = rice(n, m.spans[c]);
        memcpy(rank, m.gaps, (size_t)n * sizeof *rank);
        bits += n * (k + 1);
        for (int64_t i = 0; i < n; i++) bits += rank[i] >> k;
    }
    long_lists(&m);
    const uint32_t *gap = m.gaps;
    for (int l = f->classes; l < lists; l++) {
        bits += m.listed[l] * (m.k[l] + 1);
        for (int64_t i = 0; i < m.listed[l]; i++) bits += *gap++ >> m.k[l];
    }
    at = m.begin;
    for (int c = 0; c < f->classes - f->sized; c++) at += m.counts[c];
    for (; at < m.begin + m.changes; at++) {
        const int raw = width_of(&m, at), length = bit_length(m.state->size[at]);
        bits += length > raw ? 2 * (length - raw) - 1 + raw : raw; /* the excess in unary; length - 1 bits of size */
    }
    m.state->lengths[u->part] = octets(bits);
}

/* Appends bits, lowest first, and writes nothing from ``end`` on. */
typedef struct {
    uint8_t *out, *end;
    uint64_t word;
    int held;
} bits_t;

INLINE void put(bits_t *b, uint64_t value, int width) { /* of at most 56 bits */
    b->word |= value << b->held;
    b->held += width;
    if (b->end - b->out >= 8) {
        memcpy(b->out, &b->word, 8);
        b->out += b->held >> 3;
        b->word >>= b->held & ~7;
        b->held &= 7;
    } else {
        for (; b->held >= 8; b->held -= 8, b->word >>= 8) *b->out++ = (uint8_t)b->word;
    }
}

INLINE void put_unary(bits_t *b, uint32_t zeros) {
    for (; zeros >= 32; zeros -= 32) put(b, 0, 32);
    put(b, 1ull << zeros, (int)zeros + 1);
}

static void put_lists(const making_t *m, bits_t *b, int quotients) {
    const int lists = m->form->classes + m->form->sized;
    const uint32_t *long_gap = m->gaps;
    int64_t at = m->begin;
    for (int l = 0; l < lists; l++) {
        const uint32_t *gap = l < m->form->classes ? m->state->rank + at : long_gap, mask = (1u << m->k[l]) - 1;
        if (l < m->form->classes)
            at += m->counts[l];
        else
            long_gap += m->listed[l];
        if (quotients)
            for (int64_t i = 0; i < m->listed[l]; i++) put_unary(b, gap[i] >> m->k[l]);
        else if (m->k[l])
            for (int64_t i = 0; i < m->listed[l]; i++) put(b, gap[i] & mask, m->k[l]);
    }
}

static void write_unit(void *shared, int64_t unit, scratch_t *scratch) {
    writing_t *all = shared;
    const unit_t *u = all->units + unit;
    const write_job_t *job = all->jobs + u->job;
    making_t m;
    if (!making(&m, job, u->part, scratch)) {
        __atomic_store_n(&all->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    const form_t *f = m.form;
    const state_t *s = m.state;
    const int64_t offset = s->offset[u->part];
    int64_t sized_at = m.begin;
    for (int c = 0; c < f->classes; c++) {
        m.listed[c] = listed_of(m.counts[c], m.spans[c]);
        m.k[c] = rice(m.listed[c], m.spans[c]);
        if (c < f->classes - f->sized) sized_at += m.counts[c];
    }
    long_lists(&m);
    bits_t b = {job->payload + offset, job->payload + offset + s->lengths[u->part], 0, 0};
    put_lists(&m, &b, 0);
    put_lists(&m, &b, 1);
    const int64_t end = m.begin + m.changes;
    for (int64_t i = sized_at; i < end; i++) {
        const int excess = bit_length(s->size[i]) - width_of(&m, i);
        if (excess > 0) put_unary(&b, (uint32_t)excess - 1);
    }
    for (int64_t i = m.begin; i < sized_at; i++) put(&b, s->down[i], 1);
    for (int64_t i = sized_at; i < end; i++) {
        const int raw = width_of(&m, i), length = bit_length(s->size[i]), width = length > raw ? length - 1 : raw;
        put(&b, s->down[i] | (s->size[i] & ((1ull << width) - 1)) << 1, width + 1);
    }
    while (b.held > 0) { /* less than 8 bits, or those that had no room for a whole word */
        *b.out++ = (uint8_t)b.word;
        b.word >>= 8;
        b.held -= 8;
    }
    const int lists = f->classes + f->sized;
    for (int l = 0; l < lists; l++) job->counts[u->part * lists + l] = m.counts[l];
    job->lengths[u->part] = s->lengths[u->part];
    job->checksums[u->part] = crc32_of(job->payload + offset, s->lengths[u->part]);
}

/* A unit for every tile, or every row of tiles, of all jobs. */
static unit_t *units_of(const write_job_t *jobs, int64_t count, int bands, int64_t *units) {
    int64_t n = 0;
    for (int64_t j = 0; j < count; j++) n += bands ? jobs[j].form.rows : jobs[j].tiles;
    unit_t *made = malloc((size_t)(n + 1) * sizeof *made);
    *units = n;
    if (!made) return NULL;
    n = 0;
    for (int64_t j = 0; j < count; j++)
        for (int64_t i = 0; i < (bands ? jobs[j].form.rows : jobs[j].tiles); i++) made[n++] = (unit_t){j, i};
    return made;
}

static int for_units(writing_t *all, int64_t count, int bands, work_t *work, int threads) {
    int64_t units;
    unit_t *made = units_of(all->jobs, count, bands, &units);
    if (!made) return 0;
    all->units = made;
    work_through(work, all, units, threads);
    free(made);
    return !all->failed;
}

EXPORT void dk_lists_release(write_job_t *jobs, int64_t count) {
    for (int64_t j = 0; j < count; j++) {
        if (jobs[j].state != jobs[j].room) free(jobs[j].state);
        jobs[j].state = NULL;
    }
}

/* The form, tiles and bytes of many tensors. What is known of each is kept, until dk_lists_release. -> 0, or 1 if there
 * is no memory */
EXPORT int dk_lists_measure(write_job_t *jobs, int64_t count, int threads) {
    writing_t all = {jobs, NULL, scan_of_this_processor(), 0};
    work_through(begin_job, &all, count, threads);
    if (all.failed || !for_units(&all, count, 1, sort_unit, threads)) return 1;
    work_through(settle_job, &all, count, threads);
    if (all.failed) return 1;
    for (int64_t j = 0; j < count; j++) jobs[j].state->at[jobs[j].tiles] = jobs[j].changes;
    if (!for_units(&all, count, 0, measure_unit, threads)) return 1;
    for (int64_t j = 0; j < count; j++) {
        jobs[j].bytes = 0;
        for (int64_t t = 0; t < jobs[j].tiles; t++) {
            jobs[j].state->offset[t] = jobs[j].bytes;
            jobs[j].bytes += jobs[j].state->lengths[t];
        }
    }
    return 0;
}

/* What was measured: counts (tiles, lists), lengths and checksums (tiles) and the payload of each job. -> the same */
EXPORT int dk_lists_write(write_job_t *jobs, int64_t count, int threads) {
    writing_t all = {jobs, NULL, NULL, 0};
    return !for_units(&all, count, 0, write_unit, threads);
}
