//! The router.

use ops::Routing;

use crate::{Buf, Device, Gpu, record::u32_of};

/// Most experts of a layer, as in router.metal.
pub(crate) const MOST: usize = 1024;

#[repr(C)]
struct Params {
    experts: u32,
    top: u32,
    scale: f32,
    images: u32,
}

impl<D: Device> Gpu<D> {
    /// The chosen experts of every row and their weights.
    pub(crate) fn routed(
        &self,
        logits: &Buf<D>,
        bias: &Buf<D>,
        image: Option<(&Buf<D>, &[bool])>,
        top: usize,
        scale: f32,
    ) -> Routing<Buf<D>> {
        let (rows, experts) = (logits.rows(), logits.width());
        assert!(experts <= MOST && top <= experts, "{top} of {experts} experts");
        let routing = Routing { experts: self.indices(&[rows, top]), weights: self.values(&[rows, top]) };
        let (other, flags) = image.map_or((bias, bias.clone()), |(other, flags)| {
            let flags: Vec<u32> = flags.iter().map(|f| (*f).into()).collect();
            (other, self.words(&flags))
        });
        let images = image.is_some().into();
        let params = Params { experts: u32_of(experts), top: u32_of(top), scale, images };
        let bindings = [logits, bias, other, &flags, &routing.experts, &routing.weights].map(Buf::binding);
        self.launch("router", &[], &bindings, &params, [rows, 1, 1], [128, 1, 1]);
        routing
    }
}
