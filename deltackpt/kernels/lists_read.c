/* `packed`, reading (FORMAT section "packed"). The bytes are not trusted: every read is bounded, every defect has a code.
 *
 * A tile is read in these steps: count its classes, which gives the parameters; all numbers in unary; gaps to ranks;
 * ranks to places; widths of all values from the old elements; values. Checks come in FORMAT's order. */
#include <stdlib.h>

#include "lists_read.h"

#define AHEAD 24 /* old elements that are on their way from memory at a time */
#define KEPT_CHUNKS 16384 /* 2^20 elements: of a tile with more, the second look at a block classifies it again */
enum { CODES, RANKS, OLD, WIDTHS, SCANNED, COPIED };

/* A tile while it is read. */
typedef struct {
    const read_job_t *job;
    const form_t *form;
    const scan_t *scan;
    uint8_t *elements; /* of the tensor, or of the tile alone */
    tile_at_t at;
    const int64_t *counts;
    const uint8_t *bytes, *limit; /* ``limit``: the end of the payload, from which on nothing is read */
    int64_t bits, changes;
    int64_t begins[MAX_CLASSES + 1]; /* of each class: its first change */
    int64_t candidates[ALL_LISTS];
    uint32_t *codes, *ranks, *old;
    uint8_t *widths, *is_long;
    uint8_t *class, *rows, *room; /* what a scan made of the tile, or of one block; a copy of a block */
    int kept;                     /* of the tile */
    seen_t *seen;                 /* NULL: no patch of the tile comes after this one */
    scratch_t *scratch;
} tile_t;

INLINE int64_t chunks_of(int64_t elements) { return (elements + CHUNK - 1) / CHUNK; }

/* Block ``at`` (in elements) of the tile, looked at. */
static void look(tile_t *t, int64_t at, int64_t n, uint8_t *class, uint8_t *rows, uint32_t *counts) {
    t->scan->classify(block_of(t->form, &t->at, t->elements, at, n, t->room), t->form, class, rows, counts);
}

/* How many elements each class has. */
static int count_classes(tile_t *t) {
    if (t->form->classes == 1) {
        t->candidates[0] = t->at.elements;
        return OK;
    }
    const int64_t chunks = chunks_of(t->at.elements);
    t->kept = chunks <= KEPT_CHUNKS;
    const int64_t room = t->kept ? chunks : BLOCK_CHUNKS;
    t->class = t->seen && t->seen->room && t->kept ? t->seen->room
                                                    : scratch_room(t->scratch, SCANNED, (size_t)(room * (CHUNK + ROW)));
    t->room = scratch_room(t->scratch, COPIED, BLOCK_ELEMENTS * 4);
    if (!t->class || !t->room) return NO_MEMORY;
    t->rows = t->class + room * CHUNK;
    uint32_t counts[ROW] = {0};
    seen_t *const s = t->seen;
    if (s && s->chunks == chunks && s->classes == t->form->classes && s->top == t->form->top) {
        for (int c = 0; c < t->form->classes; c++) t->candidates[c] = s->counts[c];
        return OK;
    }
    for (int64_t at = 0; at < t->at.elements; at += BLOCK_ELEMENTS) {
        const int64_t n = least(BLOCK_ELEMENTS, t->at.elements - at), chunk = t->kept ? at / CHUNK : 0;
        look(t, at, n, t->class + chunk * CHUNK, t->rows + chunk * ROW, counts);
    }
    for (int c = 0; c < t->form->classes; c++) t->candidates[c] = counts[c];
    if (s) {
        s->chunks = t->kept ? chunks : 0;
        s->classes = t->form->classes;
        s->top = t->form->top;
        memcpy(s->counts, counts, sizeof counts);
    }
    return OK;
}

