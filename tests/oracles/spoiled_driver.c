/* An OpenCL driver that hands out another driver's platform, with one function of it spoiled.

   SPOILED_DRIVER: the library of the other driver. SPOILED: what happens:
   build    no program builds        hang     building never ends      crash    building ends the process
   wrong    what is read is zero     memory   no buffer is made        lost     events report -9999
   times    times of commands are counts       fork   releasing in a fork ends it */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PLATFORM_INFO = 1, RELEASE_CONTEXT = 7, RELEASE_QUEUE = 11, RELEASE_MEMORY = 18, RELEASE_PROGRAM = 29,
       RELEASE_KERNEL = 37, RELEASE_EVENT = 44, CREATE_BUFFER = 14, BUILD_PROGRAM = 30, BUILD_INFO = 33, EVENT_INFO = 42, EVENT_TIMES = 45,
       READ_BUFFER = 48 };
#define LOG "error: unknown target CPU 'generic'\n"

typedef int (*platforms_t)(unsigned, void **, unsigned *);
typedef int (*read_t)(void *, void *, unsigned, size_t, size_t, void *, unsigned, void *, void *);
typedef int (*info_t)(void *, void *, unsigned, size_t, void *, size_t *);

static read_t read_buffer;
static info_t build_info;

static void *library(void) { return dlopen(getenv("SPOILED_DRIVER"), RTLD_NOW | RTLD_LOCAL); }

static int build(void *program) { (void)program; return -11; }
static int hang(void *program) { (void)program; for (;;) pause(); return 0; }
static int crash(void *program) { (void)program; abort(); return 0; }

static int failed_info(void *program, void *device, unsigned what, size_t size, void *value, size_t *needed)
{
    if (what != 0x1183)
        return build_info(program, device, what, size, value, needed);
    if (needed) *needed = sizeof LOG;
    if (value && size >= sizeof LOG) memcpy(value, LOG, sizeof LOG);
    return 0;
}

static int zeroed(void *queue, void *buffer, unsigned blocking, size_t offset, size_t size, void *to, unsigned n,
                  void *events, void *event)
{
    int status = read_buffer(queue, buffer, 1, offset, size, to, n, events, event);
    (void)blocking;
    memset(to, 0, size);
    return status;
}

static void *no_buffer(void *context, uint64_t flags, size_t size, void *host, int *status)
{
    (void)context, (void)flags, (void)size, (void)host;
    *status = -4;
    return NULL;
}

static int lost(void *event, unsigned what, size_t size, void *value, size_t *needed)
{
    (void)event, (void)what, (void)size, (void)value, (void)needed;
    return -9999;
}

static int counted(void *event, unsigned what, size_t size, void *value, size_t *needed)
{
    uint64_t count = what - 0x1280;
    (void)event;
    if (needed) *needed = sizeof count;
    if (value && size >= sizeof count) memcpy(value, &count, sizeof count);
    return 0;
}

static pid_t first;

#define RELEASE(place)                        \
    static int (*own_##place)(void *);        \
    static int in_first_##place(void *object) \
    {                                         \
        if (getpid() != first) abort();       \
        return own_##place(object);           \
    }
RELEASE(RELEASE_CONTEXT) RELEASE(RELEASE_QUEUE) RELEASE(RELEASE_MEMORY)
RELEASE(RELEASE_PROGRAM) RELEASE(RELEASE_KERNEL) RELEASE(RELEASE_EVENT)
#define HOLD(place) own_##place = (int (*)(void *))table[place], put(table, place, in_first_##place)

static void put(void **table, int place, void *function)
{
    uintptr_t size = sysconf(_SC_PAGESIZE), page = (uintptr_t)(table + place) & ~(size - 1);
    mprotect((void *)page, 2 * size, PROT_READ | PROT_WRITE);
    table[place] = function;
}

static void spoil(void **table)
{
    const char *how = getenv("SPOILED");
    static int done;
    if (done++ || !how)
        return;
    read_buffer = (read_t)table[READ_BUFFER];
    build_info = (info_t)table[BUILD_INFO];
    if (!strcmp(how, "build")) put(table, BUILD_PROGRAM, build), put(table, BUILD_INFO, failed_info);
    if (!strcmp(how, "hang")) put(table, BUILD_PROGRAM, hang);
    if (!strcmp(how, "crash")) put(table, BUILD_PROGRAM, crash);
    if (!strcmp(how, "wrong")) put(table, READ_BUFFER, zeroed);
    if (!strcmp(how, "memory")) put(table, CREATE_BUFFER, no_buffer);
    if (!strcmp(how, "lost")) put(table, EVENT_INFO, lost);
    if (!strcmp(how, "times")) put(table, EVENT_TIMES, counted);
    if (!strcmp(how, "fork")) {
        first = getpid();
        HOLD(RELEASE_CONTEXT), HOLD(RELEASE_QUEUE), HOLD(RELEASE_MEMORY);
        HOLD(RELEASE_PROGRAM), HOLD(RELEASE_KERNEL), HOLD(RELEASE_EVENT);
    }
}

int clIcdGetPlatformIDsKHR(unsigned count, void **platforms, unsigned *found)
{
    void *(*find)(const char *) = (void *(*)(const char *))dlsym(library(), "clGetExtensionFunctionAddress");
    platforms_t get = (platforms_t)find("clIcdGetPlatformIDsKHR");
    int status = get(count, platforms, found);
    if (!status && platforms && count)
        spoil(*(void ***)platforms[0]);
    return status;
}

void *clGetExtensionFunctionAddress(const char *name)
{
    void *(*find)(const char *) = (void *(*)(const char *))dlsym(library(), "clGetExtensionFunctionAddress");
    return strcmp(name, "clIcdGetPlatformIDsKHR") ? find(name) : (void *)clIcdGetPlatformIDsKHR;
}

int clGetPlatformInfo(void *platform, unsigned what, size_t size, void *value, size_t *needed)
{
    typedef int (*get_t)(void *, unsigned, size_t, void *, size_t *);
    return (*(get_t **)platform)[PLATFORM_INFO](platform, what, size, value, needed);
}
