//! Every kernel compiles for the H200 without a GPU, by NVRTC.
#![cfg(feature = "cuda")]

use gpu::{Constant, cuda, kernels};

#[test]
fn quick() {
    for f in kernels::FILES {
        let k = kernels::KERNELS.iter().find(|k| k.file == f.name).unwrap();
        let c: Vec<_> = k.constants.iter().map(|(id, _)| (*id, Constant::U32(1))).collect();
        let out = cuda::compile(f.name, f.cuda, "sm_90", &c).unwrap();
        println!("{} {:?}", f.name, cuda::registers(&out.log));
    }
}
