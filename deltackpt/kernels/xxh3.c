/* The xxh3-128 of many tensors in one call (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md): seed 0, the
 * default secret, and inputs of more than 240 bytes. Shorter ones have other rules, and are left to the caller. */
#include "common.h"
#include "workers.h"
#include "xxh3.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define WIDE 1
#endif

#define SHORT XXH3_SHORT
#define STRIPE 64
#define STEP 8   /* bytes of the secret from one stripe to the next */
#define STRIPES 16 /* of a block: as many as the secret has places for */
#define BLOCK XXH3_BLOCK

#define PRIME32_1 0x9E3779B1u
#define PRIME32_2 0x85EBCA77u
#define PRIME32_3 0xC2B2AE3Du
#define PRIME64_1 0x9E3779B185EBCA87u
#define PRIME64_2 0xC2B2AE3D27D4EB4Fu
#define PRIME64_3 0x165667B19E3779F9u
#define PRIME64_4 0x85EBCA77C2B2AE63u
#define PRIME64_5 0x27D4EB2F165667C5u

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

INLINE uint64_t word(const uint8_t *at) { return load(at, 0, 8); }

static const uint8_t *const LAST = SECRET + sizeof SECRET - STRIPE;

/* Some stripes of an input: ``blocks`` with a scrambling after each, and, unless ``rest`` is 0, the bytes after the last
 * block, of which there are 1 to BLOCK, and the last stripe of the input once more. */
#define ABSORB(stripes, scramble)                                                                                      \
    for (int64_t i = 0; i < blocks; i++, data += BLOCK) {                                                              \
        stripes(data, SECRET, STRIPES);                                                                                \
        scramble;                                                                                                      \
    }                                                                                                                  \
    if (rest) {                                                                                                        \
        stripes(data, SECRET, (rest - 1) / STRIPE);                                                                    \
        stripes(data + rest - STRIPE, LAST - 7, 1);                                                                    \
    }

typedef void absorb_t(uint64_t *acc, const uint8_t *data, int64_t blocks, int64_t rest);

INLINE void add_stripes(uint64_t *acc, const uint8_t *data, const uint8_t *secret, int64_t stripes) {
    for (; stripes > 0; stripes--, data += STRIPE, secret += STEP)
        for (int i = 0; i < 8; i++) {
            const uint64_t value = word(data + 8 * i), keyed = value ^ word(secret + 8 * i);
            acc[i ^ 1] += value;
            acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        }
}

INLINE void scramble_words(uint64_t *acc) {
    for (int i = 0; i < 8; i++) acc[i] = (acc[i] ^ (acc[i] >> 47) ^ word(LAST + 8 * i)) * PRIME32_1;
}

static void absorb_plain(uint64_t *acc, const uint8_t *data, int64_t blocks, int64_t rest) {
#define PLAIN(data, secret, stripes) add_stripes(acc, data, secret, stripes)
    ABSORB(PLAIN, scramble_words(acc))
}

#ifdef WIDE
#define AVX2 __attribute__((target("avx2")))
#define AVX512 __attribute__((target("avx512f")))

AVX2 INLINE __m256i half_added(__m256i sum, const uint8_t *data, const uint8_t *secret) {
    const __m256i value = _mm256_loadu_si256((const __m256i *)data);
    const __m256i keyed = _mm256_xor_si256(value, _mm256_loadu_si256((const __m256i *)secret));
    const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    return _mm256_add_epi64(_mm256_add_epi64(product, _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2))), sum);
}

AVX2 INLINE __m256i half_scrambled(__m256i sum, const uint8_t *secret) {
    const __m256i prime = _mm256_set1_epi64x(PRIME32_1), keys = _mm256_loadu_si256((const __m256i *)secret);
    sum = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), keys);
    const __m256i high = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime), 32);
    return _mm256_add_epi64(_mm256_mul_epu32(sum, prime), high);
}

AVX2 static void absorb_avx2(uint64_t *acc, const uint8_t *data, int64_t blocks, int64_t rest) {
    __m256i a = _mm256_loadu_si256((const __m256i *)acc), b = _mm256_loadu_si256((const __m256i *)(acc + 4));
#define HALVES(from, keys, stripes)                                                                                    \
    for (int64_t s = 0; s < (stripes); s++) {                                                                          \
        a = half_added(a, (from) + s * STRIPE, (keys) + s * STEP);                                                     \
        b = half_added(b, (from) + s * STRIPE + 32, (keys) + s * STEP + 32);                                           \
    }
    ABSORB(HALVES, (a = half_scrambled(a, LAST), b = half_scrambled(b, LAST + 32)))
    _mm256_storeu_si256((__m256i *)acc, a);
    _mm256_storeu_si256((__m256i *)(acc + 4), b);
}

AVX512 INLINE __m512i whole_added(__m512i sum, const uint8_t *data, const uint8_t *secret) {
    const __m512i value = _mm512_loadu_si512(data), keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret));
    const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
    return _mm512_add_epi64(_mm512_add_epi64(product, _mm512_shuffle_epi32(value, _MM_PERM_BADC)), sum);
}

AVX512 INLINE __m512i whole_scrambled(__m512i sum) {
    const __m512i prime = _mm512_set1_epi64(PRIME32_1);
    sum = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), _mm512_loadu_si512(LAST));
    const __m512i high = _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(sum, 32), prime), 32);
    return _mm512_add_epi64(_mm512_mul_epu32(sum, prime), high);
}

AVX512 static void absorb_avx512(uint64_t *acc, const uint8_t *data, int64_t blocks, int64_t rest) {
    __m512i sum = _mm512_loadu_si512(acc);
#define WHOLE(from, keys, stripes)                                                                                     \
    for (int64_t s = 0; s < (stripes); s++) sum = whole_added(sum, (from) + s * STRIPE, (keys) + s * STEP);
    ABSORB(WHOLE, sum = whole_scrambled(sum))
    _mm512_storeu_si512(acc, sum);
}
#endif

