/* The header of a safetensors file as nearly every writer writes it: compact JSON, the fields of a tensor in one order.
 * What is taken here is what format/safetensors_header.py takes, and means the same; for anything else it is asked. A
 * name that is written with escapes is left as it is: what they mean, and whether it may be a name, is not said. */
#include "names.h"

#define MAX_DIMS 8
#define MAX_NAME 1024
#define MAX_ESCAPED (6 * MAX_NAME) /* bytes of a name whose every byte is an escape */
#define MAX_DTYPE 16
#define SIZE_LIMIT ((int64_t)1 << 59)

typedef struct {
    int64_t name, name_bytes; /* where in the text */
    int64_t start, end;
    int64_t dims[MAX_DIMS];
    int32_t dtype, rank; /* the number of the dtype in the list that was given */
    int32_t escaped, unused;
} header_row_t;

/* A dtype whose elements are whole bytes: its name, and the bytes of one. */
typedef struct {
    char name[MAX_DTYPE];
    int64_t name_bytes, width;
} header_dtype_t;

typedef struct {
    const uint8_t *at, *end;
} text_t;

INLINE int skip(text_t *t, const char *word, int64_t bytes) {
    if (t->end - t->at < bytes || memcmp(t->at, word, (size_t)bytes)) return 0;
    t->at += bytes;
    return 1;
}

#define SKIP(word) skip(t, word, sizeof word - 1)

/* Of at most 18 digits, and none that another parser could take differently. */
INLINE int integer(text_t *t, int64_t *value) {
    const uint8_t *const first = t->at;
    *value = 0;
    for (; t->at < t->end && *t->at >= '0' && *t->at <= '9'; t->at++) {
        if (t->at - first == 18) return 0;
        *value = *value * 10 + (*t->at - '0');
    }
    return t->at - first == 1 || (t->at > first && *first != '0');
}

/* What stands between quotes, printable ASCII without an escape. -> its bytes, -1 for anything else. */
INLINE int64_t word(text_t *t) {
    const uint8_t *const first = t->at;
    for (; t->at < t->end && *t->at != '"'; t->at++)
        if (*t->at < ' ' || *t->at > '~' || *t->at == '\\') return -1;
    return t->at < t->end ? t->at++ - first : -1;
}

/* The name before the next quote. -> is it one, as far as it can be said? */
static int read_name(text_t *t, const uint8_t *text, header_row_t *row) {
    const uint8_t *const first = t->at;
    row->escaped = 0;
    for (; t->at < t->end && *t->at != '"'; t->at++) {
        if (*t->at != '\\') continue;
        row->escaped = 1;
        if (++t->at == t->end) return 0;
    }
    if (t->at == t->end) return 0;
    row->name = first - text;
    row->name_bytes = t->at++ - first;
    if (row->name_bytes > (row->escaped ? MAX_ESCAPED : MAX_NAME) || !is_name(first, row->name_bytes)) return 0;
    return row->name_bytes != 12 || memcmp(first, "__metadata__", 12);
}

/* From the quote before the name to the brace after the fields. */
static int read_tensor(text_t *t, const uint8_t *text, const header_dtype_t *dtypes, int64_t known, header_row_t *row) {
    if (!SKIP("\"") || !read_name(t, text, row)) return 0;
    if (!SKIP(":{\"dtype\":\"")) return 0;
    const uint8_t *const dtype = t->at;
    const int64_t bytes = word(t);
    for (row->dtype = 0; row->dtype < known; row->dtype++)
        if (dtypes[row->dtype].name_bytes == bytes && !memcmp(dtypes[row->dtype].name, dtype, (size_t)bytes)) break;
    if (bytes < 1 || row->dtype == known || !SKIP(",\"shape\":[")) return 0;
    int64_t size = dtypes[row->dtype].width;
    int empty = 0;
    for (row->rank = 0; !SKIP("]"); row->rank++) {
        if (row->rank == MAX_DIMS || (row->rank && !SKIP(",")) || !integer(t, row->dims + row->rank)) return 0;
        const int64_t dim = row->dims[row->rank];
        if (dim && size > SIZE_LIMIT / dim) return 0;
        size *= dim ? dim : 1;
        empty |= !dim;
    }
    if (!SKIP(",\"data_offsets\":[") || !integer(t, &row->start) || !SKIP(",") || !integer(t, &row->end)) return 0;
    return SKIP("]}") && row->end - row->start == (empty ? 0 : size);
}

/* The tensors of ``text`` from byte ``first`` on, which follows the brace, or the metadata and a comma, to the end of
 * the object and spaces after it. -> how many, of at most ``room``; -1 where another reader has to look. */
EXPORT int64_t dk_header_read(const uint8_t *text, int64_t bytes, int64_t first, const void *dtypes, int64_t known,
                              void *rows, int64_t room) {
    text_t at = {text + first, text + bytes}, *const t = &at;
    int64_t found = 0;
    do {
        if (found == room || !read_tensor(t, text, dtypes, known, (header_row_t *)rows + found++)) return -1;
    } while (SKIP(","));
    if (!SKIP("}")) return -1;
    for (; t->at < t->end; t->at++)
        if (*t->at != ' ') return -1;
    return found;
}
