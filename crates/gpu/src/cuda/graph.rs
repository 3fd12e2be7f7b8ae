//! Lists that repeat, as graphs: a decode step has the launches of the one before with a few other arguments.
//!
//! A list whose kernels and grids are those of the list before becomes a graph, one node after another; later lists of that
//! shape send the changed arguments only and start as a whole. The launches and their order are the same either way.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{result, sys};
use ops::DeviceError;

use super::device::check;

/// Launches from which on a graph is worth its making.
const SHORTEST: usize = 64;

/// An argument of a kernel.
#[derive(Clone, PartialEq)]
pub(super) enum Argument {
    Pointer(sys::CUdeviceptr),
    Bytes(Arc<[u8]>),
}

impl Argument {
    fn len(&self) -> usize {
        match self {
            Self::Pointer(_) => size_of::<sys::CUdeviceptr>(),
            Self::Bytes(b) => b.len(),
        }
    }

    fn address(&self) -> *mut c_void {
        match self {
            Self::Pointer(p) => std::ptr::from_ref(p).cast_mut().cast(),
            Self::Bytes(b) => b.as_ptr().cast_mut().cast(),
        }
    }
}

/// One launch with all that the driver is told.
#[derive(Clone, PartialEq)]
pub(super) struct Call {
    pub name: &'static str,
    /// A `CUfunction`.
    pub function: usize,
    pub groups: [u32; 3],
    pub threads: [u32; 3],
    pub shared: u32,
    pub arguments: Vec<Argument>,
}

impl Call {
    fn addresses(&self) -> Vec<*mut c_void> {
        self.arguments.iter().map(Argument::address).collect()
    }

    /// Starts it alone.
    pub fn launch(&self, stream: sys::CUstream) -> Result<(), DeviceError> {
        let [groups, threads] = [self.groups, self.threads].map(|n| (n[0], n[1], n[2]));
        let function = self.function as sys::CUfunction;
        // SAFETY: the function is loaded, the arguments match its parameters one by one (whoever made the call saw to
        // that), and the buffers live at least until the stream has run the launch (they are freed in stream order).
        let r = unsafe {
            result::launch_kernel(function, groups, threads, self.shared, stream, &mut self.addresses())
        };
        check(self.name, r)
    }

    /// Whether a graph's node of `other` can take this call by new arguments.
    fn fits(&self, other: &Call) -> bool {
        let sizes = |c: &Call| c.arguments.iter().map(Argument::len).collect::<Vec<_>>();
        self.function == other.function && self.shared == other.shared && sizes(self) == sizes(other)
    }

    /// Calls `with` with the node's parameters, which point into `self` and into a list that lives during the call.
    fn parameters<T>(&self, with: impl FnOnce(*const sys::CUDA_KERNEL_NODE_PARAMS) -> T) -> T {
        let mut addresses = self.addresses();
        let ([x, y, z], [tx, ty, tz]) = (self.groups, self.threads);
        with(&sys::CUDA_KERNEL_NODE_PARAMS {
            func: self.function as sys::CUfunction,
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: tx,
            blockDimY: ty,
            blockDimZ: tz,
            sharedMemBytes: self.shared,
            kernelParams: addresses.as_mut_ptr(),
            extra: std::ptr::null_mut(),
            kern: std::ptr::null_mut(),
            ctx: std::ptr::null_mut(),
        })
    }
}

fn same_shape(a: &[Call], b: &[Call]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.fits(b))
}

/// A graph that can start, and the calls its nodes make.
struct Graph {
    exec: sys::CUgraphExec,
    nodes: Vec<sys::CUgraphNode>,
    graph: sys::CUgraph,
    calls: Vec<Call>,
}

// SAFETY: driver handles, used under the lock that `Graphs` stands behind.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `Graph::new`, destroyed once; a running graph is finished by the driver first.
        unsafe {
            let _ = sys::cuGraphExecDestroy(self.exec);
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}

