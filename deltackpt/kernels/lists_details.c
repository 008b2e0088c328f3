/* What the part table says of tensors in `packed`: their list indexes, as bytes (FORMAT section "packed"). */
#include "lists_write.h"

INLINE uint8_t *put_number(uint8_t *out, uint64_t value) {
    for (; value > 127; value >>= 7) *out++ = (uint8_t)(value & 127) | 128;
    *out++ = (uint8_t)value;
    return out;
}

/* The details of all jobs, after dk_lists_write, one after the other; ``ends`` is where each ends. ``out`` has room for
 * 21 bytes of each, and of each tile for 4, and 9 for each list and for the length. -> all bytes */
EXPORT int64_t dk_lists_details(const write_job_t *jobs, int64_t count, uint8_t *out, int64_t *ends) {
    uint8_t *at = out;
    for (int64_t j = 0; j < count; j++) {
        const write_job_t *job = jobs + j;
        const form_t *f = &job->form;
        const int64_t numbers = job->tiles * (f->classes + f->sized);
        at = put_number(put_number(at, (uint64_t)f->rows), (uint64_t)f->columns);
        *at++ = (uint8_t)(f->classes | f->sized << 4);
        if (f->classes > 1) *at++ = (uint8_t)f->top;
        if (f->sized) *at++ = (uint8_t)f->anchor;
        for (int64_t i = 0; i < numbers; i++) at = put_number(at, (uint64_t)job->counts[i]);
        for (int64_t t = 0; t < job->tiles; t++) at = put_number(at, (uint64_t)job->lengths[t]);
        memcpy(at, job->checksums, (size_t)job->tiles * sizeof *job->checksums);
        at += job->tiles * (int64_t)sizeof *job->checksums;
        ends[j] = at - out;
    }
    return at - out;
}
