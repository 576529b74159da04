/* Fails or kills at the Nth call that changes a file below a folder, whichever library makes it,
   or records all of them.

   FAULT_FOLDER: only calls that name or hold files below this folder are counted.
   FAULT_AT: number of the call, from 0. FAULT_ERROR: errno; 0 kills. FAULT_COUNT: file that
   receives one letter for each call.
   FAULT_LOG: file that receives a record for each call that succeeded: a line with its letter, an
   inode, a number (offset, size or flags) and the lengths of two paths and of data, which follow. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long number;

static int below(const char *path) {
    const char *folder = getenv("FAULT_FOLDER");
    return folder && path && strncmp(path, folder, strlen(folder)) == 0;
}

static int holds(int descriptor) {
    char link[40], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

static int named(int folder, const char *path) {
    return path[0] == '/' || folder == AT_FDCWD ? below(path) : holds(folder);
}

/* Returns whether this call fails. */
static int fails(char letter) {
    const char *at = getenv("FAULT_AT"), *count = getenv("FAULT_COUNT");
    long here = atomic_fetch_add(&number, 1);
    if (count) {
        int file = syscall(SYS_openat, AT_FDCWD, count, O_WRONLY | O_CREAT | O_APPEND, 0666);
        syscall(SYS_write, file, &letter, 1);
        syscall(SYS_close, file);
    }
    if (!at || here != atol(at)) return 0;
    errno = atoi(getenv("FAULT_ERROR"));
    if (!errno) kill(getpid(), SIGKILL);
    return 1;
}

/* Calls and their records are made one at a time, so that their order is the same. */
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;

static void append(int log, const void *data, size_t size) {
    const char *from = data;
    while (size) {
        ssize_t written = syscall(SYS_write, log, from, size);
        if (written < 0) abort();
        from += written, size -= written;
    }
}

static void record(char letter, long inode, long number, const char *path, const char *other, const void *data, size_t size) {
    char line[200];
    int log = syscall(SYS_openat, AT_FDCWD, getenv("FAULT_LOG"), O_WRONLY | O_CREAT | O_APPEND, 0666);
    size_t first = path ? strlen(path) : 0, second = other ? strlen(other) : 0;
    snprintf(line, sizeof line, "%c %ld %ld %zu %zu %zu\n", letter, inode, number, first, second, size);
    append(log, line, strlen(line));
    append(log, path, first);
    append(log, other, second);
    append(log, data, size);
    syscall(SYS_close, log);
}

static const char *absolute(int folder, const char *path, char *buffer) {
    char link[40];
    if (path[0] == '/') return path;
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, buffer, 4096);
    sprintf(buffer + length, "/%s", path);
    return buffer;
}

static long inode_of(int file, const char *path) {
    struct stat status;
    return (path ? lstat(path, &status) : fstat(file, &status)) ? 0 : status.st_ino;
}

/* What a file has now in a range that was written. */
static void record_content(int file, long start, long size) {
    char path[40], *data = malloc(size);
    snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int again = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    if (pread(again, data, size, start) != size) abort();
    syscall(SYS_close, again);
    record('w', inode_of(file, NULL), start, NULL, NULL, data, size);
    free(data);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
/* Makes a call, or fails; records it if it succeeded. Expects `name`, `letter` and the rest. */
#define MAKE(letter, relevant, result, name, before, after, ...) \
    if (!(relevant)) return REAL(name)(__VA_ARGS__); \
    if (fails(letter)) return -1; \
    if (!getenv("FAULT_LOG")) return REAL(name)(__VA_ARGS__); \
    char one[8192], two[8192]; \
    (void)one, (void)two; \
    pthread_mutex_lock(&order); \
    before; \
    result value = REAL(name)(__VA_ARGS__); \
    int error = errno; \
    if (value >= 0) after; \
    pthread_mutex_unlock(&order); \
    errno = error; \
    return value;
#define WRAP(letter, relevant, result, name, parameters, after, ...) \
    result name parameters { MAKE(letter, relevant, result, name, , after, __VA_ARGS__) }
#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }
#define OPENED(path) \
    { \
        if (!was && (flags & O_CREAT)) record('o', inode_of(value, NULL), 0, path, NULL, NULL, 0); \
        if (was && (flags & O_TRUNC)) record('t', was, 0, NULL, NULL, NULL, 0); \
    }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        MODE \
        MAKE('o', below(path), int, name, long was = inode_of(-1, path), OPENED(path), path, flags, mode) \
    }
#define OPEN_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        MODE \
        MAKE('o', named(folder, path), int, name, long was = inode_of(-1, absolute(folder, path, one)), \
             OPENED(absolute(folder, path, one)), folder, path, flags, mode) \
    }
#define WRITTEN(file) record_content(file, lseek(file, 0, SEEK_CUR) - value, value)
#define NAMED(letter, path, other, number) record(letter, inode_of(-1, other ? other : path), number, path, other, NULL, 0)
#define MADE(path) record('m', inode_of(-1, path), 0, path, NULL, NULL, 0)
#define ABOUT(letter, file, number) record(letter, inode_of(file, NULL), number, NULL, NULL, NULL, 0)

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)
WRAP('w', holds(file), ssize_t, write, (int file, const void *text, size_t size), WRITTEN(file), file, text, size)
WRAP('w', holds(file), ssize_t, writev, (int file, const struct iovec *parts, int count), WRITTEN(file), file, parts, count)
WRAP('w', holds(file), ssize_t, pwrite, (int file, const void *text, size_t size, off_t at), record_content(file, at, value), file, text, size, at)
WRAP('w', holds(file), ssize_t, pwrite64, (int file, const void *text, size_t size, off64_t at), record_content(file, at, value), file, text, size, at)
WRAP('w', holds(file), ssize_t, sendfile, (int file, int from, off_t *at, size_t size), WRITTEN(file), file, from, at, size)
WRAP('w', holds(file), ssize_t, sendfile64, (int file, int from, off64_t *at, size_t size), WRITTEN(file), file, from, at, size)
WRAP('t', holds(file), int, ftruncate, (int file, off_t size), ABOUT('t', file, size), file, size)
WRAP('t', holds(file), int, ftruncate64, (int file, off64_t size), ABOUT('t', file, size), file, size)
WRAP('f', holds(file), int, fsync, (int file), ABOUT('f', file, 0), file)
WRAP('f', holds(file), int, fdatasync, (int file), ABOUT('f', file, 0), file)
WRAP('r', below(old), int, rename, (const char *old, const char *new), NAMED('r', old, new, 0), old, new)
WRAP('r', named(f, old), int, renameat, (int f, const char *old, int g, const char *new),
     NAMED('r', absolute(f, old, one), absolute(g, new, two), 0), f, old, g, new)
WRAP('r', named(f, old), int, renameat2, (int f, const char *old, int g, const char *new, unsigned flags),
     NAMED('r', absolute(f, old, one), absolute(g, new, two), flags), f, old, g, new, flags)
WRAP('u', below(path), int, unlink, (const char *path), NAMED('u', path, NULL, 0), path)
WRAP('u', named(folder, path), int, unlinkat, (int folder, const char *path, int flags),
     NAMED('u', absolute(folder, path, one), NULL, 0), folder, path, flags)
WRAP('u', below(path), int, rmdir, (const char *path), NAMED('u', path, NULL, 0), path)
WRAP('m', below(path), int, mkdir, (const char *path, mode_t mode), MADE(path), path, mode)
WRAP('m', named(folder, path), int, mkdirat, (int folder, const char *path, mode_t mode), MADE(absolute(folder, path, one)), folder, path, mode)
