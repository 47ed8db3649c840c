/* Fails one operation on files under a folder, or ends the process tree at it, and notes every such operation.

   Loaded by LD_PRELOAD, it does nothing until faults_arm is called; what is forked after that shares one count.
   Renames are made by some libraries without the C library: those are caught with seccomp. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

/* Their order is that of KINDS in disk.py. */
enum kind { CREATE, OPEN, WRITE, FSYNC, RENAME, MKDIR, UNLINK, RMDIR, TRUNCATE, LINK, SYMLINK, CHMOD };
static const char *const names[] = {"create", "open",  "write",    "fsync", "rename",  "mkdir",
                                    "unlink", "rmdir", "truncate", "link",  "symlink", "chmod"};

enum { LONGEST = 4096, POWER_LOSS = -1, PASSED_BY = -1, HALF = -2 };
enum { OURS = 0x5a3eb175 }; /* sixth argument of renames that the filter lets pass */

struct shared {
    pthread_mutex_t lock;
    int count;
};

static struct shared *shared; /* NULL until armed */
static char prefix[LONGEST], trace_path[LONGEST];
static size_t prefix_length;
static int target, fault, trace_fd;
static unsigned onward; /* kinds that go on failing after the target, a bit of each */

/* An operation that is under way, with the lock held. */
struct operation {
    enum kind kind;
    int number;
    char path[LONGEST], other[LONGEST];
};

#define REAL(name)                                                                                                     \
    ({                                                                                                                 \
        static __typeof__(&name) function;                                                                             \
        if (!function) function = (__typeof__(&name))dlsym(RTLD_NEXT, #name);                                          \
        function;                                                                                                      \
    })

static void name_of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, LONGEST - 1);
    out[length < 0 ? 0 : length] = 0;
}

static void name_of(int folder, const char *path, char *out) {
    char base[LONGEST] = "";
    if (path[0] == '/') {
        snprintf(out, LONGEST, "%s", path);
        return;
    }
    if (folder != AT_FDCWD)
        name_of_fd(folder, base);
    else if (!getcwd(base, sizeof base))
        base[0] = 0;
    if (strlen(base) + strlen(path) + 2 > LONGEST)
        out[0] = 0;
    else
        sprintf(out, "%s/%s", base, path);
}

static void lock(void) {
    if (pthread_mutex_lock(&shared->lock) == EOWNERDEAD) pthread_mutex_consistent(&shared->lock);
}

static void note(const struct operation *op, int outcome) {
    char line[2 * LONGEST + 128];
    int length = snprintf(line, sizeof line, "%d\t%s\t%d\t%s\t%s\n", op->number, names[op->kind], outcome, op->path,
                          op->other);
    syscall(SYS_write, trace_fd, line, (size_t)length);
}

static int is_under(const char *path) {
    return !strncmp(path, prefix, prefix_length) && (path[prefix_length] == '/' || !path[prefix_length]);
}

/* 0: go on, and call end. HALF: write a half, and call end. PASSED_BY: it is none of ours. Else the error to fail with. */
static int begin(struct operation *op, enum kind kind) {
    if (!is_under(op->path) && !is_under(op->other)) return PASSED_BY;
    lock();
    op->kind = kind;
    op->number = shared->count++;
    int here = op->number == target;
    if (!fault || !(here || (op->number > target && onward >> kind & 1))) return 0;
    note(op, fault);
    if (fault == POWER_LOSS) {
        kill(0, SIGKILL);
        for (;;) pause();
    }
    if (here && kind == WRITE && fault == ENOSPC) return HALF;
    pthread_mutex_unlock(&shared->lock);
    return fault;
}

/* What a file held when it was last brought to the disk. */
static void keep_content(int fd, int number) {
    struct stat status;
    char name[LONGEST + 32], block[65536];
    if (fstat(fd, &status) || !S_ISREG(status.st_mode)) return;
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    int from = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC);
    snprintf(name, sizeof name, "%s.%d", trace_path, number);
    int to = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    ssize_t size;
    while ((size = read(from, block, sizeof block)) > 0) syscall(SYS_write, to, block, (size_t)size);
    close(from);
    close(to);
}

static void end(const struct operation *op, long result, int fd) {
    int saved = errno;
    if (op->kind == FSYNC && result >= 0) keep_content(fd, op->number);
    note(op, result < 0 ? saved : 0);
    pthread_mutex_unlock(&shared->lock);
    errno = saved;
}

