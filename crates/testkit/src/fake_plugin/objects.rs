//! The objects behind the fake's opaque pointers, and what the fake compiler reads in a program.

use std::cell::Cell;

use oxitorch_pjrt_sys as sys;
use oxitorch_proto::{CompileOptionsProto, Message};

use super::STATE;

/// An object whose pointer goes through C; `KIND` is its name in `FakePlugin::live`.
pub(super) trait Object: Sized {
    const KIND: &'static str;
    /// The opaque C type.
    type C;
}

macro_rules! objects {
    ($($object:ty = $c:ty, $kind:literal;)*) => { $(
        impl Object for $object {
            const KIND: &'static str = $kind;
            type C = $c;
        }
    )* };
}

objects! {
    Error = sys::PJRT_Error, "error";
    Client = sys::PJRT_Client, "client";
    Executable = sys::PJRT_Executable, "executable";
    Serialized = sys::PJRT_SerializedExecutable, "serialized executable";
    Loaded = sys::PJRT_LoadedExecutable, "loaded executable";
    Buffer = sys::PJRT_Buffer, "buffer";
    Event = sys::PJRT_Event, "event";
}

pub(super) struct Error {
    pub(super) code: u32,
    pub(super) message: String,
}

pub(super) struct Client {
    /// Pointers to leaked devices: they must keep their addresses.
    pub(super) devices: Vec<*mut sys::PJRT_Device>,
    /// Those of other processes too.
    pub(super) all_devices: Vec<*mut sys::PJRT_Device>,
}

impl Client {
    /// The devices of a program that this process can run it on.
    pub(super) fn assigned(&self, ids: &[i64]) -> Vec<*mut sys::PJRT_Device> {
        ids.iter().filter_map(|&id| self.devices.get(id as usize).copied()).collect()
    }
}

/// The ids of the devices that the options of a program name.
pub(super) fn assigned(options: &[u8]) -> Result<Vec<i64>, String> {
    let options = CompileOptionsProto::decode(options).map_err(|e| e.to_string())?;
    let build = options.executable_build_options.ok_or("no build options")?;
    let Some(assignment) = build.device_assignment else { return Ok(vec![0]) };
    Ok(assignment.computation_devices.into_iter().flat_map(|c| c.replica_device_ids).collect())
}

/// A device and its description and memory, all at one address.
pub(super) struct Device {
    pub(super) id: i32,
    pub(super) memories: [*mut sys::PJRT_Memory; 1],
}

#[derive(Clone)]
pub(super) struct Program {
    pub(super) text: Vec<u8>,
    pub(super) output_types: Vec<u32>,
    pub(super) dims: Vec<i64>,
    pub(super) ranks: Vec<usize>,
    pub(super) donated: Vec<usize>,
    /// Ids of its devices.
    pub(super) devices: Vec<i64>,
}

pub(super) struct Executable(pub(super) Program);

pub(super) struct Serialized(pub(super) Vec<u8>);

pub(super) struct Loaded {
    pub(super) program: Program,
    pub(super) devices: Vec<*mut sys::PJRT_Device>,
}

pub(super) struct Buffer {
    /// Why it could not be computed.
    pub(super) error: Option<(u32, String)>,
    pub(super) bytes: Vec<u8>,
    pub(super) deleted: Cell<bool>,
}

pub(super) struct Event {
    pub(super) error: Option<(u32, String)>,
}

/// Hands an object to C.
pub(super) fn give<O: Object>(object: O) -> *mut O::C {
    *STATE.lock().live.entry(O::KIND).or_default() += 1;
    Box::into_raw(Box::new(object)).cast()
}

/// Takes an object back and drops it.
///
/// # Safety
/// `ptr` is from `give::<O>` and is not used again.
pub(super) unsafe fn free<O: Object>(ptr: *mut O::C) {
    *STATE.lock().live.entry(O::KIND).or_default() -= 1;
    // SAFETY: passed on to the caller.
    drop(unsafe { Box::from_raw(ptr.cast::<O>()) });
}

/// Looks at an object.
///
/// # Safety
/// `ptr` is from `give::<O>` and is live.
pub(super) unsafe fn get<'a, O: Object>(ptr: *mut O::C) -> &'a O {
    // SAFETY: passed on to the caller.
    unsafe { &*ptr.cast::<O>() }
}

/// A device that lives for ever.
pub(super) fn new_device(id: i32) -> *mut sys::PJRT_Device {
    let device: &'static mut Device = Box::leak(Box::new(Device { id, memories: [std::ptr::null_mut()] }));
    let ptr = std::ptr::from_mut(device);
    device.memories[0] = ptr.cast();
    ptr.cast()
}

