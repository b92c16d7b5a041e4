//! Whether the images of a program are better off with their channels last.
//!
//! PyTorch's convolutions take such images as they are, and turn others round at each call. What follows a convolution keeps
//! to its order (`hlo`'s `builder/order.rs`), so that an image which stays within the program is never turned. One that comes
//! in, or is seen outside, is, and XLA's compiler for CPUs takes much longer over that than a convolution does.

use crate::inst::Inst;
use crate::ops::{Ops, PRODUCED};
use oxitorch_aten::families::conv::is_less_than_its_weight;
use oxitorch_hlo::{Dims, TensorType};
use rustc_hash::FxHashSet;

/// How many times as long turning an image round takes at the program's boundary, about.
const AT_THE_BOUNDARY: u64 = 8;

/// Whether convolutions would turn more than crosses the program's boundary. `live` are the results that are seen.
pub(crate) fn stay_within(ops: &Ops, inputs: &[TensorType], live: &[u32]) -> bool {
    let kernels: FxHashSet<&Dims> =
        ops.insts.iter().filter_map(|inst| Some(&inst.operands.get(images(inst)?)?.shape)).collect();
    if kernels.is_empty() {
        return false;
    }
    let bytes = |ty: &TensorType| match ty.rank() == 4 && !kernels.contains(&ty.shape) {
        true => ty.bytes().unsigned_abs(),
        false => 0, // a kernel, its gradient, what an optimizer keeps of it
    };
    let live: FxHashSet<u32> = live.iter().copied().collect();
    let (mut turned, mut seen) = (0, inputs.iter().map(bytes).sum::<u64>());
    let mut sizes: Vec<u64> = Vec::new(); // of all results
    for op in ops.iter() {
        sizes.extend(op.inst.outputs.iter().map(|out| out.as_ref().map_or(0, |out| bytes(&out.ty))));
        let taken = turned_images(op.inst);
        let given = op.results().take(usize::from(taken > 0)).map(|number| number as u32 | PRODUCED);
        let within = |code: &u32| code & PRODUCED != 0 && !live.contains(&(code & !PRODUCED));
        let all = op.operands.iter().copied().take(taken).chain(given);
        turned += all.filter(within).map(|code| sizes[(code & !PRODUCED) as usize]).sum::<u64>();
        seen += op.results().filter(|&n| live.contains(&(n as u32))).map(|n| sizes[n]).sum::<u64>();
    }
    turned > AT_THE_BOUNDARY * seen
}

/// How many of its first operands are images that are turned.
fn turned_images(inst: &Inst) -> usize {
    let Some(taken) = images(inst) else { return 0 };
    match (inst.operands.get(taken - 1), inst.operands.get(taken)) {
        (Some(image), Some(weight)) if !is_less_than_its_weight(image, weight) => taken,
        _ => 0,
    }
}

/// How many of its first operands are images, if it is a convolution; its kernel follows them, and its first result is one.
fn images(inst: &Inst) -> Option<usize> {
    match inst.name() {
        "convolution" | "convolution_overrideable" => Some(1),
        "convolution_backward" | "convolution_backward_overrideable" => Some(2),
        _ => None,
    }
}
