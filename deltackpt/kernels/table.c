/* The part table (FORMAT section "Part table"), a run of entries of `packed` whole tensors at a time.
 *
 * What is taken here is what codecs/table.py takes, and means the same. Anything else, be it another encoding, a box or
 * a defect, ends the run before its entry: the reader in Python goes on from there. */
#include "lists.h"
#include "names.h"

#define MAX_NAME 1024
#define MAX_DIMS 8 /* of a tensor that is taken here */
#define CUT 0x80 /* the grid is stated */
#define MAX_COUNT_BITS 32
#define REPEAT 0x40
#define SIZE_LIMIT ((int64_t)1 << 62)
#define MAX_LENGTH ((int64_t)1 << 40)

typedef struct {
    int64_t begins, ends;     /* the entry's bytes in the table */
    int64_t name, name_bytes; /* in ``names`` */
    int64_t height, width, rows, columns;
    int64_t tile, list;       /* its first in ``lengths`` and ``counts`` */
    int64_t tiles, checksums; /* where in the table its checksums are */
    int64_t changes, payload, elements;
    int64_t dims[MAX_DIMS];
    int32_t dtype, rank; /* the code of the dtype */
    int32_t classes, sized, top, anchor;
} row_of_table_t;

/* Of every dtype by its code: bytes of a word, 0 for one that is not taken, and the field of the exponent. */
typedef struct {
    int32_t word, exponent_start, exponent_bits, unused;
} dtype_t;

typedef struct {
    const uint8_t *table;
    int64_t bytes, at;
    int64_t entries;      /* how many are left to read at most */
    const dtype_t *dtypes;
    int32_t known, packed; /* how many dtypes; the code of `packed` */
    const uint8_t *last;  /* the name before; of no bytes at the beginning */
    int64_t last_bytes;
    int32_t before_dtype, before_rank; /* the form before; dtype 0: none that may be repeated */
    int64_t before_dims[MAX_DIMS];
    /* Out: how much there was, and if the arrays are there, all of it: without them at least as much, as only what says
     * how long an entry is was looked at. */
    int64_t found, name_bytes, lists, tiles;
    row_of_table_t *rows;
    uint8_t *names;
    int64_t *counts, *lengths;
} table_t;

/* A number of at most ``limit``, in its shortest form. -> is it? */
INLINE int number(const uint8_t *data, int64_t bytes, int64_t *at, int64_t limit, int64_t *value) {
    uint64_t found = 0;
    for (int shift = 0; shift < 63; shift += 7) {
        if (*at >= bytes) return 0;
        const uint8_t byte = data[(*at)++];
        found |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *value = (int64_t)found;
            return (byte || !shift) && found <= (uint64_t)limit;
        }
    }
    return 0;
}

/* Fields of so many bits, from a byte on; none of them is read past ``limit``. */
typedef struct {
    const uint8_t *from, *limit;
    int bits;
} fields_t;

INLINE int64_t field(const fields_t *f, int64_t number) {
    const int64_t bit = number * f->bits;
    return (int64_t)(word_at(f->from + (bit >> 3), f->limit) >> (bit & 7) & ((1ull << f->bits) - 1));
}

/* Changes of a tile by class, and how many of them are long; at most as many as there are. -> is it so? */
INLINE int read_counts(const fields_t *f, int64_t tile, const form_t *form, int64_t elements, int64_t *of,
                       int64_t *changes) {
    const int lists = form->classes + form->sized, first = form->classes - form->sized;
    *changes = 0;
    for (int l = 0; l < lists; l++) {
        of[l] = field(f, tile * lists + l);
        if (l < form->classes) *changes += of[l];
        if (l >= form->classes && of[l] > of[first + l - form->classes]) return 0;
    }
    return *changes <= elements;
}

