//! The fake's C functions.
//!
//! Safety of the whole file: the functions are called through the PJRT C API, whose contract is that argument structs
//! are readable and writable up to `struct_size` and hold live objects of this plugin.

use std::mem::offset_of;
use std::ptr::null_mut;

use oxitorch_pjrt_sys as sys;

use parking_lot::Mutex;

use super::objects::*;
use super::{RELEASED, STATE};

type Status = *mut sys::PJRT_Error;

/// Declares the functions of the table: each is counted, may be told to fail, and refuses a small argument struct.
macro_rules! functions {
    ($($slot:ident($args:ident: $ty:ident) $body:block)*) => {
        /// A table with every function of the fake.
        pub(super) fn table() -> sys::PJRT_Api {
            // SAFETY: zeros are an empty table.
            let mut table: sys::PJRT_Api = unsafe { std::mem::zeroed() };
            table.struct_size = size_of::<sys::PJRT_Api>();
            table.pjrt_api_version.struct_size = size_of::<sys::PJRT_Api_Version>();
            table.pjrt_api_version.major_version = sys::PJRT_API_MAJOR as i32;
            table.pjrt_api_version.minor_version = sys::PJRT_API_MINOR as i32;
            table.PJRT_Error_Destroy = Some(error_destroy);
            table.PJRT_Error_Message = Some(error_message);
            table.PJRT_Error_GetCode = Some(error_code);
            $(table.$slot = Some($slot);)*
            table
        }

        /// Empties a slot; false if there is none of that name.
        pub(super) fn clear(table: &mut sys::PJRT_Api, name: &str) -> bool {
            match name {
                $(stringify!($slot) => table.$slot = None,)*
                _ => return false,
            }
            true
        }

        /// The names of all.
        pub(super) const NAMES: &[&str] = &[$(stringify!($slot)),*];

        /// Where a slot is.
        pub(super) fn offset(name: &str) -> Option<usize> {
            match name {
                $(stringify!($slot) => Some(offset_of!(sys::PJRT_Api, $slot)),)*
                _ => None,
            }
        }

        $(
            #[allow(non_snake_case, reason = "named like its slot")]
            unsafe extern "C" fn $slot(args: *mut sys::$ty) -> Status {
                let name = stringify!($slot);
                // SAFETY: see the file's documentation.
                let $args = unsafe { &mut *args };
                if let Err((code, message)) = enter(name, $args.struct_size, size_of::<sys::$ty>()) {
                    return give(Error { code, message });
                }
                #[allow(clippy::redundant_closure_call, reason = "bodies leave early with `?`")]
                let result: Result<(), (u32, String)> = (|| $body)();
                match result {
                    Ok(()) => null_mut(),
                    Err((code, message)) => give(Error { code, message }),
                }
            }
        )*
    };
}

fn enter(name: &'static str, given: usize, known: usize) -> Result<(), (u32, String)> {
    let mut state = STATE.lock();
    *state.calls.entry(name).or_default() += 1;
    let wanted = known + state.struct_growth;
    if given < wanted {
        return Err((
            3,
            format!("unexpected size of the arguments of {name}: expected {wanted}, got {given}"),
        ));
    }
    match state.next_failures.get_mut(name) {
        Some((0, _)) => {
            let next = state.next_failures.remove(name);
            return Err(next.map_or_else(Default::default, |(_, failure)| failure));
        }
        Some((calls, _)) => *calls -= 1,
        None => {}
    }
    state.failures.get(name).cloned().map_or(Ok(()), Err)
}

unsafe extern "C" fn error_destroy(args: *mut sys::PJRT_Error_Destroy_Args) {
    // SAFETY: see the file's documentation.
    unsafe { free::<Error>((*args).error) }
}

unsafe extern "C" fn error_message(args: *mut sys::PJRT_Error_Message_Args) {
    // SAFETY: see the file's documentation.
    unsafe {
        let error = get::<Error>((*args).error.cast_mut());
        (*args).message = error.message.as_ptr().cast();
        (*args).message_size = error.message.len();
    }
}

unsafe extern "C" fn error_code(args: *mut sys::PJRT_Error_GetCode_Args) -> Status {
    // SAFETY: see the file's documentation.
    unsafe { (*args).code = get::<Error>((*args).error.cast_mut()).code };
    null_mut()
}

unsafe extern "C" fn serialized_destroy(serialized: *mut sys::PJRT_SerializedExecutable) {
    // SAFETY: see the file's documentation.
    unsafe { free::<Serialized>(serialized) }
}

