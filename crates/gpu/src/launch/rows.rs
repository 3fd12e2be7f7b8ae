//! What works element by element: embedding, copies, sums, the mean of streams, argmax.

use checkpoint::Form;

use crate::{Buf, Constant, Device, Element, Gpu, Mat, record::u32_of};

#[repr(C)]
struct Width {
    width: u32,
}

#[repr(C)]
struct Copies {
    width: u32,
    copies: u32,
}

#[repr(C)]
struct Strides {
    rows: u32,
    words: u32,
    from_stride: u32,
    to_stride: u32,
}

/// Threadgroups of 256 over rows of `width`.
fn over(width: usize, rows: usize) -> [usize; 3] {
    [width.div_ceil(256), rows, 1]
}

const THREADS: [usize; 3] = [256, 1, 1];

impl<D: Device> Gpu<D> {
    /// Rows `ids` of a table.
    pub(crate) fn embedded(&self, table: &Mat<D>, ids: &[u32]) -> Buf<D> {
        let (weight, width) = (table.weight(), table.weight().cols());
        let worst = ids.iter().max().map_or(0, |id| *id as usize + 1);
        assert!(worst <= weight.rows(), "token {worst} of {}", weight.rows());
        let halves = match weight.form() {
            Form::Bf16 => true,
            Form::F32 => false,
            // No model stores its embedding otherwise; the host decodes these few rows.
            _ => {
                let mut x = vec![0.0; ids.len() * width];
                for (id, row) in ids.iter().zip(x.chunks_mut(width)) {
                    weight.decode_row(*id as usize, row);
                }
                let bytes: Vec<u8> = x.iter().flat_map(|v| v.to_le_bytes()).collect();
                return self.send(&[ids.len(), width], Element::F32, &bytes);
            }
        };
        let x = self.values(&[ids.len(), width]);
        let params = Copies { width: u32_of(width), copies: 1 };
        let constants = [self.rounding(), (1, Constant::Bool(halves))];
        let bindings = [table.data(), self.words(ids).binding(), x.binding()];
        self.launch("embed", &constants, &bindings, &params, over(width, ids.len()), THREADS);
        x
    }

    /// Every row `copies` times.
    pub(crate) fn replicated(&self, x: &Buf<D>, copies: usize) -> Buf<D> {
        let (rows, width) = (x.rows(), x.width());
        let y = self.values(&[rows, copies, width]);
        let params = Copies { width: u32_of(width), copies: u32_of(copies) };
        let bindings = [x.binding(), y.binding()];
        self.launch("replicate", &self.plain(), &bindings, &params, over(width, rows), THREADS);
        y
    }

    /// Constants of a file whose kernel has no choice.
    fn plain(&self) -> [(u32, Constant); 2] {
        [self.rounding(), (1, Constant::Bool(false))]
    }

    /// `a + b`; `rounded` like a bf16 result in `source`.
    pub(crate) fn added(&self, a: &Buf<D>, b: &Buf<D>, rounded: bool) -> Buf<D> {
        assert_eq!(a.len(), b.len(), "a sum of {:?} and {:?}", a.shape(), b.shape());
        let y = self.values(a.shape());
        let constants = [(0, Constant::Bool(rounded && self.source())), (1, Constant::Bool(false))];
        let bindings = [a.binding(), b.binding(), y.binding()];
        self.launch(
            "add",
            &constants,
            &bindings,
            &Width { width: u32_of(a.len()) },
            over(a.len(), 1),
            THREADS,
        );
        y
    }

    /// Mean of the four streams.
    pub(crate) fn stream_means(&self, streams: &Buf<D>) -> Buf<D> {
        let (rows, width) = (streams.rows(), streams.shape()[2]);
        assert_eq!(streams.shape()[1], ops::hyper::STREAMS, "streams");
        let x = self.values(&[rows, width]);
        let bindings = [streams.binding(), x.binding()];
        let params = Width { width: u32_of(width) };
        self.launch("stream_mean", &self.plain(), &bindings, &params, over(width, rows), THREADS);
        x
    }

    /// Place of the largest value of every row.
    pub(crate) fn argmax_rows(&self, x: &Buf<D>) -> Buf<D> {
        let id = self.indices(&[x.rows()]);
        let bindings = [x.binding(), id.binding()];
        let params = Width { width: u32_of(x.width()) };
        self.launch("argmax", &self.plain(), &bindings, &params, [x.rows(), 1, 1], [1024, 1, 1]);
        id
    }

    /// Writes the rows of `from` into columns `column..` of `to`; elements of four bytes.
    fn copy_columns(&self, from: &Buf<D>, to: &Buf<D>, column: usize) {
        let words = from.width();
        let params = Strides {
            rows: u32_of(from.rows()),
            words: u32_of(words),
            from_stride: u32_of(words),
            to_stride: u32_of(to.width()),
        };
        let bindings = [from.binding(), to.binding_at(column)];
        self.launch("copy_rows", &[], &bindings, &params, over(words, from.rows()), THREADS);
    }

    /// Joins tensors of equal rows column by column.
    pub(crate) fn joined_columns(&self, parts: &[&Buf<D>]) -> Buf<D> {
        let rows = parts[0].rows();
        let y = self.values(&[rows, parts.iter().map(|p| p.width()).sum()]);
        let mut column = 0;
        for part in parts {
            assert_eq!(part.rows(), rows, "rows of a part");
            self.copy_columns(part, &y, column);
            column += part.width();
        }
        y
    }

    /// `a` and then `b` along the rows.
    pub(crate) fn joined_rows(&self, a: &Buf<D>, b: &Buf<D>) -> Buf<D> {
        assert_eq!(
            (&a.shape()[1..], a.element()),
            (&b.shape()[1..], b.element()),
            "rows of different shapes"
        );
        let shape = [&[a.rows() + b.rows()], &a.shape()[1..]].concat();
        let y = match a.element() {
            Element::F32 => self.values(&shape),
            Element::I32 => self.indices(&shape),
            Element::U8 => self.codes(&shape),
        };
        self.copy_all(a, &y);
        self.copy_all(b, &y.rows_at(a.rows(), b.rows()));
        y
    }

    /// Copies the elements of `from` to the start of `to`.
    pub(crate) fn copy_all(&self, from: &Buf<D>, to: &Buf<D>) {
        let bytes = from.bytes();
        let bindings = [from.binding(), to.binding()];
        if bytes.is_multiple_of(4) && from.offset.is_multiple_of(4) && to.offset.is_multiple_of(4) {
            let words = u32_of(bytes / 4);
            let params = Strides { rows: 1, words, from_stride: words, to_stride: words };
            self.launch("copy_rows", &[], &bindings, &params, over(bytes / 4, 1), THREADS);
        } else {
            let params = Width { width: u32_of(bytes) };
            self.launch("copy_bytes", &[], &bindings, &params, over(bytes, 1), THREADS);
        }
    }
}
