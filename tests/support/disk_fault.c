/* Makes system calls on one directory fail, as a control file says. Preloaded into a daemon by tests.
 *
 * DISK_FAULT_CONTROL names a file that holds the number of an error and the names of calls, such as "5 pwrite fsync";
 * an empty or missing file means no fault. DISK_FAULT_DIRECTORY is the directory.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static int lies_there(int fd) {
    const char *directory = getenv("DISK_FAULT_DIRECTORY");
    char link[64], path[4096];
    if (directory == NULL || fd < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return strncmp(path, directory, strlen(directory)) == 0;
}

/* The error that a call shall end with, 0 for none. */
static int fault(const char *call, int fd) {
    const char *control = getenv("DISK_FAULT_CONTROL");
    char text[256];
    if (control == NULL) return 0;
    int file = syscall(SYS_openat, AT_FDCWD, control, O_RDONLY | O_CLOEXEC, 0);
    if (file < 0) return 0;
    ssize_t length = syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    if (length <= 0) return 0;
    text[length] = 0;
    char *save = NULL, *word = strtok_r(text, " \n", &save);
    int number = word == NULL ? 0 : atoi(word);
    while (number && (word = strtok_r(NULL, " \n", &save)) != NULL)
        if (strcmp(word, call) == 0) return lies_there(fd) ? number : 0;
    return 0;
}

#define FAIL_IF(call, fd) do { int number = fault(call, fd); if (number) { errno = number; return -1; } } while (0)
#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)

#define OPENAT(name) \
    int name(int dir_fd, const char *path, int flags, ...) { \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); } \
        REAL(name); \
        FAIL_IF(flags & O_CREAT ? "create" : "open", dir_fd); \
        return real(dir_fd, path, flags, mode); \
    }
OPENAT(openat)
OPENAT(openat64)

#define PWRITE(name, offset_t) \
    ssize_t name(int fd, const void *data, size_t size, offset_t offset) { REAL(name); FAIL_IF("pwrite", fd); return real(fd, data, size, offset); }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define PREAD(name, offset_t) \
    ssize_t name(int fd, void *data, size_t size, offset_t offset) { REAL(name); FAIL_IF("pread", fd); return real(fd, data, size, offset); }
PREAD(pread, off_t)
PREAD(pread64, off64_t)

#define FALLOCATE(name, offset_t) \
    int name(int fd, offset_t offset, offset_t size) { REAL(name); int number = fault("fallocate", fd); return number ? number : real(fd, offset, size); }
FALLOCATE(posix_fallocate, off_t)
FALLOCATE(posix_fallocate64, off64_t)

int fsync(int fd) { REAL(fsync); FAIL_IF("fsync", fd); return real(fd); }
int mkdirat(int fd, const char *path, mode_t mode) { REAL(mkdirat); FAIL_IF("mkdir", fd); return real(fd, path, mode); }
int unlinkat(int fd, const char *path, int flags) { REAL(unlinkat); FAIL_IF("unlink", fd); return real(fd, path, flags); }
int renameat(int from, const char *old, int to, const char *new) { REAL(renameat); FAIL_IF("rename", to); return real(from, old, to, new); }
