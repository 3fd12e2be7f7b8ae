// Runs one kernel of faults.metal on one threadgroup of 64 threads: input and output of 64 words, allocated exactly.
#include <cstdio>
#include <cstdlib>
#include <cstring>

typedef void (*Function)(void** arguments, const void* place);
struct Grid {
    unsigned groups[3], threads[3], shared, shuffle, waits;
};
extern "C" int msl_run(Function, void* const* bindings, const Grid*, unsigned* next, unsigned total, char* message);

#define KERNEL(name) extern "C" void msl_kernel_##name(void**, const void*);
KERNELS
#undef KERNEL

int main(int, char** arguments) {
    struct {
        const char* name;
        Function function;
    } kernels[] = {
#define KERNEL(name) {#name, msl_kernel_##name},
        KERNELS
    };
    unsigned* x = (unsigned*)malloc(256);
    unsigned* y = (unsigned*)malloc(256);
    for (unsigned i = 0; i < 64; i++) x[i] = i;
    void* bindings[32] = {x, y};
    Grid grid = {{1, 1, 1}, {64, 1, 1}, 0, 0, 1};
    for (auto& kernel : kernels) {
        if (strcmp(kernel.name, arguments[1]) != 0) continue;
        unsigned next = 0;
        char message[256];
        if (msl_run(kernel.function, bindings, &grid, &next, 1, message)) {
            fprintf(stderr, "refused: %s\n", message);
            return 1;
        }
        unsigned sum = 0;
        for (unsigned i = 0; i < 64; i++) sum += y[i];
        free(x);
        free(y);
        printf("finished %u\n", sum);
        return 0;
    }
    fprintf(stderr, "no kernel %s\n", arguments[1]);
    return 2;
}
