// Flips one bit of a file just before it is opened for the n-th time, by Python, Rust or C++ alike: preloaded
// (LD_PRELOAD), silent until FLIP_FILE is set. The times of the file stay as they were.
//
// FLIP_FILE=<name> FLIP_IN=<how the name of its directory begins> FLIP_NTH=<from 1 on> FLIP_SEED=<of the place>
// FLIP_BACK=<1: flipped back before the next time> FLIP_LOG=<file, one line for each flip: "flip" or "sealed">
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static atomic_long seen;

static long setting(const char *name) {
  const char *text = getenv(name);
  return text ? atol(text) : 0;
}

static void flip(const char *path, const char *name) {
  int file = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
  int log = syscall(SYS_openat, AT_FDCWD, getenv("FLIP_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  struct stat before;
  int done = 0;
  if (file >= 0 && fstat(file, &before) == 0 && before.st_size > 0) {
    uint64_t first = 0, at, bit = 1;
    const char *end = strrchr(name, '.');
    at = ((uint64_t)setting("FLIP_SEED") * 0x9e3779b97f4a7c15u) >> 16;
    if (end && strcmp(end, ".safetensors") == 0 && pread(file, &first, 8, 0) == 8 && first + 12 < (uint64_t)before.st_size) {
      uint64_t words = ((uint64_t)before.st_size - 8 - first) / 4;
      at = 8 + first + 4 * (at % words) + 3, bit = 64;  // the exponent of a float32: nobody can overlook it
    } else {
      at %= (uint64_t)before.st_size;
    }
    unsigned char byte;
    if (pread(file, &byte, 1, (off_t)at) == 1) {
      byte ^= (unsigned char)bit;
      done = pwrite(file, &byte, 1, (off_t)at) == 1;
      struct timespec times[2] = {before.st_atim, before.st_mtim};
      futimens(file, times);
    }
  }
  if (file >= 0) syscall(SYS_close, file);
  dprintf(log, "%s %s\n", done ? "flip" : "sealed", path);
  syscall(SYS_close, log);
}

static void before_open(const char *path, int flags) {
  const char *name = getenv("FLIP_FILE"), *in = getenv("FLIP_IN");
  if (!name || !path || (flags & O_ACCMODE) != O_RDONLY || (flags & O_DIRECTORY)) return;
  const char *last = strrchr(path, '/');
  if (!last || strcmp(last + 1, name) != 0) return;
  const char *folder = last;
  while (folder > path && folder[-1] != '/') --folder;
  if (in && strncmp(folder, in, strlen(in)) != 0) return;
  struct stat about;
  if (stat(path, &about) != 0 || !S_ISREG(about.st_mode)) return;
  long number = atomic_fetch_add(&seen, 1) + 1, nth = setting("FLIP_NTH");
  if (number == nth || (number == nth + 1 && setting("FLIP_BACK"))) flip(path, name);
}

#define OPEN(NAME, ARGUMENTS, PATH, ...)                                   \
  int NAME ARGUMENTS {                                                     \
    static int (*stock)(__VA_ARGS__, ...);                                 \
    if (!stock) *(void **)&stock = dlsym(RTLD_NEXT, #NAME);                \
    mode_t mode = 0;                                                       \
    if (flags & (O_CREAT | O_TMPFILE)) {                                   \
      va_list rest;                                                        \
      va_start(rest, flags);                                               \
      mode = va_arg(rest, mode_t);                                         \
      va_end(rest);                                                        \
    }                                                                      \
    before_open(path, flags);                                              \
    return stock(PATH flags, mode);                                        \
  }

#define PLAIN path,
#define IN_FOLDER folder, path,
OPEN(open, (const char *path, int flags, ...), PLAIN, const char *, int)
OPEN(open64, (const char *path, int flags, ...), PLAIN, const char *, int)
OPEN(openat, (int folder, const char *path, int flags, ...), IN_FOLDER, int, const char *, int)
OPEN(openat64, (int folder, const char *path, int flags, ...), IN_FOLDER, int, const char *, int)
