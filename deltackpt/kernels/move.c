/* A tensor of a slot moved to the next step, row of tiles by row of tiles, while its bytes are in the processor's cache:
 * records of the last move, decoding, a record in the journal, new elements, xxh3. A row of tiles is a run of elements. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "lists_read.h"
#include "xxh3.h"

enum { NOT_WRITTEN = NO_MEMORY + 1, RECORD_DIFFERS };

#define HEAD 28 /* bytes of a block's head in a journal, and of the only row of its table */
#define ROW_BYTES 32
#define SOON 32 /* elements that are on their way from memory at a time: those of one tile are lines apart */

/* Elements that the last move wrote: words at positions of ``wide`` bytes; 0: all words, in order. */
typedef struct {
    const uint8_t *positions, *values;
    int64_t count, first, end; /* all of them lie in [first, end) */
    int64_t wide;
    const uint8_t *block; /* what they lie in, if it is still to be checked: more than XXH3_SHORT bytes, and their xxh3-64 */
    int64_t bytes;
    uint64_t check;
} record_t;

typedef struct {
    read_job_t read; /* all of the tensor; for no positions and no new words */
    record_t *records;
    int64_t count;       /* of records */
    int64_t first, stop; /* rows of tiles that are done by this call */
    int64_t tensor, patch; /* as the journal numbers them */
    int32_t fd;          /* of the journal */
    int32_t hashed;      /* is the digest wanted? Then all rows are done. */
    int64_t error;       /* errno where the journal was not written */
    int64_t written;     /* new elements */
    uint8_t xxh3[16];
} move_t;

INLINE uint64_t position(const record_t *r, int64_t i) {
    return r->wide == 4 ? load(r->positions, i, 4) : load(r->positions, i, 8);
}

/* -> a code */
static int put_record(record_t *r, uint8_t *elements, int64_t low, int64_t high, int width) {
    if (r->end <= low || r->first >= high) return OK;
    if (r->block && xxh3_64_of(r->block, r->bytes) != r->check) return RECORD_DIFFERS;
    r->block = NULL;
    if (!r->wide) {
        const int64_t stop = least(high, r->count);
        if (low < stop) memcpy(elements + low * width, r->values + low * width, (size_t)((stop - low) * width));
        return OK;
    }
    const uint64_t room = (uint64_t)(high - low);
#define PUT(w)                                                                                                         \
    for (int64_t i = 0; i < r->count; i++) {                                                                           \
        const uint64_t at = position(r, i), soon = i + SOON < r->count ? position(r, i + SOON) : at;                   \
        if (soon - (uint64_t)low < room) __builtin_prefetch(elements + soon * w, 1);                                   \
        if (at - (uint64_t)low < room) store(elements, (int64_t)at, load(r->values, i, w), w);                         \
    }
    BY_WIDTH(width, PUT)
#undef PUT
    return OK;
}

static void put_new(const uint8_t *positions, const uint8_t *values, int64_t count, uint8_t *elements, int width) {
#define PUT(w)                                                                                                         \
    for (int64_t i = 0; i < count; i++) {                                                                              \
        if (i + SOON < count) __builtin_prefetch(elements + load(positions, i + SOON, 4) * w, 1);                      \
        store(elements, (int64_t)load(positions, i, 4), load(values, i, w), w);                                        \
    }
    BY_WIDTH(width, PUT)
#undef PUT
}

/* -> 0, or errno */
static int write_all(int fd, const uint8_t *data, int64_t bytes) {
    while (bytes > 0) {
        const ssize_t done = write(fd, data, (size_t)bytes);
        if (done < 0 && errno != EINTR) return errno;
        if (done == 0) return EIO;
        if (done > 0) {
            data += done;
            bytes -= done;
        }
    }
    return 0;
}

/* A block of one record: its head and row before the positions and words that are there already, and zeros after them
 * up to a length that has a digest. -> its bytes */
static int64_t close_block(const move_t *m, uint8_t *block, int64_t changes, int64_t low, int64_t high) {
    const int word = m->read.form.word;
    int64_t bytes = ROW_BYTES + changes * (4 + word);
    if (bytes <= XXH3_SHORT) {
        memset(block + HEAD + bytes, 0, (size_t)(XXH3_SHORT + 1 - bytes));
        bytes = XXH3_SHORT + 1;
    }
    uint8_t *const row = block + HEAD;
    const uint64_t fields[] = {(uint64_t)changes, (uint64_t)low, (uint64_t)high};
    memset(block, 0, HEAD + 8);
    store(row, 0, (uint64_t)m->tensor, 4);
    row[4] = (uint8_t)word;
    row[5] = 4;
    memcpy(row + 8, fields, sizeof fields);
    store(block, 0, 1, 4);
    store(block, 1, (uint64_t)m->patch, 4);
    const uint64_t rest[] = {(uint64_t)bytes, xxh3_64_of(row, bytes)};
    memcpy(block + HEAD - sizeof rest, rest, sizeof rest);
    return HEAD + bytes;
}

