/* Many tensors in one call: where each differs from its old state, and what that adds to its digest. */
#include "common.h"
#include "workers.h"

int64_t dk_compare(const void *old, const void *new, int64_t n, int width, int64_t first, int64_t *positions,
                   void *before, void *after);
void dk_digest_run(const void *words, int64_t n, int width, int64_t first, uint64_t *sums);
void dk_digest_change(const int64_t *positions, const void *old, const void *new, int64_t n, int width, uint64_t *sums);

typedef struct {
    const void *old, *new; /* n words each; old NULL: the sums are those of the new ones, and no place is sought */
    int64_t n, width;
    int64_t *positions; /* room for n, as in the two after it */
    void *before, *after;
    int64_t found;
    uint64_t sums[2];
} pair_t;

static void diff_pair(void *shared, int64_t unit, scratch_t *scratch) {
    pair_t *p = (pair_t *)shared + unit;
    const int width = (int)p->width;
    (void)scratch;
    p->found = 0;
    p->sums[0] = p->sums[1] = 0;
    if (p->old) {
        p->found = dk_compare(p->old, p->new, p->n, width, 0, p->positions, p->before, p->after);
        dk_digest_change(p->positions, p->before, p->after, p->found, width, p->sums);
    } else {
        dk_digest_run(p->new, p->n, width, 0, p->sums);
    }
}

/* Where the words of each pair differ, and what D gains; or D of the new ones. What was found lies side by side at
 * ``positions``, ``before`` and ``after``, in which the rooms of all pairs lie in their order; words of each pair begin
 * at a multiple of 8 bytes. One thread puts it there, and touches no other page of the rooms; several move it. */
EXPORT void dk_diff_many(pair_t *pairs, int64_t count, int threads, int64_t *positions, void *before, void *after) {
    int64_t elements = 0, bytes = 0;
    if (threads > 1) work_through(diff_pair, pairs, count, threads);
    for (int64_t i = 0; i < count; i++) {
        pair_t *p = pairs + i, from = *p;
        p->positions = positions + elements;
        p->before = (char *)before + bytes;
        p->after = (char *)after + bytes;
        if (threads <= 1) diff_pair(pairs, i, NULL);
        const size_t size = (size_t)(p->found * p->width);
        if (threads > 1 && p->found) {
            memmove(p->positions, from.positions, (size_t)p->found * sizeof *positions);
            memmove(p->before, from.before, size);
            memmove(p->after, from.after, size);
        }
        elements += p->found;
        bytes += (int64_t)((size + 7) & ~(size_t)7);
    }
}