/// The fake's device behind a device, description or memory pointer: one object is all three.
fn device_at<'a, C>(ptr: *mut C) -> &'a Device {
    // SAFETY: devices are leaked, never changed after they were made, and see the file's documentation.
    unsafe { &*ptr.cast::<Device>() }
}

/// The event of something that may have failed by itself.
fn event_of(error: Option<(u32, String)>) -> *mut sys::PJRT_Event {
    let error = error.or_else(|| STATE.lock().failed_values.clone());
    give(Event { error })
}

/// Why a device does not compute.
fn failure_on(device: i32) -> Option<(u32, String)> {
    let state = STATE.lock();
    state.failed_device.as_ref().filter(|(id, _)| *id == device).map(|(_, failure)| failure.clone())
}

/// A callback for when an event happens.
struct Waiting {
    callback: unsafe extern "C" fn(*mut sys::PJRT_Error, *mut std::ffi::c_void),
    error: *mut sys::PJRT_Error,
    argument: *mut std::ffi::c_void,
}

// SAFETY: callbacks are called on any thread.
unsafe impl Send for Waiting {}

static WAITING: Mutex<Vec<Waiting>> = Mutex::new(Vec::new());

impl Waiting {
    fn call(self) {
        // SAFETY: the callback and its argument belong together; it is called once.
        unsafe { (self.callback)(self.error, self.argument) };
    }
}

/// Calls who waits for events.
pub(super) fn call_back() {
    let waiting = std::mem::take(&mut *WAITING.lock());
    waiting.into_iter().for_each(Waiting::call);
}

fn invalid(message: &str) -> (u32, String) {
    (3, message.into())
}

const NAME: &str = "fake";

