/* Looking at all old elements of a tile: which class each is of. Several instruction sets, one result.
 *
 * 64 elements at a time: the exponents narrowed to bytes, from these the classes, and for each class a mask of 64 bits
 * and how many are set. Then ranks are found, or places of ranks, from the counts; only chunks that have one are looked at
 * again. */
#include "lists.h"

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define X86 1
#include <immintrin.h>
#endif

block_t block_of(const form_t *f, const tile_at_t *t, const uint8_t *elements, int64_t at, int64_t n, uint8_t *room) {
    const int word = f->word;
    if (t->contiguous) return (block_t){elements + (t->origin + at) * word, n, INT64_MAX, 0, 0, 0};
    uint8_t *to = room;
    const int64_t rows = t->elements / t->wide, ahead = parts(n, t->wide);
    int64_t row = at / t->wide, column = at % t->wide;
    if (t->wide % CHUNK == 0) { /* rows are apart, and no processor guesses where */
        const uint8_t *x = elements + (t->origin + row * f->width + column) * word;
        const int64_t next = row + 2 * ahead <= rows ? ahead * f->width * word : 0;
        return (block_t){x, n, t->wide - column, t->wide, t->skip * word, next};
    }
    for (int64_t left = n; left; row++, column = 0) {
        const int64_t here = least(left, t->wide - column);
        const uint8_t *from = elements + (t->origin + row * f->width + column) * word;
        memcpy(to, from, (size_t)(here * word));
        if (row + ahead < rows)
            for (int64_t i = 0; i < here * word; i += 64) __builtin_prefetch(from + ahead * f->width * word + i);
        to += here * word;
        left -= here;
    }
    return (block_t){room, n, INT64_MAX, 0, 0, 0};
}

#undef LOAD /* of common.h, done with */

/* The ``n``th set bit of a mask, counted from 0. Few are set before it: a class has a part of the chunk. */
INLINE int nth_bit(uint64_t mask, int n) {
    while (n--) mask &= mask - 1;
    return __builtin_ctzll(mask);
}

/* Vectors of 16 bytes, as compilers have them for every processor. */
typedef uint8_t bytes_t __attribute__((vector_size(16)));
typedef struct {
    bytes_t part[4];
} plain_t;
typedef struct {
    int start;
    uint32_t field;
    uint8_t top, last;
} plain_setup_t;

INLINE plain_setup_t plain_setup(const form_t *f) {
    return (plain_setup_t){f->exponent_start, (1u << f->exponent_bits) - 1, (uint8_t)f->top, (uint8_t)(f->classes - 1)};
}

INLINE plain_t plain_load(const uint8_t *x, const plain_setup_t *s, int word) {
    uint8_t class[CHUNK];
    for (int i = 0; i < CHUNK; i++) {
        const uint8_t e = (uint8_t)((uint32_t)load(x, i, word) >> s->start & s->field);
        const uint8_t depth = e < s->top ? (uint8_t)(s->top - e) : 0;
        class[i] = depth < s->last ? depth : s->last;
    }
    plain_t v;
    memcpy(&v, class, sizeof v);
    return v;
}

INLINE plain_t plain_again(const uint8_t *class) {
    plain_t v;
    memcpy(&v, class, sizeof v);
    return v;
}

INLINE uint64_t plain_mask(plain_t v, int c) {
    uint64_t mask = 0, lane[8];
    for (int i = 0; i < 4; i++) {
        const bytes_t equal = (bytes_t)(v.part[i] == (uint8_t)c);
        memcpy(lane + 2 * i, &equal, sizeof equal);
    }
    for (int i = 0; i < 8; i++) mask |= (uint64_t)gather(lane[i], 0) << 8 * i;
    return mask;
}

/* A mask is dear here, a sum is not. */
INLINE void plain_count(plain_t v, int classes, uint8_t *row) {
    for (int c = 0; c < classes; c++) {
        bytes_t sum = {0};
        for (int i = 0; i < 4; i++) sum -= (bytes_t)(v.part[i] == (uint8_t)c);
        uint64_t lane[2];
        memcpy(lane, &sum, sizeof lane);
        row[c] = (uint8_t)((lane[0] + lane[1]) * 0x0101010101010101u >> 56);
    }
}

#define NAME(x) plain_scan_##x
#define TARGET
#define vector_t plain_t
#define setup_t plain_setup_t
#define SETUP(f, word) plain_setup(f)
#define LOAD plain_load
#define KEEP(class, v) memcpy(class, &v, sizeof v)
#define AGAIN plain_again
#define MASK plain_mask
#define SELECT nth_bit
#define POPCOUNT __builtin_popcountll
#define COUNT plain_count
#include "lists_scan.h"

#ifdef X86
#define AVX2 __attribute__((target("avx2,popcnt,bmi,lzcnt")))
typedef struct {
    __m256i half[2];
} avx2_t;
typedef struct {
    __m256i top, last, field;
    __m128i start;
} avx2_setup_t;

AVX2 INLINE avx2_setup_t avx2_setup(const form_t *f, int word) {
    const int field = (1 << f->exponent_bits) - 1;
    const avx2_setup_t s = {
        _mm256_set1_epi8((char)f->top), _mm256_set1_epi8((char)(f->classes - 1)),
        word == 1   ? _mm256_set1_epi8((char)field)
        : word == 2 ? _mm256_set1_epi16((short)field)
                    : _mm256_set1_epi32(field),
        _mm_cvtsi32_si128(f->exponent_start)};
    return s;
}

