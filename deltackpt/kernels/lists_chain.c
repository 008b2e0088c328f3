/* Tensors through several patches of `packed` at once: each tile through all of them while it lies in the processor's
 * cache, and its old elements looked at once. */
#include <stdlib.h>

#include "lists_read.h"

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

static int read_row(const chain_t *c, int64_t job, int64_t row, scratch_t *scratch, seen_t *seen) {
    const place_t place = {job, row, c->begins[c->first[job] + row], 0};
    return lists_read_tile(c->jobs + job, c->scan, place, scratch, seen);
}

static void read_part(void *shared, int64_t unit, scratch_t *scratch) {
    chain_t *c = shared;
    const part_t part = c->parts[unit];
    const int64_t first = part.tensor * c->patches;
    int code = OK;
    seen_t seen = {0};
    for (int64_t job = first; job < first + c->patches && !code; job++) {
        if (__atomic_load_n(&c->bad, __ATOMIC_RELAXED)) return;
        if (part.tile >= 0 && c->jobs[job].tiles) code = read_row(c, job, part.tile, scratch, &seen);
        for (int64_t row = 0; part.tile < 0 && row < c->jobs[job].tiles && !code; row++)
            code = read_row(c, job, row, scratch, NULL);
    }
    if (code) __atomic_store_n(&c->bad, 1, __ATOMIC_RELAXED);
}

/* ``tensors`` x ``patches`` jobs, those of a tensor side by side in the order of its patches; one without tiles changes
 * nothing. New elements go to where the old ones are, which all jobs of a tensor have at one address; nothing else is
 * asked for. -> 0, or 1 where a job has a defect, or there is no memory; what was written is then worth nothing. */
EXPORT int dk_lists_chain(const read_job_t *jobs, int64_t tensors, int64_t patches, int threads) {
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
        const read_job_t *const of = jobs + t * patches;
        int64_t tiles = 0;
        for (int64_t p = 0; p < patches; p++) tiles = of[p].tiles > tiles ? of[p].tiles : tiles;
        if (!tiles) continue;
        if (!cut_alike(of, patches)) {
            parts[units++] = (part_t){t, -1};
            continue;
        }
        for (int64_t tile = 0; tile < tiles; tile++) parts[units++] = (part_t){t, tile};
    }
    if (!c.bad) work_through(read_part, &c, units, threads);
    free(parts);
    free(begins);
    free(first);
    return c.bad;
}
