// Which expert a threadgroup computes, and for which slots. Slot s is choice s % top of row s / top.

// Numbers of a stored run: expert, count, slots.
#define RUN 10
// Numbers of an expert's matrix in the table: offsets of data, scale (trellis, suh), svh; class.
#define ENTRY 8

// Classes from here on are EXL3.
#define EXL3_CLASS 0x8000u

struct ExpertParams {
    uint slots;
    uint top;
    uint experts;
    uint cols;     // inputs of the matrices
    uint outs;     // outputs of each
    uint inputs;   // inputs and outputs padded to whole runs of 128: the stored sizes of EXL3
    uint outputs;
    uint parts;    // matrices of this step: gate and up, or down
    uint first;    // place of the first among gate, up, down
    uint splits;
    uint planes;
    uint klass;
    uint slices;
    uint round;
    uint shared; // whether the shared expert is added
    uint flip;   // of trellis.h
    float limit;
    uint inner;  // the product makes its input itself: 1 from activations, 2 from gate and up
    uint before; // planes of gate and up
};

struct Run {
    uint expert;
    uint count;
    uint slots[8];
};

// Run `z`: one that moe_runs made, or where slots are not `grouped`, slot z alone.
inline Run run_of(device const int* runs, uint z, bool grouped) {
    Run run;
    if (grouped) {
        device const int* from = runs + z * RUN;
        run.expert = uint(from[0]);
        run.count = uint(from[1]);
        for (uint i = 0; i < 8; i++) run.slots[i] = uint(from[2 + i]);
    } else {
        run.expert = uint(runs[z]);
        run.count = 1;
        for (uint i = 0; i < 8; i++) run.slots[i] = z;
    }
    return run;
}
