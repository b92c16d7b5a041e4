//! The part of the door that compiled graphs go through.

use super::{KEPT, draw, enter, enter_code, keep_message, report, tensor};
use crate::abi::slice;
use crate::abi::{self, ERROR, FALLBACK, OK, Reply, Tensor, out, traced as outcome};
use crate::state::{Graph, State};
use crate::storage;
use oxitorch_aten::dtype;
use oxitorch_engine::{
    Ends, Error, ErrorKind, Home, Prepared, Recipe, Refusal, Site, Slot, Stands, Switches, TensorRef, Traced,
};
use smallvec::SmallVec;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Recipes of one graph: more than these are not tried.
const MAX_RECIPES: usize = 16;

/// # Safety
/// `n` tensors that the shim described, alive during `'a`.
pub(super) unsafe fn tensors<'a>(p: *const Tensor, n: u32) -> SmallVec<[TensorRef<'a>; 16]> {
    // SAFETY: by the caller's promise.
    unsafe { slice(p, n as usize).iter().map(|t| tensor(t)).collect() }
}

/// All switches, the precision of products among them.
pub(super) fn switches(s: &State) -> Switches {
    s.switches(true)
}

pub(super) unsafe extern "C" fn watch(
    device: i32,
    args: *const Tensor,
    nargs: u32,
    error: *mut abi::Error,
) -> i32 {
    let mut began = false;
    enter_code(error, |s| {
        // SAFETY: described by the shim, for this call.
        let args = unsafe { tensors(args, nargs) };
        s.engine.metrics().play();
        let stream = s.engine.stream(device.max(0) as usize)?;
        began = stream.watch(&args, crate::sites::here(), &switches(s))?;
        Ok(())
    });
    i32::from(began)
}

pub(super) unsafe extern "C" fn watched(
    graph: i64,
    device: i32,
    args: *const Tensor,
    nargs: u32,
    outs: *const Tensor,
    nouts: u32,
    error: *mut abi::Error,
) -> i32 {
    let mut kept = false;
    enter_code(error, |s| {
        // SAFETY: described by the shim, for this call.
        let (args, outs) = unsafe { (tensors(args, nargs), tensors(outs, nouts)) };
        let stream = s.engine.stream(device.max(0) as usize)?;
        let Some(recipe) = stream.watched(&args, &outs, &switches(s))? else { return Ok(()) };
        keep_recipe(s, graph, recipe);
        kept = true;
        Ok(())
    });
    i32::from(kept)
}

fn keep_recipe(s: &State, graph: i64, recipe: Recipe) {
    let mut graphs = s.graphs.lock();
    let recipes = &mut graphs.entry(graph).or_default().recipes;
    if recipes.len() == MAX_RECIPES {
        recipes.remove(0);
    }
    recipes.push(Arc::new(recipe));
}

pub(super) unsafe extern "C" fn trace(
    device: i32,
    args: *const Tensor,
    nargs: u32,
    dry: i32,
    error: *mut abi::Error,
) -> i32 {
    let mut began = false;
    enter_code(error, |s| {
        // SAFETY: described by the shim, for this call.
        let args = unsafe { tensors(args, nargs) };
        let stream = s.engine.stream(device.max(0) as usize)?;
        began = stream.trace(&args, crate::sites::here(), &switches(s), dry != 0)?;
        Ok(())
    });
    i32::from(began)
}

pub(super) unsafe extern "C" fn trace_also(device: i32, of: *const Tensor, error: *mut abi::Error) -> i32 {
    enter_code(error, |s| {
        // SAFETY: described by the shim, for this call.
        let of = unsafe { tensors(of, 1) };
        s.engine.stream(device.max(0) as usize)?.trace_also(&of[0], crate::sites::here())
    })
}

pub(super) unsafe extern "C" fn traced(
    graph: i64,
    device: i32,
    args: *const Tensor,
    nargs: u32,
    outs: *const Tensor,
    nouts: u32,
    ends_step: u8,
    dry: u8,
    donated: *const u32,
    ndonated: u32,
    error: *mut abi::Error,
) -> i32 {
    let mut found = None;
    let code = enter_code(error, |s| {
        // SAFETY: described by the shim, for this call.
        let (args, outs) = unsafe { (tensors(args, nargs), tensors(outs, nouts)) };
        // SAFETY: passed by the shim, for this call.
        let donated = unsafe { slice(donated, ndonated as usize) };
        let stream = s.engine.stream(device.max(0) as usize)?;
        let ends = Ends { step: ends_step != 0, dry: dry != 0, donated };
        found = Some(match stream.traced(&args, &outs, &switches(s), ends)? {
            Traced::Function(recipe) => {
                keep_recipe(s, graph, *recipe);
                (outcome::FUNCTION, String::new())
            }
            Traced::Refused(why, site) => (outcome::REFUSED, format!("{why}{}", at(site))),
            Traced::Kept(sites) => {
                let lines: BTreeSet<String> = sites.iter().map(|site| at(*site)).collect();
                (outcome::KEPT, lines.into_iter().collect::<Vec<_>>().join("\n"))
            }
        });
        Ok(())
    });
    let Some((found, text)) = found else { return code };
    // SAFETY: the shim passes an error to fill.
    unsafe { (*error).message = keep_message(&text) };
    found
}

