/* Tensors through several patches of `packed` at once: each tile through all of them while it lies in the processor's
 * cache, and its old elements looked at once. */
#include <stdlib.h>

#include "lists_read.h"

#define ALONE (2 << 20) /* bytes of a tile up to which it may be changed by itself */
#define NARROW 256 /* bytes of a line */
#define AHEAD 4096 /* bytes of lines that are on their way from memory at a time */
enum { TILE = 6 };

typedef struct {
    int64_t tensor, tile; /* -1: all tiles, patch by patch, as they are not the same in all of them */
} part_t;

typedef struct {
    const read_job_t *jobs;
    int64_t patches;
    const scan_t *scan;
    const part_t *parts;
    const int64_t *first;  /* of each job: its first in ``begins`` */
    const int64_t *begins; /* of each tile of each job: its first byte in the job's payload */
    int bad;
} chain_t;

/* Do all patches cut the tensor alike, and hold all of its tiles? */
static int cut_alike(const read_job_t *jobs, int64_t patches) {
    const form_t *f = NULL;
    for (int64_t p = 0; p < patches; p++) {
        const form_t *g = &jobs[p].form;
        if (!jobs[p].tiles) continue;
        if (jobs[p].numbers || jobs[p].tiles != g->rows * g->columns) return 0;
        if (f && (f->height != g->height || f->width != g->width)) return 0;
        if (f && (f->rows != g->rows || f->columns != g->columns)) return 0;
        if (f && (f->word != g->word || f->exponent_start != g->exponent_start || f->exponent_bits != g->exponent_bits))
            return 0;
        f = g;
    }
    return 1;
}

/* Lines of ``size`` bytes: those to write to are ``step`` bytes apart, those to read from ``skip``. No processor guesses
 * where the next but one is. */
INLINE void copy_lines(uint8_t *to, int64_t step, const uint8_t *from, int64_t skip, int64_t size, int64_t lines) {
    const int64_t ahead = size ? AHEAD / size + 1 : 0;
    for (; lines > 0; lines--, to += step, from += skip) {
        if (lines > ahead && size < AHEAD)
            for (int64_t i = 0; i < size; i += 64) {
                if (skip > size) __builtin_prefetch(from + ahead * skip + i);
                if (step > size) __builtin_prefetch(to + ahead * step + i, 1);
            }
        memcpy(to, from, (size_t)size);
    }
}

/* Is a tile of ``bytes``, in lines of ``size``, better by itself? To copy it takes as long as what some patches gain: others'
 * elements are not near it in the cache then. */
INLINE int alone(int64_t bytes, int64_t size, int64_t patches) {
    return size < bytes && bytes <= ALONE && patches >= (size < NARROW ? 3 : 7);
}

/* One tile through all patches. */
static int read_tile(const chain_t *c, int64_t tensor, int64_t tile, scratch_t *scratch) {
    const int64_t first = tensor * c->patches, end = first + c->patches;
    int64_t number = first;
    while (!c->jobs[number].tiles) number++;
    const read_job_t *const job = c->jobs + number;
    const tile_at_t at = tile_at(&job->form, tile);
    const int64_t word = job->form.word, all = at.elements * word, size = at.contiguous ? all : at.wide * word;
    const int64_t lines = size ? all / size : 0, step = job->form.width * word;
    uint8_t *const among = job->elements + at.origin * word;
    seen_t seen = {.tile = alone(all, size, c->patches) ? scratch_room(scratch, TILE, (size_t)all) : NULL};
    if (seen.tile) copy_lines(seen.tile, size, among, step, size, lines);
    for (; number < end; number++) {
        if (__atomic_load_n(&c->bad, __ATOMIC_RELAXED)) return OK;
        if (!c->jobs[number].tiles) continue;
        const place_t place = {number, tile, c->begins[c->first[number] + tile], 0};
        const int code = lists_read_tile(c->jobs + number, c->scan, place, scratch, &seen);
        if (code) return code;
    }
    if (seen.tile) copy_lines(among, step, seen.tile, size, size, lines);
    return OK;
}

/* All tiles, patch by patch. */
static int read_tensor(const chain_t *c, int64_t tensor, scratch_t *scratch) {
    const int64_t first = tensor * c->patches, end = first + c->patches;
    for (int64_t number = first; number < end; number++)
        for (int64_t row = 0; row < c->jobs[number].tiles; row++) {
            if (__atomic_load_n(&c->bad, __ATOMIC_RELAXED)) return OK;
            const place_t place = {number, row, c->begins[c->first[number] + row], 0};
            const int code = lists_read_tile(c->jobs + number, c->scan, place, scratch, NULL);
            if (code) return code;
        }
    return OK;
}

static void read_part(void *shared, int64_t unit, scratch_t *scratch) {
    chain_t *c = shared;
    const part_t part = c->parts[unit];
    const int code = part.tile < 0 ? read_tensor(c, part.tensor, scratch) : read_tile(c, part.tensor, part.tile, scratch);
    if (code) __atomic_store_n(&c->bad, 1, __ATOMIC_RELAXED);
}

/* ``tensors`` x ``patches`` jobs, those of a tensor side by side in the order of its patches; one without tiles changes
 * nothing. New elements go to where the old ones are, which all jobs of a tensor have at one address; nothing else is
 * asked for. Of tensors that all of their patches cut alike, only the rows of tiles from ``top`` to ``bottom`` are done,
 * and the elements of others need not be there.
 *
 * -> 0, or 1 where a job has a defect, or there is no memory; what was written is then worth nothing. */
EXPORT int dk_lists_chain(const read_job_t *jobs, int64_t tensors, int64_t patches, int64_t top, int64_t bottom,
                          int threads) {
    int64_t rows = 0, units = 0;
    for (int64_t j = 0; j < tensors * patches; j++) {
        if (jobs[j].tiles && lists_check(jobs + j)) return 1;
        rows += jobs[j].tiles;
    }
    int64_t *first = malloc((size_t)(tensors * patches + 1) * sizeof *first);
    int64_t *begins = malloc((size_t)(rows + 1) * sizeof *begins);
    part_t *parts = malloc((size_t)(rows + tensors + 1) * sizeof *parts);
    chain_t c = {jobs, patches, scan_of_this_processor(), parts, first, begins, !first || !begins || !parts};
    rows = 0;
    for (int64_t j = 0; j < tensors * patches && !c.bad; j++) {
        int64_t payload = 0;
        first[j] = rows;
        for (int64_t row = 0; row < jobs[j].tiles; row++) {
            begins[rows++] = payload;
            payload += jobs[j].lengths[row];
        }
    }
    for (int64_t t = 0; t < tensors && !c.bad; t++) {
        const read_job_t *job = jobs + t * patches, *const last = job + patches - 1;
        while (job < last && !job->tiles) job++;
        if (!job->tiles) continue;
        if (!cut_alike(jobs + t * patches, patches)) {
            parts[units++] = (part_t){t, -1};
            continue;
        }
        const int64_t end = least(job->form.rows, bottom) * job->form.columns;
        for (int64_t tile = top * job->form.columns; tile < end; tile++) parts[units++] = (part_t){t, tile};
    }
    if (!c.bad) work_through(read_part, &c, units, threads);
    free(parts);
    free(begins);
    free(first);
    return c.bad;
}
