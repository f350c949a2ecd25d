/* The digest of digest.py on the host. Compiled at first use by digest_native.py, which also checks it.
   One pass: two sums, the table of place weights from the second-level cache, nothing written. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest reads little-endian words"
#endif

/* Words may lie at any address: a part of a file need not start on a multiple of 4. */
typedef uint32_t unaligned_word __attribute__((aligned(1), may_alias));

static uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* Adds s1 and s2 of nbytes at data to sums[0] and sums[1]; index is that of the first word, table holds A. */
void hf_rocm_tune_digest(const unsigned char *data, uint64_t nbytes, uint64_t index, const uint64_t *table,
                         uint64_t *sums) {
    uint64_t left = nbytes / 4;
    while (left) {
        const unaligned_word *words = (const unaligned_word *)data;
        const uint64_t *weights = table + (index & 0xFFFF), block = index >> 16;
        const uint64_t room = 0x10000 - (index & 0xFFFF), count = left < room ? left : room;
        uint64_t plain = 0, weighted = 0;
        for (uint64_t i = 0; i < count; i++) {
            plain += words[i];
            weighted += words[i] * weights[i];
        }
        const uint64_t factor = ((uint64_t)mix((uint32_t)(block + 1)) << 32) + 1;
        const uint64_t term = ((uint64_t)mix((uint32_t)(block + 0x80000000u)) << 32) + (block << 16);
        sums[0] += plain;
        sums[1] += weighted * factor + plain * term;
        data += 4 * count;
        index += count;
        left -= count;
    }
    if (nbytes % 4) {
        unsigned char last[4] = {0, 0, 0, 0};
        memcpy(last, data, nbytes % 4);
        hf_rocm_tune_digest(last, 4, index, table, sums);
    }
}
