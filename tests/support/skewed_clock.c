// The wall clock of a host that is SKEW seconds ahead of this one; other clocks are left alone. With a file JUMP, the
// clock is as far ahead as the file has bytes, so it jumps when the file grows or shrinks.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>

static time_t skew(void) {
  const char *text = getenv("SKEW"), *path = getenv("JUMP");
  struct stat file;
  if (path) return stat(path, &file) ? 0 : file.st_size - 1000000;
  return text ? atol(text) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*original)(clockid_t, struct timespec *);
  if (!original) original = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int result = original(clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += skew();
  return result;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec precise;
  (void)zone;
  if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec precise;
  if (clock_gettime(CLOCK_REALTIME, &precise)) return -1;
  if (now) *now = precise.tv_sec;
  return precise.tv_sec;
}
