//! Tensors in a larger size, made by the launch thread in its turn: no program is compiled for each size, and Python waits
//! for nothing.
//!
//! Where the device's memory is the host's, elements are copied there; else they go by way of the host.

use crate::buffers::{Buffers, element, upload};
use crate::config::Mode;
use crate::error::{self, Error, Refusal, Result};
use crate::events;
use crate::executor::Pad;
use crate::launch::{Launcher, out_of_memory};
use crate::picked;
use crate::site::Site;
use crate::stream::Stream;
use crate::strided::row_major;
use crate::tensor::TensorRef;
use crate::threads::Whose;
use crate::value::{State, Value};
use crate::view::View;
use oxitorch_capture::Reason;
use oxitorch_hlo::TensorType;
use oxitorch_pjrt as pjrt;
use smallvec::{SmallVec, smallvec};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Stream {
    /// Gives `dst`, which nobody has seen and has all of its storage, the elements of `src`, from the first place of each
    /// dimension on, and `fill`, the bytes of an element, behind them. False if `src` is no plain value of this device.
    pub fn pad(
        &self,
        src: &TensorRef<'_>,
        dst: &TensorRef<'_>,
        fill: &[u8],
        site: Site,
        mode: Mode,
    ) -> Result<bool, Refusal> {
        events::here(site);
        let (slot, view) = (src.device()?, src.view()?);
        let to = dst.ty()?;
        let fits =
            view.sizes.len() == to.shape.len() && view.sizes.iter().zip(&to.shape).all(|(n, m)| n <= m);
        let is_plain = !view.conj && !view.neg && fits && view.dtype == to.dtype && dst.numel() > 0;
        let Some(held) = slot.held().filter(|_| is_plain && self.devices.is_none()) else { return Ok(false) };
        {
            let mut w = self.lock(site);
            w.leave("a tensor that is padded beside its program")?;
            if w.is_recorded(held.value()) {
                self.flush_for(&mut w, &Whose::Value(held.value()), Reason::Read)?;
            }
            let value = self.to_write(&mut w, to, site)?;
            w.write(dst.device()?, dst, value.clone())?;
            self.executor.pad(Pad { from: held.value().clone(), view, to: value, fill: fill.into() });
        }
        self.after_op(mode)?;
        Ok(true)
    }

    /// Gives inputs these types, with what they hold in the first places of each dimension.
    pub(crate) fn enlarge(&self, inputs: &mut [Arc<Value>], types: &[TensorType]) {
        for (input, ty) in inputs.iter_mut().zip(types).filter(|(input, ty)| input.ty != **ty) {
            let to = Value::sharded(ty.clone(), None, State::Pending, input.site);
            self.executor.pad(Pad {
                from: input.clone(),
                view: first_of(&input.ty.shape, &input.ty),
                to: to.clone(),
                fill: smallvec![0; ty.dtype.size_bytes()],
            });
            *input = to;
        }
    }

    /// Takes the first places of each dimension of results for values that are smaller.
    pub(crate) fn cut_to_size(&self, results: Vec<(Arc<Value>, Arc<Value>)>) {
        for (from, to) in results {
            let (view, fill) = (first_of(&from.ty.shape, &to.ty), smallvec![0; to.ty.dtype.size_bytes()]);
            self.executor.pad(Pad { from, view, to, fill });
        }
    }
}

/// Values of these types for results, and those of them that are larger, with the results.
#[allow(clippy::type_complexity)] // two lists, of which the second has pairs
pub(crate) fn enlarged(
    results: SmallVec<[Arc<Value>; 2]>,
    types: &[TensorType],
) -> (SmallVec<[Arc<Value>; 2]>, Vec<(Arc<Value>, Arc<Value>)>) {
    let mut larger = Vec::new();
    let value = |(own, ty): (Arc<Value>, &TensorType)| {
        if own.ty == *ty {
            return own;
        }
        let made = Value::sharded(ty.clone(), None, State::Pending, own.site);
        larger.push((made.clone(), own));
        made
    };
    (results.into_iter().zip(types).map(value).collect(), larger)
}

/// The first places of each dimension of a row-major tensor of some shape, as many as a type has.
fn first_of(shape: &[i64], ty: &TensorType) -> View {
    let (sizes, strides) = (ty.shape.clone(), row_major(shape));
    View { dtype: ty.dtype, sizes, strides, offset: 0, conj: false, neg: false }
}

impl Launcher {
    /// Pads a tensor in its turn.
    pub(crate) fn run_pad(&self, pad: &Pad) {
        let made = catch_unwind(AssertUnwindSafe(|| self.padded(pad)));
        let made = made.unwrap_or_else(|_| Err(Error::runtime("padding panicked; please report this")));
        let state = match made {
            Ok(buffers) => {
                self.memory.charge(pad.to.bytes(), &pad.to.charge);
                self.metrics.count(&self.metrics.pads);
                State::Ready(buffers)
            }
            Err(e) => {
                let e = e.at(pad.to.site);
                self.fail(&e);
                State::Failed(e)
            }
        };
        *pad.to.state.lock() = state;
    }

    fn padded(&self, pad: &Pad) -> Result<Buffers> {
        if self.stopped.load(Ordering::Acquire) {
            return Err(Error::runtime("the tpu device is closed"));
        }
        self.await_value(&pad.from)?;
        if !self.memory.fits(pad.to.bytes()) {
            return Err(out_of_memory(self.memory, self.device, pad.to.bytes()));
        }
        let (client, ty) = (self.target.client()?, &pad.to.ty);
        let made = |bytes: &[u8]| {
            let device = &client.devices()[self.at];
            let there =
                client.buffer_filled(element(ty.dtype), &ty.shape, device, |out| pad.write(bytes, out))?;
            there.map_or_else(
                || {
                    let mut out = vec![0; pad.to.whole_bytes() as usize];
                    pad.write(bytes, &mut out);
                    upload(client, self.at, ty, &out)
                },
                Ok,
            )
        };
        let failed = |e: pjrt::Error| error::device("padding a tensor", &e);
        let from = self.buffers(&pad.from)?;
        let Some(whole) = from.whole() else {
            return Err(Error::runtime("a value of a mesh was padded on one device; please report this"));
        };
        let buffer = match whole.look(made).map_err(failed)? {
            Some(buffer) => buffer,
            None => {
                let mut bytes = vec![0; whole.size_bytes()];
                whole.to_host(&mut bytes).map_err(failed)?;
                made(&bytes)
            }
        };
        buffer.map(Buffers::one).map_err(failed)
    }

    /// Whether a tensor can be padded without waiting.
    pub(crate) fn is_there(&self, pad: &Pad) -> bool {
        match &*pad.from.state.lock() {
            State::Ready(buffers) => {
                buffers.each().iter().all(|b| b.ready_event().and_then(|e| e.is_ready()).unwrap_or(false))
            }
            State::Failed(_) | State::Host(_) => true,
            _ => false,
        }
    }
}

impl Pad {
    /// Writes all of the larger tensor, row-major; `bytes` are those of the value.
    fn write(&self, bytes: &[u8], out: &mut [u8]) {
        let item = self.to.ty.dtype.size_bytes();
        picked::padded(bytes, item, &self.view, (&self.to.ty.shape, &self.fill), out);
    }
}