functions! {
    PJRT_Plugin_Initialize(_a: PJRT_Plugin_Initialize_Args) { Ok(()) }
    PJRT_Plugin_Attributes(a: PJRT_Plugin_Attributes_Args) {
        a.num_attributes = 0;
        Ok(())
    }
    PJRT_Event_Destroy(a: PJRT_Event_Destroy_Args) {
        // SAFETY: see the file's documentation.
        unsafe { free::<Event>(a.event) };
        Ok(())
    }
    PJRT_Event_IsReady(a: PJRT_Event_IsReady_Args) {
        a.is_ready = !STATE.lock().held;
        Ok(())
    }
    PJRT_Event_Await(a: PJRT_Event_Await_Args) {
        let mut state = STATE.lock();
        RELEASED.wait_while(&mut state, |s| s.held);
        drop(state);
        // SAFETY: see the file's documentation.
        unsafe { get::<Event>(a.event) }.error.clone().map_or(Ok(()), Err)
    }
    PJRT_Event_OnReady(a: PJRT_Event_OnReady_Args) {
        // SAFETY: see the file's documentation.
        let event = unsafe { get::<Event>(a.event) };
        let error = event.error.clone().map_or(null_mut(), |(code, message)| give(Error { code, message }));
        let callback = a.callback.ok_or_else(|| invalid("null callback"))?;
        let waiting = Waiting { callback, error, argument: a.user_arg };
        let held = STATE.lock().held;
        if held {
            WAITING.lock().push(waiting);
        } else {
            waiting.call();
        }
        Ok(())
    }
    PJRT_Client_Create(a: PJRT_Client_Create_Args) {
        let state = STATE.lock();
        let (count, elsewhere) = (state.devices, state.elsewhere);
        drop(state);
        let all_devices: Vec<_> = (0..(count + elsewhere) as i32).map(new_device).collect();
        a.client = give(Client { devices: all_devices[..count].to_vec(), all_devices });
        Ok(())
    }
    PJRT_Client_Destroy(a: PJRT_Client_Destroy_Args) {
        // SAFETY: see the file's documentation.
        unsafe { free::<Client>(a.client) };
        Ok(())
    }
    PJRT_Client_PlatformName(a: PJRT_Client_PlatformName_Args) {
        (a.platform_name, a.platform_name_size) = (NAME.as_ptr().cast(), NAME.len());
        Ok(())
    }
    PJRT_Client_PlatformVersion(a: PJRT_Client_PlatformVersion_Args) {
        (a.platform_version, a.platform_version_size) = (NAME.as_ptr().cast(), NAME.len());
        Ok(())
    }
    PJRT_Client_ProcessIndex(a: PJRT_Client_ProcessIndex_Args) {
        a.process_index = 0;
        Ok(())
    }
    PJRT_Client_AddressableDevices(a: PJRT_Client_AddressableDevices_Args) {
        // SAFETY: see the file's documentation.
        let client = unsafe { get::<Client>(a.client) };
        a.addressable_devices = client.devices.as_ptr();
        a.num_addressable_devices = client.devices.len();
        Ok(())
    }
    PJRT_Client_Devices(a: PJRT_Client_Devices_Args) {
        // SAFETY: see the file's documentation.
        let client = unsafe { get::<Client>(a.client) };
        a.devices = client.all_devices.as_ptr();
        a.num_devices = client.all_devices.len();
        Ok(())
    }
    PJRT_Device_GetDescription(a: PJRT_Device_GetDescription_Args) {
        a.device_description = a.device.cast();
        Ok(())
    }
    PJRT_DeviceDescription_Id(a: PJRT_DeviceDescription_Id_Args) {
        a.id = device_at(a.device_description).id;
        Ok(())
    }
    PJRT_DeviceDescription_ProcessIndex(a: PJRT_DeviceDescription_ProcessIndex_Args) {
        a.process_index = 0;
        Ok(())
    }
    PJRT_DeviceDescription_Kind(a: PJRT_DeviceDescription_Kind_Args) {
        (a.device_kind, a.device_kind_size) = (NAME.as_ptr().cast(), NAME.len());
        Ok(())
    }
    PJRT_DeviceDescription_DebugString(a: PJRT_DeviceDescription_DebugString_Args) {
        (a.debug_string, a.debug_string_size) = (NAME.as_ptr().cast(), NAME.len());
        Ok(())
    }
    PJRT_DeviceDescription_Attributes(a: PJRT_DeviceDescription_Attributes_Args) {
        a.num_attributes = 0;
        Ok(())
    }
    PJRT_Device_AddressableMemories(a: PJRT_Device_AddressableMemories_Args) {
        a.memories = device_at(a.device).memories.as_ptr();
        a.num_memories = 1;
        Ok(())
    }
    PJRT_Device_DefaultMemory(a: PJRT_Device_DefaultMemory_Args) {
        a.memory = device_at(a.device).memories[0];
        Ok(())
    }
    PJRT_Device_MemoryStats(_a: PJRT_Device_MemoryStats_Args) { Err((12, "not counted".into())) }
    PJRT_Memory_Id(a: PJRT_Memory_Id_Args) {
        a.id = device_at(a.memory).id;
        Ok(())
    }
    PJRT_Memory_Kind(a: PJRT_Memory_Kind_Args) {
        (a.kind, a.kind_size) = (NAME.as_ptr().cast(), NAME.len());
        Ok(())
    }
    PJRT_Client_Compile(a: PJRT_Client_Compile_Args) {
        if a.compile_options_size == 0 {
            return Err(invalid("empty options"));
        }
        // SAFETY: see the file's documentation.
        let (client, code, options) = unsafe {
            let p = &*a.program;
            let options = std::slice::from_raw_parts(a.compile_options.cast::<u8>(), a.compile_options_size);
            (get::<Client>(a.client), std::slice::from_raw_parts(p.code.cast::<u8>(), p.code_size), options)
        };
        let mut state = STATE.lock();
        state.compile_options.push(options.to_vec());
        let text = String::from_utf8_lossy(code).into_owned();
        let refused = state.refused.iter().find(|word| text.contains(*word)).cloned();
        state.programs.push(text);
        drop(state);
        if let Some(word) = refused {
            return Err((13, format!("no code for `{word}`")));
        }
        let ids = assigned(options).map_err(|e| invalid(&e))?;
        let devices = client.assigned(&ids);
        let program = Program::parse(code, ids).map_err(|e| invalid(&e))?;
        a.executable = give(Loaded { program, devices });
        Ok(())
    }
    PJRT_LoadedExecutable_Destroy(a: PJRT_LoadedExecutable_Destroy_Args) {
        // SAFETY: see the file's documentation.
        unsafe { free::<Loaded>(a.executable) };
        Ok(())
    }
    PJRT_LoadedExecutable_GetExecutable(a: PJRT_LoadedExecutable_GetExecutable_Args) {
        // SAFETY: see the file's documentation.
        let loaded = unsafe { get::<Loaded>(a.loaded_executable) };
        a.executable = give(Executable(loaded.program.clone()));
        Ok(())
    }
    PJRT_LoadedExecutable_AddressableDevices(a: PJRT_LoadedExecutable_AddressableDevices_Args) {
        // SAFETY: see the file's documentation.
        let loaded = unsafe { get::<Loaded>(a.executable) };
        a.addressable_devices = loaded.devices.as_ptr();
        a.num_addressable_devices = loaded.devices.len();
        Ok(())
    }
    PJRT_Executable_Destroy(a: PJRT_Executable_Destroy_Args) {
        // SAFETY: see the file's documentation.
        unsafe { free::<Executable>(a.executable) };
        Ok(())
    }
    PJRT_Executable_NumOutputs(a: PJRT_Executable_NumOutputs_Args) {
        // SAFETY: see the file's documentation.
        a.num_outputs = unsafe { get::<Executable>(a.executable) }.0.ranks.len();
        Ok(())
    }
    PJRT_Executable_OutputElementTypes(a: PJRT_Executable_OutputElementTypes_Args) {
        // SAFETY: see the file's documentation.
        let types = &unsafe { get::<Executable>(a.executable) }.0.output_types;
        (a.output_types, a.num_output_types) = (types.as_ptr().cast_mut(), types.len());
        Ok(())
    }
    PJRT_Executable_OutputDimensions(a: PJRT_Executable_OutputDimensions_Args) {
        // SAFETY: see the file's documentation.
        let program = &unsafe { get::<Executable>(a.executable) }.0;
        (a.dims, a.dim_sizes, a.num_outputs) = (program.dims.as_ptr(), program.ranks.as_ptr(), program.ranks.len());
        Ok(())
    }
    PJRT_Executable_SizeOfGeneratedCodeInBytes(a: PJRT_Executable_SizeOfGeneratedCodeInBytes_Args) {
        a.size_in_bytes = 0;
        Ok(())
    }
    PJRT_Executable_GetCompiledMemoryStats(a: PJRT_Executable_GetCompiledMemoryStats_Args) {
        a.temp_size_in_bytes = 0;
        Ok(())
    }
    PJRT_Executable_Serialize(a: PJRT_Executable_Serialize_Args) {
        // SAFETY: see the file's documentation.
        let program = &unsafe { get::<Executable>(a.executable.cast_mut()) }.0;
        let ids: Vec<String> = program.devices.iter().map(i64::to_string).collect();
        let serialized = Serialized([ids.join(",").as_bytes(), b"\n", &program.text].concat());
        (a.serialized_bytes, a.serialized_bytes_size) = (serialized.0.as_ptr().cast(), serialized.0.len());
        a.serialized_executable = give(serialized);
        a.serialized_executable_deleter = Some(serialized_destroy);
        Ok(())
    }
    PJRT_Executable_DeserializeAndLoad(a: PJRT_Executable_DeserializeAndLoad_Args) {
        // SAFETY: see the file's documentation.
        let (client, text) = unsafe {
            let bytes = a.serialized_executable.cast::<u8>();
            (get::<Client>(a.client), std::slice::from_raw_parts(bytes, a.serialized_executable_size))
        };
        let at = text.iter().position(|b| *b == b'\n').ok_or_else(|| invalid("no devices"))?;
        let ids = String::from_utf8_lossy(&text[..at]).split(',').filter_map(|id| id.parse().ok()).collect();
        let program = Program::parse(&text[at + 1..], ids).map_err(|e| invalid(&e))?;
        let devices = client.assigned(&program.devices);
        a.loaded_executable = give(Loaded { program, devices });
        Ok(())
    }
    PJRT_LoadedExecutable_Execute(a: PJRT_LoadedExecutable_Execute_Args) {
        // SAFETY: see the file's documentation.
        unsafe { execute(a) }
    }
    PJRT_Client_BufferFromHostBuffer(a: PJRT_Client_BufferFromHostBuffer_Args) {
        // SAFETY: see the file's documentation.
        let bytes = unsafe {
            let dims = if a.num_dims == 0 { &[] } else { std::slice::from_raw_parts(a.dims, a.num_dims) };
            let len = dims.iter().product::<i64>() as usize * element_bytes(a.type_);
            std::slice::from_raw_parts(a.data.cast::<u8>(), len).to_vec()
        };
        a.buffer = give(Buffer { error: None, bytes, deleted: false.into() });
        a.done_with_host_buffer = give(Event { error: None });
        Ok(())
    }
    PJRT_Buffer_Destroy(a: PJRT_Buffer_Destroy_Args) {
        // SAFETY: see the file's documentation.
        unsafe { free::<Buffer>(a.buffer) };
        Ok(())
    }
    PJRT_Buffer_Delete(a: PJRT_Buffer_Delete_Args) {
        // SAFETY: see the file's documentation.
        unsafe { get::<Buffer>(a.buffer) }.deleted.set(true);
        Ok(())
    }
    PJRT_Buffer_IsDeleted(a: PJRT_Buffer_IsDeleted_Args) {
        // SAFETY: see the file's documentation.
        a.is_deleted = unsafe { get::<Buffer>(a.buffer) }.deleted.get();
        Ok(())
    }
    PJRT_Buffer_OnDeviceSizeInBytes(a: PJRT_Buffer_OnDeviceSizeInBytes_Args) {
        // SAFETY: see the file's documentation.
        let bytes = unsafe { get::<Buffer>(a.buffer) }.bytes.len();
        a.on_device_size_in_bytes = match STATE.lock().tile {
            0 => bytes,
            tile => bytes.next_multiple_of(tile),
        };
        Ok(())
    }
    PJRT_Buffer_ReadyEvent(a: PJRT_Buffer_ReadyEvent_Args) {
        // SAFETY: see the file's documentation.
        a.event = event_of(unsafe { get::<Buffer>(a.buffer) }.error.clone());
        Ok(())
    }
    PJRT_Buffer_ToHostBuffer(a: PJRT_Buffer_ToHostBuffer_Args) {
        // SAFETY: see the file's documentation.
        let buffer = unsafe { get::<Buffer>(a.src) };
        if buffer.deleted.get() {
            return Err(invalid("buffer has been deleted or donated"));
        }
        if a.dst_size < buffer.bytes.len() {
            return Err(invalid("the destination is too small"));
        }
        // SAFETY: the destination has `dst_size` bytes.
        unsafe { std::ptr::copy_nonoverlapping(buffer.bytes.as_ptr(), a.dst.cast::<u8>(), buffer.bytes.len()) };
        a.event = event_of(buffer.error.clone());
        Ok(())
    }
    PJRT_Buffer_UnsafePointer(a: PJRT_Buffer_UnsafePointer_Args) {
        // SAFETY: see the file's documentation.
        a.buffer_pointer = unsafe { get::<Buffer>(a.buffer) }.bytes.as_ptr() as usize;
        Ok(())
    }
    PJRT_Buffer_IncreaseExternalReferenceCount(_a: PJRT_Buffer_IncreaseExternalReferenceCount_Args) { Ok(()) }
    PJRT_Buffer_DecreaseExternalReferenceCount(_a: PJRT_Buffer_DecreaseExternalReferenceCount_Args) { Ok(()) }
    PJRT_Buffer_OpaqueDeviceMemoryDataPointer(a: PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args) {
        // SAFETY: see the file's documentation.
        let bytes = &unsafe { get::<Buffer>(a.buffer) }.bytes;
        a.device_memory_ptr = bytes.as_ptr().cast_mut().cast();
        Ok(())
    }
    PJRT_Client_CreateViewOfDeviceBuffer(a: PJRT_Client_CreateViewOfDeviceBuffer_Args) {
        // Real plugins call it without looking, and crash.
        assert!(a.on_delete_callback.is_some(), "null on_delete callback");
        Err((12, "no views".into()))
    }
}

