//! Buffers: values on a device.

use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use oxitorch_pjrt_sys as sys;
use parking_lot::Mutex;
use smallvec::SmallVec;
use sys::{Args, CStruct};

use crate::api::{Api, call, destroy, non_null};
use crate::client::Client;
use crate::device::{Device, Memory};
use crate::element::{BufferType, ElementType};
use crate::error::{Error, Result, err};
use crate::event::Event;
use crate::platform::Platform;

/// A value on a device. The memory is freed when it is dropped and no launched program needs it any more.
pub struct Buffer {
    ptr: NonNull<sys::PJRT_Buffer>,
    home: Arc<Home>,
    /// Which of `home`'s types it has.
    which: u32,
    device: u32,
    /// Held while references are counted: the plugin keeps them in a list that it does not lock.
    references: Mutex<()>,
}

// SAFETY: PJRT buffers may be used and destroyed from any thread; the C API synchronises, and where not, `references`.
unsafe impl Send for Buffer {}
// SAFETY: as above; no method changes the Rust value.
unsafe impl Sync for Buffer {}

/// What buffers share: their client, and their types, which an executable records once for all its results.
pub(crate) struct Home {
    client: Arc<Client>,
    types: SmallVec<[(BufferType, usize); 1]>,
}

impl Home {
    pub(crate) fn one(client: Arc<Client>, ty: BufferType) -> Result<Arc<Home>> {
        Home::many(client, [ty])
    }

    pub(crate) fn many(
        client: Arc<Client>,
        types: impl IntoIterator<Item = BufferType>,
    ) -> Result<Arc<Home>> {
        let types = types.into_iter().map(|t| t.checked_bytes().map(|bytes| (t, bytes)));
        Ok(Arc::new(Home { client, types: types.collect::<Result<_>>()? }))
    }

    pub(crate) fn client(&self) -> &Arc<Client> {
        &self.client
    }

    pub(crate) fn ty(&self, which: usize) -> &BufferType {
        &self.types[which].0
    }

    pub(crate) fn bytes(&self, which: usize) -> usize {
        self.types[which].1
    }

    /// Whether the memory of a type is the host's, and holds it row-major as the host does.
    pub(crate) fn is_host_memory(&self, which: usize) -> bool {
        let element = self.ty(which).dtype;
        self.client.platform() == Platform::Cpu && element.bits() == 8 * element.host_bytes()
    }

    pub(crate) fn types(&self) -> impl ExactSizeIterator<Item = &BufferType> {
        self.types.iter().map(|(t, _)| t)
    }
}

impl Buffer {
    pub(crate) fn from_raw(
        ptr: NonNull<sys::PJRT_Buffer>,
        home: Arc<Home>,
        which: usize,
        device: usize,
    ) -> Buffer {
        Buffer { ptr, home, which: which as u32, device: device as u32, references: Mutex::new(()) }
    }

    /// The client it lives in.
    pub fn client(&self) -> &Arc<Client> {
        &self.home.client
    }

    /// The device it is on.
    pub fn device(&self) -> &Device {
        &self.home.client.devices()[self.device as usize]
    }

    pub(crate) fn device_index(&self) -> usize {
        self.device as usize
    }

    pub(crate) fn ptr(&self) -> *mut sys::PJRT_Buffer {
        self.ptr.as_ptr()
    }

    fn api(&self) -> &Api {
        self.home.client.api()
    }

    /// Element type and dimensions.
    pub fn ty(&self) -> &BufferType {
        self.home.ty(self.which as usize)
    }

    /// Element type.
    pub fn dtype(&self) -> ElementType {
        self.ty().dtype
    }

    /// Dimensions; for bounded dynamic dimensions the bounds.
    pub fn dims(&self) -> &[i64] {
        &self.ty().dims
    }

    /// Bytes of the dense value on the host.
    pub fn size_bytes(&self) -> usize {
        self.home.bytes(self.which as usize)
    }

