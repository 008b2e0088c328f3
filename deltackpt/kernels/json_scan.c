/* One look at JSON before it is parsed: what format/canonical.py asks of the text, where nothing has to be refused. */
#include "common.h"

#define LONG_NUMBER 19 /* digits, from which on an integer may be outside of 64 bits */

enum { ODD_NUMBERS = 1, SURROGATES = 2 };

/* -> bits: ODD_NUMBERS where a number outside of strings begins with -0 or has LONG_NUMBER digits, SURROGATES where a
 * string has a \u; -1 where there are more than ``marks`` commas and opening brackets outside of strings, or more than
 * ``depth`` levels, and for text that no parser takes: a backslash outside of a string, a string without an end. */
EXPORT int64_t dk_json_scan(const uint8_t *text, int64_t bytes, int64_t marks, int64_t depth) {
    const uint8_t *at = text, *const end = text + bytes;
    int64_t level = 0, digits = 0, found = 0;
    while (at < end) {
        const uint8_t c = *at++;
        if (c >= '0' && c <= '9') {
            if (++digits >= LONG_NUMBER || (c == '0' && at - text >= 2 && at[-2] == '-')) found |= ODD_NUMBERS;
            continue;
        }
        digits = 0;
        switch (c) {
        case '"':
            for (;; at++) {
                while (at < end && *at != '"' && *at != '\\') at++;
                if (at >= end) return -1;
                if (*at == '"') break;
                if (++at >= end) return -1;
                if (*at == 'u') found |= SURROGATES;
            }
            at++;
            break;
        case '{':
        case '[':
            if (++level > depth) return -1; /* fall through */
        case ',':
            if (--marks < 0) return -1;
            break;
        case '}':
        case ']':
            level--;
            break;
        case '\\':
            return -1;
        default:
            break;
        }
    }
    return found;
}