/// Makes the programs of the function that was traced last under this number: their numbers among those of the process, and
/// the collectives between them in words.
pub(crate) fn prepare(s: &State, graph: i64, device: usize) -> Result<Vec<Prepared<usize>>, Refusal> {
    let recipe = s.graphs.lock().get(&graph).and_then(|g| g.recipes.last().cloned());
    let Some(recipe) = recipe else { return Ok(Vec::new()) };
    s.engine.prepare(device, &recipe, crate::sites::here(), &switches(s))
}

/// Makes what calls of a size are recorded by, under a new number: of functions that were traced under these, at a bound and
/// at the size. Or says why there is nothing.
pub(crate) fn bounded(
    s: &State,
    (bound, sample): (i64, i64),
    at_bound: bool,
    graph: i64,
    device: usize,
) -> Result<Option<String>, Refusal> {
    let last = |number: i64| s.graphs.lock().get(&number).and_then(|g| g.recipes.last().cloned());
    let (Some(bound), Some(sample)) = (last(bound), last(sample)) else {
        return Ok(Some("what it records is not known any more".to_owned()));
    };
    let pair = (&*bound, &*sample);
    Ok(match s.engine.bounded(device, pair, at_bound, crate::sites::here(), &switches(s))? {
        Ok(recipe) => {
            keep_recipe(s, graph, recipe);
            None
        }
        Err(why) => Some(why),
    })
}

/// Makes what calls with other numbers are recorded by, under a new number: of a function that was traced under these, each
/// time with other numbers in place of its own. Or says why there is nothing.
pub(crate) fn numbered(
    s: &State,
    runs: &[i64],
    numbers: &[Stands],
    graph: i64,
) -> Result<Option<String>, Refusal> {
    let last = |number: &i64| s.graphs.lock().get(number).and_then(|g| g.recipes.last().cloned());
    let recipes: Option<Vec<Arc<Recipe>>> = runs.iter().map(last).collect();
    let recipes = recipes.unwrap_or_default();
    let Some((first, others)) = recipes.split_first() else {
        return Ok(Some("what it records is not known any more".to_owned()));
    };
    let others: Vec<&Recipe> = others.iter().map(|r| &**r).collect();
    Ok(match first.numbered(&others, numbers, &switches(s)) {
        Ok(recipe) => {
            keep_recipe(s, graph, recipe);
            None
        }
        Err(why) => Some(why.to_owned()),
    })
}

/// Where something happened, for a message.
pub(super) fn at(site: Site) -> String {
    site.describe().map_or_else(String::new, |line| format!(" at {line}"))
}

pub(super) unsafe extern "C" fn untrace(
    device: i32,
    args: *const Tensor,
    nargs: u32,
    error: *mut abi::Error,
) -> i32 {
    enter_code(error, |s| {
        // SAFETY: described by the shim, for this call.
        let args = unsafe { tensors(args, nargs) };
        Ok(s.engine.stream(device.max(0) as usize)?.untrace(&args, &switches(s))?)
    })
}

pub(super) unsafe extern "C" fn trace_pause(device: i32, on: u8, error: *mut abi::Error) -> i32 {
    enter_code(error, |s| {
        s.engine.stream(device.max(0) as usize)?.trace_pause(on != 0);
        Ok(())
    })
}

pub(super) unsafe extern "C" fn replay(
    graph: i64,
    device: i32,
    args: *const Tensor,
    nargs: u32,
    reply: *mut Reply,
) -> i32 {
    // SAFETY: the shim passes a reply to fill, and tensors that it described for this call.
    let (reply, args) = unsafe { (&mut *reply, slice(args, nargs as usize)) };
    // SAFETY: as above.
    let done = unsafe { recorded(graph, device, args, &[]) };
    answer(done, device, reply)
}