impl Program {
    pub(super) fn parse(code: &[u8], devices: Vec<i64>) -> Result<Program, String> {
        let mut program = Program {
            text: code.to_vec(),
            output_types: vec![],
            dims: vec![],
            ranks: vec![],
            donated: vec![],
            devices,
        };
        let text = String::from_utf8_lossy(code);
        if let Some((_, main)) = text.split_once("@main(") {
            let read = program.signature(main, &axes(&text));
            return read.map(|()| program).ok_or_else(|| "cannot read `@main`".into());
        }
        for word in text.split_whitespace() {
            if let Some(ty) = word.strip_prefix("output=") {
                program.output(ty).ok_or_else(|| format!("bad type `{ty}`"))?;
            } else if let Some(index) = word.strip_prefix("donate=") {
                program.donated.push(index.parse().map_err(|_| format!("bad index `{index}`"))?);
            } else if word == "nonsense" {
                return Err("the program is nonsense".into());
            }
        }
        Ok(program)
    }

    /// Parameters and results of a StableHLO function.
    fn signature(&mut self, main: &str, axes: &[(&str, i64)]) -> Option<()> {
        let line = main.lines().next()?;
        let (params, results) = line.split_once(" -> ")?;
        for (i, param) in params.split("%arg").skip(1).enumerate() {
            if param.contains("jax.buffer_donor") || param.contains("tf.aliasing_output") {
                self.donated.push(i);
            }
        }
        for ty in results.split("tensor<").skip(1) {
            let (sizes, attributes) = ty.split_once('>')?;
            let (dims, name) = sizes.rsplit_once('x').unwrap_or(("", sizes));
            let name = match name.strip_prefix('i') {
                Some("1") => "pred".to_owned(),
                Some(bits) => format!("s{bits}"),
                None => name.replace("ui", "u"),
            };
            let parts = |dim: &str| {
                let axes = axes.iter().filter(|(name, _)| dim.contains(&format!("{name:?}")));
                axes.map(|(_, size)| size).product::<i64>()
            };
            let cut = attributes.split_once("<@mesh, [").map_or("", |(_, dims)| dims);
            let mut parts =
                cut.split('{').skip(1).map(|dim| parts(dim.split('}').next().unwrap_or_default()));
            let dims = dims.split('x').filter(|d| !d.is_empty());
            let local = |d: &str| Some((d.parse::<i64>().ok()? / parts.next().unwrap_or(1)).to_string());
            let dims = dims.map(local).collect::<Option<Vec<_>>>()?.join(",");
            self.output(&format!("{name}[{dims}]"))?;
        }
        Some(())
    }

    fn output(&mut self, ty: &str) -> Option<()> {
        let (name, dims) = ty.strip_suffix(']')?.split_once('[')?;
        let dims: Vec<i64> =
            dims.split(',').filter(|d| !d.is_empty()).map(|d| d.parse().ok()).collect::<Option<_>>()?;
        self.output_types.push(match name {
            "pred" => sys::PJRT_Buffer_Type_PRED,
            "u8" => sys::PJRT_Buffer_Type_U8,
            "u64" => sys::PJRT_Buffer_Type_U64,
            "bf16" => sys::PJRT_Buffer_Type_BF16,
            "s32" => sys::PJRT_Buffer_Type_S32,
            "s64" => sys::PJRT_Buffer_Type_S64,
            "f32" => sys::PJRT_Buffer_Type_F32,
            "f64" => sys::PJRT_Buffer_Type_F64,
            _ => return None,
        });
        self.ranks.push(dims.len());
        self.dims.extend(dims);
        Some(())
    }
}

/// The axes of the mesh that a module's text has.
fn axes(text: &str) -> Vec<(&str, i64)> {
    let mesh = text.split_once("sdy.mesh @mesh = <[").and_then(|(_, rest)| rest.split_once("]>"));
    mesh.map_or("", |(axes, _)| axes)
        .split(", ")
        .filter_map(|axis| {
            let (name, size) = axis.split_once('=')?;
            Some((name.trim_matches('"'), size.parse().ok()?))
        })
        .collect()
}

/// Bytes of one element.
pub(super) fn element_bytes(ty: u32) -> usize {
    match ty {
        sys::PJRT_Buffer_Type_PRED | sys::PJRT_Buffer_Type_S8 | sys::PJRT_Buffer_Type_U8 => 1,
        sys::PJRT_Buffer_Type_S16 | sys::PJRT_Buffer_Type_U16 | sys::PJRT_Buffer_Type_F16 => 2,
        sys::PJRT_Buffer_Type_BF16 => 2,
        sys::PJRT_Buffer_Type_S64 | sys::PJRT_Buffer_Type_U64 | sys::PJRT_Buffer_Type_F64 => 8,
        _ => 4,
    }
}
