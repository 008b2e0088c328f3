/* xxh3 of more than XXH3_SHORT bytes, which may come in several runs of whole blocks. */
#ifndef DELTACKPT_XXH3_H
#define DELTACKPT_XXH3_H

#include <stdint.h>

#define XXH3_SHORT 240
#define XXH3_BLOCK 1024

void xxh3_begin(uint64_t *acc); /* acc[8] */
/* Whole blocks, and, unless ``rest`` is 0, the last 1 to XXH3_BLOCK bytes of the input after them. */
void xxh3_absorb(uint64_t *acc, const uint8_t *data, int64_t blocks, int64_t rest);
/* The xxh3-128 of so many bytes to out[16], most significant byte first. */
void xxh3_finish(const uint64_t *acc, int64_t bytes, uint8_t *out);

uint64_t xxh3_64_of(const uint8_t *data, int64_t bytes);

#endif
