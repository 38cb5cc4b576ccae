/* Every clock of a process runs CLOCK_RATE times as fast: LD_PRELOAD of this, compiled as a shared object. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <time.h>

static double rate(void) {
  static double known;
  if (!known) known = atof(getenv("CLOCK_RATE"));
  return known;
}

static double scaled(double now, double *begin) {
  if (!*begin) *begin = now;
  return *begin + (now - *begin) * rate();
}

int clock_gettime(clockid_t which, struct timespec *at) {
  static int (*real)(clockid_t, struct timespec *);
  static double begin[16];
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(which, at);
  if (failed || which < 0 || which > 15) return failed;
  double seconds = scaled(at->tv_sec + at->tv_nsec * 1e-9, &begin[which]);
  at->tv_sec = (time_t)seconds;
  at->tv_nsec = (long)((seconds - (double)at->tv_sec) * 1e9);
  return 0;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
  struct timespec now;
  (void)zone;
  int failed = clock_gettime(CLOCK_REALTIME, &now);
  at->tv_sec = now.tv_sec;
  at->tv_usec = now.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *at) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (at) *at = now.tv_sec;
  return now.tv_sec;
}

clock_t clock(void) {
  struct timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return (clock_t)(now.tv_sec * CLOCKS_PER_SEC + now.tv_nsec / 1000);
}

int getrusage(__rusage_who_t who, struct rusage *usage) {
  static int (*real)(__rusage_who_t, struct rusage *);
  if (!real) real = (int (*)(__rusage_who_t, struct rusage *))dlsym(RTLD_NEXT, "getrusage");
  int failed = real(who, usage);
  double seconds = (usage->ru_utime.tv_sec + usage->ru_utime.tv_usec * 1e-6) * rate();
  usage->ru_utime.tv_sec = (time_t)seconds;
  usage->ru_utime.tv_usec = (suseconds_t)((seconds - (double)usage->ru_utime.tv_sec) * 1e6);
  return failed;
}
