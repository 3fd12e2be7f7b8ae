//! Every registered operator under the sanitizers, without a report and with the values of the plain build.
#![cfg(emulator)]

#[path = "sanitizers/mod.rs"]
mod sanitizers;

use std::sync::{Arc, Mutex};

use gpu::{Binding, Constant, Device, Dispatch, Gpu, kernels::kernel};
use ops::{
    Mode,
    registry::{self, Geometry, SPECS},
};
use sanitizers::{build::Build, capture::Capture, replay, replayer, run_both};

/// What the operators tell a device, at tiny widths.
fn operators(cases: &[(Mode, &[usize])]) -> Vec<u8> {
    let record = Arc::new(Mutex::new(Vec::new()));
    for (mode, rows) in cases {
        let b = Gpu::new(*mode, Capture::new(record.clone()));
        for spec in SPECS {
            for n in *rows {
                b.device().label(&format!("{}, {}, {n} rows", spec.name, mode.name()));
                let case = registry::case(spec.name, &Geometry::TINY, *n, 5).unwrap();
                registry::run(spec.name, &b, &case).unwrap().unwrap();
            }
        }
    }
    std::mem::take(&mut *record.lock().unwrap())
}

#[test]
fn operators_run_without_a_report() {
    let all: &[usize] = &[1, 2, 5, 9, 33];
    let record = match std::env::var_os("HALLMARK_FULL") {
        Some(_) => operators(&[(Mode::Exact, all), (Mode::Source, all), (Mode::Native, all)]),
        None => operators(&[(Mode::Exact, &[1, 3]), (Mode::Source, &[1, 9]), (Mode::Native, &[9])]),
    };
    assert!(run_both(&record) > 300, "dispatches of {} operators", SPECS.len());
}

/// Two dispatches of one list, of which the second reads what the first writes.
fn dependent(barrier: bool) -> Vec<u8> {
    let record = Arc::new(Mutex::new(Vec::new()));
    let device = Capture::new(record.clone());
    device.label("two sums");
    let buffer = |n: usize| {
        let buffer = device.allocate(4 * n).unwrap();
        device.write(&buffer, 0, &1f32.to_le_bytes().repeat(n)).unwrap();
        buffer
    };
    let (x, y, z) = (buffer(256), buffer(1), buffer(1));
    let pipeline = device
        .pipeline(kernel("selftest_sum"), &[(0, Constant::U32(1)), (1, Constant::Bool(false))])
        .unwrap();
    let sum = |from: &_, to: &_, count: u32, barrier| Dispatch::<Capture> {
        pipeline: pipeline.clone(),
        bindings: vec![
            Binding::Buffer(Clone::clone(from), 0),
            Binding::Buffer(Clone::clone(to), 0),
            Binding::Inline(count.to_le_bytes().to_vec().into()),
        ],
        threadgroup: vec![],
        groups: [1, 1, 1],
        threads: [256, 1, 1],
        barrier,
    };
    device.submit(vec![sum(&x, &y, 256, true), sum(&y, &z, 1, barrier)]).unwrap();
    let mut read = [0; 4];
    device.read(&z, 0, &mut read).unwrap();
    assert_eq!(f32::from_le_bytes(read), 256.0);
    drop((x, y, z));
    std::mem::take(&mut *record.lock().unwrap())
}

/// [`Dispatch::barrier`] is a promise; a broken one is found although the emulator runs one dispatch after the other.
#[test]
fn a_missing_barrier_between_dispatches_is_caught() {
    let program = replayer(Build::Thread);
    let (done, text) = replay(&program, &dependent(true));
    assert!(done && text == "2 dispatches\n", "{text}");
    let (done, text) = replay(&program, &dependent(false));
    assert!(!done && text.contains("ThreadSanitizer: data race"), "{text}");
    assert!(text.contains("two sums: kernel selftest_sum"), "{text}");
    std::fs::remove_file(program).unwrap();
}

/// A buffer has the length that was asked for, so that an element behind it is a report.
#[test]
fn a_read_behind_a_buffer_is_caught() {
    let program = replayer(Build::Address);
    let mut record = dependent(true);
    let from = record.windows(12).position(|w| w == b"selftest_sum").unwrap();
    // Behind the name: the file's name, two constants, the number of bindings; a buffer, its number, its offset.
    let binding = from + b"selftest_sum".len() + (4 + b"selftest".len()) + (4 + 2 * 8) + 4;
    assert_eq!(record[binding], 0, "a buffer");
    let offset = &mut record[binding + 1 + 4..][..8];
    assert_eq!(offset, 0u64.to_le_bytes());
    offset.copy_from_slice(&4u64.to_le_bytes());
    let (done, text) = replay(&program, &record);
    assert!(!done && text.contains("AddressSanitizer: heap-buffer-overflow"), "{text}");
    assert!(text.contains("two sums: kernel selftest_sum"), "{text}");
    std::fs::remove_file(program).unwrap();
}
