// Flips bits in what memcpy and memmove have copied: preloaded (LD_PRELOAD), silent until `flips_begin` is called.
//
// Counted are copies of at least `least` bytes; those that the code between `inside` and `outside` asks for (the
// interpreter, with its bytecode and dictionaries) only from 4096 on. Of those whose numbers are in `at` one random bit is
// flipped in the destination, and who asked for the copy goes to the log: library and function, then the Python stack.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MOST 64
static atomic_long seen;
static _Atomic int armed;
static long at[MOST], numbers;
static size_t least;
static uintptr_t inside, outside;
static uint64_t seed;
static int log_file;

static void forwards(void *to, const void *from, size_t n) {
#if defined(__x86_64__)
  __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(n) : : "memory");
#else
  volatile unsigned char *t = to;
  const volatile unsigned char *f = from;
  while (n--) *t++ = *f++;
#endif
}

static uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

static void tell(long number, size_t n, size_t byte, void *caller) {
  Dl_info who;
  if (!dladdr(caller, &who)) who.dli_fname = who.dli_sname = NULL;
  dprintf(log_file, "flip %ld of %zu bytes at %zu by %s %s\n", number, n, byte, who.dli_fname ? who.dli_fname : "?",
          who.dli_sname ? who.dli_sname : "?");
  void *(*state)(void) = dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
  void (*dump)(int, void *) = dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  void *thread = state ? state() : NULL;
  if (thread && dump) dump(log_file, thread);
}

static void copied(void *to, size_t n, void *caller) {
  if (n < 4096 && (uintptr_t)caller >= inside && (uintptr_t)caller < outside) return;
  long number = atomic_fetch_add(&seen, 1);
  for (long i = 0; i < numbers; ++i)
    if (at[i] == number) {
      uint64_t random = mixed(seed + (uint64_t)number);
      size_t byte = random % n;
      ((unsigned char *)to)[byte] ^= 1u << (random >> 61);
      tell(number, n, byte, caller);
    }
}

void *memcpy(void *restrict to, const void *restrict from, size_t n) {
  forwards(to, from, n);
  if (atomic_load_explicit(&armed, memory_order_relaxed) && n >= least) copied(to, n, __builtin_return_address(0));
  return to;
}

void *memmove(void *to, const void *from, size_t n) {
  if ((uintptr_t)to - (uintptr_t)from >= n) {
    forwards(to, from, n);
  } else {
    volatile unsigned char *t = (unsigned char *)to + n;
    const volatile unsigned char *f = (const unsigned char *)from + n;
    while (n--) *--t = *--f;
    return to;
  }
  if (atomic_load_explicit(&armed, memory_order_relaxed) && n >= least) copied(to, n, __builtin_return_address(0));
  return to;
}

void flips_begin(size_t least_bytes, uintptr_t from, uintptr_t to, uint64_t random_seed, const long *which, long count,
                 int log) {
  least = least_bytes, inside = from, outside = to, seed = random_seed, log_file = log;
  numbers = count < MOST ? count : MOST;
  for (long i = 0; i < numbers; ++i) at[i] = which[i];
  atomic_store(&seen, 0);
  atomic_store(&armed, 1);
}

long flips_seen(void) { return atomic_load(&seen); }
