// Runs a record of a device's calls (capture.rs) with instrumented kernels, and compares what was read.
//
// Threadgroups are dealt out to a few threads of the system in turn, which ThreadSanitizer sees as concurrent: nothing
// orders them but the barriers of the dispatches. Who tells the threads what to do is hidden from it (no instrumentation
// here, futexes by number), so that a report does not depend on chance. Buffers have their own allocation, of exactly
// their length.
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#ifdef MSL_WITH_TSAN
#include <sanitizer/tsan_interface.h>
#else
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif

typedef void (*Function)(void** arguments, const void* place);
struct Grid {
    uint32_t groups[3], threads[3], shared, shuffle, waits;
};
extern "C" int msl_run(Function, void* const* bindings, const Grid*, uint32_t* next, uint32_t total, char* message);

#define KERNEL(name, waits) extern "C" void msl_kernel_##name(void**, const void*);
#define CONSTANT(file, id) extern "C" uint32_t msl_constant_##file##_##id;
TABLE
#undef KERNEL
#undef CONSTANT

struct Kernel {
    Function function;
    bool waits;
};
static std::map<std::string, Kernel> kernels;
static std::map<std::string, uint32_t*> constants;

static std::string label = "the first calls";

[[noreturn]] static void end(const std::string& what) {
    fprintf(stderr, "%s: %s\n", label.c_str(), what.c_str());
    fflush(stderr);
    _exit(3);
}

// The workers.
constexpr uint32_t WORKERS = 4;
enum class Order { Run, Release, Acquire, Stop };
static Order order;
static std::atomic<uint32_t> turn, busy;
static char tag;

static struct {
    Function function;
    void* bindings[32];
    Grid grid;
    uint32_t total, first;
    std::string name;
} job;

// The sanitizers call these before they end the program.
static void tell() { fprintf(stderr, "%s: kernel %s\n", label.c_str(), job.name.c_str()); }
extern "C" void __tsan_on_report(void*) { tell(); }
extern "C" void __asan_on_error() { tell(); }
extern "C" void __ubsan_on_report() { tell(); }

static void wait(std::atomic<uint32_t>& word, uint32_t value) {
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

static void wake(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

static void work(uint32_t worker) {
    for (uint32_t seen = 0;; seen++) {
        while (turn.load() == seen) wait(turn, seen);
        if (order == Order::Stop) return;
        if (order == Order::Release) __tsan_release(&tag);
        if (order == Order::Acquire) __tsan_acquire(&tag);
        if (order == Order::Run) {
            for (uint32_t group = (worker + job.first) % WORKERS; group < job.total; group += WORKERS) {
                uint32_t next = group;
                char message[256];
                if (msl_run(job.function, job.bindings, &job.grid, &next, group + 1, message)) {
                    end(job.name + ": " + message);
                }
            }
        }
        if (busy.fetch_sub(1) == 1) wake(busy);
    }
}

static void all(Order what) {
    order = what;
    busy = WORKERS;
    turn++;
    wake(turn);
    for (uint32_t left; what != Order::Stop && (left = busy.load()) != 0;) wait(busy, left);
}

/// Everything before is seen by everything behind.
static void barrier() {
    all(Order::Release);
    __tsan_acquire(&tag);
    __tsan_release(&tag);
    all(Order::Acquire);
}

// The record.
static void take(void* to, size_t bytes) {
    if (fread(to, 1, bytes, stdin) != bytes) end("the record ends in a call");
}

template <class T> static T take() {
    T value;
    take(&value, sizeof value);
    return value;
}

static std::string text() {
    std::string s(take<uint32_t>(), ' ');
    take(s.data(), s.size());
    return s;
}

struct Buffer {
    char* at;
    uint64_t bytes;
};
static std::map<uint32_t, Buffer> buffers;

static char* range(uint64_t bytes_of_offset, uint32_t id, uint64_t bytes) {
    auto found = buffers.find(id);
    if (found == buffers.end()) end("a buffer that is not there");
    if (bytes_of_offset + bytes > found->second.bytes) end("a range behind the end of its buffer");
    return found->second.at + bytes_of_offset;
}

static void dispatch(uint32_t number, bool begins) {
    job.name = text();
    std::string file = text();
    auto kernel = kernels.find(job.name);
    if (kernel == kernels.end()) end("no kernel " + job.name);
    for (uint32_t n = take<uint32_t>(); n > 0; n--) {
        uint32_t id = take<uint32_t>(), value = take<uint32_t>();
        *constants.at(file + "." + std::to_string(id)) = value;
    }
    job.function = kernel->second.function;
    memset(job.bindings, 0, sizeof job.bindings);
    uint32_t bound = take<uint32_t>();
    std::vector<void*> inlines;
    for (uint32_t i = 0; i < bound; i++) {
        if (take<uint8_t>() == 0) {
            uint32_t id = take<uint32_t>();
            job.bindings[i] = range(take<uint64_t>(), id, 0);
        } else {
            uint32_t bytes = take<uint32_t>();
            inlines.push_back(job.bindings[i] = malloc(bytes));
            take(job.bindings[i], bytes);
        }
    }
    take(job.grid.groups, sizeof job.grid.groups);
    take(job.grid.threads, sizeof job.grid.threads);
    job.grid.shared = take<uint32_t>();
    job.grid.shuffle = number + 1;
    // Threads that need not wait are concurrent too, which only fibers show.
    job.grid.waits = WAITS || kernel->second.waits;
    job.total = job.grid.groups[0] * job.grid.groups[1] * job.grid.groups[2];
    job.first = number;
    if (take<uint32_t>() != 0 || begins) barrier();
    else {
        // What the host wrote for this dispatch alone.
        __tsan_release(&tag);
        all(Order::Acquire);
    }
    all(Order::Run);
    // Nothing but this dispatch uses them, and it has ended.
    if (!WAITS) for (void* bytes : inlines) free(bytes);
}

int main() {
#define KERNEL(name, waits) kernels[#name] = {msl_kernel_##name, waits};
#define CONSTANT(file, id) constants[#file "." #id] = &msl_constant_##file##_##id;
    TABLE
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < WORKERS; i++) threads.emplace_back(work, i);
    uint64_t dispatches = 0;
    for (int c; (c = getchar()) != EOF;) {
        if (c == 'N') {
            label = text();
        } else if (c == 'A') {
            uint32_t id = take<uint32_t>();
            uint64_t bytes = take<uint64_t>();
            char* at = (char*)malloc(bytes);
            memset(at, 0xff, bytes);
            buffers[id] = {at, bytes};
        } else if (c == 'F') {
            uint32_t id = take<uint32_t>();
            free(range(0, id, 0));
            buffers.erase(id);
        } else if (c == 'W' || c == 'R') {
            uint32_t id = take<uint32_t>();
            uint64_t offset = take<uint64_t>(), bytes = take<uint64_t>();
            char* at = range(offset, id, bytes);
            if (c == 'W') {
                take(at, bytes);
            } else {
                std::vector<char> want(bytes);
                take(want.data(), bytes);
                if (memcmp(at, want.data(), bytes) != 0) end("other values than the plain build's");
            }
        } else if (c == 'L') {
            uint32_t count = take<uint32_t>();
            for (uint32_t i = 0; i < count; i++, dispatches++) {
                if (getchar() != 'D') end("a list has another length");
                dispatch(i, i == 0);
            }
            barrier();
        } else {
            end("an unknown call");
        }
    }
    all(Order::Stop);
    for (std::thread& thread : threads) thread.join();
    printf("%llu dispatches\n", (unsigned long long)dispatches);
}
