//! Linear layers: y[r][o] = Σ_k w[o][k] x[r][k].

use std::{
    cell::RefCell,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use checkpoint::Weight;

use crate::{
    Isa,
    kernels::{Buffer, Kernels, Tile},
    order::{self, GROUP, LANES, Layout, View},
    team::Team,
};

/// Why an [`Engine`] cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The asked instruction set is not one of this machine.
    #[error("this machine has no {0}; choose one of {1}")]
    Isa(&'static str, String),
    /// The system gives no threads.
    #[error("cannot start {0} threads: {1}; ask for fewer")]
    Threads(usize, String),
}

/// One matrix product of a [`Engine::run`].
pub struct Job<'a> {
    /// `[out, in]`, as stored.
    pub weight: &'a Weight,
    /// Activations `[rows, in]`.
    pub x: &'a [f32],
    /// Activation rows.
    pub rows: usize,
    /// Results `[rows, out]`.
    pub y: &'a mut [f32],
}

/// Cost of a call (about nanoseconds of one thread) below which it runs on the calling thread: bringing in the others
/// takes a few microseconds, and what they write has to come back. With less, two threads decode the demo model more
/// slowly than one.
pub(crate) const INLINE: usize = 30_000;
/// Multiply-adds that one unit of work holds at least where the shape allows.
const UNIT: usize = 65_536;
/// Columns of a weight slice that is decoded and multiplied at a time: 2 KiB of a row as floats.
const SLICE: usize = 512;
/// Activation rows that share the first-level cache with a few weight rows.
const PANEL: usize = 12;
/// Weight rows of a slice where one panel is all there is.
const FEW: usize = 8;
/// Bytes of decoded weights that stay in the second-level cache while the activations pass by.
const TILE_BYTES: usize = 1 << 20;
/// Activation rows of a unit.
const ROWS: usize = 512;

/// Activations laid out for the kernels, shared by the jobs that read the same rows.
struct Packed<'a> {
    x: &'a [f32],
    cols: usize,
    layout: Layout,
    rows: usize,
    stride: usize,
    buffer: Buffer,
    fits: Vec<bool>,
}

impl Packed<'_> {
    fn row(&self, r: usize) -> &[f32] {
        &self.buffer.get(self.rows * self.stride)[r * self.stride..][..order::padded(self.cols)]
    }
}

/// Rows `w0..w0 + wn` of a job's weight times rows `x0..x0 + xn` of its activations.
struct Unit {
    job: usize,
    w0: usize,
    wn: usize,
    x0: usize,
    xn: usize,
}

/// The results of a job; units write disjoint parts.
struct Out(*mut f32);
// SAFETY: the units of a run partition (row, output), so no two threads touch one element.
unsafe impl Sync for Out {}

/// Start of data that a parallel call cuts into chunks.
struct Start<T>(*mut T);
// SAFETY: the chunks are disjoint, and each is handed to one thread as if it were sent there.
unsafe impl<T: Send> Sync for Start<T> {}

impl<T> Start<T> {
    /// # Safety
    /// The range lies in the data and belongs to this task alone.
    unsafe fn part<'a>(&self, start: usize, len: usize) -> &'a mut [T] {
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(start), len) }
    }
}

/// What a thread keeps from one unit to the next.
#[derive(Default)]
struct Scratch {
    weights: Buffer,
    lanes: Buffer,
    gemv: Buffer,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// The threads and kernels of the CPU backend. Results do not depend on how many threads there are, which instruction
/// set runs or how many rows a call has: see the crate page.
pub struct Engine {
    isa: Isa,
    kernels: &'static Kernels,
    threads: usize,
    team: Team,
    spare: Mutex<Vec<Buffer>>,
}

impl Engine {
    /// `threads`: as many as the machine has where `None`. `isa`: the fastest of the machine where `None`.
    pub fn new(threads: Option<usize>, isa: Option<Isa>) -> Result<Self, Error> {
        let isa = isa.unwrap_or_else(Isa::best);
        if !isa.is_available() {
            let names: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
            return Err(Error::Isa(isa.name(), names.join(", ")));
        }
        let most = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.unwrap_or(most).max(1);
        let team = Team::new(threads).map_err(|e| Error::Threads(threads, e.to_string()))?;
        Ok(Self { isa, kernels: Kernels::of(isa), threads, team, spare: Mutex::default() })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    pub(crate) fn kernels(&self) -> &'static Kernels {
        self.kernels
    }

    /// The number of threads.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f` with each of `0..n` on the threads, in no order. Worth it from some 10 µs of work on.
    pub fn par_rows(&self, n: usize, f: impl Fn(usize) + Sync + Send) {
        if n > 1 && self.threads > 1 { self.team.run(n, &f) } else { (0..n).for_each(f) }
    }