/// Records a graph's call by a recipe, and lays its results out for the shim; false if no recipe is for these arguments.
/// Those of these numbers may be overwritten.
///
/// # Safety
/// Tensors that the shim described, alive during the call.
pub(crate) unsafe fn replay_held(
    graph: i64,
    device: i32,
    args: &[Tensor],
    given: &[u32],
    reply: &mut Reply,
) -> Result<bool, Refusal> {
    // SAFETY: by the caller's promise.
    let done = unsafe { recorded(graph, device, args, given) }?;
    let found = done.is_some();
    if let Some(recorded) = done {
        keep(recorded, device, reply);
    }
    Ok(found)
}

/// # Safety
/// Tensors that the shim described, alive during the call.
unsafe fn recorded(
    graph: i64,
    device: i32,
    args: &[Tensor],
    given: &[u32],
) -> Result<Option<Recorded>, Refusal> {
    enter(|s| {
        // SAFETY: by the caller's promise.
        let args: SmallVec<[TensorRef<'_>; 16]> = args.iter().map(|t| unsafe { tensor(t) }).collect();
        by_recipe(s, graph, device, &args, given)
    })
}

/// A recipe by which a call was recorded, which of the graph's results are tensors (empty: all), and the storages made.
pub(super) type Recorded = (Arc<Recipe>, Vec<bool>, Vec<Slot>);

/// Records by a recipe of the graph, if one is for these arguments. Those of these numbers may be overwritten.
pub(super) fn by_recipe(
    s: &State,
    graph: i64,
    device: i32,
    args: &[TensorRef<'_>],
    given: &[u32],
) -> Result<Option<Recorded>, Refusal> {
    let Some(Graph { recipes, defined }) = s.graphs.lock().get(&graph).cloned() else { return Ok(None) };
    let stream = s.engine.stream(device.max(0) as usize)?;
    // A recipe names the default generator, or others that who calls a function of torch.tpu.jit keeps.
    let random = |generator: Option<usize>, blocks: u64| draw(s, device, generator, blocks);
    let (site, switches) = (crate::sites::here(), switches(s));
    for recipe in recipes.into_iter().rev() {
        if let Some(made) = stream.replay_giving(&recipe, (args, given), site, &switches, &random)? {
            return Ok(Some((recipe, defined, made)));
        }
    }
    Ok(None)
}

/// What the shim gets for a call that may have been recorded by a recipe.
pub(super) fn answer(done: Result<Option<Recorded>, Refusal>, device: i32, reply: &mut Reply) -> i32 {
    match done {
        Ok(Some(recorded)) => {
            keep(recorded, device, reply);
            OK
        }
        Ok(None) => FALLBACK,
        Err(refusal) => {
            let e = match refusal {
                Refusal::Error(e) => e,
                Refusal::Fallback(why) => Error::new(ErrorKind::NotImplemented, why),
            };
            report(&mut reply.error, &e);
            ERROR
        }
    }
}

/// Lays the results of a graph out for the shim.
fn keep((recipe, defined, made): Recorded, device: i32, reply: &mut Reply) {
    let mut made: Vec<Option<Slot>> = made.into_iter().map(Some).collect();
    let mut first = vec![0; made.len()];
    KEPT.with_borrow_mut(|k| {
        k.outs.clear();
        let mut undefined = defined.iter();
        for output in recipe.outputs() {
            for _ in undefined.by_ref().take_while(|defined| !**defined) {
                k.outs.push(abi::Out { kind: out::UNDEFINED, ..abi::Out::default() });
            }
            let (ty, sizes, strides, offset, contiguous) = output.layout();
            let mut o = abi::Out {
                device_index: device,
                dtype: dtype::code(ty) as i16,
                contiguous: u8::from(contiguous),
                ndim: sizes.len() as i32,
                sizes: sizes.as_ptr(),
                strides: strides.as_ptr(),
                offset,
                ..abi::Out::default()
            };
            match output.home() {
                Home::Argument(arg) => (o.kind, o.arg) = (out::VIEW_ARG, arg as i32),
                Home::Made(m) => match made[m].take() {
                    Some(slot) => {
                        first[m] = k.outs.len() as i32;
                        o.kind = out::NEW;
                        o.nbytes = slot.nbytes as i64;
                        o.slot = storage::into_raw(slot);
                    }
                    None => (o.kind, o.arg) = (out::VIEW_OUT, first[m]),
                },
            }
            k.outs.push(o);
        }
        k.outs.extend(undefined.map(|_| abi::Out { kind: out::UNDEFINED, ..abi::Out::default() }));
        reply.outs = k.outs.as_ptr();
        reply.nouts = k.outs.len() as u32;
        k.recipe = Some(recipe);
    });
}
