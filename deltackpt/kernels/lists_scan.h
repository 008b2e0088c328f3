/* The scans for one instruction set; lists_scan.c includes this once for each, and has defined for it: NAME, TARGET;
 * vector_t, the classes of a chunk, which LOAD makes with what SETUP has made of the form, KEEP stores and AGAIN loads,
 * MASK compares and COUNT counts; SELECT, the place of a set bit; POPCOUNT. */

#ifndef COUNT
#define COUNT NAME(count)
TARGET INLINE void NAME(count)(vector_t v, int classes, uint8_t *row) {
#pragma GCC unroll 16
    for (int c = 0; c < classes; c++) ((volatile uint8_t *)row)[c] = (uint8_t)POPCOUNT(MASK(v, c));
}
#endif

TARGET INLINE void NAME(chunk)(vector_t v, int classes, uint8_t *class, uint8_t *row) {
    KEEP(class, v);
    COUNT(v, classes, row);
    for (int c = classes; c < ROW; c += 4) memset(row + c, 0, 4);
}

TARGET INLINE void NAME(all)(block_t b, const form_t *f, uint8_t *class, uint8_t *rows, int word, int classes) {
    const setup_t s = SETUP(f, word);
    const uint8_t *x = b.x;
    int64_t n = b.elements, left = b.left;
    for (; n >= CHUNK; n -= CHUNK, class += CHUNK, rows += ROW) {
        for (int i = 0; i < word; i++) __builtin_prefetch(x + b.ahead + CHUNK * i); /* lines, as long as a chunk */
        NAME(chunk)(LOAD(x, &s, word), classes, class, rows);
        x += CHUNK * word;
        left -= CHUNK;
        if (!left) {
            x += b.skip;
            left = b.wide;
        }
    }
    if (n) {
        uint8_t rest[4 * CHUNK] = {0};
        memcpy(rest, x, (size_t)(n * word));
        NAME(chunk)(LOAD(rest, &s, word), classes, class, rows);
        memset(class + n, 255, (size_t)(CHUNK - n));
        memset(rows, 0, ROW);
        for (int i = 0; i < n; i++) rows[class[i]]++;
    }
}

/* Elements of each class before each chunk of a block, or, of chunks that it has not, far too many; and in all of it. */
TARGET INLINE void NAME(sum)(const uint8_t *rows, int64_t chunks, uint16_t before[BLOCK_CHUNKS][ROW], uint16_t *all) {
    row_sum_t sum = {0};
    for (int64_t i = 0; i < chunks; i++) {
        memcpy(before[i], &sum, sizeof sum);
        sum += row_of(rows + i * ROW);
    }
    memcpy(all, &sum, sizeof sum);
    memset(before + chunks, 255, (size_t)(BLOCK_CHUNKS - chunks) * sizeof *before);
}

/* The number of classes, rounded up, is known to the compiler: it matters. */
#define BY_CLASSES(word)                                                                                               \
    TARGET static __attribute__((noinline)) void NAME(classify_##word)(block_t b, const form_t *f, uint8_t *class,     \
                                                                       uint8_t *rows) {                                \
        switch ((f->classes + 3) / 4) {                                                                                \
        case 1: NAME(all)(b, f, class, rows, word, 4); return;                                                         \
        case 2: NAME(all)(b, f, class, rows, word, 8); return;                                                         \
        case 3: NAME(all)(b, f, class, rows, word, 12); return;                                                        \
        default: NAME(all)(b, f, class, rows, word, 16);                                                               \
        }                                                                                                              \
    }
BY_CLASSES(1)
BY_CLASSES(2)
BY_CLASSES(4)
#undef BY_CLASSES

TARGET static void NAME(classify)(block_t b, const form_t *f, uint8_t *class, uint8_t *rows, uint32_t *counts) {
    row_sum_t sum = {0};
    if (f->word == 1) NAME(classify_1)(b, f, class, rows);
    if (f->word == 2) NAME(classify_2)(b, f, class, rows);
    if (f->word == 4) NAME(classify_4)(b, f, class, rows);
    for (int64_t n = b.elements; n > 0; n -= CHUNK, rows += ROW) sum += row_of(rows);
    for (int c = 0; c < ROW; c++) counts[c] += sum[c];
}

/* No branch depends on where a change is, but for which block: the chunk of a rank is found by halving. */
TARGET static void NAME(select)(const uint8_t *class, const uint8_t *rows, int64_t chunks, uint32_t first,
                                select_t *s) {
    uint16_t before[BLOCK_CHUNKS][ROW], all[ROW];
    NAME(sum)(rows, chunks, before, all);
    for (int c = 0; c < s->classes; c++) {
        const uint32_t seen = s->seen[c], end = seen + all[c];
        uint32_t *next = s->next[c];
        for (; next < s->end[c] && *next < end; next++) {
            const uint32_t rank = *next - seen; /* in the block */
            const uint16_t *at = &before[0][c];
#pragma GCC unroll 6
            for (int step = BLOCK_CHUNKS / 2; step; step /= 2) at = at[step * ROW] <= rank ? at + step * ROW : at;
            const uint32_t chunk = (uint32_t)(at - before[0]) / ROW;
            const uint64_t mask = MASK(AGAIN(class + chunk * CHUNK), c);
            *next = first + chunk * CHUNK + (uint32_t)SELECT(mask, (int)(rank - *at));
        }
        s->next[c] = next;
        s->seen[c] = end;
    }
}

TARGET static void NAME(rank)(const uint8_t *class, const uint8_t *rows, int64_t chunks, uint32_t first, rank_t *r) {
    uint16_t before[BLOCK_CHUNKS][ROW], all[ROW];
    const uint64_t end = (uint64_t)first + (uint64_t)chunks * CHUNK;
    int64_t i = r->next;
    if (i < r->changes && r->local[i] < end) {
        NAME(sum)(rows, chunks, before, all);
        for (; i < r->changes && r->local[i] < end; i++) {
            const uint32_t at = r->local[i] - first, chunk = at / CHUNK, c = class[at];
            const uint64_t mask = MASK(AGAIN(class + chunk * CHUNK), c) & ((1ull << at % CHUNK) - 1);
            r->class[i] = (uint8_t)c;
            r->rank[i] = r->seen[c] + before[chunk][c] + (uint32_t)POPCOUNT(mask);
        }
        r->next = i;
    }
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
#undef SELECT
#undef COUNT
#undef POPCOUNT
