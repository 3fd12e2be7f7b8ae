//! docs/kernels.md is what the registry, the kernels' files and the launchers say. `cargo xtask kernels --write` writes it.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Arc, Mutex};

use checkpoint::Bytes;
use common::{Golden, load, root, step};
use gpu::{Constant, Device, Dispatch, Gpu, Kernel, Limits, bytes, cost, kernels::KERNELS};
use model::Input;
use ops::{
    DeviceError, Mode,
    registry::{self, Geometry, SPECS},
};

const MODES: [Mode; 3] = [Mode::Exact, Mode::Source, Mode::Native];
/// Rows of the cases: one, a few, more than decoding has.
const ROWS: [usize; 4] = [1, 3, 9, 40];
/// What whole models start.
const MODEL: &str = "model";

/// Sizes of threadgroups by who starts a kernel, and the kernel.
type Started = BTreeMap<(&'static str, &'static str), BTreeSet<u32>>;

/// A device that runs nothing and remembers what was started.
#[derive(Clone)]
struct Collector {
    started: Arc<Mutex<Started>>,
    by: Arc<Mutex<&'static str>>,
    limits: Limits,
}

impl Device for Collector {
    type Buffer = Arc<Mutex<Vec<u8>>>;
    type Pipeline = &'static Kernel;

    fn name(&self) -> &'static str {
        "collector"
    }

    fn description(&self) -> String {
        "nothing runs here".into()
    }

    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn allocate(&self, bytes: usize) -> Result<Self::Buffer, DeviceError> {
        Ok(Arc::new(Mutex::new(vec![0; bytes])))
    }

    fn import(&self, _: &Bytes) -> Result<Option<(Self::Buffer, u64)>, DeviceError> {
        Ok(None)
    }

    fn write(&self, buffer: &Self::Buffer, offset: u64, data: &[u8]) -> Result<(), DeviceError> {
        buffer.lock().unwrap()[offset as usize..][..data.len()].copy_from_slice(data);
        Ok(())
    }

    fn read(&self, buffer: &Self::Buffer, offset: u64, data: &mut [u8]) -> Result<(), DeviceError> {
        data.copy_from_slice(&buffer.lock().unwrap()[offset as usize..][..data.len()]);
        Ok(())
    }

    fn pipeline(
        &self,
        kernel: &'static Kernel,
        _: &[(u32, Constant)],
    ) -> Result<Self::Pipeline, DeviceError> {
        Ok(kernel)
    }

    fn submit(&self, list: Vec<Dispatch<Self>>) -> Result<(), DeviceError> {
        let by = *self.by.lock().unwrap();
        for d in list {
            assert!(
                d.threadgroup.is_empty(),
                "{}: its table has no dynamic threadgroup memory",
                d.pipeline.name
            );
            let threads = d.threads.iter().product();
            self.started.lock().unwrap().entry((by, d.pipeline.name)).or_default().insert(threads);
        }
        Ok(())
    }

    fn wait(&self) -> Result<Option<f64>, DeviceError> {
        Ok(None)
    }
}

/// All operators at tiny and released widths, and a model's prefill, steps and drafts, in all modes.
fn started() -> Started {
    let all = Collector { started: Arc::default(), by: Arc::new(Mutex::new(MODEL)), limits: Limits::METAL };
    let wide = Geometry { top: 1, stored_experts: 1, ..Geometry::RELEASED };
    for spec in SPECS {
        *all.by.lock().unwrap() = spec.name;
        for (g, rows) in [(&Geometry::TINY, &ROWS[..]), (&wide, &ROWS[..1])] {
            for n in rows {
                let case = registry::case(spec.name, g, *n, 1).unwrap();
                for mode in MODES {
                    registry::run(spec.name, &Gpu::new(mode, all.clone()), &case).unwrap().unwrap();
                }
            }
        }
    }
    *all.by.lock().unwrap() = MODEL;
    let ids = Golden::open("nano/golden/float32.safetensors").tokens("decode");
    for mode in MODES {
        let model = load("nano", Gpu::new(mode, all.clone()));
        let mut state = model.new_state(ids.len()).unwrap();
        for part in [&ids[..33], &ids[33..34], &ids[34..38]] {
            step(&model, &mut state, Input::text(part));
        }
        model.draft(&state, ids[38]).unwrap().unwrap();
    }
    std::mem::take(&mut *all.started.lock().unwrap())
}

/// Most registers of a kernel's variants on sm_90, and most bytes spilled.
fn registers() -> BTreeMap<String, [u32; 2]> {
    let text = std::fs::read_to_string(root().join("crates/gpu/registers.json")).unwrap();
    let all: BTreeMap<String, String> = serde_json::from_str(&text).unwrap();
    let mut most: BTreeMap<String, [u32; 2]> = BTreeMap::new();
    for (variant, text) in all {
        let kernel = variant.split(' ').next().unwrap().to_owned();
        let numbers: Vec<u32> = text.split(' ').filter_map(|word| word.parse().ok()).collect();
        let [registers, spilled] = numbers[..] else { panic!("{variant}: {text}") };
        let entry = most.entry(kernel).or_default();
        *entry = [entry[0].max(registers), entry[1].max(spilled)];
    }
    most
}

fn bytes_text(n: usize) -> String {
    match n {
        0..1_000 => format!("{n} B"),
        1_000..1_000_000 => format!("{:.1} kB", n as f64 / 1e3),
        _ => format!("{:.2} MB", n as f64 / 1e6),
    }
}