    /// Bytes that it takes on the device, padding included.
    pub fn on_device_bytes(&self) -> Result<usize> {
        let mut args = Args::<sys::PJRT_Buffer_OnDeviceSizeInBytes_Args>::new();
        args.buffer = self.ptr();
        // SAFETY: the buffer is live.
        unsafe { call!(self.api(), PJRT_Buffer_OnDeviceSizeInBytes, args) }?;
        Ok(args.on_device_size_in_bytes)
    }

    /// Copies the value to the host, row-major, and waits for it.
    pub fn to_host(&self, out: &mut [u8]) -> Result<()> {
        // The plugin would have another thread copy it: two thread switches, which cost more than most copies.
        if out.len() == self.size_bytes() && self.look(|bytes| out.copy_from_slice(bytes))?.is_some() {
            return Ok(());
        }
        // SAFETY: `out` outlives the wait.
        let copied = unsafe { self.to_host_async(out.as_mut_ptr(), out.len()) };
        copied.and_then(|event| event.wait()).map_err(|e| self.explain("to_host", e))
    }

    /// Waits for the value and shows its bytes, row-major, where they are; nothing if that is not in the host's memory.
    pub fn look<T>(&self, f: impl FnOnce(&[u8]) -> T) -> Result<Option<T>> {
        let Some(reference) = self.pin()? else { return Ok(None) };
        let memory = reference.address() as *const u8;
        // SAFETY: the memory has the value's bytes, is pinned, and nobody writes a value that is computed.
        let bytes = unsafe { std::slice::from_raw_parts(memory, self.size_bytes()) };
        Ok(Some(f(bytes)))
    }

