/* Fails or kills at the Nth call that changes a file below a folder, whichever library makes it.

   FAULT_FOLDER: only calls that name or hold files below this folder are counted.
   FAULT_AT: number of the call, from 0. FAULT_ERROR: errno; 0 kills. FAULT_COUNT: file that
   receives one letter for each call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(letter, relevant, result, name, parameters, ...) \
    result name parameters { \
        if ((relevant) && fails(letter)) return -1; \
        return REAL(name)(__VA_ARGS__); \
    }
#define MODE \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        MODE \
        if (below(path) && fails('o')) return -1; \
        return REAL(name)(path, flags, mode); \
    }
#define OPEN_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        MODE \
        if (named(folder, path) && fails('o')) return -1; \
        return REAL(name)(folder, path, flags, mode); \
    }

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)
WRAP('w', holds(file), ssize_t, write, (int file, const void *text, size_t size), file, text, size)
WRAP('w', holds(file), ssize_t, pwrite, (int file, const void *text, size_t size, off_t at), file, text, size, at)
WRAP('w', holds(file), ssize_t, pwrite64, (int file, const void *text, size_t size, off64_t at), file, text, size, at)
WRAP('w', holds(file), ssize_t, writev, (int file, const struct iovec *parts, int count), file, parts, count)
WRAP('f', holds(file), int, fsync, (int file), file)
WRAP('f', holds(file), int, fdatasync, (int file), file)
WRAP('r', below(old), int, rename, (const char *old, const char *new), old, new)
WRAP('r', named(f, old), int, renameat, (int f, const char *old, int g, const char *new), f, old, g, new)
WRAP('r', named(f, old), int, renameat2, (int f, const char *old, int g, const char *new, unsigned flags), f, old, g, new, flags)
WRAP('u', below(path), int, unlink, (const char *path), path)
WRAP('u', named(folder, path), int, unlinkat, (int folder, const char *path, int flags), folder, path, flags)
WRAP('u', below(path), int, rmdir, (const char *path), path)
WRAP('m', below(path), int, mkdir, (const char *path, mode_t mode), path, mode)
WRAP('m', named(folder, path), int, mkdirat, (int folder, const char *path, mode_t mode), folder, path, mode)