static int level; /* 0: plain, 1: AVX2, 2: AVX-512 */

/* The best that this processor has, up to ``most``; tests ask for less. -> which */
EXPORT int dk_xxh3_level(int most) {
    int best = 0;
#ifdef WIDE
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) best = 1;
    if (best && __builtin_cpu_supports("avx512f")) best = 2;
#endif
    return level = best < most ? best : most;
}

static absorb_t *chosen(void) {
#ifdef WIDE
    if (level == 2) return absorb_avx512;
    if (level == 1) return absorb_avx2;
#endif
    return absorb_plain;
}

INLINE uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t merged(const uint64_t *acc, const uint8_t *secret, uint64_t sum) {
    for (int i = 0; i < 8; i += 2) sum += folded(acc[i] ^ word(secret + 8 * i), acc[i + 1] ^ word(secret + 8 * i + 8));
    sum ^= sum >> 37;
    sum *= 0x165667919E3779F9u;
    return sum ^ (sum >> 32);
}

static const uint64_t BEGIN[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

/* Most significant byte first. */
static void finish(const uint64_t *acc, int64_t bytes, uint8_t *out) {
    const uint64_t length = (uint64_t)bytes;
    const uint64_t halves[2] = {merged(acc, LAST - 11, ~(length * PRIME64_2)),
                                merged(acc, SECRET + 11, length * PRIME64_1)};
    for (int i = 0; i < 16; i++) out[i] = (uint8_t)(halves[i / 8] >> (56 - 8 * (i % 8)));
}

void xxh3_begin(uint64_t *acc) { memcpy(acc, BEGIN, sizeof BEGIN); }
void xxh3_absorb(uint64_t *acc, const uint8_t *data, int64_t blocks, int64_t rest) { chosen()(acc, data, blocks, rest); }
void xxh3_finish(const uint64_t *acc, int64_t bytes, uint8_t *out) { finish(acc, bytes, out); }

uint64_t xxh3_64_of(const uint8_t *data, int64_t bytes) {
    uint64_t acc[8];
    const int64_t blocks = (bytes - 1) / BLOCK;
    xxh3_begin(acc);
    xxh3_absorb(acc, data, blocks, bytes - blocks * BLOCK);
    return merged(acc, SECRET + 11, (uint64_t)bytes * PRIME64_1);
}

/* The digest of more than SHORT bytes. */
static void hash_long(const uint8_t *data, int64_t bytes, uint8_t *out, absorb_t *absorb) {
    uint64_t acc[8];
    const int64_t blocks = (bytes - 1) / BLOCK;
    memcpy(acc, BEGIN, sizeof acc);
    absorb(acc, data, blocks, bytes - blocks * BLOCK);
    finish(acc, bytes, out);
}

int64_t dk_compare(const void *old, const void *new, int64_t n, int width, int64_t first, int64_t *positions,
                   void *before, void *after);

#define PASS (256 * BLOCK) /* bytes of both states that are in the cache while they are compared and hashed */

/* A tensor in two states, on the way from its first byte to its last. */
typedef struct {
    const uint8_t *old, *new;
    int64_t bytes, width, at; /* more than SHORT bytes; ``at``: those that are done, at first 0 */
    int64_t *positions;       /* NULL: only hashed */
    void *before, *after;     /* these three have room for all words of a call */
    int64_t found;            /* by this call */
    uint64_t old_acc[8], new_acc[8];
    uint8_t old_xxh3[16], new_xxh3[16]; /* once all is done */
} pass_t;

/* Compare and hash up to byte ``until``, a multiple of BLOCK or the end. */
EXPORT void dk_compare_hashed(pass_t *p, int64_t until) {
    absorb_t *const absorb = chosen();
    if (!p->at) {
        memcpy(p->old_acc, BEGIN, sizeof BEGIN);
        memcpy(p->new_acc, BEGIN, sizeof BEGIN);
    }
    p->found = 0;
    while (p->at < until) {
        const int64_t at = p->at, size = until - at < PASS ? until - at : PASS, last = at + size == p->bytes;
        const int64_t blocks = (size - last) / BLOCK, rest = last ? size - blocks * BLOCK : 0;
        const int width = (int)p->width;
        if (p->positions)
            p->found += dk_compare(p->old + at, p->new + at, size / width, width, at / width, p->positions + p->found,
                                   (char *)p->before + p->found * width, (char *)p->after + p->found * width);
        absorb(p->old_acc, p->old + at, blocks, rest);
        absorb(p->new_acc, p->new + at, blocks, rest);
        p->at += size;
    }
    if (p->at < p->bytes) return;
    finish(p->old_acc, p->bytes, p->old_xxh3);
    finish(p->new_acc, p->bytes, p->new_xxh3);
}

typedef struct {
    const int64_t *runs; /* address and bytes of each */
    uint8_t *out;
    absorb_t *absorb;
} hashing_t;

static void hash_one(void *shared, int64_t unit, scratch_t *scratch) {
    const hashing_t *h = shared;
    const int64_t bytes = h->runs[2 * unit + 1];
    (void)scratch;
    if (bytes > SHORT) hash_long((const uint8_t *)(uintptr_t)h->runs[2 * unit], bytes, h->out + 16 * unit, h->absorb);
}

/* 16 bytes to ``out`` for each run of more than 240 bytes; those of others are not touched. */
EXPORT void dk_xxh3_many(const int64_t *runs, int64_t count, int threads, uint8_t *out) {
    hashing_t shared = {runs, out, chosen()};
    work_through(hash_one, &shared, count, threads);
}
