/* What a part table says, as bytes: names, and the list indexes of tensors in `packed` (FORMAT, "Part table"). */
#include "lists_write.h"

/* Names as a table of version 2 has them, each by what it shares with the one before it. Name i is names[starts[i]] up
 * to names[starts[i + 1]]; ``ends`` is where each ends in ``out``, which has room for 27 bytes more of each. */
EXPORT int64_t dk_table_names(const uint8_t *names, const int64_t *starts, int64_t count, uint8_t *out, int64_t *ends) {
    uint8_t *at = out;
    int64_t before = 0; /* bytes of the last name */
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *name = names + starts[i], *last = name - before;
        const int64_t n = starts[i + 1] - starts[i], most = least(n, before);
        int64_t shared = 0, tail = 0;
        while (shared < most && name[shared] == last[shared]) shared++;
        while (tail < most - shared && name[n - 1 - tail] == last[before - 1 - tail]) tail++;
        at = put_number(put_number(put_number(at, (uint64_t)shared), (uint64_t)tail), (uint64_t)(n - shared - tail));
        memcpy(at, name + shared, (size_t)(n - shared - tail));
        at += n - shared - tail;
        ends[i] = at - out;
        before = n;
    }
    return at - out;
}

#define CUT 0x80 /* the grid is stated */

/* Counts as fields of ``bits`` bits, lowest first. -> the byte after them */
static uint8_t *put_counts(uint8_t *at, const int64_t *counts, int64_t n, int bits) {
    uint64_t word = 0;
    int held = 0;
    for (int64_t i = 0; i < n; i++) {
        word |= (uint64_t)counts[i] << held; /* of at most 32 bits, after less than 8 */
        for (held += bits; held >= 8; held -= 8, word >>= 8) *at++ = (uint8_t)word;
    }
    if (held) *at++ = (uint8_t)word;
    return at;
}

/* The details of all jobs, after dk_lists_write, one after the other; ``ends`` is where each ends. ``out`` has room for
 * 22 bytes of each, and of each tile for 4, and 9 for each list and for the length. -> all bytes */
EXPORT int64_t dk_lists_details(const write_job_t *jobs, int64_t count, uint8_t *out, int64_t *ends) {
    uint8_t *at = out;
    for (int64_t j = 0; j < count; j++) {
        const write_job_t *job = jobs + j;
        const form_t *f = &job->form;
        const int64_t numbers = job->tiles * (f->classes + f->sized);
        int64_t largest = 0;
        for (int64_t i = 0; i < numbers; i++) largest = job->counts[i] > largest ? job->counts[i] : largest;
        const int bits = bit_length((uint32_t)largest);
        *at++ = (uint8_t)(bits | (job->tiles > 1 ? CUT : 0));
        if (job->tiles > 1) at = put_number(put_number(at, (uint64_t)f->rows), (uint64_t)f->columns);
        *at++ = (uint8_t)(f->classes | f->sized << 4);
        if (f->classes > 1) *at++ = (uint8_t)f->top;
        if (f->sized) *at++ = (uint8_t)f->anchor;
        at = put_counts(at, job->counts, numbers, bits);
        for (int64_t t = 0; t < job->tiles; t++) at = put_number(at, (uint64_t)job->lengths[t]);
        memcpy(at, job->checksums, (size_t)job->tiles * sizeof *job->checksums);
        at += job->tiles * (int64_t)sizeof *job->checksums;
        ends[j] = at - out;
    }
    return at - out;
}