/* An element has another exponent now: what was seen of the tile is kept true. */
static __attribute__((noinline)) void reclass(const tile_t *t, uint32_t local, int before, int after) {
    const int from = class_of(before, t->form), to = class_of(after, t->form);
    uint8_t *const row = t->rows + local / CHUNK * ROW;
    t->class[local] = (uint8_t)to;
    row[from]--;
    row[to]++;
    t->seen->counts[from]--;
    t->seen->counts[to]++;
}

/* ``n`` numbers in unary from bit ``at`` on; one above 2^32 - 1 is that. -> the bit after the last, or -1. */
static int64_t read_unary(const tile_t *t, int64_t at, uint32_t *numbers, int64_t n) {
    if (!n) return at;
    const uint8_t *const end = t->bytes + t->bits / 8;
    int64_t begins = at & ~(int64_t)63, last = at;
    uint64_t word = word_at(t->bytes + begins / 8, end) & ~0ull << (at & 63);
    for (int64_t i = 0;;) {
        const int64_t here = __builtin_popcountll(word), stop = n - i < here ? n : i + here;
        for (; i < stop; i++, word &= word - 1) {
            const int64_t one = begins + __builtin_ctzll(word), zeros = one - last;
            numbers[i] = zeros < UINT32_MAX ? (uint32_t)zeros : UINT32_MAX;
            last = one + 1;
        }
        if (i == n) return last;
        begins += 64;
        if (begins >= t->bits) return -1;
        word = word_at(t->bytes + begins / 8, end);
    }
}

/* Gaps of one list, whose quotients are in ``code``, to rising ranks. -> is each a candidate's? */
static int read_ranks(const tile_t *t, const uint32_t *code, uint32_t *ranks, int64_t n, int64_t candidates, int k,
                      int64_t bit) {
    const uint64_t most = (uint64_t)candidates >> k, mask = (1ull << k) - 1;
    uint64_t next = 0; /* the rank after the last one; what wraps around is refused */
    int outside = 0;
    for (int64_t i = 0; i < n; i++, bit += k) {
        const uint64_t low = k ? word_at(t->bytes + (bit >> 3), t->limit) >> (bit & 7) & mask : 0;
        outside |= code[i] > most;
        next += ((uint64_t)code[i] << k) + low;
        ranks[i] = (uint32_t)next++;
    }
    return !outside && next <= (uint64_t)candidates;
}

/* The ranks that are missing from ``listed`` ones of ``candidates``. */
static void complement(const uint32_t *listed, int64_t n, int64_t candidates, uint32_t *ranks) {
    int64_t rank = 0;
    for (int64_t i = 0; i <= n; i++) {
        const int64_t stop = i < n ? listed[i] : candidates;
        for (; rank < stop; rank++) *ranks++ = (uint32_t)rank;
        rank++;
    }
}

