//! The part of the door for ops that have no row but a decomposition in Python.

use super::graphs::{answer, by_recipe};
use super::{arg, enter};
use crate::abi::{Arg, Reply, slice};
use crate::state;
use oxitorch_aten::Schema;
use oxitorch_engine::{ArgRef, Decomposed, TensorRef};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::panic::catch_unwind;
use std::ptr::null;

/// Those that were asked for, by name. They stay for ever.
static KNOWN: Mutex<BTreeMap<String, &'static Decomposed>> = Mutex::new(BTreeMap::new());

/// In place of a graph's number: the op runs on the CPU.
const NO_DECOMPOSITION: i64 = -1;

/// Notes that an op, `aten::hash_tensor`, has no decomposition.
pub(crate) fn has_none(name: &str) {
    if let Some(op) = KNOWN.lock().get(name) {
        op.has_none();
    }
}

pub(super) unsafe extern "C" fn decomposable(name: *const c_char, schema: *const c_char) -> *const c_void {
    // SAFETY: C strings from the shim.
    let (name, schema) = unsafe { (CStr::from_ptr(name), CStr::from_ptr(schema)) };
    let bound = catch_unwind(|| {
        let op = Decomposed::bind(&Schema::parse(schema.to_str().ok()?).ok()?)?;
        let op: &'static Decomposed = Box::leak(Box::new(op));
        KNOWN.lock().insert(name.to_str().ok()?.to_owned(), op);
        Some(std::ptr::from_ref(op).cast())
    });
    bound.ok().flatten().unwrap_or(null())
}

pub(super) unsafe extern "C" fn decomposed(
    op: *const c_void,
    device: i32,
    args: *const Arg,
    nargs: u32,
    graph: *mut i64,
    reply: *mut Reply,
) -> i32 {
    // SAFETY: the shim passes what `decomposable` returned, a number and a reply to fill, and `nargs` arguments that live
    // during the call.
    let (op, graph, reply, args) =
        unsafe { (&*op.cast::<Decomposed>(), &mut *graph, &mut *reply, slice(args, nargs as usize)) };
    *graph = NO_DECOMPOSITION;
    let done = enter(|s| {
        // SAFETY: they live during this call.
        let args: SmallVec<[ArgRef<'_>; 6]> = args.iter().map(|a| unsafe { arg(a) }).collect();
        let Some(number) = op.kind(&args, state::new_graph) else { return Ok(None) };
        *graph = number;
        let mut tensors: SmallVec<[TensorRef<'_>; 16]> = SmallVec::new();
        for arg in args {
            match arg {
                ArgRef::Tensor(t) => tensors.push(t),
                ArgRef::Tensors(list) => tensors.extend(list),
                _ => {}
            }
        }
        tensors.retain(|t| t.is_defined());
        by_recipe(s, number, device, &tensors, &[])
    });
    answer(done, device, reply)
}
