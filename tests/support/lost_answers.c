/* A file server that does what it is asked, loses its answer, and is asked again: preloaded into a process, every call
 * of the kinds in LOST_ANSWERS that worked fails as its second attempt would. LOST_SEED takes half of them, at random.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>

static int loses(const char *kind)
{
    static unsigned state;
    const char *kinds = getenv("LOST_ANSWERS"), *seed = getenv("LOST_SEED");
    if (!kinds || !strstr(kinds, kind)) return 0;
    if (!seed || !*seed) return 1;
    if (!state) state = 2 * (unsigned)atoi(seed) + 1;
    state = state * 1103515245u + 12345u;
    return (state >> 16) & 1;
}

#define CALL(kind, error, name, parameters, ...)                                          \
    int name parameters                                                                   \
    {                                                                                     \
        static int (*real) parameters;                                                    \
        if (!real) real = (int (*) parameters)dlsym(RTLD_NEXT, #name);                    \
        int done = real(__VA_ARGS__);                                                     \
        if (done == 0 && loses(kind)) {                                                   \
            errno = error;                                                                \
            return -1;                                                                    \
        }                                                                                 \
        return done;                                                                      \
    }

CALL("link", EEXIST, link, (const char *a, const char *b), a, b)
CALL("link", EEXIST, linkat, (int i, const char *a, int j, const char *b, int f), i, a, j, b, f)
CALL("rename", ENOENT, rename, (const char *a, const char *b), a, b)
CALL("rename", ENOENT, renameat, (int i, const char *a, int j, const char *b), i, a, j, b)
CALL("sym", EEXIST, symlink, (const char *a, const char *b), a, b)
CALL("sym", EEXIST, symlinkat, (const char *a, int i, const char *b), a, i, b)
CALL("folder", EEXIST, mkdir, (const char *a, mode_t m), a, m)
CALL("folder", EEXIST, mkdirat, (int i, const char *a, mode_t m), i, a, m)
CALL("rmdir", ENOENT, rmdir, (const char *a), a)
CALL("remove", ENOENT, unlink, (const char *a), a)
CALL("remove", ENOENT, unlinkat, (int i, const char *a, int f), i, a, f)