/* Make one operation, unless it is the one to fail; name_it writes its paths into op. */
#define MAKE(kind_, fd_, name_it, call)                                                                                \
    do {                                                                                                               \
        if (!shared) return call;                                                                                      \
        struct operation op = {0};                                                                                     \
        name_it;                                                                                                       \
        int verdict = begin(&op, kind_);                                                                               \
        if (verdict == PASSED_BY) return call;                                                                         \
        if (verdict > 0) {                                                                                             \
            errno = verdict;                                                                                           \
            return -1;                                                                                                 \
        }                                                                                                              \
        __typeof__(call) result = call;                                                                                \
        end(&op, result, fd_);                                                                                         \
        return result;                                                                                                 \
    } while (0)
#define ON_PATH(kind, folder_, path_, call) MAKE(kind, -1, name_of(folder_, path_, op.path), call)
#define ON_PATHS(kind, folder_, path_, to_folder_, to_, call)                                                          \
    MAKE(kind, -1, (name_of(folder_, path_, op.path), name_of(to_folder_, to_, op.other)), call)
#define ON_FD(kind, fd, call) MAKE(kind, fd, name_of_fd(fd, op.path), call)

/* -- opening ------------------------------------------------------------------------------------------------------ */

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || (flags & (O_CREAT | O_TRUNC)); }

static enum kind opening(int folder, const char *path, int flags) {
    return flags & O_CREAT && syscall(SYS_faccessat, folder, path, F_OK) ? CREATE : OPEN;
}

/* A function that opens; its parameters are path, flags and perhaps the folder, its arguments those and the mode. */
#define OPENS(name, folder_, parameters, arguments)                                                                    \
    int name parameters {                                                                                              \
        mode_t mode = 0;                                                                                               \
        if (flags & (O_CREAT | __O_TMPFILE)) {                                                                         \
            va_list rest;                                                                                              \
            va_start(rest, flags);                                                                                     \
            mode = va_arg(rest, mode_t);                                                                               \
            va_end(rest);                                                                                              \
        }                                                                                                              \
        if (!writes(flags) || !shared) return REAL(name) arguments;                                                    \
        ON_PATH(opening(folder_, path, flags), folder_, path, REAL(name) arguments);                                   \
    }
