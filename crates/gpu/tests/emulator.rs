//! The emulator itself: features, limits, and the faults that it is there to catch.
#![cfg(feature = "emu")]

use gpu::{
    Binding, Constant, Device, Dispatch, Limits,
    emu::Emu,
    kernels::{KERNELS, kernel},
    selftest,
};

fn emu() -> Emu {
    Emu::open().expect("clang++-19 is part of the test set-up")
}

#[test]
fn the_self_test_passes_on_one_and_two_threads_and_in_any_order() {
    for threads in [1, 2] {
        for order in [0, 1, 77] {
            selftest::run(&emu().with_threads(threads).with_order(order)).unwrap();
        }
    }
}

/// A dispatch of `selftest_sum` that is right.
fn sum(e: &Emu) -> Dispatch<Emu> {
    let constants = [(0, Constant::U32(1)), (1, Constant::Bool(false))];
    let buffer = || Binding::Buffer(e.allocate(1024).unwrap(), 0);
    Dispatch {
        pipeline: e.pipeline(kernel("selftest_sum"), &constants).unwrap(),
        bindings: vec![buffer(), buffer(), Binding::Inline(256u32.to_le_bytes().to_vec().into())],
        threadgroup: vec![],
        groups: [1, 1, 1],
        threads: [256, 1, 1],
        barrier: true,
    }
}

#[test]
fn metal_s_limits_are_enforced() {
    let e = emu();
    let refused = |change: &dyn Fn(&mut Dispatch<Emu>), what: &str| {
        let mut d = sum(&e);
        change(&mut d);
        let said = e.submit(vec![d]).unwrap_err().to_string();
        assert!(said.contains("selftest_sum") && said.contains(what), "{said}");
    };
    e.submit(vec![sum(&e)]).unwrap();
    refused(&|d| d.threads = [100, 1, 1], "100 threads");
    refused(&|d| d.threads = [64, 32, 1], "2048 threads");
    refused(&|d| d.threadgroup = vec![33 << 10], "33792 bytes of threadgroup memory");
    refused(&|d| d.threadgroup = vec![32 << 10], "beside its own 32"); // each fits, both do not
    refused(&|d| d.bindings[2] = Binding::Inline(vec![0; 5000].into()), "5000 inline bytes");
    refused(&|d| d.bindings[2] = Binding::Inline(vec![0; 8].into()), "its structs have 4");
    refused(&|d| d.bindings.truncate(2), "2 bindings where it has 3");
    refused(&|d| d.bindings[0] = Binding::Buffer(e.allocate(16).unwrap(), 4096), "behind its buffer's end");
    refused(&|d| d.bindings[2] = Binding::Buffer(e.allocate(16).unwrap(), 0), "passed inline");
    assert!(e.pipeline(kernel("selftest_sum"), &[]).err().unwrap().to_string().contains("STEP"));
    let many = [(0, Constant::U32(1)), (1, Constant::Bool(false)), (9, Constant::U32(1))];
    assert!(e.pipeline(kernel("selftest_sum"), &many).err().unwrap().to_string().contains("constant 9"));
}

/// Of every kernel, whether or not a test starts it.
#[test]
fn every_kernel_fits_metal() {
    let limits = Limits::METAL;
    assert!(KERNELS.len() > 30, "{} kernels", KERNELS.len());
    for k in KERNELS {
        let (memory, inline) = (k.threadgroup_bytes(), k.inline_bytes());
        assert!(memory <= limits.threadgroup_memory, "{}: {memory} bytes of threadgroup memory", k.name);
        assert!(inline <= limits.inline_bytes, "{}: {inline} inline bytes", k.name);
        assert!(k.parameters.len() <= limits.bindings as usize, "{}: {} buffers", k.name, k.parameters.len());
        let by_value = k.parameters.iter().any(|p| p.by_value);
        assert_eq!(by_value, inline > 0, "{}: {inline} inline bytes", k.name);
    }
    // What the compiler counts is what is written: eight floats, one integer.
    assert_eq!((kernel("selftest_sum").threadgroup_bytes(), kernel("selftest_sum").inline_bytes()), (32, 4));
    assert!(KERNELS.iter().any(|k| k.threadgroup_bytes() > 8192), "no kernel has more than 8 KiB");
}
