/* The digest of digest.py on the host, with an optional copy in the same pass. Compiled at first use by digest.py, which
   also tests it. The table of weights stays in the second-level cache. */

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest reads little-endian words"
#endif

/* Words may lie at any address: a part of a file need not start on a multiple of 4. */
typedef uint32_t unaligned_word __attribute__((aligned(1), may_alias));

enum { BLOCK = 0x10000, PIECE = 512, MAX_THREADS = 16 }; /* words: a piece is copied from the first-level cache */

typedef struct {
    const unsigned char *data;
    unsigned char *copy;
    uint64_t nbytes, index;
    const uint64_t *table;
    uint64_t sums[2];
} part;

static uint32_t mix(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = (x ^ (x >> 15)) * 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* Stores past the cache, because only the device reads the copy, and the cache lines need not be read before they are
   written. Prefetches the next bytes meanwhile: 1.5 times as fast. */
static void copy_past_cache(unsigned char *to, const unsigned char *from, uint64_t nbytes) {
    uint64_t done = 0;
#ifdef __SSE2__
    if ((uintptr_t)to % 16 == 0)
        for (; done + 64 <= nbytes; done += 64) {
            __builtin_prefetch((const void *)((uintptr_t)from + nbytes + done));
            for (int i = 0; i < 64; i += 16)
                _mm_stream_si128((__m128i *)(to + done + i), _mm_loadu_si128((const __m128i *)(from + done + i)));
        }
#endif
    memcpy(to + done, from + done, nbytes - done);
}

static void add(part *p, uint64_t block, uint64_t plain, uint64_t weighted) {
    const uint64_t factor = ((uint64_t)mix((uint32_t)(block + 1)) << 32) + 1;
    const uint64_t term = ((uint64_t)mix((uint32_t)(block + 0x80000000u)) << 32) + (block << 16);
    p->sums[0] += plain;
    p->sums[1] += weighted * factor + plain * term;
}

static void *reduce(void *argument) {
    part *p = argument;
    const unsigned char *data = p->data;
    uint64_t left = p->nbytes / 4, index = p->index;
    while (left) {
        const uint64_t *weights = p->table + index % BLOCK;
        const uint64_t room = BLOCK - index % BLOCK, count = left < room ? left : room;
        uint64_t plain = 0, weighted = 0;
        for (uint64_t start = 0; start < count; start += PIECE) {
            const uint64_t size = count - start < PIECE ? count - start : PIECE;
            const unaligned_word *words = (const unaligned_word *)data + start;
            for (uint64_t i = 0; i < size; i++) {
                plain += words[i];
                weighted += words[i] * weights[start + i];
            }
            if (p->copy)
                copy_past_cache(p->copy + (data - p->data) + 4 * start, data + 4 * start, 4 * size);
        }
        add(p, index / BLOCK, plain, weighted);
        data += 4 * count;
        index += count;
        left -= count;
    }
    if (p->nbytes % 4) {
        uint32_t last = 0;
        memcpy(&last, data, p->nbytes % 4);
        add(p, index / BLOCK, last, last * p->table[index % BLOCK]);
        if (p->copy)
            memcpy(p->copy + (data - p->data), data, p->nbytes % 4);
    }
#ifdef __SSE2__
    if (p->copy)
        _mm_sfence();
#endif
    return NULL;
}

/* Adds s1 and s2 of nbytes at data to sums[0] and sums[1], and copies the bytes to copy unless that is NULL. index is
   the index of the first word; table holds A. */
void hf_rocm_tune_digest(const unsigned char *data, unsigned char *copy, uint64_t nbytes, uint64_t index,
                         const uint64_t *table, int threads, uint64_t *sums) {
    part parts[MAX_THREADS];
    pthread_t ids[MAX_THREADS];
    int started[MAX_THREADS], count = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    const uint64_t share = (nbytes / count + 4095) & ~(uint64_t)4095;
    for (int i = 0; i < count; i++) {
        const uint64_t begin = share * i < nbytes ? share * i : nbytes;
        const uint64_t end = begin + share < nbytes ? begin + share : nbytes;
        parts[i] = (part){data + begin, copy ? copy + begin : NULL, end - begin, index + begin / 4, table, {0, 0}};
        started[i] = i + 1 < count && pthread_create(&ids[i], NULL, reduce, &parts[i]) == 0;
        if (!started[i]) /* this thread runs the last part, and those for which no thread could be started */
            reduce(&parts[i]);
    }
    for (int i = 0; i < count; i++) {
        if (started[i])
            pthread_join(ids[i], NULL);
        sums[0] += parts[i].sums[0];
        sums[1] += parts[i].sums[1];
    }
}