    /// Calls `f(i, chunk)` with each chunk of `len` elements of `data`, on the threads, in no order.
    pub fn par_chunks<T: Send>(&self, data: &mut [T], len: usize, f: impl Fn(usize, &mut [T]) + Sync + Send) {
        let (all, start) = (data.len(), Start(data.as_mut_ptr()));
        self.par_rows(all.div_ceil(len), |i| {
            // SAFETY: chunk i lies inside the data and no other index has a part of it.
            let chunk = unsafe { start.part(i * len, len.min(all - i * len)) };
            f(i, chunk);
        });
    }

    /// One product: `x` `[rows, in]` to `y` `[rows, out]`.
    pub fn linear(&self, weight: &Weight, x: &[f32], rows: usize, y: &mut [f32]) {
        self.run(&mut [Job { weight, x, rows, y }]);
    }

    /// All products of `jobs`, spread together over the threads. Panics where a slice has not the size that its job
    /// names.
    pub fn run(&self, jobs: &mut [Job]) {
        // A weight costs a tenth of a nanosecond to decode and a fiftieth to multiply.
        let weights = |j: &Job| j.weight.rows() * j.weight.cols();
        let cost: usize = jobs.iter().map(|j| weights(j) / 10 + weights(j) * j.rows / 50).sum();
        let parallel = self.threads > 1 && cost >= INLINE;
        let outs: Vec<Out> = jobs.iter_mut().map(|j| Out(j.y.as_mut_ptr())).collect();
        let (packs, of_job) = self.pack(jobs, parallel);
        let units = self.units(jobs);
        let views: Vec<View> = jobs.iter().map(|j| View::new(j.weight)).collect();
        let one = |u: &Unit| {
            let pack = &packs[of_job[u.job]];
            SCRATCH.with_borrow_mut(|s| self.unit(&views[u.job], pack, u, outs[u.job].0, s));
        };
        if parallel {
            self.par_rows(units.len(), |i| one(&units[i]));
        } else {
            units.iter().for_each(one);
        }
        drop(views);
        let mut spare = self.spare.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        for p in packs {
            if spare.len() < 16 {
                spare.push(p.buffer);
            }
        }
    }

    /// Lays out the activations of all jobs; also gives each job's pack.
    fn pack<'a>(&self, jobs: &'a [Job], parallel: bool) -> (Vec<Packed<'a>>, Vec<usize>) {
        let mut packs: Vec<Packed> = Vec::new();
        let mut of_job = Vec::with_capacity(jobs.len());
        for job in jobs {
            let (rows, out, cols) = (job.rows, job.weight.rows(), job.weight.cols());
            let name = job.weight.name();
            assert_eq!(job.x.len(), rows * cols, "{name}: activations of {rows} x {cols}");
            assert_eq!(job.y.len(), rows * out, "{name}: results of {rows} x {out}");
            let layout = Layout::of(job.weight.form());
            let same = |p: &Packed| std::ptr::eq(p.x, job.x) && p.cols == cols && p.layout == layout;
            if let Some(i) = packs.iter().position(same) {
                of_job.push(i);
                continue;
            }
            let buffer = self
                .spare
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .pop()
                .unwrap_or_default();
            // One line more than the row, so that the rows of a panel do not all fall into the same cache sets.
            let stride = order::padded(cols) + 16;
            let mut pack = Packed { x: job.x, cols, layout, rows, stride, buffer, fits: Vec::new() };
            let out = pack.buffer.take(rows * stride);
            let fits: Vec<AtomicBool> = (0..rows).map(|_| AtomicBool::new(false)).collect();
            let one = |r: usize, out: &mut [f32]| {
                let x = &job.x[r * cols..][..cols];
                // SAFETY: the kernels are of an instruction set that the machine has.
                let fit = unsafe { (self.kernels.pack)(x, layout, &mut out[..stride - 16]) };
                fits[r].store(fit, Ordering::Relaxed);
            };
            if parallel && rows * cols > INLINE {
                self.par_chunks(out, stride, one);
            } else {
                out.chunks_mut(stride).enumerate().for_each(|(r, out)| one(r, out));
            }
            pack.fits = fits.into_iter().map(AtomicBool::into_inner).collect();
            of_job.push(packs.len());
            packs.push(pack);
        }
        (packs, of_job)
    }

    /// Cuts the jobs into units of whole scale blocks.
    fn units(&self, jobs: &[Job]) -> Vec<Unit> {
        let mut units = Vec::new();
        for (job, j) in jobs.iter().enumerate() {
            let (out, rows) = (j.weight.rows(), j.rows);
            if out == 0 || rows == 0 {
                continue;
            }
            let k = order::padded(j.weight.cols()).max(1);
            let wn = if rows == 1 {
                GROUP * (UNIT / (GROUP * k)).max(1)
            } else {
                (TILE_BYTES / (4 * k)).clamp(4, GROUP) / 4 * 4
            };
            let blocks = out.div_ceil(wn);
            // Few weight rows and many activation rows: split the latter too, down to what still pays the decoding.
            let parts = (4 * self.threads).div_ceil(blocks).min(rows.div_ceil(4 * PANEL));
            let xn =
                if self.threads == 1 { ROWS } else { rows.div_ceil(parts).next_multiple_of(PANEL).min(ROWS) };
            for x0 in (0..rows).step_by(xn) {
                for w0 in (0..out).step_by(wn) {
                    units.push(Unit { job, w0, wn: wn.min(out - w0), x0, xn: xn.min(rows - x0) });
                }
            }
        }
        units
    }

