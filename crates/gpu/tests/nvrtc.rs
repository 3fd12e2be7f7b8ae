//! Every kernel, in every variant that the operators ask for, compiles for the H200 without a GPU, by NVRTC; register
//! counts are held against `registers.json`, because a kernel that needs more of them runs slower.
#![cfg(feature = "cuda")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use checkpoint::Bytes;
use gpu::{Constant, Device, Dispatch, Gpu, Kernel, Limits, cuda, kernels};
use ops::{
    DeviceError, Mode,
    registry::{self, Geometry, SPECS},
};

const ARCH: &str = "sm_90";

type Variant = (&'static str, Vec<(u32, Constant)>);

/// A device that runs nothing and remembers which pipelines were asked for.
#[derive(Clone)]
struct Collector {
    variants: Arc<Mutex<BTreeSet<(&'static str, String)>>>,
    files: Arc<Mutex<Vec<Variant>>>,
    limits: Limits,
}

impl Device for Collector {
    type Buffer = Arc<Mutex<Vec<u8>>>;
    type Pipeline = ();

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

    fn pipeline(&self, kernel: &'static Kernel, constants: &[(u32, Constant)]) -> Result<(), DeviceError> {
        // Constants that a file does not have would be a launcher's mistake, missing ones too.
        let ids = |list: &[(u32, Constant)]| list.iter().map(|c| c.0).collect::<BTreeSet<_>>();
        assert_eq!(
            ids(constants),
            kernel.constants.iter().map(|c| c.0).collect(),
            "constants of {}",
            kernel.name
        );
        let mut sorted = constants.to_vec();
        sorted.sort_by_key(|c| c.0);
        self.variants.lock().unwrap().insert((kernel.name, shown(&sorted)));
        let variant = (kernel.file, sorted);
        let mut files = self.files.lock().unwrap();
        if !files.contains(&variant) {
            files.push(variant);
        }
        Ok(())
    }

    fn submit(&self, _: Vec<Dispatch<Self>>) -> Result<(), DeviceError> {
        Ok(())
    }

    fn wait(&self) -> Result<Option<f64>, DeviceError> {
        Ok(None)
    }
}

fn shown(constants: &[(u32, Constant)]) -> String {
    let one = |(id, value): &(u32, Constant)| match value {
        Constant::Bool(v) => format!("{id}={v}"),
        Constant::U32(v) => format!("{id}={v}"),
    };
    constants.iter().map(one).collect::<Vec<_>>().join(" ")
}

/// The variants that the registry's cases ask for.
fn collected() -> Collector {
    let all = Collector { variants: Arc::default(), files: Arc::default(), limits: Limits::METAL };
    let wide = Geometry { top: 1, stored_experts: 1, ..Geometry::RELEASED };
    for mode in [Mode::Exact, Mode::Source, Mode::Native] {
        let b = Gpu::new(mode, all.clone());
        for spec in SPECS {
            for (g, rows) in [(&Geometry::TINY, &[1, 2, 3, 5, 9, 40][..]), (&wide, &[1, 4])] {
                for n in rows {
                    let case = registry::case(spec.name, g, *n, 1).unwrap();
                    registry::run(spec.name, &b, &case).unwrap().unwrap();
                }
            }
        }
    }
    all
}

#[test]
fn every_variant_compiles_and_needs_the_recorded_registers() {
    let version = cuda::version().expect("cargo xtask nvrtc brings the library");
    let all = collected();
    let variants = all.variants.lock().unwrap();
    // What only fused blocks or a self-test start is compiled with the rest of its file.
    let alone = |kernel: &str| variants.iter().all(|v| v.0 != kernel);
    let wanted = |kernel: &str, constants: &str| {
        // That one serves the tests of the headers and never runs in a model.
        kernel != "functions" && alone(kernel) || variants.iter().any(|v| v.0 == kernel && v.1 == constants)
    };
    let mut files = all.files.lock().unwrap().clone();
    for k in kernels::KERNELS {
        // No operator starts the self-test and the kernels that tests call.
        if files.iter().all(|f| f.0 != k.file) {
            files.push((k.file, k.constants.iter().map(|c| (c.0, Constant::U32(1))).collect()));
        }
    }
    let mut found: BTreeMap<String, String> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    for (file, constants) in &files {
        let made = cuda::cached(file, kernels::file(file).cuda, ARCH, constants, &version).unwrap();
        for (kernel, registers, spills) in cuda::registers(&made.log) {
            if wanted(&kernel, &shown(constants)) {
                let name = format!("{kernel} {}", shown(constants));
                found
                    .insert(name.trim_end().into(), format!("{registers} registers, {spills} bytes spilled"));
            }
            seen.insert(kernel);
        }
    }
    let missing: Vec<&str> = kernels::KERNELS.iter().map(|k| k.name).filter(|k| !seen.contains(*k)).collect();
    assert!(missing.is_empty(), "no variant of {missing:?} was compiled");
    let text = serde_json::to_string_pretty(&found).unwrap() + "\n";
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/registers.json");
    if std::env::var_os("HALLMARK_WRITE").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let recorded = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        recorded == text,
        "register counts differ from registers.json; where that is meant: cargo xtask nvrtc --write"
    );
}

#[test]
fn a_broken_kernel_is_an_error_with_its_name_and_line() {
    let broken = "extern \"C\" __global__ void f(float* x) {\n    x[0] = missing;\n}\n";
    let said = cuda::compile("broken", broken, ARCH, &[]).err().expect("it does not compile").to_string();
    assert!(said.contains("kernel file broken") && said.contains("missing"), "{said}");
}
