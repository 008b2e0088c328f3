/* A tensor rebuilt from its elements in an anchor and several patches of `packed`, and compared with its new state, row of
 * tiles by row of tiles: what is rebuilt is nowhere else, and every byte is in the cache from one step to the next. */
#include <stdlib.h>

#include "lists_read.h"
#include "xxh3.h"

#define SOON 8 /* lines of a tile that are on their way from memory at a time */
enum { PIECE = 6 };

int64_t dk_compare(const void *old, const void *new, int64_t n, int width, int64_t first, int64_t *positions,
                   void *before, void *after);

typedef struct {
    const read_job_t *jobs; /* of each patch; those that have tiles cut alike, and have all of them */
    int64_t patches;
    int64_t *payload; /* of each patch: where the payload of the next tile begins; at first 0 */
    const uint8_t *from, *new;
    uint8_t *tiles, *looks; /* room for a row of tiles, one after the other, and for what is seen of them */
    int64_t bytes, at; /* of the tensor; those that are done, at first 0 */
    int64_t step; /* bytes that are compared at a time: whole lines of the tensor, and blocks of xxh3 */
    int64_t row; /* of tiles, that is in ``tiles``; at first -1 */
    int64_t *positions; /* of each of these three there is ``room`` for so many */
    void *before, *after;
    int64_t room;
    int64_t found; /* by this call */
    uint64_t old_acc[8], new_acc[8];
    uint8_t old_xxh3[16], new_xxh3[16]; /* once all is done */
} rebuild_t;

/* Whole lines of the tensor out of a row of tiles, which have ``high`` lines. */
static void gather_lines(const form_t *f, uint8_t *to, const uint8_t *tiles, int64_t high, int64_t first, int64_t count) {
    const int64_t wide = parts(f->width, f->columns) * f->word, whole = f->width * f->word;
    for (int64_t i = first; i < first + count; i++)
        for (int64_t left = 0, size; left < whole; left += wide, to += size) {
            size = least(wide, whole - left);
            const uint8_t *const from = tiles + high * left + i * size;
            for (int64_t at = 0; at < size; at += 64) __builtin_prefetch(from + SOON * size + at);
            memcpy(to, from, (size_t)size);
        }
}

/* A tile out of the anchor. Its lines are apart there, and no processor guesses where the next but one is. */
static void copy_tile(const rebuild_t *r, const read_job_t *job, int64_t number, seen_t *seen) {
    const form_t *f = &job->form;
    const scan_t *const scan = scan_of_this_processor();
    const tile_at_t at = tile_at(f, number);
    const int64_t lines = at.wide ? 2 * BLOCK_ELEMENTS / at.wide + 1 : 0; /* of the block after the next one */
    for (int64_t first = 0; first < at.elements; first += BLOCK_ELEMENTS) {
        const int64_t within = !at.contiguous && at.elements - first >= 4 * BLOCK_ELEMENTS;
        lists_copy_block(job, scan, number, r->from, first, within ? lines * f->width * f->word : 0, seen);
    }
}

/* A row of tiles through all patches. -> a code */
static int rebuild_row(rebuild_t *r, const read_job_t *first, int64_t row, scratch_t *scratch) {
    const form_t *f = &first->form;
    const scan_t *const scan = scan_of_this_processor();
    uint8_t *tile = r->tiles;
    for (int64_t c = 0; c < f->columns; c++) {
        const int64_t number = row * f->columns + c;
        seen_t seen = {.tile = tile, .room = r->looks};
        copy_tile(r, first, number, &seen);
        tile += tile_at(f, number).elements * f->word;
        for (int64_t p = 0; p < r->patches; p++) {
            if (!r->jobs[p].tiles) continue;
            const int code = lists_read_tile(r->jobs + p, scan, (place_t){p, number, r->payload[p], 0}, scratch, &seen);
            if (code) return code;
            r->payload[p] += r->jobs[p].lengths[number];
        }
    }
    return OK;
}

static int go_on(rebuild_t *r, int64_t until, scratch_t *scratch) {
    const read_job_t *first = r->jobs;
    while (!first->tiles) first++;
    const form_t *f = &first->form;
    const int64_t word = f->word, line = f->width * word, tall = parts(f->height, f->rows) * line;
    if (!r->at) {
        for (int64_t p = 0; p < r->patches; p++)
            if (r->jobs[p].tiles && lists_check(r->jobs + p)) return 1;
        xxh3_begin(r->old_acc);
        xxh3_begin(r->new_acc);
    }
    uint8_t *const room = f->columns > 1 ? scratch_room(scratch, PIECE, (size_t)r->step) : r->tiles;
    if (!room) return 1;
    while (r->at < until) {
        const int64_t row = r->at / tall, inside = r->at - row * tall, end = least(tall, r->bytes - row * tall);
        const int64_t size = least(r->step, end - inside);
        if (r->at + size > until || r->found + size / word > r->room) break;
        if (row != r->row && rebuild_row(r, first, row, scratch)) return 1;
        r->row = row;
        const uint8_t *const old = f->columns > 1 ? room : r->tiles + inside, *const new = r->new + r->at;
        if (f->columns > 1) gather_lines(f, room, r->tiles, end / line, inside / line, size / line);
        r->found += dk_compare(old, new, size / word, (int)word, r->at / word, r->positions + r->found,
                               (char *)r->before + r->found * word, (char *)r->after + r->found * word);
        const int64_t last = r->at + size == r->bytes, blocks = (size - last) / XXH3_BLOCK;
        const int64_t rest = last ? size - blocks * XXH3_BLOCK : 0;
        xxh3_absorb(r->old_acc, old, blocks, rest);
        xxh3_absorb(r->new_acc, new, blocks, rest);
        r->at += size;
    }
    if (r->at < r->bytes) return 0;
    while (++r->row < f->rows) /* tiles that have no element hold nothing either */
        if (rebuild_row(r, first, r->row, scratch)) return 1;
    xxh3_finish(r->old_acc, r->bytes, r->old_xxh3);
    xxh3_finish(r->new_acc, r->bytes, r->new_xxh3);
    return 0;
}

/* Rebuild, compare and hash, as far as byte ``until``, by pieces of at most ``step`` bytes that are done whole, while there is
 * room for what differs in the next one.
 *
 * -> 0, or 1 where a patch has a defect, or there is no memory; what was found is then worth nothing. */
EXPORT int dk_rebuild(void *given, int64_t until) {
    rebuild_t *r = given;
    scratch_t scratch = {{0}, {0}};
    r->found = 0;
    const int bad = go_on(r, until, &scratch);
    for (int i = 0; i < ROOMS; i++) free(scratch.room[i]);
    return bad;
}
