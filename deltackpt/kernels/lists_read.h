/* What reads the tiles of `packed`: a tensor's job, and one tile of it. */
#ifndef DELTACKPT_LISTS_READ_H
#define DELTACKPT_LISTS_READ_H

#include "lists.h"

enum { OK, TILE_CHECKSUM, COUNT_OUTSIDE, TILE_SHORT, GAP_OUTSIDE, STEP_OUTSIDE, TILE_LENGTH, PADDING, NO_MEMORY };

/* One tensor, or some tiles of it. */
typedef struct {
    form_t form;
    const uint8_t *payload;
    int64_t bytes;
    uint8_t *elements; /* all old elements, flat */
    int64_t tiles;     /* rows of the tables: */
    const int64_t *numbers, *counts, *lengths; /* which tile; NULL: all. (tiles, lists). Bytes of each. */
    const uint8_t *checksums; /* as they lie in the table: at any byte */
    uint8_t *positions, *new;       /* of all changes, by tile, class and rank; either may be NULL */
    int32_t wide;                   /* bytes of a position: 4 or 8 */
    int32_t in_place;               /* new elements go to where the old ones are */
    int64_t *ones;                  /* gains the changes by one ULP; may be NULL */
} read_job_t;

typedef struct {
    int64_t job, row, payload, changes; /* the tile's first byte and first change in its job's */
} place_t;

/* What a look at all old elements of a tile has found, for the next patch of the same tile: no chunks, nothing. The
 * classes of its elements, and how many of each its chunks have, are in the scratch; changes are kept up with. */
typedef struct {
    uint8_t *tile; /* the tile's elements by themselves; NULL: they are among the job's */
    uint8_t *room; /* of lists_seen_bytes, for what is in the scratch otherwise; NULL: it is there */
    int64_t chunks;
    int32_t classes, top; /* of the form that they are by */
    uint32_t counts[ROW];
} seen_t;

/* What is wrong with a job's tables by themselves. */
int lists_check(const read_job_t *job);

/* One tile, whose place the caller knows from tables that are right. ``seen`` may be NULL; else new elements go to where
 * the old ones are, and nothing but this has used the scratch since. -> a code */
int lists_read_tile(const read_job_t *job, const scan_t *scan, place_t place, scratch_t *scratch, seen_t *seen);

/* Bytes of what is seen of a tile. */
int64_t lists_seen_bytes(int64_t elements);

/* A block of tile ``number``, from element ``first`` of it on, from among the elements of the tensor at ``from`` to
 * ``seen->tile``, and looked at on the way by the job's form into ``seen->room``: after all of its blocks the first patch
 * of the tile need not look. What lies ``ahead`` bytes is wanted next; 0: nothing. */
void lists_copy_block(const read_job_t *job, const scan_t *scan, int64_t number, const uint8_t *from, int64_t first,
                      int64_t ahead, seen_t *seen);

#endif