    /// Waits for the value and pins its memory, if that is the host's.
    pub(crate) fn pin(&self) -> Result<Option<ExternalReference<'_>>> {
        if self.size_bytes() == 0 || !self.home.is_host_memory(self.which as usize) {
            return Ok(None);
        }
        self.external_reference().map(Some).map_err(|e| self.explain("to_host", e))
    }

    /// Gives back a reference that was forgotten.
    pub(crate) fn unpin(&self) {
        drop(ExternalReference { buffer: self, address: 0 });
    }

    /// Waits until the value is computed.
    pub fn wait(&self) -> Result<()> {
        self.ready_event().and_then(|event| event.wait()).map_err(|e| self.explain("wait", e))
    }

    /// `Error::Deleted` if that is why something failed. Plugins report it late and as one of many invalid arguments.
    #[cold]
    pub(crate) fn explain(&self, what: &str, error: Error) -> Error {
        match self.is_deleted() {
            Ok(true) => Error::Deleted { what: what.into() },
            _ => error,
        }
    }

    /// Starts a copy of the value to the host, row-major; it is done when the event is.
    ///
    /// # Safety
    /// `out` is valid for writes of `len` bytes, and for nothing else, until the event has happened.
    pub unsafe fn to_host_async(&self, out: *mut u8, len: usize) -> Result<Event> {
        if len != self.size_bytes() {
            let (ty, bytes) = (self.ty(), self.size_bytes());
            return Err(err::invalid(format!("to_host: {ty} has {bytes} bytes, the destination {len}")));
        }
        // A null or dangling destination would ask for the size instead of the data.
        let mut nothing = 0u64;
        let out: *mut c_void = if len == 0 { (&raw mut nothing).cast() } else { out.cast() };
        let rank = self.dims().len() as i64;
        let minor_to_major: SmallVec<[i64; 8]> = (0..rank).rev().collect();
        let mut layout = sys::PJRT_Buffer_MemoryLayout::sized();
        layout.type_ = sys::PJRT_Buffer_MemoryLayout_Type_Tiled;
        layout.__bindgen_anon_1.tiled = sys::PJRT_Buffer_MemoryLayout_Tiled::sized();
        // SAFETY: `tiled` was written just now.
        let tiled = unsafe { &mut layout.__bindgen_anon_1.tiled };
        tiled.minor_to_major = minor_to_major.as_ptr();
        tiled.minor_to_major_size = minor_to_major.len();
        let mut args = Args::<sys::PJRT_Buffer_ToHostBuffer_Args>::new();
        args.src = self.ptr();
        args.dst = out;
        args.dst_size = len;
        if self.client().platform() != Platform::Cpu {
            // The CPU plugin's buffers are row-major themselves.
            args.host_layout = &mut layout;
        }
        // SAFETY: the destination has the bytes of the value (the caller's promise); layouts live through the call.
        unsafe { call!(self.api(), PJRT_Buffer_ToHostBuffer, args) }?;
        let event = Event::from_raw(*self.api(), args.event, Some(self.client().clone()));
        if len == 0 {
            event.wait()?; // `nothing` goes out of scope
        }
        Ok(event)
    }

    /// Copies the value to the host, row-major, as soon as it is computed, and then calls `then`, on a thread of the plugin's
    /// or on this one; an error is what went wrong. `then` must not wait for the device.
    pub fn to_host_then(&self, then: impl FnOnce(Result<Box<[u8]>>) + Send + 'static) -> Result<()> {
        let len = self.size_bytes();
        let mut bytes = vec![0u8; len].into_boxed_slice();
        // SAFETY: `bytes` has the length and is not touched until the event has happened: the callback has it, or it is
        // waited for below.
        let event = unsafe { self.to_host_async(bytes.as_mut_ptr(), len) }?;
        let bytes = Arc::new(Mutex::new(Some(bytes)));
        let own = bytes.clone();
        let asked = event.on_ready(move |outcome| {
            let bytes = own.lock().take().unwrap_or_default();
            then(outcome.map(|()| bytes));
        });
        if asked.is_err() {
            let _ = event.wait(); // the memory is written until then, whatever comes of it
        }
        drop(bytes);
        asked
    }

    /// An event that happens when the value is computed.
    pub fn ready_event(&self) -> Result<Event> {
        let mut args = Args::<sys::PJRT_Buffer_ReadyEvent_Args>::new();
        args.buffer = self.ptr();
        // SAFETY: the buffer is live.
        unsafe { call!(self.api(), PJRT_Buffer_ReadyEvent, args) }?;
        Ok(Event::from_raw(*self.api(), args.event, Some(self.client().clone())))
    }

    /// Whether the memory is gone: `delete` was called, or it was donated.
    pub fn is_deleted(&self) -> Result<bool> {
        let mut args = Args::<sys::PJRT_Buffer_IsDeleted_Args>::new();
        args.buffer = self.ptr();
        // SAFETY: the buffer is live (its object, though perhaps not its memory).
        unsafe { call!(self.api(), PJRT_Buffer_IsDeleted, args) }?;
        Ok(args.is_deleted)
    }

    /// Frees the memory now; later uses are errors.
    pub fn delete(&self) -> Result<()> {
        let mut args = Args::<sys::PJRT_Buffer_Delete_Args>::new();
        args.buffer = self.ptr();
        // SAFETY: the buffer is live.
        unsafe { call!(self.api(), PJRT_Buffer_Delete, args) }
    }

    /// A copy on another device of the same client.
    pub fn copy_to_device(&self, device: &Device) -> Result<Buffer> {
        self.client().check_device(device)?;
        let mut args = Args::<sys::PJRT_Buffer_CopyToDevice_Args>::new();
        args.buffer = self.ptr();
        args.dst_device = device.ptr.as_ptr();
        // SAFETY: buffer and device are live and of one client.
        unsafe { call!(self.api(), PJRT_Buffer_CopyToDevice, args) }
            .map_err(|e| self.explain("copy_to_device", e))?;
        let ptr = non_null("PJRT_Buffer_CopyToDevice", args.dst_buffer)?;
        Ok(Buffer::from_raw(ptr, self.home.clone(), self.which as usize, device.index()))
    }

    /// Waits for the value and pins its memory for code outside the plugin.
    pub fn external_reference(&self) -> Result<ExternalReference<'_>> {
        self.wait()?;
        let counting = self.references.lock();
        let mut increase = Args::<sys::PJRT_Buffer_IncreaseExternalReferenceCount_Args>::new();
        increase.buffer = self.ptr();
        // SAFETY: the buffer is live.
        unsafe { call!(self.api(), PJRT_Buffer_IncreaseExternalReferenceCount, increase) }?;
        let mut args = Args::<sys::PJRT_Buffer_OpaqueDeviceMemoryDataPointer_Args>::new();
        args.buffer = self.ptr();
        // SAFETY: the buffer is live.
        let asked = unsafe { call!(self.api(), PJRT_Buffer_OpaqueDeviceMemoryDataPointer, args) };
        drop(counting);
        // Dropping it decreases the count again.
        let reference = ExternalReference { buffer: self, address: args.device_memory_ptr as usize };
        asked.map(|()| reference)
    }

    /// A copy in another memory of the same client, for instance a device's `pinned_host`.
    pub fn copy_to_memory(&self, memory: &Memory, device: &Device) -> Result<Buffer> {
        self.client().check_device(device)?;
        if !device.memories().iter().any(|m| m.ptr == memory.ptr) {
            return Err(err::invalid(format!("copy_to_memory: {device:?} cannot address {memory:?}")));
        }
        let mut args = Args::<sys::PJRT_Buffer_CopyToMemory_Args>::new();
        args.buffer = self.ptr();
        args.dst_memory = memory.ptr.as_ptr();
        // SAFETY: buffer and memory are live and of one client.
        unsafe { call!(self.api(), PJRT_Buffer_CopyToMemory, args) }
            .map_err(|e| self.explain("copy_to_memory", e))?;
        let ptr = non_null("PJRT_Buffer_CopyToMemory", args.dst_buffer)?;
        Ok(Buffer::from_raw(ptr, self.home.clone(), self.which as usize, device.index()))
    }

    /// The address of the memory. It is good while the buffer lives and is not donated, and only means something to
    /// code that runs where the memory is.
    pub fn unsafe_pointer(&self) -> Result<usize> {
        let mut args = Args::<sys::PJRT_Buffer_UnsafePointer_Args>::new();
        args.buffer = self.ptr();
        // SAFETY: the buffer is live.
        unsafe { call!(self.api(), PJRT_Buffer_UnsafePointer, args) }
            .map_err(|e| self.explain("unsafe_pointer", e))?;
        Ok(args.buffer_pointer)
    }
}

/// Keeps a buffer's memory where it is while code outside the plugin uses it: a buffer that has one is not donated.
pub struct ExternalReference<'a> {
    buffer: &'a Buffer,
    address: usize,
}

impl ExternalReference<'_> {
    /// The address of the memory.
    pub fn address(&self) -> usize {
        self.address
    }
}

impl Drop for ExternalReference<'_> {
    fn drop(&mut self) {
        let mut args = Args::<sys::PJRT_Buffer_DecreaseExternalReferenceCount_Args>::new();
        args.buffer = self.buffer.ptr();
        let _counting = self.buffer.references.lock();
        // SAFETY: the buffer is live, and its count was increased when this was made.
        unsafe { destroy!(self.buffer.api(), PJRT_Buffer_DecreaseExternalReferenceCount, args) };
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let mut args = Args::<sys::PJRT_Buffer_Destroy_Args>::new();
        args.buffer = self.ptr();
        // SAFETY: the buffer is ours and not used after this.
        unsafe { destroy!(self.api(), PJRT_Buffer_Destroy, args) };
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({}, device {})", self.ty(), self.device)
    }
}