OPENS(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPENS(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
OPENS(openat, folder, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
OPENS(openat64, folder, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))

int creat(const char *path, mode_t mode) { return open(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

int creat64(const char *path, mode_t mode) { return open64(path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

/* -- contents ----------------------------------------------------------------------------------------------------- */

/* A disk that gets full takes a part of what is written to it. */
ssize_t write(int fd, const void *bytes, size_t size) {
    if (!shared) return REAL(write)(fd, bytes, size);
    struct operation op = {0};
    name_of_fd(fd, op.path);
    int verdict = begin(&op, WRITE);
    if (verdict == PASSED_BY) return REAL(write)(fd, bytes, size);
    if (verdict > 0 || (verdict == HALF && size < 2)) {
        if (verdict == HALF) pthread_mutex_unlock(&shared->lock);
        errno = verdict == HALF ? ENOSPC : verdict;
        return -1;
    }
    ssize_t written = REAL(write)(fd, bytes, verdict == HALF ? size / 2 : size);
    end(&op, written, fd);
    return written;
}

ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) {
    ON_FD(WRITE, fd, REAL(pwrite64)(fd, bytes, size, offset));
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) { return pwrite64(fd, bytes, size, offset); }

ssize_t writev(int fd, const struct iovec *parts, int count) { ON_FD(WRITE, fd, REAL(writev)(fd, parts, count)); }

int fsync(int fd) { ON_FD(FSYNC, fd, REAL(fsync)(fd)); }

int fdatasync(int fd) { ON_FD(FSYNC, fd, REAL(fdatasync)(fd)); }

int ftruncate(int fd, off_t size) { ON_FD(TRUNCATE, fd, REAL(ftruncate)(fd, size)); }

int ftruncate64(int fd, off64_t size) { ON_FD(TRUNCATE, fd, REAL(ftruncate64)(fd, size)); }

int truncate(const char *path, off_t size) { ON_PATH(TRUNCATE, AT_FDCWD, path, REAL(truncate)(path, size)); }

int truncate64(const char *path, off64_t size) { ON_PATH(TRUNCATE, AT_FDCWD, path, REAL(truncate64)(path, size)); }

/* -- names -------------------------------------------------------------------------------------------------------- */

int mkdir(const char *path, mode_t mode) { ON_PATH(MKDIR, AT_FDCWD, path, REAL(mkdir)(path, mode)); }

int mkdirat(int folder, const char *path, mode_t mode) {
    ON_PATH(MKDIR, folder, path, REAL(mkdirat)(folder, path, mode));
}

int unlink(const char *path) { ON_PATH(UNLINK, AT_FDCWD, path, REAL(unlink)(path)); }

int unlinkat(int folder, const char *path, int flags) {
    ON_PATH(flags & AT_REMOVEDIR ? RMDIR : UNLINK, folder, path, REAL(unlinkat)(folder, path, flags));
}

int rmdir(const char *path) { ON_PATH(RMDIR, AT_FDCWD, path, REAL(rmdir)(path)); }

int link(const char *from, const char *to) { ON_PATHS(LINK, AT_FDCWD, from, AT_FDCWD, to, REAL(link)(from, to)); }

int linkat(int folder, const char *from, int to_folder, const char *to, int flags) {
    ON_PATHS(LINK, folder, from, to_folder, to, REAL(linkat)(folder, from, to_folder, to, flags));
}

int symlink(const char *content, const char *path) { ON_PATH(SYMLINK, AT_FDCWD, path, REAL(symlink)(content, path)); }

int symlinkat(const char *content, int folder, const char *path) {
    ON_PATH(SYMLINK, folder, path, REAL(symlinkat)(content, folder, path));
}

int chmod(const char *path, mode_t mode) { ON_PATH(CHMOD, AT_FDCWD, path, REAL(chmod)(path, mode)); }

int fchmod(int fd, mode_t mode) { ON_FD(CHMOD, fd, REAL(fchmod)(fd, mode)); }

int fchmodat(int folder, const char *path, mode_t mode, int flags) {
    ON_PATH(CHMOD, folder, path, REAL(fchmodat)(folder, path, mode, flags));
}

static int rename_at(int folder, const char *from, int to_folder, const char *to, unsigned flags) {
#define MOVE (int)syscall(SYS_renameat2, folder, from, to_folder, to, flags, OURS)
    ON_PATHS(RENAME, folder, from, to_folder, to, MOVE);
}

int rename(const char *from, const char *to) { return rename_at(AT_FDCWD, from, AT_FDCWD, to, 0); }

int renameat(int folder, const char *from, int to_folder, const char *to) {
    return rename_at(folder, from, to_folder, to, 0);
}

int renameat2(int folder, const char *from, int to_folder, const char *to, unsigned flags) {
    return rename_at(folder, from, to_folder, to, flags);
}

/* -- renames without the C library -------------------------------------------------------------------------------- */

#if defined(__x86_64__)
#define ARCHITECTURE AUDIT_ARCH_X86_64
#define ARGUMENT(context, i)                                                                                           \
    ((context)->uc_mcontext.gregs[(const int[]){REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8}[i]])
#define RESULT(context) ((context)->uc_mcontext.gregs[REG_RAX])
#elif defined(__aarch64__)
#define ARCHITECTURE AUDIT_ARCH_AARCH64
#define ARGUMENT(context, i) ((context)->uc_mcontext.regs[i])
#define RESULT(context) ((context)->uc_mcontext.regs[0])
#else
#error "the fault campaign runs on x86_64 and aarch64"
#endif

static void on_rename(int signum, siginfo_t *info, void *context_) {
    (void)signum;
    ucontext_t *context = context_;
    unsigned flags = info->si_syscall == SYS_renameat2 ? (unsigned)ARGUMENT(context, 4) : 0;
    int saved = errno;
    int result = rename_at((int)ARGUMENT(context, 0), (const char *)ARGUMENT(context, 1), (int)ARGUMENT(context, 2),
                           (const char *)ARGUMENT(context, 3), flags);
    RESULT(context) = result < 0 ? -errno : result;
    errno = saved;
}

static int catch_renames(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 0, 5),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat2, 0, 2),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[5])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OURS, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    struct sigaction action = {.sa_sigaction = on_rename, .sa_flags = SA_SIGINFO | SA_NODEFER};
    return sigaction(SIGSYS, &action, NULL) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* From here on, in this process and what it forks, operations under a folder are noted in a file, and the one of a
   number, from 0, fails with an error: 0 for none, -1 for the loss of power. Returns 0, or an errno. */
int faults_arm(const char *folder, int number, int error, unsigned kinds_onward, const char *trace) {
    pthread_mutexattr_t attributes;
    struct shared *memory = mmap(NULL, sizeof *memory, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return errno;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&memory->lock, &attributes);
    snprintf(prefix, sizeof prefix, "%s", folder);
    prefix_length = strlen(prefix);
    snprintf(trace_path, sizeof trace_path, "%s", trace);
    target = number;
    fault = error;
    onward = kinds_onward;
    trace_fd = open(trace, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (trace_fd < 0 || catch_renames()) return errno;
    shared = memory;
    return 0;
}
