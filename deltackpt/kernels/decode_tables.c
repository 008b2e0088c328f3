/* The columns of tiles that a card decodes, as its kernels read them: what gpu/decode_tables.py makes in numpy. */
#include "common.h"

#define ROW 32            /* of ``counts``: a column for each class, and from the middle on for the long changes of each */
#define NARROW ((uint64_t)1 << 31)
#define LONGEST ((int64_t)1 << 28) /* bytes of a tile that is not taken */

/* An entry: its lists as its index has them, and what its grid says of every tile. Columns of int64 in Python. */
typedef struct {
    const int64_t *counts, *lengths; /* [tiles, lists] and [tiles] */
    const uint8_t *checksums;        /* of 4 bytes each, from any address on */
    const int64_t *elements, *rooms, *blocks; /* [tiles]; ``rooms``: for its segments */
    int64_t tiles, lists, classes, cut; /* cut 0: it has no segments and no blocks */
    int64_t begin, size;             /* its bytes in the data */
    /* Out: changes, numbers in unary, tiles of less than 4 bytes, and whether the host's decoder is to look at it. */
    int64_t changes, numbers, shorter, odd;
    int64_t others[8]; /* of no use here */
} task_t;

/* The arrays of one group; each is written whole. */
typedef struct {
    int32_t *counts;          /* [tiles, ROW] */
    int64_t *owner, *places, *block_tiles, *spans, *starts, *firsts, *checksums;
    int64_t first_task, tasks, segments; /* ``segments``, out: room for so many */
} group_t;

/* A tile's counts; one that int32 does not hold is -1. Sums wrap as numpy's do. -> is there something odd? */
static int count_tile(const task_t *task, int64_t tile, int32_t *row, uint64_t *changes, uint64_t *longs) {
    const int64_t *own = task->counts + tile * task->lists;
    const int64_t first = 2 * task->classes - task->lists;
    int odd = 0;
    memset(row, 0, ROW * sizeof *row);
    *changes = *longs = 0;
    for (int64_t c = 0; c < task->lists; c++) {
        const int over = (uint64_t)own[c] >= NARROW;
        const int64_t value = over ? -1 : own[c];
        odd |= over;
        row[c < task->classes ? c : ROW / 2 + first + c - task->classes] = (int32_t)value;
        *(c < task->classes ? changes : longs) += (uint64_t)value;
    }
    for (int64_t c = first; c < task->classes; c++) odd |= row[ROW / 2 + c] > row[c];
    return odd;
}

static void write_task(task_t *task, group_t *g, int64_t owner, int64_t *tile, int64_t *block, uint64_t sums[2]) {
    uint64_t at = (uint64_t)task->begin, bytes = 0, changes, longs;
    const uint64_t before[2] = {sums[0], sums[1]};
    task->odd = task->shorter = 0;
    for (int64_t i = 0; i < task->tiles; i++, (*tile)++) {
        const int64_t t = *tile, length = task->lengths[i];
        uint32_t checksum;
        task->odd |= count_tile(task, i, g->counts + t * ROW, &changes, &longs);
        const int64_t most = (int64_t)(8 * (uint64_t)length), held = task->elements[i];
        task->odd |= (int64_t)changes > (most < held ? most : held) || length >= LONGEST;
        task->shorter += length < 4;
        memcpy(&checksum, task->checksums + 4 * i, sizeof checksum);
        g->owner[t] = owner;
        g->places[2 * t] = *block;
        g->places[2 * t + 1] = g->segments;
        g->spans[2 * t] = (int64_t)(8 * at);
        g->spans[2 * t + 1] = most;
        g->starts[t] = (int64_t)sums[0];
        g->firsts[t] = (int64_t)sums[1];
        g->checksums[t] = checksum;
        at += (uint64_t)length;
        bytes += (uint64_t)length;
        sums[0] += changes;
        sums[1] += changes + 2 * longs;
        if (task->cut) {
            for (int64_t b = 0; b < task->blocks[i]; b++) g->block_tiles[(*block)++] = t;
            g->segments += task->rooms[i];
        }
    }
    task->odd |= (int64_t)bytes != task->size;
    task->changes = (int64_t)(sums[0] - before[0]);
    task->numbers = (int64_t)(sums[1] - before[1]);
}

/* All groups, whose tasks lie in ``tasks`` one group after the other. The arrays of a group have room for its tiles, and
 * for the blocks that its grids say. */
EXPORT void dk_decode_tables(task_t *tasks, group_t *groups, int64_t count) {
    for (group_t *g = groups; g < groups + count; g++) {
        int64_t tile = 0, block = 0;
        uint64_t sums[2] = {0, 0};
        g->segments = 0;
        for (int64_t i = 0; i < g->tasks; i++) write_task(tasks + g->first_task + i, g, i, &tile, &block, sums);
        g->places[2 * tile] = block;
        g->places[2 * tile + 1] = g->segments;
        g->starts[tile] = (int64_t)sums[0];
    }
}
