/* Threads for the calls that take many tensors, and crc32 (of zlib and PNG; FORMAT names it). */
#include "workers.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

#define MAX_THREADS 256

void *scratch_room(scratch_t *s, int room, size_t bytes) {
    if (s->size[room] < bytes || !s->room[room]) {
        free(s->room[room]);
        const size_t size = bytes + bytes / 4 + 64;
        s->room[room] = malloc(size);
        s->size[room] = s->room[room] ? size : 0;
    }
    return s->room[room];
}

typedef struct {
    work_t *work;
    void *shared;
    int64_t units, next;
} queue_t;

static void *run(void *given) {
    queue_t *queue = given;
    scratch_t scratch = {{0}, {0}};
    for (;;) {
        const int64_t unit = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
        if (unit >= queue->units) break;
        queue->work(queue->shared, unit, &scratch);
    }
    for (int i = 0; i < ROOMS; i++) free(scratch.room[i]);
    return NULL;
}

void work_through(work_t *work, void *shared, int64_t units, int threads) {
    queue_t queue = {work, shared, units, 0};
    pthread_t others[MAX_THREADS];
    int started = 0;
    const int64_t wanted = threads < units ? threads : units;
    /* A thread that does not start is no failure: the others do its work. */
    while (started + 1 < wanted && started < MAX_THREADS && !pthread_create(&others[started], NULL, run, &queue)) started++;
    run(&queue);
    while (started) pthread_join(others[--started], NULL);
}

static uint32_t table[8][256]; /* table[i][b]: of byte b with i zero bytes after it */

/* Once, before the others. */
EXPORT void dk_crc32_start(void) {
    for (uint32_t b = 0; b < 256; b++) {
        uint32_t crc = b;
        for (int i = 0; i < 8; i++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        table[0][b] = crc;
    }
    for (int i = 1; i < 8; i++)
        for (int b = 0; b < 256; b++) table[i][b] = table[i - 1][b] >> 8 ^ table[0][table[i - 1][b] & 255];
}

uint32_t crc32_of(const uint8_t *data, int64_t bytes) {
    uint32_t crc = ~0u;
    for (; bytes >= 8; bytes -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++) crc ^= table[7 - i][word >> 8 * i & 255];
    }
    for (; bytes > 0; bytes--) crc = crc >> 8 ^ table[0][(crc ^ *data++) & 255];
    return ~crc;
}

EXPORT uint32_t dk_crc32(const uint8_t *data, int64_t bytes) { return crc32_of(data, bytes); }
