/* Changed elements of many tensors, each put in its place. */
#include <string.h>

#include "common.h"

int dk_scatter(void *words, int64_t n, const void *positions, int wide, const void *values, int64_t count, int width);

typedef struct {
    uint8_t *words; /* ``n`` of them */
    const uint8_t *positions, *values; /* ``count`` each; positions of ``wide`` bytes, 0: all elements, in order */
    int64_t n, count;
    int32_t wide, width;
} scatter_job_t;

/* In the order of the jobs, of which several may be of one tensor. -> -1, or the first job that has another number of
 * elements, or a position outside of its tensor: it, and those after it, are not done. */
EXPORT int64_t dk_scatter_many(const void *given, int64_t jobs) {
    const scatter_job_t *job = given;
    for (int64_t i = 0; i < jobs; i++, job++) {
        if (job->wide) {
            if (dk_scatter(job->words, job->n, job->positions, job->wide, job->values, job->count, job->width)) return i;
        } else {
            if (job->count != job->n) return i;
            memcpy(job->words, job->values, (size_t)(job->n * job->width));
        }
    }
    return -1;
}

typedef struct {
    uint8_t *to;
    const uint8_t *from;
    int64_t bytes;
} copy_t;

/* Runs of bytes, each to its place, one after the other. No place has bytes of what is still to be copied. */
EXPORT void dk_copy_many(const void *given, int64_t count) {
    const copy_t *copy = given;
    for (int64_t i = 0; i < count; i++)
        if (copy[i].bytes > 0) memcpy(copy[i].to, copy[i].from, (size_t)copy[i].bytes);
}