/* Parts 1 and 2: the ranks of all changes, and which are long. ``end``: the bit after part 2. */
static int read_lists(tile_t *t, int64_t *end) {
    const form_t *f = t->form;
    const int lists = f->classes + f->sized, first = f->classes - f->sized;
    int64_t listed[ALL_LISTS], codes = 0, bits = 0, longs = 0;
    int k[ALL_LISTS];
    for (int i = 0; i < lists; i++) {
        if (i >= f->classes) t->candidates[i] = t->counts[first + i - f->classes];
        if (t->counts[i] > t->candidates[i]) return COUNT_OUTSIDE;
        listed[i] = listed_of(t->counts[i], t->candidates[i]);
        k[i] = rice(listed[i], t->candidates[i]);
        codes += listed[i];
        bits += k[i] * listed[i];
        if (i >= f->classes) longs += t->counts[i];
    }
    if (bits + codes > t->bits) return TILE_SHORT;
    t->codes = scratch_room(t->scratch, CODES, (size_t)(codes + longs + 1) * sizeof *t->codes);
    t->ranks = scratch_room(t->scratch, RANKS, (size_t)t->changes * sizeof *t->ranks);
    t->old = scratch_room(t->scratch, OLD, (size_t)t->changes * sizeof *t->old);
    t->widths = scratch_room(t->scratch, WIDTHS, (size_t)t->changes * 2);
    if (!t->codes || !t->ranks || !t->old || !t->widths) return NO_MEMORY;
    t->is_long = t->widths + t->changes;
    *end = read_unary(t, bits, t->codes, codes + longs);
    if (*end < 0) return TILE_SHORT;
    memset(t->is_long, 0, (size_t)t->changes);
    for (int64_t i = 0, bit = 0; i < lists; bit += k[i] * listed[i], i++) {
        const int flipped = 2 * t->counts[i] > t->candidates[i], long_list = i >= f->classes;
        const int64_t begin = t->begins[long_list ? first + i - f->classes : i];
        uint32_t *ranks = flipped || long_list ? t->codes : t->ranks + begin;
        if (!read_ranks(t, t->codes, ranks, listed[i], t->candidates[i], k[i], bit)) return GAP_OUTSIDE;
        if (long_list) {
            if (flipped) memset(t->is_long + begin, 1, (size_t)t->candidates[i]);
            for (int64_t j = 0; j < listed[i]; j++) t->is_long[begin + ranks[j]] = !flipped;
        } else if (flipped) {
            complement(ranks, listed[i], t->candidates[i], t->ranks + begin);
        }
        t->codes += listed[i];
    }
    return OK; /* ``codes`` is at the excess of the first long change */
}

/* Ranks to indices in the tile. */
static void find_places(tile_t *t) {
    if (t->form->classes == 1) return;
    select_t s = {.classes = t->form->classes};
    for (int c = 0; c < s.classes; c++) {
        s.next[c] = t->ranks + t->begins[c];
        s.end[c] = s.next[c] + t->counts[c];
    }
    for (int64_t at = 0; at < t->at.elements; at += BLOCK_ELEMENTS) {
        const int64_t n = least(BLOCK_ELEMENTS, t->at.elements - at), chunk = t->kept ? at / CHUNK : 0;
        uint32_t counts[ROW] = {0};
        if (!t->kept) look(t, at, n, t->class, t->rows, counts);
        for (int64_t i = 0; t->kept && i < BLOCK_ELEMENTS; i += 64) /* of the next block: in no order that can be guessed */
            __builtin_prefetch(t->class + chunk * CHUNK + BLOCK_ELEMENTS + i);
        t->scan->select(t->class + chunk * CHUNK, t->rows + chunk * ROW, chunks_of(n), (uint32_t)at, &s);
    }
}

/* The old element and the width of size of every change. -> a code; ``bits``: of part 3 */
INLINE int measure(const tile_t *t, int64_t *bits, const int word) {
    const form_t *f = t->form;
    const type_t type = type_of(f);
    const int first = f->classes - f->sized;
    const uint32_t *excess = t->codes;
    int64_t sum = t->changes, widest = 0;
    uint8_t raw[EXPONENTS];
    for (int e = 0; e < EXPONENTS; e++) raw[e] = (uint8_t)(class_of(e, f) >= first ? raw_bits(e, f) : 0);
    const int64_t ahead = f->classes == 1 ? AHEAD : t->changes; /* a scan has just brought them all */
    for (int64_t i = 0; i < t->changes; i++) {
        if (i + ahead < t->changes) __builtin_prefetch(t->elements + flat(&t->at, t->ranks[i + ahead]) * word);
        t->old[i] = (uint32_t)load(t->elements, flat(&t->at, t->ranks[i]), word);
        const int64_t width = raw[exponent_of(t->old[i], type)] + (int64_t)(*excess & -(uint32_t)t->is_long[i]);
        excess += t->is_long[i]; /* no branch: which are long, no processor guesses */
        widest = width > widest ? width : widest;
        t->widths[i] = (uint8_t)width;
        sum += width;
    }
    *bits = sum;
    return widest < 8 * word ? OK : STEP_OUTSIDE;
}

