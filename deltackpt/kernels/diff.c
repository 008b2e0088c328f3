/* Compare, count, scatter: the passes over whole tensors. Memory speed is the limit, so they read every byte once. */
#include "common.h"

INLINE int64_t compare(const void *old, const void *new, int64_t n, int64_t first, int64_t *positions, void *before,
                       void *after, const int width) {
    const int64_t together = 32 / width;
    int64_t found = 0, i = 0;
    for (; i + together <= n; i += together) {
        uint64_t a[4], b[4];
        memcpy(a, (const char *)old + i * width, 32);
        memcpy(b, (const char *)new + i * width, 32);
        if (!((a[0] ^ b[0]) | (a[1] ^ b[1]) | (a[2] ^ b[2]) | (a[3] ^ b[3]))) continue;
        for (int w = 0; w < 4; w++)
            for (uint64_t x = a[w] ^ b[w]; x;) {
                int lane = __builtin_ctzll(x) / (8 * width);
                int64_t at = i + w * (8 / width) + lane;
                positions[found] = first + at;
                store(before, found, load(old, at, width), width);
                store(after, found++, load(new, at, width), width);
                x &= width == 8 || lane == 8 / width - 1 ? 0 : ~0ull << 8 * width * (lane + 1);
            }
    }
    for (; i < n; i++)
        if (load(old, i, width) != load(new, i, width)) {
            positions[found] = first + i;
            store(before, found, load(old, i, width), width);
            store(after, found++, load(new, i, width), width);
        }
    return found;
}

/* Where n words differ: position (plus ``first``), old and new word of each. The outputs have room for n. */
EXPORT int64_t dk_compare(const void *old, const void *new, int64_t n, int width, int64_t first, int64_t *positions,
                          void *before, void *after) {
    int64_t found;
#define CALL(w) found = compare(old, new, n, first, positions, before, after, w)
    BY_WIDTH(width, CALL)
#undef CALL
    return found;
}

#define AHEAD 32 /* words that are on their way from memory at a time */

INLINE int scatter(void *words, uint64_t n, const void *positions, const void *values, int64_t count, const int width,
                   const int wide) {
    int outside = 0;
    for (int64_t i = 0; i < count; i++) outside |= load(positions, i, wide) >= n;
    if (outside) return -1;
    int64_t i = 0;
    for (; i + AHEAD < count; i++) {
        __builtin_prefetch((char *)words + (int64_t)load(positions, i + AHEAD, wide) * width, 1);
        store(words, (int64_t)load(positions, i, wide), load(values, i, width), width);
    }
    for (; i < count; i++) store(words, (int64_t)load(positions, i, wide), load(values, i, width), width);
    return 0;
}

/* words[positions[i]] = values[i], positions being ``wide`` = 4 or 8 bytes. -> -1, and nothing written, if one is
 * outside. */
EXPORT int dk_scatter(void *words, int64_t n, const void *positions, int wide, const void *values, int64_t count,
                      int width) {
    int code;
#define CALL(w)                                                                                                        \
    code = wide == 4 ? scatter(words, (uint64_t)n, positions, values, count, w, 4)                                     \
                     : scatter(words, (uint64_t)n, positions, values, count, w, 8)
    BY_WIDTH(width, CALL)
#undef CALL
    return code;
}
