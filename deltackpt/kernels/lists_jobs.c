/* Tiles of many tensors, each read by lists_read.c, on several threads. */
#include <stdlib.h>

#include "lists_read.h"

typedef struct {
    int64_t job, tile; /* the row of the tile in its job's tables; -1: the tables themselves */
    int64_t code;
} defect_t;

typedef struct {
    const read_job_t *jobs;
    const place_t *places;
    const scan_t *scan;
    int64_t first_bad; /* the first unit known to have a defect; those after it are not read */
    int64_t *codes;    /* of every unit */
} reading_t;

static void read_unit(void *shared, int64_t unit, scratch_t *scratch) {
    reading_t *all = shared;
    if (unit > __atomic_load_n(&all->first_bad, __ATOMIC_RELAXED)) return;
    const place_t p = all->places[unit];
    const int code = lists_read_tile(all->jobs + p.job, all->scan, p, scratch, NULL);
    all->codes[unit] = code;
    if (!code) return;
    int64_t known = __atomic_load_n(&all->first_bad, __ATOMIC_RELAXED);
    while (unit < known &&
           !__atomic_compare_exchange_n(&all->first_bad, &known, unit, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
}

int lists_check(const read_job_t *job) {
    const form_t *f = &job->form;
    const int lists = f->classes + f->sized, first = f->classes - f->sized;
    int64_t bytes = 0;
    int short_tile = 0, other_length = 0;
    for (int64_t row = 0; row < job->tiles; row++) {
        const int64_t *counts = job->counts + row * lists, number = job->numbers ? job->numbers[row] : row;
        if (number < 0 || number / f->columns >= f->rows) return COUNT_OUTSIDE;
        const int64_t elements = tile_at(f, number).elements, length = job->lengths[row];
        int64_t changes = 0;
        if (elements > MAX_ELEMENTS) return COUNT_OUTSIDE;
        for (int i = 0; i < lists; i++) {
            const int64_t most = i < f->classes ? elements : counts[first + i - f->classes];
            if (counts[i] < 0 || counts[i] > most) return COUNT_OUTSIDE;
            if (i < f->classes) changes += counts[i];
        }
        if (changes > elements) return COUNT_OUTSIDE;
        const int sane = length <= (int64_t)1 << 40;
        short_tile |= sane && changes > 8 * length;
        other_length |= !sane || length < 0;
        if (!other_length) bytes += length;
    }
    if (short_tile) return TILE_SHORT;
    return other_length || bytes != job->bytes ? TILE_LENGTH : OK;
}

/* Tiles of many tensors, on at most ``threads`` threads, to what each job asks for.
 *
 * -> 0, or the code of the first defect, by job and tile, and where it is; then what was written is worth nothing. */
EXPORT int dk_lists_read(const read_job_t *jobs, int64_t count, int threads, defect_t *defect) {
    int64_t units = 0, job = 0;
    for (int64_t j = 0; j < count; j++) units += jobs[j].tiles;
    place_t *places = malloc((size_t)(units + 1) * sizeof *places);
    int64_t *codes = calloc((size_t)(units + 1), sizeof *codes);
    reading_t all = {jobs, places, scan_of_this_processor(), 0, codes};
    *defect = (defect_t){-1, -1, NO_MEMORY};
    if (places && codes) {
        *defect = (defect_t){-1, -1, OK};
        for (units = 0; job < count && !defect->code; job++) {
            const read_job_t *const j = jobs + job;
            const int code = lists_check(j);
            if (code) *defect = (defect_t){job, -1, code};
            int64_t payload = 0, changes = 0;
            for (int64_t row = 0; row < j->tiles && !code; row++) {
                places[units++] = (place_t){job, row, payload, changes};
                payload += j->lengths[row];
                for (int c = 0; c < j->form.classes; c++)
                    changes += j->counts[row * (j->form.classes + j->form.sized) + c];
            }
        }
        all.first_bad = units;
        work_through(read_unit, &all, units, threads);
        if (all.first_bad < units)
            *defect = (defect_t){places[all.first_bad].job, places[all.first_bad].row, codes[all.first_bad]};
    }
    free(places);
    free(codes);
    return (int)defect->code;
}