/* Of part 3, from ``bit`` on, the steps of size 0 that lead to the next float, and not around to the other end. */
INLINE void count_ones(const tile_t *t, int64_t bit, const int word) {
    const uint32_t last = mask_of(word) >> 1; /* the highest, and one after it, the lowest in order */
    int64_t ones = 0;
    for (int64_t i = 0; i < t->changes; i++) {
        const int width = t->widths[i];
        const uint64_t value = word_at(t->bytes + (bit >> 3), t->limit) >> (bit & 7) & ((2ull << width) - 1);
        bit += width + 1;
        const int nothing = !(value >> 1) && !t->is_long[i];
        ones += nothing && in_order(t->old[i], word, t->form->exponent_bits) != last + (uint32_t)(value & 1);
    }
    __atomic_fetch_add(t->job->ones, ones, __ATOMIC_RELAXED);
}

/* Part 3, from ``bit`` on, and what it makes of the tile's elements; the first is change ``to`` of the job. */
INLINE void write_values(const tile_t *t, int64_t bit, int64_t to, const int word) {
    const read_job_t *job = t->job;
    const int sign_magnitude = t->form->exponent_bits;
    if (job->ones) count_ones(t, bit, word);
    if (!job->in_place && !job->new && !job->positions) return;
    for (int64_t i = 0; i < t->changes; i++) {
        const int width = t->widths[i];
        const uint64_t value = word_at(t->bytes + (bit >> 3), t->limit) >> (bit & 7) & ((2ull << width) - 1);
        bit += width + 1;
        const uint32_t size = (uint32_t)(value >> 1) | (uint32_t)t->is_long[i] << width, step = size + 1;
        const uint32_t down = -(uint32_t)(value & 1); /* two's complement */
        const uint32_t old = in_order(t->old[i], word, sign_magnitude);
        const uint32_t new = in_order((old + ((step ^ down) - down)) & mask_of(word), word, sign_magnitude);
        const int64_t at = flat(&t->at, t->ranks[i]);
        if (job->in_place) store(t->elements, at, new, word);
        if (job->new) store(job->new, to + i, new, word);
        if (job->positions) store(job->positions, to + i, (uint64_t)at, job->wide);
    }
}

/* The same where no change has a size: part 3 is a bit for each, which old elements decide nothing of. */
INLINE void write_ones(const tile_t *t, int64_t bit, int64_t to, const int word) {
    const read_job_t *job = t->job;
    const int sign_magnitude = t->form->exponent_bits;
    const uint32_t mask = mask_of(word);
    for (int64_t i = 0; i < t->changes; i++, bit++) {
        if (i + AHEAD < t->changes) __builtin_prefetch(t->elements + flat(&t->at, t->ranks[i + AHEAD]) * word);
        const int64_t at = flat(&t->at, t->ranks[i]);
        const uint32_t down = t->bytes[bit >> 3] >> (bit & 7) & 1;
        const uint32_t old = in_order((uint32_t)load(t->elements, at, word), word, sign_magnitude);
        const uint32_t new = in_order((old + 1 - 2 * down) & mask, word, sign_magnitude);
        if (job->in_place) store(t->elements, at, new, word);
        if (job->new) store(job->new, to + i, new, word);
        if (job->positions) store(job->positions, to + i, (uint64_t)at, job->wide);
    }
}

/* Both at once, where new elements go to their places and nowhere else: old elements are asked for once, and what is
 * written before a defect is found is worth nothing. Classes that have no sizes come first: a bit for each change. */