const HEAD: &str = "# Kernels

Written by `cargo xtask kernels --write` from the registry of operators, the kernels' files and what the launchers start; a
test fails when it is out of date. No figure here is a measurement of speed.

Every operator runs on the emulator in `exact`, `source` and `native`, at tiny and at released widths, within the registry's
tolerance of the scalar reference (`crates/gpu/tests/operators.rs`); under ThreadSanitizer and AddressSanitizer with
UndefinedBehaviorSanitizer at tiny widths (`crates/gpu/tests/sanitizers.rs`); and within whole models
(`crates/model/tests`: `exact`, `source`, `intermediates`, `draft`, `emulator`, `sanitizers`).
";

fn page(started: &Started) -> String {
    let mut page = String::from(HEAD);
    let _ = write!(
        page,
        "
## Operators

Bytes are what has to move for one row, everything once: weights and what is read, then what is written.
{}.
The figures are for the released widths, {} entries and a vocabulary of {}.
Dispatches: one row, 2 to 8 rows, one row in `source`; where they are not counted, the kernels that one row starts.

| operator | kernels | dispatches | bytes, one row | released |
|---|---|---|---|---|
",
        bytes::SIZES,
        Geometry::RELEASED.entries,
        Geometry::RELEASED.vocab
    );
    for b in bytes::BYTES {
        let names: Vec<String> =
            started.keys().filter(|k| k.0 == b.operator).map(|k| format!("`{}`", k.1)).collect();
        let dispatches = match cost::DISPATCHES.iter().find(|d| d.operator == b.operator) {
            Some(d) => format!("{}, {}, {}", d.one, d.few, d.source),
            None => String::from("one each"),
        };
        let names = if names.is_empty() { "gathered by the host".into() } else { names.join(" ") };
        let released = bytes_text((b.count)(&Geometry::RELEASED));
        let _ = writeln!(page, "| {} | {names} | {dispatches} | {} | {released} |", b.operator, b.formula);
    }
    page += "
## Kernels

Threadgroup memory is what the kernel declares, each variable a multiple of 16 bytes; Metal grants 32,768. Registers: the most
of its variants that NVRTC gives it on sm_90 (`crates/gpu/registers.json`), with bytes spilled; Apple's compiler may need others, which nobody has
measured. Started by: an operator, a block that takes several operators in one kernel (within models), or the self-test.

| kernel | file | threads | threadgroup bytes | buffers | inline bytes | registers | started by |
|---|---|---|---|---|---|---|---|
";
    let registers = registers();
    for k in KERNELS.iter().filter(|k| k.name != FUNCTIONS) {
        let by: Vec<&str> = started.keys().filter(|s| s.1 == k.name).map(|s| s.0).collect();
        let threads: BTreeSet<u32> =
            started.iter().filter(|(s, _)| s.1 == k.name).flat_map(|(_, t)| t).copied().collect();
        let threads = match (threads.first(), threads.last()) {
            (Some(a), Some(b)) if a == b => a.to_string(),
            (Some(a), Some(b)) => format!("{a} to {b}"),
            _ => String::from("–"),
        };
        let operators: Vec<&str> = by.iter().copied().filter(|b| *b != MODEL).collect();
        let by = match (k.file, operators.len(), by.is_empty()) {
            ("selftest", ..) => "the self-test".into(),
            (_, 0, true) => "tests".into(),
            (_, 0, false) => "blocks".into(),
            (_, 1..=3, _) => operators.join(", "),
            _ => format!("{} and {} more", operators[..2].join(", "), operators.len() - 2),
        };
        let buffers = k.parameters.iter().filter(|p| !p.by_value).count();
        let registers = registers.get(k.name).map_or("–".into(), |[registers, spilled]| match spilled {
            0 => registers.to_string(),
            _ => format!("{registers} ({spilled} B spilled)"),
        });
        let _ = writeln!(
            page,
            "| `{}` | {} | {threads} | {} | {buffers} | {} | {registers} | {by} |",
            k.name,
            k.file,
            k.threadgroup_bytes(),
            k.inline_bytes()
        );
    }
    page += "
## Products with stored weights

Operations of MSL for each weight and row of activations, counted in the kernels' text.

| kernel | weights | integer | float | float for each further row | bytes of a launch |
|---|---|---|---|---|---|
";
    for c in cost::COSTS {
        let _ = writeln!(
            page,
            "| `{}` | {} | {} | {} | {} | {} |",
            c.kernel, c.of, c.integer, c.float, c.row, c.bytes
        );
    }
    page += "
## Where `native` departs from `exact`

| kernel | operators | when | what |
|---|---|---|---|
";
    for d in cost::DEPARTURES {
        let _ = writeln!(page, "| `{}` | {} | {} | {} |", d.kernel, d.operators.join(", "), d.when, d.what);
    }
    page
}

/// The kernel that serves the tests of the headers and never runs in a model.
const FUNCTIONS: &str = "functions";

#[test]
fn the_table_of_kernels_is_current_and_launches_fit_metal() {
    let started = started();
    for ((by, kernel), threads) in &started {
        let fits = |t: &u32| t.is_multiple_of(32) && (32..=Limits::METAL.threads).contains(t);
        assert!(threads.iter().all(fits), "{by} starts {kernel} with {threads:?} threads");
    }
    let path = root().join("docs/kernels.md");
    let page = page(&started);
    if std::env::var_os("HALLMARK_WRITE").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let held = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(held == page, "docs/kernels.md is out of date: cargo xtask kernels --write");
}