AVX2 INLINE __m256i avx2_exponents(const uint8_t *x, const avx2_setup_t *s, int word) { /* of 32 elements */
    __m256i a[4];
    for (int i = 0; i < word; i++) {
        a[i] = _mm256_loadu_si256((const __m256i *)(x + 32 * i));
        a[i] = word == 4 ? _mm256_srl_epi32(a[i], s->start) : _mm256_srl_epi16(a[i], s->start);
        a[i] = _mm256_and_si256(a[i], s->field);
    }
    if (word == 1) return a[0];
    if (word == 2) return _mm256_permute4x64_epi64(_mm256_packus_epi16(a[0], a[1]), 0xD8);
    const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(a[0], a[1]), _mm256_packus_epi32(a[2], a[3]));
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

AVX2 INLINE avx2_t avx2_load(const uint8_t *x, const avx2_setup_t *s, int word) {
    avx2_t v;
    for (int i = 0; i < 2; i++)
        v.half[i] = _mm256_min_epu8(_mm256_subs_epu8(s->top, avx2_exponents(x + 32 * i * word, s, word)), s->last);
    return v;
}

AVX2 INLINE avx2_t avx2_again(const uint8_t *class) {
    const avx2_t v = {{_mm256_loadu_si256((const __m256i *)class), _mm256_loadu_si256((const __m256i *)(class + 32))}};
    return v;
}

AVX2 INLINE void avx2_keep(uint8_t *class, avx2_t v) {
    for (int i = 0; i < 2; i++) _mm256_storeu_si256((__m256i *)(class + 32 * i), v.half[i]);
}

AVX2 INLINE uint64_t avx2_mask(avx2_t v, int c) {
    const __m256i k = _mm256_set1_epi8((char)c);
    const uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(v.half[0], k));
    return low | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(v.half[1], k)) << 32;
}

#define NAME(x) avx2_scan_##x
#define TARGET AVX2
#define vector_t avx2_t
#define setup_t avx2_setup_t
#define SETUP avx2_setup
#define LOAD avx2_load
#define KEEP avx2_keep
#define AGAIN avx2_again
#define MASK avx2_mask
#define SELECT nth_bit /* some of these processors have a pdep of 100 cycles and more */
#define POPCOUNT _mm_popcnt_u64
#include "lists_scan.h"

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx2,popcnt,bmi,bmi2,lzcnt")))
typedef struct {
    __m512i top, last, field;
    __m128i start;
} avx512_setup_t;

AVX512 INLINE avx512_setup_t avx512_setup(const form_t *f, int word) {
    const int field = (1 << f->exponent_bits) - 1;
    const avx512_setup_t s = {
        _mm512_set1_epi8((char)f->top), _mm512_set1_epi8((char)(f->classes - 1)),
        word == 1   ? _mm512_set1_epi8((char)field)
        : word == 2 ? _mm512_set1_epi16((short)field)
                    : _mm512_set1_epi32(field),
        _mm_cvtsi32_si128(f->exponent_start)};
    return s;
}

AVX512 INLINE __m512i avx512_load(const uint8_t *x, const avx512_setup_t *s, int word) {
    __m512i a[4], v;
    for (int i = 0; i < word; i++) {
        a[i] = _mm512_loadu_si512(x + 64 * i);
        a[i] = word == 4 ? _mm512_srl_epi32(a[i], s->start) : _mm512_srl_epi16(a[i], s->start);
        a[i] = _mm512_and_si512(a[i], s->field);
    }
    if (word == 1) {
        v = a[0];
    } else if (word == 2) {
        v = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a[0])), _mm512_cvtepi16_epi8(a[1]), 1);
    } else {
        v = _mm512_castsi128_si512(_mm512_cvtepi32_epi8(a[0]));
        v = _mm512_inserti32x4(v, _mm512_cvtepi32_epi8(a[1]), 1);
        v = _mm512_inserti32x4(v, _mm512_cvtepi32_epi8(a[2]), 2);
        v = _mm512_inserti32x4(v, _mm512_cvtepi32_epi8(a[3]), 3);
    }
    return _mm512_min_epu8(_mm512_subs_epu8(s->top, v), s->last);
}

#define NAME(x) avx512_scan_##x
#define TARGET AVX512
#define vector_t __m512i
#define setup_t avx512_setup_t
#define SETUP avx512_setup
#define LOAD avx512_load
#define KEEP(class, v) _mm512_storeu_si512(class, v)
#define AGAIN(class) _mm512_loadu_si512(class)
#define MASK(v, c) _mm512_cmpeq_epi8_mask(v, _mm512_set1_epi8((char)(c)))
#define SELECT(mask, n) ((int)_tzcnt_u64(_pdep_u64(1ull << (n), mask)))
#define POPCOUNT _mm_popcnt_u64
#include "lists_scan.h"
#endif

static int level = -1; /* 0: plain, 1: AVX2, 2: AVX-512 */

/* The best that this processor has, up to ``most``; tests ask for less. -> which */
EXPORT int dk_scan_level(int most) {
    int best = 0;
#ifdef X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") && __builtin_cpu_supports("bmi")) best = 1;
    if (best && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2"))
        best = 2;
#endif
    return level = best < most ? best : most;
}

const scan_t *scan_of_this_processor(void) {
#ifdef X86
    if (level == 2) return &avx512_scan_scan;
    if (level == 1) return &avx2_scan_scan;
#endif
    return &plain_scan_scan;
}