INLINE int advance(const tile_t *t, int64_t bit, int64_t *end, const int word) {
    const form_t *f = t->form;
    const type_t type = type_of(f);
    const int first = f->classes - f->sized, sign_magnitude = f->exponent_bits;
    const uint32_t field = t->seen->chunks ? ((1u << type.exponent_bits) - 1) << type.exponent_start : 0;
    const uint32_t mask = mask_of(word), *excess = t->codes, *ranks = t->ranks;
    uint8_t *const elements = t->elements;
    const int64_t sized = t->begins[first], changes = t->changes;
    int64_t i = 0, widest = 0;
    uint8_t raw[EXPONENTS];
    for (; i < sized; i++, bit++) {
        if (i + AHEAD < changes) __builtin_prefetch(elements + flat(&t->at, ranks[i + AHEAD]) * word, 1);
        const int64_t at = flat(&t->at, ranks[i]);
        const uint32_t before = (uint32_t)load(elements, at, word), down = t->bytes[bit >> 3] >> (bit & 7) & 1;
        const uint32_t new = in_order((in_order(before, word, sign_magnitude) + 1 - 2 * down) & mask, word, sign_magnitude);
        store(elements, at, new, word);
        if ((before ^ new) & field) reclass(t, ranks[i], exponent_of(before, type), exponent_of(new, type));
    }
    if (i < changes)
        for (int e = 0; e < EXPONENTS; e++) raw[e] = (uint8_t)(class_of(e, f) >= first ? raw_bits(e, f) : 0);
    for (; i < changes; i++) {
        if (i + AHEAD < changes) __builtin_prefetch(elements + flat(&t->at, ranks[i + AHEAD]) * word, 1);
        const int64_t at = flat(&t->at, ranks[i]);
        const uint32_t before = (uint32_t)load(elements, at, word), is_long = t->is_long[i];
        const int64_t stated = raw[exponent_of(before, type)] + (int64_t)(*excess & -is_long);
        const int width = (int)stated & 63;
        excess += is_long; /* no branch: which are long, no processor guesses */
        widest = stated > widest ? stated : widest;
        const uint64_t value = word_at(t->bytes + (bit >> 3), t->limit) >> (bit & 7) & ((2ull << width) - 1);
        bit += width + 1;
        const uint32_t step = ((uint32_t)(value >> 1) | (uint32_t)((uint64_t)is_long << width)) + 1;
        const uint32_t down = -(uint32_t)(value & 1); /* two's complement */
        const uint32_t old = in_order(before, word, sign_magnitude);
        const uint32_t new = in_order((old + ((step ^ down) - down)) & mask, word, sign_magnitude);
        store(elements, at, new, word);
        if ((before ^ new) & field) reclass(t, ranks[i], exponent_of(before, type), exponent_of(new, type));
    }
    *end = bit;
    return widest < 8 * word ? OK : STEP_OUTSIDE;
}

/* Functions of their own, so that the compiler has all registers for each. */
#define APART(word)                                                                                                    \
    static __attribute__((noinline)) int measure_##word(const tile_t *t, int64_t *bits) {                              \
        return measure(t, bits, word);                                                                                 \
    }                                                                                                                  \
    static __attribute__((noinline)) void write_values_##word(const tile_t *t, int64_t bit, int64_t to) {              \
        write_values(t, bit, to, word);                                                                                \
    }                                                                                                                  \
    static __attribute__((noinline)) void write_ones_##word(const tile_t *t, int64_t bit, int64_t to) {                \
        write_ones(t, bit, to, word);                                                                                  \
    }                                                                                                                  \
    static __attribute__((noinline)) int advance_##word(const tile_t *t, int64_t bit, int64_t *end) {                  \
        return advance(t, bit, end, word);                                                                             \
    }
APART(1)
APART(2)
APART(4)

/* Is ``end`` where the tile's bits have to end? */
static int check_end(const tile_t *t, int64_t end) {
    if (end > t->bits) return TILE_SHORT;
    if (octets(end) * 8 != t->bits) return TILE_LENGTH;
    if ((end & 7) && t->bytes[end >> 3] >> (end & 7)) return PADDING;
    return OK;
}

