//! The caches: rows in their exact stored forms [§2.3–2.5, §3.1].

use numerics::quantise::{self, fp4_row_bytes, fp8_row_bytes, kv_row_bytes};

use crate::{Backend, DeviceError, Host, registry::*};

const STORED: Tolerance = Tolerance::bits("a quantiser");

/// Registry entry of the window row's quantiser.
pub struct StoreWindow;

impl Operator for StoreWindow {
    const SPEC: Spec = Spec {
        name: "store_window",
        section: "2.3",
        contract: "kv [T, d] -> codes [T, d + d/32]: E4M3 with an E8M0 scale per 32",
        exact: STORED,
        source: STORED,
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("kv", &[g.head_dim], 1.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("codes", b.read(&b.store_window(&c.buf(b, "kv")?))?)])
    }
}

/// Writes row t of `codes` to slot position mod slots of the ring.
pub fn ring_write(ring: &mut Host, codes: &Host, positions: &[u32]) {
    let (slots, width) = (ring.rows(), ring.width());
    let bytes = ring.as_u8_mut();
    for (row, p) in codes.as_u8().chunks(width).zip(positions) {
        let slot = *p as usize % slots;
        bytes[slot * width..][..width].copy_from_slice(row);
    }
}

/// Registry entry of the ring's write.
pub struct RingWrite;

impl Operator for RingWrite {
    const SPEC: Spec = Spec {
        name: "ring_write",
        section: "2.3",
        contract: "ring [slots, n], codes [T, n], position [T] -> ring with row position mod slots replaced",
        exact: STORED,
        source: STORED,
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        let width = fp8_row_bytes(g.head_dim);
        let s = c.stream("codes");
        let codes = (0..(rows * width) as u64).map(|i| s.word(i) as u8).collect();
        let positions = (0..rows as i32).map(|i| 1000 + i).collect();
        c.row_input("codes", Host::u8(&[rows, width], codes))
            .row_input("position", Host::i32(&[rows], positions));
        c.shared("ring", Host::u8(&[256, width], vec![0; 256 * width]));
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        let (mut ring, positions) = (c.buf(b, "ring")?, c.u32s("position"));
        b.ring_write(&mut ring, &c.buf(b, "codes")?, &positions);
        let ring = b.read(&ring)?;
        let written: Vec<u8> =
            positions.iter().flat_map(|p| ring.code_row(*p as usize % 256).to_vec()).collect();
        Ok(vec![("written", Host::u8(&[positions.len(), ring.width()], written))])
    }
}

/// Stores each row of `x` with `store` from row `first` of the cache on.
pub fn publish(cache: &mut Host, x: &Host, first: usize, store: fn(&[f32], &mut [u8])) {
    let width = cache.width();
    assert!(first + x.rows() <= cache.rows(), "entries {first}+{} of a cache of {}", x.rows(), cache.rows());
    let bytes = cache.as_u8_mut();
    for r in 0..x.rows() {
        store(x.row(r), &mut bytes[(first + r) * width..][..width]);
    }
}

macro_rules! publish_operator {
    ($type:ident, $doc:literal, $name:literal, $section:literal, $contract:literal, $dim:ident, $bytes:ident,
     $method:ident) => {
        #[doc = $doc]
        pub struct $type;

        impl Operator for $type {
            const SPEC: Spec =
                Spec { name: $name, section: $section, contract: $contract, exact: STORED, source: STORED };

            fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
                let mut c = Case::new(rows, seed);
                let width = $bytes(g.$dim);
                c.normal("x", &[g.$dim], 1.0);
                c.shared("cache", Host::u8(&[rows + 3, width], vec![0; (rows + 3) * width]));
                c
            }

            fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
                let mut cache = c.buf(b, "cache")?;
                b.$method(&mut cache, &c.buf(b, "x")?, 3);
                Ok(vec![("entries", b.read(&cache)?.slice_rows(3, c.rows()))])
            }
        }
    };
}

publish_operator!(
    PublishKv,
    "Registry entry of the compressed entry's quantiser.",
    "publish_kv",
    "2.4",
    "cache [n, d/2 + d/16], latent [G, d] (rotated), first -> entries first.. as E2M1 with an E4M3 scale per 16",
    head_dim,
    kv_row_bytes,
    publish_kv
);
publish_operator!(
    PublishKey,
    "Registry entry of the index key's quantiser.",
    "publish_key",
    "2.5",
    "cache [n, d/2 + d/32], key [G, d] (rotated), first -> entries first.. as E2M1 with an E8M0 scale per 32",
    index_dim,
    fp4_row_bytes,
    publish_key
);

/// Registry entry of the index query's fake quantiser.
pub struct QuantiseIndexQuery;

impl Operator for QuantiseIndexQuery {
    const SPEC: Spec = Spec {
        name: "quantise_index_query",
        section: "2.5",
        contract: "q [T, heads*d] -> q [T, heads*d] through E2M1 with a power-of-two scale per 32",
        exact: STORED,
        source: STORED,
    };

    fn case(g: &Geometry, rows: usize, seed: u64) -> Case {
        let mut c = Case::new(rows, seed);
        c.normal("q", &[g.index_heads * g.index_dim], 1.0);
        c
    }

    fn run<B: Backend>(b: &B, c: &Case) -> Result<Outputs, DeviceError> {
        Ok(vec![("q", b.read(&b.quantise_index_query(&c.buf(b, "q")?))?)])
    }
}

/// A cache of `n` generated rows of `d` values stored by `store`.
pub(crate) fn generated_cache(
    c: &Case,
    name: &str,
    n: usize,
    d: usize,
    bytes: usize,
    store: fn(&[f32], &mut [u8]),
) -> Host {
    let s = c.stream(name);
    let mut out = vec![0; n * bytes];
    for (r, row) in out.chunks_mut(bytes).enumerate() {
        let x: Vec<f32> = (0..d).map(|i| numerics::bf16::round(s.normal((r * d + i) as u64))).collect();
        store(&x, row);
    }
    Host::u8(&[n, bytes], out)
}

/// Fake quantisation of every row with the index query's format.
pub fn quantise_index_query(x: &Host) -> Host {
    let mut q = x.as_f32().to_vec();
    q.chunks_mut(x.width()).for_each(quantise::qdq_fp4);
    Host::f32(x.shape(), q)
}

/// Window rows of `kv [T, d]`.
pub fn store_window(kv: &Host) -> Host {
    let width = fp8_row_bytes(kv.width());
    let mut out = vec![0; kv.rows() * width];
    for (r, row) in out.chunks_mut(width).enumerate() {
        quantise::store_fp8(kv.row(r), row);
    }
    Host::u8(&[kv.rows(), width], out)
}
