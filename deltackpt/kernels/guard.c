/* A file that another process shortens while it is mapped here: reading past its new end is SIGBUS, which ends a process.
 *
 * Mappings that are only read can be guarded. Where one of them loses its file, zeros stand in its place from there on,
 * and the mapping is marked as torn: its reader looks at the mark afterwards, and uses nothing of it.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common.h"

#define GUARDS 65536

typedef struct {
    uintptr_t start, end; /* whole pages; 0, 0 if it is free */
    int torn;
} guard_t;

static guard_t guards[GUARDS];
static int used; /* guards from here on were never taken */
static uintptr_t page = 4096;
static struct sigaction before;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Of a fault that is not ours: as if this handler were not there. */
static void pass_on(int number, siginfo_t *info, void *context) {
    const int sent = info->si_code <= 0; /* by a process, such as by a handler that was called for the fault and is done */
    if (!sent && before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (!sent && before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else {
        signal(number, SIG_DFL);
        if (sent) raise(number); /* else the same instruction faults again */
    }
}

static void on_fault(int number, siginfo_t *info, void *context) {
    const uintptr_t at = (uintptr_t)info->si_addr;
    const int error = errno, count = __atomic_load_n(&used, __ATOMIC_ACQUIRE);
    for (int i = 0; info->si_code > 0 && i < count; i++) {
        guard_t *g = &guards[i];
        const uintptr_t end = __atomic_load_n(&g->end, __ATOMIC_ACQUIRE);
        if (at < __atomic_load_n(&g->start, __ATOMIC_ACQUIRE) || at >= end) continue;
        /* All that follows: the file ends before it. */
        void *from = (void *)(at & ~(page - 1));
        const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
        if (mmap(from, end - (uintptr_t)from, PROT_READ, how, -1, 0) == MAP_FAILED) break;
        __atomic_store_n(&g->torn, 1, __ATOMIC_RELEASE);
        errno = error;
        return;
    }
    errno = error;
    pass_on(number, info, context);
}

/* Called for each guard: what was installed after this handler, such as Python's faulthandler, is called by it then. */
static int install(void) {
    struct sigaction now, ours;
    if (sigaction(SIGBUS, NULL, &now)) return -1;
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == on_fault) return 0;
    before = now;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    return sigaction(SIGBUS, &ours, NULL);
}

/* Guard a mapping that is only read. -> its number, or -1 if there is no room, or no handler can be installed */
EXPORT int64_t dk_guard_add(const void *start, int64_t size) {
    int64_t found = -1;
    pthread_mutex_lock(&lock);
    page = (uintptr_t)sysconf(_SC_PAGESIZE);
    if (!install()) {
        for (int i = 0; i < GUARDS && found < 0; i++)
            if (i >= used || !guards[i].end) found = i;
    }
    if (found >= 0) {
        guard_t *g = &guards[found];
        const uintptr_t end = ((uintptr_t)start + (uintptr_t)size + page - 1) & ~(page - 1);
        g->torn = 0;
        __atomic_store_n(&g->start, (uintptr_t)start, __ATOMIC_RELEASE);
        __atomic_store_n(&g->end, end, __ATOMIC_RELEASE);
        if (found >= used) __atomic_store_n(&used, (int)found + 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&lock);
    return found;
}

EXPORT int dk_guard_torn(int64_t number) {
    return __atomic_load_n(&guards[number].torn, __ATOMIC_ACQUIRE);
}

/* Before the mapping is gone: another one may be there a moment later. */
EXPORT void dk_guard_remove(int64_t number) {
    __atomic_store_n(&guards[number].end, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&guards[number].start, 0, __ATOMIC_RELEASE);
}