static int read_tile(tile_t *t, int64_t to) {
    int64_t end, bits;
    if (!t->changes) return t->bits ? TILE_LENGTH : OK;
    if (t->seen && t->form->classes == 1) t->seen->chunks = 0; /* such a patch knows nothing of classes */
    int code = count_classes(t);
    if (!code) code = read_lists(t, &end);
    if (code) return code;
    find_places(t);
    const int word = t->form->word, ones = t->form->classes == 1 && !t->form->sized && !t->job->ones;
    if (t->seen) {
        if (end + t->changes > t->bits) return TILE_SHORT; /* a bit each at least */
        code = word == 1 ? advance_1(t, end, &end) : word == 2 ? advance_2(t, end, &end) : advance_4(t, end, &end);
        return code ? code : check_end(t, end);
    }
    if (ones)
        bits = t->changes;
    else
        code = word == 1 ? measure_1(t, &bits) : word == 2 ? measure_2(t, &bits) : measure_4(t, &bits);
    if (!code) code = check_end(t, end + bits);
    if (code) return code;
    if (ones) {
        if (word == 1) write_ones_1(t, end, to);
        if (word == 2) write_ones_2(t, end, to);
        if (word == 4) write_ones_4(t, end, to);
        return OK;
    }
    if (word == 1) write_values_1(t, end, to);
    if (word == 2) write_values_2(t, end, to);
    if (word == 4) write_values_4(t, end, to);
    return OK;
}

int64_t lists_seen_bytes(int64_t elements) { return chunks_of(elements) * (CHUNK + ROW); }

void lists_copy_block(const read_job_t *job, const scan_t *scan, int64_t number, const uint8_t *from, int64_t first,
                      int64_t ahead, seen_t *seen) {
    const form_t *f = &job->form;
    const tile_at_t at = tile_at(f, number);
    const int64_t word = f->word, n = least(BLOCK_ELEMENTS, at.elements - first), chunks = chunks_of(at.elements);
    const int64_t wide = at.contiguous ? at.elements : at.wide;
    uint8_t *to = seen->tile + first * word;
    int64_t column = first % wide;
    from += (at.origin + first / wide * (wide + at.skip)) * word;
    for (int64_t left = n; left; from += (wide + at.skip) * word, column = 0) {
        const int64_t here = least(left, wide - column);
        const uint8_t *x = from + column * word;
        for (int64_t i = 0; ahead && i < here * word; i += 64) __builtin_prefetch(x + ahead + i, 0, 2);
        memcpy(to, x, (size_t)(here * word));
        to += here * word;
        left -= here;
    }
    if (f->classes == 1 || chunks > KEPT_CHUNKS) return;
    const int64_t chunk = first / CHUNK;
    const block_t block = {seen->tile + first * word, n, INT64_MAX, 0, 0, 0};
    scan->classify(block, f, seen->room + chunk * CHUNK, seen->room + chunks * CHUNK + chunk * ROW, seen->counts);
    seen->chunks = chunks;
    seen->classes = f->classes;
    seen->top = f->top;
}

int lists_read_tile(const read_job_t *job, const scan_t *scan, place_t p, scratch_t *scratch, seen_t *seen) {
    const form_t *f = &job->form;
    const int64_t length = job->lengths[p.row];
    tile_t t = {.job = job, .form = f, .scan = scan, .scratch = scratch, .seen = seen};
    t.bytes = job->payload + p.payload;
    t.limit = job->payload + job->bytes;
    t.bits = 8 * length;
    if (crc32_of(t.bytes, length) != (uint32_t)load(job->checksums, p.row, 4)) return TILE_CHECKSUM;
    t.at = tile_at(f, job->numbers ? job->numbers[p.row] : p.row);
    t.elements = job->elements;
    if (seen && seen->tile) {
        t.elements = seen->tile;
        t.at = (tile_at_t){.elements = t.at.elements, .wide = t.at.elements, .contiguous = 1};
    }
    t.counts = job->counts + p.row * (f->classes + f->sized);
    for (int c = 0; c < f->classes; c++) t.begins[c + 1] = t.changes += t.counts[c];
    return read_tile(&t, p.changes);
}
