/* Work on many units at once, and the memory that each thread works in. */
#ifndef DELTACKPT_WORKERS_H
#define DELTACKPT_WORKERS_H

#include <stddef.h>
#include <stdint.h>

#define ROOMS 7

/* A thread's memory: rooms that grow, and keep what was asked for last. */
typedef struct {
    void *room[ROOMS];
    size_t size[ROOMS];
} scratch_t;

/* A room of at least so many bytes, its contents anything; NULL if there is no memory. */
void *scratch_room(scratch_t *s, int room, size_t bytes);

typedef void work_t(void *shared, int64_t unit, scratch_t *scratch);

/* ``work`` once for each unit below ``units``, which are begun in their order, on at most ``threads`` threads. */
void work_through(work_t *work, void *shared, int64_t units, int threads);

uint32_t crc32_of(const uint8_t *data, int64_t bytes);

#endif