typedef struct {
    scratch_t scratch;
    uint8_t *block;
    int64_t room; /* changes that ``block`` has room for */
    uint64_t acc[8];
    int64_t hashed; /* bytes */
} moving_t;

static int64_t changes_of_row(const read_job_t *job, int64_t row) {
    const form_t *f = &job->form;
    int64_t changes = 0;
    for (int64_t t = row * f->columns; t < (row + 1) * f->columns; t++)
        for (int c = 0; c < f->classes; c++) changes += job->counts[t * (f->classes + f->sized) + c];
    return changes;
}

/* ``payload``: the first byte of the row's tiles there, and after it that of the next row. -> a code */
static int move_row(move_t *m, moving_t *s, int64_t row, int64_t *payload, int64_t *bad) {
    const form_t *f = &m->read.form;
    const int word = f->word;
    const int64_t tile_height = parts(f->height, f->rows), changes = changes_of_row(&m->read, row);
    const int64_t low = least(row * tile_height, f->height) * f->width;
    const int64_t high = least((row + 1) * tile_height, f->height) * f->width;
    for (int64_t i = 0; i < m->count; i++) {
        const int code = put_record(m->records + i, m->read.elements, low, high, word);
        if (code) return code;
    }
    if (changes > s->room || !s->block) {
        free(s->block);
        s->room = changes + changes / 4;
        s->block = malloc((size_t)(HEAD + ROW_BYTES + XXH3_SHORT + s->room * (4 + word)));
        if (!s->block) return NO_MEMORY;
    }
    uint8_t *const positions = s->block + HEAD + ROW_BYTES, *const values = positions + 4 * changes;
    read_job_t job = m->read;
    job.positions = positions;
    job.new = values;
    job.wide = 4;
    place_t place = {0, row * f->columns, *payload, 0};
    for (; place.row < (row + 1) * f->columns; place.row++) {
        const int code = lists_read_tile(&job, scan_of_this_processor(), place, &s->scratch, NULL);
        *bad = place.row;
        if (code) return code;
        place.payload += job.lengths[place.row];
        for (int c = 0; c < f->classes; c++)
            place.changes += job.counts[place.row * (f->classes + f->sized) + c];
    }
    *payload = place.payload;
    if (changes) {
        m->error = write_all(m->fd, s->block, close_block(m, s->block, changes, low, high));
        if (m->error) return NOT_WRITTEN;
        put_new(positions, values, changes, m->read.elements, word);
        m->written += changes * word;
    }
    if (m->hashed) {
        const int64_t bytes = f->height * f->width * word;
        const int64_t blocks = (least(high * word, bytes - 1) - s->hashed) / XXH3_BLOCK;
        xxh3_absorb(s->acc, m->read.elements + s->hashed, blocks, 0);
        s->hashed += blocks * XXH3_BLOCK;
    }
    return OK;
}

/* -> 0, or the code of the first defect, and the tile that has it, -1 for the tables: what was written up to there is
 * in the journal, as far as it was written to elements at all. */
EXPORT int dk_move(move_t *m, int64_t *tile) {
    const read_job_t *job = &m->read;
    moving_t s = {.room = 0};
    int64_t payload = 0, bad = -1;
    int code = lists_check(job);
    xxh3_begin(s.acc);
    m->written = m->error = 0;
    for (int64_t i = 0; !code && i < m->first * job->form.columns; i++) payload += job->lengths[i];
    for (int64_t row = m->first; !code && row < m->stop; row++) code = move_row(m, &s, row, &payload, &bad);
    if (!code && m->hashed) {
        const int64_t bytes = job->form.height * job->form.width * job->form.word;
        xxh3_absorb(s.acc, job->elements + s.hashed, 0, bytes - s.hashed);
        xxh3_finish(s.acc, bytes, m->xxh3);
    }
    *tile = bad;
    for (int i = 0; i < ROOMS; i++) free(s.scratch.room[i]);
    free(s.block);
    return code;
}
