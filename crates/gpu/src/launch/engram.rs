//! Engram memory. The table stays on the host, which gathers a token's rows into one small buffer.

use checkpoint::{Form, Weight};
use ops::hyper::STREAMS;

use crate::{Buf, Device, Element, Gpu, record::u32_of};

#[repr(C)]
struct RowsParams {
    count: u32,
    width: u32,
    stride: u32,
}

#[repr(C)]
struct GateParams {
    width: u32,
    part: f32,
    root: f32,
}

impl<D: Device> Gpu<D> {
    /// Table rows, one after the other.
    pub(crate) fn gathered(&self, table: &Weight, rows: &[u64], columns: usize) -> Buf<D> {
        let width = table.cols();
        let shape = [rows.len() / columns, columns * width];
        // The few values of one token are not worth a launch.
        let alone = rows.len() == columns && !self.source();
        if table.form() != Form::Fp8Row32 || alone {
            let mut e = vec![0.0; rows.len() * width];
            for (row, out) in rows.iter().zip(e.chunks_mut(width)) {
                table.decode_row(*row as usize, out);
            }
            let bytes: Vec<u8> = e.iter().flat_map(|v| v.to_le_bytes()).collect();
            return self.send(&shape, Element::F32, &bytes);
        }
        let scales = width.div_ceil(32);
        let mut bytes = Vec::with_capacity(rows.len() * (width + scales));
        for row in rows {
            let row = *row as usize;
            bytes.extend_from_slice(&table.data()[row * width..][..width]);
            bytes.extend_from_slice(&table.scale()[row * scales..][..scales]);
        }
        let stored = self.send(&[rows.len(), width + scales], Element::U8, &bytes);
        let e = self.values(&shape);
        let count = e.len();
        let params =
            RowsParams { count: u32_of(count), width: u32_of(width), stride: u32_of(width + scales) };
        let bindings = [stored.binding(), e.binding()];
        let grid = [count.div_ceil(256), 1, 1];
        self.launch("engram_rows", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
        e
    }

    /// The new streams and the gates.
    pub(crate) fn engram_gated(
        &self,
        streams: &Buf<D>,
        kv: &Buf<D>,
        [q_weight, k_weight]: [&Buf<D>; 2],
        alive: &[bool],
    ) -> (Buf<D>, Buf<D>) {
        let (rows, width) = (streams.rows(), streams.shape()[2]);
        assert_eq!((kv.width(), streams.shape()[1]), (5 * width, STREAMS), "keys and value of a gate");
        let (out, gate) = (self.values(streams.shape()), self.values(&[rows, STREAMS]));
        let alive: Vec<u32> = alive.iter().map(|a| (*a).into()).collect();
        let alive = self.words(&alive);
        let root = (width as f64).powf(-0.5) as f32;
        let params = GateParams { width: u32_of(width), part: 1.0 / width as f32, root };
        let bindings = [streams, kv, q_weight, k_weight, &alive, &out, &gate].map(Buf::binding);
        let grid = [STREAMS, rows, 1];
        self.launch("engram_gate", &[self.rounding()], &bindings, &params, grid, [256, 1, 1]);
        (out, gate)
    }
}
