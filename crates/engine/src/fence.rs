//! What keeps a part of a forward that a backward computes again apart from that forward, where both are one program.
//!
//! Elsewhere a window ends there. Where none can, in a function that is one program, whatever the part takes from before
//! comes through `stablehlo.optimization_barrier`, together with what the backward has computed last. So the compiler does
//! not find that it has the same values already, and does not compute them before the backward is there.
//!
//! A compiler that forgets barriers before it chooses an order has to see it in the values, which may take a pass over
//! them ([`Builder::after`](oxitorch_hlo::Builder::after)): each op of the part takes one such value at least. Weights,
//! which are inputs of the program, are spared.
//!
//! What was offloaded comes back behind what the backward has computed last, too: a compiler that has memory to spare would
//! bring it back as soon as it is there.

use crate::inst::{Inst, Kind};
use crate::recipe::address;
use crate::shared::Shared;
use crate::threads::Fence;
use crate::value::Value;
use crate::window::{Outputs, Window};
use oxitorch_hlo::MemorySpace;
use smallvec::SmallVec;
use std::sync::Arc;

type Operands = SmallVec<[Arc<Value>; 6]>;

impl Window {
    /// A fence behind what is recorded so far.
    pub(crate) fn new_fence(&self) -> Box<Fence> {
        let after = self.produced.iter().rev().find_map(Option::clone);
        Box::new(Fence {
            epoch: self.epoch,
            first: self.produced.len() as u32,
            after,
            behind: Default::default(),
        })
    }

    /// What stands for the operands of an op behind the fence of the running thread.
    pub(crate) fn behind_fence(&mut self, mut operands: Operands) -> Operands {
        // In another window there is nothing to be kept apart from.
        let Some(mut fence) = self.thread.fence.take_if(|fence| fence.epoch == self.epoch) else {
            return operands;
        };
        let is_input = |w: &Window, v: &Value| w.result_number(v).is_none();
        let is_behind = |w: &Window, v: &Value| w.result_number(v).is_some_and(|n| n >= fence.first);
        let all_inputs = operands.iter().all(|v| is_input(self, v));
        let smallest = operands.iter().map(|v| v.bytes()).min();
        for v in &mut operands {
            if is_behind(self, v) {
                continue;
            }
            let firmly = !is_input(self, v) || all_inputs && Some(v.bytes()) == smallest;
            let place = (address(&**v), firmly);
            if let Some(behind) = fence.behind.get(&place) {
                *v = behind.clone();
                continue;
            }
            *v = self.fenced(v, fence.after.clone(), firmly);
            fence.behind.insert(place, v.clone());
        }
        self.thread.fence = Some(fence);
        operands
    }

    /// Records that a value of the host is wanted on the device.
    pub(crate) fn record_reload(&mut self, inst: &Shared<Inst>, mut operands: Operands) -> Outputs {
        let Some((value, after)) = operands.first().zip(self.computed_last()) else {
            return self.record_behind(inst, operands, &[]);
        };
        let kind = Kind::Reload { ty: value.ty.clone(), after: after.ty.clone() };
        let Ok(inst) = self.instances.get(kind) else {
            return self.record_behind(inst, operands, &[]);
        };
        operands.push(after);
        self.record_behind(&inst, operands, &[])
    }

    /// The last result of the window that is on the device.
    fn computed_last(&self) -> Option<Arc<Value>> {
        let mut end = self.produced.len();
        for inst in self.ops.insts.iter().rev() {
            let results = end - inst.outputs.len()..end;
            end = results.start;
            if inst.memory() != Some(MemorySpace::PinnedHost)
                && let Some(value) = self.produced[results].iter().rev().find_map(Option::clone)
            {
                return Some(value);
            }
        }
        None
    }

    fn fenced(&mut self, value: &Arc<Value>, after: Option<Arc<Value>>, firmly: bool) -> Arc<Value> {
        let after_ty = after.as_ref().map(|v| v.ty.clone());
        let kind = Kind::Fence { ty: value.ty.clone(), after: after_ty, firmly };
        let Ok(inst) = self.instances.get(kind) else {
            self.spoil("a barrier that cannot be lowered; please report this");
            return value.clone();
        };
        let operands = std::iter::once(value.clone()).chain(after);
        let behind = self.record_behind(&inst, operands, &[]).pop().flatten();
        behind.unwrap_or_else(|| value.clone())
    }
}
