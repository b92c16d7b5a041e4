//! The part of the door that the bodies of loops and branches go through.

use super::graphs::{at, switches, tensors};
use super::{draw, enter, enter_code, keep_message, keep_outputs, report};
use crate::abi::{self, ERROR, FALLBACK, OK, Reply, Tensor, slice};
use crate::state::State;
use oxitorch_engine::{Asked, Error, ErrorKind, Outputs, Refusal, Site};
use std::ffi::{CStr, c_char};

pub(super) unsafe extern "C" fn begin(device: i32, like: *const Tensor, n: u32, reply: *mut Reply) -> i32 {
    // SAFETY: the shim passes a reply to fill.
    let reply = unsafe { &mut *reply };
    let done = enter(|s| {
        // SAFETY: described by the shim, for this call.
        let like = unsafe { tensors(like, n) };
        let types = like.iter().map(|t| t.ty()).collect::<Result<Vec<_>, Refusal>>()?;
        s.engine.stream(device.max(0) as usize)?.begin_body(&types, crate::sites::here(), &switches(s))
    });
    answer(done.map(|made| made.ok_or_else(String::new)), device, reply)
}

/// What the shim gets: results, or why there are none.
fn answer(done: Result<Result<Outputs, String>, Refusal>, device: i32, reply: &mut Reply) -> i32 {
    match done {
        Ok(Ok(outputs)) => {
            keep_outputs(outputs, device, reply);
            OK
        }
        Ok(Err(why)) => {
            reply.error.message = keep_message(&why);
            FALLBACK
        }
        Err(Refusal::Fallback(why)) => {
            reply.error.message = keep_message(&why);
            FALLBACK
        }
        Err(Refusal::Error(e)) => {
            report(&mut reply.error, &e);
            ERROR
        }
    }
}

pub(super) unsafe extern "C" fn end(
    device: i32,
    gives: *const Tensor,
    n: u32,
    error: *mut abi::Error,
) -> i32 {
    let mut spoiled = None;
    let code = enter_code(error, |s| {
        // SAFETY: described by the shim, for this call.
        let gives = unsafe { tensors(gives, n) };
        let stream = s.engine.stream(device.max(0) as usize)?;
        spoiled = stream.end_body(&gives, crate::sites::here(), &random(s, device))?;
        Ok(())
    });
    let Some(spoiled) = spoiled else { return code };
    // SAFETY: the shim passes an error to fill.
    unsafe { (*error).message = keep_message(&why(spoiled)) };
    FALLBACK
}

pub(super) unsafe extern "C" fn drop(device: i32, open: u8, error: *mut abi::Error) {
    let mut spoiled = None;
    let code = enter_code(error, |s| {
        let stream = s.engine.stream(device.max(0) as usize)?;
        spoiled = stream.drop_body(open != 0, crate::sites::here(), &random(s, device));
        Ok(())
    });
    if code == OK {
        // SAFETY: the shim passes an error to fill.
        unsafe { (*error).message = keep_message(&spoiled.map(why).unwrap_or_default()) };
    }
}

pub(super) unsafe extern "C" fn control(
    device: i32,
    name: *const c_char,
    numbers: *const i64,
    operands: *const Tensor,
    n: u32,
    reply: *mut Reply,
) -> i32 {
    // SAFETY: the shim passes a reply to fill.
    let reply = unsafe { &mut *reply };
    let done = enter(|s| {
        // SAFETY: described by the shim, for this call, with four numbers.
        let (operands, numbers) = unsafe { (tensors(operands, n), slice(numbers, 4)) };
        // SAFETY: a C string from the shim.
        let name = unsafe { CStr::from_ptr(name) };
        let scan = Asked::Scan {
            length: numbers[0],
            reverse: numbers[1] != 0,
            carried: numbers[2].max(0) as usize,
            states: numbers[3].max(0) as usize,
        };
        let (name, asked) = match name.to_bytes() {
            b"cond" => ("cond", Asked::Branch),
            b"while_loop" => ("while_loop", Asked::While),
            b"scan" => ("scan", scan),
            b"map" => ("map", scan),
            _ => return Err(Error::new(ErrorKind::Value, format!("no control flow is {name:?}")).into()),
        };
        let stream = s.engine.stream(device.max(0) as usize)?;
        stream.control(name, asked, &operands, crate::sites::here(), &switches(s), &random(s, device))
    });
    answer(done.map(|made| made.map_err(str::to_owned)), device, reply)
}

/// Generators that ops of the body were given in this thread, and that their callers keep.
fn random(s: &State, device: i32) -> impl Fn(Option<usize>, u64) -> (u64, u64) {
    move |generator, blocks| draw(s, device, generator, blocks)
}

fn why((why, site): (&'static str, Site)) -> String {
    format!("{why}{}", at(site))
}