/* Counts, lengths and checksums of an entry, into ``counts`` and ``lengths`` of its own. */
static int read_tiles(const table_t *t, int64_t *at, int bits, row_of_table_t *row, const form_t *form, int64_t *counts,
                      int64_t *lengths) {
    const int lists = form->classes + form->sized;
    const int64_t all = row->tiles * lists * bits;
    const fields_t fields = {t->table + *at, t->table + t->bytes, bits};
    int64_t changes, any = 0;
    for (int64_t tile = 0; tile < row->tiles; tile++) {
        int64_t *of = counts + tile * lists;
        if (!read_counts(&fields, tile, form, tile_at(form, tile).elements, of, &changes)) return 0;
        for (int l = 0; l < lists; l++) any |= of[l];
        lengths[tile] = changes;
        row->changes += changes;
    }
    if (bits ? any >> (bits - 1) != 1 : any) return 0; /* the largest needs all bits */
    if ((all & 7) && fields.from[all >> 3] >> (all & 7)) return 0;
    *at += octets(all);
    for (int64_t tile = 0, length; tile < row->tiles; tile++) {
        if (!number(t->table, t->bytes, at, MAX_LENGTH, &length)) return 0;
        row->payload += length;
        if (lengths[tile] > 8 * length || row->payload > MAX_LENGTH) return 0;
        lengths[tile] = length;
    }
    row->checksums = *at;
    *at += 4 * row->tiles;
    return *at <= t->bytes;
}

/* The same bytes, passed over: whether they are right is seen when there is room for what they say. */
static int pass_tiles(const table_t *t, int64_t *at, int bits, const row_of_table_t *row, int lists) {
    int64_t left = row->tiles;
    *at += octets(row->tiles * lists * bits);
    for (; left && *at < t->bytes; (*at)++) left -= t->table[*at] < 128; /* the last byte of a number */
    *at += 4 * row->tiles;
    return !left && *at <= t->bytes;
}

/* What `packed` says of a tensor of the row's dtype and shape. */
static int read_detail(table_t *t, int64_t *at, row_of_table_t *row) {
    const dtype_t *dtype = t->dtypes + row->dtype;
    if (*at >= t->bytes) return 0;
    const int stated = t->table[(*at)++], bits = stated & ~CUT;
    if (bits > MAX_COUNT_BITS) return 0;
    row->rows = row->columns = 1;
    if (stated & CUT) {
        if (!number(t->table, t->bytes, at, row->height, &row->rows) || !row->rows) return 0;
        if (!number(t->table, t->bytes, at, row->width, &row->columns) || !row->columns) return 0;
        if (row->rows == 1 && row->columns == 1) return 0;
    }
    if (parts(row->height, row->rows) * parts(row->width, row->columns) > MAX_ELEMENTS) return 0;
    if (t->bytes - *at < 3) return 0; /* what follows is longer than what is read here */
    const int both = t->table[(*at)++];
    row->classes = both & 15;
    row->sized = both >> 4;
    if (!row->classes || row->classes > MAX_CLASSES || row->sized > row->classes) return 0;
    row->top = row->classes > 1 ? t->table[(*at)++] : 0;
    row->anchor = row->sized ? t->table[(*at)++] : 0;
    if (row->top >> dtype->exponent_bits) return 0;
    row->tiles = row->rows * row->columns;
    const int lists = row->classes + row->sized;
    if (row->tiles > t->bytes || octets(row->tiles * lists * bits) + 5 * row->tiles > t->bytes - *at) return 0;
    const form_t form = {row->height, row->width, row->rows, row->columns, dtype->word, dtype->exponent_start,
                         dtype->exponent_bits, row->classes, row->sized, row->top, row->anchor, 0};
    row->list = t->lists;
    row->tile = t->tiles;
    if (!(t->counts ? read_tiles(t, at, bits, row, &form, t->counts + t->lists, t->lengths + t->tiles)
                    : pass_tiles(t, at, bits, row, lists)))
        return 0;
    t->lists += row->tiles * lists;
    t->tiles += row->tiles;
    return 1;
}

