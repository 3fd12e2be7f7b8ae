// Runs threadgroups of a kernel on one operating-system thread: every thread of a threadgroup is a fiber that runs until
// it waits. Kernels that never wait are called thread by thread.
#define MSL_RUNTIME
#include "metal_stdlib"
#undef device
#undef constant
#undef threadgroup
#undef thread
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <vector>

#ifdef __has_feature
#if __has_feature(thread_sanitizer)
#define MSL_TSAN 1
#include <sanitizer/tsan_interface.h>
#endif
#endif
#ifdef MSL_WITH_TSAN
#define MSL_TSAN 1
#include <sanitizer/tsan_interface.h>
#endif

// Saves the callee's registers and stack of one fiber and takes up another.
extern "C" void msl_switch(void** save, void* load);
asm(R"(
.text
.globl msl_switch
.type msl_switch,@function
msl_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size msl_switch,.-msl_switch
)");

namespace msl {
typedef void (*Function)(void** arguments, const Place* place);

enum class State : unsigned char { Ready, AtSimd, AtBarrier, Done };

struct Fiber {
    void* stack_pointer;
    State state;
    int site;
    Place place;
#ifdef MSL_TSAN
    void* tsan;  // one of the group's contexts
#endif
};

struct alignas(16) Simdgroup {
    char slots[2][32 * 16];  // two exchanges in turn: a lane may run ahead by one
    char results[2][16];
    uint taken[2];   // which exchange the result belongs to
    uint exchanges;  // finished so far
    char tags[2];    // what ThreadSanitizer knows the two by
};

constexpr size_t STACK = 256 << 10;
constexpr size_t SHARED = 32 << 10;
#ifdef MSL_TSAN
/// Threads that ThreadSanitizer tells apart in a threadgroup: it knows 255 at a time, and misses races beyond. Several
/// lanes of a simdgroup share one, neighbours never do.
constexpr uint CONTEXTS = 32;
#endif

/// The threadgroup that this operating-system thread runs.
struct Group {
    std::vector<Fiber> fibers;
    std::vector<char*> stacks;
    std::vector<Simdgroup> simdgroups;
    std::vector<uint> counts;  // exchanges that each fiber has entered
    std::vector<uint> order;   // simdgroups in the order in which they run
    char* shared = nullptr;
    size_t used = 0, dynamic = 0;
    size_t offsets[256];
    uint current = 0, threads = 0, waiting = 0, done = 0;
    Function function = nullptr;
    void** arguments = nullptr;
    void* main_pointer = nullptr;
    char error[256];
    bool failed = false;
    char begin, end, tags[2];  // start, end and barriers in turn, for ThreadSanitizer
    uint barriers = 0;         // finished so far
#ifdef MSL_TSAN
    void* tsan_main;
    void* contexts[CONTEXTS] = {};
#endif
};

static thread_local Group* group;

const Place& place() { return group->fibers[group->current].place; }

static void leave() {
#ifdef MSL_TSAN
    __tsan_switch_to_fiber(group->tsan_main, __tsan_switch_to_fiber_no_sync);
#endif
    void* dropped;
    msl_switch(&dropped, group->main_pointer);
    __builtin_trap();
}

/// Ends the threadgroup with a message.
void fail(const char* what) {
    Group* g = group;
    const Fiber& f = g->fibers[g->current];
    // A thread that has ended stands nowhere: one that waits tells the place.
    int site = f.state == State::Done ? 0 : f.site;
    for (uint i = 0; i < g->threads && site == 0; i++) if (g->fibers[i].state != State::Done) site = g->fibers[i].site;
    snprintf(g->error, sizeof g->error, "%s (thread %u of group %u,%u,%u, line %d)", what, g->current, f.place.group.x,
             f.place.group.y, f.place.group.z, site);
    g->failed = true;
    leave();
    __builtin_unreachable();
}

static void go(uint to) {
    Group* g = group;
    uint from = g->current;
    if (to == from) return;
    g->current = to;
#ifdef MSL_TSAN
    if (g->fibers[to].tsan != g->fibers[from].tsan) {
        __tsan_switch_to_fiber(g->fibers[to].tsan, __tsan_switch_to_fiber_no_sync);
    }
#endif
    msl_switch(&g->fibers[from].stack_pointer, g->fibers[to].stack_pointer);
}

/// Whether all lanes of a simdgroup wait at the same call; then they are ready again.
static bool wake_simdgroup(uint s) {
    Group* g = group;
    uint begin = s * 32, end = begin + 32;
    uint waiting = 0;
    int site = 0;
    for (uint i = begin; i < end; i++) {
        const Fiber& f = g->fibers[i];
        if (f.state == State::Ready) return false;
        if (f.state == State::AtSimd) {
            if (waiting++ == 0) site = f.site;
            else if (f.site != site) fail("lanes of a simdgroup are at different simd operations");
        }
    }
    if (waiting == 0) return false;
    if (waiting < 32) fail("a simd operation is not reached by all lanes of its simdgroup");
    for (uint i = begin; i < end; i++) g->fibers[i].state = State::Ready;
    g->simdgroups[s].exchanges++;
    return true;
}

static bool wake_group() {
    Group* g = group;
    if (g->waiting == 0 || g->waiting + g->done < g->threads) return false;
    if (g->done > 0) fail("threadgroup_barrier is not reached by all threads");
    for (uint i = 1; i < g->threads; i++) {
        if (g->fibers[i].site != g->fibers[0].site) fail("threads wait at different threadgroup_barrier calls");
    }
    for (uint i = 0; i < g->threads; i++) g->fibers[i].state = State::Ready;
    g->waiting = 0;
    g->barriers++;
    return true;
}

/// Runs another fiber; returns when this one may go on.
static void schedule() {
    Group* g = group;
    for (;;) {
        uint begin = g->current & ~31u, end = begin + 32;
        for (uint i = g->current + 1; i < end; i++) if (g->fibers[i].state == State::Ready) return go(i);
        for (uint i = begin; i <= g->current; i++) if (g->fibers[i].state == State::Ready) return go(i);
        if (wake_simdgroup(begin / 32)) continue;
        for (uint s : g->order) {
            for (uint i = s * 32; i < s * 32 + 32; i++) if (g->fibers[i].state == State::Ready) return go(i);
        }
        if (wake_group()) return go(g->order[0] * 32);
        if (g->done == g->threads) leave();
        fail("some threads wait at a simd operation, others at a barrier or at the end");
    }
}

void barrier(int site) {
    Group* g = group;
    Fiber& f = g->fibers[g->current];
    f.site = site;
    f.state = State::AtBarrier;
    g->waiting++;
#ifdef MSL_TSAN
    // Two in turn: a thread that runs ahead to the next barrier tells nothing to those that still leave this one.
    char* tag = &g->tags[g->barriers & 1];
    __tsan_release(tag);
#endif
    schedule();
#ifdef MSL_TSAN
    __tsan_acquire(tag);
#endif
}

char* exchange(const void* value, size_t bytes, int site) {
    Group* g = group;
    uint at = g->current;
    Fiber& f = g->fibers[at];
    Simdgroup& s = g->simdgroups[at / 32];
    uint turn = g->counts[at]++ & 1;
    char* slots = s.slots[turn];
    memcpy(slots + 16 * (at % 32), value, bytes);
    f.site = site;
    f.state = State::AtSimd;
#ifdef MSL_TSAN
    __tsan_release(&s.tags[turn]);
#endif
    schedule();
#ifdef MSL_TSAN
    __tsan_acquire(&s.tags[turn]);
#endif
    (void)turn;
    return slots;
}

char* result(bool& first) {
    Group* g = group;
    Simdgroup& s = g->simdgroups[g->current / 32];
    uint number = g->counts[g->current];
    first = s.taken[number & 1] != number;
    s.taken[number & 1] = number;
    return s.results[number & 1];
}

void* shared(int id, size_t bytes) {
    Group* g = group;
    if (g->offsets[id & 255] == SIZE_MAX) {
        if (g->used + g->dynamic + bytes > SHARED) fail("more than 32 KiB of threadgroup memory");
        g->offsets[id & 255] = g->used;
        g->used += (bytes + 15) & ~size_t(15);
    }
    return g->shared + g->offsets[id & 255];
}

static void enter() {
    Group* g = group;
#ifdef MSL_TSAN
    __tsan_acquire(&g->begin);
#endif
    g->function(g->arguments, &g->fibers[g->current].place);
    g = group;
    g->fibers[g->current].state = State::Done;
    g->done++;
#ifdef MSL_TSAN
    __tsan_release(&g->end);
#endif
    schedule();
    __builtin_trap();
}

static void* map(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) abort();
    return p;
}

