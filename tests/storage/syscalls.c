/* Preloaded into a process, notes what it does to files below $NOTED, in order, in the file $NOTES: see dying_disk.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int notes = -1;

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)

/* A note: the kind, the time in ns, where in the file, bytes of the path and of the data, the path, the data. */
static void note(char kind, const char *path, int64_t offset, const void *data, uint32_t size) {
    if (strncmp(path, getenv("NOTED"), strlen(getenv("NOTED"))) || strstr(path, "-shm")) return;
    if (notes < 0) notes = syscall(SYS_openat, AT_FDCWD, getenv("NOTES"), O_CREAT | O_WRONLY | O_APPEND, 0600);
    uint32_t length = strlen(path);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t at = now.tv_sec * 1000000000LL + now.tv_nsec;
    struct iovec parts[] = {{&kind, 1}, {&at, 8}, {&offset, 8}, {&length, 4}, {&size, 4}, {(void *)path, length}, {(void *)data, size}};
    syscall(SYS_writev, notes, parts, 7);
}

static void note_file(char kind, int file, int64_t offset, const void *data, uint32_t size) {
    char link[64], path[4096] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) > 0) note(kind, path, offset, data, size);
}

#define NOTED(result, call, noting) \
    pthread_mutex_lock(&lock); result done = call; if (done >= 0) noting; pthread_mutex_unlock(&lock); return done

ssize_t pwrite64(int file, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    NOTED(ssize_t, real(file, data, size, offset), note_file('w', file, offset, data, done));
}
ssize_t pwrite(int file, const void *data, size_t size, off_t offset) { return pwrite64(file, data, size, offset); }
int ftruncate64(int file, off64_t size) {
    REAL(ftruncate64);
    NOTED(int, real(file, size), note_file('t', file, size, 0, 0));
}
int ftruncate(int file, off_t size) { return ftruncate64(file, size); }
int fsync(int file) { REAL(fsync); NOTED(int, real(file), note_file('s', file, 0, 0, 0)); }
int fdatasync(int file) { REAL(fdatasync); NOTED(int, real(file), note_file('s', file, 0, 0, 0)); }
int unlink(const char *path) { REAL(unlink); NOTED(int, real(path), note('u', path, 0, 0, 0)); }
int rename(const char *from, const char *to) {
    REAL(rename);
    NOTED(int, real(from, to), note('r', from, 0, to, strlen(to)));
}
int mkdir(const char *path, mode_t mode) { REAL(mkdir); NOTED(int, real(path, mode), note('d', path, 0, 0, 0)); }
int open64(const char *path, int flags, ...) {
    REAL(open64);
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    NOTED(int, real(path, flags, mode), if (flags & O_CREAT) note('c', path, 0, 0, 0));
}
int open(const char *path, int flags, ...) {
    va_list more;
    va_start(more, flags);
    mode_t mode = flags & O_CREAT ? va_arg(more, mode_t) : 0;
    va_end(more);
    return open64(path, flags, mode);
}
