//! Token embedding and its copy into the residual streams [§2.1].

use checkpoint::Form;

use crate::{Backend, DeviceError, Host, registry::*};

/// Registry entry of the embedding.
pub struct Embed;

impl Operator for Embed {
    const SPEC: Spec = Spec {
        name: "embed",
        section: "2.1",
        contract: "table [V, d], ids [T] -> x [T, d]: the rows of the ids, unscaled",
        exact: Tolerance::bits("a copy"),
        source: Tolerance::bits("a copy"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let s = c.stream("ids");
        let ids = (0..rows as u64).map(|i| (s.word(i) % g.vocab as u64) as i32).collect();
        c.row_input("ids", Host::i32(&[rows], ids)).weight("table", Form::Bf16, g.vocab, g.hidden);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let x = b.embed(&c.mat(b, "table")?, &c.u32s("ids"));
        Ok(vec![("x", b.read(&x)?)])
    }
}

/// Registry entry of the copy into streams.
pub struct Replicate;

impl Operator for Replicate {
    const SPEC: Spec = Spec {
        name: "replicate",
        section: "2.1",
        contract: "x [T, d] -> X [T, 4, d]: four equal streams",
        exact: Tolerance::bits("a copy"),
        source: Tolerance::bits("a copy"),
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("x", &[g.hidden], 1.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("streams", b.read(&b.replicate(&c.buf(b, "x")?, 4))?)])
    }
}