struct Grid {
    uint groups[3], threads[3];
    uint shared;    // dynamic threadgroup memory
    uint shuffle;   // 0, or the seed of another order of the simdgroups
    uint waits;     // whether the kernel waits
};

static Place at(const Grid& grid, uint3 position, uint i) {
    const uint *g = grid.groups, *t = grid.threads;
    uint3 local = {i % t[0], i / t[0] % t[1], i / t[0] / t[1]};
    uint3 threads = {t[0], t[1], t[2]}, groups = {g[0], g[1], g[2]};
    uint n = t[0] * t[1] * t[2];
    return {position * threads + local, local, position, threads, groups, groups * threads, i, i % 32, i / 32, (n + 31) / 32};
}

static void run_group(Group& g, Function function, void** arguments, const Grid& grid, uint number) {
    uint3 position = {number % grid.groups[0], number / grid.groups[0] % grid.groups[1], number / grid.groups[0] / grid.groups[1]};
    g.threads = grid.threads[0] * grid.threads[1] * grid.threads[2];
    if (!grid.waits) {
        for (uint i = 0; i < g.threads; i++) {
            Place p = at(grid, position, i);
            function(arguments, &p);
        }
        return;
    }
    group = &g;
    g.function = function;
    g.arguments = arguments;
    g.waiting = g.done = g.barriers = 0;
    g.used = 0;
    g.dynamic = grid.shared;
    std::fill(std::begin(g.offsets), std::end(g.offsets), SIZE_MAX);
    if (!g.shared) g.shared = (char*)map(2 * SHARED);
    memset(g.shared, 0xff, 2 * SHARED);  // NaN, and no valid index
    arguments[31] = g.shared + SHARED;
    uint simdgroups = g.threads / 32;
    if (g.fibers.size() < g.threads) g.fibers.resize(g.threads);
    g.counts.assign(g.threads, 0);
    g.simdgroups.resize(simdgroups);
    for (Simdgroup& s : g.simdgroups) s.taken[0] = s.taken[1] = s.exchanges = 0;
    g.order.resize(simdgroups);
    for (uint i = 0; i < simdgroups; i++) g.order[i] = i;
    for (uint i = simdgroups, seed = grid.shuffle + number * (grid.shuffle != 0); seed && i > 1; i--) {
        seed = seed * 1664525u + 1013904223u;
        std::swap(g.order[i - 1], g.order[(seed >> 8) % i]);
    }
    while (g.stacks.size() < g.threads) g.stacks.push_back((char*)map(STACK));
#ifdef MSL_TSAN
    g.tsan_main = __tsan_get_current_fiber();
    __tsan_release(&g.begin);
    uint apart = simdgroups < CONTEXTS ? CONTEXTS / simdgroups : 1;
#endif
    for (uint i = 0; i < g.threads; i++) {
        Fiber& f = g.fibers[i];
        f.place = at(grid, position, i);
        f.state = State::Ready;
        f.site = 0;
        void** sp = (void**)(g.stacks[i] + STACK - 64);
        *--sp = nullptr;
        *--sp = (void*)enter;
        for (int k = 0; k < 6; k++) *--sp = nullptr;
        f.stack_pointer = sp;
#ifdef MSL_TSAN
        void*& context = g.contexts[(i / 32 * apart + i % 32 % apart) % CONTEXTS];
        if (!context) context = __tsan_create_fiber(0);
        f.tsan = context;
#endif
    }
    g.current = g.order[0] * 32;
#ifdef MSL_TSAN
    __tsan_switch_to_fiber(g.fibers[g.current].tsan, __tsan_switch_to_fiber_no_sync);
#endif
    msl_switch(&g.main_pointer, g.fibers[g.current].stack_pointer);
#ifdef MSL_TSAN
    __tsan_acquire(&g.end);
#endif
    group = nullptr;
}
}  // namespace msl

/// Runs threadgroups, taking their numbers from `next` until `total`. 0, or 1 with a message of at most 256 bytes.
extern "C" int msl_run(msl::Function function, void* const* bindings, const msl::Grid* grid, uint* next, uint total, char* message) {
    static thread_local msl::Group g;
    void* arguments[32];
    memcpy(arguments, bindings, sizeof arguments);
    for (uint n; (n = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < total;) {
        msl::run_group(g, function, arguments, *grid, n);
        if (g.failed) {
            memcpy(message, g.error, sizeof g.error);
            g.failed = false;
            __atomic_store_n(next, total, __ATOMIC_RELAXED);
            return 1;
        }
    }
    return 0;
}