impl Graph {
    fn new(calls: Vec<Call>) -> Result<Self, DeviceError> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: writes one handle.
        check("CUDA graph", unsafe { sys::cuGraphCreate(&mut graph, 0) }.result())?;
        let mut nodes: Vec<sys::CUgraphNode> = Vec::with_capacity(calls.len());
        let mut made = Self { exec: std::ptr::null_mut(), nodes: Vec::new(), graph, calls: Vec::new() };
        for call in &calls {
            let mut node = std::ptr::null_mut();
            let before = nodes.last().map_or(std::ptr::null(), std::ptr::from_ref);
            // SAFETY: the graph is alive, `before` points to as many nodes as are said, and the parameters are copied.
            let r = call.parameters(|p| unsafe {
                sys::cuGraphAddKernelNode_v2(&mut node, graph, before, usize::from(!nodes.is_empty()), p)
            });
            check(call.name, r.result())?;
            nodes.push(node);
        }
        // SAFETY: the graph is alive; writes one handle.
        let r = unsafe { sys::cuGraphInstantiateWithFlags(&mut made.exec, graph, 0) };
        check("CUDA graph", r.result())?;
        (made.nodes, made.calls) = (nodes, calls);
        Ok(made)
    }

    /// Takes over what differs in `calls`, which have the graph's shape.
    fn update(&mut self, calls: Vec<Call>) -> Result<(), DeviceError> {
        for ((node, old), new) in self.nodes.iter().zip(&self.calls).zip(&calls) {
            if old != new {
                // SAFETY: the node is of this graph, the function is the same, and the parameters are copied.
                let r = new
                    .parameters(|p| unsafe { sys::cuGraphExecKernelNodeSetParams_v2(self.exec, *node, p) });
                check(new.name, r.result())?;
            }
        }
        self.calls = calls;
        Ok(())
    }
}

/// Shapes that are remembered. Decode steps have a few: a layer that compresses does so at some positions only.
const SHAPES: usize = 8;

/// A shape that came once, or the graph of one that came again.
enum Shape {
    Once(Vec<Call>),
    Again(Graph),
}

impl Shape {
    fn calls(&self) -> &[Call] {
        match self {
            Self::Once(calls) => calls,
            Self::Again(graph) => &graph.calls,
        }
    }
}

/// The shapes that repeat, the latest last.
#[derive(Default)]
pub(super) struct Graphs(Vec<Shape>);

impl Graphs {
    /// Starts `calls` in their order.
    pub fn run(&mut self, calls: Vec<Call>, stream: sys::CUstream) -> Result<(), DeviceError> {
        if calls.len() < SHORTEST {
            return calls.iter().try_for_each(|c| c.launch(stream));
        }
        let Some(i) = self.0.iter().position(|s| same_shape(s.calls(), &calls)) else {
            calls.iter().try_for_each(|c| c.launch(stream))?;
            self.0.drain(..(self.0.len() + 1).saturating_sub(SHAPES));
            self.0.push(Shape::Once(calls));
            return Ok(());
        };
        let graph = match self.0.remove(i) {
            Shape::Once(_) => Graph::new(calls)?,
            Shape::Again(mut graph) => {
                graph.update(calls)?;
                graph
            }
        };
        // SAFETY: graph and stream are alive.
        check("CUDA graph", unsafe { sys::cuGraphLaunch(graph.exec, stream) }.result())?;
        self.0.push(Shape::Again(graph));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(function: usize, groups: u32, arguments: Vec<Argument>) -> Call {
        Call { name: "k", function, groups: [groups, 1, 1], threads: [32, 1, 1], shared: 0, arguments }
    }

    #[test]
    fn a_shape_is_kernels_and_the_sizes_of_their_arguments() {
        let bytes = |b: &[u8]| Argument::Bytes(b.into());
        let a = [call(1, 8, vec![Argument::Pointer(16), bytes(&[1, 2])]), call(2, 1, vec![])];
        let other_values = [call(1, 9, vec![Argument::Pointer(32), bytes(&[3, 4])]), call(2, 1, vec![])];
        assert!(same_shape(&a, &other_values) && a != other_values);
        let other_kernel = [call(3, 8, vec![Argument::Pointer(16), bytes(&[1, 2])]), call(2, 1, vec![])];
        let longer = [call(1, 8, vec![Argument::Pointer(16), bytes(&[1, 2, 3])]), call(2, 1, vec![])];
        assert!(!same_shape(&a, &other_kernel) && !same_shape(&a, &longer) && !same_shape(&a, &a[..1]));
    }

    #[test]
    fn addresses_are_those_of_the_values() {
        let c = call(1, 1, vec![Argument::Pointer(0x1234), Argument::Bytes([7u8, 8].into())]);
        let at = c.addresses();
        // SAFETY: both point into `c`.
        let (pointer, first) = unsafe { (*at[0].cast::<u64>(), *at[1].cast::<u8>()) };
        assert_eq!((pointer, first), (0x1234, 7));
    }
}