/// # Safety
/// See the file's documentation.
unsafe fn execute(a: &mut sys::PJRT_LoadedExecutable_Execute_Args) -> Result<(), (u32, String)> {
    // SAFETY: see the file's documentation; lists have the lengths that the arguments say.
    unsafe {
        let Loaded { program, devices } = get::<Loaded>(a.executable);
        if a.num_devices != devices.len() {
            return Err(invalid("arguments for other devices than the program's"));
        }
        let options = &*a.options;
        let kept = match options.num_non_donatable_input_indices {
            0 => &[],
            n => std::slice::from_raw_parts(options.non_donatable_input_indices, n),
        };
        for (device, &on) in devices.iter().enumerate() {
            let error = failure_on(device_at(on).id);
            let list = *a.argument_lists.add(device);
            let buffers: Vec<_> = (0..a.num_args).map(|i| get::<Buffer>(*list.add(i))).collect();
            if buffers.iter().any(|b| b.deleted.get()) {
                return Err(invalid("buffer has been deleted or donated"));
            }
            let mut dims = &program.dims[..];
            for (i, (&ty, &rank)) in program.output_types.iter().zip(&program.ranks).enumerate() {
                let (these, rest) = dims.split_at(rank);
                dims = rest;
                let len = these.iter().product::<i64>() as usize * element_bytes(ty);
                let same = buffers.iter().find(|b| b.bytes.len() == len);
                let bytes = same.map_or_else(|| vec![0; len], |b| b.bytes.clone());
                let buffer = Buffer { error: error.clone(), bytes, deleted: false.into() };
                *(*a.output_lists.add(device)).add(i) = give(buffer);
            }
            for (i, buffer) in buffers.into_iter().enumerate() {
                let donated = program.donated.contains(&i) && !kept.contains(&(i as i64));
                buffer.deleted.set(buffer.deleted.get() || donated);
            }
            if !a.device_complete_events.is_null() {
                *a.device_complete_events.add(device) = event_of(error);
            }
        }
        Ok(())
    }
}