/* Dtype and shape, or those of the entry before. */
static int read_form(table_t *t, int64_t *at, row_of_table_t *row, int repeats) {
    if (repeats) {
        row->dtype = t->before_dtype;
        row->rank = t->before_rank;
        memcpy(row->dims, t->before_dims, sizeof row->dims);
    } else {
        if (t->bytes - *at < 2) return 0;
        row->dtype = t->table[(*at)++];
        row->rank = t->table[(*at)++];
        if (row->rank > MAX_DIMS) return 0;
        for (int i = 0; i < row->rank; i++)
            if (!number(t->table, t->bytes, at, SIZE_LIMIT, row->dims + i)) return 0;
    }
    if (row->dtype <= 0 || row->dtype >= t->known || !t->dtypes[row->dtype].word) return 0;
    row->height = row->width = row->elements = 1;
    for (int i = 0; i < row->rank; i++) {
        if (!row->dims[i] || row->elements > SIZE_LIMIT / 8 / row->dims[i]) return 0;
        if (i) row->height *= row->dims[i - 1];
        row->width = row->dims[i];
        row->elements *= row->dims[i];
    }
    return 1;
}

/* A name after the last one, into ``name``. -> its bytes, 0 for one that is not taken. */
static int64_t read_name(const table_t *t, int64_t *at, const uint8_t *last, int64_t last_bytes, uint8_t *name) {
    int64_t shared, tail, middle;
    if (!number(t->table, t->bytes, at, last_bytes, &shared)) return 0;
    if (!number(t->table, t->bytes, at, last_bytes - shared, &tail)) return 0;
    if (!number(t->table, t->bytes, at, MAX_NAME, &middle)) return 0;
    const int64_t bytes = shared + middle + tail, both = least(bytes, last_bytes);
    if (!bytes || bytes > MAX_NAME || middle > t->bytes - *at) return 0;
    memcpy(name, last, (size_t)shared);
    memcpy(name + shared, t->table + *at, (size_t)middle);
    memcpy(name + shared + middle, last + last_bytes - tail, (size_t)tail);
    if (!is_name(name, bytes)) return 0;
    const int order = memcmp(name, last, (size_t)both);
    if (order < 0 || (!order && bytes <= last_bytes)) return 0;
    if (bytes >= 10 && !memcmp(name, "deltackpt:", 10)) return 0;
    if (bytes == 12 && !memcmp(name, "__metadata__", 12)) return 0;
    *at += middle;
    return bytes;
}

/* From ``at`` on, as many entries as are taken; ``at`` is then behind them. The arrays, all of them or none, have room
 * for as many entries as a call without any has found, which is not asked for more. */
EXPORT void dk_table_read(void *table) {
    table_t *t = table;
    uint8_t name[2][MAX_NAME];
    const uint8_t *last = t->last;
    int64_t last_bytes = t->last_bytes;
    t->found = t->name_bytes = t->lists = t->tiles = 0;
    for (int odd = 0; t->found < t->entries; odd ^= 1) {
        row_of_table_t row = {.begins = t->at};
        const int64_t lists = t->lists, tiles = t->tiles;
        int64_t at = t->at;
        row.name = t->name_bytes;
        row.name_bytes = read_name(t, &at, last, last_bytes, name[odd]);
        if (!row.name_bytes || at >= t->bytes) return;
        const int code = t->table[at++], repeats = code & REPEAT;
        if ((code & ~REPEAT) != t->packed || (repeats && !t->before_dtype) || !read_form(t, &at, &row, repeats) ||
            !read_detail(t, &at, &row)) {
            t->lists = lists;
            t->tiles = tiles;
            return;
        }
        row.ends = t->at = at;
        if (t->names) memcpy(t->names + t->name_bytes, name[odd], (size_t)row.name_bytes);
        if (t->rows) t->rows[t->found] = row;
        t->found++;
        t->name_bytes += row.name_bytes;
        t->before_dtype = row.dtype;
        t->before_rank = row.rank;
        memcpy(t->before_dims, row.dims, sizeof row.dims);
        last = name[odd];
        last_bytes = row.name_bytes;
    }
}