    fn unit(&self, v: &View, pack: &Packed, u: &Unit, y: *mut f32, scratch: &mut Scratch) {
        let row_of = |r: usize, w0: usize, wn: usize| {
            // SAFETY: `y` has `rows * v.rows` elements and these belong to this unit alone.
            unsafe { std::slice::from_raw_parts_mut(y.add(r * v.rows + w0), wn) }
        };
        if let Some(gemv) = self.kernels.gemv
            && u.xn == 1
            && pack.fits[u.x0]
            && v.cols <= order::LONGEST
        {
            for w0 in (u.w0..u.w0 + u.wn).step_by(GROUP) {
                let wn = GROUP.min(u.w0 + u.wn - w0);
                // SAFETY: the machine has these instructions; rows and activations were checked.
                if !unsafe { gemv(v, w0, pack.row(u.x0), &mut scratch.gemv, row_of(u.x0, w0, wn)) } {
                    self.tiles(v, pack, &Unit { w0, wn, ..*u }, scratch, row_of);
                }
            }
        } else {
            self.tiles(v, pack, u, scratch, row_of);
        }
    }

    /// A unit through decoded weights: slices of K, each decoded once, panels of activation rows, register tiles.
    fn tiles<'y>(
        &self,
        v: &View,
        pack: &Packed,
        u: &Unit,
        scratch: &mut Scratch,
        row_of: impl Fn(usize, usize, usize) -> &'y mut [f32],
    ) {
        let k = order::padded(v.cols);
        if k == 0 {
            (u.x0..u.x0 + u.xn).for_each(|r| row_of(r, u.w0, u.wn).fill(0.0));
            return;
        }
        // With one panel a slice of few weight rows is decoded into the first-level cache, used and forgotten; else the
        // slices of the whole unit stay for the next panels.
        let single = u.xn <= PANEL;
        let group = if single { FEW.min(u.wn) } else { u.wn };
        let weights = scratch.weights.take(group * if single { SLICE.min(k) } else { k });
        let lanes = scratch.lanes.take(PANEL * group * LANES);
        for w0 in (u.w0..u.w0 + u.wn).step_by(group) {
            let wn = group.min(u.w0 + u.wn - w0);
            for x0 in (u.x0..u.x0 + u.xn).step_by(PANEL) {
                let xn = PANEL.min(u.x0 + u.xn - x0);
                for k0 in (0..k).step_by(SLICE) {
                    let kn = SLICE.min(k - k0);
                    let slice = &mut weights[if single { 0 } else { k0 * wn }..][..kn * wn];
                    if x0 == u.x0 {
                        // SAFETY: the machine has these instructions.
                        unsafe { (self.kernels.decode)(v, w0, k0, kn, slice) };
                    }
                    self.panel(pack, x0, xn, k0, kn, slice, lanes);
                }
                for i in 0..xn {
                    let lanes = &lanes[i * wn * LANES..][..wn * LANES];
                    // SAFETY: the machine has these instructions; 16 lanes per output.
                    unsafe { (self.kernels.reduce)(lanes.as_ptr(), row_of(x0 + i, w0, wn)) };
                }
            }
        }
    }

    /// Adds columns `k0..k0 + kn` of activation rows `x0..x0 + xn` times the weight rows of `slice` to their lanes.
    fn panel(
        &self,
        pack: &Packed,
        x0: usize,
        xn: usize,
        k0: usize,
        kn: usize,
        slice: &[f32],
        lanes: &mut [f32],
    ) {
        let [tm, tn] = self.kernels.tile_rows;
        let x = pack.buffer.get(pack.rows * pack.stride);
        let wn = slice.len() / kn;
        assert!(x0 + xn <= pack.rows && k0 + kn <= pack.stride && lanes.len() >= xn * wn * LANES);
        for j in (0..wn).step_by(tn) {
            for i in (0..xn).step_by(tm) {
                let tile = Tile {
                    x: x[(x0 + i) * pack.stride + k0..].as_ptr(),
                    x_stride: pack.stride,
                    w: slice[j * kn..].as_ptr(),
                    w_stride: kn,
                    steps: kn / LANES,
                    acc: lanes[(i * wn + j) * LANES..].as_mut_ptr(),
                    acc_stride: wn * LANES,
                    first: k0 == 0,
                };
                // SAFETY: the machine has these instructions; rows, columns and lanes lie in the buffers.
                unsafe { (self.kernels.tile)(&tile, tm.min(xn - i), tn.min(wn - j)) };
            }
        }
    }
}
