/* Names of tensors: UTF-8 (RFC 3629) without control characters, as format/safetensors_header.py takes them. */
#ifndef DELTACKPT_NAMES_H
#define DELTACKPT_NAMES_H

#include "common.h"

/* The character of two bytes or more at ``at``, which ends before ``end``. -> its bytes, 0 if it is no character of
 * UTF-8, or one of U+0080 to U+009F. */
INLINE int64_t character(const uint8_t *at, const uint8_t *end) {
    const int first = *at;
    const int64_t bytes = first < 0xC2 ? 0 : first < 0xE0 ? 2 : first < 0xF0 ? 3 : first < 0xF5 ? 4 : 0;
    if (!bytes || end - at < bytes) return 0;
    for (int64_t i = 1; i < bytes; i++)
        if (at[i] >> 6 != 2) return 0;
    switch (first) { /* what the second byte is not: control characters, longer than needed, surrogates, too high */
    case 0xC2: return at[1] < 0xA0 ? 0 : bytes;
    case 0xE0: return at[1] < 0xA0 ? 0 : bytes;
    case 0xED: return at[1] > 0x9F ? 0 : bytes;
    case 0xF0: return at[1] < 0x90 ? 0 : bytes;
    case 0xF4: return at[1] > 0x8F ? 0 : bytes;
    default: return bytes;
    }
}

INLINE int is_name(const uint8_t *at, int64_t bytes) {
    const uint8_t *const end = at + bytes;
    while (at < end) {
        const int64_t here = *at >= 128 ? character(at, end) : *at >= ' ' && *at <= '~';
        if (!here) return 0;
        at += here;
    }
    return bytes > 0;
}

#endif
