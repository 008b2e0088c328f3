/* What writing `packed` consists of: choices, the order of the lists, bits. */
#ifndef DELTACKPT_LISTS_WRITE_H
#define DELTACKPT_LISTS_WRITE_H

#include "lists.h"

#define LENGTHS 33

/* How many changes have each old exponent, and each bit length of size too. */
typedef struct {
    int64_t of[EXPONENTS];
    int64_t cell[EXPONENTS][LENGTHS];
} cells_t;

typedef struct state state_t; /* what is known of a tensor between the calls */

typedef struct {
    form_t form; /* height, width and the element are given, all else is found */
    int64_t slices, changes, shares;
    const int64_t *positions; /* rising */
    const uint8_t *old, *new, *base;
    int64_t tiles, bytes; /* found; the rest is for the second call */
    int64_t *counts, *lengths;
    uint32_t *checksums;
    uint8_t *payload;
    state_t *state;
    void *room; /* for the state, if it has ``room_bytes`` enough; the caller's */
    int64_t room_bytes;
    int64_t after; /* ``base`` are all new elements: old ones are those, but where they changed */
} write_job_t;

void choose_grid(form_t *f, int64_t slices, int64_t changes, int64_t shares);
void choose_scale(form_t *f, const cells_t *cells, int64_t changes, int limit);
int64_t list_cost(int64_t chosen, int64_t candidates);
/* Are lists by class no shorter than one list, their counts included? Changes and elements by class. */
int saves_nothing(const form_t *f, const int64_t *changes, const int64_t *elements);

#endif
