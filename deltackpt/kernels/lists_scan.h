/* The scans for one instruction set; lists_scan.c includes this once for each, and has defined
 * for it: NAME, TARGET; vector_t, the classes of a chunk, which LOAD makes, with what SETUP has made of the form,
 * KEEP stores and AGAIN loads, MASK compares and COUNT counts; lanes_t, a number a class, which LANES loads, SPILL stores
 * and STEP counts down, telling which are below 0; SELECT, the place of a set bit. */

#ifndef COUNT
#define COUNT NAME(count)
TARGET INLINE void NAME(count)(vector_t v, int classes, uint8_t *row) {
#pragma GCC unroll 16
    for (int c = 0; c < classes; c++) row[c] = (uint8_t)POPCOUNT(MASK(v, c));
}
#endif

TARGET INLINE void NAME(chunk)(vector_t v, int classes, uint8_t *class, uint8_t *row) {
    KEEP(class, v);
    COUNT(v, classes, row);
    for (int c = classes; c < ROW; c += 4) memset(row + c, 0, 4);
}

TARGET INLINE void NAME(all)(const uint8_t *x, int64_t n, const form_t *f, uint8_t *class, uint8_t *rows, int word,
                             int classes) {
    const setup_t s = SETUP(f, word);
    for (; n >= CHUNK; n -= CHUNK, x += CHUNK * word, class += CHUNK, rows += ROW)
        NAME(chunk)(LOAD(x, &s, word), classes, class, rows);
    if (n) {
        uint8_t rest[4 * CHUNK] = {0};
        memcpy(rest, x, (size_t)(n * word));
        NAME(chunk)(LOAD(rest, &s, word), classes, class, rows);
        memset(class + n, 255, (size_t)(CHUNK - n));
        memset(rows, 0, ROW);
        for (int i = 0; i < n; i++) rows[class[i]]++;
    }
}

/* The number of classes, rounded up, is known to the compiler: it matters. */
#define BY_CLASSES(word)                                                                                               \
    TARGET static __attribute__((noinline)) void NAME(classify_##word)(const uint8_t *x, int64_t n, const form_t *f,   \
                                                                       uint8_t *class, uint8_t *rows) {                \
        switch ((f->classes + 3) / 4) {                                                                                \
        case 1: NAME(all)(x, n, f, class, rows, word, 4); return;                                                      \
        case 2: NAME(all)(x, n, f, class, rows, word, 8); return;                                                      \
        case 3: NAME(all)(x, n, f, class, rows, word, 12); return;                                                     \
        default: NAME(all)(x, n, f, class, rows, word, 16);                                                            \
        }                                                                                                              \
    }
BY_CLASSES(1)
BY_CLASSES(2)
BY_CLASSES(4)
#undef BY_CLASSES

static void NAME(classify)(const uint8_t *x, int64_t n, const form_t *f, uint8_t *class, uint8_t *rows) {
    switch (f->word) {
    case 1: NAME(classify_1)(x, n, f, class, rows); return;
    case 2: NAME(classify_2)(x, n, f, class, rows); return;
    default: NAME(classify_4)(x, n, f, class, rows);
    }
}

/* Chunks in which no list has its next rank are passed by a few instructions for all classes together. */
TARGET static void NAME(select)(const uint8_t *class, const uint8_t *rows, int64_t chunks, uint32_t first,
                                select_t *given) {
    select_t s = *given;
    lanes_t left = LANES(s.left);
    for (int64_t at = 0; at < chunks && s.active; at++, rows += ROW) {
        uint32_t hit = STEP(&left, rows) & s.active;
        if (!hit) continue;
        SPILL(s.left, left);
        for (const vector_t v = AGAIN(class + at * CHUNK); hit; hit &= hit - 1) {
            const int c = __builtin_ctz(hit);
            const uint64_t mask = MASK(v, c);
            const int64_t here = rows[c];
            int64_t before = s.left[c] + here; /* elements of the class in this chunk that come before */
            uint32_t *next = s.next[c], *const end = s.end[c];
            do {
                const int64_t rank = *next;
                *next++ = first + (uint32_t)(at * CHUNK + SELECT(mask, (int)before));
                before = next < end ? before + *next - rank : (int64_t)INT32_MAX + here;
            } while (before < here);
            if (next == end) s.active &= ~(1u << c);
            s.next[c] = next;
            s.left[c] = (int32_t)(before - here);
        }
        left = LANES(s.left);
    }
    SPILL(s.left, left);
    *given = s;
}

TARGET static void NAME(rank)(const uint8_t *class, const uint8_t *rows, int64_t chunks, uint32_t first,
                              rank_t *given) {
    rank_t r = *given;
    for (int64_t at = 0; at < chunks; at++) {
        const uint64_t end = (uint64_t)first + (uint64_t)(at + 1) * CHUNK;
        if (r.next < r.changes && r.local[r.next] < end) {
            const vector_t v = AGAIN(class + at * CHUNK);
            do {
                const int i = (int)(r.local[r.next] & (CHUNK - 1)), c = class[at * CHUNK + i];
                r.class[r.next] = (uint8_t)c;
                r.rank[r.next++] = r.seen[c] + (uint32_t)POPCOUNT(MASK(v, c) & ((1ull << i) - 1));
            } while (r.next < r.changes && r.local[r.next] < end);
        }
        for (int c = 0; c < ROW; c++) r.seen[c] += rows[at * ROW + c];
    }
    *given = r;
}

static const scan_t NAME(scan) = {NAME(classify), NAME(select), NAME(rank)};

#undef NAME
#undef TARGET
#undef vector_t
#undef setup_t
#undef SETUP
#undef LOAD
#undef KEEP
#undef AGAIN
#undef MASK
#undef lanes_t
#undef LANES
#undef SPILL
#undef STEP
#undef SELECT
#undef COUNT
#undef POPCOUNT
