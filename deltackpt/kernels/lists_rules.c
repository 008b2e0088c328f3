/* What a writer of `packed` chooses (FORMAT, writer requirements): grid, classes, anchor. Integers alone. */
#include "lists_write.h"

#define CHANGES_PER_TILE 2048
#define MAX_GRID 16
#define CHANGES_PER_SHARE 128
#define FEW 10

static int64_t power(int64_t dim) {
    int64_t p = 1;
    while (2 * p <= dim && 2 * p <= MAX_GRID) p *= 2;
    return p;
}

static uint64_t tile_elements(const form_t *f, int64_t rows, int64_t columns) {
    return (uint64_t)parts(f->height, rows) * (uint64_t)parts(f->width, columns);
}

void choose_grid(form_t *f, int64_t slices, int64_t changes, int64_t shares) {
    if (slices < 1 || changes / CHANGES_PER_TILE < slices) slices = 1;
    int64_t rows = power(f->height / slices), columns = power(f->width);
    while (rows * columns > 1 && slices * rows * columns > changes / CHANGES_PER_TILE) {
        if (2 * tile_elements(f, slices * rows, columns) > (uint64_t)MAX_ELEMENTS) break;
        if (rows >= columns)
            rows /= 2;
        else
            columns /= 2;
    }
    while (slices * rows * columns * 2 <= changes / CHANGES_PER_SHARE) {
        const int higher = rows < shares && 2 * rows <= f->height / slices;
        const int wider = columns < shares && 2 * columns <= f->width;
        if (higher && (rows <= columns || !wider))
            rows *= 2;
        else if (wider)
            columns *= 2;
        else
            break;
    }
    rows *= slices;
    while (tile_elements(f, rows, columns) > (uint64_t)MAX_ELEMENTS)
        if (columns < f->width)
            columns = least(2 * columns, f->width);
        else
            rows = least(2 * rows, f->height);
    f->rows = rows;
    f->columns = columns;
}

int64_t list_cost(int64_t chosen, int64_t candidates) {
    const int64_t listed = listed_of(chosen, candidates);
    const int k = rice(listed, candidates);
    return listed ? listed * (k + 1) + ((candidates - listed) >> k) : 0;
}

/* Bits of the sizes of all sized classes, and of their long lists. ``present``: exponents that have changes. */
static int64_t cost_of_anchor(const form_t *f, const cells_t *cells, const uint8_t *present, int count, int longest) {
    const int first = f->classes - f->sized;
    int64_t cost = 0, long_of[MAX_CLASSES] = {0}, of[MAX_CLASSES] = {0};
    for (int i = 0; i < count; i++) {
        const int e = present[i], class = class_of(e, f), raw = raw_bits(e, f);
        if (class < first) continue;
        of[class] += cells->of[e];
        cost += cells->of[e] * raw;
        for (int l = raw + 1; l <= longest; l++) {
            cost += cells->cell[e][l] * (2 * (l - raw) - 1);
            long_of[class] += cells->cell[e][l];
        }
    }
    for (int c = first; c < f->classes; c++) cost += list_cost(long_of[c], of[c]);
    return cost;
}

void choose_scale(form_t *f, const cells_t *cells, int64_t changes, int limit) {
    const int64_t few = changes >> 4 > FEW ? changes >> 4 : FEW;
    int high = -1, count = 0, longest = 0;
    uint8_t present[EXPONENTS];
    f->classes = 1;
    f->top = f->sized = f->anchor = 0;
    if (changes >= few) {
        int top = EXPONENTS - 1, bottom = 0;
        for (int64_t sum = cells->of[top]; sum < few;) sum += cells->of[--top];
        for (int64_t sum = cells->of[bottom]; sum < few;) sum += cells->of[++bottom];
        f->classes = top >= bottom ? (int32_t)least(top - bottom + 1, limit) : 1;
        if (f->classes > 1) f->top = top;
    }
    for (int e = 0; e < EXPONENTS; e++) {
        if (!cells->of[e]) continue;
        present[count++] = (uint8_t)e;
        if (cells->of[e] == cells->cell[e][0]) continue;
        high = e;
        for (int l = longest + 1; l < LENGTHS; l++)
            if (cells->cell[e][l]) longest = l;
    }
    if (high < 0) return;
    f->sized = f->classes - class_of(high, f);
    int best = 0;
    int64_t lowest = INT64_MAX;
    for (int anchor = high > 15 ? high - 15 : 0; anchor <= high + 31 && anchor <= 255; anchor++) {
        f->anchor = anchor;
        const int64_t cost = cost_of_anchor(f, cells, present, count, longest);
        if (cost < lowest) {
            lowest = cost;
            best = anchor;
        }
    }
    f->anchor = best;
}

int saves_nothing(const form_t *f, const int64_t *changes, const int64_t *elements) {
    int64_t apart = 8 * f->rows * f->columns * (f->classes - 1), all_changes = 0, all_elements = 0;
    for (int c = 0; c < f->classes; c++) {
        apart += list_cost(changes[c], elements[c]);
        all_changes += changes[c];
        all_elements += elements[c];
    }
    return apart >= list_cost(all_changes, all_elements);
}
